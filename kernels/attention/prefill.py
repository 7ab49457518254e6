"""Causal attention of prefill chunks over paged KV, with lengths on the device so that CUDA graphs can replay it.

Row i of a sequence's chunk is at position context_len - query_len + i and sees the keys from position 0 to its own, all
of which are already in the blocks. Slots past a sequence's last position may contain anything, including NaN.

On GPUs one Triton kernel computes it (`kernels.attention.prefill_triton`, or on Hopper
`kernels.attention.prefill_hopper_triton`, as `kernels.attention.prefill_plan` chooses); few short chunks over long
prefixes use `kernels.attention.short_chunks`. Elsewhere the torch reference computes it (`kernels.attention.paged` and
`kernels.attention.invariant`). For long chunks over float8, KV is dequantized first where that pays
(`kernels.kv.dequantize`). This module does not write KV, and never makes the host wait for the device.

Source: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3: matmuls and softmax overlapped); blocks: Kwon
et al. 2023.
Legend: T tokens, B sequences, E = B + 1, A query heads, H KV heads, G = A / H, D head size, N blocks, S positions per
block, M entries of a block table.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any

import torch

from baton.kernels import tuning
from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.attention import paged as attention
from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.attention import prefill_plan
from baton.kernels.attention import prefill_triton as attention_prefill_triton
from baton.kernels.attention import short_chunks as attention_short_chunks
from baton.kernels.attention.block_tables import require_columns, require_lens, within
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.attention.invariant import attention_prefill_invariant
from baton.kernels.copies import to_device
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.kv import dequantize as kv_dequantize
from baton.kernels.memo import Memo, open_signature, signature

NAME = "attention_prefill"
HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_BLOCK_SIZE = 64
_ANY_LEN = 1 << 30
_FP8 = torch.float8_e4m3fn
_INDICES = (torch.int32, torch.int64)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_REFERENCE_DTYPES = (*_KERNEL_DTYPES, torch.float32, torch.float64)
_in_every_form: ContextVar[bool] = ContextVar("in_every_form", default=False)


@contextmanager
def in_every_form() -> Iterator[None]:
    """Let `attention_prefill` also compute each call in all forms that a model of times may choose for such heads.

    For a warm-up. The form follows from lengths, so calls of some lengths cannot be relied on to meet every form.
    """
    token = _in_every_form.set(True)
    try:
        yield
    finally:
        _in_every_form.reset(token)


def attention_prefill(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    max_query_len: int,
    scale: float | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    invariant: bool = False,
    plans: SplitKVPlans | None = None,
    options: Mapping[str, Any] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute attention of concatenated chunks -> [T, A, D]; on a GPU the host never waits for the device.

    Args:
        query_TAD: rows of all chunks, contiguous in D; rows past the last start belong to no chunk, and their outputs
            are undefined. Over float8 KV the kernels convert queries to float16 (magnitudes up to 65,504).
        key_NHSD: K of a layer, contiguous in D, in the dtype of the queries or float8_e4m3fn.
        value_NHSD: V, with the same shape, strides and dtype.
        block_tables_BM: int32 or int64, contiguous in M.
        query_starts_E: int32 or int64; sequence b has the rows from starts[b] up to starts[b + 1]. Sequences without
            rows may be anywhere; those that pad a batch repeat the total.
        context_lens_B: int32 or int64; keys that a sequence's last row sees, at least its number of rows. Not read if
            it has no rows.
        max_query_len: host-side upper bound of the rows of one sequence.
        scale: factor of scores, above 0; D ** -0.5 if None.
        key_scale: float32 [1] or [H], factor of stored keys; 1 if None.
        value_scale: the same for V; give both or neither.
        invariant: whether a row's result must depend on that row and its KV alone, bit for bit, whatever the chunks and
            the batch.
        plans: plans of the pass, shared by its layers, which have the same starts and lengths; None if there is only
            this layer.
        options: a row in the tuned table's format, used instead of the table or the kernel's rule; for the tuner and
            tests.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    key = (
        signature(query_TAD), signature(key_NHSD), signature(value_NHSD), signature(block_tables_BM),
        signature(query_starts_E), signature(context_lens_B), signature(key_scale), signature(value_scale),
        max_query_len, scale, invariant, None if options is None else tuple(options.items()), implementation,
    )  # fmt: skip
    places = query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B
    how = _FORMS.find(key)
    if how is None:
        kind = _checked(places, scale, key_scale, value_scale, implementation)
        require(0 <= max_query_len <= _ANY_LEN, "max_query_len", f"is {max_query_len}")
        require_columns(query_TAD.shape[0], block_tables_BM)
        how = _FORMS.keep(key, _form(places, kind, max_query_len, invariant, options))
    if how.form is _Form.TORCH:
        lens = [end - start for start, end in pairwise(query_starts_E.tolist())]
        if scale is not None:  # the reference applies D ** -0.5
            query_TAD = query_TAD * (scale * math.sqrt(query_TAD.shape[2]))
        kv = _dequantized(key_NHSD, key_scale, query_TAD.dtype), _dequantized(value_NHSD, value_scale, query_TAD.dtype)
        tables_BM = within(block_tables_BM.long(), context_lens_B - 1, key_NHSD.shape[2])
        return _reference(query_TAD, *kv, tables_BM, lens, context_lens_B.tolist(), invariant)
    if how.form is _Form.NOTHING:
        return torch.empty(query_TAD.shape, dtype=query_TAD.dtype, device=query_TAD.device)
    softmax_scale = float(query_TAD.shape[2] ** -0.5 if scale is None else scale)
    plans, scales = plans or SplitKVPlans(), (key_scale, value_scale)
    if _in_every_form.get() and not invariant:
        for other in _chosen_by_time(places, _checked(places, scale, key_scale, value_scale, implementation)):
            _by_triton(places, other, max_query_len, softmax_scale, scales, plans, invariant)
    return _by_triton(places, how, max_query_len, softmax_scale, scales, plans, invariant)


class _Form(Enum):
    """How a checked call is computed."""

    TORCH = auto()
    NOTHING = auto()  # no rows
    SHORT = auto()  # positions are split as well as rows
    DEQUANTIZED = auto()  # float8 KV is dequantized first
    AS_IT_IS = auto()


@dataclass(frozen=True, slots=True)
class _How:
    """The form of a checked call, and its options if they are known."""

    form: _Form
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Results of checks that hold for any number of rows, sequences and positions.

    Attributes:
        in_triton: whether Triton computes the call, not torch's reference.
        can_divide: whether the implementation for short chunks can take it.
        can_dequantize: whether the Hopper kernel can take the KV once it is dequantized.
        on_hopper: whether the Hopper kernel can take the KV as it is.
    """

    in_triton: bool
    can_divide: bool = False
    can_dequantize: bool = False
    on_hopper: bool = False


_FORMS: Memo[_How] = Memo()  # shared by the layers of one step
_KINDS: Memo[_Kind] = Memo()  # shared by all steps, which differ in their numbers of rows


def attention_prefill_lens(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    invariant: bool = False,
    options: Mapping[str, Any] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute `attention_prefill` with lengths on the host, as `kernels.attention.paged.attention_prefill` takes them.

    The lengths are sent in one copy that the host does not wait for.

    Raises:
        KernelArgumentInvalid: an argument does not fit, or the lengths do not fit the queries; nothing was launched.
    """
    require_lens(query_TAD, key_NHSD, block_tables_BM, query_lens, context_lens)
    numbers = torch.tensor([0, *accumulate(query_lens), *context_lens], dtype=torch.int32)
    numbers = to_device(numbers, query_TAD.device)
    return attention_prefill(
        query_TAD, key_NHSD, value_NHSD, block_tables_BM,
        numbers[: len(query_lens) + 1], numbers[len(query_lens) + 1 :],
        max_query_len=max(query_lens, default=0), key_scale=key_scale, value_scale=value_scale,
        invariant=invariant, options=options, implementation=implementation,
    )  # fmt: skip


_Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _checked(
    places: _Places, scale: float | None, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None,
    implementation: Implementation,
) -> _Kind:  # fmt: skip
    """Return the cached results of checks for calls like this one, or run the checks."""
    query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B = places
    require(block_tables_BM.dim() == 2, "block_tables_BM", f"has shape {list(block_tables_BM.shape)}, not [B, M]")
    for name, tensor in (("query_starts_E", query_starts_E), ("context_lens_B", context_lens_B)):
        require(tensor.dim() == 1, name, f"has shape {list(tensor.shape)}, not one dimension")
    num_sequences = block_tables_BM.shape[0]
    key = (
        open_signature(query_TAD), signature(key_NHSD), signature(value_NHSD), open_signature(block_tables_BM, 2),
        open_signature(query_starts_E), query_starts_E.shape[0] - num_sequences,
        open_signature(context_lens_B), context_lens_B.shape[0] - num_sequences,
        signature(key_scale), signature(value_scale), scale, implementation,
    )  # fmt: skip
    kind = _KINDS.find(key)
    if kind is None:
        uses = uses_triton(query_TAD.device, implementation)
        _check(*places, uses)
        _check_scales(key_NHSD, scale, key_scale, value_scale)
        kind = _KINDS.keep(key, _kind(*places[:3], key_scale) if uses else _Kind(in_triton=False))
    return kind


def _kind(
    query_TAD: torch.Tensor, key_NHSD: torch.Tensor, value_NHSD: torch.Tensor, key_scale: torch.Tensor | None
) -> _Kind:
    """Derive a `_Kind` from dtypes, strides and sizes that calls have in common."""
    head_dim, block_size = query_TAD.shape[2], key_NHSD.shape[2]
    can_dequantize = (
        key_NHSD.stride()[2:] == (head_dim, 1)
        and kv_dequantize.most_bytes(key_NHSD.dtype, query_TAD.device.index, head_dim, block_size) > 0
    )
    can_divide = attention_short_chunks.fits(query_TAD, key_NHSD, value_NHSD, key_scale)
    on_hopper = attention_prefill_hopper_triton.fits(query_TAD, key_NHSD, value_NHSD)
    return _Kind(in_triton=True, can_divide=can_divide, can_dequantize=can_dequantize, on_hopper=on_hopper)


def _form(places: _Places, kind: _Kind, max_query_len: int, invariant: bool, options: Mapping[str, Any] | None) -> _How:
    """Choose the kernels from the sizes of queries, K, V, tables, starts and lengths."""
    if not kind.in_triton:
        return _How(_Form.TORCH)
    query_TAD, key_NHSD, block_tables_BM = places[0], places[1], places[3]
    if not query_TAD.numel() or not block_tables_BM.shape[0] or not max_query_len:
        return _How(_Form.NOTHING)
    if kind.on_hopper and options is None:
        options = _hopper_options(places, max_query_len, invariant, may_divide=kind.can_divide)
    if _is_short(query_TAD, key_NHSD, block_tables_BM, kind, max_query_len, invariant, options):
        return _How(_Form.SHORT, options)
    is_long = max_query_len >= kv_dequantize.MIN_QUERY_LEN
    widens = options is None and not invariant and is_long and _may_dequantize(places, kind)
    return _How(_Form.DEQUANTIZED if widens else _Form.AS_IT_IS, options)


def _may_dequantize(places: _Places, kind: _Kind) -> bool:
    """Return whether float8 KV can be dequantized first, and takes little enough memory."""
    num_bytes = kv_dequantize.num_bytes(places[3], places[1], places[0].dtype) if kind.can_dequantize else 0
    return kind.can_dequantize and num_bytes <= kv_dequantize.MAX_BYTES


def _chosen_by_time(places: _Places, kind: _Kind) -> Iterator[_How]:
    """All that `_form` and `_find_options` may choose by a model of times, for such heads and KV."""
    if not kind.on_hopper and not _may_dequantize(places, kind):
        return
    num_multiprocessors = attention_prefill_hopper_triton.num_multiprocessors(places[0].device.index)
    may_divide = kind.on_hopper and kind.can_divide
    for options in prefill_plan.all_options(places[0].shape[2], num_multiprocessors, may_divide=may_divide):
        if attention_short_chunks.is_ours(options):
            yield _How(_Form.SHORT, options)
        else:
            yield _How(_Form.AS_IT_IS if kind.on_hopper else _Form.DEQUANTIZED, options)


def _by_triton(
    places: _Places,
    how: _How,
    max_query_len: int,
    scale: float,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    plans: SplitKVPlans,
    invariant: bool,
) -> torch.Tensor:
    """Compute a checked call in that form."""
    if how.form is _Form.SHORT:
        return attention_short_chunks.attend(
            *places, max_query_len=max_query_len, scale=scale, key_scale=scales[0], value_scale=scales[1], plans=plans,
            options=how.options,
        )  # fmt: skip
    query_TAD = places[0]
    output_TAD = torch.empty(query_TAD.shape, dtype=query_TAD.dtype, device=query_TAD.device)
    if how.form is _Form.DEQUANTIZED:
        places = query_TAD, *kv_dequantize.dequantize_kv(*places[1:], *scales, query_TAD.dtype), *places[4:]
        scales = None, None
    options = how.options or _find_options(places, max_query_len, invariant)
    if attention_prefill_hopper_triton.is_ours(options):
        require(scales[0] is None, "key_scale", "is not for the form that the options are of")
        attention_prefill_hopper_triton.launch(*places, output_TAD, scale=scale, options=options)
    else:
        attention_prefill_triton.launch(
            *places, output_TAD, scale=scale, key_scale=scales[0], value_scale=scales[1], options=options
        )
    return output_TAD


def _is_short(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    kind: _Kind,
    max_query_len: int,
    invariant: bool,
    options: Mapping[str, Any] | None,
) -> bool:
    """Return whether positions are split as well as rows: as the options say, or where that is faster."""
    if invariant or (options is not None and not attention_short_chunks.is_ours(options)):
        return False
    if options is not None:
        require(kind.can_divide, "options", "divide positions, for which this KV or its strides do not fit")
        return True
    num_sequences, num_columns = block_tables_BM.shape
    bound = num_columns * key_NHSD.shape[2]
    if not kind.can_divide:
        return False
    return attention_short_chunks.is_better(query_TAD, key_NHSD, num_sequences, bound, max_query_len)


def _hopper_options(
    places: _Places, max_query_len: int, invariant: bool, *, may_divide: bool = False
) -> Mapping[str, Any]:
    """Options for KV that the Hopper kernel can take."""
    query_TAD, key_NHSD, block_tables_BM = places[0], places[1], places[3]
    num_tokens, num_heads, head_dim = query_TAD.shape
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    if invariant:
        return prefill_plan.invariant_options(head_dim)
    num_sequences, num_columns = block_tables_BM.shape
    chunks = prefill_plan.Chunks(
        num_rows=num_tokens,
        num_sequences=num_sequences,
        longest=min(max_query_len, num_tokens),
        max_context_len=num_columns * block_size,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    num_multiprocessors = attention_prefill_hopper_triton.num_multiprocessors(query_TAD.device.index)
    return prefill_plan.choose(chunks, num_multiprocessors, may_divide=may_divide)


def _find_options(places: _Places, max_query_len: int, invariant: bool) -> Mapping[str, Any]:
    """Launch options where positions are not divided: for Hopper, from the tuned table if it has a row, else by rule.

    With `invariant`, one configuration for all sizes: a row must not depend on the length of its chunk.
    """
    query_TAD, key_NHSD, value_NHSD = places[:3]
    if attention_prefill_hopper_triton.fits(query_TAD, key_NHSD, value_NHSD):
        return _hopper_options(places, max_query_len, invariant)
    longest = _ANY_LEN if invariant else max_query_len
    group, head_dim = query_TAD.shape[1] // key_NHSD.shape[1], query_TAD.shape[2]
    num_bytes = key_NHSD.element_size()
    found = tuning.find(NAME, shape_of(group, head_dim, num_bytes), longest, query_TAD.device.index)
    return found or attention_prefill_triton.rule(group * longest, head_dim, num_bytes)


def shape_of(group: int, head_dim: int, num_bytes: int) -> str:
    """Name of a shape in the tuned table."""
    return f"{group}x{head_dim}x{8 * num_bytes}"


def _check(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    with_triton: bool,
) -> None:
    device = query_TAD.device
    require_tensor("query_TAD", query_TAD, [None, None, None], _KERNEL_DTYPES if with_triton else _REFERENCE_DTYPES)
    require_rows("query_TAD", query_TAD)
    num_heads, head_dim = query_TAD.shape[1:]
    require_tensor("key_NHSD", key_NHSD, [None, None, None, head_dim], (query_TAD.dtype, _FP8), device)
    require_rows("key_NHSD", key_NHSD)
    require_tensor("value_NHSD", value_NHSD, key_NHSD.shape, (key_NHSD.dtype,), device)
    same = key_NHSD.stride() == value_NHSD.stride()
    require(same, "value_NHSD", f"has strides {value_NHSD.stride()}, not {key_NHSD.stride()}")
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    fits = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    require(fits, "query_TAD", f"has {num_heads} heads, no multiple of {num_kv_heads}")
    fits = 0 < block_size <= MAX_BLOCK_SIZE and MAX_BLOCK_SIZE % block_size == 0
    require(fits, "key_NHSD", f"has blocks of {block_size}, no divisor of {MAX_BLOCK_SIZE}")
    require(not with_triton or head_dim in HEAD_DIMS, "query_TAD", f"has head size {head_dim}, none of {HEAD_DIMS}")
    require_tensor("block_tables_BM", block_tables_BM, [None, None], _INDICES, device)
    require_rows("block_tables_BM", block_tables_BM)
    num_sequences = block_tables_BM.shape[0]
    require_tensor("query_starts_E", query_starts_E, [num_sequences + 1], _INDICES, device)
    require_rows("query_starts_E", query_starts_E)
    require_tensor("context_lens_B", context_lens_B, [num_sequences], _INDICES, device)
    require_rows("context_lens_B", context_lens_B)


def _check_scales(
    key_NHSD: torch.Tensor, scale: float | None, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None
) -> None:
    require(scale is None or 0 < scale < math.inf, "scale", f"is {scale}, not above 0")
    both = (key_scale is None) == (value_scale is None)
    require(both, "value_scale", "goes with key_scale: give both or neither")
    for name, given in (("key_scale", key_scale), ("value_scale", value_scale)):
        if given is not None:
            require_tensor(name, given, [None], (torch.float32,), key_NHSD.device)
            fits = given.shape[0] in (1, key_NHSD.shape[1])
            require(fits, name, f"has {given.shape[0]} values, not 1 or one for each of {key_NHSD.shape[1]} heads")
            require_rows(name, given)
    if key_scale is not None and value_scale is not None:
        require(key_scale.shape == value_scale.shape, "value_scale", "must have as many values as key_scale")


def _dequantized(kv_NHSD: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Stored K or V in the dtype of the queries, contiguous."""
    if scale is None:
        return kv_NHSD.to(dtype).contiguous()
    wide_NHSD = kv_NHSD.to(torch.float32) * scale[:, None, None]
    return wide_NHSD.to(dtype)


def _reference(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: list[int],
    context_lens: list[int],
    invariant: bool,
) -> torch.Tensor:
    """Compute it with the functions that take host-side lengths, leaving out sequences without rows."""
    live = [sequence for sequence, query_len in enumerate(query_lens) if query_len > 0]
    output_TAD = torch.zeros_like(query_TAD)
    if live:
        compute = attention_prefill_invariant if invariant else attention.attention_prefill
        num_rows = sum(query_lens)
        output_TAD[:num_rows] = compute(
            query_TAD[:num_rows],
            key_NHSD,
            value_NHSD,
            block_tables_BM[live],
            [query_lens[sequence] for sequence in live],
            [context_lens[sequence] for sequence in live],
        )
    return output_TAD
