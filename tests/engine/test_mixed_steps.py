"""Chunks of prompts and decode rows in one step: one pass of the trunk, and the bits of separate steps."""

import dataclasses
import itertools
import random

import pytest
import torch

from baton.core.requests.request import AttemptKey, FinishReason, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.local import LocalEngine
from baton.engine.sequence import Phase
from baton.engine.step import passes
from baton.engine.step.runner import Runner
from baton.kvcache.pool import KVPool
from baton.model.inputs import DecodeBatch, MixedBatch, PrefillBatch
from baton.model.model import Model
from baton.tests.engine import reference
from baton.tests.engine.driver import Driver
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import EOS, request_of, toy_engine

fast = pytest.mark.fast
CPU = torch.device("cpu")
REGEX = GrammarSpec("regex", "(def|class) [a-z_]{1,40}")
ASKED = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def driver_of(model, k, tokenizer=None):
    pool = KVPool(model.kv_layout(16), 60, CPU)
    for layer in range(pool.layout.num_layers):
        pool.blocks(layer).zero_()
    grammars = None if tokenizer is None else GrammarCompiler(tokenizer, model.config.vocab_size)
    return Driver(Runner(model, pool, max_num_seqs=4, num_draft_tokens=k, grammars=grammars), pool)


def params_of(at, **more):
    return SamplingParams(seed=at, max_tokens=30, ignore_eos=True, **ASKED[at % 4] | more)


def kept_of(driver):
    """All KV, and what the slots hold: lengths, newest tokens, drafts, hidden states and counts."""
    driver.runner.drain()
    pool, table = driver.runner._pool, driver.runner._table
    layers = [pool.blocks(layer)[: pool.num_blocks] for layer in range(pool.layout.num_layers)]
    return [*layers, table._numbers_NC, table._hidden_ND]


def watch_passes(monkeypatch):
    """The kind of batch of each pass of the trunk and of the MTP head."""
    seen = {"trunk": [], "mtp": []}
    for name, found in seen.items():
        whole = getattr(Model, name)

        def watched(self, *arguments, whole=whole, found=found):
            found.append(next(type(item) for item in arguments if isinstance(item, BATCHES)))
            return whole(self, *arguments)

        monkeypatch.setattr(Model, name, watched)
    return seen


BATCHES = (PrefillBatch, DecodeBatch, MixedBatch)
CHUNKS = ([(2, 7)], [(2, 9), (3, 3)], [(3, 4)], [(2, None)], [(3, None)])


def run_turns(driver, prompts, k, *, is_mixed):
    """Two sequences decode while two prompts are computed; the outputs of each turn."""
    for slot in range(4):
        driver.place(slot, prompts[slot], params_of(slot), draft_cap=min(k, slot + 1))
    for slot in range(2):
        driver.compute(slot)
    turns, decoding = [], [0, 1]
    for turn, parts in enumerate((*CHUNKS, (), ())):
        chunks = [driver.chunk(slot, length) for slot, length in parts]
        num_drafts = (k, 0, k, min(k, 1))[turn % 4]
        if is_mixed or not chunks:
            output = driver.step(decoding, chunks=chunks, num_drafts=num_drafts)
            turns.append((output.decode, output.chunks))
        else:
            decode = driver.step(decoding, num_drafts=num_drafts).decode
            turns.append((decode, driver.step(chunks=chunks).chunks))
        decoding += [slot for slot, length in parts if length is None]
    return turns


@pytest.mark.long
@pytest.mark.parametrize("k", [pytest.param(0, marks=fast), 2])
def test_one_step_gives_the_bits_of_two(k, tiny_model_invariant, tiny_prompts):
    prompts = [tiny_prompts[at] for at in (3, 5, 6, 4)]
    apart, mixed = driver_of(tiny_model_invariant, k), driver_of(tiny_model_invariant, k)
    wanted = run_turns(apart, prompts, k, is_mixed=False)
    assert run_turns(mixed, prompts, k, is_mixed=True) == wanted
    assert sum(made.token is not None for _, chunks in wanted for made in chunks) == 2
    for kept, other in zip(kept_of(mixed), kept_of(apart), strict=True):
        assert torch.equal(kept, other)


@fast
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.long
def test_a_step_is_one_pass_of_the_trunk_and_one_of_the_head(k, tiny_model_invariant, tiny_prompts, monkeypatch):
    seen = watch_passes(monkeypatch)
    driver = driver_of(tiny_model_invariant, k)
    for slot in range(2):
        driver.place(slot, tiny_prompts[slot + 3], params_of(0))
    driver.compute(0)
    driver.runner.drain()
    for found in seen.values():
        found.clear()
    driver.step([0], chunks=[driver.chunk(1)])
    driver.runner.drain()
    assert seen["trunk"] == [MixedBatch]
    drafts = [DecodeBatch] * max(0, k - 1)
    assert seen["mtp"] == [*drafts, MixedBatch if k else PrefillBatch], "sequences that never draft leave it alone"


@pytest.mark.parametrize("k", [0, 2])
def test_rows_decode_right_after_their_last_chunk_with_nothing_read(k, tiny_model_invariant, tiny_prompts):
    """All launched before any is read, and each read before the next: the same."""
    found = []
    for reads_each in (True, False):
        driver = driver_of(tiny_model_invariant, k)
        for slot in range(3):
            driver.place(slot, tiny_prompts[slot + 3], params_of(slot + 1), draft_cap=k)
        tickets, decoding = [], []
        for slot in (0, 1, 2):
            tickets.append(driver.launch(decoding, chunks=[driver.chunk(slot, 5)]))
            tickets.append(driver.launch(decoding, chunks=[driver.chunk(slot)]))
            decoding.append(slot)
            for ticket in tickets if reads_each else ():
                ticket.result()
        tickets += [driver.launch(decoding) for _ in range(3)]
        found.append([ticket.result() for ticket in tickets])
    assert found[0] == found[1]
    assert all(row.token_ids for output in found[0] for row in output.decode)


def planted(name):
    split, extend = passes.EagerPasses._split, passes.EagerPasses.extend

    def decode_first(self, hidden_TD, *, has_decode):
        prompt_TD, decode_TD = split(self, hidden_TD, has_decode=has_decode)
        if prompt_TD is None or decode_TD is None:
            return prompt_TD, decode_TD
        return hidden_TD[len(decode_TD) :], hidden_TD[: len(decode_TD)]

    def without_the_next_token(self, prompt, decode):
        if prompt is not None and decode is not None:
            prompt = (prompt[0].clone().fill_(1), prompt[1])
        return extend(self, prompt, decode)

    return {"_split": decode_first, "extend": without_the_next_token}[name]


@pytest.mark.parametrize("name", ["_split", "extend"])
def test_planted_faults_are_caught(name, tiny_model_invariant, tiny_prompts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(passes.EagerPasses, name, planted(name))
        with pytest.raises(AssertionError):
            test_one_step_gives_the_bits_of_two(2, tiny_model_invariant, tiny_prompts)


# The engine.


def watch_steps(engine):
    """Every step that it launches."""
    steps, launch = [], engine.runner.launch

    def watched(step):
        steps.append(step)
        return launch(step)

    engine.runner.launch = watched
    return steps


def tiny_requests(prompts, k):
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "grammar": REGEX, "ignore_eos": False},
        {"temperature": 1.0, "max_tokens": 1, "logprobs": 2},
        {"temperature": 0.8, "top_k": 20, "prompt_logprobs": 1},
        {"temperature": 1.0, "grammar": REGEX, "ignore_eos": False, "max_tokens": 1},
        {"temperature": 0.0, "n": 2, "logprobs": 0},
    ]
    return [
        GenerationRequest(
            key=AttemptKey(f"m{k}-{at}", 1),
            prompt_token_ids=prompts[at + 2],
            sampling=SamplingParams(seed=at, **{"max_tokens": 12, "ignore_eos": True} | kind),
            deadline_s=float("inf"),
            num_draft_tokens=k,
        )
        for at, kind in enumerate(kinds)
    ]


def said(result):
    return dataclasses.replace(result, key=None, ttft_s=None, tpot_s=None, counts=None)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [0, 2])
def test_requests_beside_each_other_say_what_each_says_alone(
    k, scheduling, tiny_model_invariant, tiny_tokenizer, tiny_prompts
):
    """Prompts come while others decode: greedy, sampled, with a grammar, with one token, of several answers."""

    def engine():
        return LocalEngine(
            tiny_model_invariant,
            tiny_tokenizer,
            num_blocks=200,
            block_size=16,
            num_draft_tokens=k,
            chunk_len=24,
            max_num_sequences=4,
            scheduling=scheduling,
        )

    requests = tiny_requests(tiny_prompts, k)
    alone = [said(result) for request in requests for result in engine().generate([request])]
    beside = engine()
    steps = watch_steps(beside)
    assert [said(result) for result in beside.generate(requests)] == alone
    assert sum(bool(step.chunks and step.slots) for step in steps) > 3


@pytest.mark.long
@fast
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_give_the_tokens_of_the_reference(seed):
    """By a model in which one stale or missing entry of KV changes tokens."""
    rng, k = random.Random(seed), seed + 1
    engine = toy_engine(k=k, num_blocks=60, chunk_len=7, max_num_sequences=4)
    steps = watch_steps(engine)
    requests = [
        request_of(
            [rng.randrange(22) for _ in range(rng.choice((1, 5, 12, 20)))],
            k=rng.randrange(k + 1),
            max_tokens=rng.choice((1, 2, 9, 15)),
            temperature=rng.choice((0.0, 1.0)),
            seed=at,
        )
        for at in range(16)
    ]
    waiting = list(requests)
    while waiting or engine.scheduler.sequences():
        if waiting and rng.random() < 0.4:
            engine.submit(waiting.pop(0))
        engine.step()
    for request in requests:
        result = engine._caller.unread[request.key][-1].result
        wanted = reference.generate(ToyModel(), list(request.prompt_token_ids), request.sampling, (EOS,))
        assert list(result.token_ids) == wanted
    assert sum(bool(step.chunks and step.slots) for step in steps) > 5


@fast
def test_a_prompts_row_is_in_the_step_after_its_last_chunk_and_before_its_token_is_read():
    engine = toy_engine(k=2, chunk_len=16)
    steps = watch_steps(engine)
    engine.submit(request_of([3, 1, 4], max_tokens=9, ignore_eos=True))
    [sequence] = engine.scheduler.sequences()
    engine.step()
    assert [len(step.chunks) for step in steps] == [1]
    assert sequence.is_decoding
    assert sequence.token_ids == [], "nothing was read"
    engine.step()
    assert steps[1].slots == (sequence.slot,)
    assert len(sequence.token_ids) == 1, "the first token is read while the row decodes"


@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_one_token_is_no_decode_row(scheduling):
    engine = toy_engine(k=2, scheduling=scheduling)
    steps = watch_steps(engine)
    beside = request_of([8, 2], max_tokens=12, ignore_eos=True)
    [one, other] = engine.generate([request_of([3, 1, 4], max_tokens=1, ignore_eos=True), beside])
    assert (len(one.token_ids), one.finish_reason) == (1, FinishReason.LENGTH)
    assert list(other.token_ids) == reference.generate(ToyModel(), [8, 2], beside.sampling)
    assert all(len(step.slots) <= 1 for step in steps)
    assert engine.step_report().late.num_rows <= 1, "of the other's end alone"


@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_stop_at_the_first_token_drops_the_row_that_runs_already(scheduling):
    [first, *_] = reference.generate(ToyModel(), [3, 1, 4], request_of([1], max_tokens=9, ignore_eos=True).sampling)
    engine = toy_engine(k=2, scheduling=scheduling, max_num_sequences=1)
    steps = watch_steps(engine)
    stopped = request_of([3, 1, 4], max_tokens=9, ignore_eos=True, stop_token_ids=(first,))
    after = request_of([8, 2], max_tokens=6, ignore_eos=True)  # takes the slot
    [result, other] = engine.generate([stopped, after])
    assert result.finish_reason is FinishReason.STOP
    assert list(result.token_ids) in ([first], [])
    assert result.counts.num_verify_steps == 0
    assert list(other.token_ids) == reference.generate(ToyModel(), [8, 2], after.sampling)
    report = engine.step_report()
    ran = [step.slots for step in itertools.takewhile(lambda step: len(step.chunks) == 0, steps[1:])]
    assert len(ran) == (1 if scheduling == "async" else 0)
    assert report.late.num_rows >= len(ran)
    assert engine.engine.is_idle
    assert engine.scheduler.allocator.num_reserved == 0


def test_a_grammar_takes_the_first_token_before_its_row_decodes(tiny_model, tiny_tokenizer, tiny_prompts):
    engine = LocalEngine(
        tiny_model,
        tiny_tokenizer,
        num_blocks=100,
        block_size=16,
        num_draft_tokens=2,
        chunk_len=64,
        max_num_sequences=4,
    )
    for request in tiny_requests(tiny_prompts, 2)[:2]:
        engine.submit(request)
    plain, grammar = engine.scheduler.sequences()
    had_token = []
    launch = engine.runner.launch

    def watched(step):
        if grammar.slot in step.slots:
            had_token.append(len(grammar.token_ids) > 0)
        return launch(step)

    engine.runner.launch = watched
    while plain.phase is not Phase.ENDED or grammar.phase is not Phase.ENDED:
        engine.step()
    assert had_token
    assert all(had_token)
    text = tiny_tokenizer.decode(grammar.token_ids)
    assert text.startswith(("def ", "class "))
