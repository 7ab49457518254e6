"""Sequences of tokens of which the last may not follow the others.

Only generated tokens count, not the prompt's; those of drafts before a row do. The device keeps the end of each slot's
output, as long as the longest prefix may be.

Legend: N slots, B sequences of a step, P sequences with bad words, Q rows, E tokens ahead, W words of the sequence with
the most, T tokens of a prefix, the longest's, V vocabulary (of it those this process has).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.sampling import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, SamplingParams
from baton.engine.sampling.history import Lookahead, SampledSequence
from baton.engine.sampling.token_masks import mask
from baton.kernels.copies import to_device
from baton.model.vocab import WHOLE, Vocab

_ANY, _NEVER, _NOTHING = -1, -2, -3  # in a prefix: any token, no token; in an output: before its first token
_PREFIX_LEN = MAX_BAD_WORD_LEN - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """Those of some sequences.

    Attributes:
        prefix_PWT: int64, all tokens but the last, at the end of T.
        last_PW: int64.
        tail_PT: int64, the last tokens of the output.
    """

    prefix_PWT: torch.Tensor
    last_PW: torch.Tensor
    tail_PT: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits without the last tokens of words whose prefix stands before the row."""
        num_sequences, num_rows, vocab_size = logits_PQV.shape
        tail_PQT = self.tail_PT[:, None].expand(-1, num_rows, -1)
        if ahead is not None:
            tail_PQT = _ends(torch.cat([self.tail_PT, ahead.token_ids_BE], dim=1), ahead.len_BQ, tail_PQT.shape[2])
        prefix_P1WT = self.prefix_PWT[:, None]
        completes_PQW = ((tail_PQT[:, :, None] == prefix_P1WT) | (prefix_P1WT == _ANY)).all(dim=-1)
        last_PQW = self.vocab.columns(self.last_PW)[:, None].expand(-1, num_rows, -1)
        # Two words may end alike, and a plain scatter would let the one that is not complete win.
        shape = (num_sequences, num_rows, self.vocab.table_width(vocab_size))
        banned_PQX = torch.zeros(shape, dtype=torch.int32, device=logits_PQV.device)
        banned_PQX.scatter_add_(2, last_PQW, completes_PQW.to(torch.int32))
        return mask(logits_PQV, banned_PQX[..., :vocab_size] > 0, self.vocab)


def _ends(token_ids_PX: torch.Tensor, len_PQ: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[P, Q, num_tokens]: what begins at `len_PQ` of each line."""
    place_PQT = len_PQ[..., None] + torch.arange(num_tokens, device=token_ids_PX.device)
    num_rows = len_PQ.shape[1]
    return token_ids_PX[:, None].expand(-1, num_rows, -1).gather(2, place_PQT)


class BadWordsTable:
    """Bad words and the ends of outputs, by slot."""

    def __init__(self, num_slots: int, device: torch.device, vocab: Vocab = WHOLE) -> None:
        self._vocab = vocab
        self._prefix_NWT = torch.full((num_slots, MAX_BAD_WORDS, _PREFIX_LEN), _NEVER, dtype=torch.int64, device=device)
        self._last_NW = torch.zeros(num_slots, MAX_BAD_WORDS, dtype=torch.int64, device=device)
        self._tail_NT = torch.full((num_slots, _PREFIX_LEN), _NOTHING, dtype=torch.int64, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return bool(params.bad_words)

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        device = self._tail_NT.device
        words = sequence.params.bad_words
        prefixes = [[_ANY] * (MAX_BAD_WORD_LEN - len(word)) + list(word[:-1]) for word in words]
        prefixes += [[_NEVER] * _PREFIX_LEN] * (MAX_BAD_WORDS - len(words))
        last = [word[-1] for word in words] + [0] * (MAX_BAD_WORDS - len(words))
        tail = [*[_NOTHING] * _PREFIX_LEN, *sequence.output_token_ids][-_PREFIX_LEN:]
        self._prefix_NWT[slot] = to_device(torch.tensor(prefixes), device)
        self._last_NW[slot] = to_device(torch.tensor(last), device)
        self._tail_NT[slot] = to_device(torch.tensor(tail), device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> BadWords:
        """Those of some slots."""
        num_words = max(len(item.bad_words) for item in params)
        longest = max(len(word) for item in params for word in item.bad_words)
        prefix_len = max(longest - 1, 1)  # at least one, so that an unused word can say that it is never complete
        first = _PREFIX_LEN - prefix_len
        return BadWords(
            prefix_PWT=self._prefix_NWT[:, :num_words, first:][slots_P],
            last_PW=self._last_NW[:, :num_words][slots_P],
            tail_PT=self._tail_NT[:, first:][slots_P],
            vocab=self._vocab,
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Move the ends of outputs on; slots without bad words may be among them."""
        seen_BX = torch.cat([self._tail_NT[slots_B], token_ids_BQ], dim=1)
        self._tail_NT[slots_B] = _ends(seen_BX, num_emitted_B[:, None], _PREFIX_LEN)[:, 0]
