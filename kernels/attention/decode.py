"""Attention of a few rows of each sequence over paged KV, as in decode steps; on a GPU by split-KV flash decoding.

`attention_decode` is the operation of that name in `kernels.attention.paged`, its reference, with further features for
fast steps: float8 KV, a choice of implementation, and batch-invariant numerics. K and V are strided views of one layer;
the module does not know pools. Each row's position says what it sees; no order of rows is assumed.

Source: Dao et al. 2023 (Flash-Decoding); Milakov and Gimelshein 2018 (online softmax); Kwon et al. 2023 (blocks).
Legend: B sequences, Q rows of each, A query heads, H KV heads, D head size, N blocks, S positions per block, M entries
of a block table, W blocks a context needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.kernels import tuning
from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.attention import decode_plan as attention_plan
from baton.kernels.attention import decode_plan as attention_split_kv
from baton.kernels.attention import decode_triton as attention_decode_triton
from baton.kernels.attention import invariant as attention_invariant
from baton.kernels.attention import paged as attention
from baton.kernels.attention import split_kv_triton as attention_split_kv_triton
from baton.kernels.attention.block_tables import within
from baton.kernels.attention.decode_plan import Launch, PlanOptions, SplitKVPlans
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature

_FLOAT8 = torch.float8_e4m3fn
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TRITON_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_HEAD_DIMS = (16, 32, 64, 128, 256)
_TRITON_BLOCK_SIZES = (16, 32, 64, 128)
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", _FLOAT8: "fp8"}
_INDEX_DTYPES = (torch.int64, torch.int32)


def attention_decode(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    *,
    softmax_scale: float | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    invariant: bool = False,
    plans: SplitKVPlans | None = None,
    options: Mapping[str, Any] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute attention of Q rows of each of B sequences -> [B, Q, A, D] in the query's dtype, without host waits.

    Row (b, q) sees the keys at positions 0 ... positions_BQ[b, q]; a row at a negative position sees none, and its
    output is 0. Slots beyond a sequence's furthest row may contain anything, including NaN. Slots before it must be
    finite even for rows that do not see them, because a weight of 0 cancels finite values only. The launch depends on
    bounds only, so a CUDA graph may replay it.

    Args:
        query_BQAD: bfloat16, float16 or float32 (the reference also takes float64), D contiguous. Over float8 KV the
            kernels convert queries to float16: a row with magnitudes beyond 65,504 becomes NaN.
        key_NHSD: K in the query's dtype or float8_e4m3fn; [S, D] contiguous.
        value_NHSD: V, with the same shape, dtype and strides.
        block_tables_BM: int64 or int32; entries past a sequence's furthest position are not used.
        positions_BQ: int64 or int32; at most 32 rows for Triton.
        max_context_len: host-side upper bound of positions_BQ + 1.
        softmax_scale: factor of scores, positive; D ** -0.5 if None.
        key_scale: float32 [1] or [H], positive factor of float8 keys; None for other dtypes.
        value_scale: the same for values; as many as for keys.
        invariant: whether a row's result must depend on that row alone, whatever batch, number of rows and bound.
        plans: plans of the pass, shared by its layers, which have the same `positions_BQ`; None if there is only this
            layer. The split-KV work partition needs a plan, which the first layer makes.
        options: launch options in the committed table's format; for tuning.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    key = (
        signature(query_BQAD), signature(key_NHSD), signature(value_NHSD), signature(block_tables_BM),
        signature(positions_BQ), signature(key_scale), signature(value_scale), max_context_len, softmax_scale,
        invariant, None if options is None else tuple(options.items()), implementation,
    )  # fmt: skip
    how = _FORMS.find(key)
    if how is None:
        _check(query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, max_context_len)
        _check_scales(key_NHSD, key_scale, value_scale)
        how = _FORMS.keep(
            key,
            _form(
                query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, max_context_len, softmax_scale,
                invariant, options, implementation,
            ),
        )  # fmt: skip
    if query_BQAD.numel() == 0:
        return torch.empty_like(query_BQAD, memory_format=torch.contiguous_format)
    if isinstance(how, _Reference):
        return attention_decode_reference(
            query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, how.max_context_len, how.scale,
            key_scale, value_scale, invariant,
        )  # fmt: skip
    places = query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, key_scale, value_scale
    if isinstance(how, _Shared):
        return _by_shares(*places, how.max_context_len, how.scale, how.options, plans or SplitKVPlans())
    return attention_decode_triton.launch(*places, how)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A call that torch computes."""

    max_context_len: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Shared:
    """A call that uses the split-KV work partition across sequences."""

    max_context_len: int
    scale: float
    options: PlanOptions


_FORMS: Memo[_Reference | _Shared | Launch] = Memo()  # how checked calls are computed


def _form(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    softmax_scale: float | None,
    invariant: bool,
    options: Mapping[str, Any] | None,
    implementation: Implementation,
) -> _Reference | _Shared | Launch:
    """Finish the checks, and choose how the call is computed."""
    scale = query_BQAD.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    require(scale > 0, "softmax_scale", f"is {scale}, not positive")
    bound = min(max_context_len, block_tables_BM.shape[1] * key_NHSD.shape[2])
    if not uses_triton(query_BQAD.device, implementation):
        step, block_size = attention_invariant.KEYS_PER_STEP, key_NHSD.shape[2]
        fits = not invariant or step % block_size == 0
        require(fits, "key_NHSD", f"S is {block_size}, no divisor of the invariant reference's {step}")
        return _Reference(bound, scale)
    _check_triton(query_BQAD, key_NHSD, value_NHSD, positions_BQ)
    if query_BQAD.numel() == 0:
        chosen = attention_plan.default_options(1, query_BQAD.shape[3], key_NHSD.element_size())
    else:
        chosen = _options(query_BQAD, key_NHSD, bound, invariant, options)
    if chosen.shares:
        return _Shared(bound, scale, chosen)
    return _launch(query_BQAD, key_NHSD, bound, scale, chosen, invariant)


def attention_decode_reference(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    softmax_scale: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Compute it in torch, with the arithmetic of `kernels.attention.paged` or `.invariant`; float8 as float32."""
    block_size, head_dim = key_NHSD.shape[2:]
    block_tables_BM = within(block_tables_BM.long(), positions_BQ.amax(dim=1), block_size)
    if key_scale is not None and value_scale is not None:
        blocks_BW = block_tables_BM[:, : -(-max_context_len // block_size)]
        key_NHSD = key_NHSD[blocks_BW.flatten()].float() * key_scale[:, None, None]
        value_NHSD = value_NHSD[blocks_BW.flatten()].float() * value_scale[:, None, None]
        block_tables_BM = torch.arange(blocks_BW.numel(), device=blocks_BW.device).view(blocks_BW.shape)
    compute = attention_invariant.attention_decode_invariant if invariant else attention.attention_decode
    # Both scale by D ** -0.5.
    query = query_BQAD.to(key_NHSD.dtype)
    if softmax_scale != head_dim**-0.5:
        query = query * (softmax_scale * head_dim**0.5)
    seen_BQ = positions_BQ.long().clamp(0, max_context_len - 1)
    out_BQAD = compute(query, key_NHSD, value_NHSD, block_tables_BM, seen_BQ, max_context_len)
    return out_BQAD.masked_fill((positions_BQ < 0)[:, :, None, None], 0.0).to(query_BQAD.dtype)


def _check(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
) -> None:
    device = query_BQAD.device
    require_tensor("query_BQAD", query_BQAD, (None, None, None, None), _QUERY_DTYPES)
    num_sequences, num_queries, num_heads, head_dim = query_BQAD.shape
    dtypes = (query_BQAD.dtype, _FLOAT8)
    require_tensor("key_NHSD", key_NHSD, (None, None, None, head_dim), dtypes, device)
    require_tensor("value_NHSD", value_NHSD, key_NHSD.shape, (key_NHSD.dtype,), device)
    require_tensor("block_tables_BM", block_tables_BM, (num_sequences, None), _INDEX_DTYPES, device)
    require_tensor("positions_BQ", positions_BQ, (num_sequences, num_queries), _INDEX_DTYPES, device)
    num_kv_heads = key_NHSD.shape[1]
    require(key_NHSD.shape[2] > 0, "key_NHSD", "has blocks of no position")
    is_grouped = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    require(is_grouped, "query_BQAD", f"{num_heads} heads cannot share {num_kv_heads} KV heads")
    require_rows("query_BQAD", query_BQAD)
    require_rows("block_tables_BM", block_tables_BM)
    is_dense = key_NHSD.stride()[2:] == (head_dim, 1)
    require(is_dense, "key_NHSD", "the last two dimensions must be contiguous")
    require(value_NHSD.stride() == key_NHSD.stride(), "value_NHSD", "must have the strides of key_NHSD")
    require(max_context_len > 0, "max_context_len", f"is {max_context_len}, not positive")
    require(block_tables_BM.shape[1] > 0, "block_tables_BM", "has no column")


def _check_scales(key_NHSD: torch.Tensor, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None) -> None:
    is_float8 = key_NHSD.dtype == _FLOAT8
    num_kv_heads = key_NHSD.shape[1]
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        require((scale is not None) == is_float8, name, "goes with float8 keys and values, and only with them")
        if scale is not None:
            require_tensor(name, scale, (None,), (torch.float32,), key_NHSD.device)
            fits = scale.numel() in (1, num_kv_heads) and scale.is_contiguous()
            require(fits, name, f"must be contiguous, of 1 or {num_kv_heads} values")
    if key_scale is not None and value_scale is not None:
        require(key_scale.shape == value_scale.shape, "value_scale", "must have as many values as key_scale")


def _check_triton(
    query_BQAD: torch.Tensor, key_NHSD: torch.Tensor, value_NHSD: torch.Tensor, positions_BQ: torch.Tensor
) -> None:
    """Check what only the kernels require: dtypes, sizes that are powers of two, and 16-byte aligned rows."""
    require(query_BQAD.dtype in _TRITON_QUERY_DTYPES, "query_BQAD", f"Triton's kernel does not take {query_BQAD.dtype}")
    head_dim, block_size = query_BQAD.shape[3], key_NHSD.shape[2]
    require(head_dim in _TRITON_HEAD_DIMS, "query_BQAD", f"D is {head_dim}, not one of {_TRITON_HEAD_DIMS}")
    require(block_size in _TRITON_BLOCK_SIZES, "key_NHSD", f"S is {block_size}, not one of {_TRITON_BLOCK_SIZES}")
    for name, tensor in (("query_BQAD", query_BQAD), ("key_NHSD", key_NHSD), ("value_NHSD", value_NHSD)):
        unit = attention_decode_triton.STRIDE_UNIT
        aligned = tensor.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in tensor.stride()[:-1])
        require(aligned, name, f"must lie at a multiple of 16 bytes, with strides that are multiples of {unit}")
    require(key_NHSD.stride(0) < 1 << 32, "key_NHSD", "the stride of blocks must be under 2 ** 32")
    most = attention_decode_triton.MAX_QUERIES
    require(positions_BQ.shape[1] <= most, "positions_BQ", f"Triton's kernel takes at most {most} rows of a sequence")


def _options(
    query_BQAD: torch.Tensor, key_NHSD: torch.Tensor, bound: int, invariant: bool, given: Mapping[str, Any] | None
) -> PlanOptions:
    num_sequences, num_queries, num_heads, head_dim = query_BQAD.shape
    num_kv_heads = key_NHSD.shape[1]
    num_rows = num_queries * num_heads // num_kv_heads
    if invariant:
        return attention_plan.invariant_options(num_rows, head_dim, key_NHSD.element_size())
    if given is None:
        size = num_sequences * num_kv_heads * bound
        for known_queries in (num_queries, None):
            shape = attention_plan.table_shape(num_rows, head_dim, _DTYPE_NAMES[key_NHSD.dtype], known_queries)
            given = given or tuning.find("attention_decode", shape, size, query_BQAD.device.index)
    if given is None:
        return attention_plan.default_options(num_rows, head_dim, key_NHSD.element_size())
    chosen = attention_plan.options_of_row(given)
    require(not (chosen.direct and chosen.swap), "options", "no direct form has K and V on the left")
    require(not chosen.direct or head_dim >= 32, "options", f"no direct form has heads of {head_dim}")
    fits = not chosen.apart or (chosen.direct and chosen.tile >= 16 * chosen.warps)
    require(bool(fits), "options", "warps apart take 16 keys each, and a direct form")
    return chosen


def _launch(
    query_BQAD: torch.Tensor, key_NHSD: torch.Tensor, bound: int, scale: float, chosen: PlanOptions, invariant: bool
) -> Launch:
    num_sequences, num_queries, num_heads, head_dim = query_BQAD.shape
    num_kv_heads = key_NHSD.shape[1]
    num_rows = num_queries * num_heads // num_kv_heads
    if invariant:
        part_len = attention_plan.INVARIANT_PART_LEN
        num_parts = -(-bound // part_len)
    else:
        part_len = 0
        num_programs = num_sequences * num_kv_heads * -(-num_rows // chosen.rows)
        out_bytes = min(num_rows, chosen.rows) * head_dim * 4
        kv_row_bytes = 2 * head_dim * key_NHSD.element_size()
        num_parts = attention_plan.num_parts(num_programs, bound, kv_row_bytes, out_bytes, chosen)
    return Launch(
        scale=scale,
        max_context_len=bound,
        num_parts=num_parts,
        part_len=part_len,
        tile=chosen.tile,
        rows=chosen.rows,
        swap=chosen.swap,
        stages=chosen.stages,
        warps=chosen.warps,
        pdl=chosen.pdl,
        direct=chosen.direct,
        apart=chosen.apart,
        registers=chosen.registers,
    )


def _by_shares(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    bound: int,
    scale: float,
    chosen: PlanOptions,
    plans: SplitKVPlans,
) -> torch.Tensor:
    num_queries, num_heads = query_BQAD.shape[1:3]
    num_kv_heads = key_NHSD.shape[1]
    num_programs = num_kv_heads * -(-num_queries * num_heads // num_kv_heads // chosen.rows)
    wanted = attention_split_kv.division(
        slots=chosen.slots, num_programs=num_programs, tile=chosen.tile, max_context_len=bound
    )
    return attention_split_kv_triton.launch(
        query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, None, key_scale, value_scale,
        plans.find(positions_BQ, None, wanted),
        num_queries=num_queries, scale=scale, num_shares=wanted.num_shares, how=chosen,
    )  # fmt: skip
