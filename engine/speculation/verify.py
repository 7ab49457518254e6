"""Which draft tokens stand: the interface of every verification mode, and the two that emit the target's own choice.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), accept a draft x
with probability min(1, p(x) / q(x)), p the target's distribution and q the draft's, and draw from the residual at the
first rejection (`engine.speculation.rejection`). With a draft that is a point mass (q(x) = 1): accept with probability
p(x).

*Coupled* verification fixes the target's own draw at each position beforehand, by its Gumbel noise. A draft stands if
it equals that draw, and the draw is emitted either way: the tokens are those of speculation off, not only alike in
law. A draft made without knowledge of the noise (an argmax) is hit with probability p(x), the rate above. A draft
sampled from q with the *same* noise is hit with probability at least (1 - d) / (1 + d), d being the total variation
distance of p and q (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024).

Ids are of two kinds that never mix: those of the target's vocabulary, which everything here is about, and columns of
a draft head over a smaller one, which end where drafts are made (`engine.speculation.drafting`,
`model.draft_head.HeadIds`).

Legend: B sequences, K draft tokens, Q = K + 1 rows, V vocabulary, C columns of the draft head, S sampled sequences.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from baton.engine.grammar.masks import GrammarMasks
from baton.engine.sampling.sampler import SamplingRows, choose
from baton.kernels.sampling.rows import DrawRows
from baton.model.vocab import WHOLE, Vocab


@dataclass(frozen=True, slots=True)
class DraftIds:
    """Tokens that were proposed, int64 [B, K], ids of the target's vocabulary; never emitted as they are.

    -1 is no draft: nothing after it is considered. Where a draft is missing must not depend on what it would have been.
    """

    ids_BK: torch.Tensor

    def valid_ids(self) -> torch.Tensor:
        """int64 [B, K] with 0 where there is no draft: what rows that nothing reads may be computed from."""
        return self.ids_BK.clamp(min=0)


@dataclass(frozen=True, slots=True)
class TargetIds:
    """Tokens chosen by the target, int64 [B, Q]; column j holds for a sequence whose first j drafts stand."""

    ids_BQ: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distributions that the drafts of the sampled sequences were drawn from; without them drafts are point masses.

    Attributes:
        probs_SKC: float, over the draft head's columns; a row of zeros stands for no draft. Where ranks share the
            vocabulary, over this rank's tokens.
        t2d_V: int32 or int64, the column of each token, -1 where the head has none; None if columns are tokens.
    """

    probs_SKC: torch.Tensor
    t2d_V: torch.Tensor | None


class DraftLaw(Enum):
    """How the drafts of sampled sequences must be chosen for a mode of verification."""

    COUPLED = "coupled"  # by the noise that the target's own draw will use
    LIKELIEST = "likeliest"  # a point mass
    SAMPLED = "sampled"  # drawn from the head's distribution, which is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyInputs:
    """One step's drafts and what the target says of them. Rows that nothing may read may hold anything, NaN included.

    Attributes:
        drafts: the drafts.
        draft_probs: what they were drawn from, with DraftLaw.SAMPLED.
        target_logits_BQV: bfloat16, float32 or float64; row j follows the first j drafts.
        sampling: the sampled sequences; None if all are greedy.
        noise_SQV: the target's noise, with DraftLaw.COUPLED, where torch chooses.
        rows: how each sequence draws, where kernels choose.
        masks: what grammars allow, where kernels choose; where torch does, the logits are masked.
        position_B: int64, where the first token of this step will stand.
        draft_cap_B: int64, drafts each sequence may accept.
        vocab: which tokens V are, of logits and noise.
    """

    drafts: DraftIds
    draft_probs: DraftProbs | None = None
    target_logits_BQV: torch.Tensor
    sampling: SamplingRows | None
    noise_SQV: torch.Tensor | None = None
    rows: DrawRows | None = None
    masks: GrammarMasks | None = None
    position_B: torch.Tensor
    draft_cap_B: torch.Tensor
    vocab: Vocab = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The verdict on one step.

    Attributes:
        token_ids_BQ: int64, the emitted tokens; 0 past `accepted_len`, a valid id that nothing shows.
        accepted_len_B: int64, drafts that stand, 0 ... K; emitted = accepted + 1. -1: nothing is emitted.
        logprobs_LQX: float64, packed (engine.logprobs), of the sequences that report them; None without any.
        proposed_len_B: int64, drafts that could stand; None: as many as each sequence may use.
        told_len_B: int64, accepted lengths as the host is told them (`kernels.sampling.verify.told_lengths`); None:
            as they are.
    """

    token_ids_BQ: torch.Tensor
    accepted_len_B: torch.Tensor
    told_len_B: torch.Tensor | None = None
    logprobs_LQX: torch.Tensor | None = None
    proposed_len_B: torch.Tensor | None = None


class Verifier(Protocol):
    """A mode of verification: one pass over a batch of greedy and sampled sequences, without waiting for the device."""

    @property
    def draft_law(self) -> DraftLaw:
        """What it takes drafts of sampled sequences to be."""
        ...

    def verify(self, inputs: VerifyInputs) -> Verified:
        """Decide which drafts stand, and the token after them."""
        ...


class CoupledVerifier:
    """The default: every token is the one that speculation off would have drawn."""

    draft_law = DraftLaw.COUPLED

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See `verify_coupled`."""
        return verify_coupled(
            inputs.drafts,
            inputs.target_logits_BQV,
            inputs.sampling,
            inputs.noise_SQV,
            inputs.draft_cap_B,
            inputs.vocab,
        )


class GreedyVerifier:
    """For batches without a sampled sequence; refuses any other, as it would not sample."""

    draft_law = DraftLaw.LIKELIEST

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See `verify_greedy`."""
        assert inputs.sampling is None, "a sampled sequence cannot be verified greedily"
        return verify_greedy(inputs.drafts, inputs.target_logits_BQV, inputs.draft_cap_B, inputs.vocab)


def accept(drafts: DraftIds, target: TargetIds, draft_cap_B: torch.Tensor) -> Verified:
    """Accept the longest prefix of drafts that equals the target's tokens, at most `draft_cap_B` of them."""
    num_rows = target.ids_BQ.shape[1]
    assert drafts.ids_BK.shape[1] == num_rows - 1
    hit_BK = (drafts.ids_BK == target.ids_BQ[:, :-1]).to(torch.int64)
    accepted_len_B = torch.minimum(hit_BK.cumprod(dim=1).sum(dim=1), draft_cap_B)
    row_Q = torch.arange(num_rows, device=target.ids_BQ.device)
    token_ids_BQ = target.ids_BQ.masked_fill(row_Q > accepted_len_B[:, None], 0)
    return Verified(token_ids_BQ=token_ids_BQ, accepted_len_B=accepted_len_B)


def verify_greedy(
    drafts: DraftIds, target_logits_BQV: torch.Tensor, draft_cap_B: torch.Tensor, vocab: Vocab = WHOLE
) -> Verified:
    """Every sequence is greedy: a draft stands if it is the target's likeliest token."""
    return verify_coupled(drafts, target_logits_BQV, None, None, draft_cap_B, vocab)


def verify_coupled(
    drafts: DraftIds,
    target_logits_BQV: torch.Tensor,
    sampling: SamplingRows | None,
    noise_SQV: torch.Tensor | None,
    draft_cap_B: torch.Tensor,
    vocab: Vocab = WHOLE,
) -> Verified:
    """A draft stands if it is the target's own draw at its position (the likeliest token for greedy sequences)."""
    target = TargetIds(choose(target_logits_BQV, sampling, noise_SQV, drafts.valid_ids(), vocab))
    return accept(drafts, target, draft_cap_B)


def usable_drafts(drafts: DraftIds, draft_cap_B: torch.Tensor) -> torch.Tensor:
    """Drafts of each sequence that come before its cap and before any that is missing, int64 [B]."""
    is_there_BK = (drafts.ids_BK >= 0).to(torch.int64)
    return torch.minimum(is_there_BK.cumprod(dim=1).sum(dim=1), draft_cap_B)


def emit(drafts: DraftIds, accepted_len_B: torch.Tensor, last_BQ: torch.Tensor) -> Verified:
    """The first `accepted_len_B` drafts, and after them what `last_BQ` holds at that place."""
    num_sequences, num_rows = last_BQ.shape
    row_Q = torch.arange(num_rows, device=last_BQ.device)
    spare_B1 = last_BQ.new_zeros(num_sequences, 1)
    ids_BQ = torch.cat([drafts.ids_BK, spare_B1], dim=1)
    ids_BQ = torch.where(row_Q < accepted_len_B[:, None], ids_BQ, last_BQ)
    return Verified(token_ids_BQ=ids_BQ.masked_fill(row_Q > accepted_len_B[:, None], 0), accepted_len_B=accepted_len_B)
