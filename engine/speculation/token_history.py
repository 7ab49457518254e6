"""Keeps the tokens of running sequences on the device, to look up drafts in them without the host or hidden states.

Every rank of a worker has the same tokens, and so makes the same drafts. Entries past a sequence's length are left over
from earlier sequences or rejected drafts; nothing reads them.

Legend: N slots, L tokens of a slot's row, B sequences of a step, Q rows of each, K drafts.
"""

from collections.abc import Sequence

import torch

from baton.core.prompt_lookup import PromptLookup
from baton.engine.speculation.verify import DraftIds
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.ngram import ngram_drafts


def history_bytes(num_slots: int, max_len: int) -> int:
    """Device memory in bytes for the tokens of `num_slots` sequences."""
    return num_slots * (max_len + 1) * torch.int32.itemsize


class TokenHistory:
    """The token history of one runner.

    Args:
        lookup: how drafts are looked up.
        num_slots: N.
        max_len: tokens of the longest sequence.
        device: device of the steps.
        implementation: implementation of the kernel.
    """

    def __init__(
        self,
        lookup: PromptLookup,
        num_slots: int,
        max_len: int,
        device: torch.device,
        implementation: Implementation = Implementation.AUTO,
    ) -> None:
        self._lookup = lookup
        self._implementation = implementation
        # The last column takes what a step emits past the end of a finished sequence.
        self._tokens_NL = torch.zeros(num_slots, max_len + 1, dtype=torch.int32, device=device)

    def places(self, slot: int, num_tokens: int) -> torch.Tensor:
        """View of the first tokens of a slot, int32 [num_tokens]."""
        assert num_tokens < self._tokens_NL.shape[1]
        return self._tokens_NL[slot, :num_tokens]

    def set(self, slot: int, token_ids: Sequence[int]) -> None:
        """Set the tokens of a sequence; waits for the device."""
        self.places(slot, len(token_ids)).copy_(torch.tensor(token_ids, dtype=torch.int32))

    def write(self, slot_B: torch.Tensor, first_B: torch.Tensor, token_ids_BQ: torch.Tensor) -> None:
        """Write a step's tokens from position `first_B` on; those not emitted land past the new length."""
        place_Q = torch.arange(token_ids_BQ.shape[1], device=slot_B.device)
        places_BQ = (first_B[:, None] + place_Q).clamp(max=self._tokens_NL.shape[1] - 1)
        self._tokens_NL.index_put_((slot_B[:, None], places_BQ), token_ids_BQ.to(torch.int32))

    def drafts(self, slot_B: torch.Tensor, length_B: torch.Tensor, num_drafts: int) -> DraftIds:
        """K drafts of each sequence, or none for a sequence."""
        found_BK = ngram_drafts(
            self._tokens_NL,
            slot_B,
            length_B,
            num_drafts,
            min_match_len=self._lookup.min_match_len,
            max_match_len=self._lookup.max_match_len,
            implementation=self._implementation,
        )
        return DraftIds(found_BK)
