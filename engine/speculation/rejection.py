"""Verifies drafts by rejection sampling: emitted tokens follow the target's distribution exactly, for any drafts.

Token by token: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
As a block: Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), which never accepts fewer. With
drafts that are point masses both are the same, so block verification is for probabilistic drafts only.

A row of q that is all zero means that there is no draft: it is accepted with probability 0, and the residual is all of
p. So one rule covers the last row (the bonus token), rows past a cap, and a draft head none of whose tokens is allowed.

The random numbers of a step are keyed by its *first* position and numbered by draft. If they were keyed by each draft's
own position, the next step would draw the same numbers again, after a block's verdict had already depended on them, and
that would bias the next verdict.

The rules are those of `kernels.sampling.draft_rows`.

If ranks share a vocabulary, each has the probabilities of its own tokens, and they exchange only sums (of the softmax,
of residual weights) and probabilities of drafts. These sums round differently from those of a whole row, by about 1e-16
relative in float64 and 1e-7 in float32, so a uniform number that close to a threshold may fall on the other side. The
distribution is the same, and apart from such cases so are the tokens.

Legend: S sampled sequences, K draft tokens, Q = K + 1 rows, V vocabulary (of it those this process has), B sequences of
the batch.
"""

from dataclasses import dataclass

import torch

from baton.engine.sampling.sampler import SamplingRows, edit_logits, process_logits, wide
from baton.engine.speculation.verify import (
    DraftIds,
    DraftLaw,
    DraftProbs,
    TargetIds,
    Verified,
    VerifyInputs,
    accept,
    emit,
    usable_drafts,
)
from baton.kernels.sampling.draft_rows import (
    accept_chances,
    block_chances,
    block_reach,
    longest_prefix,
    pick,
    residual_weights,
)
from baton.kernels.sampling.noise import Purpose, uniform
from baton.model.vocab import WHOLE, CutVocab, Vocab


@dataclass(frozen=True, slots=True)
class RejectionVerifier:
    """Verifies sampled sequences by rejection sampling, and greedy ones greedily.

    Attributes:
        is_probabilistic: drafts were sampled from the given distributions; otherwise they are point masses.
        block: verify probabilistic drafts as a block.
    """

    is_probabilistic: bool = True
    block: bool = True

    @property
    def draft_law(self) -> DraftLaw:
        """SAMPLED if drafts come with distributions, else LIKELIEST."""
        return DraftLaw.SAMPLED if self.is_probabilistic else DraftLaw.LIKELIEST

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See the module."""
        sampling, logits_BQV, vocab = inputs.sampling, inputs.target_logits_BQV, inputs.vocab
        if sampling is not None:
            logits_BQV = edit_logits(logits_BQV, sampling, inputs.drafts.valid_ids())
        # Verify every sequence as if it were greedy; the results of sampled ones are not used.
        best_BQ1, likeliest_BQ = vocab.best(logits_BQV)
        greedy = accept(inputs.drafts, TargetIds(likeliest_BQ), inputs.draft_cap_B)
        if sampling is None or sampling.num_sampled == 0:
            return greedy
        index_S = sampling.index_S
        drafts = DraftIds(inputs.drafts.ids_BK[index_S])
        proposals = Proposals(
            drafts,
            inputs.draft_probs if self.is_probabilistic else None,
            usable_drafts(drafts, inputs.draft_cap_B[index_S]),
            logits_BQV.shape[-1],
            vocab,
        )
        position_S = inputs.position_B[index_S]
        num_drafts = drafts.ids_BK.shape[1]
        sampled = reject(
            proposals,
            target_probs(logits_BQV, sampling, best_BQ1, vocab),
            uniform(sampling.seed_S, sampling.choice_S, position_S, Purpose.ACCEPT, num_drafts),
            uniform(sampling.seed_S, sampling.choice_S, position_S, Purpose.RESIDUAL, 1)[:, 0],
            block=self.block and self.is_probabilistic,
        )
        return Verified(
            token_ids_BQ=greedy.token_ids_BQ.index_copy(0, index_S, sampled.token_ids_BQ),
            accepted_len_B=greedy.accepted_len_B.index_copy(0, index_S, sampled.accepted_len_B),
        )


def target_probs(
    logits_BQV: torch.Tensor, sampling: SamplingRows, best_BQ1: torch.Tensor, vocab: Vocab = WHOLE
) -> torch.Tensor:
    """The distributions that sampled sequences draw from, [S, Q, V], float64 or float32; takes edited logits."""
    logits_SQV, best_SQ1 = wide(logits_BQV[sampling.index_S]), wide(best_BQ1[sampling.index_S])
    return probabilities(process_logits(logits_SQV, sampling, best_SQ1, vocab), vocab)


def probabilities(logits_XV: torch.Tensor, vocab: Vocab) -> torch.Tensor:
    """Softmax of `process_logits`' rows, whose maximum is 0, over the tokens of all ranks; [X, V]."""
    if not vocab.is_cut:
        return logits_XV.softmax(dim=-1)
    weights_XV = logits_XV.exp()
    total_X1 = vocab.add(weights_XV.sum(dim=-1, keepdim=True, dtype=torch.float64))
    return weights_XV / total_X1.to(weights_XV.dtype)


@dataclass(frozen=True, slots=True)
class Proposals:
    """The drafts of sampled sequences and the distributions they were drawn from.

    Attributes:
        drafts: [S, K].
        probs: None if the drafts are point masses.
        num_usable_S: int64, drafts that may be accepted; nothing past them is read.
        vocab_size: V.
        vocab: which tokens V are.
    """

    drafts: DraftIds
    probs: DraftProbs | None
    num_usable_S: torch.Tensor
    vocab_size: int
    vocab: Vocab = WHOLE

    def chance_of_drafts(self) -> torch.Tensor:
        """Probability q of each draft, float64 [S, K]; 0 if there is no draft, or if the draft head lacks its token."""
        ids_SK = self.drafts.ids_BK.clamp(min=0)
        is_unusable_SK = torch.arange(ids_SK.shape[1], device=ids_SK.device) >= self.num_usable_S[:, None]
        if self.probs is None:
            return torch.ones(ids_SK.shape, dtype=torch.float64, device=ids_SK.device).masked_fill(is_unusable_SK, 0.0)
        columns_SK = ids_SK if self.probs.t2d_V is None else self.probs.t2d_V[ids_SK].long()
        q_SK1 = self.vocab.values_at(self.probs.probs_SKC, columns_SK.clamp(min=0)[:, :, None])
        q_SK = q_SK1[:, :, 0].double()
        return q_SK.masked_fill(is_unusable_SK | (columns_SK < 0), 0.0)

    def row(self, place_S: torch.Tensor) -> torch.Tensor:
        """Distribution q [S, V] of the draft after `place_S` others; zeros where there is none."""
        num_drafts = self.drafts.ids_BK.shape[1]
        if num_drafts == 0:
            return torch.zeros(len(place_S), self.vocab_size, device=place_S.device)
        is_there_S1 = (place_S < self.num_usable_S)[:, None]
        column_S1 = place_S.clamp(max=num_drafts - 1)[:, None]
        if self.probs is None:
            ids_S1 = self.drafts.ids_BK.gather(1, column_S1).clamp(min=0)
            empty_SX = torch.zeros(len(place_S), self.vocab.table_width(self.vocab_size), device=place_S.device)
            q_SX = empty_SX.scatter(1, self.vocab.columns(ids_S1), is_there_S1.to(empty_SX.dtype))
            return q_SX[:, : self.vocab_size]
        sequence_S = torch.arange(len(place_S), device=place_S.device)
        q_SC = self.probs.probs_SKC[sequence_S, column_S1[:, 0]]
        t2d_V = self.probs.t2d_V
        if t2d_V is not None:
            q_SC = q_SC[:, t2d_V.clamp(min=0)].masked_fill(t2d_V < 0, 0.0)
        return q_SC.masked_fill(~is_there_S1, 0.0)


def reject(
    proposals: Proposals,
    target_SQV: torch.Tensor,
    accept_uniform_SK: torch.Tensor,
    residual_uniform_S: torch.Tensor,
    *,
    block: bool,
) -> Verified:
    """Verify the drafts of sampled sequences; result tensors are [S, Q] and [S].

    Args:
        proposals: the drafts.
        target_SQV: the target's distributions.
        accept_uniform_SK: float64 in (0, 1).
        residual_uniform_S: float64 in (0, 1).
        block: verify the drafts as a block.
    """
    ids_SK, vocab = proposals.drafts.ids_BK, proposals.vocab
    num_drafts = ids_SK.shape[1]
    p_SK = vocab.values_at(target_SQV[:, :num_drafts], ids_SK.clamp(min=0)[:, :, None])[:, :, 0].double()
    q_SK = proposals.chance_of_drafts()
    if block:
        reach_SQ = block_reach(p_SK, q_SK)
        chances_SK = block_chances(reach_SQ, block_leftovers(proposals, target_SQV, reach_SQ))
        stands_SK = accept_uniform_SK < chances_SK
        is_usable_SK = torch.arange(num_drafts, device=ids_SK.device) < proposals.num_usable_S[:, None]
        accepted_len_S = longest_prefix(stands_SK & is_usable_SK)
    else:
        reach_SQ = torch.ones_like(target_SQV[:, :, 0], dtype=torch.float64)
        stands_SK = accept_uniform_SK < accept_chances(p_SK, q_SK)
        accepted_len_S = stands_SK.to(torch.int64).cumprod(dim=1).sum(dim=1)
    p_SV = target_SQV[torch.arange(len(ids_SK), device=ids_SK.device), accepted_len_S]
    reach_S = reach_SQ.gather(1, accepted_len_S[:, None])[:, 0]
    weights_SV = residual_weights(p_SV, proposals.row(accepted_len_S), reach_S)
    weights_SV = or_target(weights_SV, p_SV, vocab)
    if isinstance(vocab, CutVocab):
        last_S = pick_among_ranks(weights_SV, residual_uniform_S, vocab)
    else:
        last_S = pick(weights_SV, residual_uniform_S)
    return emit(proposals.drafts, accepted_len_S, last_S[:, None].expand(-1, num_drafts + 1))


def block_leftovers(proposals: Proposals, target_SQV: torch.Tensor, reach_SQ: torch.Tensor) -> torch.Tensor:
    """Sums of the residual weights after 1 ... K drafts, float64 [S, K]; arbitrary values past the usable drafts."""
    num_drafts = target_SQV.shape[1] - 1
    leftover_SK = reach_SQ.new_zeros(len(reach_SQ), num_drafts)
    for place in range(1, num_drafts + 1):
        q_SV = proposals.row(torch.full_like(proposals.num_usable_S, place))
        weights_SV = residual_weights(target_SQV[:, place], q_SV, reach_SQ[:, place])
        leftover_SK[:, place - 1] = weights_SV.sum(dim=-1, dtype=torch.float64)
    return proposals.vocab.add(leftover_SK)


def or_target(weights_SV: torch.Tensor, p_SV: torch.Tensor, vocab: Vocab = WHOLE) -> torch.Tensor:
    """The weights, or the target distribution if no weight is left (p = q up to rounding)."""
    is_empty_S1 = ~(vocab.add(weights_SV.sum(dim=-1, keepdim=True)) > 0)
    return torch.where(is_empty_S1, p_SV, weights_SV)


def pick_among_ranks(weights_SV: torch.Tensor, uniform_S: torch.Tensor, vocab: CutVocab) -> torch.Tensor:
    """`pick` for weights that ranks share: the sums of lower ranks come before a rank's own; 0 if all weights are 0."""
    own_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    # Added one by one, so that the sum up to the last rank with any weight equals the total, bit for bit.
    starts = [torch.zeros_like(own_SV[:, -1:])]
    for part_S1 in vocab.parts(own_SV[:, -1:]).unbind():
        starts.append(starts[-1] + part_S1)
    threshold_S1 = uniform_S[:, None].double() * starts[-1]
    is_past_SV = (starts[vocab.rank] + own_SV > threshold_S1) & (weights_SV > 0)
    ids_S = vocab.first + is_past_SV.to(torch.int8).argmax(dim=-1)
    ids_S = ids_S.masked_fill(~is_past_SV.any(dim=-1), vocab.vocab_size)
    lowest_S = vocab.parts(ids_S).amin(dim=0)
    return lowest_S.masked_fill(lowest_S == vocab.vocab_size, 0)
