"""Rows of `baton bench kernels` for `qk_norm_rope_write`: from a layer's QKV GEMM to its queries and its pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.baselines import torch_compiled
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.kv.write import kv_write
from baton.kernels.pointwise import qk_norm_rope_write_triton as in_triton
from baton.kernels.pointwise.head_halves_triton import half_len
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool, Rotation, qk_norm_rope_write
from baton.kernels.pointwise.rms_norm import rms_norm
from baton.kernels.pointwise.rope import rope, rope_angles, rope_inverse_frequencies
from baton.kernels.pointwise.rope_angles_triton import BY_TOKEN

_ROWS = (1, 8, 64, 512, 2048, 8192)
_EPS = 1e-6
_BLOCK_LEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormShape:
    """Shape of a model's attention."""

    num_query: int
    num_kv: int
    head_dim: int
    rotary_dim: int
    gated: bool = False  # and with 1 + w
    is_fp8: bool = False

    @property
    def name(self) -> str:
        """Name of the shape in the tuned table."""
        return f"{self.num_query}/{self.num_kv}/{self.head_dim}"

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes read and written."""
        num_kv = 2 * self.num_kv * self.head_dim
        num_query = self.num_query * self.head_dim
        written = 2 * num_query + (1 if self.is_fp8 else 2) * num_kv
        return num_tokens * (2 * (num_query + num_kv) + 4 * self.rotary_dim + 8 + written)


_8B = QKNormShape(num_query=32, num_kv=8, head_dim=128, rotary_dim=128)
_30B = QKNormShape(num_query=32, num_kv=4, head_dim=128, rotary_dim=128)
_35B = QKNormShape(num_query=16, num_kv=2, head_dim=256, rotary_dim=64, gated=True)
_8B_FP8 = QKNormShape(num_query=32, num_kv=8, head_dim=128, rotary_dim=128, is_fp8=True)
_TINY = QKNormShape(num_query=4, num_kv=2, head_dim=32, rotary_dim=32)


class _Set:
    """The tensors of one call."""

    def __init__(self, shape: QKNormShape, num_tokens: int, device: torch.device) -> None:
        width = (shape.num_query * (2 if shape.gated else 1) + 2 * shape.num_kv) * shape.head_dim
        self.shape = shape
        self.qkv_TX = torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16)
        self.weight_D = torch.ones(shape.head_dim, device=device, dtype=torch.bfloat16)
        num_blocks = -(-num_tokens // _BLOCK_LEN) + 1
        block_N = torch.randperm(num_blocks, device=device)
        token_T = torch.arange(num_tokens, device=device)
        self.slots_T = block_N[token_T // _BLOCK_LEN] * _BLOCK_LEN + token_T % _BLOCK_LEN
        inverse_F = rope_inverse_frequencies(shape.rotary_dim, 1e6, torch.bfloat16, device)
        self.tables = rope_angles(token_T, inverse_F)
        sizes = (num_blocks, shape.num_kv, 2, _BLOCK_LEN, shape.head_dim)
        dtype = torch.float8_e4m3fn if shape.is_fp8 else torch.bfloat16
        self.data = torch.zeros(sizes, device=device).to(dtype)
        self.scale = torch.ones(1, device=device) if shape.is_fp8 else None

    @property
    def layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[:, :, 0], self.data[:, :, 1]

    def ours(self) -> torch.Tensor:
        norms = HeadNorms(query_D=self.weight_D, key_D=self.weight_D, eps=_EPS, plus_one=self.shape.gated)
        key_NHSD, value_NHSD = self.layer
        pool = LayerPool(key_NHSD=key_NHSD, value_NHSD=value_NHSD, key_scale=self.scale, value_scale=self.scale)
        rotation = Rotation(dim=self.shape.rotary_dim, tables=self.tables)
        return qk_norm_rope_write(
            self.qkv_TX, norms, rotation, self.slots_T, pool, num_query=self.shape.num_query, gated=self.shape.gated
        )

    def launch(self, options: Mapping[str, object] | None, early: bool | None) -> torch.Tensor:
        return in_triton.launch(
            self.qkv_TX,
            None,
            (self.weight_D, self.weight_D, _EPS),
            (BY_TOKEN, *self.tables),
            None,
            self.slots_T,
            self.layer,
            None if self.scale is None else (self.scale, self.scale),
            num_query=self.shape.num_query,
            rotary_dim=self.shape.rotary_dim,
            sections=None,
            alternating=False,
            interleaved=False,
            gated=self.shape.gated,
            plus_one=self.shape.gated,
            options=options,
            early=early,
        )

    def for_torch(self) -> tuple[Any, ...]:
        """Arguments of `_by_torch`."""
        heads_TXD = self.qkv_TX.unflatten(1, (-1, self.shape.head_dim))
        return heads_TXD, self.weight_D, self.tables, self.slots_T, self.layer, self.shape.num_query, self.shape.num_kv


def _by_torch(
    heads_TXD: torch.Tensor,
    weight_D: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    num_query: int,
    num_kv: int,
) -> torch.Tensor:
    """Compute it as models do without the kernel: some 20 launches."""
    query_THD, key_THD, value_THD = heads_TXD.split([num_query, num_kv, num_kv], dim=1)
    query_THD = rope(rms_norm(query_THD, weight_D, _EPS), *tables)
    key_THD = rope(rms_norm(key_THD, weight_D, _EPS), *tables)
    kv_write(key_THD, value_THD, slots_T, *layer)
    return query_THD


def _prepare(shape: QKNormShape, num_tokens: int, device: torch.device, num_sets: int) -> Systems:
    sets = [_Set(shape, num_tokens, device) for _ in range(num_sets)]
    systems = {"ours": [kept(one.ours) for one in sets]}
    if not shape.is_fp8 and not shape.gated:
        systems["torch"] = [kept(partial(_by_torch, *one.for_torch())) for one in sets]
        systems |= torch_compiled(_by_torch, [one.for_torch() for one in sets])
    if device.type == "cuda":
        systems["late"] = [kept(partial(one.launch, None, False)) for one in sets]
    return systems


def cases() -> list[KernelCase]:
    """The anchors' shapes, and float8 KV; a tiny case for CPUs."""
    found = [(_8B, num_tokens, True) for num_tokens in _ROWS]
    found += [(shape, num_tokens, True) for shape in (_30B, _35B, _8B_FP8) for num_tokens in (1, 64, 8192)]
    return [
        KernelCase(
            kernel="qk_norm_rope_write",
            shape=f"T={num_tokens} {shape.name}{' partial gated' if shape.gated else ''}{' fp8' * shape.is_fp8}",
            num_bytes=shape.num_bytes(num_tokens),
            set_bytes=shape.num_bytes(num_tokens),
            prepare=partial(_prepare, shape, num_tokens),
            only_gpu=only_gpu,
        )
        for shape, num_tokens, only_gpu in [*found, (_TINY, 8, False)]
    ]


def _prepare_tuning(
    shape: QKNormShape, num_tokens: int, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    sets = [_Set(shape, num_tokens, device) for _ in range(num_sets)]
    return [kept(partial(one.launch, options, None)) for one in sets]


def tuning() -> list[TuningPoint]:
    """Heads of a tile, tiles of a program, its warps, and early start where allowed; all give the same bits.

    A tile has one or two 16-byte vectors of each half for every thread.
    """
    found = []
    for shape in (_8B, _30B, _35B):
        least = 32 * 8 // half_len(shape.head_dim)
        forms = [(least, 1, 1), (least, 2, 1), (least, 4, 1)]
        if shape.num_kv % (2 * least) == 0:
            forms += [(2 * least, 1, 1), (2 * least, 1, 2), (2 * least, 2, 2), (2 * least, 2, 1)]
        else:
            forms += [(2 * least, 1, 2), (2 * least, 2, 2)]
        for num_tokens in (64, 512, 2048, 8192):
            candidates: list[dict[str, object]] = [
                {"heads": heads, "tiles": tiles, "num_warps": num_warps} for heads, tiles, num_warps in forms
            ]
            if num_tokens > 512:
                candidates = [one | {"early": early} for one in candidates for early in (True, False)]
            found.append(
                TuningPoint(
                    kernel="qk_norm_rope_write",
                    shape=shape.name,
                    size=num_tokens,
                    candidates=candidates,
                    set_bytes=shape.num_bytes(num_tokens),
                    prepare=partial(_prepare_tuning, shape, num_tokens),
                )
            )
    return found
