"""QK norm, RoPE and the write of K and V into the pool: QKV GEMM output to attention input in one launch.

Queries and keys are normalised head by head, where the model has norms, and rotated by their positions. Queries are
returned in a tensor of their own; keys and values go to their slots of the pool. There is one launch per layer.

Rounding is that of `model.attention`, bit for bit except for the order of sums. A bias is added to the rounded output
of the GEMM, and the sum rounded. The norm rounds to that dtype before and after the weight (with 1 + w once, after it).
The rotation is computed in float32 and rounded once. Float8 is made from these values times 1 / scale, saturating. A
row's result depends on that row alone.

Sources: transformers `LlamaAttention` (no norms), `Qwen2Attention` (biases), `Qwen3Attention`, `Qwen3NextAttention`
(gated queries, partial rotation, 1 + w), `Qwen2VLModel` and `Qwen3VLModel` (three positions a token).
Legend: T tokens, X columns of the GEMM's output, Q query heads, H KV heads, D head size, F = rotary size / 2, P
positions of a table, N blocks, S positions of a block.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.kv.dequantize import as_bytes, in_float8
from baton.kernels.kv.write import kv_write
from baton.kernels.memo import Memo, signature
from baton.kernels.pointwise import qk_norm_rope_write_triton as in_triton
from baton.kernels.pointwise.rms_norm import rms_norm
from baton.kernels.pointwise.rope_angles_triton import BY_POSITION, BY_TOKEN, FREQUENCIES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_FLOAT8 = torch.float8_e4m3fn
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How heads are rotated: by tables for each token or position, or by inverse frequencies.

    Attributes:
        dim: number of leading columns of a head that are rotated; the others stay.
        tables: cosines and sines, float32 [T, F], or [P, F] if `positions` are given.
        inverse_F: float32 inverse frequencies, instead of tables.
        interleaved: whether pairs are neighbours; otherwise they are half of `dim` apart (NeoX).
        sections: numbers of pairs rotated by time, height and width; positions are then [3, T].
        alternating: whether these pairs alternate (Qwen3-VL); otherwise they follow each other (Qwen2-VL).
    """

    dim: int
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    inverse_F: torch.Tensor | None = None
    interleaved: bool = False
    sections: tuple[int, int, int] | None = None
    alternating: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms of query and key heads: weights [D] in the dtype of the GEMM output, used as w or as 1 + w."""

    query_D: torch.Tensor
    key_D: torch.Tensor
    eps: float
    plus_one: bool = False

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights for queries and keys."""
        return self.query_D, self.key_D


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """A layer of the pool: K and V, [N, H, S, D] each, and float32 scales [1] or [H] if it holds float8."""

    key_NHSD: torch.Tensor
    value_NHSD: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of keys and values, if the pool holds float8."""
        return None if self.key_scale is None or self.value_scale is None else (self.key_scale, self.value_scale)


def qk_norm_rope_write(
    qkv_TX: torch.Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    slots_T: torch.Tensor,
    pool: LayerPool,
    *,
    num_query: int,
    bias_X: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    gated: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Write keys and values to their slots -> queries [T, Q, D].

    Args:
        qkv_TX: query heads, key heads, value heads; rows may be strided.
        norms: norms of queries and keys; None: they are not normalised.
        rotation: rotation of queries and keys.
        slots_T: int32 or int64, block * S + offset of each token; -1 writes nothing. No slot may occur twice.
        pool: destination of keys and values: the dtype of the GEMM output, or float8 (e4m3) with scales.
        num_query: number of query heads.
        bias_X: bias in the dtype of the GEMM output, added to every row of it; None: no bias.
        positions: int32 or int64 [T], or [3, T] with sections; None if the tables are for each token.
        gated: whether each query head is followed by its gate, also [D], which is left where it is.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = _key(qkv_TX, bias_X, norms, rotation, slots_T, pool, positions), num_query, gated, implementation
    uses = _FORMS.find(key)
    if uses is None:
        _check_gemm(qkv_TX, bias_X, norms, pool, num_query, gated)
        _check_pool(pool, qkv_TX, slots_T)
        _check_rotation(rotation, positions, len(qkv_TX), pool.key_NHSD.shape[3], qkv_TX.device)
        uses = _FORMS.keep(key, uses_triton(qkv_TX.device, implementation))
    if not uses:
        qkv_TX = qkv_TX if bias_X is None else qkv_TX + bias_X
        return _reference(qkv_TX, norms, rotation, slots_T, pool, num_query, positions, gated)
    if rotation.inverse_F is not None:
        angles = (FREQUENCIES, rotation.inverse_F, rotation.inverse_F)
    else:
        assert rotation.tables is not None
        angles = (BY_TOKEN if positions is None else BY_POSITION, *rotation.tables)
    return in_triton.launch(
        qkv_TX,
        bias_X,
        None if norms is None else (norms.query_D, norms.key_D, norms.eps),
        angles,
        positions,
        slots_T,
        (pool.key_NHSD, pool.value_NHSD),
        pool.scales,
        num_query=num_query,
        rotary_dim=rotation.dim,
        sections=rotation.sections,
        alternating=rotation.alternating,
        interleaved=rotation.interleaved,
        gated=gated,
        plus_one=norms is not None and norms.plus_one,
    )


def _key(
    qkv_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    norms: HeadNorms | None,
    rotation: Rotation,
    slots_T: torch.Tensor,
    pool: LayerPool,
    positions: torch.Tensor | None,
) -> Hashable:
    """Everything that checks read of these arguments."""
    tables = rotation.tables
    return (
        signature(qkv_TX), signature(bias_X), None if norms is None else tuple(map(signature, norms.weights)),
        signature(slots_T),
        signature(pool.key_NHSD), signature(pool.value_NHSD), signature(pool.key_scale), signature(pool.value_scale),
        signature(positions), signature(rotation.inverse_F),
        None if tables is None else tuple(map(signature, tables)), rotation.dim, rotation.sections,
    )  # fmt: skip


def _check_gemm(
    qkv_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    norms: HeadNorms | None,
    pool: LayerPool,
    num_query: int,
    gated: bool,
) -> None:
    require_tensor("qkv_TX", qkv_TX, [None, None], _DTYPES)
    require_rows("qkv_TX", qkv_TX)
    require(pool.key_NHSD.dim() == 4, "key_NHSD", f"has shape {list(pool.key_NHSD.shape)}, not 4 dimensions")
    _, num_kv, _, head_dim = pool.key_NHSD.shape
    require(num_query > 0, "num_query", f"is {num_query}")
    width = (num_query * (2 if gated else 1) + 2 * num_kv) * head_dim
    heads = f"{num_query}{' gated' if gated else ''} query and {num_kv} KV heads of {head_dim}"
    require(qkv_TX.shape[1] == width, "qkv_TX", f"has rows of {qkv_TX.shape[1]}, not of {width} for {heads}")
    if bias_X is not None:
        require_tensor("bias_X", bias_X, [width], [qkv_TX.dtype], qkv_TX.device)
        require_rows("bias_X", bias_X)
    if norms is not None:
        for name, weight_D in zip(("query_D", "key_D"), norms.weights, strict=True):
            require_tensor(name, weight_D, [head_dim], [qkv_TX.dtype], qkv_TX.device)
            require_rows(name, weight_D)


def _check_pool(pool: LayerPool, qkv_TX: torch.Tensor, slots_T: torch.Tensor) -> None:
    keys, values = pool.key_NHSD, pool.value_NHSD
    require_tensor("slots_T", slots_T, [len(qkv_TX)], _INTEGERS, qkv_TX.device)
    require_rows("slots_T", slots_T)
    require_tensor("key_NHSD", keys, [None] * 4, [qkv_TX.dtype, _FLOAT8], qkv_TX.device)
    require_tensor("value_NHSD", values, list(keys.shape), [keys.dtype], qkv_TX.device)
    require_rows("key_NHSD", keys)
    require(values.stride() == keys.stride(), "value_NHSD", f"has strides {values.stride()}, not {keys.stride()}")
    for name, scale in (("key_scale", pool.key_scale), ("value_scale", pool.value_scale)):
        if keys.dtype != _FLOAT8:
            require(scale is None, name, f"is of no use in a pool of {keys.dtype}")
            continue
        require(scale is not None, name, "is missing for a pool of float8")
        assert scale is not None
        require_tensor(name, scale, [None], [torch.float32], qkv_TX.device)
        require(len(scale) in (1, keys.shape[1]), name, f"has {len(scale)} values for {keys.shape[1]} heads")
        require_rows(name, scale)
    if pool.key_scale is not None and pool.value_scale is not None:
        same = len(pool.key_scale) == len(pool.value_scale)
        require(same, "value_scale", "has not as many values as key_scale")


def _check_rotation(
    rotation: Rotation, positions: torch.Tensor | None, num_tokens: int, head_dim: int, device: torch.device
) -> None:
    dim, tables, inverse_F = rotation.dim, rotation.tables, rotation.inverse_F
    require(0 < dim <= head_dim and dim % 2 == 0, "dim", f"{dim} is not even or not within heads of {head_dim}")
    require((tables is None) != (inverse_F is None), "tables", "give either them or inverse_F")
    num_axes = [] if rotation.sections is None else [3]
    if rotation.sections is not None:
        total = sum(rotation.sections)
        fits = min(rotation.sections) >= 0 and total == dim // 2
        require(fits, "sections", f"{rotation.sections} are no division of {dim // 2} pairs")
        require(positions is not None, "positions", "are missing for sections")
    if positions is not None:
        require_tensor("positions", positions, [*num_axes, num_tokens], _INTEGERS, device)
        require_rows("positions", positions)
    if inverse_F is not None:
        require(positions is not None, "positions", "are missing for inverse frequencies")
        require_tensor("inverse_F", inverse_F, [dim // 2], [torch.float32], device)
        require_rows("inverse_F", inverse_F)
    if tables is not None:
        num_rows = num_tokens if positions is None else None
        for table in tables:
            require_tensor("tables", table, [num_rows, dim // 2], [torch.float32], device)
            require_rows("tables", table)
        same = tables[0].shape == tables[1].shape and tables[0].stride() == tables[1].stride()
        require(same, "tables", "cosines and sines have not one shape and stride")


def _reference(
    qkv_TX: torch.Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    slots_T: torch.Tensor,
    pool: LayerPool,
    num_query: int,
    positions: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    """Compute it in torch; may wait for the device."""
    _, num_kv, _, head_dim = pool.key_NHSD.shape
    heads_TXD = qkv_TX.unflatten(1, (-1, head_dim))
    query_THD, key_THD, value_THD = heads_TXD.split([num_query * (2 if gated else 1), num_kv, num_kv], dim=1)
    if gated:
        query_THD = query_THD[:, ::2]
    cos_TF, sin_TF = _angles(rotation, positions)
    if norms is not None:
        query_THD, key_THD = _normed(query_THD, norms.query_D, norms), _normed(key_THD, norms.key_D, norms)
    query_THD, key_THD = (_turned(x_THD, rotation, cos_TF, sin_TF) for x_THD in (query_THD, key_THD))
    if pool.key_scale is not None and pool.value_scale is not None:
        key_THD, value_THD = in_float8(key_THD, pool.key_scale), in_float8(value_THD, pool.value_scale)
    is_real_T = slots_T >= 0
    slots_R = slots_T[is_real_T].long()
    kv_write(
        as_bytes(key_THD[is_real_T]),
        as_bytes(value_THD[is_real_T]),
        slots_R,
        as_bytes(pool.key_NHSD),
        as_bytes(pool.value_NHSD),
    )
    return query_THD.contiguous()


def _normed(x_THD: torch.Tensor, weight_D: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
    if not norms.plus_one:
        return rms_norm(x_THD, weight_D, norms.eps)
    wide_THD = x_THD.float()
    wide_THD = wide_THD * torch.rsqrt(wide_THD.square().mean(dim=-1, keepdim=True) + norms.eps)
    return (wide_THD * (1 + weight_D.float())).to(x_THD.dtype)


def _angles(rotation: Rotation, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, F]."""
    if positions is None:
        assert rotation.tables is not None
        return rotation.tables
    pair_F = torch.arange(rotation.dim // 2, device=positions.device)
    if rotation.sections is None:
        position_TF = positions[:, None].expand(-1, len(pair_F))
    elif rotation.alternating:
        axis_F = torch.zeros_like(pair_F)
        for axis in (1, 2):
            axis_F[(pair_F % 3 == axis) & (pair_F < 3 * rotation.sections[axis])] = axis
        position_TF = positions[axis_F].T
    else:
        axes = torch.arange(3, device=positions.device)
        counts = torch.tensor(rotation.sections, device=positions.device)
        position_TF = positions[axes.repeat_interleave(counts)].T
    if rotation.inverse_F is not None:
        angle_TF = position_TF.float() * rotation.inverse_F
        return angle_TF.cos(), angle_TF.sin()
    assert rotation.tables is not None
    cosines, sines = (table[position_TF.long(), pair_F] for table in rotation.tables)
    return cosines, sines


def _turned(x_THD: torch.Tensor, rotation: Rotation, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    turning_THR, rest_THD = x_THD.float()[..., : rotation.dim], x_THD[..., rotation.dim :]
    if rotation.interleaved:
        left_THF, right_THF = turning_THR[..., ::2], turning_THR[..., 1::2]
    else:
        left_THF, right_THF = turning_THR.chunk(2, dim=-1)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    pairs = [left_THF * cos_T1F - right_THF * sin_T1F, right_THF * cos_T1F + left_THF * sin_T1F]
    turned_THR = torch.stack(pairs, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([turned_THR.to(x_THD.dtype), rest_THD], dim=-1)
