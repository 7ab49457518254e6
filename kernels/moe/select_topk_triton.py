# mypy: ignore-errors
"""Which experts a token is sent to, as a Triton kernel: one program of one warp for a token, nothing but registers.

Chosen by repeated maximum, the lowest index among equals. Maxima are of integers that are in the order of the numbers:
one instruction of the warp's, where a maximum of floats takes five exchanges, one after the other. A choice takes three
of them: the largest number, its place, its score; or one, where logits of 16 bits are chosen as they are.

Programs beyond the tokens compute the activation of a shared expert, whose first GEMM is the router's, too: that costs
nothing while the others choose, and saves a launch.

Shapes: E experts in G groups of S (padded to powers of two), K chosen; I columns of the activation, C of a program.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.pointwise.silu_mul_triton import silu
from baton.kernels.variant import Variant

_LARGEST = tl.constexpr(3.4028234663852886e38)
_NONE = tl.constexpr(float("-inf"))
_LAST = tl.constexpr(-(1 << 31))  # comes after all numbers
_GATED_LEN = 512  # columns of an activation of a program: 16 of each thread
_C = tl.constexpr(_GATED_LEN)


@triton.jit
def _ordered(x):
    """Float32 without NaN as int32 of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(order):
    """The float32 that `_ordered` made this of."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _keep_groups(choice_GS, GROUPS: tl.constexpr, KEPT: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """-inf in all but the KEPT groups with the largest sums of their two largest."""
    its_S = tl.arange(0, S)
    first_G, place_G = tl.max(choice_GS, axis=1, return_indices=True)
    second_G = tl.max(tl.where(its_S[None, :] == place_G[:, None], _NONE, choice_GS), axis=1)
    score_G = first_G + second_G
    its_G = tl.arange(0, G)
    kept_G = tl.zeros([G], dtype=tl.int32)
    # A group that is none, or that is kept already, comes after all others, those at -inf, too.
    order_G = tl.where(its_G < GROUPS, _ordered(score_G), _LAST)
    for _ in tl.static_range(KEPT):
        place = tl.min(tl.where(order_G == tl.max(order_G, axis=0), its_G, G), axis=0)
        kept_G = tl.where(its_G == place, 1, kept_G)
        order_G = tl.where(its_G == place, _LAST, order_G)
    return tl.where(kept_G[:, None] > 0, choice_GS, _NONE)


@triton.jit
def choose_packed(
    logit_N, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORMALISE: tl.constexpr
):  # fmt: skip
    """Weights and experts of a token by softmax, from E logits of 16 bits, padded to N.

    A logit's bits, in their order, are the upper half of an integer, and its place the lower one, the lowest the
    largest: all are different, so that one maximum is a choice.
    """
    its_N = tl.arange(0, N)
    dtype: tl.constexpr = logit_N.dtype
    wide_N = logit_N.to(tl.float32)
    wide_N = tl.where(wide_N == wide_N, wide_N, _NONE)
    # Both zeros are one.
    bits_N = tl.where(wide_N == 0.0, 0.0, wide_N).to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    order_N = tl.where(bits_N < 0, bits_N ^ 0x7FFF, bits_N)
    key_N = tl.where(its_N < E, order_N * 65536 + (65535 - its_N), _LAST)
    wide_N = tl.minimum(wide_N, _LARGEST)
    its_K = tl.arange(0, KP)
    weight_K = tl.zeros([KP], dtype=tl.float32)
    chosen_K = tl.zeros([KP], dtype=tl.int32)
    total = 0.0
    for choice in tl.static_range(K):
        best = tl.max(key_N, axis=0)
        order = best >> 16
        bits = tl.where(order < 0, order ^ 0x7FFF, order).to(tl.int16)
        logit = tl.minimum(bits.to(dtype, bitcast=True).to(tl.float32), _LARGEST)
        if choice == 0:
            largest = tl.maximum(logit, -_LARGEST)  # finite, whatever the row holds
            whole = tl.sum(tl.where(its_N < E, tl.exp(wide_N - largest), 0.0), axis=0)
            whole = tl.where(whole > 0.0, whole, 1.0)
        score = tl.exp(logit - largest) / whole
        total += score
        weight_K = tl.where(its_K == choice, score, weight_K)
        chosen_K = tl.where(its_K == choice, 65535 - (best & 65535), chosen_K)
        key_N = tl.where(key_N == best, _LAST, key_N)
    if RENORMALISE:
        weight_K = weight_K / tl.where(total > 0.0, total, 1.0)
    return weight_K, chosen_K


@triton.jit
def _choose(
    logit_GS, bias, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, KP: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Weights and experts of a token, by any score and in groups."""
    its_G, its_S = tl.arange(0, G), tl.arange(0, S)
    is_expert_GS = (its_G < GROUPS)[:, None] & (its_S < SIZE)[None, :]
    logit_GS = tl.minimum(tl.where(logit_GS == logit_GS, logit_GS, _NONE), _LARGEST)
    if SIGMOID:
        score_GS = 1.0 / (1.0 + tl.exp(-logit_GS))
        choice_GS = score_GS
    else:
        largest = tl.maximum(_number(tl.max(_ordered(logit_GS))), -_LARGEST)  # finite, whatever the row holds
        score_GS = tl.exp(logit_GS - largest)
        whole = tl.sum(score_GS)
        score_GS = score_GS / tl.where(whole > 0.0, whole, 1.0)
        choice_GS = logit_GS
    if BIAS:
        choice_GS = score_GS + tl.load(bias + its_G[:, None] * SIZE + its_S[None, :], mask=is_expert_GS, other=0.0)
        choice_GS = tl.where(choice_GS == choice_GS, choice_GS, _NONE)
    if KEPT < GROUPS:
        choice_GS = _keep_groups(tl.where(is_expert_GS, choice_GS, _NONE), GROUPS, KEPT, G, S)
    # What is no expert comes after an expert at -inf; so does one that is chosen already.
    order_N = tl.reshape(tl.where(is_expert_GS, _ordered(choice_GS), _LAST), [G * S])
    score_N = tl.reshape(tl.where(is_expert_GS, score_GS, 0.0), [G * S]).to(tl.int32, bitcast=True)
    its_N = tl.arange(0, G * S)
    its_K = tl.arange(0, KP)
    weight_K = tl.zeros([KP], dtype=tl.float32)
    chosen_K = tl.zeros([KP], dtype=tl.int32)
    total = 0.0
    for choice in tl.static_range(K):
        best = tl.max(order_N, axis=0)
        place = tl.min(tl.where(order_N == best, its_N, G * S), axis=0)
        # No score is negative, so the bits of all are in order, too.
        score = tl.max(tl.where(its_N == place, score_N, 0), axis=0).to(tl.float32, bitcast=True)
        total += score
        weight_K = tl.where(its_K == choice, score, weight_K)
        chosen_K = tl.where(its_K == choice, place // S * SIZE + place % S, chosen_K)
        order_N = tl.where(its_N == place, _LAST, order_N)
    if RENORMALISE:
        weight_K = weight_K / tl.where(total > 0.0, total, 1.0)
    return weight_K, chosen_K


@triton.jit
def _gate_part(gate_up, gate_up_stride, inner, part, I: tl.constexpr, PTX: tl.constexpr):  # noqa: E741
    """Write silu(gate) * up of some columns of a token, as `silu_mul_fused` computes it."""
    PARTS: tl.constexpr = (I + _C - 1) // _C
    token = (part // PARTS).to(tl.int64)
    column_C = part % PARTS * _C + tl.arange(0, _C)
    is_column_C = column_C < I
    gate_C = tl.load(gate_up + token * gate_up_stride + column_C, mask=is_column_C, other=0.0)
    up_C = tl.load(gate_up + token * gate_up_stride + I + column_C, mask=is_column_C, other=0.0)
    silu_C = silu(gate_C.to(tl.float32), PTX).to(gate_C.dtype)
    value_C = (silu_C.to(tl.float32) * up_C.to(tl.float32)).to(gate_C.dtype)
    tl.store(inner + token * I + column_C, value_C, mask=is_column_C)


@triton.jit(do_not_specialize=["logit_stride", "gate_stride", "num_tokens"])
def _select_kernel(
    logits,
    logit_stride: tl.int64,
    bias,
    weights,
    experts,
    scaling,
    gate,
    gate_stride: tl.int64,
    gate_up,
    gate_up_stride,
    inner,
    num_tokens: tl.int32,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    KP: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    PTX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The K best experts of a token; with SHARED, one more after them, for every token, which GATED weighs.

    Behind the tokens' programs, if I is not 0, those of an activation of so many columns.
    """
    token = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if I > 0:
        if tl.program_id(0) >= num_tokens:
            _gate_part(gate_up, gate_up_stride, inner, tl.program_id(0) - num_tokens, I, PTX)
            return
    IS_PACKED: tl.constexpr = (
        GROUPS == 1 and not SIGMOID and not BIAS and logits.dtype.element_ty.primitive_bitwidth == 16
    )
    its_G, its_S = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    is_expert_GS = (its_G < GROUPS) & (its_S < SIZE)
    at_GS = token * logit_stride + its_G * SIZE + its_S
    logit_GS = tl.load(logits + at_GS, mask=is_expert_GS, other=_NONE)
    if IS_PACKED:
        weight_K, chosen_K = choose_packed(tl.reshape(logit_GS, [S]), SIZE, S, K, KP, RENORMALISE)
    else:
        weight_K, chosen_K = _choose(
            logit_GS.to(tl.float32), bias, K, GROUPS, KEPT, SIZE, G, S, KP, SIGMOID, BIAS, RENORMALISE
        )
    its_K = tl.arange(0, KP)
    weight_K *= scaling
    if SHARED:
        shared = 1.0
        if GATED:
            shared = 1.0 / (1.0 + tl.exp(-tl.load(gate + token * gate_stride).to(tl.float32)))
        weight_K = tl.where(its_K == K, shared, weight_K)
        chosen_K = tl.where(its_K == K, GROUPS * SIZE, chosen_K)
    at_K = token * (K + SHARED) + its_K
    tl.store(weights + at_K, weight_K, mask=its_K < K + SHARED)
    tl.store(experts + at_K, chosen_K.to(experts.dtype.element_ty), mask=its_K < K + SHARED)


def launch(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    scaling: float,
    gate_T1: torch.Tensor | None,
    beside: tuple[torch.Tensor, torch.Tensor] | None,
    constants: Constants,
) -> None:
    """One program for each token, and those of the activation `beside` it: its input and its output."""
    num_programs = num_tokens = len(logits_TE)
    gate_up_TJ = inner_TI = logits_TE
    if beside is not None:
        gate_up_TJ, inner_TI = beside
        num_programs += num_tokens * -(-inner_TI.shape[1] // _GATED_LEN)
    bias, gate = weight_TK if bias_E is None else bias_E, weight_TK if gate_T1 is None else gate_T1
    arguments = (
        logits_TE, logits_TE.stride(0), bias, weight_TK, expert_TK, scaling, gate, gate.stride(0),
        gate_up_TJ, gate_up_TJ.stride(0), inner_TI, num_tokens,
    )  # fmt: skip
    with torch.cuda.device_of(logits_TE):
        _launch_select((num_programs,), arguments, constants)


_launch_select = Launcher(_select_kernel)


def constants_of(
    num_experts: int,
    num_chosen: int,
    groups: tuple[int, int],
    is_sigmoid: bool,
    has_bias: bool,
    renormalises: bool,
    has_shared: bool = False,
    is_gated: bool = False,
    inner_size: int = 0,
) -> dict[str, object]:
    """The constants of a launch; `groups` is how many there are, and how many are kept."""
    size = num_experts // groups[0]
    return {
        "K": num_chosen,
        "GROUPS": groups[0],
        "KEPT": groups[1],
        "SIZE": size,
        "G": triton.next_power_of_2(groups[0]),
        "S": triton.next_power_of_2(size),
        "KP": triton.next_power_of_2(num_chosen + has_shared),
        "SIGMOID": is_sigmoid,
        "BIAS": has_bias,
        "RENORMALISE": renormalises,
        "SHARED": has_shared,
        "GATED": is_gated,
        "I": inner_size,
    }


@functools.lru_cache(maxsize=256)
def prepared(device: torch.device, *router: Any) -> Constants:
    """The same for a launch; the other arguments are those of `constants_of`."""
    ptx = device.type == "cuda" and torch.version.hip is None and not knobs.runtime.interpret
    return Constants({**constants_of(*router), "PTX": ptx, "num_warps": 1, **dependent_launch(device)})


def variants() -> list[Variant]:
    """The routers of the models that are measured, and the form for other GPUs."""
    routers = {
        "softmax E=128": (128, 8, (1, 1), False, False, True),
        "softmax E=256": (256, 8, (1, 1), False, False, True),
        "softmax E=60 as they are": (60, 4, (1, 1), False, False, False),
        "sigmoid E=256 groups=8": (256, 8, (8, 4), True, True, True),
        "softmax E=256 and a gated one": (256, 8, (1, 1), False, False, True, True, True),
        "sigmoid E=256 groups=8 and a shared one": (256, 8, (8, 4), True, True, True, True, False),
        "softmax E=256 beside an activation": (256, 8, (1, 1), False, False, True, False, False, 512),
        "softmax E=60 beside an activation": (60, 4, (1, 1), False, False, False, False, False, 5632),
    }
    types = {"logits": "*bf16", "logit_stride": "i64", "bias": "*fp32", "weights": "*fp32", "experts": "*i64"}
    types |= {"scaling": "fp32", "gate": "*bf16", "gate_stride": "i64", "gate_up": "*bf16", "inner": "*bf16"}
    types |= {"gate_up_stride": "i32", "num_tokens": "i32"}
    return [
        Variant(
            name=f"select_topk {name}{'' if early else ' late'}",
            kernel=_select_kernel,
            types=types,
            constants=constants_of(*router) | {"PTX": early, "EARLY": early},
            aligned=("logits", "bias", "weights", "experts", "gate", "gate_up", "gate_up_stride", "inner"),
            num_warps=1,
            max_registers=128,
            max_shared_bytes=4096,
            on_amd=not early,
        )
        for name, router in routers.items()
        for early in ((True, False) if name == "softmax E=128" else (True,))
    ]
