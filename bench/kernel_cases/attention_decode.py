"""Rows of `baton bench kernels` for `attention_decode`.

Lengths are equal unless a row says "ragged": then one sequence has the context, and the others a quarter of it; or
"spread": then they lie evenly between nothing and the context. "by_work" is ours divided by work whatever the table
says, "by_work_planned" the same where another layer made the plan already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from baton.bench.kernel_bench.baselines_attention import PagedAttention, fa3, vllm_attention
from baton.bench.kernel_bench.case import Call, KernelCase, Systems
from baton.kernels.attention import paged as attention
from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.decode_plan import default_options
from baton.kernels.attention.ordered import attention_ordered_decode
from baton.kernels.attention.shares import SplitKVPlans

BLOCK_SIZE = 16
_TORCH_MAX_BYTES = 3 << 30  # of KV: it copies and masks all of it
HEADS = ((32, 8, 128), (32, 4, 128), (16, 2, 256))


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one launch; A query heads, H KV heads, D head size."""

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
        """Of every sequence, the rows that are computed included."""
        if self.is_spread:
            return [self.context_len * (index + 1) // self.num_sequences for index in range(self.num_sequences)]
        others = self.context_len // 4 if self.is_ragged else self.context_len
        return [self.context_len] + [others] * (self.num_sequences - 1)

    @property
    def num_rows(self) -> int:
        """Of one KV head."""
        return self.num_queries * self.num_heads // self.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """K and V of one position of one head."""
        return 2 * self.head_dim * (1 if self.is_float8 else 2)

    @property
    def kv_bytes(self) -> int:
        """What must be read."""
        return sum(self.lengths) * self.num_kv_heads * self.row_bytes

    @property
    def query_bytes(self) -> int:
        """Of the queries, and as many of the result."""
        return 2 * self.num_sequences * self.num_queries * self.num_heads * self.head_dim

    @property
    def num_flops(self) -> int:
        """Of both products."""
        return 4 * sum(self.lengths) * self.num_queries * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Buffers:
    """One set: what `attention_decode` takes."""

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
        """Ours."""
        return attention_decode(
            self.query_BQAD, self.key_NHSD, self.value_NHSD, self.block_tables_BM, self.positions_BQ,
            max_context_len or self.context_len, key_scale=self.scales.get("key_scale"),
            value_scale=self.scales.get("value_scale"), invariant=invariant, options=options,
            plans=self.plans if with_plans else None,
        )  # fmt: skip

    def run_ordered(self) -> torch.Tensor:
        """Ours in numerics `invariant`, where prompts have the same bits."""
        return attention_ordered_decode(
            self.query_BQAD, self.key_NHSD, self.value_NHSD, self.block_tables_BM, self.positions_BQ, self.context_len
        )

    def run_library(self) -> torch.Tensor:
        """Gathered, masked, and torch's attention."""
        return attention.attention_decode(
            self.query_BQAD, self.key_NHSD, self.value_NHSD, self.block_tables_BM, self.positions_BQ, self.context_len
        )

    def for_others(self) -> PagedAttention:
        """What other kernels make their own buffers of."""
        return PagedAttention(
            query_THD=self.query_BQAD.flatten(0, 1),
            key_NHSD=self.key_NHSD,
            value_NHSD=self.value_NHSD,
            block_table=self.block_tables_BM,
            q_lens=[self.query_BQAD.shape[1]] * len(self.lengths),
            kv_lens=self.lengths,
            scale=self.query_BQAD.shape[3] ** -0.5,
        )


def make(shape: Shape, device: torch.device) -> Buffers:
    """A layer of a pool with random KV, blocks of each sequence scattered over it."""
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


def by_work(shape: Shape) -> Mapping[str, object]:
    """Options of a division by work, where no table has better ones."""
    rule = default_options(shape.num_rows, shape.head_dim, 1 if shape.is_float8 else 2)
    return asdict(rule) | {"shares": True, "pdl": True}


def _prepare(shape: Shape, device: torch.device, num_sets: int) -> Systems:
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
        buffers.run(options=options, with_plans=True)  # makes the plan, which no graph has then
    systems["by_work_planned"] = [partial(buffers.run, options=options, with_plans=True) for buffers in sets]
    if not shape.is_float8 and shape.kv_bytes <= _TORCH_MAX_BYTES:
        systems["torch"] = [buffers.run_library for buffers in sets]
    others = [buffers.for_others() for buffers in sets] if device.type == "cuda" else []
    return systems | fa3(others) | vllm_attention(others)


def _shapes() -> list[Shape]:
    """Those of the anchors, further ones of each kind, float8, and ragged ones."""
    sizes = ((1, 1024), (1, 4096), (16, 1024), (1, 32768), (64, 1024), (16, 8192), (64, 8192), (256, 1024), (256, 8192))
    found = [Shape(*heads, *size, q) for heads in HEADS for size in sizes for q in (1, 4)]
    found += [Shape(*heads, 64, 4096, q) for heads in HEADS for q in (1, 4)]
    found += [Shape(*HEADS[0], *size, q) for size in ((16, 32768), (128, 8192)) for q in (1, 4)]
    found += [Shape(*HEADS[0], *size, q) for size in ((1, 32768), (64, 4096)) for q in (2, 8)]
    found += [Shape(*heads, *size, q, True) for heads in HEADS for size in ((1, 1024), (64, 8192)) for q in (1, 4)]
    found += [Shape(*heads, 64, 8192, q, is_spread=True) for heads in HEADS for q in (1, 4)]
    found += [Shape(*heads, 64, 4096, 8) for heads in HEADS[1:]]
    found += [Shape(*heads, 64, 8192, q, is_ragged=True) for heads in HEADS for q in (1, 4)]
    found.append(Shape(28, 4, 128, 64, 4096, 1))
    return found


def cases() -> list[KernelCase]:
    """Each shape; one tiny one for CPUs."""
    tiny = Shape(8, 2, 32, 2, 64, 2)
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
