"""Rows of `baton bench kernels` for MoE layers: the grouped GEMMs, the masked GEMMs, and what is tuned.

Experts are selected uniformly, a token's experts are distinct; a row's name says how many experts were hit, since their
weights are the bytes. The rows of the masked form have the same batch as [E, M, D] buffers, without the exchange that
would fill them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from baton.bench.kernel_bench.baselines import BaselineExperts, BlockScaled, deep_gemm_masked, vllm_moe
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.gemm.inner_sum import ALONE
from baton.kernels.moe import gemm as moe_gemm
from baton.kernels.moe import gemm_masked as moe_gemm_masked
from baton.kernels.moe.align import quantize_reference
from baton.kernels.moe.gemm import Fp8ExpertWeights, Tiles, experts_grouped
from baton.kernels.moe.gemm_masked import MaskedTiles
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.moe import ExpertWeights, experts

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Sizes of a layer's experts."""

    name: str
    num_experts: int
    num_chosen: int
    inner_size: int
    hidden: int

    def num_bytes(self, num_hit: int, is_fp8: bool) -> int:
        """Bytes of the weights of `num_hit` experts, with their scales."""
        num_values = num_hit * 3 * self.inner_size * self.hidden
        return num_values + num_values // 16384 * 4 if is_fp8 else 2 * num_values


SHAPES = (MoEShape("30B", 128, 8, 768, 2048), MoEShape("35B", 256, 8, 512, 2048))
TINY = MoEShape("tiny", 4, 2, 128, 128)
BATCHES = (1, 8, 16, 32, 64, 256)
CHUNKS = (1024, 4096)
MASKED = ((128, 1536, 2048), (32, 4096, 7168))


def _experts(shape: MoEShape, num_tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    order_TE = torch.rand(num_tokens, shape.num_experts, generator=generator).argsort(dim=1)
    return order_TE[:, : shape.num_chosen].contiguous().to(device)


def _num_hit(shape: MoEShape, num_tokens: int) -> int:
    """Number of experts that the first set hits; the other sets differ by a few."""
    return int(_experts(shape, num_tokens, torch.device("cpu"), 0).unique().numel())


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make weight values expert by expert, because all of them in float32 would not fit beside the sets."""
    out = torch.empty(list(shape), dtype=dtype, device=device)
    for part in out:
        part.copy_(torch.randn(part.shape, device=device) / (1 if dtype == FP8 else math.sqrt(shape[-1])))
    return out


def _scale(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Scales for normally distributed float8 values, so that results have the magnitude of their inputs."""
    num_experts, num_outputs, num_inputs = shape
    groups = (num_experts, -(-num_outputs // 128), num_inputs // 128)
    return torch.full(groups, 1 / math.sqrt(num_inputs), device=device)


def _weights(shape: MoEShape, is_fp8: bool, device: torch.device) -> ExpertWeights | Fp8ExpertWeights:
    gate_up = (shape.num_experts, 2 * shape.inner_size, shape.hidden)
    down = (shape.num_experts, shape.hidden, shape.inner_size)
    if not is_fp8:
        return ExpertWeights(_random(gate_up, torch.bfloat16, device), _random(down, torch.bfloat16, device))
    return Fp8ExpertWeights(
        _random(gate_up, FP8, device), _scale(gate_up, device), _random(down, FP8, device), _scale(down, device)
    )


def _inputs(
    shape: MoEShape, num_tokens: int, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TD = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
    weight_TK = torch.rand(num_tokens, shape.num_chosen, device=device)
    return x_TD, weight_TK, _experts(shape, num_tokens, device, seed)


def _masked_moe(
    weights: Fp8ExpertWeights, x_EMD: torch.Tensor, masked_m_E: torch.Tensor, inner_EMI: torch.Tensor
) -> None:
    """Run the masked form's two calls, each with its quantization; the activation between them is left out."""
    moe_gemm_masked.moe_gemm_masked(x_EMD, masked_m_E, weights.gate_up_EJD, b_scale=weights.gate_up_scale)
    moe_gemm_masked.moe_gemm_masked(inner_EMI, masked_m_E, weights.down_EDI, b_scale=weights.down_scale)


def _prepare(shape: MoEShape, num_tokens: int, is_fp8: bool, device: torch.device, num_sets: int) -> Systems:
    other = (
        ["masked" if is_fp8 else "torch"] if num_tokens <= max(BATCHES) else []
    )  # both compute far more than requested
    systems: dict[str, list[Call]] = {name: [] for name in ("ours", "invariant", *other)}
    weights = _weights(shape, is_fp8, device)  # sets differ by the experts that they hit
    others: list[BaselineExperts] = []
    for seed in range(num_sets):
        x_TD, weight_TK, expert_TK = _inputs(shape, num_tokens, device, seed)
        others.append(_for_others(x_TD, weight_TK, expert_TK, weights))
        if shape is TINY:
            held = _half(weights)
            systems.setdefault("of_a_rank", []).append(partial(experts_grouped, x_TD, weight_TK, expert_TK, held))
        systems["ours"].append(partial(experts_grouped, x_TD, weight_TK, expert_TK, weights))
        systems["invariant"].append(partial(experts_grouped, x_TD, weight_TK, expert_TK, weights, invariant=True))
        if not other:
            continue
        if isinstance(weights, Fp8ExpertWeights):
            count_E = torch.bincount(expert_TK.flatten(), minlength=shape.num_experts)
            num_rows = max(16, int(count_E.max()))
            x_EMD = torch.randn(shape.num_experts, num_rows, shape.hidden, device=device).bfloat16()
            inner_EMI = torch.randn(shape.num_experts, num_rows, shape.inner_size, device=device).bfloat16()
            systems["masked"].append(partial(_masked_moe, weights, x_EMD, count_E.int(), inner_EMI))
        else:
            # Without these kernels a captured step computes every expert on every row.
            systems["torch"].append(partial(experts, x_TD, weight_TK, expert_TK, weights, False, ALONE))
    return systems | (vllm_moe(others) if device.type == "cuda" else {})


def _half(weights: ExpertWeights | Fp8ExpertWeights) -> ExpertWeights | Fp8ExpertWeights:
    """The experts of the last of two ranks, whole: another specialization of the kernels, for memory checks."""
    held = HeldExperts.of_rank(TINY.num_experts, 1, 2)
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    own: dict[str, Any] = {
        name: value[held.first :] for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return replace(weights, **own, held=held)


def _for_others(
    x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor, weights: ExpertWeights | Fp8ExpertWeights
) -> BaselineExperts:
    scales = (weights.gate_up_scale, weights.down_scale) if isinstance(weights, Fp8ExpertWeights) else (None, None)
    return BaselineExperts(
        rows_MK=x_TD,
        gate_up_ENK=weights.gate_up_EJD,
        gate_up_scales=scales[0],
        down_EKI=weights.down_EDI,
        down_scales=scales[1],
        weights=weight_TK,
        experts=expert_TK.int(),
    )


def _case(shape: MoEShape, num_tokens: int, is_fp8: bool) -> KernelCase:
    num_hit = _num_hit(shape, num_tokens)
    num_bytes = shape.num_bytes(num_hit, is_fp8)
    kind = "fp8" if is_fp8 else "bf16"
    return KernelCase(
        kernel="experts_grouped",
        shape=f"{shape.name} {kind} B={num_tokens} E={shape.num_experts} K={shape.num_chosen} hit={num_hit}",
        num_bytes=num_bytes,
        num_flops=6 * num_tokens * shape.num_chosen * shape.inner_size * shape.hidden,
        flops_dtype=kind,
        is_read=True,
        set_bytes=num_bytes,
        prepare=partial(_prepare, shape, num_tokens, is_fp8),
        only_gpu=shape is not TINY,
    )


def _masked_inputs(
    shape_ENK: tuple[int, int, int], num_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_experts, _, num_inputs = shape_ENK
    a_EMK = torch.randn(num_experts, num_rows, num_inputs, device=device).bfloat16()
    masked_m_E = torch.full((num_experts,), num_rows, dtype=torch.int32, device=device)
    return a_EMK, masked_m_E, _random(shape_ENK, FP8, device), _scale(shape_ENK, device)


def _quantized(a_EMK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale_EMG = quantize_reference(a_EMK)
    return values, scale_EMG.transpose(1, 2).contiguous()


def _prepare_masked(
    shape_ENK: tuple[int, int, int], num_rows: int, device: torch.device, num_sets: int
) -> dict[str, list[Call]]:
    systems: dict[str, list[Call]] = {name: [] for name in ("ours", "swap_off", "with_quantization", "invariant")}
    others: list[BlockScaled] = []
    for _ in range(num_sets):
        a_EMK, masked_m_E, b_ENK, b_scale = _masked_inputs(shape_ENK, num_rows, device)
        values, a_scale = _quantized(a_EMK)
        gemm = partial(moe_gemm_masked.moe_gemm_masked, masked_m_E=masked_m_E, b_ENK=b_ENK, b_scale=b_scale)
        systems["with_quantization"].append(partial(gemm, a_EMK))
        gemm = partial(gemm, values, a_scale_EGM=a_scale)
        systems["ours"].append(gemm)
        systems["swap_off"].append(partial(gemm, swap_ab=False))
        systems["invariant"].append(partial(gemm, invariant=True))
        others.append(_masked_for_others(values, a_scale.transpose(1, 2), b_ENK, b_scale, masked_m_E))
    return systems | deep_gemm_masked(others, num_rows)


def _masked_for_others(
    values_EMK: torch.Tensor,
    scale_EMG: torch.Tensor,
    b_ENK: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m_E: torch.Tensor,
) -> BlockScaled:
    """Pad to 128 rows per expert, as in exchange buffers: baselines' tiles may be that high."""
    num_experts, num_rows, _ = values_EMK.shape
    padded = [
        torch.zeros(num_experts, max(128, num_rows), part.shape[2], dtype=part.dtype, device=part.device)
        for part in (values_EMK, scale_EMG)
    ]
    for whole, part in zip(padded, (values_EMK, scale_EMG), strict=True):
        whole[:, :num_rows].copy_(part)
    return BlockScaled(
        rows_MK=padded[0], row_scales=padded[1], weights_NK=b_ENK, weight_scales=b_scale, num_rows_E=masked_m_E
    )


def _masked_case(shape_ENK: tuple[int, int, int], num_rows: int, only_gpu: bool = True) -> KernelCase:
    num_experts, num_outputs, num_inputs = shape_ENK
    weight_bytes = math.prod(shape_ENK)
    return KernelCase(
        kernel="moe_gemm_masked",
        shape=f"E={num_experts} N={num_outputs} K={num_inputs} rows={num_rows} hit={num_experts}",
        num_bytes=weight_bytes + num_experts * num_rows * (num_inputs + 2 * num_outputs),
        num_flops=2 * num_rows * weight_bytes,
        flops_dtype="fp8",
        is_read=True,
        set_bytes=weight_bytes,
        prepare=partial(_prepare_masked, shape_ENK, num_rows),
        only_gpu=only_gpu,
    )


def cases() -> list[KernelCase]:
    """Decode batches and prefill chunks of both models in both dtypes, and the anchors' masked GEMMs."""
    found = [_case(TINY, 3, True), _case(TINY, 3, False), _masked_case((2, 128, 128), 4, only_gpu=False)]
    found += [_case(shape, batch, True) for shape in SHAPES for batch in BATCHES]
    found += [_case(shape, batch, False) for shape in SHAPES for batch in (1, 16, 64)]
    found += [_case(shape, length, is_fp8) for shape in SHAPES for is_fp8 in (True, False) for length in CHUNKS]
    found += [_masked_case(shape_ENK, num_rows) for shape_ENK in MASKED for num_rows in (4, 16, 64)]
    return found


def _candidates(num_tokens: int, is_fp8: bool) -> list[dict[str, object]]:
    """Rows of a block by how many an expert gets; then the pipeline depth of both GEMMs, and warps."""
    lengths = (16,) if num_tokens <= 64 else (16, 32)
    if is_fp8:  # a program has a whole group of 128 columns of the intermediate size
        gated = [(128, 4, 3), (128, 8, 3), (128, 4, 5), (128, 8, 5), (128, 4, 2)]
        down = [(128, 4, 3), (128, 4, 4), (64, 4, 4), (64, 4, 5)]
    else:
        gated = [(64, 4, 3), (64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 8, 3)]
        down = [(128, 4, 3), (128, 4, 4), (64, 4, 4), (64, 4, 6)]
    return [asdict(Tiles(length, *one, *other)) for length, one, other in itertools.product(lengths, gated, down)]


def _prepare_point(
    shape: MoEShape, num_tokens: int, is_fp8: bool, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    weights, tiles = _weights(shape, is_fp8, device), moe_gemm.tiles_of(options)
    inputs = [_inputs(shape, num_tokens, device, seed) for seed in range(num_sets)]
    return [partial(experts_grouped, *its, weights, tiles=tiles) for its in inputs]


def _masked_candidates(num_rows: int) -> list[dict[str, object]]:
    rows = max(16, num_rows)
    found = []
    for outputs, warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 5)):
        if warps * 16 > outputs:
            continue
        most = moe_gemm_masked.max_programs(rows, outputs, stages)
        found += [
            asdict(MaskedTiles(rows, outputs, warps, stages, number)) for number in sorted({most, max(1, most - 1)})
        ]
    return found


def _prepare_masked_point(
    shape_ENK: tuple[int, int, int],
    num_rows: int,
    device: torch.device,
    num_sets: int,
    options: Mapping[str, object],
) -> Sequence[Call]:
    calls = []
    for _ in range(num_sets):
        a_EMK, masked_m_E, b_ENK, b_scale = _masked_inputs(shape_ENK, num_rows, device)
        values, a_scale = _quantized(a_EMK)
        gemm = partial(moe_gemm_masked.moe_gemm_masked, values, masked_m_E, b_ENK, swap_ab=True)
        tiles = moe_gemm_masked.tiles_of(options)
        calls.append(partial(gemm, a_scale_EGM=a_scale, b_scale=b_scale, tiles=tiles))
    return calls


def tuning() -> list[TuningPoint]:
    """Both forms, at the sizes where different options may be best."""
    found = [
        TuningPoint(
            kernel=moe_gemm.KERNEL,
            shape=moe_gemm.shape_name(shape.num_experts, shape.inner_size, shape.hidden, is_fp8),
            size=num_tokens,
            candidates=_candidates(num_tokens, is_fp8),
            set_bytes=shape.num_bytes(_num_hit(shape, num_tokens), is_fp8),
            prepare=partial(_prepare_point, shape, num_tokens, is_fp8),
        )
        for shape, is_fp8, num_tokens in itertools.product(SHAPES, (True, False), (1, 8, 64, 256))
    ]
    found += [
        TuningPoint(
            kernel=moe_gemm_masked.KERNEL,
            shape=moe_gemm_masked.shape_name(shape_ENK, True),
            size=num_rows,
            candidates=_masked_candidates(num_rows),
            set_bytes=math.prod(shape_ENK),
            prepare=partial(_prepare_masked_point, shape_ENK, num_rows),
        )
        for shape_ENK, num_rows in itertools.product(MASKED, (16, 32, 64))
    ]
    return found
