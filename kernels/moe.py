"""A sparse mixture of experts: softmax router, top-k, SwiGLU experts, weighted sum.

Source: Shazeer et al. 2017; transformers `Qwen3MoeSparseMoeBlock`. The router's softmax is float32 (float64 for
float64). Among equal probabilities the lower expert wins. A token's experts are summed in descending order of
probability, in the wide dtype, whatever rows are computed beside it.

Legend: T tokens, E experts, K experts of a token, D hidden size, I intermediate size of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.kernels.silu_mul import silu_mul, silu_mul_invariant
from baton.kernels.tiles import pad_rows, product_rows, row_tile, wide_dtype

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GateUp = Callable[[torch.Tensor], torch.Tensor]

# Up to this many rows, computing every expert for every row costs less than telling them apart.
_MAX_DENSE_WORK = 512


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked experts: gate above up [E, 2 I, D], and down [E, D, I]."""

    gate_up_EJD: torch.Tensor
    down_EDI: torch.Tensor


def route(logits_TE: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, K] in the wide dtype, and experts [T, K] int64, most probable first."""
    wide = wide_dtype(logits_TE.dtype)
    probability_TE = torch.softmax(logits_TE.to(wide), dim=-1)
    return _choose(probability_TE, num_chosen, renormalise)


def route_invariant(logits_TE: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with sums in fixed order."""
    # In three steps: the library's sum over E is ordered by shape.
    logits_TE = logits_TE.to(wide_dtype(logits_TE.dtype))
    weight_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
    total_T1 = _sum_columns(weight_TE)
    return _choose(weight_TE / total_T1, num_chosen, renormalise)


def _choose(probability_TE: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    sorted_TE, expert_TE = torch.sort(probability_TE, dim=-1, descending=True, stable=True)
    weight_TK, expert_TK = sorted_TE[:, :num_chosen], expert_TE[:, :num_chosen]
    if renormalise:
        weight_TK = weight_TK / _sum_columns(weight_TK)
    return weight_TK, expert_TK


def _sum_columns(x_TE: torch.Tensor) -> torch.Tensor:
    """[T, 1], column after column."""
    total_T1 = x_TE[:, :1].clone()
    for column in range(1, x_TE.shape[1]):
        total_T1 += x_TE[:, column : column + 1]
    return total_T1


def _combine(output_TKD: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum over a token's experts, the most probable first, rounded once."""
    weighted_TKD = output_TKD.to(weight_TK.dtype) * weight_TK[..., None]
    mixed_TD = weighted_TKD[:, 0]
    for choice in range(1, weight_TK.shape[1]):
        mixed_TD = mixed_TD + weighted_TKD[:, choice]
    return mixed_TD.to(output_TKD.dtype)


def _run_sorted(
    x_TD: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights, product: Linear, gate: GateUp
) -> torch.Tensor:
    """Each expert on its own rows -> [T, K, D]. Counts go to the host: on CUDA this waits for the device."""
    num_experts, num_chosen = weights.down_EDI.shape[0], expert_TK.shape[1]
    order_R = torch.argsort(expert_TK.flatten(), stable=True)
    counts = torch.bincount(expert_TK.flatten(), minlength=num_experts).tolist()
    input_RD = x_TD[order_R // num_chosen]
    output_RD = torch.empty_like(input_RD)
    row = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = slice(row, row + count)
        inner_RI = gate(product(input_RD[rows], weights.gate_up_EJD[expert]))
        output_RD[rows] = product(inner_RI, weights.down_EDI[expert])
        row += count
    scattered_RD = torch.empty_like(output_RD)
    scattered_RD[order_R] = output_RD
    return scattered_RD.view(*expert_TK.shape, -1)


def _run_dense(x_TD: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights, gate: GateUp) -> torch.Tensor:
    """Every expert on every row, then the chosen ones -> [T, K, D]; never waits for the device."""
    all_ETJ = torch.matmul(x_TD, weights.gate_up_EJD.transpose(1, 2))
    all_ETD = torch.bmm(gate(all_ETJ), weights.down_EDI.transpose(1, 2))
    token_T1 = torch.arange(x_TD.shape[0], device=x_TD.device)[:, None]
    return all_ETD[expert_TK, token_T1]


def experts(
    x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights, may_wait: bool
) -> torch.Tensor:
    """The mixture, [T, D]. Only where `may_wait` may the host wait for a CUDA device."""
    may_sort = x_TD.device.type == "cpu" or may_wait
    if may_sort and x_TD.shape[0] * weights.down_EDI.shape[0] > _MAX_DENSE_WORK:
        output_TKD = _run_sorted(x_TD, expert_TK, weights, functional.linear, silu_mul)
    else:
        output_TKD = _run_dense(x_TD, expert_TK, weights, silu_mul)
    return _combine(output_TKD, weight_TK)


def experts_invariant(
    x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights, may_wait: bool
) -> torch.Tensor:
    """The same, a row independent of the others: padded rows on a CPU, tiles of fixed shape on CUDA (no waiting)."""
    del may_wait
    if x_TD.device.type == "cpu":
        output_TKD = _run_sorted(x_TD, expert_TK, weights, product_rows, silu_mul_invariant)
        return _combine(output_TKD, weight_TK)
    tile = row_tile(x_TD.device)
    padded_TD, padded_TK = pad_rows(x_TD, tile), pad_rows(expert_TK, tile)
    outputs = [
        _run_dense(rows_TD, rows_TK, weights, silu_mul_invariant)
        for rows_TD, rows_TK in zip(padded_TD.split(tile), padded_TK.split(tile), strict=True)
    ]
    return _combine(torch.cat(outputs)[: x_TD.shape[0]], weight_TK)
