"""Whether and how a model is cut into so many ranks: read off its config, before anything is loaded; without torch."""

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.gemm.slices import num_slices
from baton.model.checkpoint.fp8_tensors import Fp8Tensors, require_whole_blocks
from baton.model.config import ModelConfig
from baton.model.tensor_spec import TensorSpec


def require_cut(config: ModelConfig, size: int, numerics: Numerics) -> None:
    """Check that `size` ranks can hold equal parts of the model.

    Raises:
        ModelUnsupported: they cannot; the message names the dimension.
    """
    queries, keys = config.num_heads, config.num_kv_heads
    inner_sizes = {"num_attention_heads": queries}
    if len(config.sparse_layers) < config.num_layers:
        inner_sizes["intermediate_size"] = config.intermediate_size
    if config.num_experts:
        inner_sizes["moe_intermediate_size"] = config.moe_intermediate_size
    if config.shared_expert_size:
        inner_sizes["shared_expert_intermediate_size"] = config.shared_expert_size
    for name, length in inner_sizes.items():
        if length % size:
            raise _refusal(f"{name} = {length} is no multiple of it", size)
    if keys % size and size % keys:
        raise _refusal(f"num_key_value_heads = {keys} neither divides it nor is a multiple of it", size)
    delta = config.delta_net
    if delta is not None and delta.num_key_heads % size:
        raise _refusal(f"linear_num_key_heads = {delta.num_key_heads} is no multiple of it", size)
    if numerics is Numerics.INVARIANT:
        inner_sizes["num_attention_heads"] *= config.value_dim
        if delta is not None:
            inner_sizes["linear_num_value_heads"] = delta.num_value_heads * delta.value_dim
        for name, length in inner_sizes.items():
            if num_slices(length) % size:
                raise _refusal(f"--batch-invariant cuts {name} into {num_slices(length)} slices", size)


def require_cut_float8(spec: TensorSpec, float8: Fp8Tensors, size: int) -> None:
    """Check that `size` ranks can have whole blocks of the float8 weights of products.

    Raises:
        ModelUnsupported: they cannot; the message names a weight.
    """
    for rank in range(size if size > 1 else 0):
        for name, scale in float8.scales.items():
            if name in spec.weights:
                weight = spec.weights[name]
                require_whole_blocks(name, scale, weight.shape, weight.cut(rank, size), size)


def _refusal(why: str, size: int) -> ModelUnsupported:
    return ModelUnsupported(f"tensor parallel size {size} is not possible: {why}", option="tp", value=size)
