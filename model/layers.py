"""The parts of a decoder layer that are neither attention nor experts, and where parts get their weights from.

Legend: T tokens, D hidden size, I intermediate size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.errors import ModelUnsupported
from baton.core.numerics import KVDtype, Quantization
from baton.kernels.gemm.fp8_weight import Fp8Weight, quantize_weight
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.moe import ExpertWeights
from baton.kernels.ops import Experts, Ops, Weight
from baton.model.random_weights import RandomTensor
from baton.model.tensor_spec import KV_SCALES
from baton.model.weights import Cut, StoredTensor


def whole(name: str) -> Cut | None:
    """Nothing is cut."""
    del name
    return None


@dataclass(slots=True)
class WeightSource:
    """Reads tensors, or what `cut` says of each, as the parts of the model are built, and reports how far it is."""

    stored: Mapping[str, StoredTensor | RandomTensor]
    dtype: torch.dtype
    device: torch.device
    num_total: int
    on_progress: Callable[[int, int], None] | None = None
    cut: Callable[[str], Cut | None] = whole
    quantization: Quantization = Quantization.NONE
    kv_dtype: KVDtype = KVDtype.AUTO
    num_done: int = field(default=0, init=False)

    def take(self, *names: str) -> torch.Tensor:
        """One tensor, or several one above the other (fused projections)."""
        parts = [self._read(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take_product(self, *names: str) -> Weight:
        """The same of a weight that rows are multiplied with, quantized if the model is.

        Raises:
            ModelUnsupported: its columns, or this rank's part of them, cannot be quantized.
        """
        weight_NK = self.take(*names)
        return weight_NK if self.quantization is Quantization.NONE else _quantized(weight_NK, names[0])

    def take_stacked(self, groups: Sequence[Sequence[str]]) -> torch.Tensor:
        """[len(groups), ...]: the tensors of each group one above the other, the groups stacked."""
        stacked: torch.Tensor | None = None
        for index, names in enumerate(groups):
            part = self.take(*names)
            if stacked is None:
                stacked = part.new_empty(len(groups), *part.shape)
            stacked[index] = part
        assert stacked is not None
        return stacked

    def take_experts(self, gate_up: Sequence[Sequence[str]], down: Sequence[Sequence[str]]) -> Experts:
        """Stacked experts, each by the names of its gate and up projections and of its down projection.

        Raises:
            ModelUnsupported: their sizes, or this rank's part of them, cannot be quantized.
        """
        if self.quantization is Quantization.NONE:
            return ExpertWeights(gate_up_EJD=self.take_stacked(gate_up), down_EDI=self.take_stacked(down))
        gate_up_EJD, gate_up_scale = self._take_quantized(gate_up)
        down_EDI, down_scale = self._take_quantized(down)
        return Fp8ExpertWeights(gate_up_EJD, gate_up_scale, down_EDI, down_scale)

    def take_kv_scales(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of an attention layer's keys and values, float32 [1] each, if its KV is float8; 1 if none is stored.

        Raises:
            ModelUnsupported: one is not above 0.
        """
        if self.kv_dtype is not KVDtype.FP8:
            return None
        key_scale, value_scale = (self._scale(f"{prefix}.{name}") for name in KV_SCALES)
        return key_scale, value_scale

    def _scale(self, name: str) -> torch.Tensor:
        if name not in self.stored:
            return torch.ones(1, device=self.device)
        scale = self.stored[name].read(None).to(torch.float32).reshape(1)
        if not 0 < float(scale) < math.inf:
            raise ModelUnsupported(f"{name} = {float(scale):g} is no scale", option=name, value=float(scale))
        return scale.to(self.device)

    def _take_quantized(self, groups: Sequence[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [len(groups), ...] and scales of stacked weights."""
        parts = [_quantized(self.take(*names), names[0]) for names in groups]
        return torch.stack([part.values_NK for part in parts]), torch.stack([part.scales_BG for part in parts])

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.stored[name].read(self.cut(name)).to(device=self.device, dtype=self.dtype)
        self.num_done += 1
        if self.on_progress is not None:
            self.on_progress(self.num_done, self.num_total)
        return tensor


def _quantized(weight_NK: torch.Tensor, name: str) -> Fp8Weight:
    num_inputs = weight_NK.shape[1]
    if num_inputs % GROUP_LEN:
        message = f"--quantization fp8 scales {GROUP_LEN} inputs together; {name} has {num_inputs} at a rank"
        raise ModelUnsupported(message, option="quantization", value=Quantization.FP8.value)
    return quantize_weight(weight_NK)


class RMSNorm:
    """A norm with its weight."""

    def __init__(self, source: WeightSource, prefix: str, eps: float, ops: Ops) -> None:
        self.weight_D = source.take(f"{prefix}.weight")
        self._eps = eps
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return self._ops.rms_norm(x, self.weight_D, self._eps)

    def of_sum(self, x_TD: torch.Tensor, added_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + added, and the sum itself, rounded to its dtype before it is normalised."""
        if added_TD is None:
            return self(x_TD), x_TD
        return self._ops.add_rms_norm(x_TD, added_TD, self.weight_D, self._eps)


class MLP:
    """SwiGLU with gate and up projections in one product."""

    def __init__(self, source: WeightSource, prefix: str, ops: Ops) -> None:
        self.gate_up_JD = source.take_product(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.down_DI = source.take_product(f"{prefix}.down_proj.weight")
        self._ops = ops

    def __call__(self, x_TD: torch.Tensor, *, may_wait: bool) -> torch.Tensor:
        """[T, D] -> [T, D]; never waits for the device, whatever `may_wait` allows."""
        inner_TI = self._ops.silu_mul(self._ops.linear(x_TD, self.gate_up_JD))
        return self._ops.linear_inner(inner_TI, self.down_DI)
