# mypy: ignore-errors
"""`rank_exchange` in Triton: as many programs for each call, so that all of them count the same calls.

Memory of a rank: a number of calls for each program, a flag of each rank for each program, and two halves of a slot for
each rank. A program owns a share of the values: it stores them at every rank, then its flags there; it waits for the
flags of the same program of every rank, and reads what they stored. X: values of a step.
"""

import functools
from typing import Final

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

NUM_PROGRAMS: Final = 32
SLOT_BYTES: Final = 4 << 20
UNIT_BYTES: Final = 16  # of which all tensors are multiples, so that each kernel has one form for a dtype
_FLAGS_AT: Final = 8 * NUM_PROGRAMS
_NUM_WARPS = 4
_STEP_BYTES = 2048
_SUM_VALUES = 1024

_PROGRAMS = tl.constexpr(NUM_PROGRAMS)
_SLOT = tl.constexpr(SLOT_BYTES)
_FLAGS = tl.constexpr(_FLAGS_AT)
_UNIT = tl.constexpr(UNIT_BYTES)


def flags_at(size: int) -> tuple[int, int]:
    """Where in a rank's memory the flags begin and end, in bytes; slots follow."""
    return _FLAGS_AT, _FLAGS_AT + 8 * NUM_PROGRAMS * size


def num_bytes(size: int) -> int:
    """Of one rank's memory in a group of `size`."""
    return flags_at(size)[1] + 2 * size * SLOT_BYTES


def launch(x: torch.Tensor, out: torch.Tensor, addresses_R: torch.Tensor, rank: int, *, is_sum: bool) -> None:
    """Exchange `x`; `out` becomes the sum, or all parts."""
    constants = _constants(x.device, x.dtype, len(addresses_R), is_sum)
    units = x.numel() * x.element_size() // UNIT_BYTES
    _launch_exchange((NUM_PROGRAMS,), (x, out, addresses_R, rank, units), constants)


def launch_sum(parts_R: torch.Tensor, out: torch.Tensor) -> None:
    """Add the parts."""
    grid = (triton.cdiv(out.numel(), _SUM_VALUES),)
    units = out.numel() * out.element_size() // UNIT_BYTES
    _launch_sum(grid, (parts_R, out, units), _sum_constants(out.device, out.dtype, len(parts_R)))


@functools.cache
def _constants(device: torch.device, dtype: torch.dtype, size: int, is_sum: bool) -> Constants:
    own = {"SIZE": size, "SUM": is_sum, "X": _STEP_BYTES // dtype.itemsize, "WIDE": _wide(dtype)}
    return Constants({**own, "num_warps": _NUM_WARPS, **dependent_launch(device)})


@functools.cache
def _sum_constants(device: torch.device, dtype: torch.dtype, size: int) -> Constants:
    own = {"SIZE": size, "X": _SUM_VALUES, "WIDE": _wide(dtype)}
    return Constants({**own, "num_warps": _NUM_WARPS, **dependent_launch(device)})


def _wide(dtype: torch.dtype) -> tl.dtype:
    """What values are added in; integers and truths are only gathered."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def _part(first, apart, rank: tl.constexpr, at_X, mask_X, WIDE: tl.constexpr):
    """Values of a rank; another rank wrote them, so no cache that this multiprocessor has of its own is asked."""
    return tl.load(first + rank * apart + at_X, mask=mask_X, other=0, cache_modifier=".cg").to(WIDE)


@triton.jit
def _tree(first, apart, at_X, mask_X, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """The sum of all ranks' values: neighbours, then neighbours of those."""
    total_X = _part(first, apart, 0, at_X, mask_X, WIDE) + _part(first, apart, 1, at_X, mask_X, WIDE)
    if SIZE > 2:
        others_X = _part(first, apart, 2, at_X, mask_X, WIDE) + _part(first, apart, 3, at_X, mask_X, WIDE)
        total_X = total_X + others_X
    if SIZE > 4:
        others_X = _part(first, apart, 4, at_X, mask_X, WIDE) + _part(first, apart, 5, at_X, mask_X, WIDE)
        last_X = _part(first, apart, 6, at_X, mask_X, WIDE) + _part(first, apart, 7, at_X, mask_X, WIDE)
        total_X = total_X + (others_X + last_X)
    return total_X


@triton.jit(do_not_specialize=["rank", "num_units"])
def _exchange_kernel(
    x, out, addresses, rank, num_units,
    SIZE: tl.constexpr, SUM: tl.constexpr, X: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = x.dtype.element_ty
    VALUE_BYTES: tl.constexpr = kind.primitive_bitwidth // 8
    SLOT_VALUES: tl.constexpr = _SLOT // VALUE_BYTES
    num_values = num_units * (_UNIT // VALUE_BYTES)
    slots_at: tl.constexpr = _FLAGS + 8 * _PROGRAMS * SIZE
    program = tl.program_id(0)
    own = tl.load(addresses + rank)
    calls = own.to(tl.pointer_type(tl.int64)) + program
    call = tl.load(calls) + 1
    half = (call % 2) * (SIZE * _SLOT) + slots_at
    for start in range(program * X, num_values, _PROGRAMS * X):
        at_X = start + tl.arange(0, X)
        value_X = tl.load(x + at_X, mask=at_X < num_values, other=0)
        for peer in tl.static_range(SIZE):
            slot = tl.load(addresses + peer) + half + rank * _SLOT
            tl.store(tl.multiple_of(slot.to(tl.pointer_type(kind)), 16) + at_X, value_X, mask=at_X < num_values)
    tl.debug_barrier()  # a flag speaks for the stores of all threads
    rank_R = tl.arange(0, SIZE)
    flags = _FLAGS + program * (SIZE * 8)
    theirs_R = (tl.load(addresses + rank_R) + (flags + rank * 8)).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(theirs_R, tl.zeros([SIZE], tl.int64) + call, sem="release", scope="sys")
    ours_R = (own + flags).to(tl.pointer_type(tl.int64)) + rank_R
    while tl.min(tl.load(ours_R, volatile=True), axis=0) < call:
        pass
    tl.atomic_add(ours_R, tl.zeros([SIZE], tl.int64), sem="acquire", scope="sys")
    tl.debug_barrier()
    first = tl.multiple_of((own + half).to(tl.pointer_type(kind)), 16)
    for start in range(program * X, num_values, _PROGRAMS * X):
        at_X = start + tl.arange(0, X)
        mask_X = at_X < num_values
        if SUM:
            total_X = _tree(first, SLOT_VALUES, at_X, mask_X, SIZE, WIDE)
            tl.store(out + at_X, total_X.to(kind), mask=mask_X)
        else:
            for peer in tl.static_range(SIZE):
                value_X = tl.load(first + peer * SLOT_VALUES + at_X, mask=mask_X, other=0, cache_modifier=".cg")
                tl.store(out + peer * num_values + at_X, value_X, mask=mask_X)
    tl.store(calls, call)


@triton.jit(do_not_specialize=["num_units"])
def _sum_kernel(
    parts, out, num_units, SIZE: tl.constexpr, X: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = out.dtype.element_ty
    num_values = num_units.to(tl.int64) * (_UNIT // (kind.primitive_bitwidth // 8))
    at_X = tl.program_id(0).to(tl.int64) * X + tl.arange(0, X)
    mask_X = at_X < num_values
    total_X = _tree(parts, num_values, at_X, mask_X, SIZE, WIDE)
    tl.store(out + at_X, total_X.to(kind), mask=mask_X)


_launch_exchange = Launcher(_exchange_kernel)
_launch_sum = Launcher(_sum_kernel)


def variants() -> list[Variant]:
    """Sums in the dtypes of models, gathers of words, for groups of 2, 4 and 8."""
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "i64": torch.int64}
    found = []
    for name, dtype in kinds.items():
        wide, step = _wide(dtype), _STEP_BYTES // dtype.itemsize
        for size in (2, 4, 8):
            is_sum = dtype.is_floating_point
            found.append(
                Variant(
                    name=f"rank_exchange {'sum' if is_sum else 'gather'} {name} of {size}",
                    kernel=_exchange_kernel,
                    types={
                        "x": f"*{name}", "out": f"*{name}", "addresses": "*i64", "rank": "i32", "num_units": "i32"
                    },
                    constants={"SIZE": size, "SUM": is_sum, "X": step, "WIDE": wide, "EARLY": True},
                    aligned=("x", "out", "addresses"),
                    num_warps=_NUM_WARPS,
                    max_registers=128,
                    max_shared_bytes=4096,
                    on_amd=False,
                )
            )  # fmt: skip
            if is_sum:
                found.append(
                    Variant(
                        name=f"rank_exchange parts {name} of {size}",
                        kernel=_sum_kernel,
                        types={"parts": f"*{name}", "out": f"*{name}", "num_units": "i32"},
                        constants={"SIZE": size, "X": _SUM_VALUES, "WIDE": wide, "EARLY": True},
                        aligned=("parts", "out"),
                        num_warps=_NUM_WARPS,
                        max_registers=128,
                        max_shared_bytes=4096,
                        on_amd=False,
                    )
                )
    return found
