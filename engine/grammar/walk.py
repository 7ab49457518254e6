"""Walks one matcher along a sequence's drafts: the masks after each prefix, and whether the library gave up.

A mask that the library returns is exact, whatever was asked before. A refused token is not: a matcher whose automata
are spent refuses without an error. So drafts are judged by the mask before them; if the mask allows a token and the
matcher does not take it, its budget is spent. Drafts are taken by a copy of the matcher, because a matcher that takes
tokens back may return a mask that it remembers from them (llguidance 1.9.1).

Legend: K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32) words of a row's bitmask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

WORD_BITS: Final = 32
ALL_BITS: Final = -1


@dataclass(frozen=True, slots=True)
class GrammarLookahead:
    """What may follow the accepted tokens and each prefix of the drafts.

    Attributes:
        masks_QW: int32; row j is for the accepted tokens followed by drafts[:j].
        num_valid: drafts that the grammar allows and whose next row is known, 0 ... K. Rows after row `num_valid` allow
            everything, and nothing computed from them may be emitted.
        num_rows: tokens that a step may emit: Q, unless the look was cut short by its cost; 0 if nothing is known yet.
    """

    masks_QW: np.ndarray
    num_valid: int
    num_rows: int

    @classmethod
    def unknown(cls, num_drafts: int, words: int, *, num_rows: int = 0) -> "GrammarLookahead":
        """A lookahead in which every row allows everything."""
        return cls(np.full((num_drafts + 1, words), ALL_BITS, dtype=np.int32), 0, num_rows)

    def along(self, before: Sequence[int], drafts: Sequence[int]) -> "GrammarLookahead":
        """What this look along the drafts `before` implies for other drafts."""
        if list(before) == list(drafts):
            return self
        num_common = 0
        while num_common < min(len(before), len(drafts)) and before[num_common] == drafts[num_common]:
            num_common += 1
        num_rows = min(num_common, self.num_valid, self.num_rows - 1) + 1
        masks_QW = np.full((len(drafts) + 1, self.masks_QW.shape[1]), ALL_BITS, dtype=np.int32)
        masks_QW[:num_rows] = self.masks_QW[:num_rows]
        return GrammarLookahead(masks_QW, max(num_rows - 1, 0), num_rows if self.num_rows else 0)


class Ends(Protocol):
    """The part of a grammar that a walk uses; `CompiledGrammar` implements it."""

    eos_token_ids: tuple[int, ...]
    num_words: int


def num_words(vocab_size: int) -> int:
    """Number of words of a row's bitmask, W."""
    return -(-vocab_size // WORD_BITS)


def is_allowed(mask_W: np.ndarray, token_id: int) -> bool:
    """Whether the bit of a token is set."""
    word = token_id // WORD_BITS
    return 0 <= word < len(mask_W) and bool(mask_W[word] >> token_id % WORD_BITS & 1)


def is_spent(matcher: Any) -> bool:
    """Whether the matcher's automata are spent: then it refuses valid tokens, and reports an error only for a mask."""
    matcher.compute_bitmask()
    return bool(matcher.is_error())


def take(matcher: Any, token_id: int) -> bool:
    """Advance a matcher by a token that its mask allows; False: its budget is spent."""
    return bool(matcher.try_consume_tokens([token_id]) == 1)


def walk(
    matcher: Any, grammar: Ends, drafts: Sequence[int], takes: Callable[[Any, int], bool] = take
) -> tuple[GrammarLookahead, bool]:
    """Look along the drafts without advancing the matcher.

    Returns:
        What was found, and whether the matcher can continue; if not, its automata are spent.
    """
    masks_QW = np.full((len(drafts) + 1, grammar.num_words), ALL_BITS, dtype=np.int32)
    ahead = matcher
    num_rows = num_valid = 0
    gave_up = False
    for row, mask_W in enumerate(masks_QW):
        if row:
            draft, before_W = drafts[row - 1], masks_QW[row - 1]
            if not is_allowed(before_W, draft):
                break
            if draft in grammar.eos_token_ids:
                num_valid += 1
                break
            if ahead is matcher:
                ahead = matcher.deep_copy()
            gave_up = not takes(ahead, draft)
        gave_up = gave_up or not _fill(ahead, grammar, mask_W)
        if gave_up:
            mask_W[:] = ALL_BITS
            break
        num_valid, num_rows = row, row + 1
    is_intact = not gave_up or (num_rows > 0 and not is_spent(matcher))
    return GrammarLookahead(masks_QW, num_valid, num_rows if gave_up else len(drafts) + 1), is_intact


def _fill(matcher: Any, grammar: Ends, mask_W: np.ndarray) -> bool:
    """Write the mask of allowed next tokens; False if the library gave up."""
    words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
    may_end = matcher.is_accepting()
    if is_spent(matcher):  # checked last, because `is_accepting` spends budget, too
        return False
    mask_W[:] = words[: len(mask_W)]
    bits_W = mask_W.view(np.uint32)
    # Allow each EOS exactly where the text may end, whatever the library says about it.
    for token_id in grammar.eos_token_ids:
        bit = np.uint32(1 << token_id % WORD_BITS)
        if may_end:
            bits_W[token_id // WORD_BITS] |= bit
        else:
            bits_W[token_id // WORD_BITS] &= ~bit
    return True
