# mypy: ignore-errors
"""The kernel of `linear_ordered`: the inner dimension of a GEMM is added in one order at every size.

The inner dimension is cut into 1, 2, 4 or 8 equal slices. A slice is added step by step in the tensor cores, the slices
as a balanced tree in float32. How many neighbouring slices a program adds, and how many are left to a second launch,
does not change the tree, so it is chosen by how many programs a GPU needs. Rows of the weight are the 64 rows of an
instruction and 64 tokens its columns, with few tokens and with many: there is one instruction, and what it gives in one
column does not depend on the others. With few tokens that costs nothing, since reading the weight takes longer.

Shapes: T tokens (64 of a tile), N rows of the weight, K columns of a step.
"""

# mypy: ignore-errors

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.prefetch_triton import prefetch
from baton.kernels.variant import Variant

NAME = "linear_ordered"  # in the table of tuned configurations
TOKENS = 64  # of a tile
MAX_SLICES = 8
_PROGRAMS = 264  # two for each multiprocessor of an H200
_MANY = 256  # tokens from which on tiles are larger, since GEMMs take longer than reading
_SUM_LEN = 1024

_TOKENS = tl.constexpr(TOKENS)
_STEP = tl.constexpr(64)
_TILES_TOGETHER = tl.constexpr(16)  # of tokens, that pass over the weight side by side


@triton.jit
def _slice(x_at_TK, w_at_NK, is_token_T1, length, BN: tl.constexpr, WHOLE: tl.constexpr):
    """The GEMM over one slice, [N, T]."""
    sum_NT = tl.zeros([BN, _TOKENS], tl.float32)
    index_1K = tl.arange(0, _STEP)[None, :]
    for step in tl.range(0, tl.cdiv(length, _STEP)):
        first = step * _STEP
        if WHOLE:
            weight_NK = tl.load(w_at_NK + first)
            x_TK = tl.load(x_at_TK + first, mask=is_token_T1, other=0.0)
        else:
            is_column_1K = first + index_1K < length
            weight_NK = tl.load(w_at_NK + first, mask=is_column_1K, other=0.0)
            x_TK = tl.load(x_at_TK + first, mask=is_token_T1 & is_column_1K, other=0.0)
        sum_NT = tl.dot(weight_NK, x_TK.T, sum_NT)
    return sum_NT


@triton.jit
def _place(num_tokens, N, PARTS: tl.constexpr, BN: tl.constexpr):
    """Tile of tokens, tile of outputs and part of a program; neighbours read the same rows of the weight."""
    num_t = tl.cdiv(num_tokens, _TOKENS)
    width = _TILES_TOGETHER * tl.cdiv(N, BN) * PARTS
    first_t = tl.program_id(0) // width * _TILES_TOGETHER
    together = tl.minimum(num_t - first_t, _TILES_TOGETHER)
    within = tl.program_id(0) % width
    rest = within // together
    return first_t + within % together, rest // PARTS, rest % PARTS


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x, weight, out, num_tokens: tl.int32, N, length, x_stride, weight_stride, out_stride,
    SLICES: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """SLICES slices of a tile; with several PARTS `out` has one after the other, [parts, T, N].

    AHEAD columns of the weight are fetched while the launch before still runs.
    """
    tile_t, tile_n, part = _place(num_tokens, N, PARTS, BN)
    token_T = tile_t * _TOKENS + tl.arange(0, _TOKENS)
    output_N = tile_n * BN + tl.arange(0, BN)
    is_token_T1 = (token_T < num_tokens)[:, None]
    index_1K = tl.arange(0, _STEP)[None, :]
    first = part * SLICES * length
    x_at_TK = x + token_T[:, None].to(tl.int64) * x_stride + first + index_1K
    # Rows past the end read the last one again, which costs less than a mask; they are not stored.
    w_at_N = weight + tl.minimum(output_N, N - 1).to(tl.int64) * weight_stride + first
    w_at_NK = w_at_N[:, None] + index_1K
    if EARLY:
        if AHEAD > 0:
            prefetch(w_at_N, tl.minimum(SLICES * length, AHEAD) * 2)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total_NT = tl.zeros([BN, _TOKENS], tl.float32)
    if SLICES == 1:
        total_NT = _slice(x_at_TK, w_at_NK, is_token_T1, length, BN, WHOLE)
    else:
        # As one counts: a slice waits for its neighbour, two for the next two, four for the next four.
        one_NT = total_NT
        two_NT = total_NT
        four_NT = total_NT
        for index in tl.range(0, SLICES):
            at = index * length
            sum_NT = _slice(x_at_TK + at, w_at_NK + at, is_token_T1, length, BN, WHOLE)
            total_NT = one_NT + sum_NT
            one_NT = tl.where(index % 2 == 0, sum_NT, one_NT)
            if SLICES >= 4:
                pair_NT = total_NT
                total_NT = two_NT + pair_NT
                two_NT = tl.where(index % 4 == 1, pair_NT, two_NT)
            if SLICES >= 8:
                quad_NT = total_NT
                total_NT = four_NT + quad_NT
                four_NT = tl.where(index % 8 == 3, quad_NT, four_NT)
    row_T1 = (part.to(tl.int64) * num_tokens + token_T)[:, None]
    at_TN = row_T1 * out_stride + output_N[None, :]
    tl.store(out + at_TN, total_NT.T.to(out.dtype.element_ty), mask=is_token_T1 & (output_N < N)[None, :])


@triton.jit(do_not_specialize=["num_values"])
def _sum_kernel(
    parts, out, num_values: tl.int64, PARTS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The parts of each value, two, four or eight, as the same tree."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ALIGNED:
        num_values = tl.multiple_of(num_values, 16)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_value = at < num_values
    total = tl.load(parts + at, mask=is_value, other=0.0)
    total += tl.load(parts + num_values + at, mask=is_value, other=0.0)
    if PARTS >= 4:
        other = tl.load(parts + 2 * num_values + at, mask=is_value, other=0.0)
        total += other + tl.load(parts + 3 * num_values + at, mask=is_value, other=0.0)
    if PARTS >= 8:
        left = tl.load(parts + 4 * num_values + at, mask=is_value, other=0.0)
        left += tl.load(parts + 5 * num_values + at, mask=is_value, other=0.0)
        right = tl.load(parts + 6 * num_values + at, mask=is_value, other=0.0)
        right += tl.load(parts + 7 * num_values + at, mask=is_value, other=0.0)
        total += left + right
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_value)


def rule(num_tokens: int, num_outputs: int, num_slices: int) -> dict[str, Any]:
    """Options of a shape that no table has: rows of the weight of a tile, slices of a program, warps and stages."""
    if num_tokens >= _MANY:
        return {"outputs": 128, "slices": num_slices, "warps": 8, "stages": 4}
    num_tiles = -(-num_outputs // 64) * triton.next_power_of_2(triton.cdiv(num_tokens, TOKENS))
    slices = num_slices  # which change at powers of two alone, so that the warm-up's sizes meet every form
    while slices > 1 and num_tiles * (num_slices // slices) * 2 <= _PROGRAMS:
        slices //= 2
    return {"outputs": 64, "slices": slices, "warps": 4, "stages": 6}


def options_of(
    num_tokens: int, num_outputs: int, num_inputs: int, num_slices: int, device: torch.device
) -> Mapping[str, Any]:
    """Tuned, else by rule; they change how fast it is, and no bit."""
    shape = f"{num_outputs}x{num_inputs} {num_slices}"
    return tuning.find(NAME, shape, num_tokens, device.index) or rule(num_tokens, num_outputs, num_slices)


def launch(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_TN: torch.Tensor,
    num_slices: int,
    options: Mapping[str, Any],
) -> None:
    """Write `out_TN`, contiguous, in its dtype; all arguments were checked."""
    num_tokens, num_inputs = x_TK.shape
    num_outputs = len(weight_NK)
    num_parts = num_slices // options["slices"]
    length = num_inputs // num_slices
    target = out_TN
    if num_parts > 1:
        target = torch.empty(num_parts, num_tokens, num_outputs, dtype=torch.float32, device=x_TK.device)
    num_tiles = triton.cdiv(num_tokens, TOKENS) * triton.cdiv(num_outputs, options["outputs"])
    x_stride = x_TK.stride(0) if num_tokens > 1 else num_inputs  # a single row's stride may be anything
    weight_stride = weight_NK.stride(0)
    is_few = num_tokens <= TOKENS and weight_stride % 8 == 0 and weight_NK.data_ptr() % 16 == 0
    arguments = (
        x_TK, weight_NK, target, num_tokens, num_outputs, length, x_stride, weight_stride, num_outputs,
    )  # fmt: skip
    names = (options["outputs"], options["slices"], options["warps"], options["stages"])
    constants = _constants(*names, num_parts, length % _STEP.value == 0, is_few, x_TK.device)
    with torch.cuda.device_of(x_TK):
        _launch_linear((num_tiles * num_parts,), arguments, constants)
        if num_parts > 1:
            num_values = num_tokens * num_outputs
            constants = _sum_constants(num_parts, num_outputs % 16 == 0, x_TK.device)
            _launch_sum((triton.cdiv(num_values, _SUM_LEN),), (target, out_TN, num_values), constants)


@functools.lru_cache(maxsize=256)
def _constants(
    outputs: int, slices: int, warps: int, stages: int, num_parts: int, is_whole: bool, is_few: bool,
    device: torch.device,
) -> Constants:  # fmt: skip
    by_name = {"SLICES": slices, "PARTS": num_parts, "BN": outputs, "WHOLE": is_whole}
    by_name |= {"AHEAD": _STEP.value * stages if is_few and is_whole else 0, "num_warps": warps, "num_stages": stages}
    return Constants(by_name | dependent_launch(device))


@functools.lru_cache(maxsize=64)
def _sum_constants(num_parts: int, is_aligned: bool, device: torch.device) -> Constants:
    by_name = {"PARTS": num_parts, "BLOCK": _SUM_LEN, "ALIGNED": is_aligned, "num_warps": 4}
    return Constants(by_name | dependent_launch(device))


_launch_linear, _launch_sum = Launcher(_linear_kernel), Launcher(_sum_kernel)


def _variant(
    options: Mapping[str, Any], num_slices: int, *, is_few: bool, early: bool = True, whole: bool = True
) -> Variant:
    num_parts = num_slices // options["slices"]
    return Variant(
        name=f"linear_ordered {num_slices} slices, {options['slices']} of a program, {options['outputs']}x{TOKENS} "
        f"w{options['warps']} s{options['stages']}{' few' * is_few}{' late' * (not early)}{' odd' * (not whole)}",
        kernel=_linear_kernel,
        types={
            **{"x": "*bf16", "weight": "*bf16", "out": "*fp32" if num_parts > 1 else "*bf16"},
            **dict.fromkeys(("num_tokens", "N", "length", "x_stride", "weight_stride", "out_stride"), "i32"),
        },
        constants={
            **{"SLICES": options["slices"], "PARTS": num_parts, "BN": options["outputs"], "WHOLE": whole},
            **{"AHEAD": _STEP.value * options["stages"] if is_few and whole else 0, "EARLY": early},
        },
        aligned=("x", "weight", "out", "N", "length", "x_stride", "weight_stride", "out_stride"),
        num_warps=options["warps"],
        num_stages=options["stages"],
        contains=("HGMMA", "LDGSTS"),
        lacks=("HMMA",),
        shapes=("64x64x16",),
        on_amd=not early and options["stages"] <= 4,
    )


# Outputs and slices of the GEMMs of an 8B model: with Q, K and V; output and down; gate and up, and the head.
_SERVED = ((6144, 2), (4096, 8), (24_576, 2))


def variants() -> list[Variant]:
    """What is launched for few tokens, and for many: by the rule, and by the table of tuned configurations."""
    found = {}
    for num_outputs, num_slices in _SERVED:
        for num_tokens in (16, 2048):
            options = rule(num_tokens, num_outputs, num_slices)
            variant = _variant(options, num_slices, is_few=num_tokens <= TOKENS)
            found[variant.name] = variant
    for shape, sizes in tuning.table().get(NAME, {}).items():
        for size, options in sizes.items():
            variant = _variant(options, int(shape.split()[1]), is_few=int(size) <= TOKENS)
            found[variant.name] = variant
    late = _variant(rule(_MANY, 4096, 2), 2, is_few=False, early=False)
    odd = _variant(rule(_MANY, 4096, 2), 2, is_few=False, whole=False)
    added = [
        Variant(
            name=f"linear_ordered sum of 8{'' if is_aligned else ' odd'}",
            kernel=_sum_kernel,
            types={"parts": "*fp32", "out": "*bf16", "num_values": "i64"},
            constants={"PARTS": 8, "BLOCK": _SUM_LEN, "ALIGNED": is_aligned, "EARLY": True},
            aligned=("parts", "out"),
            max_registers=128,
            on_amd=False,
        )
        for is_aligned in (True, False)
    ]
    return [*found.values(), late, odd, *added]
