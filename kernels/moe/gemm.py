"""The experts of an MoE layer by grouped GEMMs: rows are grouped by expert, so only selected experts are read.

There are four launches and no host sync: sorting the routed rows into blocks (and quantizing x, if weights are float8);
the gate and up projections with silu(gate) * up, quantized again; the down projection times the routing weight; and the
sum over a token's choices in order of selection, which may be left to a norm (`kernels.moe.summands`). On Hopper float8
chunks of many rows take a fifth, which puts rows in place (`kernels.moe.gemm_hopper_triton`). No float is added
atomically, and a block has rows of one expert and padding only, so a token's result depends on that token alone for one
set of tiles; `invariant` fixes the set. A few tokens, which seldom share experts, are computed row by row instead, in
two launches (`kernels.moe.vector_triton`).

Unlike `kernels.moe.moe`, which rounds the results of the gate and up projections to the dtype of x, intermediate values
stay float32 until they are stored: silu(gate) * up is rounded once, to the dtype of x or to float8. The order of the
sum over choices is that of `kernels.moe.moe.experts`.

Float8 weights have a scale for each 128 x 128 block, activations one for each 128 columns of a row (DeepSeek-V3,
section 3.3.2); partial sums are added to float32 every 128.

This module does not know which other ranks hold experts or parts of them: the caller requests float32 and adds the
ranks' results. Rows of experts that other ranks hold have no block, so nothing is read or computed for them.

Legend: T tokens, K choices of each, E experts (of this rank), D hidden size, I intermediate size, J = 2 I.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.kernels import tuning
from baton.kernels.arguments import require, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.moe import gemm_hopper_triton, vector_plan, vector_triton
from baton.kernels.moe import gemm_triton as moe_gemm_triton
from baton.kernels.moe.align import GROUP, max_blocks, moe_align, moe_align_quantize, quantize_reference
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.moe import ExpertWeights, held_ids
from baton.kernels.moe.summands import Added, Summands, add_up

_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them
KERNEL = "moe_gemm"  # name in the tuned table


@dataclass(frozen=True, slots=True)
class Fp8ExpertWeights:
    """Stacked float8_e4m3fn experts: gate above up [E, 2 I, D] and down [E, D, I]; I and D are multiples of 128.

    Attributes:
        gate_up_EJD: values.
        gate_up_scale: float32 [E, 2 I / 128, D / 128].
        down_EDI: values.
        down_scale: float32 [E, D / 128, I / 128].
        held: which experts these are; None: all experts of the layer, or a part of each where ranks share them.
        ue8m0: whether activations get scales that are powers of two: see `Fp8Weight`.
        has_shared: whether the last one is a shared expert, which is the last choice of every token.
    """

    gate_up_EJD: torch.Tensor
    gate_up_scale: torch.Tensor
    down_EDI: torch.Tensor
    down_scale: torch.Tensor
    held: HeldExperts | None = None
    ue8m0: bool = False
    has_shared: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiling of the two GEMMs; only `block_len` and the `outputs` can change a result's bits.

    Attributes:
        block_len: rows of one expert that are computed together, 16 or more.
        gated_outputs: columns of the intermediate size per program; 128 for float8.
        gated_warps: warps of such a program.
        gated_stages: tiles in flight, of the gate and of the up projection each.
        down_outputs: columns of the hidden size per program.
        down_warps: warps of such a program.
        down_stages: tiles in flight.
    """

    block_len: int
    gated_outputs: int
    gated_warps: int
    gated_stages: int
    down_outputs: int
    down_warps: int
    down_stages: int


def experts_grouped(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights | Fp8ExpertWeights,
    *,
    out_dtype: torch.dtype | None = None,
    invariant: bool = False,
    tiles: Tiles | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute the MoE output [T, D]; the host never waits, so the call may be captured.

    Args:
        x_TD: see `experts_apart`, also for the next two.
        weight_TK: routing weights.
        expert_TK: choices.
        weights: expert weights.
        out_dtype: dtype of the result, x's by default; float32 where ranks' results are to be added.
        invariant: see `experts_apart`, also for the next two.
        tiles: tiles to use.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    made = experts_apart(
        x_TD, weight_TK, expert_TK, weights,
        out_dtype=out_dtype, invariant=invariant, tiles=tiles, implementation=implementation,
    )  # fmt: skip
    return made if isinstance(made, torch.Tensor) else add_up(made, out_dtype=out_dtype, implementation=implementation)


def experts_apart(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights | Fp8ExpertWeights,
    *,
    out_dtype: torch.dtype | None = None,
    invariant: bool = False,
    tiles: Tiles | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> Added:
    """Compute the MoE output as it is before a token's choices are added up, where the form has that; else their sum.

    Args:
        x_TD: bfloat16 or float16; the reference takes float32 and float64, too.
        weight_TK: routing weights, float32 (float64 for the reference).
        expert_TK: int32 or int64; ids outside this rank's E experts, which begin at 0 or at the first held one, add
            nothing.
        weights: expert weights in x's dtype, or float8. Contiguous.
        out_dtype: dtype of a sum, x's by default.
        invariant: whether tiles must not depend on the number of tokens.
        tiles: tiles to use instead of the tuned ones, for the tuner.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    scales = (weights.gate_up_scale, weights.down_scale) if isinstance(weights, Fp8ExpertWeights) else (None, None)
    key = (
        signature(x_TD), signature(weight_TK), signature(expert_TK), signature(weights.gate_up_EJD),
        signature(weights.down_EDI), signature(scales[0]), signature(scales[1]), weights.held,
        weights.has_shared, out_dtype, implementation,
    )  # fmt: skip
    uses = _FORMS.find(key)
    if uses is None:
        uses = uses_triton(x_TD.device, implementation)
        _check(x_TD, weight_TK, expert_TK, weights, uses)
        dtypes = (x_TD.dtype, torch.float32)
        require(out_dtype is None or out_dtype in dtypes, "out_dtype", f"is {out_dtype}, neither x's nor float32")
        _FORMS.keep(key, uses)
    dtype = out_dtype or x_TD.dtype
    if not uses:
        return experts_grouped_reference(x_TD, weight_TK, expert_TK, weights, dtype)
    if expert_TK.numel() == 0:
        return torch.zeros(x_TD.shape, dtype=dtype, device=x_TD.device)
    is_fp8 = isinstance(weights, Fp8ExpertWeights)
    num_experts, hidden, inner_size = weights.down_EDI.shape
    is_free = tiles is None and not invariant
    # A shared expert is planned for as if it were not there: it changes no tile of the routed ones.
    num_tokens, num_chosen = expert_TK.shape[0], expert_TK.shape[1] - weights.has_shared
    num_routed = num_experts - weights.has_shared
    num_all = num_routed if weights.held is None else weights.held.num_all
    if is_free and vector_plan.is_quicker(num_tokens, num_chosen, num_all, inner_size, hidden, is_fp8=is_fp8):
        out_TD = torch.empty(x_TD.shape, dtype=dtype, device=x_TD.device)
        choice = expert_TK.contiguous(), weight_TK.contiguous()
        vector_triton.launch(x_TD if x_TD.stride(1) == 1 else x_TD.contiguous(), *choice, weights, out_TD)
        return out_TD
    num_rows = _own_rows(num_tokens * num_chosen, weights.held)
    is_specialized = is_free and is_fp8 and gemm_hopper_triton.fits(weights, num_rows)
    if tiles is None:
        rows = None if invariant else num_rows
        device_index = x_TD.device.index if x_TD.device.type == "cuda" else None
        tiles = choose_tiles(num_routed, inner_size, hidden, is_fp8, rows, num_chosen, device_index)
    block_len = gemm_hopper_triton.BLOCK_LEN if is_specialized else tiles.block_len
    if is_fp8:  # a program quantizes whole groups, and multiplies by one scale at a time
        fits = tiles.gated_outputs == GROUP and GROUP % tiles.down_outputs == 0
        require(fits, "tiles", f"do not go with groups of {GROUP}: {tiles}")
    values_TD, scale_TG = x_TD, None
    first = 0 if weights.held is None else weights.held.first
    if isinstance(weights, Fp8ExpertWeights):
        alignment, values_TD, scale_TG = moe_align_quantize(
            x_TD, expert_TK, num_experts, block_len,
            first_expert=first, ue8m0=weights.ue8m0, implementation=implementation,
        )  # fmt: skip
    else:
        alignment = moe_align(expert_TK, num_experts, block_len, first_expert=first, implementation=implementation)
    gemm = moe_gemm_triton.GroupedGemm(alignment, weights, tiles, weight_TK.contiguous(), x_TD.dtype)
    if is_specialized:
        assert scale_TG is not None
        part_ND = gemm_hopper_triton.launch(gemm, values_TD, scale_TG)
    else:
        part_ND = moe_gemm_triton.launch(gemm, values_TD.contiguous(), scale_TG)
    is_early = block_len <= moe_gemm_triton.FEW
    return Summands(part_ND, expert_TK.contiguous(), num_experts, weights.held, is_early)


def most_bytes(num_tokens: int, num_chosen: int, sizes: tuple[int, int, int]) -> int:
    """Maximum bytes that a call allocates besides its arguments and output, with weights of 16 bits or float8.

    Args:
        num_tokens: T.
        num_chosen: K.
        sizes: E, D and I, of this rank.
    """
    num_experts, hidden, inner_size = sizes
    num_rows = num_tokens * num_chosen
    places = max_blocks(num_rows, num_experts, gemm_hopper_triton.BLOCK_LEN) * gemm_hopper_triton.BLOCK_LEN
    parts = max(2 * num_rows, places) * hidden  # parts take the place of placed rows
    inner = max(2 * num_rows, places) * inner_size
    scales = 4 * (places * (hidden + inner_size) + num_tokens * hidden) // GROUP
    return parts + inner + scales + num_tokens * hidden + 8 * places


def _own_rows(num_rows: int, held: HeldExperts | None) -> int:
    """Estimate how many rows this rank's experts get if rows are spread evenly over all experts; at least one."""
    return num_rows if held is None else -(-num_rows * held.count // held.num_all)


def _check(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights | Fp8ExpertWeights,
    uses: bool,
) -> None:
    half = (torch.bfloat16, torch.float16)
    require_tensor("x_TD", x_TD, (None, None), half if uses else (*half, torch.float32, torch.float64))
    num_tokens, hidden = x_TD.shape
    device = x_TD.device
    require_tensor("expert_TK", expert_TK, (num_tokens, None), (torch.int32, torch.int64), device)
    dtypes = (torch.float32,) if uses else (torch.float32, torch.float64)
    require_tensor("weight_TK", weight_TK, expert_TK.shape, dtypes, device)
    is_fp8 = isinstance(weights, Fp8ExpertWeights)
    wanted = (torch.float8_e4m3fn,) if is_fp8 else (x_TD.dtype,)
    require_tensor("weights.down_EDI", weights.down_EDI, (None, hidden, None), wanted, device)
    num_experts, _, inner_size = weights.down_EDI.shape
    shape = (num_experts, 2 * inner_size, hidden)
    require_tensor("weights.gate_up_EJD", weights.gate_up_EJD, shape, wanted, device)
    held = weights.held
    is_theirs = held is None or (held.count == num_experts and 0 <= held.first <= held.num_all - held.count)
    require(is_theirs, "weights.held", f"is {held}, of {num_experts} experts")
    if weights.has_shared:
        require(held is None, "weights.has_shared", "is set for experts that ranks hold")
        has_others = num_experts > 1 and expert_TK.shape[1] > 1
        require(has_others, "expert_TK", "has no choice beside the shared expert")
    named = {"gate_up_EJD": weights.gate_up_EJD, "down_EDI": weights.down_EDI}
    if isinstance(weights, Fp8ExpertWeights):
        require(hidden % GROUP == 0, "x_TD", f"has {hidden} columns, no multiple of {GROUP}")
        require(inner_size % GROUP == 0, "weights.down_EDI", f"has {inner_size} columns, no multiple of {GROUP}")
        groups = (num_experts, 2 * inner_size // GROUP, hidden // GROUP)
        require_tensor("weights.gate_up_scale", weights.gate_up_scale, groups, (torch.float32,), device)
        groups = (num_experts, hidden // GROUP, inner_size // GROUP)
        require_tensor("weights.down_scale", weights.down_scale, groups, (torch.float32,), device)
        named |= {"gate_up_scale": weights.gate_up_scale, "down_scale": weights.down_scale}
    for name, tensor in named.items():
        require(tensor.is_contiguous(), f"weights.{name}", "must be contiguous")


@functools.lru_cache(maxsize=4096)
def choose_tiles(
    num_experts: int,
    inner_size: int,
    hidden: int,
    is_fp8: bool,
    num_rows: int | None,
    num_chosen: int,
    device_index: int | None = None,
) -> Tiles:
    """Return the tuned tiles, else the rule's; with `num_rows` None, tiles that serve any number of rows."""
    if num_rows is None:
        return Tiles(16, 128, 4, 3, 128, 4, 4) if is_fp8 else Tiles(16, 64, 4, 4, 128, 4, 4)
    shape, num_tokens = shape_name(num_experts, inner_size, hidden, is_fp8), -(-num_rows // num_chosen)
    # Only decode steps are tuned. Prefill chunks give experts many rows; blocks of few rows would reread weights.
    found = tuning.find(KERNEL, shape, num_tokens, device_index, reaches_on=False)
    if found is not None:
        return tiles_of(found)
    mean = num_rows / num_experts
    if is_fp8:
        # Few rows wait for weights alone, so more of them are in flight than two programs could hold beside each other.
        return Tiles(16, 128, 4, 5, 128, 4, 5) if mean <= 16 else Tiles(32, 128, 4, 3, 128, 4, 4)
    if mean <= 8:
        # With fewer programs than multiprocessors, each must have more of its weights in flight.
        is_few = min(num_rows, num_experts) * -(-inner_size // 64) <= 132
        return Tiles(16, 64, 4, 6 if is_few else 4, 128, 4, 4)
    if mean <= 64:
        return Tiles(32 if mean <= 24 else 64, 64, 4, 3, 128, 8, 3)
    return Tiles(128, 128, 8, 4, 256, 8, 4)


def shape_name(num_experts: int, inner_size: int, hidden: int, is_fp8: bool) -> str:
    """Name of a shape in the tuned table."""
    return f"{'fp8' if is_fp8 else 'bf16'} {num_experts}x{inner_size}x{hidden}"


def tiles_of(options: Mapping[str, Any]) -> Tiles:
    """Convert a row of the table to tiles."""
    return Tiles(**{name: int(options[name]) for name in Tiles.__slots__})


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply weights [..., N, K] by scales [..., N / 128 rounded up, K / 128] -> float32."""
    wide = scale.repeat_interleave(GROUP, dim=-2)[..., : values.shape[-2], :].repeat_interleave(GROUP, dim=-1)
    return values.float() * wide


def experts_grouped_reference(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    weights: ExpertWeights | Fp8ExpertWeights,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute it in torch, expert by expert; on a GPU every expert for every token, so that the host never waits."""
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    num_experts = weights.down_EDI.shape[0]
    is_cpu = x_TD.device.type == "cpu"
    expert_TK = held_ids(expert_TK, weights.held)
    hit = [its for its in expert_TK.unique().tolist() if 0 <= its < num_experts] if is_cpu else range(num_experts)
    part_TKD = torch.zeros(*expert_TK.shape, x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    input_TD = _rounded(x_TD, weights).to(wide)
    for expert in hit:
        gate_up_JD, down_DI = _weights_of(weights, expert, wide)
        gate_TI, up_TI = (input_TD @ gate_up_JD.T).chunk(2, dim=-1)
        inner_TI = gate_TI / (1 + torch.exp(-gate_TI)) * up_TI
        inner_TI = _rounded(inner_TI if isinstance(weights, Fp8ExpertWeights) else inner_TI.to(x_TD.dtype), weights)
        its_TD = inner_TI.to(wide) @ down_DI.T
        weighted_TKD = (its_TD[:, None] * weight_TK[..., None].to(wide)).to(x_TD.dtype)
        part_TKD = torch.where((expert_TK == expert)[..., None], weighted_TKD, part_TKD)
    sum_TD = torch.zeros_like(x_TD, dtype=wide)
    for choice in range(expert_TK.shape[1]):
        sum_TD = sum_TD + part_TKD[:, choice]
    return sum_TD.to(out_dtype)


def _rounded(x: torch.Tensor, weights: ExpertWeights | Fp8ExpertWeights) -> torch.Tensor:
    """Round x as a GEMM with these weights does."""
    if not isinstance(weights, Fp8ExpertWeights):
        return x
    values, scale = quantize_reference(x, ue8m0=weights.ue8m0)
    return values.float() * scale.repeat_interleave(GROUP, dim=-1)


def _weights_of(
    weights: ExpertWeights | Fp8ExpertWeights, expert: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up_JD, down_DI = weights.gate_up_EJD[expert], weights.down_EDI[expert]
    if not isinstance(weights, Fp8ExpertWeights):
        return gate_up_JD.to(wide), down_DI.to(wide)
    return dequantize(gate_up_JD, weights.gate_up_scale[expert]), dequantize(down_DI, weights.down_scale[expert])
