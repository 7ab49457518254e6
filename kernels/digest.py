"""A 64-bit digest of KV content that adds up: over frames, block sizes and head ranges, in any order.

The digest of a set of elements is the sum, modulo 2**64, of `(bits + 1) * weight` over them. `bits` is the element's
raw memory read as a two's complement integer of its own width, so -0.0 and NaN payloads count; the `+ 1` keeps zeros
from being weightless. `weight(layer, K or V, position, head, element)` is the product of three odd 64-bit numbers (of
layer and K|V, of position, of head and element), so a sum is a few dot products, any single change shows, and a swap
of two elements, positions, heads or layers shows for all but a vanishing share of content. It guards against mistakes
and broken hardware, not against somebody who wants a collision.

This is the device-neutral torch form; int64 arithmetic wraps on every device. It refuses to know about pools or frames.

Shapes: N blocks, H KV heads, S positions of each block, D head_dim.
"""

import numpy as np
import torch

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SALT_LAYER, _SALT_POSITION, _SALT_ELEMENT = 1 << 60, 2 << 60, 3 << 60
_MAX_ROWS = 1 << 16  # of a block
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}  # on a CPU the widened copy stays in the cache


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def weight(index: int) -> int:
    """An odd number out of `index`: splitmix64 with the last bit set."""
    value = (index * _GOLDEN + _GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & MASK
    return (value ^ (value >> 31)) | 1


def layer_weight(layer: int, kv: int) -> int:
    """Weight of K (0) or V (1) of a layer."""
    return weight(_SALT_LAYER + 2 * layer + kv)


def position_weight(position: int) -> int:
    """Weight of a logical position."""
    return weight(_SALT_POSITION + position)


def element_weight(head: int, element: int) -> int:
    """Weight of an element of a KV head; heads have at most 65,536 elements."""
    return weight(_SALT_ELEMENT + (head << 16) + element)


def _weights(index: torch.Tensor) -> torch.Tensor:
    """`weight` of every int64 in `index`."""
    value = index * _signed(_GOLDEN) + _signed(_GOLDEN)
    # >> on int64 drags the sign in; the mask undoes that.
    value = (value ^ ((value >> 30) & (MASK >> 30))) * _signed(_MULTIPLIERS[0])
    value = (value ^ ((value >> 27) & (MASK >> 27))) * _signed(_MULTIPLIERS[1])
    return (value ^ ((value >> 31) & (MASK >> 31))) | 1


class Digester:
    """Digests for one layout on one device; holds the weights of its elements.

    Args:
        num_kv_heads: of the whole model.
        head_dim: elements per head.
        device: where the values will be.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        assert head_dim <= 1 << 16
        head_H1 = torch.arange(num_kv_heads, dtype=torch.int64, device=device)[:, None]
        element_D = torch.arange(head_dim, dtype=torch.int64, device=device)
        self._element_HD = _weights(_SALT_ELEMENT + (head_H1 << 16) + element_D)
        self._offset_S = torch.arange(_MAX_ROWS, dtype=torch.int64, device=device)
        self._position_P = torch.empty(0, dtype=torch.int64, device=device)
        self._device = device

    def of(
        self,
        values_NHSD: torch.Tensor,
        *,
        layer: int,
        kv: int,
        first_position_N: torch.Tensor,
        head_first: int = 0,
        blocks_N: torch.Tensor | None = None,
    ) -> int:
        """Digest of K (`kv` 0) or V (1) of some blocks, or of the same positions of each of them.

        Args:
            values_NHSD: the content.
            layer: absolute layer index.
            kv: 0 or 1.
            first_position_N: logical position of each block's first row here, int64; rows follow each other.
            head_first: absolute index of the first head here.
            blocks_N: which blocks of `values_NHSD`, in the order of `first_position_N`; None for all of them.
        """
        _, num_heads, num_positions, head_dim = values_NHSD.shape
        element_HD = self._element_HD[head_first : head_first + num_heads]
        assert element_HD.shape == (num_heads, head_dim)
        bits_NHSD = values_NHSD.view(_BITS[values_NHSD.dtype.itemsize])
        position_NS = self._position_weights(first_position_N, num_positions)
        chunk = max(1, _CHUNK_ELEMENTS[self._device.type] // (num_heads * num_positions * head_dim))
        sum_of = _sum_on_cpu if self._device.type == "cpu" else _sum
        total = int(position_NS.sum()) * int(element_HD.sum())  # the `+ 1` of every element
        total += sum_of(bits_NHSD, blocks_N, position_NS, element_HD, chunk)
        return total * layer_weight(layer, kv) & MASK

    def _position_weights(self, first_position_N: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Weights [N, S], out of a table that grows with the longest prompt seen."""
        needed = int(first_position_N.max()) + num_positions
        weight_P = self._position_P
        if needed > len(weight_P):
            # Several threads may grow it at once: each indexes its own, and a shorter one that comes late is not kept.
            weight_P = _weights(_SALT_POSITION + torch.arange(2 * needed, dtype=torch.int64, device=self._device))
            if len(weight_P) > len(self._position_P):
                self._position_P = weight_P
        return weight_P[first_position_N[:, None] + self._offset_S[:num_positions]]


def _sum(
    bits_NHSD: torch.Tensor,
    blocks_N: torch.Tensor | None,
    position_NS: torch.Tensor,
    element_HD: torch.Tensor,
    chunk: int,
) -> int:
    """Sum of bits times weights of position and element; on any device."""
    total = torch.zeros((), dtype=torch.int64, device=bits_NHSD.device)
    for start in range(0, len(position_NS), chunk):
        rows = slice(start, start + chunk)
        part_NHSD = bits_NHSD[rows] if blocks_N is None else bits_NHSD[blocks_N[rows]]
        row_NS = part_NHSD.to(torch.int64, copy=True).mul_(element_HD[:, None]).sum((1, 3))
        total += row_NS.mul_(position_NS[rows]).sum()
    return int(total)


def _sum_on_cpu(
    bits_NHSD: torch.Tensor,
    blocks_N: torch.Tensor | None,
    position_NS: torch.Tensor,
    element_HD: torch.Tensor,
    chunk: int,
) -> int:
    """The same through NumPy, which multiplies and adds in one pass and starts sooner: twice as fast."""
    bits, element, position = bits_NHSD.numpy(), element_HD.numpy(), position_NS.numpy()
    blocks = None if blocks_N is None else blocks_N.numpy()
    total = 0
    for start in range(0, len(position), chunk):
        rows = slice(start, start + chunk)
        wide = (bits[rows] if blocks is None else bits[blocks[rows]]).astype(np.int64)
        total += int((np.einsum("nhsd,hd->ns", wide, element) * position[rows]).sum())
    return total
