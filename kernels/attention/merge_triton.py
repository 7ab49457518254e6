# mypy: ignore-errors
"""The Triton kernel that adds up what parts of sequences gave: the second launch of split attention.

It refuses to know how the parts were made: a part is a row of values and the logarithm of its weight.

Shapes: D head size, C parts of a step of the sum.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant


@triton.jit
def add_parts(parts, part_logs, num_parts, stride, D: tl.constexpr, PARTS: tl.constexpr):
    """The parts of a row, `stride` rows apart, by the logarithms of their weights: [D]; PARTS at a time, in order."""
    column_D = tl.arange(0, D)
    part_C = tl.arange(0, PARTS)
    most = float("-inf")
    total = 0.0
    mixed_D = tl.zeros([D], tl.float32)
    for first in range(0, num_parts, PARTS):
        is_part_C = first + part_C < num_parts
        at_C = (first + part_C) * stride
        log_C = tl.load(part_logs + at_C, mask=is_part_C, other=float("-inf"))
        part_CD = tl.load(parts + at_C[:, None] * D + column_D[None, :], mask=is_part_C[:, None], other=0.0)
        new = tl.maximum(most, tl.max(log_C))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight_C = tl.exp2(log_C - base)
        fade = tl.exp2(most - base)
        # Parts of weight 0 were never written.
        share_CD = tl.where(weight_C[:, None] > 0, weight_C[:, None] * part_CD, 0.0)
        mixed_D = mixed_D * fade + tl.sum(share_CD, axis=0)
        total = total * fade + tl.sum(weight_C)
        most = new
    return mixed_D / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    parts,
    part_logs,
    out,
    num_parts: tl.int32,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): the parts of a row [num_parts, D], each with the logarithm of its weight, to `out`.

    Parts are added in their order, PARTS at a time. Those of weight 0 change nothing, not by a bit, so the result does
    not depend on how many of them follow.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    mixed_D = add_parts(parts + row * num_parts * D, part_logs + row * num_parts, num_parts, 1, D, PARTS)
    tl.store(out + row * D + tl.arange(0, D), mixed_D)


def merge_parts(
    parts: torch.Tensor, part_logs: torch.Tensor, out: torch.Tensor, num_parts: int, *, fixed_len: bool, pdl: bool
) -> None:
    """Add the parts of every row of `out` [..., D] up.

    Args:
        parts: float32 [rows * num_parts, D], those of weight 0 not written.
        part_logs: float32 [rows * num_parts], logarithms to the base 2; -inf for weight 0.
        out: contiguous.
        num_parts: of each row.
        fixed_len: parts are as long as always, so the result must not depend on how many follow that weigh nothing.
        pdl: the launch before lets this one start early.
    """
    head_dim = out.shape[-1]
    step, num_warps = merge_shape(num_parts, head_dim, fixed_len=fixed_len)
    arguments = (parts, part_logs, out, num_parts)
    _launch_merge((out.numel() // head_dim,), arguments, _constants(step, head_dim, num_warps, pdl))


@functools.cache
def _constants(step: int, head_dim: int, num_warps: int, pdl: bool) -> Constants:
    options = {"launch_pdl": True} if pdl else {}
    return Constants({"D": head_dim, "PARTS": step, "PDL": pdl, "num_warps": num_warps, **options})


_launch_merge = Launcher(merge_kernel)


def merge_shape(num_parts: int, head_dim: int, *, fixed_len: bool) -> tuple[int, int]:
    """Parts of a step, and warps."""
    step = 8 if num_parts <= 8 and not fixed_len else 32
    return step, _num_warps(step, head_dim)


def _num_warps(step: int, head_dim: int) -> int:
    return max(1, step * head_dim // 1024)


_SERVED = ((128, 8), (128, 32), (256, 8), (256, 32), (512, 8), (512, 32))  # D, parts of a step


def variants() -> list[Variant]:
    """What serving launches."""
    return [
        Variant(
            name=f"attention_merge D={head_dim} parts={step}",
            kernel=merge_kernel,
            types={"parts": "*fp32", "part_logs": "*fp32", "out": "*bf16", "num_parts": "i32"},
            constants={"D": head_dim, "PARTS": step, "PDL": False},
            aligned=("parts", "part_logs", "out"),
            num_warps=_num_warps(step, head_dim),
            max_registers=128,
        )
        for head_dim, step in _SERVED
    ]
