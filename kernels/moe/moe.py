"""A sparse MoE layer: softmax router, top-k, SwiGLU experts, weighted sum.

The router's softmax is float32 (float64 for float64). Among equal probabilities the lower expert wins. A token's
experts are summed in descending order of probability, in the wide dtype, whatever rows are computed beside it.

Ranks that share the experts hold either a part of every expert's intermediate dimension, or different experts, whole.
Ranks add their MoE outputs once a layer (`kernels.gemm.inner_sum`). With different experts in batch-invariant numerics,
they add the outputs per choice instead, so that choices are added in one order on any number of ranks.

Source: Shazeer et al. 2017; transformers `Qwen3MoeSparseMoeBlock`.
Legend: T tokens, E experts (of this rank), K experts of a token, D hidden size, I intermediate size of an expert (of
this rank), C slices of it, i the size of a slice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch.nn import functional

from baton.kernels import tiles
from baton.kernels.gemm.inner_sum import InnerSum, tree_sum
from baton.kernels.gemm.slices import num_slices as slices_of
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.pointwise.silu_mul import silu_mul, silu_mul_invariant
from baton.kernels.tiles import matmul_rows, matmul_slices, pad_rows, row_tile, wide_dtype

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GateUp = Callable[[torch.Tensor], torch.Tensor]
Slices = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Up to this much work (rows x experts), computing every expert for every row costs less than sorting.
_MAX_DENSE_WORK = 512


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked experts: gate above up [E, 2 I, D], and down [E, D, I].

    Attributes:
        gate_up_EJD: gate above up, J = 2 I.
        down_EDI: down projections.
        held: which experts these are; None: all experts of the layer, or a part of each where ranks share them.
        has_shared: whether the last one is a shared expert, which is the last choice of every token.
    """

    gate_up_EJD: torch.Tensor
    down_EDI: torch.Tensor
    held: HeldExperts | None = None
    has_shared: bool = False


def route(logits_TE: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Select experts: weights [T, K] in the wide dtype, and experts [T, K] int64, most probable first."""
    wide = wide_dtype(logits_TE.dtype)
    probability_TE = torch.softmax(logits_TE.to(wide), dim=-1)
    return _choose(probability_TE, num_chosen, renormalise)


def route_invariant(logits_TE: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Select experts with sums in fixed order."""
    # Softmax in three steps, because the library's order of the sum over E depends on the shape.
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
    """Sum [T, E] to [T, 1], column after column."""
    total_T1 = x_TE[:, :1].clone()
    for column in range(1, x_TE.shape[1]):
        total_T1 += x_TE[:, column : column + 1]
    return total_T1


def _combine(output_CTKD: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """Add a token's weighted experts, the most probable first, then slices: [T, D] in the wide dtype."""
    weighted_CTKD = output_CTKD.to(weight_TK.dtype) * weight_TK[..., None]
    return tree_sum(reduce(torch.add, weighted_CTKD.unbind(2)).unbind())


def held_ids(expert_TK: torch.Tensor, held: HeldExperts | None) -> torch.Tensor:
    """Convert choices to indices [T, K] into this rank's experts; E where another rank holds the expert."""
    if held is None:
        return expert_TK
    id_TK = expert_TK - held.first
    return torch.where((id_TK >= 0) & (id_TK < held.count), id_TK, held.count)


def _run_sorted(
    x_TD: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights,
    up: Linear,
    gate: GateUp,
    down: Slices,
    num_slices: int = 1,
) -> torch.Tensor:
    """Compute each expert on its own rows -> [C, T, K, D], C slices from `down`; 0 for experts of other ranks.

    Counts go to the host: on CUDA this waits for the device.
    """
    num_experts, num_chosen = weights.down_EDI.shape[0], expert_TK.shape[1]
    counts = torch.bincount(expert_TK.flatten(), minlength=num_experts).tolist()[:num_experts]
    num_own = sum(counts)
    order_R = torch.argsort(expert_TK.flatten(), stable=True)[:num_own]  # experts of other ranks come last
    input_RD = x_TD[order_R // num_chosen]
    output_CRD: torch.Tensor | None = None
    row = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        inner_RI = gate(up(input_RD[row : row + count], weights.gate_up_EJD[expert]))
        part_CRD = down(inner_RI, weights.down_EDI[expert])
        if output_CRD is None:
            shape = (len(part_CRD), expert_TK.numel(), x_TD.shape[1])
            output_CRD = part_CRD.new_empty(shape) if num_own == expert_TK.numel() else part_CRD.new_zeros(shape)
        output_CRD[:, order_R[row : row + count]] = part_CRD
        row += count
    if output_CRD is None:  # no row at all
        output_CRD = x_TD.new_zeros(num_slices, expert_TK.numel(), x_TD.shape[1])
    return output_CRD.view(len(output_CRD), *expert_TK.shape, x_TD.shape[1])


def _run_dense(x_TD: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights, gate: GateUp) -> torch.Tensor:
    """Compute every expert on every row, then pick the selected ones -> [1, T, K, D]; never waits for the device."""
    all_ETI = gate(torch.matmul(x_TD, weights.gate_up_EJD.transpose(1, 2)))
    return _chosen(torch.bmm(all_ETI, weights.down_EDI.transpose(1, 2)), expert_TK, weights.held)[None]


def _chosen(all_ETD: torch.Tensor, expert_TK: torch.Tensor, held: HeldExperts | None) -> torch.Tensor:
    """Pick the selected experts' outputs, [T, K, D]; 0 for experts of other ranks."""
    num_experts, num_tokens, _ = all_ETD.shape
    token_T1 = torch.arange(num_tokens, device=all_ETD.device)[:, None]
    if held is None:
        return all_ETD[expert_TK, token_T1]
    chosen_TKD = all_ETD[expert_TK.clamp(max=num_experts - 1), token_T1]
    return torch.where((expert_TK < num_experts)[..., None], chosen_TKD, 0.0)


def _run_dense_sliced(
    x_TD: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights, gate: GateUp, num_slices: int
) -> torch.Tensor:
    """Compute the same by slices of the intermediate dimension -> [C, T, K, D].

    Every GEMM has the same shape and layout for any number of ranks, so that it rounds alike.
    """
    num_experts = weights.down_EDI.shape[0]
    x_ETD = x_TD.expand(num_experts, -1, -1).contiguous()
    ups_EiD = [part_EiD.contiguous() for part_EiD in weights.gate_up_EJD.chunk(2 * num_slices, dim=1)]
    all_ETI = gate(torch.cat([torch.bmm(x_ETD, up_EiD.transpose(1, 2)) for up_EiD in ups_EiD], dim=-1))
    chosen_TKD = []
    for part_ETi, down_EDi in zip(all_ETI.chunk(num_slices, -1), weights.down_EDI.chunk(num_slices, -1), strict=True):
        all_ETD = torch.bmm(part_ETi.contiguous(), down_EDi.contiguous().transpose(1, 2))
        chosen_TKD.append(_chosen(all_ETD, expert_TK, weights.held))
    return torch.stack(chosen_TKD)


def _whole(inner_RI: torch.Tensor, down_DI: torch.Tensor) -> torch.Tensor:
    return functional.linear(inner_RI, down_DI)[None]


def experts(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights,
    may_wait: bool,
    inner: InnerSum,
) -> torch.Tensor:
    """Compute the MoE output, [T, D]. The host may wait for a CUDA device only if `may_wait`."""
    expert_TK = held_ids(expert_TK, weights.held)
    may_sort = x_TD.device.type == "cpu" or may_wait
    if may_sort and x_TD.shape[0] * weights.down_EDI.shape[0] > _MAX_DENSE_WORK:
        output_1TKD = _run_sorted(x_TD, expert_TK, weights, functional.linear, silu_mul, _whole)
    else:
        output_1TKD = _run_dense(x_TD, expert_TK, weights, silu_mul)
    return inner.add_ranks(_combine(output_1TKD, weight_TK)).to(x_TD.dtype)


def experts_invariant(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights,
    may_wait: bool,
    inner: InnerSum,
) -> torch.Tensor:
    """Compute the same with independent rows: padded rows on a CPU, tiles of fixed shape on CUDA (no waiting)."""
    del may_wait
    expert_TK, inner_size = held_ids(expert_TK, weights.held), weights.down_EDI.shape[2]
    num_slices = inner.num_slices(inner_size) if weights.held is None else slices_of(inner_size)
    if tiles.has_cpu_rules(x_TD.device):
        down = partial(matmul_slices, num_slices=num_slices)
        output_CTKD = _run_sorted(x_TD, expert_TK, weights, matmul_rows, silu_mul_invariant, down, num_slices)
        return _add_invariant(output_CTKD, weight_TK, weights.held, inner).to(x_TD.dtype)
    tile = row_tile(x_TD.device)
    padded_TD, padded_TK = pad_rows(x_TD, tile), pad_rows(expert_TK, tile)
    outputs = [
        _run_dense_sliced(rows_TD, rows_TK, weights, silu_mul_invariant, num_slices)
        for rows_TD, rows_TK in zip(padded_TD.split(tile), padded_TK.split(tile), strict=True)
    ]
    output_CTKD = torch.cat(outputs, dim=1)[:, : x_TD.shape[0]]
    return _add_invariant(output_CTKD, weight_TK, weights.held, inner).to(x_TD.dtype)


def _add_invariant(
    output_CTKD: torch.Tensor, weight_TK: torch.Tensor, held: HeldExperts | None, inner: InnerSum
) -> torch.Tensor:
    """Add the MoE output of all ranks, [T, D] in the wide dtype, in one order however experts are distributed."""
    if held is None:
        return inner.add_ranks(_combine(output_CTKD, weight_TK))
    # One rank has a choice's result and the others have 0, which changes no bit.
    return _combine(inner.add_ranks(output_CTKD.to(weight_TK.dtype)), weight_TK)
