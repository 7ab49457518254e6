"""Scales a model's rotary frequencies by its config's rope parameters, in the old or the new spelling.

Sources: Peng et al. 2023 (YaRN), the Llama 3.1 release, and transformers' `modeling_rope_utils`, whose names these are.

Legend: F rotary frequencies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core.errors import ModelUnsupported

if TYPE_CHECKING:  # configs are checked without torch, which takes seconds to import
    import torch

# "dynamic" scales nothing within the model's own length, which is the most that is served.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_NEEDED = {"llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
_KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", *_NEEDED["llama3"]},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "finetuned",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One rope type with its parameters, as read by `read_scaling`.

    Attributes:
        kind: one of `ROPE_TYPES`.
        factor: by which positions are stretched.
        original_len: positions that the model was made for, before stretching.
        low_freq_factor: llama3's.
        high_freq_factor: llama3's.
        beta_fast: YaRN's.
        beta_slow: YaRN's.
        truncate: whether YaRN rounds its range to whole frequencies.
        attention_factor: cosines and sines are multiplied by it.
        score_factor: with latent attention, scores are multiplied by it.
    """

    kind: str = "default"
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    score_factor: float = 1.0

    def scale(self, inverse_F: "torch.Tensor", theta: float) -> "torch.Tensor":
        """The scaled frequencies [F]."""
        import torch

        if self.kind == "linear":
            return inverse_F / self.factor
        if self.kind == "llama3":
            turns_F = self.original_len * inverse_F / (2 * math.pi)  # in the original length
            smooth_F = (turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            smooth_F = smooth_F.clamp(0, 1)
            return (1 - smooth_F) * inverse_F / self.factor + smooth_F * inverse_F
        if self.kind == "yarn":
            dim = 2 * len(inverse_F)
            low, high = (self._place(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            high = high + 0.001 if low == high else high
            places_F = torch.arange(len(inverse_F), dtype=inverse_F.dtype, device=inverse_F.device)
            ramp_F = ((places_F - low) / (high - low)).clamp(0, 1)
            return inverse_F / self.factor * ramp_F + inverse_F * (1 - ramp_F)
        return inverse_F

    def _place(self, turns: float, dim: int, theta: float) -> float:
        """The index of the frequency that makes this many turns within the original length."""
        return dim * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping under `rope_parameters` or `rope_scaling` in config.json; {} if there is none.

    Raises:
        ModelUnsupported: it is no mapping, both are there and differ, or kinds of layers have one each.
    """
    found = [rope for rope in (values.get("rope_parameters"), values.get("rope_scaling")) if rope]
    for rope in found:
        if not isinstance(rope, dict):
            raise _refusal("is no mapping", rope)
        if any(isinstance(value, dict) for value in rope.values()):
            raise _refusal("one for each kind of layer is not implemented", rope)
        # The base is also at the top level, so that one of the two may leave it out.
        differ = {key for key in {*rope, *found[0]} if rope.get(key) != found[0].get(key)}
        if differ - {"rope_theta"} or (differ and all("rope_theta" in each for each in found)):
            raise _refusal("rope_parameters and rope_scaling differ", found)
    return {key: value for rope in found for key, value in rope.items()}


def read_scaling(values: Mapping[str, Any]) -> RopeScaling:
    """The scaling that config.json specifies.

    Raises:
        ModelUnsupported: a type or a parameter that is not implemented, or one that makes no sense.
    """
    rope = rope_parameters(values)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind in ("llama3", "yarn") and values.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]  # goes before its own
    if kind not in ROPE_TYPES:
        raise _refusal(f"rope_type {kind!r} is not implemented; this version serves {', '.join(ROPE_TYPES)}", rope)
    given = {key for key, value in rope.items() if value is not None} - {"rope_type", "type", "rope_theta"}
    for key in sorted(given - _KNOWN[kind] - {"partial_rotary_factor"}):
        if kind != "default":
            raise _refusal(f"{key} of rope_type {kind!r} is not implemented", rope)
    if kind == "default":
        return RopeScaling()
    given -= {key for key in ("mscale", "mscale_all_dim") if rope.get(key) == 0}  # 0 has no effect, as in transformers
    if not rope.get("finetuned", True):
        raise _refusal(f"finetuned = {rope['finetuned']!r} is not implemented", rope)
    missing = [key for key in ("factor", *_NEEDED.get(kind, ())) if rope.get(key) is None]
    if missing:
        raise _refusal(f"rope_type {kind!r} lacks {', '.join(missing)}", rope)
    numbers = {key: float(rope[key]) for key in given & _KNOWN[kind] - {"truncate", "finetuned"}}
    for key, number in numbers.items():
        if not (math.isfinite(number) and number > 0):
            raise _refusal(f"{key} = {number} is not positive and finite", rope)
    factor = numbers["factor"]
    if numbers.get("low_freq_factor", 0.0) >= numbers.get("high_freq_factor", 1.0):
        raise _refusal("low_freq_factor is not below high_freq_factor", rope)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_len=int(numbers.get("original_max_position_embeddings") or values.get("max_position_embeddings") or 0),
        low_freq_factor=numbers.get("low_freq_factor", 1.0),
        high_freq_factor=numbers.get("high_freq_factor", 4.0),
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_attention_factor(factor, numbers) if kind == "yarn" else 1.0,
        score_factor=_magnitude(factor, numbers.get("mscale_all_dim", 0.0)) ** 2,
    )


def stretched_len(values: Mapping[str, Any]) -> int:
    """Number of positions to which YaRN stretches the original ones that config.json names; 0 if it does not.

    Model makers recommend enabling YaRN by the rope parameters alone (Qwen2.5's model cards), leaving
    `max_position_embeddings` as it was; vLLM takes the length from the parameters, too. This does not apply to
    "linear": such checkpoints name the stretched length itself (deepseek-coder), not the original.

    Raises:
        ModelUnsupported: as `read_scaling`.
    """
    scaling, rope = read_scaling(values), rope_parameters(values)
    is_named = any(where.get("original_max_position_embeddings") for where in (values, rope))
    return int(scaling.factor * scaling.original_len) if scaling.kind == "yarn" and is_named else 0


def _attention_factor(factor: float, numbers: Mapping[str, float]) -> float:
    if "attention_factor" in numbers:
        return numbers["attention_factor"]
    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return _magnitude(factor, numbers["mscale"]) / _magnitude(factor, numbers["mscale_all_dim"])
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _refusal(why: str, rope: Any) -> ModelUnsupported:
    return ModelUnsupported(f"config.json: the positions' scaling: {why}", option="rope_type", value=rope)
