"""The parts of a decoder layer that are neither attention nor experts, and where parts get their weights from.

Legend: T tokens, D hidden size, I intermediate size.
"""

import math
from collections import Counter
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
from baton.model.fp8_scheme import BLOCK_LEN, Fp8Scheme, ScaleKind
from baton.model.fp8_tensors import NO_FLOAT8, NO_PRODUCT, Fp8Tensors, why_wide
from baton.model.random_weights import RandomTensor
from baton.model.tensor_spec import KV_SCALES, mlp_names
from baton.model.weights import Cut, ReadBuffer, StoredTensor


def whole(name: str) -> Cut | None:
    """Nothing is cut."""
    del name
    return None


@dataclass(slots=True)
class WeightSource:
    """Reads tensors, or what `cut` says of each, as the parts of the model are built, and reports how far it is.

    Attributes:
        scheme: of the weights that are stored in float8, if any are.
        float8: which ones these are.
        num_kept: of them, how many are multiplied with as they are stored.
        num_dequantized: the others, by why they are not.
    """

    stored: Mapping[str, StoredTensor | RandomTensor]
    dtype: torch.dtype
    device: torch.device
    num_total: int
    on_progress: Callable[[int, int], None] | None = None
    cut: Callable[[str], Cut | None] = whole
    quantization: Quantization = Quantization.NONE
    kv_dtype: KVDtype = KVDtype.AUTO
    scheme: Fp8Scheme | None = None
    float8: Fp8Tensors = NO_FLOAT8
    num_done: int = field(default=0, init=False)
    num_kept: int = field(default=0, init=False)
    num_dequantized: Counter[str] = field(default_factory=Counter, init=False)
    _buffer: ReadBuffer = field(default_factory=ReadBuffer, init=False)

    def take(self, *names: str) -> torch.Tensor:
        """One tensor, or several one above the other (fused projections)."""
        return self._take(names, NO_PRODUCT)

    def take_product(self, *names: str) -> Weight:
        """The same of a weight that rows are multiplied with: in float8 if it is stored so, or the model is quantized.

        Raises:
            ModelUnsupported: its columns, or this rank's part of them, cannot be quantized; a scale is not finite.
        """
        if any(name in self.float8.scales for name in names):
            why = self._why_wide(names, whole=False)
            return self._take(names, why) if why else self._take_float8(names)
        weight_NK = self.take(*names)
        return weight_NK if self.quantization is Quantization.NONE else _quantized(weight_NK, names[0])

    def take_stacked(self, groups: Sequence[Sequence[str]], why: str = "") -> torch.Tensor:
        """[len(groups), ...]: the tensors of each group one above the other, the groups stacked; `why` no float8."""
        stacked: torch.Tensor | None = None
        for index, names in enumerate(groups):
            part = self._take(names, why)
            if stacked is None:
                stacked = part.new_empty(len(groups), *part.shape)
            stacked[index] = part
        assert stacked is not None
        return stacked

    def take_experts(self, gate_up: Sequence[Sequence[str]], down: Sequence[Sequence[str]]) -> Experts:
        """Stacked experts, each by the names of its gate and up projections and of its down projection.

        Raises:
            ModelUnsupported: their sizes, or this rank's part of them, cannot be quantized; a scale is not finite.
        """
        groups = [*gate_up, *down]
        if any(name in self.float8.scales for names in groups for name in names):
            whys = [why for names in groups if (why := self._why_wide(names, whole=True))]
            if whys:
                return ExpertWeights(self.take_stacked(gate_up, whys[0]), self.take_stacked(down, whys[0]))
            return Fp8ExpertWeights(*self._stack_float8(gate_up), *self._stack_float8(down))
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
        key_scale, value_scale = (self._scale([f"{prefix}.{name}" for name in names]) for names in KV_SCALES)
        return key_scale, value_scale

    def _scale(self, names: Sequence[str]) -> torch.Tensor:
        """The first of these that is stored."""
        name = next((name for name in names if name in self.stored), None)
        if name is None:
            return torch.ones(1, device=self.device)
        scale = self.stored[name].read(None).to(torch.float32).reshape(1)
        if not 0 < float(scale) < math.inf:
            raise ModelUnsupported(f"{name} = {float(scale):g} is no scale", option=name, value=float(scale))
        return scale.to(self.device)

    def _take_quantized(self, groups: Sequence[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [len(groups), ...] and scales of stacked weights."""
        parts = [_quantized(self.take(*names), names[0]) for names in groups]
        return torch.stack([part.values_NK for part in parts]), torch.stack([part.scales_BG for part in parts])

    def _take(self, names: Sequence[str], why: str) -> torch.Tensor:
        """Tensors one above the other in the model's dtype; `why` says why those in float8 do not stay so."""
        parts = [self._dequantized(name, why) if name in self.float8.scales else self._read(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._moved(name, self.dtype)
        self._count()
        return tensor

    def _moved(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part on the device, in this dtype or as it is stored."""
        stored = self.stored[name]
        is_copied = self.device.type != "cpu" or dtype not in (None, stored.dtype)  # else it stays where it was read
        tensor = stored.read(self.cut(name), self._buffer if is_copied else None).to(self.device)
        return tensor if dtype is None else tensor.to(dtype)  # on the device, which is faster at it

    def _count(self) -> None:
        self.num_done += 1
        if self.on_progress is not None:
            self.on_progress(self.num_done, self.num_total)

    def _why_wide(self, names: Sequence[str], *, whole: bool) -> str:
        """Why a product's weights do not stay in float8; "" if they do. `whole`: the last one has whole blocks, too."""
        assert self.scheme is not None
        shapes = {name: self._shape(name) for name in names}
        dtype = str(self.dtype).removeprefix("torch.")
        return why_wide(self.scheme, self.float8.scales, shapes, dtype, whole=whole)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of this rank's part."""
        shape, cut = self.stored[name].shape, self.cut(name)
        return shape if cut is None else (*shape[: cut.dim], cut.count, *shape[cut.dim + 1 :])

    def _take_float8(self, names: Sequence[str]) -> Fp8Weight:
        """Weights one above the other as they are stored, with a scale for each block."""
        values, blocks = [], []
        for name in names:
            values.append(self._moved(name))
            blocks.append(self._block_scales(name))
            self.num_kept += 1
            self._count()
        return Fp8Weight.of(torch.cat(values), torch.cat(blocks))

    def _stack_float8(self, groups: Sequence[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [len(groups), ...] and scales of stacked weights."""
        parts = [self._take_float8(names) for names in groups]
        return torch.stack([part.values_NK for part in parts]), torch.stack([part.scales_BG for part in parts])

    def _weight_scale(self, name: str) -> torch.Tensor:
        """The scale of a float8 weight as it is stored, float32, on the device.

        Raises:
            ModelUnsupported: a number of it is negative or not finite.
        """
        scale_name = self.float8.scales[name].name
        scale = self.stored[scale_name].read(None).to(torch.float32)
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            message = f"{scale_name} holds a number that is no scale: negative or not finite"
            raise ModelUnsupported(message, option=scale_name, value=str(float(scale.min())))
        return scale.to(self.device)  # judged before, on the host

    def _block_scales(self, name: str) -> torch.Tensor:
        """Float32 [ceil(N / 128), K / 128] of this rank's part, whose blocks are whole."""
        scale, cut = self._weight_scale(name), self.cut(name)
        if self.float8.scales[name].kind is ScaleKind.TENSOR:
            num_rows, num_columns = self._shape(name)
            return scale.reshape(1, 1).expand(-(-num_rows // BLOCK_LEN), num_columns // BLOCK_LEN)
        return scale if cut is None else scale.narrow(cut.dim, cut.first // BLOCK_LEN, -(-cut.count // BLOCK_LEN))

    def _dequantized(self, name: str, why: str) -> torch.Tensor:
        """This rank's part of a float8 weight times its scales, rounded once to the model's dtype."""
        wide = torch.promote_types(self.dtype, torch.float32)
        cut, scale = self.cut(name), self._weight_scale(name).to(wide)
        match self.float8.scales[name].kind:
            case ScaleKind.TENSOR:
                scale_NK = scale.reshape(1, 1)
            case ScaleKind.CHANNEL:
                scale_NK = scale.reshape(-1, 1)
                scale_NK = scale_NK.narrow(0, cut.first, cut.count) if cut is not None and cut.dim == 0 else scale_NK
            case ScaleKind.BLOCK:
                scale_NK = scale
                for dim, length in enumerate(self.stored[name].shape):  # a part need not begin with a block
                    scale_NK = scale_NK.repeat_interleave(BLOCK_LEN, dim).narrow(dim, 0, length)
                    if cut is not None and cut.dim == dim:
                        scale_NK = scale_NK.narrow(dim, cut.first, cut.count)
        values_NK = self._moved(name, wide)
        self.num_dequantized[why] += 1
        self._count()
        return (values_NK * scale_NK).to(self.dtype)


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
        gate, up, down = mlp_names(prefix)
        self.gate_up_JD = source.take_product(gate, up)
        self.down_DI = source.take_product(down)
        self._ops = ops

    def __call__(self, x_TD: torch.Tensor, *, may_wait: bool) -> torch.Tensor:
        """[T, D] -> [T, D]; never waits for the device, whatever `may_wait` allows."""
        inner_TI = self._ops.silu_mul(self._ops.linear(x_TD, self.gate_up_JD))
        return self._ops.linear_inner(inner_TI, self.down_DI)
