"""Which float8 weights of a checkpoint cannot stay so, by headers alone, without torch: what the loader will log."""

from collections.abc import Iterable, Iterator

from baton.model.config import ModelConfig
from baton.model.fp8_tensors import NO_PRODUCT, Fp8Tensors, why_wide
from baton.model.tensor_spec import TensorSpec


def dequantized_weights(
    config: ModelConfig, float8: Fp8Tensors, spec: TensorSpec, dtype: str, size: int
) -> dict[str, str]:
    """Why, by the name of each float8 weight that one of `size` ranks dequantizes.

    Args:
        config: of a checkpoint in float8.
        float8: which weights are.
        spec: of every weight that is read.
        dtype: in which the model is computed, by torch's name.
        size: ranks; each has parts of the same shapes.
    """
    assert config.fp8 is not None
    found = {name: NO_PRODUCT for name in float8.scales if name in spec.weights}
    for stacks, whole in _products(spec.weights, config.num_experts):
        whys = []
        for stack in stacks:
            parts = {name: spec.weights[name].part_shape(0, size) for name in stack}
            whys.append(why_wide(config.fp8, float8.scales, parts, dtype, whole=whole))
        why = next((one for one in whys if one), "")
        for name in (name for stack in stacks for name in stack if name in found):
            if why:
                found[name] = why
            else:
                del found[name]
    return found


def _products(names: Iterable[str], num_experts: int) -> Iterator[tuple[list[tuple[str, ...]], bool]]:
    """Weights that are multiplied with in one call: stacks of them, and whether each weight must be whole blocks."""
    for name in names:
        prefix, _, part = name.rpartition(".self_attn.")
        if part == "q_proj.weight":
            yield [tuple(f"{prefix}.self_attn.{one}_proj.weight" for one in "qkv")], False
            yield [(f"{prefix}.self_attn.o_proj.weight",)], False
        prefix, _, part = name.rpartition(".mlp.")
        if part == "gate_proj.weight":
            yield _mlp(f"{prefix}.mlp")[:1], False
            yield _mlp(f"{prefix}.mlp")[1:], False
        elif part == "experts.0.gate_proj.weight":
            experts = [_mlp(f"{prefix}.mlp.experts.{expert}") for expert in range(num_experts)]
            yield [gate_up for gate_up, _ in experts] + [down for _, down in experts], True


def _mlp(prefix: str) -> list[tuple[str, ...]]:
    return [(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), (f"{prefix}.down_proj.weight",)]
