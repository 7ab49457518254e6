"""Implements every verification mode with `kernels.sampling.verify`, for all sequences of a batch in four launches.

The modes are those of `engine.speculation.verify`, `engine.speculation.rejection` and `engine.speculation.verifiers`,
with the same random draws. The host reads nothing, and features that no sequence requests cost no launch.

Legend: B sequences, S sampled ones, K draft tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch

from baton.engine.sampling.kernel_sampler import edit, with_every_cut
from baton.engine.speculation.verify import DraftLaw, DraftProbs, Verified, VerifyInputs
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.rows import Law, settled
from baton.kernels.sampling.verify import verify

_BY_CHANCE = (Law.REJECT, Law.BLOCK)


class KernelVerifier:
    """A verification mode, by kernels; see `verify.Verifier`.

    Args:
        law: how drafts are verified; greedy sequences always match against the likeliest token.
        draft_law: how drafts of sampled sequences were chosen.
        implementation: which implementation of the kernels.
        device: device of the batches.
        rates: for SYNTHETIC, the probability of each draft once all before it are accepted.
        forced_len: for FORCE, the number of drafts to accept.
    """

    def __init__(
        self,
        law: Law,
        draft_law: DraftLaw,
        implementation: Implementation,
        device: torch.device,
        *,
        rates: Sequence[float] = (),
        forced_len: int = 0,
    ) -> None:
        self._law = law
        self._draft_law = draft_law
        self._implementation = implementation
        self._rates_K = torch.tensor(rates, dtype=torch.float64, device=device) if law is Law.SYNTHETIC else None
        self._forced_len = forced_len

    @property
    def draft_law(self) -> DraftLaw:
        """See `verify.Verifier`."""
        return self._draft_law

    @property
    def is_greedy(self) -> bool:
        """Whether it accepts only batches in which all sequences are greedy and plain."""
        return self._law is Law.MATCH and self._draft_law is DraftLaw.LIKELIEST

    def verify(self, inputs: VerifyInputs) -> Verified:
        """See the module."""
        assert inputs.rows is not None
        sampling, raw_BQV = inputs.sampling, inputs.target_logits_BQV
        assert sampling is None or not self.is_greedy, "a sampled sequence cannot be verified greedily"
        edits = None if sampling is None else sampling.edits
        logits_BQV, edited = edit(raw_BQV, edits, inputs.masks, inputs.drafts.ids_BK, self._implementation)
        verdict = verify(
            logits_BQV,
            inputs.rows if edited is None else with_every_cut(inputs.rows),
            self._draft_rows(inputs),
            edited=edited,
            implementation=self._implementation,
        )
        return Verified(token_ids_BQ=verdict.token_ids_BQ, accepted_len_B=verdict.accepted_len_B)

    def _draft_rows(self, inputs: VerifyInputs) -> DraftRows:
        ids_BK, sampling = inputs.drafts.ids_BK, inputs.sampling
        num_sequences, num_drafts = ids_BK.shape
        by_chance = self._law in _BY_CHANCE and sampling is not None and sampling.num_sampled > 0
        probs = inputs.draft_probs if by_chance and num_drafts else None
        law = self._law if by_chance or self._law not in _BY_CHANCE else Law.MATCH
        return DraftRows(
            ids_BK=settled(ids_BK),
            cap_B=settled(inputs.draft_cap_B),
            law_B=torch.full((num_sequences,), law, dtype=torch.int32, device=ids_BK.device),
            by_chance=by_chance,
            probs_NKC=None if probs is None else settled(probs.probs_SKC.float()),
            probs_row_B=None if probs is None else _rows_of(probs, inputs),
            t2d_V=None if probs is None else probs.t2d_V,
            rates_K=None if self._rates_K is None else self._rates_K[:num_drafts],
            forced_len=self._forced_len,
        )


def _rows_of(probs: DraftProbs, inputs: VerifyInputs) -> torch.Tensor:
    """Row of each sequence in the draft probabilities, int32 [B]; -1 for greedy ones."""
    assert inputs.sampling is not None
    index_S, num_sequences = inputs.sampling.index_S, len(inputs.position_B)
    place_S = torch.arange(len(index_S), dtype=torch.int32, device=index_S.device)
    if len(index_S) == num_sequences:
        return place_S
    return place_S.new_full((num_sequences,), -1).index_copy_(0, index_S, place_S)
