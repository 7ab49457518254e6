"""Every sampling parameter against plain Python, over steps with drafts, in batches that mix all kinds."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.history import SampledSequence
from baton.engine.sampling.logprobs import logprobs_of, unpack
from baton.engine.sampling.sampler import choose, draw_noise, edit_logits, process_logits
from baton.engine.sampling.sampling_table import SamplingTable, rows_of
from baton.engine.speculation.verify import Verified
from baton.engine.step.runner import Runner
from baton.kernels.sampling.logprobs import top_ids
from baton.kvcache.pool import KVPool
from baton.tests.engine import reference_sampler as reference
from baton.tests.engine.driver import Driver
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import EOS, request_of, toy_engine

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
VOCAB = 11
EOS_IDS = (10, 3)

token_ids = st.integers(0, VOCAB - 1)
any_params = st.builds(
    SamplingParams,
    max_tokens=st.just(64),
    temperature=st.sampled_from([0.0, 0.0, 0.6, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 2, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.sampled_from([(), (1,), (5, 6)]),
    min_tokens=st.sampled_from([0, 0, 1, 3, 9]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 0.25, 4.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 3.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.75, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.5]),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    allowed_token_ids=st.none() | st.none() | st.lists(token_ids, min_size=1, max_size=6).map(tuple),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
)
sequences = st.builds(
    SampledSequence,
    params=any_params,
    choice=st.integers(0, 3),
    prompt_token_ids=st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    output_token_ids=st.lists(token_ids, max_size=5).map(tuple),
)


def emitted(token_ids, accepted):
    return Verified(token_ids_BQ=torch.tensor(token_ids), accepted_len_B=torch.tensor(accepted))


def random_logits(*shape, seed):
    """Quarter steps: ties are frequent, and every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 8).round() / 4


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=5), k=st.integers(0, 3), data=st.integers(0, 10**6))
def test_steps_with_drafts_against_reference(batch, k, data):
    rng = random.Random(data)
    table = SamplingTable(num_slots=8, vocab_size=VOCAB, device=CPU, eos_token_ids=EOS_IDS)
    slots = rng.sample(range(8), len(batch))
    for slot in range(8):  # whoever was there before leaves nothing behind
        table.place(slot, SampledSequence(params=rng.choice(batch).params, prompt_token_ids=(1, 2, 3)))
        table.advance(torch.tensor([slot]), emitted([[7, 7, 8]], [2]))
        table.release(slot)
    for slot, sequence in zip(slots, batch, strict=True):
        table.place(slot, sequence)
    params = [sequence.params for sequence in batch]
    outputs = [list(sequence.output_token_ids) for sequence in batch]
    for step in range(4):
        running = sorted(rng.sample(range(len(batch)), rng.randint(1, len(batch))))
        drafts = [[rng.randrange(VOCAB) for _ in range(k)] for _ in running]
        logits_BQV = random_logits(len(running), k + 1, VOCAB, seed=data * 5 + step)
        sampling = table.rows([slots[row] for row in running], [params[row] for row in running])
        position_B = torch.tensor([len(batch[row].prompt_token_ids) + len(outputs[row]) for row in running])
        noise = draw_noise(sampling, position_B, k + 1, VOCAB, torch.float64)
        ids_BQ = choose(logits_BQV, sampling, noise, torch.tensor(drafts, dtype=torch.int64).view(len(running), k))
        accepted = [rng.randint(0, k) for _ in running]
        for at, row in enumerate(running):
            sequence = batch[row]
            for j in range(k + 1):
                expected = reference.choose(
                    logits_BQV[at, j].tolist(),
                    params[row],
                    sequence.prompt_token_ids,
                    [*outputs[row], *drafts[at][:j]],
                    choice=sequence.choice,
                    eos=EOS_IDS,
                )
                assert ids_BQ[at, j] == expected
            outputs[row] += ids_BQ[at, : accepted[at] + 1].tolist()
        table.advance(torch.tensor([slots[row] for row in running]), emitted(ids_BQ.tolist(), accepted))


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(sequence=sequences, data=st.integers(0, 10**6))
def test_processed_logits_against_reference(sequence, data):
    logits = random_logits(VOCAB, seed=data)
    sampling = rows_of([sequence], VOCAB, CPU, EOS_IDS)
    params = sequence.params
    if sampling is None:
        return
    edited = edit_logits(logits[None, None], sampling)
    args = (logits.tolist(), params, sequence.prompt_token_ids, sequence.output_token_ids, EOS_IDS)
    expected = reference.edited(*args)
    assert edited[0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    if not params.greedy:
        left = reference.kept(expected, params)
        for token, value in enumerate(process_logits(edited, sampling)[0, 0].tolist()):
            assert value == (pytest.approx(left[token], abs=1e-9) if token in left else -math.inf)


def edits_of(logits, output=(), prompt=(0,), drafts=None, **values):
    sequence = SampledSequence(
        params=SamplingParams(temperature=0.0, **values), prompt_token_ids=prompt, output_token_ids=output
    )
    sampling = rows_of([sequence], len(logits), CPU, (0,))
    rows = 1 if drafts is None else len(drafts) + 1
    drafts_BK = None if drafts is None else torch.tensor([drafts])
    logits_BQV = torch.tensor(logits, dtype=torch.float64).expand(1, rows, -1)
    return edit_logits(logits_BQV, sampling, drafts_BK)[0].tolist()


def test_by_hand():
    no = -math.inf
    assert edits_of([2.0, -2.0, 1.0], output=(1,), repetition_penalty=2.0) == [[1.0, -4.0, 1.0]]
    assert edits_of([2.0, -2.0, 1.0], output=(1, 1), frequency_penalty=0.5) == [[2.0, -3.0, 1.0]]
    assert edits_of([2.0, -2.0, 1.0], output=(1, 1), presence_penalty=0.5) == [[2.0, -2.5, 1.0]]
    assert edits_of([0.0] * 3, drafts=[1, 1, 2], frequency_penalty=1.0) == [
        [0, 0, 0],
        [0, -1, 0],
        [0, -2, 0],
        [0, -2, -1],
    ]
    assert edits_of([0.0] * 3, drafts=[1, 2], bad_words=((1, 2, 0), (1,))) == [[0, no, 0], [0, no, 0], [no, no, 0]]
    assert edits_of([0.0] * 3, output=(2,), drafts=[1, 1], bad_words=((2, 1, 0), (1, 0))) == [
        [0, 0, 0],
        [no, 0, 0],
        [no, 0, 0],
    ]
    assert edits_of([0.0] * 3, prompt=(2,), bad_words=((2, 1),)) == [[0, 0, 0]], "the prompt's end does not count"
    assert edits_of([0.0] * 3, drafts=[1, 1], min_tokens=2, stop_token_ids=(2,)) == [[no, 0, no]] * 2 + [[0, 0, 0]]
    assert edits_of([1.0, 2.0, 3.0], allowed_token_ids=(0, 0, 2)) == [[1, no, 3]]
    assert edits_of([1.0, 2.0, 3.0], allowed_token_ids=(2,), bad_words=((2,),)) == [[no, no, 3]], "one must be left"


def test_plain_batches_pay_nothing(monkeypatch):
    table = SamplingTable(num_slots=4, vocab_size=VOCAB, device=CPU)
    plain = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=3)]
    for slot, params in enumerate(plain):
        table.place(slot, SampledSequence(params=params))
    assert table.rows([0], plain[:1]) is None
    sampling = table.rows([0, 1], plain)
    assert sampling.edits is None
    assert sampling.min_p_S is None
    assert sampling.logprobs is None
    for name in ("scatter", "cat", "stack"):
        monkeypatch.setattr(torch, name, lambda *_: pytest.fail("work for nobody"))
    table.advance(torch.tensor([0, 1]), emitted([[0] * 3] * 2, [0, 0]))
    # A table with a neighbour that wants more: this batch is as plain as before.
    monkeypatch.undo()
    table.place(2, SampledSequence(params=SamplingParams(presence_penalty=1.0)))
    assert table.rows([0, 1], plain).edits is None
    table.release(2)
    assert table.rows([0], plain[:1]) is None


@settings(max_examples=150, deadline=None)
@given(data=st.integers(0, 10**6), num_top=st.integers(0, 20), spread=st.sampled_from([1, 8]))
@pytest.mark.long
def test_logprobs_against_reference(data, num_top, spread):
    rng = random.Random(data)
    logits_NV = random_logits(6, 13, seed=data) * spread
    if data % 3 == 0:
        logits_NV[0, rng.sample(range(13), 9)] = -math.inf
    tokens = [rng.randrange(13) for _ in range(6)]
    for row, packed in enumerate(logprobs_of(logits_NV, torch.tensor(tokens), num_top).tolist()):
        got = unpack(packed, num_top)
        logprob, rank, top = reference.logprobs(logits_NV[row].tolist(), tokens[row], num_top)
        assert (got.token_id, got.rank) == (tokens[row], rank)
        assert math.isfinite(got.logprob)
        assert got.logprob == (pytest.approx(logprob, abs=1e-12) if logprob != -math.inf else got.logprob)
        assert [token for token, _ in got.top] == [token for token, _ in top]
        finite = [(a, b) for (_, a), (_, b) in zip(got.top, top, strict=True) if b != -math.inf]
        assert [a for a, _ in finite] == pytest.approx([b for _, b in finite], abs=1e-12)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_a_report_is_as_long_as_what_was_asked_for_whatever_the_vocabulary(num_top):
    for vocab_size in (30, 3000):
        packed_NX = logprobs_of(random_logits(2, vocab_size, seed=1), torch.tensor([4, 29]), num_top)
        assert packed_NX.shape == (2, 2 * num_top + 3)


def test_the_likeliest_of_many_equals():
    logits_NV = torch.zeros(3, 5000)
    logits_NV[1, [4000, 70]] = 1.0
    logits_NV[2, 4999] = 2.0
    assert top_ids(logits_NV, 4).tolist() == [[0, 1, 2, 3], [70, 4000, 0, 1], [4999, 0, 1, 2]]
    assert top_ids(torch.full((1, 9), -math.inf), 3).tolist() == [[0, 1, 2]]


# The engine, on the toy model.

MODEL = ToyModel()
KINDS = {
    "plain": {},
    "min_p": {"min_p": 0.3},
    "bias": {"logit_bias": ((3, 2.5), (7, -100.0), (9, 1.0))},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.2},
    "rewarded": {"frequency_penalty": -1.0},
    "bad_words": {"bad_words": ((3,), (0, 17), (14, 9), (14, 3), (7, 8, 5), (10, 7))},
    "allowed": {"allowed_token_ids": tuple(range(0, 24, 2))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(1, 9)), "ignore_eos": False},
    "everything": {
        "min_p": 0.05,
        "top_k": 9,
        "top_p": 0.9,
        "logit_bias": ((3, 2.5),),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "bad_words": ((3,), (4, 5)),
        "allowed_token_ids": tuple(range(1, 20)),
        "min_tokens": 3,
        "logprobs": 2,
    },
}


def logits_after(token_ids):
    from baton.tests.engine.reference import toy_logits

    return toy_logits(MODEL, token_ids)


def kinds_requests(k, temperature):
    base = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "temperature": temperature}
    return [request_of([5, 6, 7], k=k, **(base | values)) for values in KINDS.values()]


@pytest.fixture(scope="module")
def expected():
    found = {}
    for temperature in (0.0, 1.0):
        for request in kinds_requests(0, temperature):
            found[request.sampling] = reference.generate(logits_after, [5, 6, 7], request.sampling, eos=(EOS,))
    return found


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 6])
def test_every_parameter_and_every_k_gives_the_references_tokens(k, temperature, expected):
    requests = kinds_requests(k, temperature)
    for request, result in zip(requests, toy_engine(k=k, max_num_sequences=5).generate(requests), strict=True):
        tokens, reports = expected[request.sampling]
        assert list(result.token_ids) == tokens
        if request.sampling.logprobs is None:
            assert result.logprobs is None
            continue
        for report, token, (logprob, rank, top) in zip(result.logprobs, tokens, reports, strict=True):
            assert (report.token_id, report.rank) == (token, rank)
            assert report.logprob == pytest.approx(logprob, abs=1e-9)
            assert [other for other, _ in report.top] == [other for other, _ in top]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_change_the_answer(temperature, expected):
    answers = [tuple(expected[request.sampling][0]) for request in kinds_requests(0, temperature)]
    plain, *others = answers
    unchanged = [kind for answer, kind in zip(others, list(KINDS)[1:], strict=True) if answer == plain]
    assert unchanged == (["min_p"] if temperature == 0 else []), "min-p leaves the likeliest token alone"
    assert len(set(others)) >= len(others) - 1


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_obey_too(kind):
    """Drafts are made by the same rules, so that they are not refused for them: a head that is right stays right."""
    from baton.tests.engine.toy import PerfectToyModel

    for temperature in (0.0, 1.3):
        values = {"max_tokens": 1 + 4 * 4, "ignore_eos": True, "seed": 3, "temperature": temperature} | KINDS[kind]
        [result] = toy_engine(PerfectToyModel(), k=3).generate([request_of([5, 6], k=3, **values)])
        num_refused = result.counts.num_draft_tokens - result.counts.num_accepted_tokens
        assert num_refused <= (3 if kind == "min_tokens" else 0)  # the end may cut the last step


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.long
def test_several_answers(k):
    request = request_of([5, 6], k=k, n=4, max_tokens=9, temperature=1.0, seed=8, ignore_eos=True, logprobs=1)
    other = request_of([9], k=k, max_tokens=5, ignore_eos=True)
    results = toy_engine(k=k, max_num_sequences=3).generate([request, other])
    assert [(result.key, result.choice) for result in results] == [
        *((request.key, choice) for choice in range(4)),
        (other.key, 0),
    ]
    for result in results[:4]:
        tokens, _ = reference.generate(logits_after, [5, 6], request.sampling, choice=result.choice)
        assert list(result.token_ids) == tokens
    assert len({result.token_ids for result in results[:4]}) == 4
    [alone] = toy_engine(k=0).generate(
        [request_of([5, 6], k=0, max_tokens=9, temperature=1.0, seed=8, ignore_eos=True)]
    )
    assert alone.token_ids == results[0].token_ids, "the first choice is the only one of n = 1"
    streamed = {choice: [] for choice in range(4)}
    again = dataclasses.replace(request, key=dataclasses.replace(request.key, attempt=2))
    for event in toy_engine(k=k, max_num_sequences=3).run(again):
        streamed[event.choice] += event.token_ids
    assert [tuple(tokens) for tokens in streamed.values()] == [result.token_ids for result in results[:4]]


@pytest.mark.parametrize("chunk_len", [1, 4, 64])
def test_prompt_logprobs(chunk_len):
    prompt = [5, 6, 7, 1, 1, 20]
    requests = [
        request_of(prompt, max_tokens=2, prompt_logprobs=3, ignore_eos=True, n=2),
        request_of(prompt[:3], max_tokens=2, prompt_logprobs=0, ignore_eos=True),
        request_of([3], max_tokens=1, prompt_logprobs=1, ignore_eos=True),
        request_of(prompt, max_tokens=2, ignore_eos=True),
    ]
    results = toy_engine(chunk_len=chunk_len).generate(requests)
    assert [len(result.prompt_logprobs or ()) for result in results] == [5, 0, 2, 0, 0]
    assert [result.prompt_logprobs is None for result in results] == [False, True, False, False, True]
    for at, report in enumerate(results[0].prompt_logprobs):
        logprob, rank, top = reference.logprobs(logits_after(prompt[: at + 1]), prompt[at + 1], 3)
        assert (report.token_id, report.rank) == (prompt[at + 1], rank)
        assert report.logprob == pytest.approx(logprob, abs=1e-9)
        assert [token for token, _ in report.top] == [token for token, _ in top]


@pytest.mark.long
@pytest.mark.parametrize("chunk_len", [2, 64])
@pytest.mark.parametrize("knows_next", [False, True])
@pytest.mark.parametrize("output_len", [1, 4])
def test_a_sequence_computed_again_goes_on_as_before(output_len, knows_next, chunk_len):
    """What preemption does: the output so far becomes part of what is prefilled, and stays output for sampling."""
    params = dataclasses.replace(
        request_of([1], k=2, **KINDS["everything"]).sampling, max_tokens=12, temperature=1.0, min_tokens=6, seed=4
    )
    prompt = (5, 6, 7)
    whole, _ = reference.generate(logits_after, list(prompt), params, eos=(EOS,))
    pool = KVPool(MODEL.kv_layout(4), 20, CPU)
    driver = Driver(Runner(MODEL, pool, max_num_seqs=1, num_draft_tokens=2, eos_token_ids=(EOS,)), pool)
    tokens = (*prompt, *whole[:output_len])
    if knows_next:  # its newest token was sampled before the preemption
        driver.place(0, tokens, params, num_output=output_len, knows_next=True)
        assert driver.compute(0, chunk_len=chunk_len) == whole[output_len - 1]
        output = whole[:output_len]
    else:  # an earlier attempt's output, which another worker computed
        driver.place(0, tokens, params, num_output=output_len)
        output = [*whole[:output_len], driver.compute(0, chunk_len=chunk_len)]
    while len(output) < len(whole):
        output += driver.decode([0])[0]
    assert output[: len(whole)] == whole
