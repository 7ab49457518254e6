"""Represents the tokens before a position that its sampling may depend on, on the host or ahead of the device's counts.

Legend: B sequences, Q rows of each, E tokens ahead, R sequences picked from B.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """What sampling must know about a sequence when it starts or restarts.

    Attributes:
        params: the request's sampling parameters.
        choice: which of the request's `n` answers it is.
        prompt_token_ids: the prompt; may be empty without a repetition penalty.
        output_token_ids: tokens generated after the prompt.
    """

    params: SamplingParams
    choice: int = 0
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class HistoryLookahead:
    """Tokens after those that the sampling table has counted; row q of a sequence comes after its first `len_BQ`.

    Attributes:
        token_ids_BE: int64, valid ids everywhere.
        len_BQ: int64, 0 ... E.
    """

    token_ids_BE: torch.Tensor
    len_BQ: torch.Tensor

    @classmethod
    def of_drafts(cls, drafts_BK: torch.Tensor) -> "HistoryLookahead":
        """Lookahead for K + 1 rows; row j comes after the first j drafts."""
        num_sequences, num_drafts = drafts_BK.shape
        len_Q = torch.arange(num_drafts + 1, device=drafts_BK.device)
        return cls(drafts_BK, len_Q.expand(num_sequences, -1))

    @classmethod
    def after(cls, token_ids_BE: torch.Tensor) -> "HistoryLookahead":
        """Lookahead for one row, after all of the tokens."""
        num_sequences, num_tokens = token_ids_BE.shape
        return cls(token_ids_BE, token_ids_BE.new_full((num_sequences, 1), num_tokens))

    def pick(self, index_R: torch.Tensor) -> "HistoryLookahead":
        """The lookahead of some sequences."""
        return HistoryLookahead(self.token_ids_BE[index_R], self.len_BQ[index_R])
