"""Sizes of a model's gated delta nets: how config.json names them, and what a sequence keeps for them.

Read from the config, without torch. Such a layer uses three pool layers: the last inputs of its convolution, the rows
of its open tile, and its state. All are divided into key heads, each with what belongs to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton.core.errors import ModelUnsupported
from baton.kernels.delta_net.sizes import CONV_RING, MAX_TAPS, RING, TILE, conv_len, state_len, tail_len
from baton.kvcache.layout import Keep, LayerLayout

POOL_LAYERS = 3  # of one gated delta net
_KINDS = ("linear_attention", "full_attention")
_MULTIPLE = 4  # of head sizes: rows of the pool are whole words in any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Sizes that every gated delta net of a model has.

    Attributes:
        num_key_heads: each has its own query, and several value heads.
        num_value_heads: of all key heads.
        key_dim: of one key head, and of its query.
        value_dim: of one value head.
        num_taps: positions that an output of the convolution reads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def num_values(self) -> int:
        """Number of value heads of one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def values_len(self) -> int:
        """Number of columns of one key head's value heads."""
        return self.num_values * self.value_dim

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.key_dim, self.value_dim, self.num_values

    def pool_layers(self, dtype: str) -> tuple[LayerLayout, ...]:
        """What one layer keeps: inputs in the model's dtype, the rest in float32 or float64."""
        wide_dtype = "float64" if dtype == "float64" else "float32"
        window = LayerLayout(
            num_heads=self.num_key_heads,
            num_parts=1,
            row_len=conv_len(*self._sizes),
            dtype=dtype,
            keep=Keep.WINDOW,
            length=self.num_taps - 1,
            ring=CONV_RING,
        )
        tail = replace(window, row_len=tail_len(*self._sizes), dtype=wide_dtype, keep=Keep.TAIL, length=TILE, ring=RING)
        return window, tail, replace(tail, row_len=state_len(*self._sizes), keep=Keep.SNAPSHOT, ring=1)


def read_delta_sizes(values: Mapping[str, Any]) -> DeltaSizes:
    """Sizes that config.json names, or the family's defaults.

    Raises:
        ModelUnsupported: a size that makes no sense, or that is not implemented.
    """
    found = DeltaSizes(
        num_key_heads=_size(values, "linear_num_key_heads", 16),
        num_value_heads=_size(values, "linear_num_value_heads", 32),
        key_dim=_size(values, "linear_key_head_dim", 128),
        value_dim=_size(values, "linear_value_head_dim", 128),
        num_taps=_size(values, "linear_conv_kernel_dim", 4),
    )
    if found.num_value_heads % found.num_key_heads:
        raise _refusal("linear_num_value_heads", found.num_value_heads, f"no multiple of {found.num_key_heads}")
    for key, size in (("linear_key_head_dim", found.key_dim), ("linear_value_head_dim", found.value_dim)):
        if size % _MULTIPLE:
            raise _refusal(key, size, f"no multiple of {_MULTIPLE}")
    if not 2 <= found.num_taps <= MAX_TAPS:
        raise _refusal("linear_conv_kernel_dim", found.num_taps, f"not 2 to {MAX_TAPS}")
    return found


def read_delta_layers(values: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Which trunk layers are gated delta nets.

    Raises:
        ModelUnsupported: a kind of layer is not implemented, or no layer has full attention.
    """
    kinds = values.get("layer_types")
    if kinds is None:
        interval = _size(values, "full_attention_interval", 4)
        kinds = [_KINDS[(index + 1) % interval == 0] for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise _refusal("layer_types", kinds, f"not {num_layers} of {' and '.join(_KINDS)}")
    if _KINDS[1] not in kinds:
        raise _refusal("layer_types", kinds, "without a layer of full attention, which is not implemented")
    return frozenset(index for index, kind in enumerate(kinds) if kind == _KINDS[0])


def _size(values: Mapping[str, Any], key: str, default: int) -> int:
    size = int(default if values.get(key) is None else values[key])
    if not 0 < size <= 1 << 16:
        raise _refusal(key, size, "not 1 to 65536")
    return size


def _refusal(key: str, value: Any, why: str) -> ModelUnsupported:
    return ModelUnsupported(f"config.json: {key} = {value!r:.200} is {why}", option=key, value=value)
