# mypy: ignore-errors
"""The kernel of `linear_split`: a GEMM of few tokens and few outputs.

Such a GEMM takes as long as reading the weight, if there are enough programs to read it; tiles of 64 rows are too
few. So the inner dimension is split among programs, and whichever of a tile comes last adds the parts, in the order of
the splits: the sum has one value, and there is no second launch. The weight's rows are the 64 rows of an instruction,
tokens its columns. A program asks for its part of the weight while the launch before still runs.

Shapes: M tokens, N rows of the weight, K columns of a step.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.prefetch_triton import prefetch
from baton.kernels.variant import Variant

OUTPUTS = 64  # rows of the weight of a tile
STEP = 128
MAX_TOKENS = 32  # with 64 a step of a model takes no less than by the library
MAX_OUTPUTS = 4096
_MAX_PROGRAMS = 132  # one for each multiprocessor of an H200: a second one beside it takes longer than it saves
_MIN_STEPS = 4  # of a split: with fewer its sum takes longer than what it saves
_MAX_SPLITS = 8
_NUM_WARPS = 4

_OUTPUTS, _STEP = tl.constexpr(OUTPUTS), tl.constexpr(STEP)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _split_kernel(
    x, weight, out, parts, counters, num_tokens: tl.int32, N, num_inputs, x_stride, weight_stride, out_stride,
    num_splits: tl.int32, BM: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One split of one tile; AHEAD steps of the weight are fetched while the launch before still runs."""
    tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    num_steps = num_inputs // _STEP
    first, last = split * num_steps // num_splits, (split + 1) * num_steps // num_splits
    token_M, output_N = tl.arange(0, BM), tile * _OUTPUTS + tl.arange(0, _OUTPUTS)
    # Rows past the end read the last one again, which costs less than a mask; they are not stored.
    w_at_N = weight + tl.minimum(output_N, N - 1).to(tl.int64) * weight_stride
    if EARLY:
        prefetch(w_at_N + first * _STEP, tl.minimum(last - first, AHEAD) * (_STEP * 2))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index_1K = tl.arange(0, _STEP)[None, :]
    w_at_NK = w_at_N[:, None] + index_1K
    x_at_MK = x + token_M[:, None].to(tl.int64) * x_stride + index_1K
    is_token_M = token_M < num_tokens
    sum_NM = tl.zeros([_OUTPUTS, BM], tl.float32)
    for step in tl.range(first, last):
        weight_NK = tl.load(w_at_NK + step * _STEP)
        x_MK = tl.load(x_at_MK + step * _STEP, mask=is_token_M[:, None], other=0.0)
        sum_NM = tl.dot(weight_NK, x_MK.T, sum_NM)
    to_NM = out + token_M[None, :].to(tl.int64) * out_stride + output_N[:, None]
    is_out_NM = is_token_M[None, :] & (output_N < N)[:, None]
    if SPLIT:
        SIZE: tl.constexpr = BM * _OUTPUTS
        at_NM = parts + tile.to(tl.int64) * num_splits * SIZE + tl.arange(0, _OUTPUTS)[:, None] * BM + token_M[None, :]
        tl.store(at_NM + split * SIZE, sum_NM)
        # All threads' parts are stored before one thread counts, and counted before the last program loads them.
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == num_splits - 1:
            total_NM = tl.load(at_NM, cache_modifier=".cg")
            for part in range(1, num_splits):
                total_NM += tl.load(at_NM + part * SIZE, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            tl.store(to_NM, total_NM.to(out.dtype.element_ty), mask=is_out_NM)
    else:
        tl.store(to_NM, sum_NM.to(out.dtype.element_ty), mask=is_out_NM)


def splits_of(num_outputs: int, num_inputs: int) -> int:
    """Parts of the inner dimension: as many programs as have something to read."""
    num_tiles, num_steps = -(-num_outputs // OUTPUTS), num_inputs // STEP
    return max(1, min(_MAX_PROGRAMS // num_tiles, num_steps // _MIN_STEPS, _MAX_SPLITS))


def stages_of(num_inputs: int, splits: int) -> int:
    """Steps under way at once: not many more than there are."""
    return 4 if num_inputs // STEP <= 4 * splits else 6


def launch(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor, counters: torch.Tensor) -> None:
    """Write `out_MN`, contiguous; all arguments were checked.

    Args:
        x_MK: bfloat16 or float16, of at most MAX_TOKENS rows.
        weight_NK: of at most MAX_OUTPUTS rows, of whole steps.
        out_MN: the result.
        counters: int32 zeros, one for each tile, of the current stream; left as zeros.
    """
    (num_tokens, num_inputs), num_outputs = x_MK.shape, len(weight_NK)
    num_tiles, splits = -(-num_outputs // OUTPUTS), splits_of(num_outputs, num_inputs)
    rows = max(16, triton.next_power_of_2(num_tokens))
    parts = out_MN
    if splits > 1:
        parts = torch.empty(num_tiles * splits * rows * OUTPUTS, dtype=torch.float32, device=x_MK.device)
    x_stride = x_MK.stride(0) if num_tokens > 1 else num_inputs  # a single row's stride may be anything
    arguments = (
        x_MK, weight_NK, out_MN, parts, counters, num_tokens, num_outputs, num_inputs, x_stride, weight_NK.stride(0),
        num_outputs, splits,
    )  # fmt: skip
    constants = _constants(rows, splits > 1, stages_of(num_inputs, splits), x_MK.device)
    _launch_split((num_tiles * splits,), arguments, constants)


@functools.lru_cache(maxsize=64)
def _constants(rows: int, is_split: bool, stages: int, device: torch.device) -> Constants:
    options = {"num_warps": _NUM_WARPS, "num_stages": stages} | dependent_launch(device)
    return Constants(_by_name(rows, is_split, stages) | options)


def _by_name(rows: int, is_split: bool, stages: int) -> dict[str, int]:
    """All but `EARLY`."""
    return {"BM": rows, "SPLIT": is_split, "AHEAD": stages}


_launch_split = Launcher(_split_kernel)


def variants() -> list[Variant]:
    """All there are."""
    pointers = {"x": "*bf16", "weight": "*bf16", "counters": "*i32"}
    integers = ("num_tokens", "N", "num_inputs", "x_stride", "weight_stride", "out_stride", "num_splits")
    forms = [
        (rows, is_split, stages, "*bf16", True) for rows in (16, 32) for is_split in (False, True) for stages in (4, 6)
    ]
    forms += [(16, True, 4, "*bf16", False), (16, True, 6, "*fp32", True)]
    aligned = ("x", "weight", "out", "parts", "counters", "N", "num_inputs", "x_stride", "weight_stride", "out_stride")
    return [
        Variant(
            name=f"linear_split {rows} tokens s{stages}{' parts' * is_split}{' wide' * (out == '*fp32')}"
            f"{'' if early else ' late'}",
            kernel=_split_kernel,
            types=pointers | {"out": out, "parts": "*fp32" if is_split else out} | dict.fromkeys(integers, "i32"),
            constants=_by_name(rows, is_split, stages) | {"EARLY": early},
            aligned=aligned,
            num_warps=_NUM_WARPS,
            num_stages=stages,
            contains=("HGMMA", "LDGSTS"),
            lacks=("HMMA",),
            on_amd=not early,
            options={"launch_pdl": True} if early else {},
        )
        for rows, is_split, stages, out, early in forms
    ]
