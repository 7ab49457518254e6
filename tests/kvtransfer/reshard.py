"""What a hand-off between groups of different size must leave in the pools, by plain loops over positions and heads.

Nothing here uses the layout's own answers: who holds a head, where a row lies and what a payload is are said again.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout, LayerLayout, PayloadKind
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO

SIZES = (1, 2, 4)
HEADS = (1, 2, 4, 8)
BLOCK_SIZES = (16, 64)
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn")
ROW_LEN = 8  # elements; eight bytes of float8


def layout_of(num_kv_heads, dtype, block_size, num_layers=2):
    """Attention, latent and state layers."""
    extra = (
        LayerLayout(PayloadKind.LATENT, 1, 1, 3 * ROW_LEN),
        LayerLayout(PayloadKind.STATE, num_kv_heads, 1, 5 * ROW_LEN),
        LayerLayout(PayloadKind.STATE, 4, 2, ROW_LEN),
    )
    return KVLayout(
        model_hash="model",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=ROW_LEN,
        block_size=block_size,
        dtype=dtype,
        extra_layers=extra,
    )


def holds(spec, head, rank, size):
    """A head is at every rank whose share of the heads overlaps it; a latent one is everywhere."""
    if spec.kind is PayloadKind.LATENT:
        return True
    return head * size < (rank + 1) * spec.num_heads and rank * spec.num_heads < (head + 1) * size


def heads_at(spec, rank, size):
    """Absolute heads of a rank, ascending."""
    return [head for head in range(spec.num_heads) if holds(spec, head, rank, size)]


def truth_of(layout, prompt_len, seed=0):
    """Random bytes of every layer, [positions, heads, parts, row bytes]."""
    source = np.random.default_rng(seed)
    found = []
    for spec in layout.layers:
        num_positions = 1 if spec.kind is PayloadKind.STATE else prompt_len
        shape = (num_positions, spec.num_heads, spec.num_parts, spec.row_len * layout.item_bytes)
        found.append(source.integers(0, 256, shape, dtype=np.uint8))
    return found


def place(pool, blocks, truth):
    """Put what a rank should hold into its pool, row by row."""
    rank, size = pool.geometry.rank, pool.geometry.size
    for index, (spec, content) in enumerate(zip(pool.layout.layers, truth, strict=True)):
        rows = pool.blocks(index).view(torch.uint8).numpy()
        block_size = 1 if spec.kind is PayloadKind.STATE else pool.layout.block_size
        for local, head in enumerate(heads_at(spec, rank, size)):
            for position in range(len(content)):
                rows[blocks[position // block_size], local, :, position % block_size] = content[position, head]


def payload_of(layout, truth, span, order_block_size):
    """The bytes of a frame: blocks of the sender's size, in each head, part, position."""
    spec, content = layout.layers[span.layer], truth[span.layer]
    order = 1 if spec.kind is PayloadKind.STATE else order_block_size
    rows = []
    for _, positions in itertools.groupby(range(span.first, span.first + span.count), lambda at: at // order):
        inside = list(positions)
        for head in range(span.head_first, span.head_first + span.head_count):
            for part in range(spec.num_parts):
                rows.extend(content[position, head, part] for position in inside)
    return np.concatenate(rows).tobytes()


@dataclass
class Group:
    """The pools of one worker's ranks, filled with garbage; every rank uses the same blocks."""

    layout: KVLayout
    size: int
    prompt_len: int
    seed: int
    make_memory: object = None  # of a rank, from its geometry; else its own
    num_blocks: int = field(init=False)
    blocks: list[int] = field(init=False)
    pools: list[KVPool] = field(init=False)
    ios: list[PoolIO] = field(init=False)
    ranked: RankedPoolIO = field(init=False)

    def __post_init__(self):
        source = np.random.default_rng(self.seed)
        num_needed = -(-self.prompt_len // self.layout.block_size)
        self.num_blocks = num_needed + 2
        self.blocks = source.permutation(self.num_blocks)[:num_needed].tolist()
        self.pools = []
        for rank, geometry in enumerate(self.geometries):
            memory = self.make_memory(geometry) if self.make_memory else bytearray(geometry.num_bytes)
            memory[:] = source.bytes(geometry.num_bytes)
            self.pools.append(self._pool(rank, memory))
        self.ios = [PoolIO(pool.bytes_view, pool.geometry) for pool in self.pools]
        self.ranked = RankedPoolIO(self.ios)

    @property
    def geometries(self):
        return [PoolGeometry(self.layout, self.num_blocks, rank, self.size) for rank in range(self.size)]

    def place(self, truth):
        """As after a prefill."""
        for pool in self.pools:
            place(pool, self.blocks, truth)

    def expected(self, truth):
        """What every byte of every pool must be once `truth` has landed in what the pools hold now."""
        twins = [self._pool(rank, bytearray(pool.bytes_view)) for rank, pool in enumerate(self.pools)]
        for twin in twins:
            place(twin, self.blocks, truth)
        return [twin.bytes_view for twin in twins]

    def _pool(self, rank, memory):
        cpu = torch.device("cpu")
        return KVPool(self.layout, self.num_blocks, cpu, rank=rank, size=self.size, memory=memoryview(memory))
