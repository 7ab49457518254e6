# mypy: ignore-errors
"""The kernel of `norm_route`: a norm, the router that reads it, and the choice of experts, in one launch.

A step of few tokens takes as long as its launches. A norm and a router need not follow each other: the norm's factor of
a row is taken out of the router's sums. So the first programs multiply the router with rows that are not normalised
yet, a tile of the router's rows and a part of its columns each, which they have read before they wait for the launch
before. The last ones have a token each: they make its norm, meanwhile, then add up the parts of its logits, and
choose. They wait for the first programs, which a GPU begins before them; the plan has no more programs than run at
once.

Shapes: M tokens, D columns, K of them of a part, N rows of the router of a tile, S parts, E experts (padded to a power
of two), K chosen.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.moe.select_topk_triton import choose_packed
from baton.kernels.variant import Variant

OUTPUTS = 64  # rows of the router of a tile: those of an instruction of Hopper's
COLUMNS = 256  # of a part
_WARPS = 4

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _multiply_part(
    x, x_stride, added, added_stride, norm_weight, router, router_stride, parts, num_tokens, BM: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PLUS_ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """parts[split, token, row] of a tile of the router's rows, of rows that are weighted, but not normalised."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row_N = tile * BN + tl.arange(0, BN)
    column_K = split * _COLUMNS + tl.arange(0, _COLUMNS)
    # Rows past the end read the last one again, which costs less than a mask; they are not stored.
    at_N = router + tl.minimum(row_N, ROWS - 1).to(tl.int64) * router_stride
    router_NK = tl.load(at_N[:, None] + column_K[None, :])
    weight_K = tl.load(norm_weight + column_K).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token_M = tl.arange(0, BM)
    is_token_M1 = (token_M < num_tokens)[:, None]
    at_M1 = token_M[:, None].to(tl.int64)
    x_MK = tl.load(x + at_M1 * x_stride + column_K[None, :], mask=is_token_M1, other=0.0)
    added_MK = tl.load(added + at_M1 * added_stride + column_K[None, :], mask=is_token_M1, other=0.0)
    sum_MK = (x_MK.to(tl.float32) + added_MK.to(tl.float32)).to(x_MK.dtype).to(tl.float32)
    if PLUS_ONE:
        weight_K += 1.0
    weighted_MK = (sum_MK * weight_K[None, :]).to(x_MK.dtype)
    part_NM = tl.dot(router_NK, weighted_MK.T)
    to_NM = parts + (split * num_tokens + token_M)[None, :] * ROWS + row_N[:, None]
    tl.store(to_NM, part_NM, mask=(token_M < num_tokens)[None, :] & (row_N < ROWS)[:, None])


@triton.jit
def _normalise(
    x, x_stride, added, added_stride, norm_weight, out, sums, token, eps, D: tl.constexpr, DP: tl.constexpr,
    PLUS_ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a row's sum and its norm, and return the norm's factor; as `rms_norm_fused` does."""
    column_D = tl.arange(0, DP)
    is_column_D = column_D < D
    weight_D = tl.load(norm_weight + column_D, mask=is_column_D, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_D = tl.load(x + token * x_stride + column_D, mask=is_column_D, other=0.0)
    added_D = tl.load(added + token * added_stride + column_D, mask=is_column_D, other=0.0)
    rounded_D = (x_D.to(tl.float32) + added_D.to(tl.float32)).to(x_D.dtype)
    tl.store(sums + token * D + column_D, rounded_D, mask=is_column_D)
    wide_D = rounded_D.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide_D * wide_D, axis=0) / D + eps)
    wide_D *= factor
    if PLUS_ONE:
        value_D = (wide_D * (1.0 + weight_D)).to(x_D.dtype)
    else:
        value_D = (wide_D.to(x_D.dtype).to(tl.float32) * weight_D).to(x_D.dtype)
    tl.store(out + token * D + column_D, value_D, mask=is_column_D)
    return factor


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_route_kernel(
    x, x_stride, added, added_stride, norm_weight, router, router_stride, out, sums, parts, counter,
    weights, experts, num_tokens: tl.int32, eps, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SPLITS: tl.constexpr, SP: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    CHOSEN: tl.constexpr, CP: tl.constexpr, PLUS_ONE: tl.constexpr, RENORMALISE: tl.constexpr, SHARED: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part of a tile of the router, or behind these a token. `counter` is left at 0."""
    NUM_PARTS: tl.constexpr = (ROWS + BN - 1) // BN * SPLITS
    if tl.program_id(0) < NUM_PARTS:
        _multiply_part(
            x, x_stride, added, added_stride, norm_weight, router, router_stride, parts, num_tokens, BM, BN, SPLITS,
            ROWS, PLUS_ONE, EARLY,
        )  # fmt: skip
        tl.debug_barrier()  # all threads' parts are stored before one thread counts
        tl.atomic_add(counter, 1, sem="release")
        return
    token = tl.program_id(0) - NUM_PARTS
    factor = _normalise(
        x, x_stride, added, added_stride, norm_weight, out, sums, token.to(tl.int64), eps, D, DP, PLUS_ONE, EARLY
    )
    while tl.atomic_add(counter, 0, sem="acquire") < NUM_PARTS:
        pass
    tl.debug_barrier()
    split_S1, its_E = tl.arange(0, SP)[:, None], tl.arange(0, EP)
    at_S1 = (split_S1 * num_tokens + token) * ROWS
    is_part_SE = (split_S1 < SPLITS) & (its_E < E)[None, :]
    part_SE = tl.load(parts + at_S1 + its_E[None, :], mask=is_part_SE, other=0.0, cache_modifier=".cg")
    logit_E = (tl.sum(part_SE, axis=0) * factor).to(x.dtype.element_ty)
    shared = 1.0
    if GATED:
        gate_S1 = tl.load(parts + at_S1 + E, mask=split_S1 < SPLITS, other=0.0, cache_modifier=".cg")
        gate = (tl.sum(gate_S1) * factor).to(x.dtype.element_ty).to(tl.float32)
        shared = 1.0 / (1.0 + tl.exp(-gate))
    weight_C, chosen_C = choose_packed(logit_E, E, EP, CHOSEN, CP, RENORMALISE)
    its_C = tl.arange(0, CP)
    if SHARED:
        weight_C = tl.where(its_C == CHOSEN, shared, weight_C)
        chosen_C = tl.where(its_C == CHOSEN, E, chosen_C)
    at_C = token * (CHOSEN + SHARED) + its_C
    tl.store(weights + at_C, weight_C, mask=its_C < CHOSEN + SHARED)
    tl.store(experts + at_C, chosen_C.to(experts.dtype.element_ty), mask=its_C < CHOSEN + SHARED)
    # A program that counts here waits no more, so the last one may take the count back.
    if tl.atomic_add(counter, 1, sem="relaxed") == NUM_PARTS + num_tokens - 1:
        tl.store(counter, 0)


def num_programs(num_tokens: int, num_rows: int, hidden: int) -> int:
    """Programs of a launch; `num_rows` are those of the router that it reads."""
    return -(-num_rows // OUTPUTS) * (hidden // COLUMNS) + num_tokens


def launch(
    x_TD: torch.Tensor,
    added_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    router_XD: torch.Tensor,
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    num_experts: int,
    counters: torch.Tensor,
    *,
    plus_one: bool,
    renormalises: bool,
    has_shared: bool,
    is_gated: bool,
) -> None:
    """Write norm, sum, weights and experts, all contiguous; all arguments were checked.

    Args:
        x_TD: rows of the model's dtype.
        added_TD: what is added to them.
        weight_D: of the norm.
        eps: of the norm.
        router_XD: rows of experts and, if gated, the gate's.
        made: where the norm, the sum, the weights and the experts go.
        num_experts: routed experts.
        counters: int32 zeros of the current stream, of which one is used, and left as zero.
        plus_one: whether the norm's weight is 1 + w.
        renormalises: whether weights are divided by their sum.
        has_shared: whether the number of experts is the last choice.
        is_gated: whether the gate's row weighs it.
    """
    rows_TD, sum_TD, weight_TK, expert_TK = made
    (num_tokens, hidden), num_rows = x_TD.shape, num_experts + is_gated
    splits = hidden // COLUMNS
    parts = torch.empty(splits * num_tokens * num_rows, dtype=torch.float32, device=x_TD.device)
    constants = _constants(
        max(16, triton.next_power_of_2(num_tokens)), hidden, num_experts, weight_TK.shape[1] - has_shared, plus_one,
        renormalises, has_shared, is_gated, x_TD.device,
    )  # fmt: skip
    # A single row's stride may be anything.
    x_stride, added_stride = (rows.stride(0) if num_tokens > 1 else hidden for rows in (x_TD, added_TD))
    arguments = (
        x_TD, x_stride, added_TD, added_stride, weight_D, router_XD, router_XD.stride(0), rows_TD, sum_TD,
        parts, counters, weight_TK, expert_TK, num_tokens, eps,
    )  # fmt: skip
    with torch.cuda.device_of(x_TD):
        _launch_route((num_programs(num_tokens, num_rows, hidden),), arguments, constants)


@functools.lru_cache(maxsize=64)
def _constants(*sizes: Any) -> Constants:
    *sizes, device = sizes
    return Constants(_by_name(*sizes) | {"num_warps": _WARPS} | dependent_launch(device))


def _by_name(
    rows: int, hidden: int, num_experts: int, num_chosen: int, plus_one: bool, renormalises: bool, has_shared: bool,
    is_gated: bool,
) -> dict[str, Any]:  # fmt: skip
    """All but `EARLY`."""
    splits = hidden // COLUMNS
    return {
        "BM": rows,
        "BN": OUTPUTS,
        "D": hidden,
        "DP": triton.next_power_of_2(hidden),
        "SPLITS": splits,
        "SP": triton.next_power_of_2(splits),
        "ROWS": num_experts + is_gated,
        "E": num_experts,
        "EP": triton.next_power_of_2(num_experts),
        "CHOSEN": num_chosen,
        "CP": triton.next_power_of_2(num_chosen + has_shared),
        "PLUS_ONE": plus_one,
        "RENORMALISE": renormalises,
        "SHARED": has_shared,
        "GATED": is_gated,
    }


_launch_route = Launcher(_norm_route_kernel)


def variants() -> list[Variant]:
    """Of layers as they are published: Qwen3.5-35B-A3B, Qwen3-30B-A3B and Qwen3-235B-A22B."""
    types = dict.fromkeys(("x", "added", "norm_weight", "router", "out", "sums"), "*bf16")
    types |= dict.fromkeys(("parts", "weights"), "*fp32") | {"counter": "*i32", "experts": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("x_stride", "added_stride", "router_stride", "num_tokens"), "i32")
    aligned = (
        *(name for name, kind in types.items() if kind.startswith("*")),
        "x_stride",
        "added_stride",
        "router_stride",
    )
    layers = {"9 of 257x2048": (2048, 256, 8, True, True, True, True)}
    layers |= {"8 of 128x2048": (2048, 128, 8, False, True, False, False)}
    layers |= {"8 of 128x4096": (4096, 128, 8, False, True, False, False)}
    forms = [(name, rows, True) for name in layers for rows in (16, 32, 64)] + [("9 of 257x2048", 16, False)]
    return [
        Variant(
            name=f"norm_route {name} tokens={rows}{'' if early else ' late'}",
            kernel=_norm_route_kernel,
            types=types,
            constants=_by_name(rows, *layers[name]) | {"EARLY": early},
            aligned=aligned,
            num_warps=_WARPS,
            contains=("HGMMA",),
            lacks=("HMMA",),
            on_amd=not early,
            options={"launch_pdl": True} if early else {},
        )
        for name, rows, early in forms
    ]
