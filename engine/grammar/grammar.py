"""Grammars over tokens: which tokens may come next, for an answer that must match a schema, a regex or a grammar.

Pure host code over the `llguidance` library (Earley parser over lexemes of derivative automata, built while they are
used), which is imported where it is needed. `GrammarCompiler` is one model's; `GrammarState` follows
one sequence and looks ahead along its drafts.

What a grammar allows after a text depends on the two alone. The library's limits are no verdicts here, only portions of
work: in the *fast path* sequences of one grammar share the automata of one matcher, on the step's thread, within
`QUICK_LIMITS`. A sequence whose portion is spent (by its text, its drafts or its neighbours) leaves it for a matcher of
its own (`engine.grammar.executor`), which works on another thread and without the GIL; until that has answered, the
step emits nothing of this sequence. Only a matcher that began anew with this text and has nothing else to do may say
that the text cannot be followed, with `GrammarBudgetExceeded`.

Legend: K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32) words of a row's bitmask. Token t is allowed if bit
t % 32 of word t // 32 is set.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from baton.core.errors import BatonError, InvalidGrammar
from baton.core.requests.answer_structure import check_grammar
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.core.start_time_fair_queue import OwnerUsage
from baton.engine.grammar.executor import GrammarExecutor, OwnMatcher
from baton.engine.grammar.text import MAX_MESSAGE_LEN, failed_matcher, new_matcher, new_tokens, refusal
from baton.engine.grammar.trial import GrammarTrial
from baton.engine.grammar.walk import GrammarLookahead, is_allowed, is_spent, num_words, walk

MAX_KNOWN: Final = 64  # masks that a grammar keeps, of texts whose masks took long
# The fast path's: no call takes more than some 10 ms.
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
# Of a matcher that one sequence has for itself. States grow with the text (`engine.grammar.executor`).
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
        quick: the library's limits in the fast path.
        own: of a sequence's own matcher.
        slow_look_s: CPU time of a look; after some that took more, a sequence leaves the fast path.
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
        is_slow: a look took long: new sequences do without the fast path.
        share: what its sequences have spent in the executor.
    """

    def __init__(
        self,
        executor: GrammarExecutor,
        tokens: Any,
        spec: GrammarSpec,
        text: str,
        budget: GrammarBudget,
        *,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        share: OwnerUsage | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.num_words = num_words(vocab_size)
        self.budget = budget
        self.is_spent = False
        self.is_slow = False
        self._executor = executor
        self.share = share or OwnerUsage()
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
        """A matcher of the fast path before the first token; None if it is closed to this grammar."""
        return None if self.is_slow or self._matcher is None else self._matcher.deep_copy()

    def own(self, token_ids: Sequence[int]) -> OwnMatcher:
        """A matcher for one sequence, which has these tokens."""

        def build(limits: dict[str, Any]) -> Any:
            return new_matcher(self._tokens, self._kind, self.text, limits)

        def idle() -> Any:
            return failed_matcher(self._tokens)

        limits, max_spent_s = self.budget.own, self.budget.max_spent_s
        return OwnMatcher(self, self._executor, self.share, build, idle, limits, max_spent_s, token_ids)

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


MAX_COMPILED: Final = 32  # grammars that a compiler keeps
MAX_SLOW_LOOKS: Final = 3  # after so many a sequence leaves the fast path


class GrammarState:
    """Where one sequence is in its grammar. Not thread-safe.

    After an error (`error` is set) the state allows everything and accepts nothing: its sequence must be ended.

    Attributes:
        error: why the sequence cannot go on: its budget is spent, or a token came that the grammar forbids, which
            happens only where the request's other constraints left none that it allows.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._accepted: list[int] = []
        self._has_ended = False
        self._num_slow = 0
        self._seen: tuple[list[int], GrammarLookahead] | None = None  # drafts and look since `_num_seen` tokens
        self._num_seen = 0
        self._matcher = grammar.copy()
        self._own: OwnMatcher | None = None if self._matcher is not None else grammar.own(self._accepted)
        self.error: BatonError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and EOS was accepted."""
        return self._has_ended

    @property
    def is_quick(self) -> bool:
        """Whether its masks are computed where they are asked for."""
        return self._own is None

    def accept(self, token_ids: Iterable[int]) -> int:
        """Move on by emitted tokens, up to the EOS that ends the text.

        Returns:
            How many belong to the text, EOS included; those after it, or after an error, do not.
        """
        num_accepted = 0
        for token_id in token_ids:
            if self._has_ended or self.error is not None:
                break
            if not self._fits(token_id):
                if self.error is None:
                    self._fail(f"it forbids token {token_id}, and nothing else was left")
                break
            if token_id in self._grammar.eos_token_ids:
                self._has_ended = True
            else:
                self._accepted.append(token_id)
            num_accepted += 1
        return num_accepted

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """`look(drafts).masks_QW`."""
        return self.look(drafts).masks_QW

    def num_valid(self, drafts: Sequence[int]) -> int:
        """`look(drafts).num_valid`."""
        return self.look(drafts).num_valid

    def look(self, drafts: Sequence[int]) -> GrammarLookahead:
        """What may follow each prefix of the drafts; the state stays where it is. Waits, if it must.

        At least the first row of the result says what the grammar allows.
        """
        self.begin(drafts)
        look = self.found(drafts, None)
        assert look.num_rows > 0
        return look

    def begin(self, drafts: Sequence[int]) -> None:
        """Have a look at these drafts prepared, where `found` would have to wait for it; at once."""
        if self._own is not None and self._is_open and self._found_before(drafts) is None:
            self._own.begin(self._accepted, drafts)

    def found(self, drafts: Sequence[int], patience_s: float | None) -> GrammarLookahead:
        """What may follow each prefix of the drafts, as far as it is known in time.

        Args:
            drafts: those of `begin`.
            patience_s: how long to wait; None: until it is known.
        """
        if not self._is_open:
            return self._anything(drafts)
        look = self._found_before(drafts)
        if look is None and self._own is None:
            look = self._quick_look(drafts)
            if self._own is not None and look.num_rows == 0:
                self._own.begin(self._accepted, drafts)
                look = None
        if look is None:
            look = self._own_look(drafts, patience_s)
        if look.num_rows:
            self._seen, self._num_seen = (list(drafts), look), len(self._accepted)
        return look

    @property
    def _is_open(self) -> bool:
        return self.error is None and not self._has_ended

    def _anything(self, drafts: Sequence[int]) -> GrammarLookahead:
        return GrammarLookahead.unknown(len(drafts), self._grammar.num_words, num_rows=len(drafts) + 1)

    def _found_before(self, drafts: Sequence[int]) -> GrammarLookahead | None:
        if self._seen is not None and self._num_seen == len(self._accepted) and self._own is not None:
            before, look = self._seen
            if before == list(drafts):
                return look
        if not drafts and self._own is not None:
            mask_W = self._grammar.recall(self._accepted)
            return None if mask_W is None else GrammarLookahead(mask_W[None].copy(), 0, 1)
        return None

    def _quick_look(self, drafts: Sequence[int]) -> GrammarLookahead:
        start_s = time.thread_time()
        with self._grammar.lock:
            look, is_intact = walk(self._matcher, self._grammar, drafts)
        if time.thread_time() - start_s > self._grammar.budget.slow_look_s:
            self._num_slow += 1
            if self._num_slow == MAX_SLOW_LOOKS:
                self._grammar.is_slow = True
                self._leave()
        if not is_intact:
            self._grammar.is_spent = True
            self._leave()
        return look

    def _leave(self) -> None:
        """From here on with a matcher of its own."""
        if self._own is None:
            self._own = self._grammar.own(self._accepted)
            self._matcher = None

    def _own_look(self, drafts: Sequence[int], patience_s: float | None) -> GrammarLookahead:
        assert self._own is not None
        try:
            look = self._own.found(self._accepted, drafts, patience_s)
        except BatonError as error:
            self.error = error
            return self._anything(drafts)
        if look.num_rows:
            self._grammar.remember(tuple(self._accepted), look.masks_QW[0].copy())
        return look

    def _fits(self, token_id: int) -> bool:
        """Whether the text can go on with this token; the fast path's matcher has taken it then."""
        mask_W = self._mask_W()
        if mask_W is not None and not is_allowed(mask_W, token_id):
            return False
        if self._own is None and self._takes(token_id):
            return True
        if self._own is None:
            if mask_W is None and not self._is_spent():
                return False
            self._grammar.is_spent = True
            self._leave()
        if mask_W is None and token_id not in self._grammar.eos_token_ids:
            return True  # the own matcher says so, or not, when it comes to it
        if mask_W is None:
            mask_W = self.look([]).masks_QW[0]
        return self.error is None and is_allowed(mask_W, token_id)

    def _mask_W(self) -> np.ndarray | None:
        """What may follow the accepted tokens, if the last look has said it."""
        if self._seen is None:
            return None
        drafts, look = self._seen
        since = self._accepted[self._num_seen :]
        if len(since) < look.num_rows and drafts[: len(since)] == since and len(since) <= look.num_valid:
            mask_W: np.ndarray = look.masks_QW[len(since)]
            return mask_W
        return None

    def _takes(self, token_id: int) -> bool:
        assert self._matcher is not None
        with self._grammar.lock:
            if token_id in self._grammar.eos_token_ids:
                return bool(self._matcher.is_accepting())
            in_range = 0 <= token_id < self._grammar.vocab_size
            return in_range and self._matcher.try_consume_tokens([token_id]) == 1

    def _is_spent(self) -> bool:
        with self._grammar.lock:
            return is_spent(self._matcher)

    def _fail(self, why: str) -> None:
        self.error = InvalidGrammar(f"the grammar cannot be followed any further: {why}"[:MAX_MESSAGE_LEN])


class GrammarCompiler:
    """Compiles grammars for one model and keeps the last `MAX_COMPILED`. Any thread.

    Args:
        tokenizer: of the model.
        vocab_size: columns of the model's logits; more or fewer than the tokenizer has tokens.
        is_compact: JSON has no white space between its tokens; else up to 32 characters at each gap.
        budget: what following grammars may cost.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, is_compact: bool = True, budget: GrammarBudget | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._is_compact = is_compact
        self._budget = budget or GrammarBudget()
        self._eos_token_ids = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._executor = GrammarExecutor()
        self._compiles = GrammarExecutor()  # apart, so that no sequence waits for another one's compilation
        self._library_tokenizer: Any = None
        self._trial: GrammarTrial | None = None
        self._compiled: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()

    @property
    def spent_s(self) -> float:
        """Time that grammars have cost on threads of their own: new ones, and sequences with a matcher of their own."""
        return self._executor.spent_s + self._compiles.spent_s

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar, compiled now or before.

        Raises:
            InvalidGrammar: it is malformed, too complex, or matches no text of this model's tokens.
        """
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None and not found.is_spent:
                self._compiled.move_to_end(spec)
                return found
        compiled = self._compile(spec) if found is None else self._make(spec, found.text, found.share)
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def prepare(self) -> None:
        """Build what all grammars need, which keeps the GIL, a second for 150,000 tokens: before any answer streams."""
        if self._eos_token_ids:
            with contextlib.suppress(InvalidGrammar):  # said to each request that needs it
                self._tokens()

    def forget(self) -> None:
        """Sequences that start from now on share nothing with those before."""
        with self._lock:
            for compiled in self._compiled.values():
                compiled.is_spent = True

    def start(self, spec: GrammarSpec, token_ids: Iterable[int] = ()) -> GrammarState:
        """The state of a sequence that has these tokens already.

        Raises:
            InvalidGrammar: as `compile`.
        """
        state = GrammarState(self.compile(spec))
        state.accept(token_ids)
        return state

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        check_grammar(spec.kind, spec.text)
        if not self._eos_token_ids:
            raise InvalidGrammar("this model names no end-of-sequence token, so no answer can be complete")
        self._tokens()
        assert self._trial is not None
        text = self._trial.text_of(spec.kind, spec.text, self._budget.own, is_compact=self._is_compact)
        compiled = self._compiles.submit(lambda: self._make(spec, text), OwnerUsage()).result()
        state = GrammarState(compiled)
        mask_W = state.masks([])[0]
        if state.error is not None:
            raise refusal(spec.kind, state.error.message)
        if not mask_W.any():
            raise refusal(spec.kind, "no text matches it")
        return compiled

    def _make(self, spec: GrammarSpec, text: str, share: OwnerUsage | None = None) -> CompiledGrammar:
        return CompiledGrammar(
            self._executor,
            self._tokens(),
            spec,
            text,
            self._budget,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            share=share,
        )

    def _tokens(self) -> Any:
        """The tokenizer as the library wants it, built once.

        Raises:
            InvalidGrammar: the library does not know what its tokens spell.
        """
        with self._lock:
            if self._library_tokenizer is None:
                num_tokens = max(self._vocab_size, self._tokenizer.vocab_size)
                setup = (self._tokenizer.to_json(), num_tokens, self._eos_token_ids[0])
                self._library_tokenizer = new_tokens(*setup)
                self._trial = GrammarTrial(setup)
            return self._library_tokenizer


def check_compiles(spec: GrammarSpec | None, grammars: GrammarCompiler | None, token_ids: Sequence[int] = ()) -> None:
    """Check that a request's grammar, if it has one, can be followed here, from behind these tokens of its text.

    Raises:
        InvalidGrammar: it does not compile, or nothing here compiles grammars, or the tokens do not fit.
        GrammarBudgetExceeded: following the tokens costs more than a request may spend.
    """
    if spec is None:
        return
    if grammars is None:
        raise InvalidGrammar("this worker follows no grammars", kind=spec.kind)
    state = grammars.start(spec, token_ids)
    state.begin([])
    state.found([], None)  # so that it is known when the first step asks
    if state.error is not None:
        raise state.error
