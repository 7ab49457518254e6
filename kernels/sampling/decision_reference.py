"""The decision message and its digest in torch, on any device: the reference for `kernels.sampling.decision`.

A message is int32: the number of the decision, the digest's low and high word, and the values. The digest is the sum,
modulo 2**64, of the words of all tensors, one after the other, each times an odd number that depends only on its place.
So any single change is detected, and a swap for all but a vanishing share of content. It guards against mistakes, not
against an attacker who constructs a collision.

Shapes: N words.
"""

from collections.abc import Sequence
from typing import Final

import torch

HEAD_LEN: Final = 3  # number, digest in two words
MAX_STATE: Final = 10  # state tensors of decode rows, chunks and experts; the kernel has arguments for each
DIVERGED: Final = -1  # neither a token nor a count
WEIGHT: Final = -7046029254386353131  # 2^64 / golden ratio, odd
_NUMBERS: Final = 0x7FFFFFFF


def message_number(count: int) -> int:
    """Number of the `count`th decision as messages hold it: 31 bits."""
    return count & _NUMBERS


def pack_reference(
    values: torch.Tensor, state: Sequence[torch.Tensor], number: int, weights_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Build the message, int32 [3 + values].

    Args:
        values: int64 that fit in 31 bits.
        state: at most MAX_STATE integer tensors.
        number: number of the decision, 31 bits.
        weights_N: as in `digest`.
    """
    assert len(state) <= MAX_STATE
    number_1 = torch.full((1,), number, dtype=torch.int32, device=values.device)
    digest_2 = digest(state, values.device, weights_N).view(torch.int32)
    return torch.cat([number_1, digest_2, values.flatten().to(torch.int32)])


def compare_reference(own_N: torch.Tensor, decided_N: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values if the messages are equal, otherwise `DIVERGED` everywhere."""
    return torch.where((decided_N == own_N).all(), values, DIVERGED)


def digest(state: Sequence[torch.Tensor], device: torch.device, weights_N: torch.Tensor | None = None) -> torch.Tensor:
    """64-bit digest, int64 [1], which changes with any element of any tensor, or when two elements swap places.

    `weights_N` are those of `digest_weights`, if the caller has them; there may be more than needed.
    """
    if not state:
        return torch.zeros(1, dtype=torch.int64, device=device)
    words_N = torch.cat([tensor.flatten().to(torch.int64) for tensor in state])
    if weights_N is None:
        weights_N = digest_weights(len(words_N), device)
    return (words_N * weights_N[: len(words_N)]).sum(dim=0, keepdim=True)


def digest_weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd weights of `count` places, int64 [count]; each depends only on its place."""
    weights_N = torch.arange(1, count + 1, dtype=torch.int64, device=device) * WEIGHT
    return (weights_N ^ (weights_N >> 31)) * WEIGHT | 1
