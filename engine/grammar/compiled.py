"""A grammar that compiles: what sequences start from, and what following it may cost.

Legend: V vocabulary, W = ceil(V / 32) words of a mask.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from baton.core.errors import InvalidGrammar
from baton.core.fair_turns import Share
from baton.core.requests.sampling import GrammarSpec
from baton.engine.grammar.lane import GrammarLane, OwnMatcher
from baton.engine.grammar.text import failed_matcher, new_matcher
from baton.engine.grammar.walk import num_words

MAX_KNOWN: Final = 64  # masks that a grammar keeps, of texts whose masks took long
# The quick lane's: no call takes more than some 10 ms.
QUICK_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 4_000,
    "max_items_in_row": 300,
    "max_lexer_states": 20_000,
    "max_grammar_size": 250_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# Of a matcher that one sequence has for itself. States grow with the text (`grammar_lane`).
OWN_LIMITS: Final[dict[str, Any]] = QUICK_LIMITS | {
    "step_lexer_fuel": 5_000_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 100_000,
}
SLOW_LOOK_S: Final = 0.01  # a look that takes longer does not belong on the step's thread
MAX_SPENT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBudget:
    """What following grammars may cost.

    Attributes:
        quick: the library's limits in the quick lane.
        own: of a sequence's own matcher.
        slow_look_s: CPU time of a look; after some that took more, a sequence leaves the quick lane.
        max_spent_s: time that one sequence may spend in all.
    """

    quick: dict[str, Any] = field(default_factory=lambda: dict(QUICK_LIMITS))
    own: dict[str, Any] = field(default_factory=lambda: dict(OWN_LIMITS))
    slow_look_s: float = SLOW_LOOK_S
    max_spent_s: float = MAX_SPENT_S


class CompiledGrammar:
    """A grammar that was found good; sequences start from copies of its matcher. Any thread.

    Copies share the automata that the library builds while they are used, with one budget.

    Attributes:
        lock: of the automata.
        eos_token_ids: any of them ends the text.
        vocab_size: V.
        is_spent: the shared automata are spent: new sequences should start from another compilation.
        is_slow: a look took long: new sequences do without the quick lane.
        share: what its sequences have spent in the lane.
    """

    def __init__(
        self,
        lane: GrammarLane,
        tokens: Any,
        spec: GrammarSpec,
        text: str,
        budget: GrammarBudget,
        *,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        share: Share | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.num_words = num_words(vocab_size)
        self.budget = budget
        self.is_spent = False
        self.is_slow = False
        self._lane = lane
        self.share = share or Share()
        self._tokens = tokens
        self._kind = spec.kind
        self.text = text
        self._matcher: Any = None
        self._known: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()
        try:
            self._matcher = new_matcher(tokens, spec.kind, text, budget.quick)
        except InvalidGrammar:
            self.is_slow = True  # it compiles within more generous limits, as its trial has shown

    def copy(self) -> Any:
        """A matcher of the quick lane before the first token; None if it is closed to this grammar."""
        return None if self.is_slow or self._matcher is None else self._matcher.deep_copy()

    def own(self, token_ids: Sequence[int]) -> OwnMatcher:
        """A matcher for one sequence, which has these tokens."""

        def build(limits: dict[str, Any]) -> Any:
            return new_matcher(self._tokens, self._kind, self.text, limits)

        def idle() -> Any:
            return failed_matcher(self._tokens)

        limits, max_spent_s = self.budget.own, self.budget.max_spent_s
        return OwnMatcher(self, self._lane, self.share, build, idle, limits, max_spent_s, token_ids)

    def remember(self, token_ids: tuple[int, ...], mask_W: np.ndarray) -> None:
        """Keep the mask after a text, which took long, for those who come back to it."""
        with self.lock:
            self._known[token_ids] = mask_W
            self._known.move_to_end(token_ids)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def recall(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """The mask after a text, if it was kept."""
        return self._known.get(tuple(token_ids)) if self._known else None
