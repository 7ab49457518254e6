# mypy: ignore-errors
"""`fused_copy` in Triton: a few programs for each copy, each as wide as the two addresses allow.

Where source and target lie alike within 16 bytes, all but the edges moves in vectors of 16; alike within 4, in words of
4; else byte by byte. Edges of up to 15 bytes are the first program's. W: words of a step.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_STEP_WORDS = 1024  # of 8 bytes: 4 vectors for each thread
_NUM_WARPS = 4
_MAX_PROGRAMS = 1056  # 8 for each multiprocessor; more bytes are more steps


def launch(table_N3: torch.Tensor, max_bytes: int, early: bool = True) -> None:
    """Do the copies of a table of targets, sources and sizes, the longest of which has `max_bytes`."""
    num_copies = len(table_N3)
    wanted = triton.cdiv(max_bytes, 8 * _STEP_WORDS)
    num_programs = max(min(wanted, _MAX_PROGRAMS // num_copies), 1)
    _launch_copy((num_copies, num_programs), (table_N3,), _constants(table_N3.device, early))


@functools.cache
def _constants(device: torch.device, early: bool) -> Constants:
    return Constants({"W": _STEP_WORDS, "num_warps": _NUM_WARPS, **dependent_launch(device, early)})


@triton.jit
def _bytes(target, source, first, last):
    """Fewer than 16 bytes, [first, last)."""
    at = first + tl.arange(0, 16)
    value = tl.load(source.to(tl.pointer_type(tl.uint8)) + at, mask=at < last, other=0)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + at, value, mask=at < last)


@triton.jit
def _copy_words(target, source, size, WORD: tl.constexpr, ALIGNED: tl.constexpr, W: tl.constexpr):
    """Words whose target, and so their source, is a multiple of ALIGNED bytes; what lies before and behind as bytes."""
    WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    head = tl.minimum((ALIGNED - target % ALIGNED) % ALIGNED, size)
    num_words = (size - head) // ALIGNED * (ALIGNED // WORD_BYTES)
    to_word = tl.multiple_of((target + head).to(tl.pointer_type(WORD)), ALIGNED)
    from_word = tl.multiple_of((source + head).to(tl.pointer_type(WORD)), ALIGNED)
    step = tl.num_programs(1) * W
    for start in range(tl.program_id(1) * W, num_words, step):
        at_W = start + tl.arange(0, W)
        word_W = tl.load(from_word + at_W, mask=at_W < num_words, other=0)
        tl.store(to_word + at_W, word_W, mask=at_W < num_words)
    if ALIGNED > 1:
        if tl.program_id(1) == 0:
            _bytes(target, source, tl.zeros([], tl.int64), head)
            _bytes(target, source, head + num_words * WORD_BYTES, size)


@triton.jit
def _copy_kernel(table, W: tl.constexpr, EARLY: tl.constexpr) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = table + tl.program_id(0) * 3
    target, source, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    apart = target - source
    if apart % 16 == 0:
        _copy_words(target, source, size, tl.int64, 16, W)
    elif apart % 4 == 0:
        _copy_words(target, source, size, tl.int32, 4, W)
    else:
        _copy_words(target, source, size, tl.uint8, 1, W)


_launch_copy = Launcher(_copy_kernel)


def variants() -> list[Variant]:
    """With and without a dependent launch."""
    return [
        Variant(
            name=f"fused_copy{'' if early else ' late'}",
            kernel=_copy_kernel,
            types={"table": "*i64"},
            constants={"W": _STEP_WORDS, "EARLY": early},
            aligned=("table",),
            num_warps=_NUM_WARPS,
            max_registers=128,
            max_shared_bytes=8192,
            on_amd=not early,
        )
        for early in (True, False)
    ]
