"""Rows of `baton bench kernels` for `mla_prefill`, at DeepSeek-V3's sizes: whole (128 heads), and split over 8 ranks.

"torch" is the expanded form in torch: one GEMM, keys with the RoPE columns beside them, and torch's attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional

from baton.bench.kernel_bench.case import Call, KernelCase, Systems
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.mla.prefill import mla_prefill

BLOCK_SIZE = 16
SCALE = 192**-0.5


@dataclass(frozen=True, slots=True)
class MLAPrefillShape:
    """Shape of one launch: chunks of `query_len` rows at the end of contexts of `context_len` positions."""

    num_heads: int
    num_sequences: int
    query_len: int
    context_len: int
    nope_dim: int = 128
    turned_dim: int = 64
    value_dim: int = 128
    latent_dim: int = 512

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads {self.nope_dim}+{self.turned_dim}/{self.value_dim} bf16"
        return f"{heads} B={self.num_sequences} T={self.query_len} L={self.context_len}"

    @property
    def num_columns(self) -> int:
        """Columns of a head in the up-projection."""
        return self.nope_dim + self.value_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of latent rows."""
        return 2 * self.num_sequences * self.context_len * (self.latent_dim + self.turned_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows, weights, queries and outputs; expanded keys and values need not leave the chip."""
        per_row = self.num_heads * (self.nope_dim + self.turned_dim + self.value_dim)
        weights = 2 * self.num_heads * self.num_columns * self.latent_dim
        return self.row_bytes + weights + 2 * self.num_sequences * self.query_len * per_row

    @property
    def num_flops(self) -> int:
        """FLOPs of the expansion, and of both matmuls over the positions that rows see."""
        seen = self.query_len * self.context_len - self.query_len * (self.query_len - 1) // 2
        expanded = self.context_len * self.num_columns * self.latent_dim
        attended = seen * (self.nope_dim + self.turned_dim + self.value_dim)
        return 2 * self.num_sequences * self.num_heads * (expanded + attended)


@dataclass(frozen=True, slots=True)
class MLAPrefillBuffers:
    """One set of arguments of `mla_prefill`."""

    query_TAE: torch.Tensor
    rows_KSX: torch.Tensor
    expand_AYC: torch.Tensor
    block_tables_BM: torch.Tensor
    shape: MLAPrefillShape
    plans: SplitKVPlans = field(default_factory=SplitKVPlans)

    def run(self) -> torch.Tensor:
        """Run ours, as in a layer that is not the first of a pass."""
        count = self.shape.num_sequences
        return mla_prefill(
            self.query_TAE, self.rows_KSX, self.expand_AYC, self.block_tables_BM, [self.shape.query_len] * count,
            [self.shape.context_len] * count, nope_dim=self.shape.nope_dim, softmax_scale=SCALE, plans=self.plans,
        )  # fmt: skip

    def run_library(self) -> torch.Tensor:
        """Run the library on whole prompts."""
        shape = self.shape
        rows_BLX = self.rows_KSX[self.block_tables_BM].flatten(1, 2)[:, : shape.context_len]
        latent_BLC, turned_BLP = rows_BLX.split([shape.latent_dim, shape.turned_dim], dim=2)
        expanded_BLAY = functional.linear(latent_BLC, self.expand_AYC.flatten(0, 1)).unflatten(2, (shape.num_heads, -1))
        nope_BLAN, value_BLAV = expanded_BLAY.split([shape.nope_dim, shape.value_dim], dim=3)
        turned_BLAP = turned_BLP[:, :, None].expand(-1, -1, shape.num_heads, -1)
        key_BALE = torch.cat([nope_BLAN, turned_BLAP], dim=3).transpose(1, 2)
        query_BALE = self.query_TAE.unflatten(0, (shape.num_sequences, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(
            query_BALE, key_BALE, value_BLAV.transpose(1, 2), is_causal=True, scale=SCALE
        )


def make(shape: MLAPrefillShape, device: torch.device) -> MLAPrefillBuffers:
    """Make a layer of a pool with random rows, with each sequence's blocks scattered over it."""
    num_blocks = -(-shape.context_len // BLOCK_SIZE)
    total, row_len = num_blocks * shape.num_sequences, shape.latent_dim + shape.turned_dim
    num_tokens, query_dim = shape.num_sequences * shape.query_len, shape.nope_dim + shape.turned_dim
    expand_shape = (shape.num_heads, shape.num_columns, shape.latent_dim)
    made = MLAPrefillBuffers(
        query_TAE=torch.randn(num_tokens, shape.num_heads, query_dim, dtype=torch.bfloat16, device=device),
        rows_KSX=torch.empty(total, BLOCK_SIZE, row_len, dtype=torch.bfloat16, device=device).normal_(),
        expand_AYC=torch.randn(expand_shape, dtype=torch.bfloat16, device=device) / shape.latent_dim**0.5,
        block_tables_BM=torch.randperm(total, device=device).view(shape.num_sequences, num_blocks),
        shape=shape,
    )
    if device.type == "cuda":
        made.run()  # makes the windows outside the graph
    return made


def _prepare(shape: MLAPrefillShape, device: torch.device, num_sets: int) -> Systems:
    sets = [make(shape, device) for _ in range(num_sets)]
    systems: dict[str, Sequence[Call]] = {"ours": [buffers.run for buffers in sets]}
    if shape.query_len == shape.context_len:
        systems["torch"] = [buffers.run_library for buffers in sets]
    return systems


def cases() -> list[KernelCase]:
    """Whole prompts, chunks over prefixes, many short prompts; a tiny case for CPUs."""
    sizes = ((1, 4096, 4096), (1, 2048, 16_384), (16, 512, 512), (8, 64, 4096), (1, 8192, 8192))
    shapes = [MLAPrefillShape(heads, *size) for heads in (16, 128) for size in sizes]
    tiny = MLAPrefillShape(2, 2, 20, 20, 32, 16, 32, 32)
    return [
        KernelCase(
            kernel="mla_prefill",
            shape=str(shape),
            num_bytes=shape.num_bytes,
            num_flops=shape.num_flops,
            is_read=True,
            set_bytes=shape.num_bytes,
            prepare=partial(_prepare, shape),
            only_gpu=shape is not tiny,
        )
        for shape in (*shapes, tiny)
    ]
