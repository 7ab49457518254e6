"""Describes a published EAGLE-3 drafter: sizes, names, and whether it fits its target. Without torch.

There are two published layouts: that of the paper's authors (`midlayer.*`, sizes at the top of config.json), and that
of the `speculators` library (`layers.0.*`, sizes under `transformer_layer_config`). Both are the same model: one
decoder layer whose attention reads a token's embedding beside a hidden state, and a head over the tokens that are
drafted most. The layer is Llama's, or in the library's layout Qwen3's, whose heads have norms. Source: Li et al.,
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).

Legend: C columns of the draft head, D hidden size, V vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from baton.core.errors import ModelFileDamaged, ModelTensorUnexpected, ModelUnsupported, StartupError
from baton.core.numerics import Numerics
from baton.kvcache.layout import LayerLayout, attention_layer
from baton.model.config import ModelConfig, read_config
from baton.model.tensor_spec import LOGIT_GAIN, Shape, TensorSpec, layer_weights, matrix, norm
from baton.model.tp_fit import require_cut

EAGLE_D2T: Final = "d2t"
EAGLE_HEAD: Final = "lm_head.weight"
LAYER: Final = "layers.0"
_OWN_LAYER: Final = "midlayer"
_ARCHITECTURES = {
    "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
}  # fmt: skip
_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # by `transformer_layer_config.model_type`
# Flags of `speculators` 0.9 that change what is computed. With the last no tensor is missing: drafts would be worse.
_UNBUILT = ("norm_before_fc", "fc_norm", "norm_output")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Config of a drafter for one target.

    Attributes:
        sizes: of its layer, by the names of a Llama model's; `model_hash` is the identity of its config and weights.
        draft_vocab_size: C.
        aux_layers: layers of the target whose inputs the drafter joins, ascending.
        norms_before_residual: the layer's residual is the normalised hidden state.
    """

    sizes: ModelConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norms_before_residual: bool

    @classmethod
    def from_directory(cls, path: Path, target: ModelConfig, *, made_weights: str | None = None) -> "EagleConfig":
        """Read config.json, and the safetensors headers for the identity.

        Args:
            path: the drafter's directory.
            target: the model it drafts for.
            made_weights: as in `ModelConfig.from_directory`.

        Raises:
            ModelMissing: the directory, config.json or the weights are not there.
            ModelFileDamaged: a file is not what its name says.
            ModelUnsupported: it is not an EAGLE-3 drafter, or not for this target.
        """
        with naming_the_drafter():
            values = read_config(path)
            try:
                return cls._of(values, path, target, made_weights)
            except (TypeError, ValueError, AttributeError) as error:
                message = f"{path / 'config.json'} holds a value of the wrong kind: {error}"
                raise ModelFileDamaged(message, path=str(path)) from error

    @classmethod
    def _of(cls, values: dict[str, Any], path: Path, target: ModelConfig, made_weights: str | None) -> "EagleConfig":
        inner = values.get("transformer_layer_config", values)
        architectures = values.get("architectures") or []
        is_published = values.get("speculators_model_type", "eagle3") == "eagle3" and isinstance(inner, dict)
        is_published = is_published and architectures in [[], *([name] for name in _ARCHITECTURES)]
        if not is_published or values.get("draft_vocab_size") is None:
            why = "config.json has no draft_vocab_size" if is_published else f"architectures {architectures}"
            if "speculators_model_type" in values and not is_published:
                why += f", speculators_model_type {values['speculators_model_type']!r}"
            raise ModelUnsupported(f"{path} is no EAGLE-3 drafter: {why}", option="draft_model", value=str(path))
        if values.get("quantization_config") or inner.get("quantization_config"):
            raise _quantized_refusal(path)
        own = values.get("eagle_config") or {}
        for key in _UNBUILT:
            if values.get(key) or own.get(key):
                raise ModelUnsupported(f"{path}: {key} is not implemented", option=key, value=True)
        kind = "llama" if inner is values else inner.get("model_type") or "llama"
        if kind not in _LAYERS:
            message = f"{path}: transformer_layer_config.model_type = {kind!r} is not implemented"
            message += f"; {' or '.join(map(repr, _LAYERS))} is"
            raise ModelUnsupported(message, option="model_type", value=kind)
        layer = {**inner, "architectures": [_LAYERS[kind]], "draft_vocab_size": values["draft_vocab_size"]}
        sizes = ModelConfig.of_values(layer, path, identity=values, made_weights=made_weights)
        if sizes.fp8 is not None:  # by ModelOpt's own file
            raise _quantized_refusal(path)
        num_layers = target.num_layers
        found = cls(
            sizes=sizes,
            draft_vocab_size=sizes.draft_vocab_size or 0,
            aux_layers=_aux_layers(values) or (2, num_layers // 2, num_layers - 3),
            norms_before_residual=bool(values.get("norm_before_residual", False)),
        )
        found._require_fits(path, target, values)
        return found

    def kv_layer(self, dtype: str) -> LayerLayout:
        """What its layer keeps of a sequence, in heads of its own."""
        return attention_layer(self.sizes.num_kv_heads, self.sizes.head_dim, dtype)

    def require_cut(self, size: int, numerics: Numerics) -> None:
        """Check that `size` ranks can hold equal parts of the drafter.

        Raises:
            ModelUnsupported: they cannot; the message names the dimension.
        """
        with naming_the_drafter():
            require_cut(self.sizes, size, numerics)

    def tensors(self, stored: Collection[str] = ()) -> TensorSpec:
        """Tensor names and shapes; the layer's are under `layers.0` in either layout.

        A head over all tokens needs no table. If one is among the `stored` names it is read, and may only reorder the
        tokens.
        """
        hidden = self.sizes.hidden_size
        weights = {"fc.weight": matrix(hidden, len(self.aux_layers) * hidden), "norm.weight": norm(hidden)}
        weights |= {f"{LAYER}.hidden_norm.weight": norm(hidden)}
        weights |= layer_weights(self.sizes, LAYER, 0, input_len=2 * hidden)
        weights[EAGLE_HEAD] = matrix(self.draft_vocab_size, hidden, LOGIT_GAIN)
        vocab = (self.sizes.vocab_size, hidden)
        tables: dict[str, Shape] = (
            {EAGLE_D2T: (self.draft_vocab_size,)} if self.has_table or EAGLE_D2T in stored else {}
        )
        return TensorSpec(weights, tables, {"embed_tokens.weight": vocab})

    @property
    def has_table(self) -> bool:
        """Whether its head has fewer columns than there are tokens."""
        return self.draft_vocab_size < self.sizes.vocab_size

    def _require_fits(self, path: Path, target: ModelConfig, values: Mapping[str, Any]) -> None:
        sizes = self.sizes
        pairs = {
            "num_hidden_layers": (sizes.num_layers, 1),
            "vocab_size": (sizes.vocab_size, target.vocab_size),
            "hidden_size": (sizes.hidden_size, target.hidden_size),
            "target_hidden_size": (values.get("target_hidden_size") or target.hidden_size, target.hidden_size),
        }
        for key, (found, wanted) in pairs.items():
            if found != wanted:
                message = f"{path} cannot draft for this model: {key} is {found}, and {wanted} is needed"
                raise ModelUnsupported(message, option=key, value=found)
        layers, key = self.aux_layers, "eagle_aux_hidden_state_layer_ids"
        if (
            len(layers) != 3
            or list(layers) != sorted(set(layers))
            or not 0 <= layers[0] <= layers[-1] < target.num_layers
        ):
            named = f"{key} = {list(layers)}" if _aux_layers(values) else f"no {key}, and the usual {list(layers)}"
            message = f"{path}: {named} are not three of the target's {target.num_layers} layers"
            raise ModelUnsupported(message, option=key, value=list(layers))


def _quantized_refusal(path: Path) -> ModelUnsupported:
    message = f"{path}: a quantized drafter is not implemented"
    return ModelUnsupported(message, option="quantization_config", value=str(path))


def _aux_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of the target whose inputs are joined, as config.json names them; () if it names none.

    Those at the top level are already inputs, as vLLM and `speculators` read them. Those under `eagle_config` name
    layers by their outputs, which are the next layers' inputs: SpecForge writes them, with defaults 1, n / 2 - 1 and n
    - 4, and SGLang adds 1 (`set_eagle3_layers_to_capture`).
    """
    key = "eagle_aux_hidden_state_layer_ids"
    own = (values.get("eagle_config") or {}).get(key)
    return tuple(map(int, values.get(key) or ())) or tuple(1 + int(layer) for layer in own or ())


def by_one_name(stored: Mapping[str, T]) -> dict[str, T]:
    """A checkpoint's tensors with the layer's under `layers.0`; drops `t2d`, which follows from `d2t`.

    Raises:
        ModelTensorUnexpected: a tensor is there under both names.
    """
    own = {name: name.replace(_OWN_LAYER, LAYER, 1) for name in stored if name.startswith(f"{_OWN_LAYER}.")}
    doubled = sorted(name for name, renamed in own.items() if renamed in stored)
    if doubled:
        message = f"the checkpoint holds both {doubled[0]} and {own[doubled[0]]}, which are one tensor"
        raise ModelTensorUnexpected(message, tensors=doubled)
    return {own.get(name, name): tensor for name, tensor in stored.items() if name != "t2d"}


@contextmanager
def naming_the_drafter() -> Iterator[None]:
    """Make errors about a drafter's files say so: the model that it drafts for has files of the same names."""
    try:
        yield
    except StartupError as error:
        raise type(error)(f"the drafter: {error.message}", **error.fields) from error
