"""Computes log-probabilities of sampled tokens and of the likeliest ones, from raw logits.

Only k + 1 values and ids and one rank per position leave the device, packed into one float64 tensor, in which every id
and rank is exact.

If ranks share a vocabulary (`model.vocab`), each contributes the log of its sum of exponentials, its K likeliest
tokens, and the sampled token's logit if that token is its own; then how many of its logits are larger. That takes two
small collectives. Ids and ranks equal those of a whole row; log-probabilities differ by rounding, as the summation
order differs.

Legend: B sequences, L of those that report, Q rows, V vocabulary (of it those this process has), N positions, K
likeliest tokens, R ranks of a group, X = 2 (K + 1) + 1 packed numbers: logprobs, ids, rank; the chosen token's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.request import TokenLogprobs
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.logprobs import finite_logprobs, logprobs_reference, logprobs_topk, top_ids
from baton.kernels.sampling.rows import settled
from baton.model.vocab import WHOLE, CutVocab, Vocab

LOGITS_ROWS = 64  # of a prompt at once, if its logprobs are requested


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The sequences of a batch that report log-probabilities.

    Attributes:
        index_L: int64, places in the batch.
        num_top: K, the most that any of them reports.
    """

    index_L: torch.Tensor
    num_top: int


def logprobs_of(
    logits_NV: torch.Tensor,
    token_ids_N: torch.Tensor,
    num_top: int,
    vocab: Vocab = WHOLE,
    kernels: Implementation | None = None,
) -> torch.Tensor:
    """Packed [N, X], float64: the token's log-probability and rank, and the K likeliest tokens.

    Ties are ordered by id, lower first. The token's log-probability is always finite: at least the dtype's lowest
    value. `kernels` selects the kernels that compute it (`Model.sampling_implementation`).
    """
    if kernels is not None:
        return logprobs_topk(logits_NV, settled(token_ids_N), num_top, implementation=kernels)
    if isinstance(vocab, CutVocab):
        return _logprobs_among_ranks(logits_NV, token_ids_N, num_top, vocab)
    return logprobs_reference(logits_NV, token_ids_N, min(num_top, logits_NV.shape[1]))


def _logprobs_among_ranks(
    logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int, vocab: CutVocab
) -> torch.Tensor:
    num_top, num_own = min(num_top, vocab.vocab_size), min(num_top, logits_NV.shape[1])
    token_N1 = token_ids_N[:, None]
    column_N1 = (token_N1 - vocab.first).clamp(0, logits_NV.shape[1] - 1)
    own_NK = top_ids(logits_NV, num_own)
    said = [logits_NV.logsumexp(dim=-1, keepdim=True), logits_NV.gather(1, column_N1), logits_NV.gather(1, own_NK)]
    said_RNX = vocab.parts(torch.cat([*(part.double() for part in said), (own_NK + vocab.first).double()], dim=1))
    lse_N1 = said_RNX[..., :1].logsumexp(dim=0)
    value_N1 = vocab.of_owner(said_RNX[..., 1:2], token_N1)
    rank_N1 = 1 + vocab.parts((logits_NV > value_N1).sum(dim=-1, keepdim=True)).sum(dim=0)
    # Concatenated in rank order, ties are in id order, and the stable sort keeps that.
    said_NRX = said_RNX[..., 2:].movedim(0, 1)
    values_NX, ids_NX = said_NRX[..., :num_own].flatten(1), said_NRX[..., num_own:].flatten(1)
    values_NX, order_NX = values_NX.sort(dim=-1, descending=True, stable=True)
    top_NK = ids_NX.gather(1, order_NX)[:, :num_top]
    logprobs_NX = torch.cat([value_N1, values_NX[:, :num_top]], dim=1) - lse_N1
    logprobs_NX = finite_logprobs(logprobs_NX, logits_NV.dtype)
    return torch.cat([logprobs_NX, token_N1.double(), top_NK, rank_N1.double()], dim=1)


def step_logprobs(
    logits_BQV: torch.Tensor,
    token_ids_BQ: torch.Tensor,
    rows: LogprobRows,
    vocab: Vocab = WHOLE,
    kernels: Implementation | None = None,
) -> torch.Tensor:
    """Packed [L, Q, X] for the tokens of a step; entries past a sequence's emitted tokens are meaningless."""
    logits_LQV, token_ids_LQ = logits_BQV[rows.index_L], token_ids_BQ[rows.index_L]
    packed_NX = logprobs_of(logits_LQV.flatten(0, 1), token_ids_LQ.flatten(), rows.num_top, vocab, kernels)
    return packed_NX.view(*token_ids_LQ.shape, -1)


def unpack(packed: Sequence[float], num_top: int) -> TokenLogprobs:
    """Unpack one position's numbers, on the host, with at most `num_top` likeliest tokens."""
    num_ids = (len(packed) - 1) // 2
    logprobs, ids = packed[:num_ids], packed[num_ids : 2 * num_ids]
    pairs = zip(ids[1 : num_top + 1], logprobs[1 : num_top + 1], strict=True)
    top = tuple((int(token_id), logprob) for token_id, logprob in pairs)
    return TokenLogprobs(int(ids[0]), logprobs[0], int(packed[-1]), top)


def num_packed(num_top: int) -> int:
    """X of a step whose sequences report up to `num_top` likeliest tokens."""
    return 2 * (num_top + 1) + 1


def unpack_step(
    reports: torch.Tensor, num_rows: int, num_tops: Sequence[int | None], num_emitted: Sequence[int]
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """Log-probabilities that each sequence of a step reports; None if it reports none.

    Args:
        reports: result of `step_logprobs`, on the host: float64 [L * Q * X], the sequences that report, in order.
        num_rows: Q.
        num_tops: `logprobs` of every sequence's parameters.
        num_emitted: number of tokens that every sequence emitted.
    """
    num_reporting = sum(num_top is not None for num_top in num_tops)
    lines = iter(reports.view(num_reporting, num_rows, -1).tolist())
    return tuple(
        None if num_top is None else tuple(unpack(position, num_top) for position in next(lines)[:count])
        for num_top, count in zip(num_tops, num_emitted, strict=True)
    )
