"""KV on the host and back: every byte, in the order of steps, at every rank."""

import threading

import pytest
import torch

from baton.core.errors import ConfigInvalid
from baton.engine.kv_offload import KVOffload
from baton.engine.step.executor import ThreadExecutor
from baton.engine.step.plan import Growth, Load, Save
from baton.engine.step.slots import SlotTable
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.parallel import Alone
from baton.tests.kvtransfer.kept import state, window
from baton.tests.model.ranks import on_ranks

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
LAYOUT = KVLayout.of_attention(model_hash="x", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 12
BLOCKS = RankBlocks(num_blocks=NUM_BLOCKS)
ROOM = {"blocks": (4, 2), "limit": 8, "null_block": 12, "draft_cap": 1}


class Side:
    """One rank's pool, slots and host memory."""

    def __init__(self, communicator=None, num_host_blocks=8):
        group = communicator or Alone()
        self.pool = KVPool(LAYOUT, NUM_BLOCKS, CPU, rank=group.rank, size=group.size)
        self.pool.data_bytes.copy_(torch.arange(len(self.pool.data_bytes)) * (group.rank * 2 + 7) % 251)
        self.table = SlotTable(
            num_slots=3, max_blocks=6, hidden_size=5, vocab_size=9, eos_token_ids=(), dtype=torch.float64, device=CPU
        )
        self.executor = ThreadExecutor()
        block_bytes = sum(layer.block_bytes for layer in self.pool.geometry.layers)
        num_bytes = num_host_blocks * block_bytes + block_bytes - 1
        self.offload = KVOffload(self.pool, BLOCKS, num_bytes, self.executor, self.table, group)
        assert self.offload.num_blocks == num_host_blocks

    def content(self, blocks):
        return [self.pool.blocks(layer)[list(blocks)].clone() for layer in range(LAYOUT.num_layers)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_comes_back_is_what_was_there_and_nothing_else_changes():
    side = Side()
    hidden_D = torch.arange(5, dtype=torch.float64)
    side.table.place(1, last_token=3, draft_token=8, hidden_D=hidden_D, length=7, **ROOM)
    before, others = side.content((5, 2, 9)), side.content((0, 1, 3, 4, 6, 7, 8, 10, 11, 12))
    future = side.offload.save(Save((5, 2, 9), 4, 1))
    side.executor.run(
        lambda: [side.pool.blocks(layer).index_fill_(0, torch.tensor([5, 2, 9]), 0) for layer in range(3)]
    )
    future.get()
    assert future.is_done
    side.offload.load(Load((9, 5, 2), 4, 0))
    side.executor.drain()
    assert same(side.content((9, 5, 2)), before)
    assert same(side.content((0, 1, 3, 4, 6, 7, 8, 10, 11, 12)), others)
    draft, hidden = side.table.draft_of(0)
    assert int(draft) == 8
    assert torch.equal(hidden, hidden_D)


def test_a_state_slot_goes_with_the_blocks_and_no_other_changes():
    layout = KVLayout.of_attention(
        model_hash="x", num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32",
        more=[window(2, 4, length=70, ring=128), state(2, 6, dtype="float64")],
    )  # fmt: skip
    pool = KVPool(layout, NUM_BLOCKS, CPU, num_state_slots=3)
    pool.data_bytes.copy_(torch.arange(len(pool.data_bytes)) * 7 % 251)
    executor, table = ThreadExecutor(), Side().table
    offload = KVOffload(pool, BLOCKS, 1 << 16, executor, table, Alone())
    assert offload.num_state_images >= 2
    assert (
        offload.num_blocks * layout.bytes_per_block + offload.num_state_images * layout.bytes_per_state_slot <= 1 << 16
    )
    before = [pool.blocks(1)[4:6].clone(), pool.blocks(2)[2].clone()]
    others = [pool.blocks(1)[[0, 1, 6, 7]].clone(), pool.blocks(2)[[0, 3]].clone()]
    offload.save(Save((5,), 0, None, state_slot=2, state_image=1))
    executor.run(lambda: [pool.blocks(1)[4:6].fill_(0), pool.blocks(2)[2].fill_(0)])
    offload.load(Load((7,), 0, 0, state_slot=1, state_image=1))
    executor.drain()
    assert same([pool.blocks(1)[2:4], pool.blocks(2)[1]], before)
    assert same([pool.blocks(1)[[0, 1, 6, 7]], pool.blocks(2)[[0, 3]]], others)
    executor.close()


@pytest.mark.parametrize("owner", range(2))
def test_blocks_of_another_rank_are_not_copied_and_the_draft_is_all_the_same(owner):
    side = Side()
    side.offload._blocks = RankBlocks(num_blocks=NUM_BLOCKS, rank=1, num_pools=2)
    before, blocks = side.content(range(NUM_BLOCKS)), [owner * NUM_BLOCKS + at for at in (5, 2)]
    side.table.place(1, last_token=3, draft_token=8, length=7, **ROOM)
    side.offload.save(Save(tuple(blocks), 3, 1))
    moved = [owner * NUM_BLOCKS + at for at in (7, 0)]
    side.offload.load(Load(tuple(moved), 3, 2))
    side.executor.drain()
    after = side.content(range(NUM_BLOCKS))
    for layer_before, layer_after in zip(before, after, strict=True):
        if owner == 1:
            assert torch.equal(layer_after[[7, 0]], layer_before[[5, 2]])
            layer_before[[7, 0]] = layer_before[[5, 2]]
        assert torch.equal(layer_after, layer_before)
    assert int(side.table.draft_of(2)[0]) == 8


def test_copies_lie_between_the_steps_around_them_and_ranges_may_be_used_again_at_once():
    side, gate = Side(num_host_blocks=2), threading.Event()
    first, second = side.content((3, 4)), side.content((6, 7))
    side.executor.run(gate.wait)
    futures = [side.offload.save(Save((3, 4), 0, None))]
    side.offload.load(Load((0, 1), 0, 2))
    futures.append(side.offload.save(Save((6, 7), 0, None)))
    side.executor.run(lambda: [side.pool.blocks(layer).index_fill_(0, torch.tensor([6, 7]), 0) for layer in range(3)])
    side.offload.load(Load((6, 7), 0, 2))
    assert not any(future.is_done for future in futures)
    gate.set()
    side.executor.drain()
    assert all(future.is_done for future in futures)
    assert same(side.content((0, 1)), first)
    assert same(side.content((6, 7)), second)


def test_a_draft_belongs_to_what_was_saved_last():
    side = Side()
    side.table.place(1, last_token=3, draft_token=8, length=7, **ROOM)
    side.offload.save(Save((5,), 0, 1))
    side.offload.save(Save((6,), 0, None))  # of a sequence that had no slot
    side.table.place(0, last_token=1, draft_token=2, length=3, **ROOM)
    side.offload.load(Load((7,), 0, 0))
    side.executor.drain()
    assert int(side.table.draft_of(0)[0]) == 2


def test_memory_for_no_block_or_more_than_there_is_is_refused():
    with pytest.raises(ConfigInvalid, match="hold no KV block"):
        Side(num_host_blocks=0)
    with pytest.raises(ConfigInvalid, match="cannot be had"):
        Side(num_host_blocks=1 << 52)


def test_rank_0_hears_of_a_copy_when_every_rank_has_made_it():
    copied = threading.Event()

    def work(group):
        side = Side(group)
        before = side.content((1, 2))
        if group.rank == 1:
            side.executor.run(lambda: copied.wait(0.2))  # late, and nobody says when it is done but the sum
            side.executor.run(copied.set)
        future = side.offload.save(Save((1, 2), 0, None))
        future.get()
        assert copied.is_set()
        side.offload.load(Load((4, 3), 0, 0))
        side.executor.drain()
        side.executor.close()
        return same(side.content((4, 3)), before)

    assert on_ranks(2, work) == [True, True]


def test_tables_grow_on_the_device():
    side = Side()
    for slot in (0, 2):
        side.table.place(slot, **ROOM)
    side.table.grow([Growth(2, 2, (7,)), Growth(0, 2, (9, 3, 5, 6, 8))], [12, 24])
    rows = [side.table.gather(torch.tensor([slot]), 6)[1] for slot in (0, 2)]
    assert rows[0].block_tables_BM.tolist() == [[4, 2, 9, 3, 5, 6]], "the widest table has six"
    assert rows[1].block_tables_BM.tolist() == [[4, 2, 7, 12, 12, 12]]
    assert [int(row.limit_B) for row in rows] == [24, 12]
