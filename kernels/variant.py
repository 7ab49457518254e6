"""Specializations of Triton kernels that serving launches, said as data: what is compiled ahead of time to check it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One specialization.

    Attributes:
        name: unique, e.g. "gemm_fp8 swap M=16".
        kernel: the `@triton.jit` function.
        types: Triton's type of every argument that is no constant ("*bf16", "i32", "fp32", ...).
        constants: every `tl.constexpr` argument.
        aligned: arguments that are divisible by 16 at every launch (pointers, strides, sizes).
        num_warps: of a program.
        num_stages: of its pipelined loops.
        contains: instructions of Hopper that it was designed to have, e.g. ("HGMMA", "LDGSTS").
        lacks: instructions that it must not have, e.g. ("HMMA",); spills are not allowed, either.
        shapes: of its matmuls in the tensor cores, e.g. ("64x16x16",), if no other may be there; all of them, then.
        may_spill: whether spills are allowed after all.
        max_registers: of a thread.
        max_shared_bytes: of a program.
        on_amd: whether it is compiled for gfx942, too.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    max_registers: int = 255
    max_shared_bytes: int = 232_448
    may_spill: bool = False
    on_amd: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
