"""Counter-based numbers in torch: what the kernels of `noise_triton` must draw.

A draw is a function of (seed, choice, position, purpose, number) and of nothing else. Philox4x32-10 of Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): counter (number // 4, position, choice,
purpose), key the seed's halves; a block has four words. It refuses to know what a draw is for, beyond these names.

Shapes: X any, broadcast.
"""

from typing import Final

import torch

SAMPLE: Final = 0  # the noise of a token's choice, by the token's position
ACCEPT: Final = 1  # whether drafts stand; this and what follows by the first position of a step
RESIDUAL: Final = 2  # the token after the drafts that stand
SYNTHETIC: Final = 4  # acceptance made up for a benchmark
SYNTHETIC_SEED: Final = 0x5EED

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS: Final = (0x9E3779B9, 0xBB67AE85)
_MASK: Final = 0xFFFFFFFF


def words(
    number_X: torch.Tensor, seed_X: torch.Tensor, choice_X: torch.Tensor, position_X: torch.Tensor, purpose: int
) -> torch.Tensor:
    """The 32-bit word of each number, int64."""
    counter = [number_X // 4, position_X, choice_X, torch.full_like(number_X, purpose)]
    keys = [seed_X & _MASK, seed_X >> 32]
    for _ in range(10):
        # int64 products wrap, which leaves all 64 bits right.
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> 32 & _MASK) ^ counter[1] ^ keys[0],
            second & _MASK,
            (first >> 32 & _MASK) ^ counter[3] ^ keys[1],
            first & _MASK,
        ]
        keys = [(key + more) & _MASK for key, more in zip(keys, _INCREMENTS, strict=True)]
    place_X = number_X % 4
    low_X = torch.where(place_X == 0, counter[0], counter[1])
    high_X = torch.where(place_X == 2, counter[2], counter[3])
    return torch.where(place_X < 2, low_X, high_X)


def uniforms(
    number_X: torch.Tensor, seed_X: torch.Tensor, choice_X: torch.Tensor, position_X: torch.Tensor, purpose: int
) -> torch.Tensor:
    """The draws, float64 in (0, 1)."""
    return (words(number_X, seed_X, choice_X, position_X, purpose).double() + 0.5) * 2.0**-32


def gumbels(
    number_X: torch.Tensor, seed_X: torch.Tensor, choice_X: torch.Tensor, position_X: torch.Tensor, purpose: int
) -> torch.Tensor:
    """Standard Gumbel noise, float32, of float64 arithmetic: argmax(logits + noise) is a draw from their softmax."""
    return (-(-uniforms(number_X, seed_X, choice_X, position_X, purpose).log()).log()).float()
