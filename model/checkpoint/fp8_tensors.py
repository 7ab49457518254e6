"""Matches a checkpoint's float8 weights with their scales, by their headers, before any tensor is read.

A dropped scale would silently give garbage, so every float8 weight must have the scale that its scheme names, and every
scale its weight. "Inverse" scales (`weight_scale_inv`) are factors of the values, like the others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.core.errors import ModelTensorMisshapen, ModelTensorMissing, ModelTensorUnexpected, ModelUnsupported
from baton.model.checkpoint.fp8_scheme import BLOCK_LEN, Fp8Scheme, ScaleKind
from baton.model.checkpoint.weights import Cut, StoredTensor

Shape = tuple[int, ...]
_SCALE_DTYPES = ("F32", "BF16", "F16")
_INPUT_SCALE = "input_scale"


@dataclass(frozen=True, slots=True)
class StoredScale:
    """The scale of one float8 weight: its name, and what each number of it covers."""

    name: str
    kind: ScaleKind


@dataclass(frozen=True, slots=True)
class Fp8Tensors:
    """The float8 weights of a checkpoint.

    Attributes:
        scales: scale of each float8 weight, by the weight's name.
        others: names of related tensors that are not read: scales of activations.
    """

    scales: Mapping[str, StoredScale]
    others: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors besides the weights."""
        return self.others | {scale.name for scale in self.scales.values()}


NO_FLOAT8 = Fp8Tensors({})
NO_GEMM = "no float8 GEMM reads it"
GEMM_DTYPES = ("bfloat16", "float32")  # dtypes of activations that float8 GEMMs accept


def match_scales(scheme: Fp8Scheme, wanted: Iterable[str], stored: Mapping[str, StoredTensor]) -> Fp8Tensors:
    """Find the scale of each float8 weight among the `wanted` names.

    Raises:
        ModelTensorMissing: a float8 weight has no scale, or a scale no weight.
        ModelTensorUnexpected: a scale belongs to a weight that is not float8.
        ModelTensorMisshapen: a scale's shape or dtype is not the scheme's.
        ModelUnsupported: no weight is float8.
    """
    scales: dict[str, StoredScale] = {}
    others: set[str] = set()
    for name in wanted:
        if not name.endswith(".weight"):
            continue
        module = name.removesuffix("weight")
        scale_name, input_name = module + scheme.suffix, module + _INPUT_SCALE
        weight = stored.get(name)
        found = [one for one in (scale_name, input_name) if one in stored]
        if weight is None:
            if found:
                raise ModelTensorMissing(f"the checkpoint holds {found[0]}, and lacks {name}", tensors=[name])
            continue
        if not weight.is_float8:
            if found:
                message = f"{found[0]} is the scale of {name}, which is no float8 but {weight.dtype_name}"
                raise ModelTensorUnexpected(message, tensors=found)
            continue
        if scale_name not in stored:
            message = f"{name} is float8, and the checkpoint lacks its scale {scale_name}"
            raise ModelTensorMissing(message, tensors=[scale_name])
        scales[name] = StoredScale(scale_name, _kind(scheme, weight.shape, scale_name, stored[scale_name]))
        if input_name in stored:
            _kind_of(input_name, stored[input_name], {ScaleKind.TENSOR: ((), (1,))})
            others.add(input_name)
    if not scales:
        message = f"config.json says {scheme} (quantization_config), and no weight is float8"
        raise ModelUnsupported(message, option="quantization_config", value=scheme.method)
    return Fp8Tensors(scales, frozenset(others))


def _kind(scheme: Fp8Scheme, shape: Shape, name: str, scale: StoredTensor) -> ScaleKind:
    blocks = tuple(-(-length // BLOCK_LEN) for length in shape)
    shapes: dict[ScaleKind, tuple[Shape, ...]] = {
        ScaleKind.BLOCK: (blocks,),
        ScaleKind.TENSOR: ((), (1,)),
        ScaleKind.CHANNEL: ((shape[0], 1), (shape[0],)),
    }
    return _kind_of(name, scale, {kind: shapes[kind] for kind in scheme.kinds})


def _kind_of(name: str, scale: StoredTensor, shapes: Mapping[ScaleKind, tuple[Shape, ...]]) -> ScaleKind:
    """The kind of scale that this one's shape matches."""
    if scale.dtype_name not in _SCALE_DTYPES:
        message = f"{name} is stored as {scale.dtype_name}; scales must be {', '.join(_SCALE_DTYPES)}"
        raise ModelTensorMisshapen(message, tensor=name, dtype=scale.dtype_name)
    for kind, allowed in shapes.items():
        if scale.shape in allowed:
            return kind
    wanted = " or ".join(f"{list(allowed[0])} (a scale for each {kind})" for kind, allowed in shapes.items())
    message = f"{name} has shape {list(scale.shape)} where quantization_config implies {wanted}"
    raise ModelTensorMisshapen(message, tensor=name, shape=list(scale.shape))


def require_whole_blocks(
    name: str, scale: StoredScale, shape: Shape, cut: Cut | None, size: int, hint: str = ""
) -> None:
    """Check that one of `size` ranks has whole scale blocks of a GEMM's weight; `hint` is appended to the error.

    Raises:
        ModelUnsupported: its part begins or ends inside a block.
    """
    if cut is None or scale.kind is not ScaleKind.BLOCK:
        return
    stop = cut.first + cut.count
    if cut.first % BLOCK_LEN or (stop % BLOCK_LEN and stop != shape[cut.dim]):
        message = (
            f"tensor parallel size {size} is not possible: a rank's {cut.count} of {shape[cut.dim]} "
            f"{'rows' if cut.dim == 0 else 'columns'} of {name} are no whole blocks of {BLOCK_LEN}, which share a scale"
            f"{hint}"
        )
        raise ModelUnsupported(message, option="tp", value=size)


def why_wide(
    scheme: Fp8Scheme, scales: Mapping[str, StoredScale], parts: Mapping[str, Shape], dtype: str, *, whole: bool
) -> str:
    """Why a GEMM's weights cannot stay as they are stored, in words; "" if they can.

    Args:
        scheme: the checkpoint's scheme.
        scales: of its float8 weights.
        parts: the weights, stacked in this order, and the shape of this rank's part of each.
        dtype: of activations, by torch's name.
        whole: the last one must consist of whole blocks, too, as experts must.
    """
    if dtype not in GEMM_DTYPES:
        return f"float8 GEMMs are made for {' and '.join(GEMM_DTYPES)}"
    if not scheme.quantizes_inputs:
        return "activations are not to be quantized"
    if any(name not in scales for name in parts):
        return "it is stacked with a weight that is not float8"
    if any(scales[name].kind is ScaleKind.CHANNEL for name in parts):
        return "kernels have no scale per channel"
    if any(shape[1] % BLOCK_LEN for shape in parts.values()):
        return f"a rank's columns are no multiple of {BLOCK_LEN}"
    rows = [shape[0] for shape in parts.values()]
    if any(count % BLOCK_LEN for count in (rows if whole else rows[:-1])):
        return f"rows that are stacked are no multiples of {BLOCK_LEN}"
    return ""
