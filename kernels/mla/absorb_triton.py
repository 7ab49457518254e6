# mypy: ignore-errors
"""The kernels of `absorb_queries` and `absorb_values`: a small GEMM of each head, for few rows.

Both take as long as reading the weights, which depend on nothing. Queries: a program has some of the latents' columns
of a head, so that all programs of 128 heads are there at once, four on each multiprocessor. It loads its weights before
it waits for the launch before, and keeps them for every tile of rows. Values: a program has a whole head, whose columns
are a group of `quantize_fp8`, so it rounds them to float8 itself, to the same bits. It asks for the weights before it
waits, and then takes them in steps beside its rows: what attention made comes late, since attention fills the GPU.

Up to 32 rows the weight takes the M side of the tensor cores' tiles, which has at least 64 rows.

Shapes: T tokens, A heads, N columns of a query without RoPE, P columns with RoPE, C length of a latent, V columns of a
value; K inputs of a GEMM or a step, R rows of a tile, S of them whose turned columns a program copies.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.quantize_fp8 import DTYPE, GROUP_LEN
from baton.kernels.gemm.quantize_fp8_triton import quantize_tile
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.prefetch_triton import prefetch
from baton.kernels.variant import Variant, with_ue8m0

NOPE_DIM, TURNED_DIM, LATENT_DIM, VALUE_DIM = 128, 64, 512, GROUP_LEN
_MULTIPROCESSORS = 132
_QUERY_PROGRAMS = 4 * _MULTIPROCESSORS  # at once: `variants` promises registers and shared memory for them


@triton.jit(do_not_specialize=["num_tokens"])
def _queries_kernel(
    query, weight, out, num_tokens: tl.int32, query_stride_t, query_stride_a, weight_stride_a, weight_stride_n,
    out_stride_t, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SWAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one head, in every so many tiles of rows; grid (parts of the columns, heads, tiles of rows)."""
    PARTS: tl.constexpr = C // COLUMNS
    SHARE: tl.constexpr = ROWS // PARTS  # rows whose turned columns this program copies
    part, head = tl.program_id(0), tl.program_id(1)
    index_N, column_C = tl.arange(0, N), part * COLUMNS + tl.arange(0, COLUMNS)
    weight += head.to(tl.int64) * weight_stride_a
    weight_NC = tl.load(weight + index_N[:, None] * weight_stride_n + column_C[None, :])
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query += head * query_stride_a
    out += head * (C + P)
    column_P = tl.arange(0, P)
    for tile in tl.range(tl.program_id(2), tl.cdiv(num_tokens, ROWS), tl.num_programs(2), num_stages=1):
        row_R = tile * ROWS + tl.arange(0, ROWS)
        copied_S = tile * ROWS + part * SHARE + tl.arange(0, SHARE)
        is_row_R1, is_row_S1 = (row_R < num_tokens)[:, None], (copied_S < num_tokens)[:, None]
        row_R, copied_S = row_R.to(tl.int64), copied_S.to(tl.int64)
        nope_RN = tl.load(query + row_R[:, None] * query_stride_t + index_N[None, :], mask=is_row_R1, other=0.0)
        turned_at_SP = query + copied_S[:, None] * query_stride_t + N + column_P[None, :]
        turned_SP = tl.load(turned_at_SP, mask=is_row_S1, other=0.0)
        if SWAP:
            total_RC = tl.trans(tl.dot(tl.trans(weight_NC), tl.trans(nope_RN), input_precision="ieee"))
        else:
            total_RC = tl.dot(nope_RN, weight_NC, input_precision="ieee")
        out_at_RC = out + row_R[:, None] * out_stride_t + column_C[None, :]
        tl.store(out_at_RC, total_RC.to(out.dtype.element_ty), mask=is_row_R1)
        tl.store(out + copied_S[:, None] * out_stride_t + C + column_P[None, :], turned_SP, mask=is_row_S1)


@triton.jit(do_not_specialize=["num_tokens", "num_padded"])
def _values_kernel(
    mixed, weight, out, scales, num_tokens: tl.int32, num_padded: tl.int32, mixed_stride_t, mixed_stride_a,
    weight_stride_a, weight_stride_v, out_stride_t, C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, SWAP: tl.constexpr, QUANTIZE: tl.constexpr, UE8M0: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head, in every so many tiles of rows; grid (heads, tiles of rows)."""
    head = tl.program_id(0)
    index_V, index_K = tl.arange(0, V), tl.arange(0, STEP)
    weight += head.to(tl.int64) * weight_stride_a
    if EARLY:
        prefetch(weight + index_V * weight_stride_v, C * 2)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mixed += head * mixed_stride_a
    weight_at_VK = weight + index_V[:, None] * weight_stride_v + index_K[None, :]
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_padded, ROWS), tl.num_programs(1), num_stages=1):
        row_R = tile * ROWS + tl.arange(0, ROWS)
        is_row_R, row_R1 = row_R < num_tokens, row_R[:, None].to(tl.int64)
        mixed_at_RK = mixed + row_R1 * mixed_stride_t + index_K[None, :]
        total = tl.zeros([V, ROWS] if SWAP else [ROWS, V], tl.float32)
        for first in tl.range(0, C, STEP):
            weight_VK = tl.load(weight_at_VK + first)
            mixed_RK = tl.load(mixed_at_RK + first, mask=is_row_R[:, None], other=0.0)
            if SWAP:
                total = tl.dot(weight_VK, tl.trans(mixed_RK), total, input_precision="ieee")
            else:
                total = tl.dot(mixed_RK, tl.trans(weight_VK), total, input_precision="ieee")
        value_RV = (tl.trans(total) if SWAP else total).to(mixed.dtype.element_ty)
        out_at_RV = out + row_R1 * out_stride_t + head * V + index_V[None, :]
        if QUANTIZE:
            # Of the rounded values, as a launch of its own would read them.
            quantized_RV, scale_R1 = quantize_tile(value_RV.to(tl.float32), 1, UE8M0)
            is_stored_R = row_R < num_padded
            tl.store(out_at_RV, quantized_RV, mask=is_stored_R[:, None])
            scale_R = tl.where(is_row_R, tl.reshape(scale_R1, [ROWS]), 1.0)
            tl.store(scales + head * num_padded + row_R, scale_R, mask=is_stored_R)
        else:
            tl.store(out_at_RV, value_RV, mask=is_row_R[:, None])


@functools.cache
def fits(device_index: int | None) -> bool:
    """Whether a program finds room for so many steps in shared memory: on Hopper; None: in the interpreter."""
    if device_index is None:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index)[0] == 9


def rows_of(num_tokens: int) -> int:
    """Rows of a tile."""
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64


def query_options(num_tokens: int, num_heads: int) -> dict[str, Any]:
    """Options of a launch: as many columns for a program as leave something to do for every multiprocessor."""
    rows = rows_of(num_tokens)
    columns = 128 if num_heads * (LATENT_DIM // 128) > _MULTIPROCESSORS else 64
    return {"rows": rows, "columns": columns, "swap": rows < 64, "warps": 4}


def value_options(num_tokens: int, num_heads: int) -> dict[str, Any]:
    """Options of a launch: tiles of 128 rows read weights less often, where there is a program for each anyway."""
    rows = rows_of(num_tokens)
    num_rows = triton.next_power_of_2(num_tokens)  # up to which all are computed alike
    if num_rows >= 128 and num_heads * num_rows > 64 * _MULTIPROCESSORS:
        rows = 128
    # Not all eight steps under way at once, so that programs of the next launch find room beside these: a layer takes
    # 1.7 to 2.7 us less up to 32 rows.
    return {"rows": rows, "step": 64, "swap": rows < 64, "warps": 8, "stages": 5 if rows <= 64 else 6}


def launch_queries(
    query_TAE: torch.Tensor, key_ANC: torch.Tensor, *, options: Mapping[str, Any] | None = None, early: bool = True
) -> torch.Tensor:
    """Absorbed queries, [T, A, C + P]; all arguments were checked.

    Args:
        query_TAE: of at least one row and one head.
        key_ANC: C contiguous.
        options: as `query_options` has them; None: by the rule.
        early: whether programs may be there before the launch before has ended.
    """
    num_tokens, num_heads, _ = query_TAE.shape
    options = options or query_options(num_tokens, num_heads)
    row_len = LATENT_DIM + TURNED_DIM
    out_TAX = torch.empty(num_tokens, num_heads, row_len, dtype=query_TAE.dtype, device=query_TAE.device)
    num_parts, num_tiles = LATENT_DIM // options["columns"], -(-num_tokens // options["rows"])
    num_programs = min(num_tiles, max(1, _QUERY_PROGRAMS // (num_parts * num_heads)))
    arguments = (
        query_TAE, key_ANC, out_TAX, num_tokens, *_strides(query_TAE), key_ANC.stride(0), key_ANC.stride(1),
        num_heads * row_len,
    )  # fmt: skip
    chosen = (options["rows"], options["columns"], options["swap"], options["warps"])
    constants = _query_constants(*chosen, query_TAE.device, early)
    _launch_queries((num_parts, num_heads, num_programs), arguments, constants)
    return out_TAX


def launch_values(
    mixed_TAC: torch.Tensor,
    value_AVC: torch.Tensor,
    num_padded: int | None,
    *,
    ue8m0: bool = False,
    options: Mapping[str, Any] | None = None,
    early: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [T, A * V], or in float8 [num_padded, A * V] and their scales; all arguments were checked.

    Args:
        mixed_TAC: of at least one row and one head.
        value_AVC: C contiguous.
        num_padded: as in `absorb_values`.
        ue8m0: whether scales are powers of two.
        options: as `value_options` has them; None: by the rule.
        early: whether programs may be there before the launch before has ended.
    """
    num_tokens, num_heads, _ = mixed_TAC.shape
    options = options or value_options(num_tokens, num_heads)
    quantize, num_rows = num_padded is not None, num_tokens if num_padded is None else num_padded
    row_len, device = num_heads * VALUE_DIM, mixed_TAC.device
    out_RQ = torch.empty(num_rows, row_len, dtype=DTYPE if quantize else mixed_TAC.dtype, device=device)
    scale_AR = torch.empty(num_heads, num_rows, dtype=torch.float32, device=device) if quantize else None
    num_programs = min(-(-num_rows // options["rows"]), max(1, _MULTIPROCESSORS // num_heads))
    arguments = (
        mixed_TAC, value_AVC, out_RQ, out_RQ if scale_AR is None else scale_AR, num_tokens, num_rows,
        *_strides(mixed_TAC), value_AVC.stride(0), value_AVC.stride(1), row_len,
    )  # fmt: skip
    chosen = (options["rows"], options["step"], options["swap"], options["warps"], options["stages"])
    constants = _value_constants(*chosen, quantize, ue8m0 and quantize, device, early)
    _launch_values((num_heads, num_programs), arguments, constants)
    return out_RQ, scale_AR


def _strides(x_TAK: torch.Tensor) -> tuple[int, int]:
    """Of rows and heads; where there is one, its stride may be anything, and must not compile anything."""
    num_tokens, num_heads, length = x_TAK.shape
    head_stride = x_TAK.stride(1) if num_heads > 1 else length
    return x_TAK.stride(0) if num_tokens > 1 else num_heads * head_stride, head_stride


@functools.lru_cache(maxsize=64)
def _query_constants(rows: int, columns: int, swap: bool, warps: int, device: torch.device, early: bool) -> Constants:
    return Constants(_of_queries(rows, columns, swap) | {"num_warps": warps} | dependent_launch(device, early))


@functools.lru_cache(maxsize=64)
def _value_constants(
    rows: int, step: int, swap: bool, warps: int, stages: int, quantize: bool, ue8m0: bool, device: torch.device,
    early: bool,
) -> Constants:  # fmt: skip
    launched = {"num_warps": warps, "num_stages": stages} | dependent_launch(device, early)
    return Constants(_of_values(rows, step, swap, quantize, ue8m0) | launched)


def _of_queries(rows: int, columns: int, swap: bool) -> dict[str, Any]:
    """All but `EARLY`."""
    return {"N": NOPE_DIM, "P": TURNED_DIM, "C": LATENT_DIM, "ROWS": rows, "COLUMNS": columns, "SWAP": swap}


def _of_values(rows: int, step: int, swap: bool, quantize: bool, ue8m0: bool) -> dict[str, Any]:
    """All but `EARLY`."""
    sizes = {"C": LATENT_DIM, "V": VALUE_DIM, "ROWS": rows, "STEP": step}
    return sizes | {"SWAP": swap, "QUANTIZE": quantize, "UE8M0": ue8m0}


_launch_queries = Launcher(_queries_kernel)
_launch_values = Launcher(_values_kernel)


def _query_variant(num_tokens: int, num_heads: int) -> Variant:
    options = query_options(num_tokens, num_heads)
    strides = ("query_stride_t", "query_stride_a", "weight_stride_a", "weight_stride_n", "out_stride_t")
    return Variant(
        name=f"absorb_queries {options['rows']}x{options['columns']}",
        kernel=_queries_kernel,
        types=dict.fromkeys(("query", "weight", "out"), "*bf16") | dict.fromkeys(("num_tokens", *strides), "i32"),
        constants=_of_queries(options["rows"], options["columns"], options["swap"]) | {"EARLY": True},
        aligned=("query", "weight", "out", *strides),
        num_warps=options["warps"],
        contains=("HGMMA",),
        lacks=("HMMA",),
        # Four programs of a multiprocessor.
        max_registers=128,
        max_shared_bytes=56_000,
        on_amd=False,
        options={"launch_pdl": True},
    )


def _value_variant(num_tokens: int, *, quantize: bool) -> Variant:
    options = value_options(num_tokens, 128)
    out = "*fp8e4nv" if quantize else "*bf16"
    types = {"mixed": "*bf16", "weight": "*bf16", "out": out, "scales": "*fp32" if quantize else out}
    strides = ("mixed_stride_t", "mixed_stride_a", "weight_stride_a", "weight_stride_v", "out_stride_t")
    form = _of_values(options["rows"], options["step"], options["swap"], quantize, False)
    return Variant(
        name=f"absorb_values {options['rows']}{' fp8' * quantize}",
        kernel=_values_kernel,
        types=types | dict.fromkeys(("num_tokens", "num_padded", *strides), "i32"),
        constants=form | {"EARLY": True},
        aligned=(*types, *strides),
        num_warps=options["warps"],
        num_stages=options["stages"],
        contains=("HGMMA", "LDGSTS"),
        lacks=("HMMA",),
        max_registers=168,
        max_shared_bytes=200_000,
        on_amd=False,
        options={"launch_pdl": True},
    )


def variants() -> list[Variant]:
    """Each tile: of all heads and of a rank's, and in float8 and not."""
    found = [_query_variant(rows, num_heads) for rows in (16, 32, 64) for num_heads in (128, 16)]
    found += [_value_variant(rows, quantize=quantize) for rows in (16, 32, 64, 128) for quantize in (False, True)]
    return with_ue8m0(found, "absorb_values 64 fp8")
