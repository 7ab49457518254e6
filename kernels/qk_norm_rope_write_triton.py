"""`qk_norm_rope_write` in Triton: a program takes a few heads of one token from the product to where attention reads.

The value that a rotation pairs with another is loaded a second time (it is in the nearest cache by then) and normalised
a second time, rather than sought in another thread; of interleaved pairs both are one thread's already. How a head's
squares are added is chosen by the shape alone, so a row's result is the same in every batch.

Shapes: H heads of a program, D columns of a head, filled up to a power of two.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

# Where angles come from.
FREQUENCIES = 0  # position times inverse frequency
BY_POSITION = 1  # rows of tables that a position picks
BY_TOKEN = 2  # one row of the tables for each token

_PROGRAM_LEN = 1024  # values
_BY_POSITION = tl.constexpr(BY_POSITION)
_BY_TOKEN = tl.constexpr(BY_TOKEN)
_FREQUENCIES = tl.constexpr(FREQUENCIES)
_POOL_TYPES = {torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}


def rule(head_dim: int) -> dict[str, Any]:
    """Options of a shape that no table has: one vector of 16 bytes for each thread."""
    heads = max(_PROGRAM_LEN // triton.next_power_of_2(head_dim), 1)
    return {"heads": heads, "num_warps": 4}


def options_of(num_query: int, num_kv: int, head_dim: int, device: torch.device) -> Mapping[str, Any]:
    """By the shape alone; 0 tokens are asked for, since every number must get the same."""
    found = tuning.find("qk_norm_rope_write", f"{num_query}/{num_kv}/{head_dim}", 0, device.index)
    return found or rule(head_dim)


def constants_of(
    options: Mapping[str, Any], num_query: int, num_kv: int, head_dim: int, rotary_dim: int, block_size: int
) -> dict[str, Any]:
    """What of the kernel's constants a model's shape decides."""
    return {
        "NUM_QUERY": num_query,
        "NUM_KV": num_kv,
        "E": head_dim,
        "ROTARY": rotary_dim,
        "S": block_size,
        "H": options["heads"],
        "D": triton.next_power_of_2(head_dim),
    }


def launch(
    qkv_TX: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float],
    angles: tuple[int, torch.Tensor, torch.Tensor],
    positions: torch.Tensor | None,
    slots_T: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    num_query: int,
    rotary_dim: int,
    sections: tuple[int, int, int] | None,
    alternating: bool,
    interleaved: bool,
    gated: bool,
    plus_one: bool,
    options: Mapping[str, Any] | None = None,
    early: bool = True,
) -> torch.Tensor:
    """Queries [T, Hq, D]; see `qk_norm_rope_write`, which has checked the arguments."""
    query_weight, key_weight, eps = norms
    kind, first, second = angles
    key_NHSD, value_NHSD = pool
    num_tokens, head_dim, num_kv = len(qkv_TX), key_NHSD.shape[3], key_NHSD.shape[1]
    query_THD = torch.empty(num_tokens, num_query, head_dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    if num_tokens == 0:
        return query_THD
    scale_kind = 0 if scales is None else 1 if scales[0].numel() == 1 else 2
    model = num_query, num_kv, head_dim, rotary_dim, key_NHSD.shape[2]
    flags = kind, sections, alternating, interleaved, gated, plus_one, scale_kind, early
    if options is None:
        heads, constants = _tuned(qkv_TX.device, *model, *flags)
    else:
        heads, constants = _constants(options, qkv_TX.device, *model, *flags)
    block_stride, head_stride, row_stride, _ = key_NHSD.stride()
    arguments = (
        qkv_TX,
        qkv_TX.stride(0),
        query_weight,
        key_weight,
        eps,
        slots_T if positions is None else positions,
        0 if positions is None else positions.stride(0),
        first,
        second,
        first.stride(0),
        slots_T,
        query_THD,
        key_NHSD,
        value_NHSD,
        block_stride,
        head_stride,
        row_stride,
        slots_T if scales is None else scales[0],
        slots_T if scales is None else scales[1],
    )
    _launch_qk((num_tokens, -(-(num_query + 2 * num_kv) // heads)), arguments, constants)
    return query_THD


def _constants(
    options: Mapping[str, Any], device: torch.device, num_query: int, num_kv: int, head_dim: int, rotary_dim: int,
    block_size: int, kind: int, sections: tuple[int, int, int] | None, alternating: bool, interleaved: bool,
    gated: bool, plus_one: bool, scale_kind: int, early: bool,
) -> tuple[int, Constants]:  # fmt: skip
    """Heads of a program, and the constants of a launch."""
    by_name = constants_of(options, num_query, num_kv, head_dim, rotary_dim, block_size)
    by_name |= {
        "ANGLES": kind,
        "HEIGHT": 0 if sections is None else sections[1],
        "WIDTH": 0 if sections is None else sections[2],
        "AXES": 1 if sections is None else 3,
        "ALTERNATING": alternating,
        "INTERLEAVED": interleaved,
        "GATED": gated,
        "PLUS_ONE": plus_one,
        "SCALES": scale_kind,
        "num_warps": options["num_warps"],
    }
    return options["heads"], Constants(by_name | dependent_launch(device, early))


@functools.lru_cache(maxsize=256)
def _tuned(device: torch.device, num_query: int, num_kv: int, head_dim: int, *rest: Any) -> tuple[int, Constants]:
    chosen = options_of(num_query, num_kv, head_dim, device)
    return _constants(chosen, device, num_query, num_kv, head_dim, *rest)


@triton.jit
def _sine_cosine(angle):
    """Both of float32 angles, within 2 units of the last place; reduced in float64, which holds for any position."""
    quarter = tl.floor(angle.to(tl.float64) * 0.6366197723675814 + 0.5)
    rest = (angle.to(tl.float64) - quarter * 1.5707963267948966).to(tl.float32)
    turn = quarter.to(tl.int64).to(tl.int32) & 3
    square = rest * rest
    sine = rest + rest * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cosine = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * square + square * square * cosine
    is_odd = (turn & 1) == 1
    turned_sine = tl.where(is_odd, cosine, sine)
    turned_cosine = tl.where(is_odd, sine, cosine)
    turned_sine = tl.where(turn >= 2, -turned_sine, turned_sine)
    return turned_sine, tl.where((turn == 1) | (turn == 2), -turned_cosine, turned_cosine)


@triton.jit
def _position(
    positions, stride, token, pair, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXES: tl.constexpr,
    ALTERNATING: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Of each pair: of its own axis (time, height, width), where a token has three."""
    position = tl.load(positions + token) + tl.zeros(pair.shape, tl.int64)
    if AXES == 3:
        height = tl.load(positions + stride + token)
        width = tl.load(positions + 2 * stride + token)
        if ALTERNATING:
            is_height = (pair % 3 == 1) & (pair < 3 * HEIGHT)
            is_width = (pair % 3 == 2) & (pair < 3 * WIDTH)
        else:
            is_height = (pair >= PAIRS - HEIGHT - WIDTH) & (pair < PAIRS - WIDTH)
            is_width = pair >= PAIRS - WIDTH
        position = tl.where(is_width, width, tl.where(is_height, height, position))
    return position


@triton.jit
def _normed(x, square_mean_eps, weight, PLUS_ONE: tl.constexpr):
    wide = x.to(tl.float32) * tl.rsqrt(square_mean_eps)
    if PLUS_ONE:
        return (wide * (1.0 + weight.to(tl.float32))).to(x.dtype)
    return (wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _weights(query_weight, key_weight, column_1D, is_query_H1, is_key_H1, is_column_1D):
    """[H, D]: each row's own. Addresses are spread over rows, so that every thread loads what it needs."""
    at_HD = tl.broadcast_to(column_1D, [is_query_H1.shape[0], column_1D.shape[1]])
    of_query_HD = tl.load(query_weight + at_HD, mask=is_query_H1 & is_column_1D, other=0.0)
    of_key_HD = tl.load(key_weight + at_HD, mask=is_key_H1 & is_column_1D, other=0.0)
    return tl.where(is_query_H1, of_query_HD, of_key_HD)


@triton.jit
def _write(pointer, at_HD, value_HD, head_H1, scale, is_head_H1, is_column_1D, SCALES: tl.constexpr):
    """To the pool, in its dtype: what was rounded to the model's is scaled and rounded again for float8."""
    mask = is_head_H1 & is_column_1D
    if SCALES:
        wide_HD = value_HD.to(tl.float32)
        if SCALES == 2:
            scale_H1 = tl.load(scale + head_H1, mask=is_head_H1, other=1.0)
        else:
            scale_H1 = tl.load(scale) + tl.zeros(head_H1.shape, tl.float32)
        wide_HD *= tl.div_rn(tl.full(scale_H1.shape, 1.0, tl.float32), scale_H1)
        tl.store(pointer + at_HD, wide_HD.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer + at_HD, value_HD.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _angles(
    first, second, angle_stride, token, position_1D, pair_1D, column_1D, H: tl.constexpr, D: tl.constexpr,
    ROTARY: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Sines and cosines of the pairs: [1, D] where they are computed, [H, D] where every thread loads its own."""
    if ANGLES == _FREQUENCIES:
        angle_1D = position_1D.to(tl.float32) * tl.load(first + pair_1D, mask=column_1D < ROTARY, other=0.0)
        sine, cosine = _sine_cosine(angle_1D)
    else:
        row = (position_1D if ANGLES == _BY_POSITION else token) * angle_stride
        at_HD = tl.broadcast_to(row + pair_1D, [H, D])
        cosine = tl.load(first + at_HD, mask=column_1D < ROTARY, other=1.0)
        sine = tl.load(second + at_HD, mask=column_1D < ROTARY, other=0.0)
    return sine, cosine


@triton.jit(do_not_specialize=["positions", "position_stride", "slots", "key_scale", "value_scale"])
def _qk_kernel(
    qkv, qkv_stride, query_weight, key_weight, eps, positions, position_stride: tl.int64, first, second, angle_stride,
    slots, query_out, keys, values, block_stride, head_stride, row_stride, key_scale, value_scale,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr, S: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, ANGLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    AXES: tl.constexpr, ALTERNATING: tl.constexpr, INTERLEAVED: tl.constexpr, GATED: tl.constexpr,
    PLUS_ONE: tl.constexpr, SCALES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head_first = tl.program_id(1) * H
    head_H1 = head_first + tl.arange(0, H)[:, None]
    column_1D = tl.arange(0, D)[None, :]
    is_query_H1 = head_H1 < NUM_QUERY
    is_key_H1 = (head_H1 >= NUM_QUERY) & (head_H1 < NUM_QUERY + NUM_KV)
    is_column_1D = column_1D < E
    is_there = (head_H1 < NUM_QUERY + 2 * NUM_KV) & is_column_1D
    # A gated query head brings its gate along, which stays where it is.
    from_H1 = head_H1 * E + (tl.minimum(head_H1, NUM_QUERY) * E if GATED else 0)
    row = qkv + token * qkv_stride
    pair_1D = column_1D // 2 if INTERLEAVED else column_1D % (ROTARY // 2)
    is_left_1D = column_1D % 2 == 0 if INTERLEAVED else column_1D < ROTARY // 2
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position_1D = pair_1D
    if ANGLES != _BY_TOKEN:
        position_1D = _position(
            positions, position_stride, token, pair_1D, HEIGHT, WIDTH, AXES, ALTERNATING, ROTARY // 2
        )  # fmt: skip
    slot = tl.load(slots + token).to(tl.int64)
    x_HD = tl.load(row + from_H1 + column_1D, mask=is_there, other=0.0)
    weight_HD = _weights(query_weight, key_weight, column_1D, is_query_H1, is_key_H1, is_column_1D)
    if not INTERLEAVED:
        other_1D = (column_1D + ROTARY // 2) % ROTARY
        other_HD = tl.load(row + from_H1 + other_1D, mask=is_there, other=0.0)
        other_weight_HD = _weights(query_weight, key_weight, other_1D, is_query_H1, is_key_H1, is_column_1D)
    sine, cosine = _angles(
        first, second, angle_stride, token, position_1D, pair_1D, column_1D, H, D, ROTARY, ANGLES
    )  # fmt: skip
    if EARLY:
        # Said twice only to keep the compiler from moving loads behind it, to where their values are used.
        tl.extra.cuda.gdc_launch_dependents()
    wide_HD = x_HD.to(tl.float32)
    mean_H1 = (tl.sum(wide_HD * wide_HD, axis=1) / E + eps)[:, None]
    normed_HD = _normed(x_HD, mean_H1, weight_HD, PLUS_ONE)
    if INTERLEAVED:
        left, right = tl.split(tl.reshape(normed_HD, [H, D // 2, 2]))
        partner_HD = tl.reshape(tl.join(right, left), [H, D])
    else:
        partner_HD = _normed(other_HD, mean_H1, other_weight_HD, PLUS_ONE)
    partner_HD = partner_HD.to(tl.float32) * sine
    turned_HD = normed_HD.to(tl.float32) * cosine
    turned_HD = tl.where(is_left_1D, turned_HD - partner_HD, turned_HD + partner_HD)
    if ROTARY < D:
        turned_HD = tl.where(column_1D < ROTARY, turned_HD, normed_HD.to(tl.float32))
    turned_HD = turned_HD.to(x_HD.dtype)
    if head_first < NUM_QUERY:
        at_HD = (token * NUM_QUERY + head_H1) * E + column_1D
        tl.store(query_out + at_HD, turned_HD, mask=is_query_H1 & is_column_1D)
    if (head_first + H > NUM_QUERY) & (slot >= 0):
        key_H1 = head_H1 - NUM_QUERY
        at_HD = slot // S * block_stride + slot % S * row_stride + key_H1 * head_stride + column_1D
        _write(keys, at_HD, turned_HD, key_H1, key_scale, is_key_H1, is_column_1D, SCALES)
        is_value_H1 = (key_H1 >= NUM_KV) & (key_H1 < 2 * NUM_KV)
        at_HD -= NUM_KV * head_stride
        _write(values, at_HD, x_HD, key_H1 - NUM_KV, value_scale, is_value_H1, is_column_1D, SCALES)


_launch_qk = Launcher(_qk_kernel)


def _variant(
    name: str, heads: tuple[int, int, int], *, block_size: int = 16, rotary_dim: int = 0, angles: int = BY_TOKEN,
    scales: int = 0, early: bool = True, **flags: Any,
) -> Variant:  # fmt: skip
    num_query, num_kv, head_dim = heads
    chosen = options_of(*heads, torch.device("cpu"))
    pool = _POOL_TYPES[torch.float8_e4m3fn if scales else torch.bfloat16]
    scale = "*fp32" if scales else "*i64"
    types = dict.fromkeys(("qkv", "query_weight", "key_weight", "query_out"), "*bf16") | {
        "slots": "*i64",
        "eps": "fp32",
    }
    types |= {"positions": "*i64", "first": "*fp32", "second": "*fp32", "keys": pool, "values": pool}
    types |= {"key_scale": scale, "value_scale": scale, "position_stride": "i64"}
    strides = ("qkv_stride", "angle_stride", "block_stride", "head_stride", "row_stride")
    types |= dict.fromkeys(strides, "i32")
    shape = constants_of(chosen, *heads, rotary_dim or head_dim, block_size)
    plain = {"HEIGHT": 0, "WIDTH": 0, "AXES": 1, "ALTERNATING": False, "INTERLEAVED": False}
    plain |= {"GATED": False, "PLUS_ONE": False, "ANGLES": angles, "SCALES": scales, "EARLY": early}
    anywhere = ("positions", "slots", "key_scale", "value_scale")
    pointers = [key for key, kind in types.items() if kind.startswith("*") and key not in anywhere]
    return Variant(
        name=f"qk_norm_rope_write {num_query}/{num_kv}/{head_dim}{name}{'' if early else ' late'}",
        kernel=_qk_kernel,
        types=types,
        constants=shape | plain | flags,
        aligned=(*pointers, *strides),
        num_warps=chosen["num_warps"],
        max_registers=128,
        max_shared_bytes=4096,
        on_amd=not early,
    )


def variants() -> list[Variant]:
    """The anchors' shapes, and each thing that a model may have differently."""
    partial: dict[str, Any] = {"rotary_dim": 64, "GATED": True, "PLUS_ONE": True}
    return [
        _variant("", (32, 8, 128)),
        _variant("", (32, 8, 128), early=False),
        _variant(" S=64 fp8", (32, 8, 128), block_size=64, scales=1),
        _variant(" fp8 of heads", (32, 8, 128), scales=2, early=False),
        _variant(" by position", (32, 8, 128), angles=BY_POSITION),
        _variant(" frequencies", (32, 8, 128), angles=FREQUENCIES),
        _variant("", (32, 4, 128)),
        _variant(" partial gated", (16, 2, 256), **partial),
        _variant(
            " partial gated mrope",
            (16, 2, 256),
            angles=FREQUENCIES,
            AXES=3,
            HEIGHT=11,
            WIDTH=10,
            ALTERNATING=True,
            **partial,
        ),
        _variant(" interleaved", (32, 8, 128), INTERLEAVED=True, early=False),
    ]
