"""Determines which float8 weights must be dequantized, from headers alone, without torch: what the loader will log."""

from collections.abc import Iterator

from baton.model.checkpoint.fp8_tensors import NO_GEMM, Fp8Tensors, why_wide
from baton.model.config import ModelConfig
from baton.model.tensor_spec import TensorSpec, mixer_linears, mlp_names


def dequantized_weights(
    config: ModelConfig, float8: Fp8Tensors, spec: TensorSpec, dtype: str, size: int
) -> dict[str, str]:
    """The reason for each float8 weight, by name, that one of `size` ranks dequantizes.

    Args:
        config: of a float8 checkpoint.
        float8: which weights are float8.
        spec: spec of every weight that is read.
        dtype: the model's compute dtype, by torch's name.
        size: number of ranks; their parts have the same shapes.
    """
    assert config.fp8 is not None
    found = {name: NO_GEMM for name in float8.scales if name in spec.weights}
    for stacks, whole in _gemms(config, spec):
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


def _gemms(config: ModelConfig, spec: TensorSpec) -> Iterator[tuple[list[tuple[str, ...]], bool]]:
    """Weights of each GEMM call: stacks of names, and whether each weight must consist of whole blocks."""
    prefixes = [*(f"model.layers.{layer}" for layer in range(config.num_layers)), config.mtp_names.layer]
    for layer, prefix in enumerate(prefixes):
        if f"{prefix}.input_layernorm.weight" not in spec.weights:  # the MTP head, if it is not loaded
            continue
        yield from (([names], False) for names in mixer_linears(config, layer, prefix))
        mlps = [] if config.is_sparse(layer) else [mlp_names(f"{prefix}.mlp")]
        if config.is_sparse(layer):
            experts = [config.expert_names(prefix, expert) for expert in range(config.num_experts)]
            yield [*((gate, up) for gate, up, _ in experts), *((down,) for _, _, down in experts)], True
            if config.shared_expert_size:
                mlps = [mlp_names(f"{prefix}.{config.shared_expert}")]
        for gate, up, down in mlps:
            yield [(gate, up)], False
            yield [(down,)], False
