"""Replayed steps whose sequences are dealt to ranks: what launched ones make, however many each rank owns."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.graphs.backend import CallBackend
from baton.engine.graphs.graphed_step import StaticPass, graph_sizes
from baton.engine.graphs.key import EagerReason, GraphKey, GraphKind
from baton.engine.graphs.static_deal import StaticDeal
from baton.engine.step.batch import DecodeRows
from baton.engine.step.dealt_passes import DealtPasses, rank_blocks
from baton.kvcache.pool import KVPool
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.dealt_rows import RowDeal
from baton.model.loader import load_model
from baton.tests.engine.graphs import graphed
from baton.tests.engine.moving_experts import load_options
from baton.tests.engine.recorded_group import RecordedGroup
from baton.tests.engine.recorder import RecorderBackend
from baton.tests.model.ranks import on_ranks

CPU = torch.device("cpu")
BLOCK_SIZE, WIDTH, SIZES = 8, 3, (2, 4, 6)
CHECKPOINT = {"kind": "deepseek_v3", "layers": 2}
EXPERTS = {
    "parts of experts": {},
    "whole experts": {"expert_parallel": True},
    "experts that move": load_options(4),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_pool(model):
    """With latents in every block, and none that a real row may see in the null block."""
    pool = KVPool(model.kv_layout(BLOCK_SIZE), SIZES[-1] * WIDTH, CPU, rank=model.deal.rank, size=model.deal.size)
    generator = torch.Generator().manual_seed(model.deal.rank)
    for layer in range(pool.layout.num_layers):
        blocks = pool.blocks(layer)
        blocks.copy_(torch.randn(blocks.shape, generator=generator, dtype=torch.float64))
        blocks[-1:] = torch.nan
    return pool


def drawn_steps(size, seed, count=10):
    """Owners of each step's sequences, and its drafts: of all ranks, of some, of one alone."""
    draw = random.Random(seed)
    steps = [([0] * 4, 2), ([size - 1] * 6, 1), ([at % size for at in range(6)], 2), ([size - 1], 0)]
    while len(steps) < count:
        ranks = draw.sample(range(size), draw.randint(1, size))
        steps.append(([draw.choice(ranks) for _ in range(draw.randint(1, SIZES[-1]))], draw.randint(0, 2)))
    return steps


def model_alone(path, size):
    """Rank 0's, which never meets the others."""
    group = SimpleNamespace(rank=0, size=size, all_sum=None, all_gather=None)
    return load_model(
        path, dtype=torch.float32, device=CPU, numerics=Numerics.DEFAULT, with_mtp=True, communicator=group,
        dp_attention=True,
    )  # fmt: skip


class Side:
    """The passes of steps over a pool of their own."""

    def __init__(self, model):
        self.model, self.pool = model, random_pool(model)
        self.blocks = rank_blocks(model, self.pool)

    def rows(self, owners, first):
        """Each sequence in blocks of its owner's pool, room to the end of them but for the first."""
        local_BM = torch.arange(len(owners) * WIDTH).view(-1, WIDTH)
        table_BM = local_BM + torch.tensor(owners)[:, None] * self.pool.num_blocks
        limit_B = torch.full((len(owners),), WIDTH * BLOCK_SIZE)
        limit_B[0] = first + 1  # its drafts have no room
        return DecodeRows(block_tables_BM=table_BM, limit_B=limit_B, draft_cap_B=torch.zeros_like(limit_B))

    def made(self, passes, owners, num_drafts, first):
        """Trunk, entries of what was emitted, and one further draft."""
        generator = torch.Generator().manual_seed(first)
        ids_BQ = torch.randint(60, (len(owners), num_drafts + 1), generator=generator)
        first_B = torch.full((len(owners),), first)
        trunk_TD = passes.trunk(ids_BQ, first_B)[1].clone()
        entries_TD = passes.extend(None, (ids_BQ, trunk_TD, first_B))[1].clone()
        if num_drafts < 2:
            return trunk_TD, entries_TD
        return trunk_TD, entries_TD, passes.draft(ids_BQ[:, 0], entries_TD[:: num_drafts + 1], first_B).clone()

    def kv(self):
        return [self.pool.blocks(layer)[:-1] for layer in range(self.pool.layout.num_layers)]


def loads_of(model):
    """Tokens that each expert of each layer got so far, if experts may move."""
    return [layer.slots.load_E.clone() for layer in model.sparse_layers if layer.slots is not None]


def compare(group, path, steps, backend, **options):
    """The largest difference of what steps make, launched and replayed, and each step's graph."""
    group = RecordedGroup(group)
    model = load_model(path, device=CPU, with_mtp=True, communicator=group, dp_attention=True, **options)
    eager, replayed = Side(model), Side(model)
    graphs = graphed(model, replayed.pool, k=2, sizes=SIZES, widths=(WIDTH,), group=group, backend=backend)
    worst, keys, rounds, loads = 0.0, [], [], [loads_of(model)]
    for at, (owners, num_drafts) in enumerate(steps):
        first, begun = 3 + at, group.num_operations
        rows, bound = eager.rows(owners, first), WIDTH * BLOCK_SIZE
        launched = DealtPasses(model, eager.pool, eager.blocks, rows, owners, bound, None, ())
        wanted, between = eager.made(launched, owners, num_drafts, first), group.num_operations
        loads.append(loads_of(model))
        passes = graphs.passes(rows, num_drafts, bound, owners)
        got = replayed.made(passes, owners, num_drafts, first)
        loads.append(loads_of(model))
        if loads[0]:
            of_launched, of_replayed = (
                [b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(loads[-3:])
            )
            assert all(map(torch.equal, of_launched, of_replayed))
            num_passed = len(owners) * (num_drafts + 1) - num_drafts  # the first's drafts have no room
            assert of_replayed[0].sum() == num_passed * model.config.num_experts_per_token
        keys.append(passes._graphs[GraphKind.VERIFY].key)
        rounds.append((between - begun, group.num_operations - between))
        for ours, theirs in zip((*got, *replayed.kv()), (*wanted, *eager.kv()), strict=True):
            assert ours.isfinite().all()
            worst = max(worst, (ours - theirs).abs().max().item())
    return worst, keys, rounds, graphs.counts


def deals_of(size, num_sequences, num_each):
    """Each rank's, over a gather that all of them have to join with one shape."""
    given = {}

    def all_gather_of(rank):
        def all_gather(x):
            given[rank] = x
            return torch.stack([given.get(other, torch.full_like(x, torch.nan)) for other in range(size)])

        return all_gather

    return [
        StaticDeal(
            RowDeal(rank=rank, size=size, all_gather=all_gather_of(rank)),
            RankBlocks(num_blocks=4, rank=rank, num_pools=size), num_sequences, num_each, CPU,
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.fast
@pytest.mark.long
def test_random_deals_come_back_bit_for_bit():
    """Over and over from the same buffers, whose padding is never among what comes back."""
    draw = np.random.default_rng(3)
    for _ in range(40):
        size, num_sequences = int(draw.choice([2, 4, 8])), int(draw.integers(1, 20))
        num_each = int(draw.integers(-(-num_sequences // size), num_sequences + 1))
        deals, num_rows = deals_of(size, num_sequences, num_each), int(draw.integers(1, 4))
        assert {deal.num_rows for deal in deals} == {size * num_each}
        for _ in range(5):
            owners = draw.integers(0, size, draw.integers(1, num_sequences + 1)).tolist()
            if max(map(owners.count, range(size))) > num_each:
                continue
            x_TD = torch.from_numpy(draw.normal(size=(num_sequences * num_rows, 5)))
            numbers_BX = torch.arange(num_sequences + 1)[:, None]
            for rank, deal in enumerate(deals):
                deal.write(owners)
                mine = [at for at, owner in enumerate(owners) if owner == rank]
                padding = [num_sequences] * (num_each - len(mine))
                assert deal.own(numbers_BX)[:, 0].tolist() == mine + padding
                rows = deal.rows(num_rows)
                assert (rows.num_each, rows.may_wait, rows.is_idle) == (num_each * num_rows, False, False)
                own_OD = rows.own(x_TD)
                own_OD[len(mine) * num_rows :] = torch.nan
                shared_TD = rows.shared(own_OD)
            num_real = len(owners) * num_rows
            assert torch.equal(shared_TD[:num_real], x_TD[:num_real])
            assert len(shared_TD) == len(x_TD)
            assert shared_TD[num_real:].isnan().all(), "padding of a graph gets what came of padding alone"


@pytest.mark.fast
def test_no_rank_has_more_sequences_than_there_is_room_for():
    for deal in deals_of(2, 4, 2):
        deal.write([0, 1, 1])
        with pytest.raises(AssertionError, match="more rows than each may give"):
            deal.write([1, 1, 0, 1])


@pytest.mark.fast
def test_what_crosses_between_ranks_counts_as_memory(tiny_checkpoint):
    """Of every rank's room; kernels need no more for the blocks of tables."""
    model = model_alone(tiny_checkpoint(**CHECKPOINT), 2)
    pool = KVPool(model.kv_layout(BLOCK_SIZE), 8, CPU, rank=0, size=2)
    needed = [
        StaticPass(
            GraphKey(GraphKind.VERIFY, 3, 8, WIDTH, num_each),
            model, pool, StaticDeal(model.deal, rank_blocks(model, pool), 8, num_each, CPU),
        ).num_bytes
        for num_each in (5, 8)
    ]  # fmt: skip
    own_tables = 3 * WIDTH * BLOCK_SIZE * 4 * 2 * pool.layout.layers[0].row_len * 4
    assert needed[1] - needed[0] == 3 * 3 * 3 * model.config.hidden_size * 4 + own_tables


@pytest.mark.fast
@pytest.mark.long
def test_every_rank_takes_the_same_graph_or_launches(tiny_checkpoint):
    """By the most sequences of any rank, which the plan says to all, not by its own."""
    path = tiny_checkpoint(**CHECKPOINT)

    def work(group):
        model = load_model(
            path, dtype=torch.float64, device=CPU, numerics=Numerics.DEFAULT, with_mtp=True, communicator=group,
            dp_attention=True,
        )  # fmt: skip
        side = Side(model)
        graphs = graphed(model, side.pool, k=0, sizes=(3, 4), widths=(WIDTH,), group=group, backend=CallBackend())
        found = [graphs.passes(side.rows(owners, 3), 0, 8, owners) for owners in deals]
        return [passes and passes._graphs[GraphKind.VERIFY].key.num_each for passes in found], graphs.counts

    deals = ([1, 1, 1, 0, 1], [0], [0, 1, 1, 1], [0, 0, 0, 0])
    for rooms, counts in on_ranks(2, work):
        assert rooms == [None, 3, 3, 4]
        assert (counts.num_steps_replayed, counts.num_steps_eager[EagerReason.SEQUENCES]) == (3, 1)


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2])
def test_a_runner_captures_for_the_ranks_of_its_model(size, tiny_checkpoint):
    model = model_alone(tiny_checkpoint(**CHECKPOINT), size)
    pool = KVPool(model.kv_layout(BLOCK_SIZE), 8, CPU, rank=0, size=size)
    sizes = graph_sizes(model, pool, max_num_sequences=8, num_draft_tokens=1, max_model_len=64)
    assert sizes.num_owners == size
    assert {key.num_each for key in sizes.keys() if key.num_sequences == 8} == ({0} if size == 1 else {8})


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
def test_replayed_passes_are_those_launched(size, options, tiny_checkpoint):
    """In float64: results of every row, all latents and what experts got, at ranks with many sequences, few, none."""
    path, steps = tiny_checkpoint(**CHECKPOINT), drawn_steps(size, seed=size)
    options = {"dtype": torch.float64, "numerics": Numerics.DEFAULT, **options}
    found = on_ranks(size, lambda group: compare(group, path, steps, RecorderBackend(), **options))
    worst, keys, rounds, counts = zip(*found, strict=True)
    assert max(worst) < 1e-12
    assert len(set(map(tuple, keys))) == 1, "every rank takes the same graph"
    assert {key.num_each < key.num_sequences for key in keys[0]} == {True, False}
    assert all(key.num_each >= max(map(owners.count, owners)) for key, (owners, _) in zip(keys[0], steps, strict=True))
    assert len({tuple(each) for each in rounds}) == 1, "every rank takes part in every round"
    assert all(launched == replayed for launched, replayed in rounds[0])
    num_padded = sum(key.num_sequences - len(owners) for key, (owners, _) in zip(keys[0], steps, strict=True))
    for each in counts:
        assert (each.num_steps_replayed, each.num_sequences_padded) == (len(steps), num_padded)
        assert not any(each.num_steps_eager.values())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_room_for_more_sequences_changes_no_bit(size, tiny_checkpoint):
    """In invariant numerics, where a row's bits do not depend on the rows beside it."""
    path, steps = tiny_checkpoint(**CHECKPOINT), drawn_steps(size, seed=9, count=6)
    options = {"dtype": torch.float32, "numerics": Numerics.INVARIANT}
    for worst, *_ in on_ranks(size, lambda group: compare(group, path, steps, CallBackend(), **options)):
        assert worst == 0
