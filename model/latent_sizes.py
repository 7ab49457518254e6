"""Sizes of multi-head latent attention: how config.json names them, and what a sequence keeps for it.

Read from the config, without torch. For each position a layer keeps one row: the normalised latent, and the part of the
key that is rotated by its position. All heads read it, so every rank of a group holds all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import ModelUnsupported
from baton.kvcache.layout import WORD_BYTES, LayerLayout

NORM_EPS = 1e-6  # of the latents' norms, whatever config.json says about others: transformers `DeepseekV3Attention`


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of every layer of a model with latent attention.

    Attributes:
        query_rank: length of the latent that queries are made from; 0: they are made from the hidden state.
        latent_dim: length of the latent that keys and values are made from.
        nope_dim: columns of a head's query and key that are not rotated.
        rope_dim: columns that are rotated; those of the key are the same for all heads.
        value_dim: columns of a head's value.
        is_interleaved: adjacent columns are rotated together; otherwise those half of `rope_dim` apart.
    """

    query_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool

    @property
    def row_len(self) -> int:
        """Number of elements that are kept per position."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Number of columns of a head's query, and of its key."""
        return self.nope_dim + self.rope_dim

    def kv_layer(self, dtype: str) -> LayerLayout:
        """What one layer keeps of a sequence."""
        return LayerLayout(num_heads=1, num_parts=1, row_len=self.row_len, dtype=dtype, whole=True)


def read_latent_sizes(values: Mapping[str, Any], num_heads: int) -> LatentSizes:
    """Sizes that config.json names, or the family's defaults.

    Raises:
        ModelUnsupported: a size that makes no sense, or that is not implemented.
    """
    num_kv_heads = values.get("num_key_value_heads")
    if num_kv_heads not in (None, num_heads):
        raise _refusal("num_key_value_heads", num_kv_heads, f"not the {num_heads} heads that all read one latent")
    ranked = values.get("q_lora_rank", 1536) is not None
    found = LatentSizes(
        query_rank=_size(values, "q_lora_rank", 1536) if ranked else 0,
        latent_dim=_size(values, "kv_lora_rank", 512),
        nope_dim=_size(values, "qk_nope_head_dim", 128),
        rope_dim=_size(values, "qk_rope_head_dim", 64),
        value_dim=_size(values, "v_head_dim", 128),
        is_interleaved=bool(values.get("rope_interleave", True)),
    )
    if found.rope_dim % 2:
        raise _refusal("qk_rope_head_dim", found.rope_dim, "odd")
    for key, size in (("head_dim", found.rope_dim), ("qk_head_dim", found.query_dim)):  # as transformers writes them
        if values.get(key) not in (None, size):
            raise _refusal(key, values[key], f"not the {size} that other keys imply")
    if found.row_len % WORD_BYTES:
        raise _refusal("kv_lora_rank", found.latent_dim, f"with qk_rope_head_dim no multiple of {WORD_BYTES}")
    return found


def _size(values: Mapping[str, Any], key: str, default: int) -> int:
    size = int(values.get(key, default))
    if not 0 < size <= 1 << 16:
        raise _refusal(key, size, "not 1 to 65536")
    return size


def _refusal(key: str, value: Any, why: str) -> ModelUnsupported:
    return ModelUnsupported(f"config.json: {key} = {value!r:.200} is {why}", option=key, value=value)
