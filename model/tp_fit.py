"""Whether and how a model is cut into so many ranks: read off its config, before anything is loaded; without torch."""

from collections.abc import Mapping

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.gemm.slices import num_slices
from baton.model.config import ModelConfig
from baton.model.fp8_tensors import Fp8Tensors, require_whole_blocks
from baton.model.weights import Cut, StoredTensor


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
    for name, length in inner_sizes.items():
        if length % size:
            raise _refusal(f"{name} = {length} is no multiple of it", size)
    if keys % size and size % keys:
        raise _refusal(f"num_key_value_heads = {keys} neither divides it nor is a multiple of it", size)
    if numerics is Numerics.INVARIANT:
        inner_sizes["num_attention_heads"] *= config.head_dim
        for name, length in inner_sizes.items():
            if num_slices(length) % size:
                raise _refusal(f"--batch-invariant cuts {name} into {num_slices(length)} slices", size)


def layer_cuts(config: ModelConfig, rank: int, size: int) -> dict[str, Cut]:
    """A rank's part of the weights and biases of layers that are cut, by the end of their names (`cut_of`)."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    cuts = {
        f".self_attn.{part}_proj.{kind}": _cut(0, count, config.head_dim, rank, size)
        for part, count in heads.items()
        for kind in ("weight", "bias")
    }
    cuts[".self_attn.o_proj.weight"] = _cut(1, config.num_heads, config.head_dim, rank, size)
    for infix, length in ((".mlp", config.intermediate_size), (".experts", config.moe_intermediate_size)):
        for part, dim in (("gate", 0), ("up", 0), ("down", 1)):
            cuts[f"{infix}.{part}_proj.weight"] = _cut(dim, length, 1, rank, size)
    return cuts


def cut_of(cuts: Mapping[str, Cut], name: str) -> Cut | None:
    """The part of the tensor `name`; None is all of it."""
    names = name.split(".")
    if "experts" in names:
        names = ["", "experts", *names[-2:]]
    return cuts.get("." + ".".join(names[-3:]))


def require_cut_float8(config: ModelConfig, stored: Mapping[str, StoredTensor], float8: Fp8Tensors, size: int) -> None:
    """Check that `size` ranks can have whole blocks of the float8 weights of products.

    Raises:
        ModelUnsupported: they cannot; the message names a weight.
    """
    for rank in range(size if size > 1 else 0):
        cuts = layer_cuts(config, rank, size)
        for name, scale in float8.scales.items():
            require_whole_blocks(name, scale, stored[name].shape, cut_of(cuts, name), size)


def _cut(dim: int, num_groups: int, length: int, rank: int, size: int) -> Cut:
    """A rank's of `num_groups` groups of `length`; one of them if there are fewer than ranks."""
    if num_groups < size:
        return Cut(dim, rank * num_groups // size * length, length)
    count = num_groups // size * length
    return Cut(dim, rank * count, count)


def _refusal(why: str, size: int) -> ModelUnsupported:
    return ModelUnsupported(f"tensor parallel size {size} is not possible: {why}", option="tp", value=size)
