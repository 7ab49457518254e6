"""Steps whose rows are dealt to ranks: the tokens of one process, and latents where their owner is and nowhere else."""

from types import SimpleNamespace

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.engine.graphs.backend import CallBackend
from baton.engine.step.batch import ChunkRows, DecodeRows, prefill_inputs
from baton.engine.step.dealt_passes import DealtPasses
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.attention import AttentionInputs
from baton.model.dealt_rows import RowDeal
from baton.model.inputs import DecodeBatch, MixedBatch, PrefillBatch
from baton.model.loader import load_model
from baton.tests.engine.driver import Driver
from baton.tests.engine.graphs import graphed
from baton.tests.model.harness import prompt
from baton.tests.model.ranks import channel_of, on_ranks

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, NUM_DRAFTS = 40, 8, 2
LENGTHS = (5, 30, 19, 9)
NUM_DECODE_ONLY = 7  # steps of what is played; two of them have two sequences, the others four
OWNERS = {1: (0, 0, 0, 0), 2: (0, 1, 1, 0), 4: (3, 3, 0, 1)}
UNWRITTEN = 3.0


def runner_of(
    path, group=None, *, dtype=torch.float64, numerics=Numerics.DEFAULT, device=CPU, block_size=BLOCK_SIZE, backend=None
):
    """With a backend, decode-only steps are replayed from graphs, which have room for up to three or four sequences."""
    rank, size = (group.rank, group.size) if group else (0, 1)
    model = load_model(
        path, dtype=dtype, device=device, numerics=numerics, with_mtp=True, communicator=group, dp_attention=True
    )
    pool = KVPool(model.kv_layout(block_size), NUM_BLOCKS, device, rank=rank, size=size)
    for layer in range(pool.layout.num_layers):
        pool.blocks(layer).fill_(UNWRITTEN)
    runner = Runner(model, pool, max_num_seqs=len(LENGTHS), num_draft_tokens=NUM_DRAFTS, communicator=group)
    if backend is not None:
        runner.graphs = graphed(model, pool, k=NUM_DRAFTS, sizes=(3, 4), widths=(9,), backend=backend, group=group)
    return runner, pool


def play(driver, owners):
    """Tokens of every step, in some of which ranks have nothing to do; and each slot's table and length at the end."""
    tokens = []
    lengths = list(LENGTHS)

    def place(slot, length, owner):
        sampling = SamplingParams(temperature=1.0, seed=slot, max_tokens=40)
        driver.place(slot, prompt(length, seed=slot).tolist(), sampling, owner=owner)
        lengths[slot] = length

    def step(*slots, chunks=(), num_drafts=None):
        output = driver.step(slots, chunks=chunks, num_drafts=num_drafts)
        for slot, row in zip(slots, output.decode, strict=True):
            lengths[slot] += len(row.token_ids)
            tokens.append(row.token_ids)
        for chunk, made in zip(chunks, output.chunks, strict=True):
            lengths[chunk.slot] += made.token is not None
            tokens.append(made.token)

    for slot, (length, owner) in enumerate(zip(LENGTHS, owners, strict=True)):
        place(slot, length, owner)
    step(chunks=[driver.chunk(0)])
    step(0, chunks=[driver.chunk(1, 13)])
    step(0, chunks=[driver.chunk(1), driver.chunk(2, 7)])
    step(0, 1, chunks=[driver.chunk(2), driver.chunk(3)])
    for num_drafts in (2, 0, 1, 2):
        step(0, 1, 2, 3, num_drafts=num_drafts)
    step(1, 2)
    step(0, 3, num_drafts=1)
    driver.release(1)
    place(1, 22, owners[0])  # at another rank
    step(0, 2, 3, chunks=[driver.chunk(1)])
    step(3, 2, 1, 0)
    return tokens, [(driver.tables[slot].blocks, lengths[slot] - 1) for slot in range(len(LENGTHS))]


def as_rank(group, path, owners, backend=None):
    """What was played, at rank 0; and what every rank's pool holds, and how many rounds it took part in."""
    (runner, pool), channel = runner_of(path, group, backend=backend), channel_of(group)
    begun = group.num_operations
    try:
        played = None
        if group.rank:
            RankRunner(runner, channel).run()
        else:
            lead = Rank0Runner(runner, channel)
            played = play(Driver(lead, pool), owners)
            lead.drain()
            lead.close()
        return played, pool, group.num_operations - begun, runner.graphs and runner.graphs.counts
    finally:
        channel.close()


def latents(pool, layer, blocks, length):
    """Of the first positions of a sequence, [length, X]."""
    return pool.blocks(layer)[list(blocks), 0, 0].flatten(0, 1)[:length]


@pytest.mark.parametrize(
    "backend", [pytest.param(None, marks=pytest.mark.fast), CallBackend()], ids=["launched", "replayed"]
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.long
def test_tokens_are_those_of_one_process_and_latents_are_at_their_owner(size, backend, tiny_checkpoint):
    path = tiny_checkpoint(kind="deepseek_v3", layers=2)
    runner, whole = runner_of(path)
    with torch.inference_mode():
        wanted, tables = play(Driver(runner, whole), OWNERS[1])
        runner.close()
    ranks = on_ranks(size, lambda group: as_rank(group, path, OWNERS[size], backend))
    tokens, dealt = ranks[0][0]
    assert tokens == wanted
    assert len({num_operations for _, _, num_operations, _ in ranks}) == 1, "each takes part in every round"
    for *_, counts in ranks if backend else ():
        assert (counts.num_steps_replayed, counts.num_sequences_padded) == (NUM_DECODE_ONLY, 2)
        assert not any(counts.num_steps_eager.values())
    written = {rank: set() for rank in range(size)}
    for (blocks, length), (ours, _) in zip(dealt, tables, strict=True):
        owner = blocks[0] // NUM_BLOCKS
        own = [block - owner * NUM_BLOCKS for block in blocks]
        written[owner] |= set(own)
        for layer in range(whole.layout.num_layers):
            theirs_LX = latents(ranks[owner][1], layer, own, length)
            assert torch.allclose(theirs_LX, latents(whole, layer, ours, length), rtol=0, atol=1e-9)
    for rank, (_, pool, *_) in enumerate(ranks):
        touched = [block for block in range(NUM_BLOCKS) if (pool.blocks(0)[block] != UNWRITTEN).any()]
        assert bool(touched) == bool(written[rank]), "a rank without sequences keeps nothing"


class Recording:
    """A model that keeps what its passes are given."""

    around = Implementation.REFERENCE

    def __init__(self, rank, size):
        self.deal = RowDeal(rank=rank, size=size, all_gather=None)
        self.batches = []

    def trunk(self, token_ids_T, batch, pool, on_layer):
        self.batches.append((len(token_ids_T), batch))
        return torch.zeros(len(token_ids_T), 2)

    def mtp(self, token_ids_T, hidden_TD, batch, pool, on_layer):
        return self.trunk(token_ids_T, batch, pool, on_layer)


def passes_of(rank, size, *, chunk_owners, owners):
    """A rank's passes over a chunk of 5 tokens for each of the first, and two rows of each of the others."""
    blocks = RankBlocks(num_blocks=4, rank=rank, num_pools=size)
    layout = SimpleNamespace(block_size=BLOCK_SIZE, has_state=False)
    pool = SimpleNamespace(layout=layout, num_blocks=4, device=CPU, scratch_slot=4 * BLOCK_SIZE)
    chunks = [
        ChunkRows(token_ids=prompt(9).numpy(), start=2, length=5, blocks=(4 * owner + 1,)) for owner in chunk_owners
    ]
    inputs = prefill_inputs(chunks, pool, blocks.null_block) if chunks else None
    rows = None
    if owners:
        tables_BM = torch.tensor([[4 * owner + 2, blocks.null_block] for owner in owners])
        numbers_B = torch.arange(len(owners))
        rows = DecodeRows(block_tables_BM=tables_BM, limit_B=numbers_B + BLOCK_SIZE, draft_cap_B=numbers_B)
    model = Recording(rank, size)
    passes = DealtPasses(model, pool, blocks, rows, owners, BLOCK_SIZE, inputs, chunks)
    first_B = torch.arange(len(owners)) if owners else None
    ids_BQ = None if first_B is None else torch.zeros(len(owners), 2, dtype=torch.int64)
    hidden = passes.trunk(ids_BQ, first_B)
    if first_B is not None:
        passes.draft(first_B, torch.zeros(len(owners), 2), first_B)
    return model.batches, hidden


@pytest.mark.fast
def test_a_rank_attends_for_its_own_rows_in_its_own_blocks():
    (trunk, draft), (prompt_TD, decode_TD) = passes_of(1, 3, chunk_owners=(0, 1), owners=(1, 2, 1, 0))
    assert (len(prompt_TD), len(decode_TD)) == (10, 8)
    num_rows, batch = trunk
    assert (num_rows, isinstance(batch.own, MixedBatch)) == (18, True)
    assert batch.rows.own_O.tolist() == [5, 6, 7, 8, 9, 10, 11, 14, 15]
    assert batch.rows.num_each == 9, "those of rank 1"
    assert batch.own.prompts.positions_T.tolist() == [2, 3, 4, 5, 6]
    assert batch.own.prompts.slots_T.tolist() == [8 + position for position in (2, 3, 4, 5, 6)]
    assert batch.own.decode.positions_BQ.tolist() == [[0, 1], [2, 3]]
    assert batch.own.decode.slots_BQ.tolist() == [[16, 17], [18, 19]]
    assert batch.own.decode.block_tables_BM.tolist() == [[2, 4], [2, 4]], "the null block is the last at each rank"
    num_rows, batch = draft
    assert (num_rows, isinstance(batch.own, DecodeBatch)) == (4, True)
    assert batch.rows.own_O.tolist() == [0, 2]
    assert batch.rows.num_each == 2


@pytest.mark.fast
@pytest.mark.parametrize(
    ("chunk_owners", "owners", "kind"),
    [((1, 0), (0, 0), PrefillBatch), ((0,), (1, 0), DecodeBatch), ((0,), (0,), DecodeBatch), ((0,), (), DecodeBatch)],
    ids=["chunks alone", "decode rows alone", "neither", "no chunk of its own"],
)
def test_a_rank_of_some_rows_or_none_gets_a_batch_of_those(chunk_owners, owners, kind):
    batches, _ = passes_of(1, 2, chunk_owners=chunk_owners, owners=owners)
    num_own = 5 * chunk_owners.count(1) + 2 * owners.count(1)
    assert isinstance(batches[0][1].own, kind)
    assert len(batches[0][1].rows.own_O) == num_own
    assert batches[0][1].rows.is_idle == (num_own == 0)


@pytest.mark.fast
@pytest.mark.parametrize("rank", range(2))
def test_whether_the_host_may_wait_is_the_same_at_every_rank(rank):
    """It chooses the form of experts' GEMMs, whose rows are those of all ranks."""
    for owners in ((1,), ()):
        batches, _ = passes_of(rank, 2, chunk_owners=(0,), owners=owners)
        batch = batches[0][1]
        inputs = AttentionInputs(batch.own, None, None, None, None, None, dealt=batch.rows)
        assert inputs.may_wait == (not owners)
