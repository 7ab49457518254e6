"""Rows of `baton bench kernels` for `attention_decode`.

Lengths are equal unless a row says "ragged" (one sequence has the whole context, the others a quarter of it) or
"spread" (lengths are evenly spaced between nothing and the context). "by_work" is ours with the split-KV work partition
whatever the table says; "by_work_planned" is the same if another layer has already made the plan.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from baton.bench.kernel_bench.baselines import PagedAttention, fa3, vllm_attention
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.attention import paged as attention
from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.decode_plan import PlanOptions, SplitKVPlans, default_options, rows_of_program, table_shape
from baton.kernels.attention.ordered import attention_ordered_decode

BLOCK_SIZE = 16
_TORCH_MAX_BYTES = 3 << 30  # limit of KV, because torch copies and masks all of it
HEADS = ((32, 8, 128), (32, 4, 128), (16, 2, 256))


@dataclass(frozen=True, slots=True)
class AttentionDecodeShape:
    """Shape of one launch; A query heads, H KV heads, D head size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_sequences: int
    context_len: int
    num_queries: int
    is_float8: bool = False
    is_ragged: bool = False
    is_spread: bool = False

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"
        kind = "fp8" if self.is_float8 else "bf16"
        ragged = " ragged" if self.is_ragged else " spread" if self.is_spread else ""
        return f"{heads} {kind} B={self.num_sequences} L={self.context_len} q={self.num_queries}{ragged}"

    @property
    def lengths(self) -> list[int]:
        """Length of every sequence, including the rows being computed."""
        if self.is_spread:
            return [self.context_len * (index + 1) // self.num_sequences for index in range(self.num_sequences)]
        others = self.context_len // 4 if self.is_ragged else self.context_len
        return [self.context_len] + [others] * (self.num_sequences - 1)

    @property
    def num_rows(self) -> int:
        """Rows of one KV head."""
        return self.num_queries * self.num_heads // self.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V at one position of one head."""
        return 2 * self.head_dim * (1 if self.is_float8 else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that must be read."""
        return sum(self.lengths) * self.num_kv_heads * self.row_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries; the result has as many."""
        return 2 * self.num_sequences * self.num_queries * self.num_heads * self.head_dim

    @property
    def num_flops(self) -> int:
        """FLOPs of both matmuls."""
        return 4 * sum(self.lengths) * self.num_queries * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Buffers:
    """One set of arguments of `attention_decode`."""

    query_BQAD: torch.Tensor
    key_NHSD: torch.Tensor
    value_NHSD: torch.Tensor
    block_tables_BM: torch.Tensor
    positions_BQ: torch.Tensor
    context_len: int
    lengths: Sequence[int]
    scales: Mapping[str, torch.Tensor]
    plans: SplitKVPlans = field(default_factory=SplitKVPlans)

    def run(
        self,
        *,
        invariant: bool = False,
        with_plans: bool = False,
        options: Mapping[str, object] | None = None,
        max_context_len: int | None = None,
    ) -> torch.Tensor:
        """Run ours."""
        return attention_decode(
            self.query_BQAD, self.key_NHSD, self.value_NHSD, self.block_tables_BM, self.positions_BQ,
            max_context_len or self.context_len, key_scale=self.scales.get("key_scale"),
            value_scale=self.scales.get("value_scale"), invariant=invariant, options=options,
            plans=self.plans if with_plans else None,
        )  # fmt: skip

    def run_ordered(self) -> torch.Tensor:
        """Run ours in batch-invariant numerics, where prefill has the same bits."""
        return attention_ordered_decode(
            self.query_BQAD, self.key_NHSD, self.value_NHSD, self.block_tables_BM, self.positions_BQ, self.context_len
        )

    def run_library(self) -> torch.Tensor:
        """Gather and mask the blocks, and run torch's attention."""
        return attention.attention_decode(
            self.query_BQAD, self.key_NHSD, self.value_NHSD, self.block_tables_BM, self.positions_BQ, self.context_len
        )

    def for_others(self) -> PagedAttention:
        """Describe the buffers, so that baselines can make their own."""
        return PagedAttention(
            query_THD=self.query_BQAD.flatten(0, 1),
            key_NHSD=self.key_NHSD,
            value_NHSD=self.value_NHSD,
            block_table=self.block_tables_BM,
            q_lens=[self.query_BQAD.shape[1]] * len(self.lengths),
            kv_lens=self.lengths,
            scale=self.query_BQAD.shape[3] ** -0.5,
        )


def make(shape: AttentionDecodeShape, device: torch.device) -> Buffers:
    """Make a layer of a pool with random KV, with each sequence's blocks scattered over it."""
    num_blocks = -(-shape.context_len // BLOCK_SIZE)
    total = num_blocks * shape.num_sequences
    pool_shape = (total + 1, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim)
    if shape.is_float8:
        pool = torch.empty(pool_shape, dtype=torch.float8_e4m3fn, device=device)
        for blocks in pool.split(4096):
            blocks.copy_(torch.randn(blocks.shape, dtype=torch.bfloat16, device=device))
    else:
        pool = torch.empty(pool_shape, dtype=torch.bfloat16, device=device).normal_()
    ends_B1 = torch.tensor(shape.lengths, device=device)[:, None]
    query_shape = (shape.num_sequences, shape.num_queries, shape.num_heads, shape.head_dim)
    names = ("key_scale", "value_scale") if shape.is_float8 else ()
    return Buffers(
        query_BQAD=torch.randn(query_shape, dtype=torch.bfloat16, device=device),
        key_NHSD=pool[:, :, 0],
        value_NHSD=pool[:, :, 1],
        block_tables_BM=torch.randperm(total, device=device).view(shape.num_sequences, num_blocks),
        positions_BQ=ends_B1 - shape.num_queries + torch.arange(shape.num_queries, device=device),
        context_len=shape.context_len,
        lengths=shape.lengths,
        scales={name: torch.ones(shape.num_kv_heads, device=device) for name in names},
    )


def by_work(shape: AttentionDecodeShape) -> Mapping[str, object]:
    """Options of the split-KV work partition, where no table has better ones."""
    rule = default_options(shape.num_rows, shape.head_dim, 1 if shape.is_float8 else 2)
    return asdict(rule) | {"shares": True, "pdl": True}


def _prepare(shape: AttentionDecodeShape, device: torch.device, num_sets: int) -> Systems:
    sets = [make(shape, device) for _ in range(num_sets)]
    options = by_work(shape)
    systems: dict[str, Sequence[Call]] = {
        "ours": [buffers.run for buffers in sets],
        "invariant": [partial(buffers.run, invariant=True) for buffers in sets],
        "by_work": [partial(buffers.run, options=options) for buffers in sets],
    }
    if not shape.is_float8:
        systems["ordered"] = [buffers.run_ordered for buffers in sets]
    for buffers in sets:
        buffers.run(options=options, with_plans=True)  # makes the plan outside the graph
    systems["by_work_planned"] = [partial(buffers.run, options=options, with_plans=True) for buffers in sets]
    if not shape.is_float8 and shape.kv_bytes <= _TORCH_MAX_BYTES:
        systems["torch"] = [buffers.run_library for buffers in sets]
    others = [buffers.for_others() for buffers in sets] if device.type == "cuda" else []
    return systems | fa3(others) | vllm_attention(others)


def _shapes() -> list[AttentionDecodeShape]:
    """Shapes of the anchors, further ones of each kind, float8, and ragged ones."""
    sizes = ((1, 1024), (1, 4096), (16, 1024), (1, 32768), (64, 1024), (16, 8192), (64, 8192), (256, 1024), (256, 8192))
    found = [AttentionDecodeShape(*heads, *size, q) for heads in HEADS for size in sizes for q in (1, 4)]
    found += [AttentionDecodeShape(*heads, 64, 4096, q) for heads in HEADS for q in (1, 4)]
    found += [AttentionDecodeShape(*HEADS[0], *size, q) for size in ((16, 32768), (128, 8192)) for q in (1, 4)]
    found += [AttentionDecodeShape(*HEADS[0], *size, q) for size in ((1, 32768), (64, 4096)) for q in (2, 8)]
    found += [
        AttentionDecodeShape(*heads, *size, q, True)
        for heads in HEADS
        for size in ((1, 1024), (64, 8192))
        for q in (1, 4)
    ]
    found += [AttentionDecodeShape(*heads, 64, 8192, q, is_spread=True) for heads in HEADS for q in (1, 4)]
    found += [AttentionDecodeShape(*heads, 64, 4096, 8) for heads in HEADS[1:]]
    found += [AttentionDecodeShape(*heads, 64, 8192, q, is_ragged=True) for heads in HEADS for q in (1, 4)]
    found.append(AttentionDecodeShape(28, 4, 128, 64, 4096, 1))
    return found


def cases() -> list[KernelCase]:
    """A case per shape, and a tiny one for CPUs."""
    tiny = AttentionDecodeShape(8, 2, 32, 2, 64, 2)
    return [
        KernelCase(
            kernel="attention_decode",
            shape=str(shape),
            num_bytes=shape.kv_bytes + 2 * shape.query_bytes,
            num_flops=shape.num_flops,
            is_read=True,
            set_bytes=shape.kv_bytes,
            prepare=partial(_prepare, shape),
            only_gpu=shape is not tiny,
        )
        for shape in (*_shapes(), tiny)
    ]


_MANY = 16  # lengths may be ragged from this many sequences on
_RAGGED_LEN = 4096  # and from this context on
# tile, rows (0: as many as there are, padded), swap, stages, warps, programs per multiprocessor
_TILES: Mapping[tuple[int, bool], Sequence[tuple[int, int, bool, int, int, int]]] = {
    (128, False): (
        (64, 0, True, 3, 4, 2), (64, 0, True, 2, 4, 3), (128, 0, True, 2, 4, 1), (128, 0, True, 3, 8, 1),
        (64, 0, False, 3, 4, 3), (32, 0, False, 4, 4, 4), (64, 0, False, 3, 4, 2), (64, 64, False, 3, 4, 2),
    ),
    (256, False): (
        (64, 0, True, 3, 8, 1), (64, 0, True, 2, 8, 1), (32, 0, False, 3, 4, 3), (32, 0, False, 4, 4, 2),
        (64, 0, False, 3, 8, 1), (64, 64, False, 2, 8, 1),
    ),
    (128, True): ((64, 0, False, 3, 4, 3), (64, 0, True, 3, 4, 3), (64, 64, False, 3, 4, 2)),
    (256, True): ((32, 0, False, 3, 4, 3), (64, 0, False, 3, 8, 1)),
}  # fmt: skip
# Float8 kernels that widen in registers, by rows and D: tile, stages, warps, programs per multiprocessor, and more.
_DIRECT: Mapping[tuple[int, int], Sequence[tuple[int, int, int, int, Mapping[str, object]]]] = {
    (16, 128): (
        (64, 3, 4, 3, {"direct": 1, "apart": True, "registers": 168}),
        (64, 4, 4, 3, {"direct": 1, "apart": True, "registers": 168}),
        (64, 5, 4, 2, {"direct": 1, "apart": True}),
        (64, 3, 4, 3, {"direct": 2, "apart": True, "registers": 168}),
        (32, 4, 2, 4, {"direct": 1, "apart": True}),
        (128, 3, 4, 2, {"direct": 1, "apart": True}),
        (64, 3, 4, 3, {"direct": 1}),
        (64, 4, 4, 3, {"direct": 1}),
        (64, 3, 4, 4, {"direct": 2}),
        (128, 3, 4, 2, {"direct": 1}),
        (128, 3, 8, 2, {"direct": 1}),
    ),
    (32, 128): (
        (64, 3, 4, 3, {"direct": 1}),
        (64, 4, 4, 3, {"direct": 1}),
        (64, 3, 4, 3, {"direct": 2}),
        (32, 4, 4, 3, {"direct": 1}),
        (128, 3, 8, 1, {"direct": 1}),
    ),
    (16, 256): (
        (32, 3, 4, 3, {"direct": 1}),
        (32, 4, 4, 3, {"direct": 1}),
        (32, 3, 4, 3, {"direct": 2}),
        (64, 3, 4, 2, {"direct": 1}),
        (64, 3, 8, 2, {"direct": 1}),
        (128, 3, 8, 1, {"direct": 1}),
    ),
    (32, 256): (
        (32, 3, 4, 2, {"direct": 1}),
        (32, 4, 4, 2, {"direct": 1}),
        (32, 3, 4, 3, {"direct": 2, "registers": 168}),
        (64, 3, 4, 2, {"direct": 1}),
        (64, 3, 8, 1, {"direct": 1}),
        (128, 3, 8, 1, {"direct": 1}),
    ),
}
_LONG = 1 << 20  # positions x sequences x KV heads, from which on a launch is long
# Split-KV work partitions: index into `_TILES`, and target programs per multiprocessor. More programs than run at once
# mean several rounds of shorter shares, whose last round leaves less idle.
_BY_WORK: Mapping[int, Sequence[tuple[int, int]]] = {
    128: ((0, 2), (0, 4), (0, 6), (0, 8), (0, 12), (4, 4), (4, 6), (4, 8), (5, 8), (7, 6)),
    256: ((0, 3), (0, 6), (2, 6), (2, 9), (4, 1), (4, 3), (4, 6)),
}
# For long launches, by rows and D, the smallest size, and: tile, rows, swap, stages, warps, programs per
# multiprocessor, and the longest part (0: split-KV work partition).
_LONG_FORMS: Mapping[tuple[int, int], tuple[int, Sequence[tuple[int, int, bool, int, int, int, int]]]] = {
    (16, 256): (
        1 << 19,
        (
            (32, 16, False, 3, 4, 3, 4096), (32, 16, False, 3, 4, 3, 1024), (32, 16, False, 3, 4, 3, 0),
            (32, 16, False, 3, 4, 6, 0), (64, 16, False, 3, 8, 1, 8192), (64, 16, False, 3, 8, 1, 1024),
            (64, 16, False, 3, 8, 1, 0), (64, 16, False, 3, 8, 2, 0), (32, 16, False, 4, 4, 2, 0),
            (32, 16, False, 3, 4, 3, 2048), (64, 16, False, 2, 4, 2, 1024),
        ),
    ),
    (32, 256): (
        1 << 19,
        (
            (32, 32, False, 3, 4, 3, 4096), (32, 32, False, 3, 4, 2, 1024), (32, 32, False, 3, 4, 2, 0),
            (32, 32, False, 3, 4, 4, 0), (64, 32, False, 3, 8, 1, 8192), (64, 32, False, 3, 8, 1, 1024),
            (64, 32, False, 3, 8, 1, 0), (64, 32, False, 2, 4, 2, 0), (64, 32, True, 3, 8, 1, 0),
            (64, 64, False, 3, 8, 1, 0), (64, 32, False, 2, 4, 2, 1024),
        ),
    ),
    (64, 256): (
        1 << 19,
        (
            (64, 64, False, 2, 8, 1, 4096), (64, 64, False, 3, 8, 1, 4096), (32, 64, False, 2, 4, 2, 4096),
            (32, 64, False, 4, 4, 1, 4096), (32, 64, False, 3, 8, 1, 4096), (64, 64, False, 2, 8, 1, 0),
            (64, 64, False, 3, 8, 1, 0), (32, 32, False, 3, 4, 2, 0),
        ),
    ),
    (32, 128): (
        1 << 21,
        (
            (64, 32, False, 3, 4, 3, 4096), (64, 32, False, 3, 4, 2, 8192), (64, 32, False, 3, 4, 2, 0),
            (64, 32, False, 3, 4, 3, 0), (64, 32, True, 3, 4, 2, 8192), (64, 32, True, 3, 4, 2, 0),
            (64, 64, False, 3, 4, 2, 8192), (64, 64, False, 3, 4, 2, 0), (128, 32, False, 3, 8, 1, 0),
            (64, 32, False, 3, 4, 2, 2048),
        ),
    ),
}  # fmt: skip
# For short launches: the same, with the target number of programs in halves of the GPU's multiprocessors.
_SHORT_FORMS: Mapping[int, Sequence[tuple[int, bool, int, int, int]]] = {
    128: (
        (64, False, 3, 4, 4),
        (64, False, 3, 4, 6),
        (64, False, 3, 4, 8),
        (64, False, 3, 4, 12),
        (64, True, 3, 4, 4),
        (64, True, 3, 4, 6),
        (128, True, 2, 4, 2),
        (32, False, 4, 4, 8),
        (64, False, 3, 8, 4),
    ),
    256: (
        (32, False, 3, 4, 4),
        (32, False, 3, 4, 6),
        (32, False, 3, 4, 12),
        (64, False, 3, 8, 1),
        (64, False, 3, 8, 2),
        (64, False, 3, 8, 4),
        (32, False, 3, 8, 4),
        (32, False, 2, 4, 6),
    ),
}
_SHORT_SIZES = (8192, 32_768, 65_536, 131_072)  # e.g. of a sequence of 4,096, and of 16 of 1,024
_MAX_CANDIDATES = 40


def _candidates(head_dim: int, num_rows: int, is_float8: bool, size: int, has_many: bool) -> list[Mapping[str, object]]:
    """For small launches, with and without early start of the second kernel; for long ones, parts of several lengths.

    With several sequences, also split-KV work partitions.
    """
    rows = rows_of_program(num_rows)
    if not is_float8 and size >= _LONG_FORMS.get((rows, head_dim), (1 << 62, ()))[0]:
        return _long_candidates(rows, head_dim)
    if not is_float8 and size in _SHORT_SIZES:
        return _short_candidates(rows, head_dim)
    forms: list[tuple[int, Mapping[str, object]]] = [
        (each, {"tile": tile, "rows": own_rows or rows, "swap": swap, "stages": stages, "warps": warps})
        for tile, own_rows, swap, stages, warps, each in _TILES[head_dim, is_float8]
    ]
    tiled = len(forms)
    if is_float8:
        forms += [
            (each, {"tile": tile, "rows": rows, "swap": False, "stages": stages, "warps": warps, **others})
            for tile, stages, warps, each, others in _DIRECT.get((rows, head_dim), ())
        ]
    found: list[Mapping[str, object]] = []
    for each, base in forms:
        slots = 132 * each
        if size < _LONG:
            shares = (slots,) if is_float8 else (slots // 2, slots, 2 * slots)
            found += [{**base, "slots": share, "pdl": True} for share in shares]
            found.append({**base, "slots": slots, "pdl": False})
        else:
            lengths = (2048, 8192) if is_float8 else (1024, 2048, 4096, 8192)
            found += [{**base, "slots": slots, "max_part_len": length, "pdl": True} for length in lengths]
    if not has_many:
        return found
    if is_float8:
        divided = [(base, count) for _, base in (*forms[tiled : tiled + 2], forms[0]) for count in (3, 6, 9)]
    else:
        divided = [(forms[index][1], count) for index, count in _BY_WORK[head_dim]]
    by_work = [{**base, "slots": 132 * count, "shares": True, "pdl": True} for base, count in divided]
    return found[: _MAX_CANDIDATES - len(by_work)] + by_work


def _long_candidates(rows: int, head_dim: int) -> list[Mapping[str, object]]:
    """Candidates of `_LONG_FORMS`."""
    found: list[Mapping[str, object]] = []
    for tile, own_rows, swap, stages, warps, each, part_len in _LONG_FORMS[rows, head_dim][1]:
        base = {"tile": tile, "rows": own_rows, "swap": swap, "stages": stages, "warps": warps, "slots": 132 * each}
        if own_rows == 32 and not swap and warps == 8:  # otherwise the assembler spills, to make room for two programs
            base["registers"] = 168
        found.append({**base, "pdl": True, **({"max_part_len": part_len} if part_len else {"shares": True})})
    return found


def _short_candidates(rows: int, head_dim: int) -> list[Mapping[str, object]]:
    """Candidates of `_SHORT_FORMS`."""
    return [
        {"tile": tile, "rows": rows, "swap": swap, "stages": stages, "warps": warps, "slots": 66 * halves, "pdl": True}
        for tile, swap, stages, warps, halves in _SHORT_FORMS[head_dim]
    ]


def _prepare_candidate(
    shapes: Sequence[AttentionDecodeShape], device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    PlanOptions(**options)  # type: ignore[arg-type]  # a row that is none fails here
    return [partial(make(shape, device).run, options=options) for _ in range(num_sets) for shape in shapes]


def _tuned_shapes() -> list[tuple[AttentionDecodeShape, bool]]:
    """Shapes that the table covers, and whether a row is for their number of queries only."""
    sizes = ((1, 1024), (1, 32768), (64, 1024), (16, 8192), (64, 8192))
    shapes = [AttentionDecodeShape(*HEADS[0], *size, 1) for size in (*sizes, (16, 1024), (256, 8192))]
    shapes += [AttentionDecodeShape(*HEADS[1], *size, q) for q in (1, 4) for size in sizes]
    more_sizes = ((1, 4096), (16, 1024), (64, 4096), (256, 1024), (256, 8192))
    shapes += [AttentionDecodeShape(*HEADS[2], *size, q) for q in (1, 4) for size in (*sizes, *more_sizes)]
    shapes += [
        AttentionDecodeShape(*HEADS[1], 256, 8192, 4),
        AttentionDecodeShape(*HEADS[1], 16, 1024, 4),
        AttentionDecodeShape(*HEADS[2], 64, 4096, 8),
    ]
    shapes += [AttentionDecodeShape(*heads, *size, 8) for heads in HEADS[1:] for size in sizes]
    float8_sizes = ((1, 1024), (16, 8192), (64, 8192))
    shapes += [AttentionDecodeShape(*HEADS[0], *size, 1, True) for size in float8_sizes]
    shapes += [AttentionDecodeShape(*HEADS[1], *size, 4, True) for size in float8_sizes]
    shapes += [AttentionDecodeShape(*HEADS[2], *size, q, True) for q in (1, 4) for size in float8_sizes]
    found = [(shape, False) for shape in (*shapes, *_ragged(shapes))]
    own = [AttentionDecodeShape(*HEADS[0], *size, q) for q in (4, 8) for size in (*sizes, (16, 1024), (64, 4096))]
    return found + [(shape, True) for shape in (*own, *_ragged(own))]


def _ragged(shapes: Sequence[AttentionDecodeShape]) -> list[AttentionDecodeShape]:
    """Ragged and spread variants of shapes with many long sequences, since served lengths are never equal."""
    many = [shape for shape in shapes if shape.num_sequences >= _MANY and shape.context_len >= _RAGGED_LEN]
    spread = [replace(shape, is_spread=True) for shape in many if shape.context_len >= 2 * _RAGGED_LEN]
    return [replace(shape, is_ragged=True) for shape in many] + spread


def tuning() -> list[TuningPoint]:
    """Each kind of rows at the sizes of the anchors; shapes that share a row of the table are timed together."""
    together: dict[tuple[str, int], list[AttentionDecodeShape]] = defaultdict(list)
    for shape, is_own in _tuned_shapes():
        kind = "fp8" if shape.is_float8 else "bf16"
        name = table_shape(shape.num_rows, shape.head_dim, kind, shape.num_queries if is_own else None)
        together[name, shape.num_sequences * shape.num_kv_heads * shape.context_len].append(shape)
    points = []
    for (name, size), shapes in together.items():
        first = shapes[0]
        has_many = any(shape.num_sequences >= _MANY for shape in shapes)
        candidates = _candidates(first.head_dim, first.num_rows, first.is_float8, size, has_many)
        points.append(
            TuningPoint(
                kernel="attention_decode",
                shape=name,
                size=size,
                candidates=candidates,
                set_bytes=sum(shape.kv_bytes for shape in shapes),
                prepare=partial(_prepare_candidate, shapes),
            )
        )
    return points
