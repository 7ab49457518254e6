"""What a hand-off between groups of different size must leave in the pools, by plain loops over positions and heads.

Nothing here uses the layout's own answers: who holds a head, where a row lies and what a payload is are said again.
"""

import dataclasses
import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.tests.kvtransfer.kept import latent, state, tail, window

SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8)
BLOCK_SIZES = (16, 64)
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn")
ROW_LEN = 8  # elements; eight bytes of float8


def layout_of(num_kv_heads, dtype, block_size, num_layers=2):
    """Every kind, by head and whole, of other dtypes too, in mixed order."""
    more = (
        latent(3 * ROW_LEN, dtype=dtype),
        window(num_kv_heads, 5 * ROW_LEN, dtype=dtype),
        tail(8, ROW_LEN, parts=2, dtype="float16"),
        state(8, 2 * ROW_LEN, length=16),
        window(2, ROW_LEN, length=100, ring=128, dtype=dtype, whole=True),
        state(1, ROW_LEN, parts=3, length=16, dtype="float64", whole=True),
    )
    layout = KVLayout.of_attention(
        model_hash="model",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=ROW_LEN,
        block_size=block_size,
        dtype=dtype,
        more=more,
    )
    assert layout.problem == ""
    order = (2, 3, 0, 4, 5, 1, 6, 7) if num_layers == 2 else range(len(layout.layers))
    return dataclasses.replace(layout, layers=tuple(layout.layers[index] for index in order))


def kept(spec, num_done):
    """The positions that a layer keeps, one by one."""
    match spec.keep.value:
        case "rows":
            return list(range(num_done))
        case "window":
            return [position for position in range(num_done) if num_done - position <= spec.length]
        case "tail":
            return [position for position in range(num_done) if position // spec.length == num_done // spec.length]
        case "snapshot":
            return [num_done // spec.length]


def holds(spec, head, rank, size):
    """A head is at every rank whose share of the heads overlaps it; one of a whole layer is everywhere."""
    if spec.whole:
        return True
    return head * size < (rank + 1) * spec.num_heads and rank * spec.num_heads < (head + 1) * size


def heads_at(spec, rank, size):
    """Absolute heads of a rank, ascending."""
    return [head for head in range(spec.num_heads) if holds(spec, head, rank, size)]


def truth_of(layout, prompt_len, seed=0):
    """Random bytes of every layer, by position: [heads, parts, row bytes]."""
    source = np.random.default_rng(seed)
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
    found = []
    for spec in layout.layers:
        shape = (spec.num_heads, spec.num_parts, spec.row_len * sizes[spec.dtype])
        found.append({at: source.integers(0, 256, shape, dtype=np.uint8) for at in kept(spec, prompt_len)})
    return found


def row_of(spec, group, position):
    """Where a position lies in a layer of a pool: (block, row)."""
    if spec.keep.value == "rows":
        return group.blocks[position // group.layout.block_size], position % group.layout.block_size
    row = position % spec.ring
    return (group.state_slot * spec.ring + row) // min(spec.ring, 64), row % min(spec.ring, 64)


def place(pool, group, truth):
    """Put what a rank should hold into its pool, row by row."""
    rank, size = pool.geometry.rank, pool.geometry.size
    for index, (spec, content) in enumerate(zip(pool.layout.layers, truth, strict=True)):
        rows = pool.blocks(index).view(torch.uint8).numpy()
        for local, head in enumerate(heads_at(spec, rank, size)):
            for position, of_heads in content.items():
                block, row = row_of(spec, group, position)
                rows[block, local, :, row] = of_heads[head]


def payload_of(layout, truth, span, order_block_size):
    """The bytes of a frame: blocks of the sender's size, in each head, part, position."""
    spec, content = layout.layers[span.layer], truth[span.layer]
    order = order_block_size if spec.keep.value == "rows" else min(spec.ring, 64)
    rows = []
    for _, positions in itertools.groupby(range(span.first, span.first + span.count), lambda at: at // order):
        inside = list(positions)
        for head in range(span.head_first, span.head_first + span.head_count):
            for part in range(spec.num_parts):
                rows.extend(content[position][head, part] for position in inside)
    return np.concatenate(rows).tobytes()


@dataclass
class Group:
    """The pools of one worker's ranks, filled with garbage; all ranks use the same blocks, or the owner alone."""

    layout: KVLayout
    size: int
    prompt_len: int
    seed: int
    make_memory: object = None  # of a rank, from its geometry; else its own
    owner: int | None = None  # which has the sequence; None: ranks share every one
    num_blocks: int = field(init=False)
    num_state_slots: int = field(init=False)
    blocks: list[int] = field(init=False)
    state_slot: int = field(init=False)
    pools: list[KVPool] = field(init=False)
    ios: list[PoolIO] = field(init=False)
    ranked: RankedPoolIO = field(init=False)

    def __post_init__(self):
        source = np.random.default_rng(self.seed)
        self.num_state_slots = 3 if any(spec.keep.value != "rows" for spec in self.layout.layers) else 0
        num_needed = -(-self.prompt_len // self.layout.block_size)
        self.num_blocks = num_needed + 2
        self.blocks = source.permutation(self.num_blocks)[:num_needed].tolist()
        self.state_slot = int(source.integers(self.num_state_slots or 1))
        self.pools = []
        for rank, geometry in enumerate(self.geometries):
            memory = self.make_memory(geometry) if self.make_memory else bytearray(geometry.num_bytes)
            memory[:] = source.bytes(geometry.num_bytes)
            self.pools.append(self._pool(rank, memory))
        self.ios = [PoolIO(pool.bytes_view, pool.geometry) for pool in self.pools]
        self.ranked = RankedPoolIO(self.ios)

    @property
    def geometries(self):
        return [
            PoolGeometry(self.layout, self.num_blocks, rank, self.size, num_state_slots=self.num_state_slots)
            for rank in range(self.size)
        ]

    @property
    def table(self):
        slot = self.state_slot if self.num_state_slots else None
        first = (self.owner or 0) * self.num_blocks
        return BlockTable(tuple(first + block for block in self.blocks), self.layout.block_size, slot)

    def blocks_of(self, span):
        """By position // rows of a block."""
        spec = self.layout.layers[span.layer]
        if spec.keep.value == "rows":
            return self.blocks
        step = min(spec.ring, 64)
        return [row_of(spec, self, first)[0] for first in range(0, span.end, step)]

    def place(self, truth):
        """As after a prefill."""
        for pool in self.pools:
            place(pool, self, truth)

    def expected(self, truth):
        """What every byte of every pool must be once `truth` has landed in what the pools hold now."""
        twins = [self._pool(rank, bytearray(pool.bytes_view)) for rank, pool in enumerate(self.pools)]
        for twin in twins if self.owner is None else [twins[self.owner]]:
            place(twin, self, truth)
        return [twin.bytes_view for twin in twins]

    def _pool(self, rank, memory):
        cpu = torch.device("cpu")
        return KVPool(
            self.layout,
            self.num_blocks,
            cpu,
            rank=rank,
            size=self.size,
            num_state_slots=self.num_state_slots,
            memory=memoryview(memory),
        )
