"""Specializations of Triton kernels that serving launches, as data: tests compile them ahead of time and check them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One specialization and its promises.

    Attributes:
        name: unique name, e.g. "gemm_fp8 swap M=16".
        kernel: `@triton.jit` function.
        types: Triton's type of every argument that is not a constant ("*bf16", "i32", "fp32", ...).
        constants: value of every `tl.constexpr` argument.
        aligned: arguments that are divisible by 16 at every launch (pointers, strides, sizes).
        num_warps: warps of a program.
        num_stages: stages of its pipelined loops.
        contains: Hopper instructions that it is designed to have, e.g. ("HGMMA", "LDGSTS").
        lacks: instructions that it must not have, e.g. ("HMMA",); spills are not allowed, either.
        shapes: tensor-core instruction shapes of its matmuls, e.g. ("64x16x16",); if given, exactly these must occur.
        may_spill: whether spills are allowed after all.
        max_registers: limit of registers per thread.
        max_shared_bytes: limit of shared memory per program.
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


def with_ue8m0(variants: Sequence[Variant], *names: str) -> list[Variant]:
    """Add those of these names again, for activations whose scales are powers of two."""
    found = {variant.name: variant for variant in variants}
    rounded = [
        replace(found[name], name=f"{name} ue8m0", constants={**found[name].constants, "UE8M0": True}, on_amd=False)
        for name in names
    ]
    return [*variants, *rounded]
