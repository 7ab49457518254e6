"""Whether a model can be cut over a number of ranks: read from its config, before anything is loaded; without torch."""

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.gemm.slices import num_slices
from baton.model.checkpoint.fp8_tensors import Fp8Tensors, require_whole_blocks
from baton.model.config import ModelConfig
from baton.model.tensor_spec import TensorSpec


def require_cut(
    config: ModelConfig,
    size: int,
    numerics: Numerics,
    *,
    expert_parallel: bool = False,
    num_redundant_experts: int | None = None,
    dp_attention: bool = False,
) -> None:
    """Check that `size` ranks can hold equal parts of the model.

    With `expert_parallel` each holds whole experts, with redundant copies if any. With `dp_attention` each has all
    heads of attention over latents.

    Raises:
        ModelUnsupported: they cannot; the message names the dimension.
    """
    if expert_parallel:
        _require_experts(config, size, num_redundant_experts or 0)
    if dp_attention:
        _require_latents(config, size)
    inner_sizes = {} if dp_attention else {"num_attention_heads": config.num_heads}
    inner_sizes |= _mlp_sizes(config, expert_parallel=expert_parallel)
    for name, length in inner_sizes.items():
        _require_multiple(config, name, length, size)
    keys = size if dp_attention else config.num_kv_heads
    if keys % size and size % keys:
        raise _refusal(f"num_key_value_heads = {keys} neither divides it nor is a multiple of it", size)
    delta = config.delta_net
    if delta is not None and delta.num_key_heads % size:
        raise _refusal(f"linear_num_key_heads = {delta.num_key_heads} is no multiple of it", size)
    if numerics is Numerics.INVARIANT:
        if not dp_attention:
            inner_sizes["num_attention_heads"] *= config.value_dim
        if delta is not None:
            inner_sizes["linear_num_value_heads"] = delta.num_value_heads * delta.value_dim
        for name, length in inner_sizes.items():
            if num_slices(length) % size:
                raise _refusal(f"--batch-invariant cuts {name} into {num_slices(length)} slices", size)


def _mlp_sizes(config: ModelConfig, *, expert_parallel: bool) -> dict[str, int]:
    """Inner dimensions of MLPs and experts that are cut over ranks, by name."""
    sizes = {}
    if len(config.sparse_layers) < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if config.num_experts and not expert_parallel:
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
    if config.shared_expert_size:
        sizes["shared_expert_intermediate_size"] = config.shared_expert_size
    return sizes


def _require_latents(config: ModelConfig, size: int) -> None:
    if config.latent is None:
        why = f"attention of {config.architecture} is over heads, which ranks share, not over latents"
        raise ModelUnsupported(f"--enable-dp-attention: {why}", option="enable_dp_attention", value=size)


def _require_multiple(config: ModelConfig, name: str, length: int, size: int) -> None:
    if length % size:
        hint = _whole_experts_hint(config.num_experts, size) if name == "moe_intermediate_size" else ""
        raise _refusal(f"{name} = {length} is no multiple of it{hint}", size)


def _require_experts(config: ModelConfig, size: int, num_redundant: int) -> None:
    num_experts, option = config.num_experts, "enable_expert_parallel"
    if not num_experts:
        why = f"the model is dense ({config.architecture}): it has no experts that ranks could hold"
    elif size == 1:  # a single rank has all of them, and needs no copies
        return
    elif num_redundant > num_experts * (size - 1):
        option = "num_redundant_experts"
        why = f"{num_redundant} are more than a copy of each of {num_experts} at each of {size} ranks"
    elif (num_experts + num_redundant) % size:
        more = f" and {num_redundant} redundant ones" if num_redundant else ""
        option = "num_redundant_experts" if num_redundant else option
        why = f"{num_experts} experts{more} cannot be dealt evenly over {size} ranks"
    else:
        return
    raise ModelUnsupported(f"--{option.replace('_', '-')}: {why}", option=option, value=size)


def _whole_experts_hint(num_experts: int, size: int) -> str:
    """Hint for an error that expert parallelism with `size` ranks would avoid; "" if it would not."""
    return "; --enable-expert-parallel keeps every expert whole at one rank" if num_experts % size == 0 else ""


def require_cut_float8(spec: TensorSpec, float8: Fp8Tensors, size: int) -> None:
    """Check that `size` ranks can have whole blocks of the float8 GEMM weights.

    Raises:
        ModelUnsupported: they cannot; the message names a weight.
    """
    for rank in range(size if size > 1 else 0):
        for name, scale in float8.scales.items():
            if name in spec.weights:
                weight = spec.weights[name]
                hint = _whole_experts_hint(weight.expert[1], size) if weight.expert is not None else ""
                require_whole_blocks(name, scale, weight.shape, weight.cut(rank, size), size, hint)


def _refusal(why: str, size: int) -> ModelUnsupported:
    return ModelUnsupported(f"tensor parallel size {size} is not possible: {why}", option="tp", value=size)
