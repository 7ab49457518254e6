"""Tokens that a request forbids: all but the allowed, and those that would end it too early.

A mask that would leave no token at all is ignored at that position; otherwise nothing could be chosen there. Where
ranks share a vocabulary they must tell each other, so there each mask is a small collective.

Legend: N slots, P sequences with the mask, Q rows, W listed tokens of the widest, V vocabulary (of it those this
process has).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_STOP_TOKEN_IDS, SamplingParams
from baton.engine.sampling.history import Lookahead, SampledSequence
from baton.kernels.copies import to_device
from baton.model.vocab import WHOLE, Vocab


def mask(logits_PQV: torch.Tensor, banned_PQV: torch.Tensor, vocab: Vocab = WHOLE) -> torch.Tensor:
    """Logits with the banned tokens at -inf, where another token is left."""
    masked_PQV = logits_PQV.masked_fill(banned_PQV, -torch.inf)
    nothing_left_PQ1 = vocab.amax(masked_PQV) == -torch.inf
    return torch.where(nothing_left_PQ1, logits_PQV, masked_PQV)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Only the listed tokens, int64 [P, W]; unused places repeat one."""

    ids_PW: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits of the listed tokens alone."""
        num_sequences, _, vocab_size = logits_PQV.shape
        width = self.vocab.table_width(vocab_size)
        is_banned_PX = torch.ones(num_sequences, width, dtype=torch.bool, device=logits_PQV.device)
        is_banned_PX.scatter_(1, self.vocab.columns(self.ids_PW), False)
        return mask(logits_PQV, is_banned_PX[:, None, :vocab_size], self.vocab)


class AllowedTable:
    """Allowed tokens by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, vocab: Vocab = WHOLE) -> None:
        width = min(vocab_size, MAX_ALLOWED_TOKEN_IDS)
        self._vocab = vocab
        self._ids_NW = torch.zeros(num_slots, width, dtype=torch.int64, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return params.allowed_token_ids is not None

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        ids = _distinct(sequence.params)
        padding = [ids[0]] * (self._ids_NW.shape[1] - len(ids))
        self._ids_NW[slot] = to_device(torch.tensor([*ids, *padding]), self._ids_NW.device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> Allowed:
        """Those of some slots."""
        width = max(len(_distinct(item)) for item in params)
        return Allowed(self._ids_NW[:, :width][slots_P], self._vocab)

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """What is allowed does not depend on the output."""


def _distinct(params: SamplingParams) -> tuple[int, ...]:
    assert params.allowed_token_ids is not None
    return tuple(dict.fromkeys(params.allowed_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsTooEarly:
    """Tokens that would end a sequence before its `min_tokens`.

    Attributes:
        ids_PW: int64, EOS and stop tokens; unused places repeat one, or there is none at all.
        num_missing_P: int64, tokens still to come before the sequence may end; 0 or less where it may.
    """

    ids_PW: torch.Tensor
    num_missing_P: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits without the ends of rows that come too early."""
        num_sequences, num_rows, vocab_size = logits_PQV.shape
        width = self.vocab.table_width(vocab_size)
        ends_PX = torch.zeros(num_sequences, width, dtype=torch.bool, device=logits_PQV.device)
        ends_PX.scatter_(1, self.vocab.columns(self.ids_PW), True)
        missing_PQ = self.num_missing_P[:, None].expand(-1, num_rows)
        if ahead is not None:
            missing_PQ = missing_PQ - ahead.len_BQ
        return mask(logits_PQV, ends_PX[:, None, :vocab_size] & (missing_PQ > 0)[..., None], self.vocab)


class MinTokensTable:
    """Tokens that may end a sequence, and how many are missing until they may, by slot."""

    def __init__(
        self, num_slots: int, eos_token_ids: Sequence[int], device: torch.device, vocab: Vocab = WHOLE
    ) -> None:
        self._vocab = vocab
        self._eos_token_ids = tuple(eos_token_ids)
        width = len(self._eos_token_ids) + MAX_STOP_TOKEN_IDS
        self._ids_NW = torch.zeros(num_slots, width, dtype=torch.int64, device=device)
        self._num_missing_N = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def is_for(self, params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return params.min_tokens > 0 and bool(self._ids_of(params))

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        ids = self._ids_of(sequence.params)
        padding = [ids[0]] * (self._ids_NW.shape[1] - len(ids))
        self._ids_NW[slot] = to_device(torch.tensor([*ids, *padding]), self._ids_NW.device)
        self._num_missing_N[slot] = sequence.params.min_tokens - len(sequence.output_token_ids)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> EndsTooEarly:
        """Those of some slots."""
        width = max(len(self._ids_of(item)) for item in params)
        return EndsTooEarly(
            ids_PW=self._ids_NW[:, :width][slots_P], num_missing_P=self._num_missing_N[slots_P], vocab=self._vocab
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """A step emitted so many."""
        self._num_missing_N[slots_B] -= num_emitted_B

    def _ids_of(self, params: SamplingParams) -> tuple[int, ...]:
        return (*self._eos_token_ids, *params.stop_token_ids)
