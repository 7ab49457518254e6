"""The parts of a decoder layer other than attention and experts, and the source that parts read their weights from.

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
from baton.kernels.moe.expert_slots import RoutedRows
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.moe import ExpertWeights
from baton.kernels.moe.norm_route import RoutedNorm
from baton.kernels.moe.summands import Added
from baton.kernels.ops import Experts, Ops, Rows, Weight
from baton.kernels.tiles import wide_dtype
from baton.model.checkpoint.fp8_scheme import BLOCK_LEN, Fp8Scheme, ScaleKind
from baton.model.checkpoint.fp8_tensors import NO_FLOAT8, NO_GEMM, Fp8Tensors, why_wide
from baton.model.checkpoint.random_weights import RandomTensor
from baton.model.checkpoint.tensor_reader import TensorRead, TensorReader
from baton.model.checkpoint.weights import Cut, StoredTensor
from baton.model.tensor_spec import KV_SCALES, mlp_names

_NUM_WIDE = 8  # experts that are read at once before they are quantized


def whole(name: str) -> Cut | None:
    """None: a rank reads the whole tensor."""
    del name
    return None


@dataclass(slots=True)
class WeightSource:
    """Reads tensors, or the part that `cut` gives, as the parts of the model are built, and reports progress.

    Attributes:
        scheme: scheme of the float8 weights, if there are any.
        float8: which weights are float8.
        held: which experts of each layer are read, whole; None: all, or a part of each.
        num_kept: float8 weights that GEMMs use as stored.
        num_dequantized: the other float8 weights, counted by reason.
    """

    stored: Mapping[str, StoredTensor | RandomTensor]
    reader: TensorReader
    dtype: torch.dtype
    device: torch.device
    num_total: int
    on_progress: Callable[[int, int], None] | None = None
    cut: Callable[[str], Cut | None] = whole
    quantization: Quantization = Quantization.NONE
    kv_dtype: KVDtype = KVDtype.AUTO
    scheme: Fp8Scheme | None = None
    float8: Fp8Tensors = NO_FLOAT8
    held: HeldExperts | None = None
    num_done: int = field(default=0, init=False)
    num_kept: int = field(default=0, init=False)
    num_dequantized: Counter[str] = field(default_factory=Counter, init=False)

    def take(self, *names: str) -> torch.Tensor:
        """Read one tensor, or several stacked by rows (fused projections)."""
        return self._take(names, NO_GEMM)

    def take_wide(self, *names: str) -> torch.Tensor:
        """Same as `take` in the wide dtype, whatever the model's, for weights that a narrower one would round."""
        return self._take(names, NO_GEMM, wide_dtype(self.dtype))

    def take_exact(self, name: str) -> torch.Tensor:
        """Same as `take`, but in the wide dtype if the model's would round the stored numbers."""
        stored = self.stored[name]
        dtype = stored.dtype
        is_exact = dtype is not None and torch.promote_types(dtype, self.dtype) == self.dtype
        return self.take(name) if is_exact and name not in self.float8.scales else self.take_wide(name)

    def take_linear(self, *names: str) -> Weight:
        """Read a GEMM weight: in float8 if it is stored so, or if the model is quantized.

        Raises:
            ModelUnsupported: its columns, or this rank's part of them, cannot be quantized; a scale is not finite.
        """
        if any(name in self.float8.scales for name in names):
            why = self._why_wide(names, whole=False)
            return self._take(names, why) if why else self._take_float8(names)
        weight_NK = self.take(*names)
        return weight_NK if self.quantization is Quantization.NONE else _quantized(weight_NK, names[0])

    def take_stacked(
        self, groups: Sequence[Sequence[str]], why: str = "", into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[len(groups), ...]: each group's tensors stacked by rows, the groups stacked; `why` they are not float8.

        They are stacked in the memory of `into`, if it is given.
        """
        shape = (len(groups), *self.stack_shape(groups[0]))
        stacked = self.new(shape) if into is None else into.view(shape)
        self._fill(list(zip(groups, stacked, strict=True)), why)
        return stacked

    def may_stack(self, names: Sequence[tuple[str, str, str]], other: tuple[str, str, str]) -> bool:
        """Whether another MLP may be stacked with experts: they have one size, and would get one form by themselves.

        Args:
            names: gate, up and down projections of the experts.
            other: those of the other MLP.
        """
        if len({tuple(self._shape(name) for name in one) for one in (*names, other)}) > 1:
            return False
        stored = {name in self.float8.scales for one in (*names, other) for name in one}
        if stored == {True}:
            whys = {self._why_wide(part, whole=True) for one in (*names, other) for part in (one[:2], one[2:])}
            return len(whys | {self._why_wide(part, whole=False) for part in (other[:2], other[2:])}) == 1
        return stored == {False}

    def are_wide(self, names: Sequence[tuple[str, str, str]]) -> bool:
        """Whether `take_experts` gives weights in the model's dtype."""
        if any(name in self.float8.scales for one in names for name in one):
            return any(self._why_wide(part, whole=True) for one in names for part in (one[:2], one[2:]))
        return self.quantization is Quantization.NONE

    def take_experts(self, names: Sequence[tuple[str, str, str]], into: torch.Tensor | None = None) -> Experts:
        """Stacked experts of a layer that this rank holds, from the names of all: gate, up and down projections.

        Args:
            names: of all experts.
            into: memory for gate and up projections, unless they are float8.

        Raises:
            ModelUnsupported: their sizes, or this rank's part of them, cannot be quantized; a scale is not finite.
        """
        numbers = range(len(names)) if self.held is None else self.held.numbers
        gate_up, down = [names[at][:2] for at in numbers], [names[at][2:] for at in numbers]
        groups = [part for one in names for part in (one[:2], one[2:])]  # of all: ranks hold experts in the same form
        if any(name in self.float8.scales for names in groups for name in names):
            whys = [why for names in groups if (why := self._why_wide(names, whole=True))]
            if whys:
                gate_up_EJD = self.take_stacked(gate_up, whys[0], into)
                return ExpertWeights(gate_up_EJD, self.take_stacked(down, whys[0]), self.held)
            tensors = *self._stack_float8(gate_up), *self._stack_float8(down)
            return Fp8ExpertWeights(*tensors, self.held, self._rounds_scales)
        if self.quantization is Quantization.NONE:
            return ExpertWeights(self.take_stacked(gate_up, into=into), self.take_stacked(down), self.held)
        gate_up_EJD, gate_up_scale = self._take_quantized(gate_up)
        down_EDI, down_scale = self._take_quantized(down)
        return Fp8ExpertWeights(gate_up_EJD, gate_up_scale, down_EDI, down_scale, self.held)

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
        """The first of these scales that is stored."""
        name = next((name for name in names if name in self.stored), None)
        if name is None:
            return torch.ones(1, device=self.device)
        scale = self.stored[name].read().to(torch.float32).reshape(1)
        if not 0 < float(scale) < math.inf:
            raise ModelUnsupported(f"{name} = {float(scale):g} is no scale", option=name, value=float(scale))
        return scale.to(self.device)

    def _take_quantized(self, groups: Sequence[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [len(groups), ...] and scales of stacked weights; only a few are wide at the same time."""
        values, scales = [], []
        for at in range(0, len(groups), _NUM_WIDE):
            some = groups[at : at + _NUM_WIDE]
            parts = [_quantized(wide, names[0]) for names, wide in zip(some, self.take_stacked(some), strict=True)]
            values.append(torch.stack([part.values_NK for part in parts]))
            scales.append(torch.stack([part.scales_BG for part in parts]))
        return torch.cat(values), torch.cat(scales)

    def _take(self, names: Sequence[str], why: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors stacked by rows in the model's dtype; `why` says why float8 ones are dequantized."""
        target = self.new(self.stack_shape(names), dtype)
        self._fill([(names, target)], why)
        return target

    def _fill(self, stacks: Sequence[tuple[Sequence[str], torch.Tensor]], why: str | None) -> None:
        """Read stacks of tensors into their targets; `why` float8 ones are dequantized; None: they stay float8.

        Raises:
            ModelUnsupported: a number of a scale is negative or not finite.
        """
        parts = []
        for names, stack in stacks:
            lengths = [self._shape(name)[0] for name in names]
            for name, target in zip(names, stack.split(lengths), strict=True):
                stored, cut = self.stored[name], self.cut(name)
                if isinstance(stored, RandomTensor):
                    target.copy_(stored.read(cut))
                    continue
                is_wide = name in self.float8.scales and why is not None
                scale = self._row_scales(name) if is_wide else None
                parts.append(TensorRead(stored=stored, name=name, target=target, cut=cut, scale=scale))
        self.reader.fill(parts)
        for name in (name for names, _ in stacks for name in names):
            if name in self.float8.scales and why is not None:
                self.num_dequantized[why] += 1
            elif name in self.float8.scales:
                self.num_kept += 1
            self.num_done += 1
            if self.on_progress is not None:
                self.on_progress(self.num_done, self.num_total)

    def new(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory for weights, in the model's dtype by default."""
        return torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)

    def stack_shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """Shape of this rank's parts of tensors stacked by rows."""
        shapes = [self._shape(name) for name in names]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _why_wide(self, names: Sequence[str], *, whole: bool) -> str:
        """Why a GEMM's weights cannot stay float8; "" if they can. `whole`: even the last one must be whole blocks."""
        assert self.scheme is not None
        shapes = {name: self._shape(name) for name in names}
        dtype = str(self.dtype).removeprefix("torch.")
        return why_wide(self.scheme, self.float8.scales, shapes, dtype, whole=whole)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Shape of this rank's part."""
        shape, cut = self.stored[name].shape, self.cut(name)
        return shape if cut is None else (*shape[: cut.dim], cut.count, *shape[cut.dim + 1 :])

    def _take_float8(self, names: Sequence[str]) -> Fp8Weight:
        """Weights stacked by rows as they are stored, with a scale per block."""
        values, scales = self._stack_float8([names])
        return Fp8Weight.of(values[0], scales[0], ue8m0=self._rounds_scales)

    @property
    def _rounds_scales(self) -> bool:
        assert self.scheme is not None
        return self.scheme.ue8m0

    def _stack_float8(self, groups: Sequence[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [len(groups), ...] and scales of stacked weights."""
        scales = torch.stack([torch.cat([self._block_scales(name) for name in names]) for names in groups])
        values = self.new((len(groups), *self.stack_shape(groups[0])), torch.float8_e4m3fn)
        self._fill(list(zip(groups, values, strict=True)), None)
        return values, scales

    def _weight_scale(self, name: str) -> torch.Tensor:
        """The scale of a float8 weight as it is stored, float32, on the device.

        Raises:
            ModelUnsupported: a number of it is negative or not finite.
        """
        scale_name = self.float8.scales[name].name
        scale = self.stored[scale_name].read().to(torch.float32)
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            message = f"{scale_name} holds a number that is no scale: negative or not finite"
            raise ModelUnsupported(message, option=scale_name, value=str(float(scale.min())))
        return scale.to(self.device)  # checked above, on the host

    def _block_scales(self, name: str) -> torch.Tensor:
        """Float32 [ceil(N / 128), K / 128] of this rank's part, which has whole blocks."""
        scale, cut = self._weight_scale(name), self.cut(name)
        if self.float8.scales[name].kind is ScaleKind.TENSOR:
            num_rows, num_columns = self._shape(name)
            return scale.reshape(1, 1).expand(-(-num_rows // BLOCK_LEN), num_columns // BLOCK_LEN)
        return scale if cut is None else scale.narrow(cut.dim, cut.first // BLOCK_LEN, -(-cut.count // BLOCK_LEN))

    def _row_scales(self, name: str) -> Callable[[int, int], torch.Tensor]:
        """Factors of a range of rows of this rank's part of a float8 weight, as a function of the range's bounds."""
        scale = self._weight_scale(name).to(torch.promote_types(self.dtype, torch.float32))
        cut, num_columns = self.cut(name), self.stored[name].shape[1]
        first, count = (cut.first, cut.count) if cut is not None and cut.dim == 1 else (0, num_columns)

        def of_rows(begin: int, end: int) -> torch.Tensor:
            match self.float8.scales[name].kind:
                case ScaleKind.TENSOR:
                    return scale.reshape(1, 1)
                case ScaleKind.CHANNEL:
                    return scale.reshape(-1, 1)[begin:end]
                case ScaleKind.BLOCK:  # a part need not begin at a block
                    blocks = scale[begin // BLOCK_LEN : -(-end // BLOCK_LEN)].repeat_interleave(BLOCK_LEN, 0)
                    rows = blocks[begin % BLOCK_LEN :][: end - begin]
                    return rows.repeat_interleave(BLOCK_LEN, 1)[:, first : first + count]

        return of_rows


def _quantized(weight_NK: torch.Tensor, name: str) -> Fp8Weight:
    num_inputs = weight_NK.shape[1]
    if num_inputs % GROUP_LEN:
        message = f"--quantization fp8 scales {GROUP_LEN} inputs together; {name} has {num_inputs} at a rank"
        raise ModelUnsupported(message, option="quantization", value=Quantization.FP8.value)
    return quantize_weight(weight_NK)


class RMSNorm:
    """RMS norm with weight w, or 1 + w."""

    def __init__(self, source: WeightSource, prefix: str, eps: float, ops: Ops, *, plus_one: bool = False) -> None:
        self.weight_D = source.take(f"{prefix}.weight")
        self._eps = eps
        self._ops = ops
        self._plus_one = plus_one

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return self._ops.rms_norm(x, self.weight_D, self._eps, plus_one=self._plus_one)

    def of_sum(self, x_TD: torch.Tensor, added_TD: Added | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + added, and the sum, which is rounded to its dtype before it is normalised."""
        if added_TD is None:
            return self(x_TD), x_TD
        return self._ops.add_rms_norm(x_TD, added_TD, self.weight_D, self._eps, plus_one=self._plus_one)

    def read_by(
        self, reader: Weight | None, x_TD: torch.Tensor, added_TD: Added | None = None, *, keep: bool = False
    ) -> tuple[Rows, torch.Tensor]:
        """The same, with the norm in the form in which the GEMM of `reader` takes it; others read it if `keep`."""
        return self._ops.norm_read_by(
            reader, x_TD, added_TD, self.weight_D, self._eps, plus_one=self._plus_one, keep=keep
        )

    def route(
        self,
        x_TD: torch.Tensor,
        added_TD: torch.Tensor,
        router_XD: torch.Tensor,
        num_experts: int,
        num_chosen: int,
        *,
        renormalise: bool,
        has_shared: bool,
    ) -> RoutedNorm | None:
        """The norm of x + added, the sum, and the experts that a router chooses; None: not in one launch."""
        return self._ops.norm_route(
            x_TD, added_TD, self.weight_D, self._eps, router_XD, num_experts, num_chosen,
            plus_one=self._plus_one, renormalise=renormalise, has_shared=has_shared,
        )  # fmt: skip


class MLP:
    """SwiGLU with gate and up projections in one GEMM."""

    def __init__(self, gate_up_JD: Weight, down_DI: Weight, ops: Ops) -> None:
        self.gate_up_JD = gate_up_JD
        self.down_DI = down_DI
        self._ops = ops

    @classmethod
    def take(cls, source: WeightSource, prefix: str, ops: Ops) -> "MLP":
        """Read its weights."""
        gate, up, down = mlp_names(prefix)
        return cls(source.take_linear(gate, up), source.take_linear(down), ops)

    def reader_of(self, num_rows: int) -> Weight:
        """The weight of the GEMM that alone reads the rows, however many they are."""
        del num_rows
        return self.gate_up_JD

    def __call__(self, x_TD: Rows, *, may_wait: bool, routed: RoutedRows | None = None) -> torch.Tensor:
        """[T, D] -> [T, D]; never waits for the device, whatever `may_wait` allows. `routed` is not used."""
        return self.end(self._ops.silu_mul_read_by(self.down_DI, self._ops.linear(x_TD, self.gate_up_JD)))

    def end(self, inner_TI: Rows) -> torch.Tensor:
        """Continue after the activation, [T, I] -> [T, D]."""
        return self._ops.linear_inner(inner_TI, self.down_DI)


def joined(*weights: Weight) -> torch.Tensor | None:
    """Weights that read the same rows, as one, [sum of N, K]; None if their dtypes differ or one is float8."""
    tensors = [weight_NK for weight_NK in weights if isinstance(weight_NK, torch.Tensor)]
    is_one = len(tensors) == len(weights) and len({weight_NK.dtype for weight_NK in tensors}) == 1
    return torch.cat(tensors) if is_one else None
