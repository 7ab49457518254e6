# mypy: ignore-errors
"""`qk_norm_rope_write` in Triton: a program takes a few heads of one kind from the GEMM to where attention reads.

A head is held as two halves, side by side in one thread: the value that a rotation pairs with another is that thread's
own, so nothing is loaded or normalised twice, and one cosine serves both. Tiles of heads are loaded before any is
computed, so that enough memory is on its way; those of one token share its angles, and all share the weights.

A head's squares are added within the threads that hold its vectors of 16 bytes, and from one to the next of these,
however many heads and warps a program has: so a row's result is the same in every batch, though few tokens are
divided in another way than many.

Shapes: A heads of a tile, J columns of half a head, filled up to a power of two; E columns of a head.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.pointwise.head_halves_triton import half_len, load_halves, store_halves
from baton.kernels.pointwise.rope_angles_triton import BY_POSITION, BY_TOKEN, FREQUENCIES, load_angles
from baton.kernels.prefetch_triton import prefetch_vector
from baton.kernels.variant import Variant

_POOL_TYPES = {torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}
_THREAD_LEN = 8  # 16 bytes of bfloat16
_QUERY, _KEY, _VALUE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of heads


def rule(num_kv: int, head_dim: int) -> dict[str, Any]:
    """Options of a shape that no table has: two tiles of one vector of 16 bytes for each thread and half."""
    heads = min(max(32 * _THREAD_LEN // half_len(head_dim), 1), triton.next_power_of_2(num_kv))
    return {"heads": heads, "tiles": 2, "num_warps": 1}


def options_of(num_query: int, num_kv: int, head_dim: int, num_tokens: int, device: torch.device) -> Mapping[str, Any]:
    """By the shape, and by how many tokens there are."""
    found = tuning.find("qk_norm_rope_write", f"{num_query}/{num_kv}/{head_dim}", num_tokens, device.index)
    return found or rule(num_kv, head_dim)


def constants_of(
    options: Mapping[str, Any], num_query: int, num_kv: int, head_dim: int, rotary_dim: int, block_size: int
) -> dict[str, Any]:
    """What of the kernel's constants a model's shape decides."""
    heads, tiles = options["heads"], options["tiles"]
    # The fewest tokens whose tiles of each kind are a whole number of programs.
    per_query, per_kv = -(-num_query // heads), -(-num_kv // heads)
    tokens = tiles // math.gcd(tiles, per_query, per_kv)
    return {
        "NUM_QUERY": num_query,
        "NUM_KV": num_kv,
        "E": head_dim,
        "ROTARY": rotary_dim,
        "S": block_size,
        "A": heads,
        "J": half_len(head_dim),
        "TILES": tiles,
        "TOKENS": tokens,
        "QUERY_PROGRAMS": tokens * per_query // tiles,
        "KV_PROGRAMS": tokens * per_kv // tiles,
    }


def launch(
    qkv_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
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
    early: bool | None = None,
) -> torch.Tensor:
    """Queries [T, Hq, D]; see `qk_norm_rope_write`, which has checked the arguments."""
    query_weight, key_weight, eps = (qkv_TX, qkv_TX, 0.0) if norms is None else norms
    kind, first, second = angles
    key_NHSD, value_NHSD = pool
    num_tokens, head_dim, num_kv = len(qkv_TX), key_NHSD.shape[3], key_NHSD.shape[1]
    query_THD = torch.empty(num_tokens, num_query, head_dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    if num_tokens == 0:
        return query_THD
    scale_kind = 0 if scales is None else 1 if scales[0].numel() == 1 else 2
    model = num_query, num_kv, head_dim, rotary_dim, key_NHSD.shape[2]
    parts = norms is not None, bias_X is not None, plus_one
    flags = kind, sections, alternating, interleaved, gated, *parts, scale_kind, early
    if options is None:
        constants = _tuned(num_tokens, qkv_TX.device, *model, *flags)
    else:
        constants = _of_options(tuple(sorted(options.items())), qkv_TX.device, *model, *flags)
    block_stride, head_stride, row_stride, _ = key_NHSD.stride()
    arguments = (
        qkv_TX,
        qkv_TX.stride(0),
        qkv_TX if bias_X is None else bias_X,
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
        num_tokens,
    )
    fixed = constants.by_name
    num_groups = -(-num_tokens // fixed["TOKENS"])
    _launch_qk((num_groups * (fixed["QUERY_PROGRAMS"] + 2 * fixed["KV_PROGRAMS"]),), arguments, constants)
    return query_THD


@functools.lru_cache(maxsize=256)
def _of_options(
    options: tuple[tuple[str, Any], ...], device: torch.device, num_query: int, num_kv: int, head_dim: int,
    rotary_dim: int, block_size: int, kind: int, sections: tuple[int, int, int] | None, alternating: bool,
    interleaved: bool, gated: bool, normed: bool, biased: bool, plus_one: bool, scale_kind: int, early: bool | None,
) -> Constants:  # fmt: skip
    """The constants of a launch."""
    chosen = dict(options)
    by_name = constants_of(chosen, num_query, num_kv, head_dim, rotary_dim, block_size)
    by_name |= {
        "ANGLES": kind,
        "HEIGHT": 0 if sections is None else sections[1],
        "WIDTH": 0 if sections is None else sections[2],
        "AXES": 1 if sections is None else 3,
        "ALTERNATING": alternating,
        "INTERLEAVED": interleaved,
        "GATED": gated,
        "NORMED": normed,
        "BIASED": biased,
        "PLUS_ONE": plus_one,
        "SCALES": scale_kind,
        "num_warps": chosen["num_warps"],
    }
    return Constants(by_name | dependent_launch(device, chosen.get("early", True) if early is None else early))


@functools.lru_cache(maxsize=1024)
def _tuned(
    num_tokens: int, device: torch.device, num_query: int, num_kv: int, head_dim: int, *rest: Any
) -> Constants:  # fmt: skip
    """One object for all numbers of tokens that are computed alike, so that they share a compiled form."""
    chosen = options_of(num_query, num_kv, head_dim, num_tokens, device)
    return _of_options(tuple(sorted(chosen.items())), device, num_query, num_kv, head_dim, *rest)


@triton.jit
def _normed(x, scale, weight, PLUS_ONE: tl.constexpr):
    """Float32 of what is rounded to the dtype of `x`."""
    wide = x.to(tl.float32) * scale
    if PLUS_ONE:
        return (wide * (1.0 + weight.to(tl.float32))).to(x.dtype).to(tl.float32)
    return (wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _load_sums(at, bias, is_head_A1, pair_1J, A: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr,
               INTERLEAVED: tl.constexpr, BIASED: tl.constexpr):  # fmt: skip
    """Halves of heads, with their biases if there are any: sums rounded to the dtype of the heads."""
    left_AJ, right_AJ = load_halves(at, is_head_A1, pair_1J, A, E, ROTARY, INTERLEAVED)
    if BIASED:
        added_left_AJ, added_right_AJ = load_halves(bias, is_head_A1, pair_1J, A, E, ROTARY, INTERLEAVED)
        left_AJ = (left_AJ.to(tl.float32) + added_left_AJ.to(tl.float32)).to(left_AJ.dtype)
        right_AJ = (right_AJ.to(tl.float32) + added_right_AJ.to(tl.float32)).to(right_AJ.dtype)
    return left_AJ, right_AJ


@triton.jit
def _inverse(scale, head_A1, is_head_A1, SCALES: tl.constexpr):
    """Of the scales of float8, one or each head's."""
    if SCALES == 2:
        scale_A1 = tl.load(scale + head_A1, mask=is_head_A1, other=1.0)
    else:
        scale_A1 = tl.load(scale) + tl.zeros([1, 1], tl.float32)
    return tl.div_rn(tl.full(scale_A1.shape, 1.0, tl.float32), scale_A1)


@triton.jit
def _take_tiles(  # noqa: C901
    qkv, qkv_stride, bias, weight, eps, positions, position_stride, first, second, angle_stride, slots, out,
    block_stride, head_stride, row_stride, scale, num_tokens, first_token, first_tile,
    KIND: tl.constexpr, HEADS: tl.constexpr, FROM: tl.constexpr, SPAN: tl.constexpr, E: tl.constexpr,
    ROTARY: tl.constexpr, S: tl.constexpr, A: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr,
    TOKENS: tl.constexpr, ANGLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXES: tl.constexpr,
    ALTERNATING: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    PLUS_ONE: tl.constexpr, SCALES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one kind of heads, that lie in the GEMM output from column FROM on, one every SPAN columns."""
    PER: tl.constexpr = (HEADS + A - 1) // A  # tiles of a token
    SHARED: tl.constexpr = PER % TILES == 0  # all tiles are of one token
    pair_1J = tl.arange(0, J)[None, :]
    all_heads: tl.constexpr = PER * A == HEADS
    lefts, rights, slots_of, cosines, sines = (), (), (), (), ()
    if NORMED and KIND != _VALUE:
        weight_left_AJ, weight_right_AJ = load_halves(
            weight, tl.full([A, 1], True, tl.int1), pair_1J, A, E, ROTARY, INTERLEAVED
        )  # fmt: skip
    for tile in tl.static_range(TILES):
        token = first_token + (first_tile + tile) // PER
        head_A1 = (first_tile + tile) % PER * A + tl.arange(0, A)[:, None]
        is_head_A1 = tl.full([A, 1], True, tl.int1) if all_heads else head_A1 < HEADS
        if TOKENS > 1:
            is_head_A1 = is_head_A1 & (token < num_tokens)
        row = qkv + token.to(tl.int64) * qkv_stride + FROM
        left_AJ, right_AJ = _load_sums(
            row + head_A1 * SPAN, bias + FROM + head_A1 * SPAN, is_head_A1, pair_1J, A, E, ROTARY, INTERLEAVED, BIASED
        )  # fmt: skip
        lefts, rights = lefts + (left_AJ,), rights + (right_AJ,)  # noqa: RUF005
        safe = tl.minimum(token, num_tokens - 1) if TOKENS > 1 else token
        if KIND != _QUERY:
            slots_of = slots_of + (tl.load(slots + safe).to(tl.int64),)  # noqa: RUF005
        if KIND != _VALUE and (tile == 0 or not SHARED):
            cosine, sine = load_angles(
                first, second, angle_stride, safe.to(tl.int64), positions, position_stride, pair_1J, A, ROTARY, ANGLES,
                HEIGHT, WIDTH, AXES, ALTERNATING,
            )  # fmt: skip
            cosines, sines = cosines + (cosine,), sines + (sine,)  # noqa: RUF005
    if EARLY:
        # Said twice only to keep the compiler from moving loads behind it, to where their values are used.
        tl.extra.cuda.gdc_launch_dependents()
    for tile in tl.static_range(TILES):
        token = first_token + (first_tile + tile) // PER
        head_A1 = (first_tile + tile) % PER * A + tl.arange(0, A)[:, None]
        is_head_A1 = tl.full([A, 1], True, tl.int1) if all_heads else head_A1 < HEADS
        if TOKENS > 1:
            is_head_A1 = is_head_A1 & (token < num_tokens)
        if KIND == _VALUE:
            left_AJ, right_AJ = lefts[tile].to(tl.float32), rights[tile].to(tl.float32)
        else:
            normed_left_AJ, normed_right_AJ = lefts[tile].to(tl.float32), rights[tile].to(tl.float32)
            if NORMED:
                squares_AJ = normed_left_AJ * normed_left_AJ + normed_right_AJ * normed_right_AJ
                scale_A1 = tl.rsqrt(tl.sum(squares_AJ, axis=1, keep_dims=True) / E + eps)
                normed_left_AJ = _normed(lefts[tile], scale_A1, weight_left_AJ, PLUS_ONE)
                normed_right_AJ = _normed(rights[tile], scale_A1, weight_right_AJ, PLUS_ONE)
            cosine, sine = cosines[0 if SHARED else tile], sines[0 if SHARED else tile]
            # What does not turn has cosine 1 and sine 0.
            left_AJ = normed_left_AJ * cosine - normed_right_AJ * sine
            right_AJ = normed_right_AJ * cosine + normed_left_AJ * sine
        left_AJ, right_AJ = left_AJ.to(lefts[tile].dtype), right_AJ.to(lefts[tile].dtype)
        if KIND == _QUERY:
            at_A1 = out + token.to(tl.int64) * (HEADS * E) + head_A1 * E
        else:
            slot = slots_of[tile]
            at_A1 = out + (slot // S * block_stride + slot % S * row_stride) + head_A1 * head_stride
            is_head_A1 = is_head_A1 & (slot >= 0)
            if SCALES:
                # What was rounded to the model's dtype is scaled and rounded again.
                inverse_A1 = _inverse(scale, head_A1, is_head_A1, SCALES)
                left_AJ, right_AJ = left_AJ.to(tl.float32) * inverse_A1, right_AJ.to(tl.float32) * inverse_A1
        store_halves(at_A1, is_head_A1, pair_1J, left_AJ, right_AJ, E, ROTARY, INTERLEAVED)


@triton.jit(do_not_specialize=["positions", "position_stride", "slots", "key_scale", "value_scale", "num_tokens"])
def _qk_kernel(
    qkv, qkv_stride, bias, query_weight, key_weight, eps, positions, position_stride: tl.int64, first, second,
    angle_stride, slots, query_out, keys, values, block_stride, head_stride, row_stride, key_scale, value_scale,
    num_tokens: tl.int32,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr, S: tl.constexpr,
    A: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr, QUERY_PROGRAMS: tl.constexpr,
    KV_PROGRAMS: tl.constexpr, ANGLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXES: tl.constexpr,
    ALTERNATING: tl.constexpr, INTERLEAVED: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr,
    BIASED: tl.constexpr, PLUS_ONE: tl.constexpr, SCALES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    PROGRAMS: tl.constexpr = QUERY_PROGRAMS + 2 * KV_PROGRAMS
    first_token = tl.program_id(0) // PROGRAMS * TOKENS
    place = tl.program_id(0) % PROGRAMS
    # A gated query head brings its gate along, which stays where it is.
    SPAN: tl.constexpr = 2 * E if GATED else E
    if EARLY:
        if NORMED:
            prefetch_vector(query_weight, E)
            prefetch_vector(key_weight, E)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if place < QUERY_PROGRAMS:
        _take_tiles(
            qkv, qkv_stride, bias, query_weight, eps, positions, position_stride, first, second, angle_stride, slots,
            query_out, block_stride, head_stride, row_stride, key_scale, num_tokens, first_token, place * TILES,
            _QUERY, NUM_QUERY, 0, SPAN, E, ROTARY, S, A, J, TILES, TOKENS, ANGLES, HEIGHT, WIDTH, AXES, ALTERNATING,
            INTERLEAVED, NORMED, BIASED, PLUS_ONE, 0, EARLY,
        )  # fmt: skip
    elif place < QUERY_PROGRAMS + KV_PROGRAMS:
        _take_tiles(
            qkv, qkv_stride, bias, key_weight, eps, positions, position_stride, first, second, angle_stride, slots,
            keys, block_stride, head_stride, row_stride, key_scale, num_tokens, first_token,
            (place - QUERY_PROGRAMS) * TILES,
            _KEY, NUM_KV, NUM_QUERY * SPAN, E, E, ROTARY, S, A, J, TILES, TOKENS, ANGLES, HEIGHT, WIDTH, AXES,
            ALTERNATING, INTERLEAVED, NORMED, BIASED, PLUS_ONE, SCALES, EARLY,
        )  # fmt: skip
    else:
        _take_tiles(
            qkv, qkv_stride, bias, key_weight, eps, positions, position_stride, first, second, angle_stride, slots,
            values, block_stride, head_stride, row_stride, value_scale, num_tokens, first_token,
            (place - QUERY_PROGRAMS - KV_PROGRAMS) * TILES,
            _VALUE, NUM_KV, NUM_QUERY * SPAN + NUM_KV * E, E, E, (E + 1) // 2 * 2, S, A, J, TILES, TOKENS, ANGLES,
            HEIGHT, WIDTH, AXES, ALTERNATING, False, NORMED, BIASED, PLUS_ONE, SCALES, EARLY,
        )  # fmt: skip


_launch_qk = Launcher(_qk_kernel)


def _variant(
    name: str, heads: tuple[int, int, int], *, num_tokens: int = 64, block_size: int = 16, rotary_dim: int = 0,
    angles: int = BY_TOKEN, scales: int = 0, early: bool = True, **flags: Any,
) -> Variant:  # fmt: skip
    num_query, num_kv, head_dim = heads
    chosen = options_of(*heads, num_tokens, torch.device("cpu"))
    pool = _POOL_TYPES[torch.float8_e4m3fn if scales else torch.bfloat16]
    scale = "*fp32" if scales else "*i64"
    types = dict.fromkeys(("qkv", "bias", "query_weight", "key_weight", "query_out"), "*bf16") | {
        "slots": "*i64",
        "eps": "fp32",
    }
    types |= {"positions": "*i64", "first": "*fp32", "second": "*fp32", "keys": pool, "values": pool}
    types |= {"key_scale": scale, "value_scale": scale, "position_stride": "i64", "num_tokens": "i32"}
    strides = ("qkv_stride", "angle_stride", "block_stride", "head_stride", "row_stride")
    types |= dict.fromkeys(strides, "i32")
    shape = constants_of(chosen, *heads, rotary_dim or head_dim, block_size)
    plain = {"HEIGHT": 0, "WIDTH": 0, "AXES": 1, "ALTERNATING": False, "INTERLEAVED": False}
    plain |= {
        "GATED": False,
        "NORMED": True,
        "BIASED": False,
        "PLUS_ONE": False,
        "ANGLES": angles,
        "SCALES": scales,
        "EARLY": early,
    }
    anywhere = ("positions", "slots", "key_scale", "value_scale")
    pointers = [key for key, kind in types.items() if kind.startswith("*") and key not in anywhere]
    return Variant(
        name=f"qk_norm_rope_write {num_query}/{num_kv}/{head_dim} T={num_tokens}{name}{'' if early else ' late'}",
        kernel=_qk_kernel,
        types=types,
        constants=shape | plain | flags,
        aligned=(*pointers, *strides),
        num_warps=chosen["num_warps"],
        max_registers=168,
        max_shared_bytes=4096,
        on_amd=not early,
    )


def variants() -> list[Variant]:
    """The anchors' shapes, and each thing that a model may have differently."""
    partial: dict[str, Any] = {"rotary_dim": 64, "GATED": True, "PLUS_ONE": True}
    return [
        _variant("", (32, 8, 128)),
        _variant("", (32, 8, 128), num_tokens=8192),
        _variant("", (32, 8, 128), num_tokens=8192, early=False),
        _variant(" S=64 fp8", (32, 8, 128), block_size=64, scales=1),
        _variant(" fp8 of heads", (32, 8, 128), scales=2, early=False),
        _variant(" by position", (32, 8, 128), angles=BY_POSITION),
        _variant(" frequencies", (32, 8, 128), angles=FREQUENCIES),
        _variant("", (32, 4, 128)),
        _variant(" no norms", (32, 8, 128), NORMED=False),
        _variant(" no norms, biases", (28, 4, 128), NORMED=False, BIASED=True),
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
