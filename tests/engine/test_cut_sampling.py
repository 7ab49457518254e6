"""Ranks that share a vocabulary choose what one process chooses: every parameter, every mode of verification, logprobs.

Here ranks are threads that gather through memory; one process with whole rows is the reference, which other tests hold
against plain Python.
"""

import contextlib
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.requests.sampling import SamplingParams
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine.grammar.masks import apply_bitmask
from baton.engine.sampling.history import SampledSequence
from baton.engine.sampling.logprobs import logprobs_of
from baton.engine.sampling.sampler import Limits, choose, draw_noise, order_keys, process_logits, truncate
from baton.engine.sampling.sampling_table import SamplingTable, rows_of
from baton.engine.speculation.verifiers import make_verifier
from baton.engine.speculation.verify import DraftProbs, Verified
from baton.kernels.sampling.noise import Purpose, gumbel
from baton.model.vocab import WHOLE
from baton.tests.engine import reference_sampler as reference
from baton.tests.engine.test_sampling_parameters import EOS_IDS, VOCAB, any_params, random_logits, sequences
from baton.tests.engine.test_verifiers import MODES, Batch, NoHostReads
from baton.tests.model.together import part_of, together

CPU = torch.device("cpu")
NUM_RANKS = (2, 3, 4, 8)  # 11 tokens: none divides them, and the last rank of 8 has none at all


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_steps(batch, k, data, vocab):
    """(ids, processed logits of the sampled, logprobs) of four steps with drafts, as one of the ranks sees them."""
    rng = random.Random(data)
    table = SamplingTable(num_slots=8, vocab_size=VOCAB, device=CPU, eos_token_ids=EOS_IDS, vocab=vocab)
    for slot, sequence in enumerate(batch):
        table.place(slot, sequence)
    params = [sequence.params for sequence in batch]
    made = []
    for step in range(4):
        running = sorted(rng.sample(range(len(batch)), rng.randint(1, len(batch))))
        drafts = torch.tensor([[rng.randrange(VOCAB) for _ in range(k)] for _ in running], dtype=torch.int64)
        raw_BQV = random_logits(len(running), k + 1, VOCAB, seed=data * 5 + step)
        logits = part_of(raw_BQV, vocab)
        sampling = table.rows(running, [params[row] for row in running])
        position_B = torch.arange(len(running)) * 7 + step
        noise = draw_noise(sampling, position_B, k + 1, logits.shape[-1], torch.float64, vocab)
        ids_BQ = choose(logits, sampling, noise, drafts.view(len(running), k), vocab)
        processed = logprobs = torch.empty(0)
        if sampling is not None and sampling.num_sampled:
            processed = vocab.gather(process_logits(logits[sampling.index_S], sampling, None, vocab))
        if sampling is not None and sampling.logprobs is not None:
            index_L, num_top = sampling.logprobs.index_L, sampling.logprobs.num_top
            logprobs = logprobs_of(logits[index_L].flatten(0, 1), ids_BQ[index_L].flatten(), num_top, vocab)
        made.append((ids_BQ, processed, logprobs))
        accepted_B = torch.tensor([rng.randint(0, k) for _ in running])
        table.advance(torch.tensor(running), Verified(token_ids_BQ=ids_BQ, accepted_len_B=accepted_B))
    return made


@settings(max_examples=25, deadline=None)
@given(
    batch=st.lists(sequences, min_size=1, max_size=5),
    k=st.integers(0, 3),
    data=st.integers(0, 10**6),
    size=st.sampled_from(NUM_RANKS),
)
def test_every_parameter_gives_the_tokens_of_one_process(batch, k, data, size):
    wanted = run_steps(batch, k, data, WHOLE)
    results, _ = together(size, VOCAB, lambda vocab: run_steps(batch, k, data, vocab))
    for result in results:
        for got, want in zip(result, wanted, strict=True):
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            assert got[2].tolist() == [pytest.approx(row, abs=1e-12) for row in want[2].tolist()]


def kept_by(logits, params, vocab):
    """Ids that are left of one row."""
    sampling = rows_of([SampledSequence(params=params)], logits.shape[-1], CPU, vocab=vocab)
    processed = vocab.gather(process_logits(part_of(logits[None, None], vocab), sampling, None, vocab))[0, 0]
    return [token for token, value in enumerate(processed.tolist()) if value != -math.inf]


CUTS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 257, "top_p": 0.9},
    {"top_k": 4999},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 600, "top_p": 0.95, "min_p": 0.001},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", ["spread", "ties", "one value", "few tokens"])
def test_top_k_and_top_p_of_a_wide_vocabulary(kind, cut, dtype):
    generator = torch.Generator().manual_seed(5)
    logits_V = torch.randn(1003, generator=generator, dtype=torch.float64) * 3
    match kind:
        case "ties":
            logits_V = logits_V.round()
        case "one value":
            logits_V = torch.full_like(logits_V, 0.37)
        case "few tokens":
            logits_V[torch.randperm(1003, generator=generator)[:990]] = -torch.inf
    logits_V = logits_V.to(dtype)
    params = SamplingParams(temperature=0.7, **cut)
    wanted = kept_by(logits_V, params, WHOLE)
    assert wanted == sorted(reference.kept(logits_V.tolist(), params)) or dtype == torch.float32
    for size in (2, 8):
        results, _ = together(size, 1003, lambda vocab: kept_by(logits_V, params, vocab))
        assert results == [wanted] * size


@settings(max_examples=25, deadline=None)
@given(data=st.integers(0, 10**6), top_k=st.integers(0, 12), top_p=st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]))
def test_borders_that_are_met_exactly(data, top_k, top_p):
    """Powers of two, so that sums of probabilities meet p itself; rows and parameters are mixed."""
    generator = torch.Generator().manual_seed(data)
    logits_UQV = torch.randint(0, 4, (3, 2, 11), generator=generator).double() * -math.log(2.0)
    logits_UQV -= logits_UQV.amax(-1, keepdim=True)
    top_k_U, top_p_U = torch.tensor([top_k, 0, 3]), torch.tensor([top_p, top_p, 1.0], dtype=torch.float64)
    for top_ks, limits in ((top_k_U, Limits()), (torch.tensor([max(top_k, 1), 12, 3]), Limits(top_k_bound=12))):
        wanted = truncate(logits_UQV, top_ks, top_p_U)
        work = partial(truncated_part, logits_UQV, top_ks, top_p_U, limits)
        for size in (2, 8):
            results, _ = together(size, 11, work)
            assert all(torch.equal(result, wanted) for result in results)


def truncated_part(logits_UQV, top_k_U, top_p_U, limits, vocab):
    return vocab.gather(truncate(part_of(logits_UQV, vocab), top_k_U, top_p_U, vocab, limits))


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_keys_have_the_order_of_numbers(dtype):
    info = torch.finfo(dtype)
    values = [math.inf, info.max, 3.0, 1.0 + info.eps, 1.0, info.tiny, 0.0, -info.tiny, -1.0, info.min, -math.inf]
    keys = order_keys(torch.tensor(values, dtype=dtype)).tolist()
    assert keys == sorted(set(keys))
    assert len(keys) == len(values)
    assert order_keys(torch.tensor([-0.0], dtype=dtype)) == order_keys(torch.tensor([0.0], dtype=dtype))
    num_bits = 8 * dtype.itemsize - 1
    assert all(-(1 << num_bits) <= key < 1 << num_bits for key in keys)


@pytest.mark.fast
@settings(max_examples=25, deadline=None)
@given(data=st.integers(0, 10**6), num_top=st.integers(0, 20), size=st.sampled_from(NUM_RANKS))
@pytest.mark.long
def test_logprobs_against_reference(data, num_top, size):
    rng = random.Random(data)
    logits_NV = random_logits(6, 13, seed=data)
    if data % 3 == 0:
        logits_NV[0, rng.sample(range(13), 9)] = -math.inf
    tokens = [rng.randrange(13) for _ in range(6)]
    wanted = logprobs_of(logits_NV, torch.tensor(tokens), num_top)
    results, meeting = together(
        size, 13, lambda vocab: logprobs_of(part_of(logits_NV, vocab), torch.tensor(tokens), num_top, vocab)
    )
    for result in results:
        assert result.shape == wanted.shape
        assert result.tolist() == [pytest.approx(row, abs=1e-12) for row in wanted.tolist()]
    assert meeting.num_operations == [2] * size
    for row in range(6):
        logprob, rank, top = reference.logprobs(logits_NV[row].tolist(), tokens[row], min(num_top, 13))
        packed = results[0][row].tolist()
        assert packed[-1] == rank
        assert packed[len(top) + 2 : -1] == [token for token, _ in top]
        assert packed[0] == pytest.approx(logprob, abs=1e-12) or logprob == -math.inf


@pytest.mark.fast
@pytest.mark.parametrize("size", NUM_RANKS)
def test_each_rank_makes_the_noise_of_its_own_tokens(size):
    seeds = torch.tensor([3, 1 << 50])
    arguments = (seeds, seeds % 5, torch.tensor([17, 900]), Purpose.SAMPLE)
    whole = gumbel(*arguments, 53, torch.float64)

    def work(vocab):
        return vocab.gather(gumbel(*arguments, vocab.width(53), torch.float64, vocab.first))

    results, _ = together(size, 53, work)
    assert all(torch.equal(result, whole) for result in results)


@pytest.mark.fast
@pytest.mark.parametrize(("size", "multiple"), [(2, 1), (3, 1), (5, 1), (8, 16)])
def test_a_grammars_bits_are_cut_too(size, multiple):
    generator = torch.Generator().manual_seed(1)
    logits_RQV = torch.randn(3, 2, 101, generator=generator)
    bitmask_RQW = torch.randint(-(1 << 31), 1 << 31, (3, 2, 4), generator=generator).to(torch.int32)
    wanted = apply_bitmask(logits_RQV, bitmask_RQW)

    def work(vocab):
        return vocab.gather(apply_bitmask(part_of(logits_RQV, vocab), bitmask_RQW, vocab.first))

    results, _ = together(size, 101, work, multiple)
    assert all(torch.equal(result, wanted) for result in results)


def cut_inputs(inputs, vocab):
    """What one rank has of a step; of drafts' distributions its own tokens', whatever the head's columns are."""
    probs, noise = inputs.draft_probs, inputs.noise_SQV
    if probs is not None:
        t2d_V = probs.t2d_V
        probs_SKV = probs.probs_SKC[..., t2d_V.clamp(min=0)].masked_fill(t2d_V < 0, 0.0)
        probs = DraftProbs(part_of(probs_SKV, vocab, 0.0), None)
    return replace(
        inputs,
        draft_probs=probs,
        target_logits_BQV=part_of(inputs.target_logits_BQV, vocab),
        noise_SQV=None if noise is None else part_of(noise, vocab, 0.0),
        vocab=vocab,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "num_drafts"), [(2, 0), pytest.param(2, 3, marks=pytest.mark.fast), (3, 1), (8, 1), (2, 6)]
)
@pytest.mark.parametrize("config", MODES, ids=lambda config: f"{config.mode.value}-{config.block}")
def test_every_mode_of_verification(config, size, num_drafts):
    """Mixed batches whose unreadable parts are NaN; nothing is read on the host."""
    if config.mode is VerificationMode.FORCE:
        config = VerificationConfig.force(min(2, num_drafts))
    verifier = make_verifier(config, num_drafts)
    inputs = Batch(config, num_drafts=num_drafts).inputs(verifier.draft_law)
    wanted = verifier.verify(inputs)

    def work(vocab):
        mine = cut_inputs(inputs, vocab)
        with NoHostReads() if size == 2 else contextlib.nullcontext():
            return verifier.verify(mine)

    results, _ = together(size, inputs.target_logits_BQV.shape[-1], work)
    for verified in results:
        assert torch.equal(verified.accepted_len_B, wanted.accepted_len_B)
        assert torch.equal(verified.token_ids_BQ, wanted.token_ids_BQ)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("values", "num_operations"),
    [
        ([{"temperature": 0.0}], 1),
        ([{"temperature": 0.0, "presence_penalty": 1.0}], 1),
        ([{"temperature": 0.0, "logit_bias": ((3, 1.0),)}], 1),
        ([{"temperature": 0.0, "bad_words": ((3,),)}], 2),
        ([{}], 2),
        ([{}, {"temperature": 0.0}, {"min_p": 0.1, "frequency_penalty": 1.0}], 2),
        ([{"top_k": 3}], 2 + 1),
        ([{"top_p": 0.5, "top_k": 3}, {}], 2 + 1),
        ([{"top_k": 257}], 2 + 6),
        ([{"top_p": 0.5}], 2 + 6),
        ([{"top_p": 0.5, "top_k": 3}, {"top_p": 0.3}], 2 + 6 + 6),
    ],
)
@pytest.mark.long
def test_how_often_ranks_must_tell_each_other(values, num_operations):
    batch = [SampledSequence(params=SamplingParams(**value), prompt_token_ids=(1,)) for value in values]
    logits_BQV = random_logits(len(batch), 3, VOCAB, seed=1)

    def work(vocab):
        sampling = rows_of(batch, VOCAB, CPU, vocab=vocab)
        logits = part_of(logits_BQV, vocab)
        noise = draw_noise(sampling, torch.arange(len(batch)), 3, logits.shape[-1], torch.float64, vocab)
        return choose(logits, sampling, noise, torch.zeros(len(batch), 2, dtype=torch.int64), vocab)

    _, meeting = together(4, VOCAB, work)
    assert meeting.num_operations == [num_operations] * 4


@pytest.mark.fast
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"allowed_token_ids": (9,)}, {9}),
        ({"allowed_token_ids": (2, 9)}, {2, 9}),
        ({"allowed_token_ids": (9,), "bad_words": ((9,),)}, {9}),
        ({"allowed_token_ids": (2, 9), "bad_words": ((9,),)}, {2}),
        ({"bad_words": tuple((token,) for token in range(10))}, {10}),
        ({"bad_words": tuple((token,) for token in range(VOCAB))}, set(range(VOCAB))),
        ({"min_tokens": 3, "stop_token_ids": tuple(range(1, VOCAB))}, {0}),
    ],
)
@pytest.mark.long
def test_a_mask_is_ignored_only_if_it_leaves_no_token_at_any_rank(asked, left, temperature):
    sequence = SampledSequence(params=SamplingParams(temperature=temperature, seed=4, **asked))
    logits_1QV = random_logits(1, 40, VOCAB, seed=6)

    def work(vocab):
        sampling = rows_of([sequence], VOCAB, CPU, vocab=vocab)
        logits = part_of(logits_1QV, vocab)
        noise = draw_noise(sampling, torch.tensor([3]), 40, logits.shape[-1], torch.float64, vocab)
        return set(choose(logits, sampling, noise, None, vocab).flatten().tolist())

    for size in (2, 4):
        results, _ = together(size, VOCAB, work)
        assert all(result <= left for result in results)
        assert len(results[0]) > 1 or len(left) == 1


@settings(max_examples=15, deadline=None)
@given(params=any_params, data=st.integers(0, 10**6))
def test_a_column_of_no_token_is_never_chosen(params, data):
    """Five tokens at eight ranks; all else is padding, whatever is asked and however low the logits are."""
    asked = SamplingParams(temperature=params.temperature, top_k=params.top_k, min_p=params.min_p, seed=params.seed)
    logits_11V = random_logits(1, 1, 5, seed=data) - 1e6

    def work(vocab):
        sampling = rows_of([SampledSequence(params=asked)], 5, CPU, vocab=vocab)
        logits = part_of(logits_11V, vocab)
        noise = draw_noise(sampling, torch.tensor([data]), 1, logits.shape[-1], torch.float64, vocab)
        return int(choose(logits, sampling, noise, None, vocab))

    results, _ = together(8, 5, work, 16)
    assert len(set(results)) == 1
    assert 0 <= results[0] < 5
