"""A group of ranks generates what one rank does: greedy and coupled, with drafts and without, batched and chunked."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from baton.core.errors import WorkerLost
from baton.core.numerics import Numerics
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.grammar import rows
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.step.plan import Chunk, Grow, Growth, Load, Place, Release, Save, Step
from baton.engine.step.runner import Runner
from baton.engine.tp.decision import Decisions
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kernels.sampling.decision_reference import digest, digest_weights
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.engine.test_grammar import small_tokenizer
from baton.tests.model.harness import prompt
from baton.tests.model.ranks import channel_of, on_ranks

CHECKPOINT = {"kind": "qwen3_moe", "num_heads": 8, "num_kv_heads": 4}
LENGTHS = (1, 17, 40)
SMALL_VOCAB = 61
BLOCK_SIZE, CHUNK_LEN, NUM_TOKENS = 16, 24, 12
CPU = torch.device("cpu")
MODES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "grammar": {"temperature": 1.0, "grammar": GrammarSpec("regex", "(ab|ba|01*)[abc01]{40,}")},
    "everything": {
        "temperature": 0.9,
        "min_p": 0.01,
        "top_k": 40,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((3, 1.5), (80, 2.0)),
        "bad_words": ((7,), (40, 41)),
        "allowed_token_ids": tuple(range(2, 90)),
        "min_tokens": 4,
        "stop_token_ids": (9, 77),
    },
}
REJECTION = {
    method: VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=method)
    for method in DraftSampleMethod
}


def load(path, group=None, dtype=torch.float64, numerics=Numerics.DEFAULT, device=CPU, **options):
    return load_model(path, dtype=dtype, device=device, numerics=numerics, with_mtp=True, communicator=group, **options)


def runner_of(model, k, group=None, verification=None):
    rank, size = (group.rank, group.size) if group else (0, 1)
    return Runner(
        model,
        KVPool(model.kv_layout(BLOCK_SIZE), 40, model.device, rank=rank, size=size),
        max_num_seqs=len(LENGTHS),
        num_draft_tokens=k,
        communicator=group,
        grammars=GrammarCompiler(small_tokenizer(), model.config.vocab_size),
        verification=verification,
    )


def generate(runner, k, mode, ks=()):
    """Tokens of every prompt: chunk by chunk, beside those that decode already, which it joins when it is done.

    Steps make `ks` drafts, one after the other and over again, if that is not empty.
    """
    ks = itertools.cycle(ks or [k])
    allocator = BlockAllocator(40, BLOCK_SIZE)
    slots = []
    tokens = []
    for slot, length in enumerate(LENGTHS):
        sampling = SamplingParams(seed=slot, max_tokens=NUM_TOKENS, **MODES[mode])
        ids = tuple(prompt(length, SMALL_VOCAB, seed=slot).tolist())
        blocks = allocator.reserve(length + NUM_TOKENS + k + 1).blocks
        runner.execute(Place(slot=slot, token_ids=ids, num_output=0, blocks=blocks, sampling=sampling, draft_cap=k))
        tokens.append([])
        for start in range(0, length, CHUNK_LEN):
            chunk = Chunk(slot=slot, start=start, length=min(CHUNK_LEN, length - start))
            step(runner, slots, tokens, ks, chunk)
        slots.append(slot)
    while slots:
        step(runner, slots, tokens, ks)
        for slot in [slot for slot in slots if len(tokens[slot]) >= NUM_TOKENS]:
            runner.execute(Release(slot))
            slots.remove(slot)
    return [ids[:NUM_TOKENS] for ids in tokens]


def step(runner, slots, tokens, ks, *chunks):
    decoding = tuple(slot for slot in slots if len(tokens[slot]) < NUM_TOKENS)
    if not decoding and not chunks:
        return
    k = next(ks) if decoding else 0
    most = max((LENGTHS[slot] + len(tokens[slot]) + k for slot in decoding), default=0)
    output = runner.launch(Step(chunks=chunks, slots=decoding, num_drafts=k, max_context_len=most)).result()
    for slot, emitted in zip(decoding, output.decode, strict=True):
        tokens[slot].extend(emitted.token_ids)
    for chunk, made in zip(chunks, output.chunks, strict=True):
        is_end, found = chunk.end == LENGTHS[chunk.slot], made
        while is_end and found.token is None:  # its mask was late, as on a busy machine: the engine repeats it, too
            last = Chunk(slot=chunk.slot, start=chunk.end - 1, length=1)
            [found] = runner.launch(Step(chunks=(last,), slots=(), num_drafts=0, max_context_len=0)).result().chunks
        tokens[chunk.slot].extend(() if found.token is None else (found.token,))


def as_tp_group(group, model, k, mode, verification=None, ks=()):
    runner, channel = runner_of(model, k, group, verification), channel_of(group)
    try:
        if group.rank > 0:
            RankRunner(runner, channel).run()
            return None
        lead = Rank0Runner(runner, channel)
        tokens = generate(lead, k, mode, ks)
        lead.close()
        return tokens
    finally:
        channel.close()


FAST = {(2, 2, "coupled")}
DEFAULT = {
    *((2, 0, mode) for mode in ("greedy", "coupled")),
    *((2, 2, mode) for mode in ("greedy", "grammar", "everything")),
    *((4, 2, mode) for mode in ("cut", "everything")),
    (2, 6, "everything"),
}
CASES = [
    pytest.param(*cell, marks=[pytest.mark.fast] if cell in FAST else [] if cell in DEFAULT else [pytest.mark.slow])
    for cell in [*itertools.product((2, 4), (0, 2), MODES), (8, 2, "cut"), (8, 2, "everything")]
]


@pytest.mark.long
@pytest.mark.parametrize(("size", "k", "mode"), CASES)
def test_a_tp_group_generates_what_one_rank_does(size, k, mode, tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    wanted = generate(runner_of(load(path), k), k, mode)
    tokens, *others = on_ranks(size, lambda group: as_tp_group(group, load(path, group), k, mode))
    assert tokens == wanted
    assert others == [None] * (size - 1)


@pytest.mark.long
def test_masks_that_are_always_late_change_no_token(tiny_checkpoint, monkeypatch):
    """Where ranks have other work beside them every mask may be."""
    path = tiny_checkpoint(**CHECKPOINT)
    monkeypatch.setattr(rows, "PATIENCE_S", 60.0)
    monkeypatch.setattr(rows, "ALONE_PATIENCE_S", 60.0)
    wanted = generate(runner_of(load(path), 2), 2, "grammar")
    monkeypatch.setattr(rows, "PATIENCE_S", 0.0)
    monkeypatch.setattr(rows, "ALONE_PATIENCE_S", 0.0)
    assert generate(runner_of(load(path), 2), 2, "grammar") == wanted
    tokens, _ = on_ranks(2, lambda group: as_tp_group(group, load(path, group), 2, "grammar"))
    assert tokens == wanted


KS = (2, 0, 1, 1, 0, 0, 2, 1)


@pytest.mark.parametrize(
    "mode", [pytest.param("greedy", marks=pytest.mark.slow), "coupled", pytest.param("grammar", marks=pytest.mark.slow)]
)
def test_k_changes_at_every_rank(mode, tiny_checkpoint, monkeypatch):
    path = tiny_checkpoint(**CHECKPOINT)
    wanted = generate(runner_of(load(path), 2), 2, mode)
    launch, shapes = Runner.launch, {}

    def launch_and_keep(self, step):
        shapes.setdefault(id(self), []).append((step.num_drafts, step.max_context_len, len(step.slots)))
        return launch(self, step)

    monkeypatch.setattr(Runner, "launch", launch_and_keep)
    tokens, _ = on_ranks(2, lambda group: as_tp_group(group, load(path, group), 2, mode, ks=KS))
    assert tokens == wanted
    mine, others = shapes.values()
    assert mine == others
    assert [k for k, _, num_slots in mine if num_slots][: len(KS)] == list(KS)


@pytest.mark.parametrize("mode", ["coupled", "everything"])
def test_invariant_numerics_give_the_same_tokens_in_bfloat16(mode, tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    options = {"dtype": torch.bfloat16, "numerics": Numerics.INVARIANT}
    wanted = generate(runner_of(load(path, **options), 2), 2, mode)
    tokens, _ = on_ranks(2, lambda group: as_tp_group(group, load(path, group, **options), 2, mode))
    assert tokens == wanted


@pytest.mark.parametrize("method", REJECTION)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rejection_among_ranks(size, method, tiny_checkpoint):
    path, verification = tiny_checkpoint(**CHECKPOINT), REJECTION[method]
    wanted = generate(runner_of(load(path), 2, verification=verification), 2, "coupled")
    tokens, *_ = on_ranks(size, lambda group: as_tp_group(group, load(path, group), 2, "coupled", verification))
    assert tokens == wanted


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "own"])
def test_a_vocabulary_that_no_number_of_ranks_divides(tie, tiny_checkpoint):
    """61 tokens at four ranks: 16 each, and 13."""
    path = tiny_checkpoint(**CHECKPOINT, tie=tie, vocab_size=SMALL_VOCAB)
    wanted = generate(runner_of(load(path), 2), 2, "cut")
    tokens, *_ = on_ranks(4, lambda group: as_tp_group(group, load(path, group), 2, "cut"))
    assert tokens == wanted


def test_the_head_may_stay_whole_at_every_rank(tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    wanted = generate(runner_of(load(path), 2), 2, "cut")

    def work(group):
        model = load(path, group, cut_vocab=False)
        assert not model.vocab.is_cut
        return as_tp_group(group, model, 2, "cut")

    assert on_ranks(2, work) == [wanted, None]


@pytest.mark.fast
@pytest.mark.parametrize("what", ["values", "state", "number"])
def test_a_rank_that_diverges_is_named(what):
    def work(group):
        decisions, is_other = Decisions(group), group.rank == 2
        if is_other and what == "number":
            decisions._num_made = 7
        tokens = torch.tensor([[3, 4], [5 + (is_other and what == "values"), 6]])
        state = [torch.tensor([1, 2]), torch.tensor([[8 + (is_other and what == "state")]])]
        if is_other:
            with pytest.raises(WorkerLost, match=f"rank 2 of 3 diverged in the {what}") as caught:
                decisions.agree(tokens, state)
            assert caught.value.fields == {"rank": 2, "size": 3, "how": "diverged", "what": what}
            return None
        return decisions.check(decisions.agree(tokens, state).flatten().tolist())

    assert on_ranks(3, work) == [[3, 4, 5, 6], [3, 4, 5, 6], None]


@pytest.mark.fast
def test_the_digest_sees_every_place():
    whole = torch.arange(12)
    seen = {int(digest([whole, whole], CPU))}
    for place in range(12):
        for change in (1, -3, 1 << 31, 5 << 40):
            other = whole.clone()
            other[place] += change
            seen |= {int(digest([other, whole], CPU)), int(digest([whole, other], CPU))}
    seen.add(int(digest([whole.flip(0), whole], CPU)))
    assert len(seen) == 12 * 4 * 2 + 2
    assert int(digest([whole, whole], CPU, digest_weights(100, CPU))) == int(digest([whole, whole], CPU))


@pytest.mark.fast
def test_a_rank_hears_of_rank_0s_death():
    def work(group):
        channel = channel_of(group)
        if group.rank == 0:
            channel.tell(Release(3))
            channel.link._is_closed = True  # as if it had died: no farewell
            return None
        assert channel.hear() == Release(3)
        with pytest.raises(WorkerLost, match="rank 0 of 2 has died"):
            channel.hear()
        channel.close()
        return True

    assert on_ranks(2, work) == [None, True]


@pytest.mark.fast
@pytest.mark.parametrize(
    "operation",
    [Release(0), Grow((Growth(0, 1, (5, 6)),)), Save((1, 2), 0, 0, None, None), Load((1, 2), 0, 0, None, None)],
    ids=lambda operation: type(operation).__name__,
)
def test_an_operation_of_rank_0_is_told_to_the_others_which_carry_it_out(operation):
    done = []
    runner = SimpleNamespace(execute=lambda operation: done.append(("does", operation)))
    channel = SimpleNamespace(tell=lambda operation: done.append(("tells", operation)))
    Rank0Runner(runner, channel).execute(operation)
    assert done == [("tells", operation), ("does", operation)]
    assert RankRunner(runner, channel).take(operation)
    assert done[2:] == [("does", operation)]
