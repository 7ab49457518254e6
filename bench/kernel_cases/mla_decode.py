"""Rows of `baton bench kernels` for `mla_decode`, at DeepSeek-V3's sizes: whole (128 heads), and split over 8 ranks.

"flash_mla" is vLLM's FlashMLA in blocks of 64, with its plan made outside the calls; "fa3" is FlashAttention-3 with
queries in two parts, as vLLM runs it over latents. Lengths are equal unless a row says "ragged": then one sequence has
the whole context, and the others a quarter of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from baton.bench.kernel_bench.baselines import PagedLatents, fa3_latents, flash_mla
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.implementation import Implementation
from baton.kernels.mla.decode import NAME, mla_decode
from baton.kernels.mla.decode_plan import MLAPlanOptions, table_shape

BLOCK_SIZE = 16
LATENT_DIM, TURNED_DIM = 512, 64
SCALE = 192**-0.5
_TORCH_MAX_BYTES = 1 << 28  # limit of rows, because torch copies and masks all of them


@dataclass(frozen=True, slots=True)
class MLADecodeShape:
    """Shape of one launch."""

    num_heads: int
    num_sequences: int
    context_len: int
    num_queries: int
    is_ragged: bool = False
    latent_dim: int = LATENT_DIM
    turned_dim: int = TURNED_DIM

    def __str__(self) -> str:
        ragged = " ragged" if self.is_ragged else ""
        heads = f"{self.num_heads} heads {self.latent_dim}+{self.turned_dim} bf16"
        return f"{heads} B={self.num_sequences} L={self.context_len} q={self.num_queries}{ragged}"

    @property
    def lengths(self) -> list[int]:
        """Length of every sequence, including the rows being computed."""
        others = self.context_len // 4 if self.is_ragged else self.context_len
        return [self.context_len] + [others] * (self.num_sequences - 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of the latent rows that must be read."""
        return 2 * sum(self.lengths) * (self.latent_dim + self.turned_dim)

    @property
    def query_bytes(self) -> int:
        """Bytes of queries and results."""
        row = 2 * self.latent_dim + self.turned_dim
        return 2 * self.num_sequences * self.num_queries * self.num_heads * row

    @property
    def num_flops(self) -> int:
        """FLOPs of both matmuls."""
        columns = 2 * self.latent_dim + self.turned_dim
        return 2 * sum(self.lengths) * self.num_queries * self.num_heads * columns


@dataclass(frozen=True, slots=True)
class MLADecodeBuffers:
    """One set of arguments of `mla_decode`."""

    query_BQAX: torch.Tensor
    rows_NSX: torch.Tensor
    block_tables_BM: torch.Tensor
    positions_BQ: torch.Tensor
    shape: MLADecodeShape

    def run(
        self,
        *,
        options: Mapping[str, object] | None = None,
        implementation: Implementation = Implementation.AUTO,
    ) -> torch.Tensor:
        """Run ours."""
        return mla_decode(
            self.query_BQAX, self.rows_NSX, self.block_tables_BM, self.positions_BQ, self.shape.context_len,
            latent_dim=self.shape.latent_dim, softmax_scale=SCALE, options=options, implementation=implementation,
        )  # fmt: skip

    def for_others(self) -> PagedLatents:
        """Describe the buffers, so that baselines can make their own."""
        return PagedLatents(
            query_BQAX=self.query_BQAX,
            latent_dim=self.shape.latent_dim,
            kv_lens=self.shape.lengths,
            scale=SCALE,
        )


def make(shape: MLADecodeShape, device: torch.device) -> MLADecodeBuffers:
    """Make a layer of a pool with random rows, with each sequence's blocks scattered over it."""
    num_blocks = -(-shape.context_len // BLOCK_SIZE)
    total, row_len = num_blocks * shape.num_sequences, shape.latent_dim + shape.turned_dim
    ends_B1 = torch.tensor(shape.lengths, device=device)[:, None]
    query_shape = (shape.num_sequences, shape.num_queries, shape.num_heads, row_len)
    return MLADecodeBuffers(
        query_BQAX=torch.randn(query_shape, dtype=torch.bfloat16, device=device),
        rows_NSX=torch.empty(total + 1, BLOCK_SIZE, row_len, dtype=torch.bfloat16, device=device).normal_(),
        block_tables_BM=torch.randperm(total, device=device).view(shape.num_sequences, num_blocks),
        positions_BQ=ends_B1 - shape.num_queries + torch.arange(shape.num_queries, device=device),
        shape=shape,
    )


def _prepare(shape: MLADecodeShape, device: torch.device, num_sets: int) -> Systems:
    sets = [make(shape, device) for _ in range(num_sets)]
    systems: dict[str, Sequence[Call]] = {"ours": [buffers.run for buffers in sets]}
    if shape.row_bytes <= _TORCH_MAX_BYTES:
        systems["torch"] = [partial(buffers.run, implementation=Implementation.REFERENCE) for buffers in sets]
    others = [buffers.for_others() for buffers in sets] if device.type == "cuda" else []
    return systems | flash_mla(others) | fa3_latents(others)


def _shapes() -> list[MLADecodeShape]:
    sizes = ((1, 4096), (1, 32_768), (16, 4096), (64, 1024), (64, 4096), (128, 8192))
    found = [MLADecodeShape(heads, *size, q) for heads in (16, 128) for size in sizes for q in (1, 2)]
    found += [MLADecodeShape(heads, 64, 4096, 4) for heads in (16, 128)]
    found += [MLADecodeShape(heads, 64, 4096, 1) for heads in (32, 64)]
    return found + [MLADecodeShape(heads, 64, 8192, 1, is_ragged=True) for heads in (16, 128)]


def cases() -> list[KernelCase]:
    """A case per shape, and a tiny one for CPUs."""
    tiny = MLADecodeShape(4, 2, 64, 2, latent_dim=32, turned_dim=16)
    return [
        KernelCase(
            kernel=NAME,
            shape=str(shape),
            num_bytes=shape.row_bytes + shape.query_bytes,
            num_flops=shape.num_flops,
            is_read=True,
            set_bytes=shape.row_bytes,
            prepare=partial(_prepare, shape),
            only_gpu=shape is not tiny,
        )
        for shape in (*_shapes(), tiny)
    ]


# tile, rows, swap, stages, warps, hopper
_FORMS: Mapping[int, Sequence[tuple[int, int, bool, int, int, bool]]] = {
    16: ((64, 16, True, 2, 4, False), (64, 16, True, 2, 8, False), (64, 64, False, 2, 8, True)),
    32: ((64, 32, True, 2, 4, False), (64, 32, True, 2, 8, False), (64, 64, False, 2, 8, True)),
    64: ((64, 64, False, 2, 8, True), (64, 64, False, 2, 8, False), (32, 64, False, 3, 8, False)),
}


def _candidates(num_rows: int) -> list[Mapping[str, object]]:
    """Each form with parts of several lengths."""
    forms = _FORMS[16 if num_rows <= 16 else 32 if num_rows <= 32 else 64]
    return [
        asdict(
            MLAPlanOptions(
                tile=tile,
                rows=rows,
                swap=swap,
                stages=stages,
                warps=warps,
                slots=slots,
                max_part_len=most,
                hopper=hopper,
            )
        )
        for tile, rows, swap, stages, warps, hopper in forms
        for slots in (132, 264)
        for most in (2048, 8192)
    ]


def _prepare_candidate(
    shape: MLADecodeShape, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    return [partial(make(shape, device).run, options=options) for _ in range(num_sets)]


def tuning() -> list[TuningPoint]:
    """Rows of one sequence at the sizes that are measured."""
    sizes = ((1, 4096), (16, 4096), (64, 4096))
    shapes = [MLADecodeShape(heads, *size, q) for heads in (16, 128) for size in sizes for q in (1, 2)]
    return [
        TuningPoint(
            kernel=NAME,
            shape=table_shape(shape.num_queries * shape.num_heads, shape.latent_dim),
            size=shape.num_sequences * shape.context_len,
            candidates=_candidates(shape.num_queries * shape.num_heads),
            set_bytes=shape.row_bytes,
            prepare=partial(_prepare_candidate, shape),
            may_spill=lambda _options: True,
        )
        for shape in shapes
    ]
