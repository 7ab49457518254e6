"""Decides which draft tokens are accepted: the verifier interface, and two modes that emit the target's own choice.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), accept a draft x
with probability min(1, p(x) / q(x)), p the target's distribution and q the draft's, and sample from the residual at the
first rejection (`engine.speculation.rejection`). With a draft that is a point mass (q(x) = 1): accept with probability
p(x).

*Coupled* verification fixes the target's own sample at each position beforehand, by its Gumbel noise. A draft is
accepted if it equals that sample, and the sample is emitted either way: the tokens are those without speculation, not
only equal in distribution. A draft made without knowledge of the noise (an argmax) matches with probability p(x), the
rate above. A draft sampled from q with the *same* noise matches with probability at least (1 - d) / (1 + d), d being
the total variation distance of p and q (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", 2024).

There are two kinds of ids, which never mix: those of the target's vocabulary, used everywhere here, and columns of a
draft head over a smaller vocabulary, which stay where drafts are made (`engine.speculation.drafting`,
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
    """Proposed tokens, int64 [B, K], ids of the target's vocabulary; never emitted unverified.

    -1 means no draft; nothing after it is considered. Where a draft is missing must not depend on what it would have
    been.
    """

    ids_BK: torch.Tensor

    def valid_ids(self) -> torch.Tensor:
        """int64 [B, K] with 0 in place of missing drafts: valid input for rows whose results nothing reads."""
        return self.ids_BK.clamp(min=0)


@dataclass(frozen=True, slots=True)
class TargetIds:
    """Tokens chosen by the target, int64 [B, Q]; column j applies if the sequence's first j drafts are accepted."""

    ids_BQ: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distributions that the sampled sequences' drafts were drawn from; without it, drafts are point masses.

    Attributes:
        probs_SKC: float, over the draft head's columns, or this rank's tokens if ranks share the vocabulary; a row of
            zeros means no draft.
        t2d_V: int32 or int64, the column of each token, -1 if the head has none; None if columns are tokens.
    """

    probs_SKC: torch.Tensor
    t2d_V: torch.Tensor | None


class DraftLaw(Enum):
    """How a verification mode requires the drafts of sampled sequences to be chosen."""

    COUPLED = "coupled"  # with the noise that the target's own sample will use
    LIKELIEST = "likeliest"  # a point mass
    SAMPLED = "sampled"  # sampled from the head's distribution, which is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyInputs:
    """One step's drafts and the target's logits for them. Rows that nothing may read may hold anything, including NaN.

    Attributes:
        drafts: the drafts.
        draft_probs: distributions that they were drawn from, with DraftLaw.SAMPLED.
        target_logits_BQV: bfloat16, float32 or float64; row j follows the first j drafts.
        sampling: the sampled sequences; None if all are greedy.
        noise_SQV: the target's noise, with DraftLaw.COUPLED, if torch samples.
        rows: how each sequence draws, if kernels sample.
        masks: grammar masks, if kernels sample; if torch samples, the logits are already masked.
        position_B: int64, position of this step's first token.
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
    """The result of verification for one step.

    Attributes:
        token_ids_BQ: int64, the emitted tokens; 0 past `accepted_len`, a valid id that is never shown.
        accepted_len_B: int64, accepted drafts, 0 ... K; emitted = accepted + 1. -1: nothing is emitted.
        logprobs_LQX: float64, packed (engine.sampling.logprobs), of the sequences that report them; None without any.
        proposed_len_B: int64, drafts that could have been accepted; None: as many as each sequence may use.
        told_len_B: int64, accepted lengths as reported to the host (`kernels.sampling.verify.told_lengths`); None: the
            same as `accepted_len_B`.
    """

    token_ids_BQ: torch.Tensor
    accepted_len_B: torch.Tensor
    told_len_B: torch.Tensor | None = None
    logprobs_LQX: torch.Tensor | None = None
    proposed_len_B: torch.Tensor | None = None


class Verifier(Protocol):
    """A verification mode: one pass over a batch of greedy and sampled sequences, without waiting for the device."""

    @property
    def draft_law(self) -> DraftLaw:
        """How drafts of sampled sequences must be chosen."""
        ...

    def verify(self, inputs: VerifyInputs) -> Verified:
        """Decide which drafts are accepted, and the token after them."""
        ...


class CoupledVerifier:
    """The default: every token is the one that would be sampled without speculation."""

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
    """Verifies batches without sampled sequences; rejects any other, because it cannot sample."""

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
    """Verify a batch of greedy sequences: a draft is accepted if it is the target's likeliest token."""
    return verify_coupled(drafts, target_logits_BQV, None, None, draft_cap_B, vocab)


def verify_coupled(
    drafts: DraftIds,
    target_logits_BQV: torch.Tensor,
    sampling: SamplingRows | None,
    noise_SQV: torch.Tensor | None,
    draft_cap_B: torch.Tensor,
    vocab: Vocab = WHOLE,
) -> Verified:
    """Accept drafts that equal the target's own sample at their position (the likeliest token for greedy sequences)."""
    target = TargetIds(choose(target_logits_BQV, sampling, noise_SQV, drafts.valid_ids(), vocab))
    return accept(drafts, target, draft_cap_B)


def usable_drafts(drafts: DraftIds, draft_cap_B: torch.Tensor) -> torch.Tensor:
    """Number of drafts of each sequence before its cap and before any missing draft, int64 [B]."""
    is_there_BK = (drafts.ids_BK >= 0).to(torch.int64)
    return torch.minimum(is_there_BK.cumprod(dim=1).sum(dim=1), draft_cap_B)


def emit(drafts: DraftIds, accepted_len_B: torch.Tensor, last_BQ: torch.Tensor) -> Verified:
    """The first `accepted_len_B` drafts, followed by the entry of `last_BQ` at that place."""
    num_sequences, num_rows = last_BQ.shape
    row_Q = torch.arange(num_rows, device=last_BQ.device)
    spare_B1 = last_BQ.new_zeros(num_sequences, 1)
    ids_BQ = torch.cat([drafts.ids_BK, spare_B1], dim=1)
    ids_BQ = torch.where(row_Q < accepted_len_B[:, None], ids_BQ, last_BQ)
    return Verified(token_ids_BQ=ids_BQ.masked_fill(row_Q > accepted_len_B[:, None], 0), accepted_len_B=accepted_len_B)
