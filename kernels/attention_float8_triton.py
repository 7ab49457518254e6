"""Float8 K and V in decode attention, widened where a product wants them: no shared memory in between.

A product of 16-bit operands takes two neighbours of the dimension that it sums over in one register. Keys lie so. Values
do not: their neighbours are columns. So two columns of values are loaded as one 16-bit integer, which the hardware's
transposing load understands, and each half is widened: a tile of values becomes that of its even columns and that of
its odd ones, with a product each.

Widening to float16 is exact either way: by the conversion of the hardware, or by moving bits (float8's exponent and
mantissa are the lower bits of float16's, whose exponent is worth 2 ** -8 less: `BITS_SCALE` undoes that). Moved bits
make a number of NaN, 480.

Shapes: T keys of a tile, R rows (padded), D head size, C pairs of columns, D / 2.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant

BITS_SCALE = tl.constexpr(256.0)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Bytes 0 and 2 are the even columns of two keys, 1 and 3 the odd ones.
_CONVERT = tl.constexpr(
    """
    {
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }
    """
)
# Sign, and 7 bits moved one down from a byte that lies on top.
_MOVE = tl.constexpr(
    """
    {
    .reg .b32 low, moved;
    shl.b32 low, $2, 8;
    shl.b32 moved, $2, 7;
    and.b32 moved, moved, 0x3f803f80;
    lop3.b32 $0, low, 0x80008000, moved, 0xea;
    shr.u32 moved, $2, 1;
    and.b32 moved, moved, 0x3f803f80;
    lop3.b32 $1, $2, 0x80008000, moved, 0xea;
    }
    """
)


def variants() -> list[Variant]:
    """None: these are parts of another kernel."""
    return []


@triton.jit
def widen_pairs(pair_TC, MOVE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Two float8 in each 16-bit integer -> the lower ones and the upper ones in float16, over BITS_SCALE if moved."""
    if ASSEMBLY and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _MOVE if MOVE else _CONVERT, "=r,=r,r", [pair_TC], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    even_TC = ((pair_TC << 8) & -0x8000) | ((pair_TC << 7) & 0x3F80)
    odd_TC = (pair_TC & -0x8000) | ((pair_TC >> 1) & 0x3F80)
    even_TC = even_TC.to(tl.int16).to(tl.float16, bitcast=True)
    odd_TC = odd_TC.to(tl.int16).to(tl.float16, bitcast=True)
    if not MOVE:
        even_TC, odd_TC = even_TC * 256.0, odd_TC * 256.0
    return even_TC, odd_TC
