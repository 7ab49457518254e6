"""Rows of `baton bench kernels` for `mla_prefill`, at DeepSeek-V3's sizes: whole (128 heads), and cut over 8 ranks.

"torch" is the expanded form by torch: one GEMM, keys with the turned columns beside them, and its own attention.
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
    """Of one launch: chunks of `query_len` rows, which end contexts of `context_len` positions."""

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
        """Of a head, in what expands latents."""
        return self.nope_dim + self.value_dim

    @property
    def row_bytes(self) -> int:
        """Of rows of latents."""
        return 2 * self.num_sequences * self.context_len * (self.latent_dim + self.turned_dim)

    @property
    def num_bytes(self) -> int:
        """Of rows, weights, queries and outputs; what is expanded need not leave the chip."""
        per_row = self.num_heads * (self.nope_dim + self.turned_dim + self.value_dim)
        weights = 2 * self.num_heads * self.num_columns * self.latent_dim
        return self.row_bytes + weights + 2 * self.num_sequences * self.query_len * per_row

    @property
    def num_flops(self) -> int:
        """Of the expansion, and of both matmuls over what rows see."""
        seen = self.query_len * self.context_len - self.query_len * (self.query_len - 1) // 2
        expanded = self.context_len * self.num_columns * self.latent_dim
        attended = seen * (self.nope_dim + self.turned_dim + self.value_dim)
        return 2 * self.num_sequences * self.num_heads * (expanded + attended)


@dataclass(frozen=True, slots=True)
class MLAPrefillBuffers:
    """One set: what `mla_prefill` takes."""

    query_TAE: torch.Tensor
    rows_KSX: torch.Tensor
    expand_AYC: torch.Tensor
    block_tables_BM: torch.Tensor
    shape: MLAPrefillShape
    plans: SplitKVPlans = field(default_factory=SplitKVPlans)

    def run(self) -> torch.Tensor:
        """Ours, as of a layer that is not the first of a pass."""
        count = self.shape.num_sequences
        return mla_prefill(
            self.query_TAE, self.rows_KSX, self.expand_AYC, self.block_tables_BM, [self.shape.query_len] * count,
            [self.shape.context_len] * count, nope_dim=self.shape.nope_dim, softmax_scale=SCALE, plans=self.plans,
        )  # fmt: skip

    def run_library(self) -> torch.Tensor:
        """Of whole prompts."""
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
    """A layer of a pool with random rows, blocks of each sequence scattered over it."""
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
        made.run()  # makes the windows, which no graph has then
    return made


def _prepare(shape: MLAPrefillShape, device: torch.device, num_sets: int) -> Systems:
    sets = [make(shape, device) for _ in range(num_sets)]
    systems: dict[str, Sequence[Call]] = {"ours": [buffers.run for buffers in sets]}
    if shape.query_len == shape.context_len:
        systems["torch"] = [buffers.run_library for buffers in sets]
    return systems


def cases() -> list[KernelCase]:
    """Whole prompts, chunks over prefixes, many short prompts; one tiny one for CPUs."""
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
