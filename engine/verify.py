"""Which draft tokens stand. Pure functions on tensors; what a draft is worth is decided here and nowhere else.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), accept a draft x
with probability min(1, p(x) / q(x)), p the target's distribution and q the draft's, and draw from the residual at the
first rejection. With a draft that is a point mass (q(x) = 1) that is: accept with probability p(x).

*Coupled* verification fixes the target's own draw at each position beforehand, by its Gumbel noise. A draft stands if
it equals that draw, and the draw is emitted either way: the tokens are those of speculation off, not only alike in
law. A draft made without knowledge of the noise (an argmax) is hit with probability p(x), the rate above. A draft
sampled from q with the *same* noise is hit with probability at least (1 - d) / (1 + d), d being the total variation
distance of p and q (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024).

Legend: B sequences, K draft tokens, Q = K + 1 rows, V vocabulary, S sampled sequences.
"""

from dataclasses import dataclass

import torch

from baton.engine.sampler import SamplingRows, choose


@dataclass(frozen=True, slots=True)
class DraftIds:
    """Tokens proposed by the MTP head, int64 [B, K]; never emitted as they are."""

    ids_BK: torch.Tensor


@dataclass(frozen=True, slots=True)
class TargetIds:
    """Tokens chosen by the target, int64 [B, Q]; column j holds for a sequence whose first j drafts stand."""

    ids_BQ: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The verdict on one step.

    Attributes:
        token_ids_BQ: int64, the emitted tokens; 0 past `accepted_len`, a valid id that nothing shows.
        accepted_len_B: int64, drafts that stand, 0 ... K; emitted = accepted + 1.
        logprobs_LQX: float64, packed (engine.logprobs), of the sequences that report them; None without any.
    """

    token_ids_BQ: torch.Tensor
    accepted_len_B: torch.Tensor
    logprobs_LQX: torch.Tensor | None = None


def accept(drafts: DraftIds, target: TargetIds, draft_cap_B: torch.Tensor) -> Verified:
    """Accept the longest prefix of drafts that equals the target's tokens, at most `draft_cap_B` of them."""
    num_rows = target.ids_BQ.shape[1]
    assert drafts.ids_BK.shape[1] == num_rows - 1
    hit_BK = (drafts.ids_BK == target.ids_BQ[:, :-1]).to(torch.int64)
    accepted_len_B = torch.minimum(hit_BK.cumprod(dim=1).sum(dim=1), draft_cap_B)
    row_Q = torch.arange(num_rows, device=target.ids_BQ.device)
    token_ids_BQ = target.ids_BQ.masked_fill(row_Q > accepted_len_B[:, None], 0)
    return Verified(token_ids_BQ=token_ids_BQ, accepted_len_B=accepted_len_B)


def verify_greedy(drafts: DraftIds, target_logits_BQV: torch.Tensor, draft_cap_B: torch.Tensor) -> Verified:
    """Every sequence is greedy: a draft stands if it is the target's likeliest token."""
    return verify_coupled(drafts, target_logits_BQV, None, None, draft_cap_B)


def verify_coupled(
    drafts: DraftIds,
    target_logits_BQV: torch.Tensor,
    sampling: SamplingRows | None,
    noise_SQV: torch.Tensor | None,
    draft_cap_B: torch.Tensor,
) -> Verified:
    """A draft stands if it is the target's own draw at its position (the likeliest token for greedy sequences)."""
    target = TargetIds(choose(target_logits_BQV, sampling, noise_SQV, drafts.ids_BK))
    return accept(drafts, target, draft_cap_B)
