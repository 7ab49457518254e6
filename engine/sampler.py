"""Logits to token ids: temperature, top-k, top-p, and the Gumbel draw that makes a choice repeatable.

A token is argmax(processed logits + noise), where the noise is a function of the request's seed and the token's
position (engine.philox). Every operation is along one row, so a row's token never depends on its neighbours. Greedy
rows take the argmax of their raw logits; no noise is drawn for them. Values are trusted (core.sampling checks them).

Legend: B sequences, Q consecutive positions of each, V vocabulary, S sequences that sample, U of those truncate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.sampling import SamplingParams
from baton.engine.philox import Purpose, gumbel

MIN_TEMPERATURE = 1e-30  # below it float32 would divide by zero; any temperature this small is greedy in effect


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The sampled sequences of a batch. Greedy ones are absent, so nothing done here can touch them.

    Attributes:
        index_S: int64, place of each in the batch.
        temperature_S: float64, positive.
        top_k_S: int64, 0 keeps all.
        top_p_S: float64.
        seed_S: int64.
        choice_S: int64.
        truncated_U: int64, places in S of those with top-k or top-p; None where there are none.
    """

    index_S: torch.Tensor
    temperature_S: torch.Tensor
    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    seed_S: torch.Tensor
    choice_S: torch.Tensor
    truncated_U: torch.Tensor | None


def truncates(params: SamplingParams) -> bool:
    """Whether these parameters cut off any tail of the distribution."""
    return params.top_k > 0 or params.top_p < 1.0


def sampling_rows(params: Sequence[SamplingParams], device: torch.device) -> SamplingRows | None:
    """Rows for a batch whose parameters are on the host; None if all of it is greedy."""
    sampled = [(row, item) for row, item in enumerate(params) if not item.greedy]
    if not sampled:
        return None
    floats_2S = torch.tensor(
        [[max(item.temperature, MIN_TEMPERATURE) for _, item in sampled], [item.top_p for _, item in sampled]],
        dtype=torch.float64,
    ).to(device)
    ints_4S = torch.tensor(
        [[row, item.top_k, item.seed, 0] for row, item in sampled],
        dtype=torch.int64,
    ).T.to(device)
    cut = [place for place, (_, item) in enumerate(sampled) if truncates(item)]
    return SamplingRows(
        index_S=ints_4S[0],
        temperature_S=floats_2S[0],
        top_k_S=ints_4S[1],
        top_p_S=floats_2S[1],
        seed_S=ints_4S[2],
        choice_S=ints_4S[3],
        truncated_U=torch.tensor(cut, dtype=torch.int64, device=device) if cut else None,
    )


def draw_noise(
    sampling: SamplingRows | None, position_B: torch.Tensor, num_positions: int, vocab_size: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Gumbel noise [S, num_positions, V] for the positions that begin at each sequence's `position_B`."""
    if sampling is None:
        return None
    offsets = torch.arange(num_positions, device=position_B.device)
    position_SP = position_B[sampling.index_S][:, None] + offsets
    noise_NV = gumbel(
        sampling.seed_S.repeat_interleave(num_positions),
        sampling.choice_S.repeat_interleave(num_positions),
        position_SP.flatten(),
        Purpose.SAMPLE,
        vocab_size,
        dtype,
    )
    return noise_NV.view(-1, num_positions, vocab_size)


def process_logits(logits_SQV: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
    """Logits after temperature, top-k and top-p; what was cut off is -inf, and at least one token is left."""
    # The maximum becomes 0, so that no temperature overflows it.
    shifted_SQV = logits_SQV - logits_SQV.amax(dim=-1, keepdim=True)
    scaled_SQV = shifted_SQV / sampling.temperature_S.to(logits_SQV.dtype)[:, None, None]
    cut_U = sampling.truncated_U
    if cut_U is None:
        return scaled_SQV
    kept_UQV = truncate(scaled_SQV[cut_U], sampling.top_k_S[cut_U], sampling.top_p_S[cut_U])
    return scaled_SQV.index_copy(0, cut_U, kept_UQV)


def truncate(logits_UQV: torch.Tensor, top_k_U: torch.Tensor, top_p_U: torch.Tensor) -> torch.Tensor:
    """Set all but the k likeliest tokens, then all but the smallest set whose probability reaches p, to -inf.

    Equal logits are ordered by id, the lower first. Top-p counts the probability that top-k left over.
    """
    sorted_UQV, order_UQV = logits_UQV.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits_UQV.shape[-1]
    rank_V = torch.arange(vocab_size, device=logits_UQV.device)
    limit_U = torch.where(top_k_U > 0, top_k_U, vocab_size)
    keep_UQV = (rank_V < limit_U[:, None, None]).expand_as(sorted_UQV)
    mass_UQV = sorted_UQV.double().masked_fill(~keep_UQV, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
    # A token stays while what lies before it falls short of p; before the first lies nothing.
    before_UQV = torch.cat([torch.zeros_like(mass_UQV[..., :1]), mass_UQV[..., :-1]], dim=-1)
    top_p_U11 = top_p_U[:, None, None]
    keep_UQV = keep_UQV & ((before_UQV < top_p_U11) | (top_p_U11 >= 1.0))
    drop_UQV = torch.zeros_like(keep_UQV).scatter(-1, order_UQV, ~keep_UQV)
    return logits_UQV.masked_fill(drop_UQV, -torch.inf)


def choose(logits_BQV: torch.Tensor, sampling: SamplingRows | None, noise_SQV: torch.Tensor | None) -> torch.Tensor:
    """The token of every row, int64 [B, Q]; among equal maxima the lowest id (what torch.argmax promises)."""
    ids_BQ = logits_BQV.argmax(dim=-1)
    if sampling is None:
        return ids_BQ
    assert noise_SQV is not None
    scores_SQV = process_logits(logits_BQV[sampling.index_S], sampling) + noise_SQV
    return ids_BQ.index_copy(0, sampling.index_S, scores_SQV.argmax(dim=-1))


def sample(logits_BV: torch.Tensor, sampling: SamplingRows | None, position_B: torch.Tensor) -> torch.Tensor:
    """The token of one position of each sequence, int64 [B]; `position_B` is where that token will stand."""
    noise_SQV = draw_noise(sampling, position_B, 1, logits_BV.shape[-1], logits_BV.dtype)
    return choose(logits_BV[:, None], sampling, noise_SQV)[:, 0]
