"""Sizes of multi-head latent attention, what config.json says of them, and what a sequence keeps of it.

Read off the config, without torch. For each position a layer keeps one row: the latent, normalised, and the part of the
key that is turned by its position. All heads read it, so every rank of a group holds it whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import ModelUnsupported
from baton.kvcache.layout import WORD_BYTES, LayerLayout

NORM_EPS = 1e-6  # of the norms of latents, whatever config.json says of others: transformers `DeepseekV3Attention`


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """What every layer of a model that attends over latents has.

    Attributes:
        query_rank: length of the latent that queries are made of; 0: they are made of the hidden state.
        latent_dim: length of the latent that keys and values are made of.
        nope_dim: columns of a head's query and key that no position turns.
        rope_dim: those that are turned, of a key the same for all heads.
        value_dim: columns of a head's value.
        is_interleaved: neighbouring columns are turned together; else those that are half of `rope_dim` apart.
    """

    query_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool

    @property
    def row_len(self) -> int:
        """Elements that are kept of a position."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Columns of a head's query, and of its key."""
        return self.nope_dim + self.rope_dim

    def kv_layer(self, dtype: str) -> LayerLayout:
        """What one layer keeps."""
        return LayerLayout(num_heads=1, num_parts=1, row_len=self.row_len, dtype=dtype, whole=True)


def read_latent_sizes(values: Mapping[str, Any], num_heads: int) -> LatentSizes:
    """Sizes as config.json names them, or as the family has them where it does not.

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
