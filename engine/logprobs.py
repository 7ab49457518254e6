"""Log-probabilities of chosen tokens and of the likeliest ones, from raw logits.

Only k + 1 values and ids and one rank of each position leave the device, packed into one float64 tensor (every id and
rank is exact in it).

Legend: B sequences, L of those that report, Q rows, V vocabulary, N positions, K likeliest tokens,
X = 2 (K + 1) + 1 packed numbers: logprobs, ids, rank; the chosen token's come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Who reports in a batch.

    Attributes:
        index_L: int64, places in the batch.
        num_top: K, the most that any of them reports.
    """

    index_L: torch.Tensor
    num_top: int


def logprobs_of(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int) -> torch.Tensor:
    """Packed [N, X], float64: the token's log-probability and rank, and those of the K likeliest.

    Equals are ordered by id, the lower first. The token's is finite whatever its logit: at least the dtype's lowest.
    """
    num_top = min(num_top, logits_NV.shape[1])
    lse_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    token_N1 = token_ids_N[:, None]
    value_N1 = logits_NV.gather(1, token_N1)
    rank_N1 = 1 + (logits_NV > value_N1).sum(dim=-1, keepdim=True)
    top_NK = top_ids(logits_NV, num_top)
    ids_NX = torch.cat([token_N1, top_NK], dim=1)
    lowest = torch.finfo(logits_NV.dtype).min
    logprobs_NX = (logits_NV.gather(1, ids_NX) - lse_N1).clamp(min=lowest)
    return torch.cat([logprobs_NX.double(), ids_NX.double(), rank_N1.double()], dim=1)


def top_ids(logits_NV: torch.Tensor, num_top: int) -> torch.Tensor:
    """The likeliest K ids, int64 [N, K], by logit and then by id, the lower first.

    Without sorting V numbers: torch.topk leaves open which of equal numbers it takes, so those at the border are looked
    for by id.
    """
    if num_top == 0:
        return torch.zeros(len(logits_NV), 0, dtype=torch.int64, device=logits_NV.device)
    values_NK, ids_NK = logits_NV.topk(num_top, dim=-1)
    border_N1 = values_NK[:, -1:]
    vocab_size = logits_NV.shape[1]
    token_V = torch.arange(vocab_size, device=logits_NV.device)
    at_border_NV = torch.where(logits_NV == border_N1, vocab_size - token_V, 0)
    border_ids_NK = vocab_size - at_border_NV.topk(num_top, dim=-1).values  # V where there are not so many
    # Those above the border, which topk found for certain, and after them those at it; then the first K in order.
    ids_N2K = torch.cat([ids_NK.masked_fill(values_NK <= border_N1, vocab_size), border_ids_NK], dim=1).sort().values
    known_N2K = logits_NV.gather(1, ids_N2K.clamp(max=vocab_size - 1)).masked_fill(ids_N2K == vocab_size, -torch.inf)
    # A token of logit -inf at the border ties with the places that hold none; those have higher ids.
    order_N2K = known_N2K.sort(dim=-1, descending=True, stable=True).indices
    return ids_N2K.gather(1, order_N2K)[:, :num_top]


def step_logprobs(logits_BQV: torch.Tensor, token_ids_BQ: torch.Tensor, rows: LogprobRows) -> torch.Tensor:
    """Packed [L, Q, X] of the tokens of a step; those past a sequence's emitted ones mean nothing."""
    logits_LQV, token_ids_LQ = logits_BQV[rows.index_L], token_ids_BQ[rows.index_L]
    packed_NX = logprobs_of(logits_LQV.flatten(0, 1), token_ids_LQ.flatten(), rows.num_top)
    return packed_NX.view(*token_ids_LQ.shape, -1)


def unpack(packed: Sequence[float], num_top: int) -> TokenLogprobs:
    """One position's numbers, on the host; of the likeliest tokens at most `num_top`."""
    num_ids = (len(packed) - 1) // 2
    logprobs, ids = packed[:num_ids], packed[num_ids : 2 * num_ids]
    pairs = zip(ids[1 : num_top + 1], logprobs[1 : num_top + 1], strict=True)
    top = tuple((int(token_id), logprob) for token_id, logprob in pairs)
    return TokenLogprobs(int(ids[0]), logprobs[0], int(packed[-1]), top)


def unpack_step(
    packed: Sequence[Sequence[Sequence[float]]], num_tops: Sequence[int | None], num_emitted: Sequence[int]
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """What each sequence of a step reports; None where it reports nothing.

    Args:
        packed: of `step_logprobs`, on the host: the sequences that report, in order.
        num_tops: `logprobs` of every sequence's parameters.
        num_emitted: tokens of every sequence.
    """
    lines = iter(packed)
    return tuple(
        None if num_top is None else tuple(unpack(position, num_top) for position in next(lines)[:count])
        for num_top, count in zip(num_tops, num_emitted, strict=True)
    )
