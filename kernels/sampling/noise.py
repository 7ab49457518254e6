"""Counter-based random numbers: a draw is a pure function of (seed, choice, position, purpose, number).

Philox4x32-10 with counter (number // 4, position, choice, purpose) and the seed's halves as key; a block has four
words. There is no state to advance, so a draw cannot depend on the batch, on earlier steps or on speculation. The
kernels of `noise_triton` draw the same numbers. This module knows the names of purposes, but not what the numbers are
used for.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Legend: N rows, V vocabulary, W = ceil(V / 4) Philox blocks of a row.
"""

from enum import IntEnum
from typing import Final

import torch

SYNTHETIC_SEED: Final = 0x5EED

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MAX_ELEMENTS = 1 << 22  # limit of a temporary; for a large vocabulary, rows are drawn in parts

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Purpose(IntEnum):
    """What a draw is used for; two purposes never share a number."""

    SAMPLE = 0  # the noise for sampling a token, keyed by the token's position
    ACCEPT = 1  # whether drafts are accepted; this and the following are keyed by the first position of a step
    RESIDUAL = 2  # the token after the accepted drafts
    DRAFT = 3  # the drafts
    SYNTHETIC = 4  # synthetic acceptance for benchmarks, keyed by place in the batch instead of a seed


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Compute four 32-bit words for each counter; all tensors are int64 with unsigned 32-bit values, and broadcast."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for round_index in range(_NUM_ROUNDS):
        if round_index:
            key0 = (key0 + _KEY_INCREMENTS[0]) & _MASK
            key1 = (key1 + _KEY_INCREMENTS[1]) & _MASK
        # int64 multiplication wraps, which keeps all 64 bits right; the mask removes the sign that the shift extends.
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0, word2 = ((product1 >> 32) & _MASK) ^ word1 ^ key0, ((product0 >> 32) & _MASK) ^ word3 ^ key1
        word1, word3 = product1 & _MASK, product0 & _MASK
    return word0, word1, word2, word3


def uniform(
    seed_N: torch.Tensor,
    choice_N: torch.Tensor,
    position_N: torch.Tensor,
    purpose: Purpose,
    num_draws: int,
    first: int = 0,
) -> torch.Tensor:
    """Draw uniforms in (0, 1), float64 [N, num_draws]: never 0 or 1, so that the logarithms in `gumbel` are finite.

    The numbers are those from `first` on of an unlimited sequence.
    """
    block_W = torch.arange(first // 4, -(-(first + num_draws) // 4), dtype=torch.int64, device=seed_N.device)
    purpose_W = torch.full_like(block_W, int(purpose))
    key = (seed_N[:, None] & _MASK, seed_N[:, None] >> 32)
    counter = (block_W[None], position_N[:, None], choice_N[:, None], purpose_W[None])
    words_NW4 = torch.stack(philox4x32(counter, key), dim=-1)
    return words_NW4.flatten(1)[:, first % 4 :][:, :num_draws].double().add_(0.5).mul_(2.0**-32)


def gumbel(
    seed_N: torch.Tensor,
    choice_N: torch.Tensor,
    position_N: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    dtype: torch.dtype,
    first: int = 0,
) -> torch.Tensor:
    """Draw standard Gumbel noise [N, V]: argmax(logits + noise) is one draw from softmax(logits).

    Args:
        seed_N: int64 in [0, 2^63), seed of the request.
        choice_N: int64, which of a request's parallel answers.
        position_N: int64, index in the sequence of the token being sampled.
        purpose: keeps draws for different uses apart.
        vocab_size: V, or the number of tokens from `first` on.
        dtype: of the result; the arithmetic is float64 whatever it is.
        first: id of the first token.
    """
    num_rows = seed_N.shape[0]
    noise_NV = torch.empty(num_rows, vocab_size, dtype=dtype, device=seed_N.device)
    step = max(1, _MAX_ELEMENTS // vocab_size)
    for row in range(0, num_rows, step):
        rows = slice(row, row + step)
        draws = uniform(seed_N[rows], choice_N[rows], position_N[rows], purpose, vocab_size, first)
        noise_NV[rows] = draws.log_().neg_().log_().neg_().to(dtype)
    return noise_NV
