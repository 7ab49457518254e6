"""Move blocks of KV between two pools by address, and digest them on the way: one launch for a layer, or for several.

Either pool may be of this device, of a peer device (CUDA IPC) or pinned host memory. Blocks may have different sizes on
the two sides, and each side may hold other heads: rows are addressed by position, head and part. The grid is as many
programs as may be used of the device's multiprocessors; each walks over tiles of rows with 16-byte accesses.

Completion is a word in memory (`Completion`) that the last program writes after all bytes and all digests are
where they belong, so that a reader of the word needs no call to the device. It refuses to know what blocks mean, who
may write them, and streams: a launch goes to the current one.

The digest is that of `kernels.digest`. 64-bit products must wrap, which Triton's integers do.

Shapes: R rows of a tile, C words of each, N blocks, H heads, P parts, S positions of a block, W words of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from baton.kernels.copies import to_device
from baton.kernels.digest import PERIOD, weight

WORD_BYTES = 8
MAX_LAYERS = 256  # of one launch
MAX_COLUMNS = 512
MIN_COLUMNS = 16  # fewer would not fill a 128-byte line

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_0 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_1 = tl.constexpr(0x94D049BB133111EB)
_SALT_LAYER = tl.constexpr(1 << 60)
_SALT_WORD = tl.constexpr(4 << 60)
_PERIOD = tl.constexpr(PERIOD)
# Assembly, since Triton has no store with an order, and an atomic on host memory would need PCIe atomics, which virtual
# machines lack. By one thread, the one that stores scalars: so the fence covers the digests that it has just stored.
_PUBLISH = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p fence.acq_rel.sys;
    @p st.relaxed.sys.global.u64 [$1], $2;
    mov.u32 $0, t;
}""")


class LayerShape(Protocol):
    """Where the rows of a layer lie in a pool: [N, H, P, S, W], contiguous, in bytes from the pool's start."""

    @property
    def offset_bytes(self) -> int:
        """Of the layer."""
        ...

    @property
    def block_bytes(self) -> int:
        """All heads of a block."""
        ...

    @property
    def head_first(self) -> int:
        """First head that the pool holds."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads that the pool holds."""
        ...

    @property
    def num_parts(self) -> int:
        """Of each head."""
        ...

    @property
    def rows_per_block(self) -> int:
        """Of one head and part."""
        ...

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        ...


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """A pool as the launching device reaches it: its first byte there, and its layers."""

    address: int
    layers: Sequence[LayerShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Positions [first, first + count) of some heads of layers [layer, layer + num_layers), all of one shape."""

    layer: int
    first: int
    count: int
    head_first: int
    head_count: int
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a launch spreads.

    Attributes:
        num_programs: multiprocessors used, at most.
        num_warps: of each program.
        tile_words: that a program moves in one step; 16 bytes and more for each thread.
    """

    num_programs: int
    num_warps: int = 16
    tile_words: int = 4096


@dataclass(frozen=True, slots=True)
class Completion:
    """Where a launch says that it is done: `1 + num_layers` words at `address`, the digests from the second on.

    `sequence` is written to the first word after everything else. The address is of memory that the device may write,
    usually pinned host memory.
    """

    address: int
    sequence: int


class Workspace:
    """What launches on one stream need on the device; not to be shared between streams.

    Args:
        device: of the launches.
        max_len: positions that a digest may reach.
    """

    def __init__(self, device: torch.device, max_len: int) -> None:
        # [programs done, digest of each layer]; each launch leaves zeros.
        self.sums = torch.zeros(1 + MAX_LAYERS, dtype=torch.int64, device=device)
        low = [weight((3 << 60) + position) for position in range(PERIOD)]
        high = [weight((2 << 60) + stretch) for stretch in range(-(-max_len // PERIOD))]
        table = [value - (1 << 64) if value >> 63 else value for value in low + high]
        self.weights = to_device(torch.tensor(table, dtype=torch.int64), device)


def kv_scatter(
    source: PoolAddress,
    source_blocks: torch.Tensor,
    target: PoolAddress,
    target_blocks: torch.Tensor,
    piece: Piece,
    workspace: Workspace,
    completion: Completion,
    tuning: Tuning,
    *,
    with_digest: bool = True,
) -> None:
    """Copy a piece from one pool to the other; without a digest, zeros are reported.

    Args:
        source: pool that is read.
        source_blocks: int32 ids on the device, by logical index; its own block size.
        target: pool that is written.
        target_blocks: the same for the target, whose block size may differ.
        piece: what to move; both pools hold all of it.
        workspace: of the current stream.
        completion: told when all is there.
        tuning: how to spread it.
        with_digest: of what was read.
    """
    move(source, source_blocks, target, target_blocks, piece, workspace, completion, tuning, with_digest)


def move(
    source: PoolAddress,
    source_blocks: torch.Tensor,
    target: PoolAddress | None,
    target_blocks: torch.Tensor,
    piece: Piece,
    workspace: Workspace,
    completion: Completion,
    tuning: Tuning,
    with_digest: bool,
) -> None:
    """Launch the kernel for `kv_scatter`, or without a target for `kv_digest`."""
    here = source.layers[piece.layer]
    there = here if target is None else target.layers[piece.layer]
    assert (here.row_bytes, here.num_parts) == (there.row_bytes, there.num_parts)
    for shape in (here, there):
        assert shape.head_first <= piece.head_first
        assert piece.head_first + piece.head_count <= shape.head_first + shape.num_heads
    assert 0 < piece.num_layers <= MAX_LAYERS
    assert piece.first + piece.count <= (len(workspace.weights) - PERIOD) * PERIOD
    to_address, to_layers = (source.address, source.layers) if target is None else (target.address, target.layers)
    assert source.address % 16 == to_address % 16 == 0
    tile = tile_of(here, there, piece.head_count * here.num_parts, tuning)
    _move_kernel[(tuning.num_programs,)](
        source.address,
        source_blocks,
        here.offset_bytes // WORD_BYTES,
        _layer_words(source.layers, piece),
        piece.head_first - here.head_first,
        to_address,
        target_blocks,
        there.offset_bytes // WORD_BYTES,
        _layer_words(to_layers, piece),
        piece.head_first - there.head_first,
        piece.layer,
        piece.num_layers,
        piece.first,
        piece.count,
        piece.head_first,
        piece.head_count,
        workspace.weights,
        workspace.sums,
        completion.address,
        completion.sequence,
        COPY=target is not None,
        DIGEST=with_digest,
        **tile,
    )


def tile_of(here: LayerShape, there: LayerShape, num_pairs: int, tuning: Tuning) -> dict[str, Any]:
    """The compile-time arguments for a pair of shapes; `num_pairs` (head, part) pairs are to be moved."""
    row_words = here.row_bytes // WORD_BYTES
    columns = min(row_words & -row_words, MAX_COLUMNS)
    if columns < MIN_COLUMNS:
        columns = min(triton.next_power_of_2(row_words), MAX_COLUMNS)
    rows = tuning.tile_words // columns
    unit = min(here.rows_per_block, there.rows_per_block, rows)
    pairs = min(rows // unit, triton.next_power_of_2(num_pairs))
    return {
        "W": row_words,
        "P": here.num_parts,
        "FROM_H": here.num_heads,
        "FROM_S": here.rows_per_block,
        "TO_H": there.num_heads,
        "TO_S": there.rows_per_block,
        "UNIT": unit,
        "PAIRS": pairs,
        "COLUMNS": columns,
        "num_warps": tuning.num_warps,
    }


def _layer_words(layers: Sequence[LayerShape], piece: Piece) -> int:
    """Words from one layer of the piece to the next."""
    if piece.num_layers == 1:
        return 0
    shapes = layers[piece.layer : piece.layer + piece.num_layers]
    step = shapes[1].offset_bytes - shapes[0].offset_bytes
    wanted = [shapes[0].offset_bytes + index * step for index in range(piece.num_layers)]
    assert [shape.offset_bytes for shape in shapes] == wanted, "layers of one launch have one shape"
    return step // WORD_BYTES


@triton.jit
def _mix(index):  # noqa: ANN001, ANN202
    """`kernels.digest.weight` of uint64 indices, as int64."""
    value = index * _GOLDEN + _GOLDEN
    value = (value ^ (value >> 30)) * _MULTIPLIER_0
    value = (value ^ (value >> 27)) * _MULTIPLIER_1
    return ((value ^ (value >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit
def _offsets(  # noqa: ANN202
    blocks,  # noqa: ANN001
    position,  # noqa: ANN001
    head,  # noqa: ANN001
    its_R,  # noqa: ANN001
    step_R,  # noqa: ANN001
    column_C,  # noqa: ANN001
    H: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
):
    """Words of a tile, from the layer's start: `its_R` are (head, part) pairs from `head`, in one block."""
    block = tl.load(blocks + position // S).to(tl.int64)
    row_R = head * P * S + position % S + its_R * S + step_R
    return block * (H * P * S * W) + row_R[:, None] * W + column_C[None, :]


@triton.jit
def _word_weights(head_first, its_R, column_C, P: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: ANN001, ANN202
    """Of the words of (head, part) pairs; 0 beyond the row."""
    head_R = (head_first + its_R // P).to(tl.uint64)
    pair_R = (head_R << 32) + ((its_R % P).to(tl.uint64) << 24) + _SALT_WORD
    word_RC = _mix(pair_R[:, None] + column_C.to(tl.uint64)[None, :])
    if W % COLUMNS:
        word_RC = tl.where((column_C < W)[None, :], word_RC, 0)
    return word_RC


# Specialized code is compiled for each kind of value: heads differ by rank, and the first landing must not wait for it.
_PLAIN = ["from_head", "to_head", "layer", "num_layers", "first", "count", "head_first", "num_heads", "sequence"]


@triton.jit(do_not_specialize=_PLAIN)
def _move_kernel(
    from_address: tl.int64,
    from_blocks,  # noqa: ANN001
    from_offset: tl.int64,
    from_layer_words: tl.int64,
    from_head: tl.int32,
    to_address: tl.int64,
    to_blocks,  # noqa: ANN001
    to_offset: tl.int64,
    to_layer_words: tl.int64,
    to_head: tl.int32,
    layer: tl.int32,
    num_layers: tl.int32,
    first: tl.int32,
    count: tl.int32,
    head_first: tl.int32,
    num_heads: tl.int32,
    weights,  # noqa: ANN001
    sums,  # noqa: ANN001
    completion: tl.int64,
    sequence: tl.int64,
    W: tl.constexpr,
    P: tl.constexpr,
    FROM_H: tl.constexpr,
    FROM_S: tl.constexpr,
    TO_H: tl.constexpr,
    TO_S: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPY: tl.constexpr,
    DIGEST: tl.constexpr,
) -> None:
    """Tiles of PAIRS (head, part) pairs x UNIT positions x COLUMNS words; tile t goes to program t mod their number."""
    num_programs = tl.num_programs(0)
    num_units = (first + count + UNIT - 1) // UNIT - first // UNIT
    num_groups = (num_heads * P + PAIRS - 1) // PAIRS * ((W + COLUMNS - 1) // COLUMNS)
    from_base = tl.multiple_of(from_address.to(tl.pointer_type(tl.int64)), 16) + from_offset
    to_base = tl.multiple_of(to_address.to(tl.pointer_type(tl.int64)), 16) + to_offset
    pair_R = tl.arange(0, PAIRS * UNIT) // UNIT
    step_R = tl.arange(0, PAIRS * UNIT) % UNIT
    start = tl.program_id(0)
    for index in range(num_layers):
        total_RC = tl.zeros([PAIRS * UNIT, COLUMNS], dtype=tl.int64)
        for group in range(num_groups):
            its_R = group // ((W + COLUMNS - 1) // COLUMNS) * PAIRS + pair_R
            column_C = group % ((W + COLUMNS - 1) // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
            sum_RC = tl.zeros([PAIRS * UNIT, COLUMNS], dtype=tl.int64)
            for unit in range(start, num_units, num_programs):
                position = (first // UNIT + unit) * UNIT
                mask_R = (position + step_R >= first) & (position + step_R < first + count) & (its_R < num_heads * P)
                mask_RC = mask_R[:, None] & (column_C < W)[None, :] if W % COLUMNS else mask_R[:, None]
                at_RC = _offsets(from_blocks, position, from_head, its_R, step_R, column_C, FROM_H, FROM_S, P, W)
                words_RC = tl.load(from_base + at_RC, mask=mask_RC, other=0)
                if COPY:
                    at_RC = _offsets(to_blocks, position, to_head, its_R, step_R, column_C, TO_H, TO_S, P, W)
                    tl.store(to_base + at_RC, words_RC, mask=mask_RC)
                if DIGEST:
                    low_R = tl.load(weights + (position % _PERIOD + step_R), mask=mask_R, other=0)
                    sum_RC += (words_RC + 1) * (low_R * tl.load(weights + (_PERIOD + position // _PERIOD)))[:, None]
            if DIGEST:
                total_RC += sum_RC * _word_weights(head_first, its_R, column_C, P, W, COLUMNS)
            start = ((start - num_units) % num_programs + num_programs) % num_programs
        if DIGEST:
            layer_weight = _mix((layer + index).to(tl.uint64) + _SALT_LAYER)
            tl.atomic_add(sums + 1 + index, tl.sum(total_RC) * layer_weight, sem="relaxed")
        from_base += from_layer_words
        to_base += to_layer_words
    _complete(sums, completion, sequence, num_layers)


@triton.jit
def _complete(sums, completion, sequence, num_layers) -> None:  # noqa: ANN001
    """Count this program as done; the last one hands the digests out, says so, and leaves the sums at zero."""
    # The stores of all threads come before the barrier, the release of one thread after it: so whoever acquires the
    # count, and whoever reads the word that is written then, sees them; "sys", because it may be the host or a peer.
    tl.debug_barrier()
    num_done = tl.atomic_add(sums, 1, sem="acq_rel", scope="sys")
    if num_done == tl.num_programs(0) - 1:
        words = completion.to(tl.pointer_type(tl.int64))
        for index in range(num_layers):
            tl.store(words + 1 + index, tl.atomic_xchg(sums + 1 + index, 0, sem="relaxed"))
        tl.atomic_xchg(sums, 0, sem="relaxed")
        if _INTERPRETED:
            tl.store(words, sequence)
        else:
            tl.inline_asm_elementwise(_PUBLISH, "=r,l,l", [completion, sequence], dtype=tl.int32, is_pure=False, pack=1)
