# mypy: ignore-errors
"""Have memory on its way to the L2 cache: what a kernel does while it waits for the one before it.

Weights depend on nothing, so a GEMM that is launched early (`kernels.dependent_launch`) asks for the first of them. It
is one instruction of Hopper's for each row, takes no registers, and holds nothing up. A norm asks for its few lines,
which a step has long driven out of the cache, while the one before it still writes what is normalised.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant

_BULK = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")
_LINE = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


def variants() -> list[Variant]:
    """None: this is a part of other kernels."""
    return []


@triton.jit
def prefetch(at_N, num_bytes):
    """Fetch `num_bytes`, a multiple of 16, from each pointer, all of which are multiples of 16."""
    address_N = at_N.to(tl.int64)
    bytes_N = num_bytes + tl.zeros(address_N.shape, tl.int32)
    tl.inline_asm_elementwise(_BULK, "=r,l,r", [address_N, bytes_N], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_vector(at, LEN: tl.constexpr):
    """Fetch LEN values from `at` on, line by line; of one program, if there are several."""
    LINE: tl.constexpr = 128 * 8 // at.dtype.element_ty.primitive_bitwidth
    NUM: tl.constexpr = triton.next_power_of_2((LEN + LINE - 1) // LINE)
    if tl.program_id(0) == 0:
        at_N = at + tl.minimum(tl.arange(0, NUM) * LINE, LEN - 1)
        tl.inline_asm_elementwise(_LINE, "=r,l", [at_N.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
