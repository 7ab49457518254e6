"""Renames stored tensors to the names of `model.tensor_spec`, where checkpoints of a family use different ones.

Tensors of other modes in a multimodal checkpoint are left out. Tensors that several projections share are split by
rows, which are contiguous in the file: experts stacked in one tensor, and the queries, keys and values of a gated delta
net, which are cut over ranks separately.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from baton.core.errors import ModelTensorMisshapen
from baton.model.checkpoint.fp8_scheme import BLOCK_LEN
from baton.model.checkpoint.weights import StoredTensor
from baton.model.config import ModelConfig

_LANGUAGE = "model.language_model."
_OTHER_MODES = ("model.visual.", "visual.")
_QKV = (".linear_attn.in_proj_qkv", ".linear_attn.conv1d")
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def by_published_names(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors, by the table's names.

    Raises:
        ModelTensorMisshapen: a tensor to be split does not have the rows that config.json implies.
    """
    if not config.has_published_names:
        return dict(stored)
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if not name.startswith(_OTHER_MODES):
            found.update(_parts(config, name.replace(_LANGUAGE, "model.", 1), tensor))
    return found


def _parts(config: ModelConfig, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    sizes, keys, values = config.delta_net, 0, 0
    if sizes is not None:
        keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
    module, _, kind = name.rpartition(".")
    if module.endswith(_QKV):
        rows = [keys, keys, values]
        if kind != "weight" and tensor.shape in ((), (1,)):  # one scale for all
            parts = [tensor] * len(rows)
        elif kind != "weight" and tensor.shape[0] != sum(rows):  # a scale for each block
            whole = not (keys % BLOCK_LEN or values % BLOCK_LEN)
            parts = list(_split(name, tensor, [count // BLOCK_LEN for count in rows] if whole else [0]))
        else:
            parts = list(_split(name, tensor, rows))
        yield from zip((f"{module}[{part}].{kind}" for part in "qkv"), parts, strict=True)
    elif name.endswith(_EXPERTS):
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        rows = [inner] * (2 * config.num_experts) if name.endswith(_EXPERTS[0]) else [hidden] * config.num_experts
        wanted = (config.num_experts, 2 * inner, hidden)
        wanted = wanted if name.endswith(_EXPERTS[0]) else (config.num_experts, hidden, inner)
        if tensor.shape != wanted:
            raise _misshapen(name, tensor, wanted)
        projections = ("gate_proj", "up_proj") if name.endswith(_EXPERTS[0]) else ("down_proj",)
        prefix = name.rpartition(".")[0]
        names = [f"{prefix}.{expert}.{part}.weight" for expert in range(config.num_experts) for part in projections]
        yield from zip(names, _split(name, replace(tensor, shape=(sum(rows), wanted[2])), rows), strict=True)
    else:
        yield name, tensor


def _split(name: str, tensor: StoredTensor, rows: Sequence[int]) -> Iterator[StoredTensor]:
    """Split a tensor into parts of the given numbers of rows, in order."""
    rest = tensor.shape[1:]
    if not tensor.shape or tensor.shape[0] != sum(rows):
        raise _misshapen(name, tensor, (sum(rows), *rest))
    row_bytes, start = (tensor.end - tensor.start) // max(1, tensor.shape[0]), tensor.start
    assert row_bytes * tensor.shape[0] == tensor.end - tensor.start or not prod(tensor.shape)
    for count in rows:
        yield replace(tensor, shape=(count, *rest), start=start, end=start + count * row_bytes)
        start += count * row_bytes


def _misshapen(name: str, tensor: StoredTensor, wanted: Sequence[int]) -> ModelTensorMisshapen:
    message = f"{name} has shape {list(tensor.shape)} where config.json implies {list(wanted)}"
    return ModelTensorMisshapen(message, tensor=name, shape=list(tensor.shape), wanted_shape=list(wanted))
