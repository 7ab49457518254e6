"""The tokens of running sequences on the device, for drafts that are looked up in them: no host, no hidden state.

Every rank of a worker has the same tokens, and so makes the same drafts. What lies behind a sequence's length is what
earlier sequences or rejected drafts left there; nothing reads it.

Legend: N slots, L tokens of a slot's row, B sequences of a step, Q rows of each, K drafts.
"""

from collections.abc import Sequence

import torch

from baton.core.prompt_lookup import PromptLookup
from baton.engine.speculation.verify import DraftIds
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.ngram import ngram_drafts


def history_bytes(num_slots: int, max_len: int) -> int:
    """Of device memory that the tokens of so many sequences take."""
    return num_slots * (max_len + 1) * torch.int32.itemsize


class TokenHistory:
    """Of one runner.

    Args:
        lookup: how drafts are found.
        num_slots: N.
        max_len: tokens of the longest sequence.
        device: of the steps.
        implementation: of the kernel.
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
        # What a step emits past the end of a sequence that is over falls into the last column.
        self._tokens_NL = torch.zeros(num_slots, max_len + 1, dtype=torch.int32, device=device)

    def places(self, slot: int, num_tokens: int) -> torch.Tensor:
        """Where the first tokens of a sequence go, int32 [num_tokens]."""
        assert num_tokens < self._tokens_NL.shape[1]
        return self._tokens_NL[slot, :num_tokens]

    def set(self, slot: int, token_ids: Sequence[int]) -> None:
        """The tokens of a sequence; waits for the device."""
        self.places(slot, len(token_ids)).copy_(torch.tensor(token_ids, dtype=torch.int32))

    def write(self, slot_B: torch.Tensor, first_B: torch.Tensor, token_ids_BQ: torch.Tensor) -> None:
        """What a step emitted from position `first_B` on; what it did not emit lies behind the new length."""
        place_Q = torch.arange(token_ids_BQ.shape[1], device=slot_B.device)
        places_BQ = (first_B[:, None] + place_Q).clamp(max=self._tokens_NL.shape[1] - 1)
        self._tokens_NL.index_put_((slot_B[:, None], places_BQ), token_ids_BQ.to(torch.int32))

    def drafts(self, slot_B: torch.Tensor, length_B: torch.Tensor, num_drafts: int) -> DraftIds:
        """K drafts of each sequence, or none of them."""
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
