"""Grammars over tokens: which tokens may come next, for an answer that must match a schema, a regex or a grammar.

This is pure host code over the `llguidance` library (an Earley parser over lexemes of derivative automata, built while
they are used), which is imported only where it is needed. `GrammarCompiler` belongs to one model; `GrammarState`
follows one sequence and looks ahead along its drafts.

What a grammar allows after a text depends on these two alone. The library's limits never decide it; they only divide
the work into portions. In the *fast path*, the sequences of a grammar share the automata of one matcher, on the step's
thread, within `QUICK_LIMITS`. A sequence whose portion is spent (by its text, its drafts or its neighbours) leaves the
fast path for a matcher of its own (`engine.grammar.executor`), which works on another thread and without the GIL; until
that has answered, the step emits nothing for this sequence. Only a matcher that restarted with exactly this text may
report, with `GrammarBudgetExceeded`, that the text cannot be followed.

The step's thread compiles nothing. A request's grammar is tried and compiled while the request is checked, and stays
known as long as its sequence exists. Automata that were spent meanwhile, and on ranks other than 0 all of them, are
built on the compiler's threads while the sequence is in its slot; until then the sequence has no masks.

Legend: K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32) words of a row's bitmask. Token t is allowed if bit t %
32 of word t // 32 is set.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from baton.core.errors import BatonError, InvalidGrammar, as_internal
from baton.core.requests.answer_structure import check_grammar
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.core.start_time_fair_queue import OwnerUsage
from baton.engine.grammar.executor import GrammarExecutor, OwnMatcher
from baton.engine.grammar.text import (
    MAX_MESSAGE_LEN,
    failed_matcher,
    library_text,
    new_matcher,
    new_tokens,
    refusal,
)
from baton.engine.grammar.trial import GrammarTrial
from baton.engine.grammar.walk import GrammarLookahead, is_allowed, is_spent, num_words, walk

MAX_KNOWN: Final = 64  # masks that a grammar keeps, of texts whose masks were slow
# Limits of the fast path: no call takes more than about 10 ms.
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
# Limits of a sequence's own matcher. States grow with the text (`engine.grammar.executor`).
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
        own: limits of a sequence's own matcher.
        slow_look_s: CPU time of a slow look; after several slow looks, a sequence leaves the fast path.
        max_spent_s: total time that one sequence may spend.
    """

    quick: dict[str, Any] = field(default_factory=lambda: dict(QUICK_LIMITS))
    own: dict[str, Any] = field(default_factory=lambda: dict(OWN_LIMITS))
    slow_look_s: float = SLOW_LOOK_S
    max_spent_s: float = MAX_SPENT_S


class GrammarSource:
    """What all compilations of one grammar share. Any thread.

    Args:
        tokens: returns the tokenizer in the library's form.
        kind: kind of the grammar.
        text: returns the grammar in the library's language; called once, on a thread of the compiler.

    Attributes:
        share: what sequences of the grammar have spent in the executor.
    """

    def __init__(self, tokens: Callable[[], Any], kind: str, text: Callable[[], str]) -> None:
        self.share = OwnerUsage()
        self._tokens = tokens
        self._kind = kind
        self._text = text
        self._said: str | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def matcher(self, limits: dict[str, Any]) -> Any:
        """A new matcher, before the first token; slow.

        Raises:
            InvalidGrammar: it does not compile within the limits.
        """
        if self._said is None:
            self._said = self._text()
        return new_matcher(self._tokens(), self._kind, self._said, limits)

    def idle(self) -> Any:
        """A matcher that does nothing."""
        return failed_matcher(self._tokens())

    def remember(self, token_ids: tuple[int, ...], mask_W: np.ndarray) -> None:
        """Keep the mask after a text, because it took long, for later sequences with the same text."""
        with self._lock:
            self._known[token_ids] = mask_W
            self._known.move_to_end(token_ids)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def recall(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """The mask after a text, if it was kept."""
        return self._known.get(tuple(token_ids)) if self._known else None


class CompiledGrammar:
    """One compilation of a grammar; sequences start from copies of its matcher. Any thread.

    The copies share, with one budget, the automata that the library builds while they are used.

    Attributes:
        made: done when it is compiled; an exception says why it cannot be.
        lock: guards the automata.
        eos_token_ids: any of them ends the text.
        vocab_size: V.
        is_spent: the shared automata are spent: new sequences should start from another compilation.
        is_slow: looks took long: new sequences skip the fast path.
        share: what its sequences have spent in the executor.
        recall, remember: masks that are kept, see `GrammarSource`.
    """

    def __init__(
        self,
        executor: GrammarExecutor,
        compiles: GrammarExecutor,
        source: GrammarSource,
        budget: GrammarBudget,
        *,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        self.lock = threading.Lock()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.num_words = num_words(vocab_size)
        self.budget = budget
        self.is_spent = False
        self.is_slow = False
        self.share = source.share
        self.recall, self.remember = source.recall, source.remember
        self._executor = executor
        self._source = source
        self._matcher: Any = None
        self.made: Future[None] = compiles.submit(self._make, OwnerUsage())

    def copy(self) -> Any:
        """A fast-path matcher before the first token; None if this grammar has no fast path."""
        return None if self.is_slow or self._matcher is None else self._matcher.deep_copy()

    def own(self, token_ids: Sequence[int]) -> OwnMatcher:
        """A matcher for one sequence, which has these tokens."""
        source, limits, max_spent_s = self._source, self.budget.own, self.budget.max_spent_s
        return OwnMatcher(self, self._executor, self.share, source.matcher, source.idle, limits, max_spent_s, token_ids)

    def _make(self) -> None:
        """Compile, on a thread of the compiler."""
        try:
            self._matcher = self._source.matcher(self.budget.quick)
        except InvalidGrammar:
            self.is_slow = True  # with larger limits, own matchers compile or say why not


class HeldGrammar:
    """A grammar that passed its trial. While anything holds it, none of its sequences needs another trial.

    Attributes:
        source: see `GrammarSource`.
        newest: the compilation that new sequences start from.
    """

    def __init__(self, source: GrammarSource, newest: CompiledGrammar) -> None:
        self.source = source
        self.newest = newest


MAX_COMPILED: Final = 32  # grammars that a compiler keeps
MAX_SLOW_LOOKS: Final = 3  # after so many slow looks, a sequence leaves the fast path


class GrammarState:
    """The position of one sequence in its grammar. Not thread-safe.

    After an error (`error` is set) the state allows everything and accepts nothing: its sequence must be ended.

    Attributes:
        error: why the sequence cannot continue: its budget is spent, or it got a token that the grammar forbids, which
            happens only if the request's other constraints left none that it allows.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        """Start before the first token. The grammar need not be compiled yet; until it is, its masks are unknown."""
        self._grammar = grammar
        self._accepted: list[int] = []
        self._has_ended = False
        self._num_slow = 0
        self._seen: tuple[list[int], GrammarLookahead] | None = None  # drafts and look since `_num_seen` tokens
        self._num_seen = 0
        self._matcher: Any = None
        self._own: OwnMatcher | None = None
        self.error: BatonError | None = None
        self._is_compiled(0.0)

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and EOS was accepted."""
        return self._has_ended

    @property
    def is_quick(self) -> bool:
        """Whether it is in the fast path, where masks are computed when they are asked for."""
        return self._matcher is not None

    def accept(self, token_ids: Iterable[int]) -> int:
        """Advance by emitted tokens, up to the EOS that ends the text.

        Returns:
            How many tokens belong to the text, including EOS; those after it, or after an error, do not.
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
        """What may follow each prefix of the drafts; does not advance the state. Waits if it must.

        At least the first row of the result is known.
        """
        self.begin(drafts)
        look = self.found(drafts, None)
        assert look.num_rows > 0
        return look

    def begin(self, drafts: Sequence[int]) -> None:
        """Start preparing a look at these drafts if `found` would have to wait for it; returns at once."""
        if not self._is_open or not self._is_compiled(0.0):
            return
        if self._own is not None and self._found_before(drafts) is None:
            self._own.begin(self._accepted, drafts)

    def found(self, drafts: Sequence[int], patience_s: float | None) -> GrammarLookahead:
        """What may follow each prefix of the drafts, as far as it is known in time.

        Args:
            drafts: those passed to `begin`.
            patience_s: how long to wait; None: until it is known.
        """
        if not self._is_open:
            return self._anything(drafts)
        look = self._found_before(drafts)
        if look is None and not self._is_compiled(patience_s):
            return GrammarLookahead.unknown(len(drafts), self._grammar.num_words)
        if self.error is not None:
            return self._anything(drafts)
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

    def _is_compiled(self, patience_s: float | None) -> bool:
        """Whether the grammar is compiled within `patience_s`; if so, the state has a matcher, or an error."""
        if self._matcher is not None or self._own is not None or self.error is not None:
            return True
        made = self._grammar.made
        if not made.done() and (patience_s == 0 or not wait([made], patience_s).done):
            return False
        error = made.exception()
        if error is not None:
            self.error = as_internal("the compilation of a grammar", error)
            return True
        self._matcher = self._grammar.copy()
        if self._matcher is None:
            self._own = self._grammar.own(self._accepted)
        elif self._accepted:  # they have not been checked until now
            token_ids, self._accepted = self._accepted, []
            self._seen, self._num_seen = None, 0
            self.accept(token_ids)
        return True

    def _anything(self, drafts: Sequence[int]) -> GrammarLookahead:
        return GrammarLookahead.unknown(len(drafts), self._grammar.num_words, num_rows=len(drafts) + 1)

    def _found_before(self, drafts: Sequence[int]) -> GrammarLookahead | None:
        if self._seen is not None and self._num_seen == len(self._accepted) and self._matcher is None:
            before, look = self._seen
            if before == list(drafts):
                return look
        if not drafts and self._matcher is None:
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
        """Leave the fast path for a matcher of its own."""
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
        """Whether the text can continue with this token; if so, the fast path's matcher has taken it."""
        mask_W = self._mask_W()
        if mask_W is not None and not is_allowed(mask_W, token_id):
            return False
        if self._matcher is not None and self._takes(token_id):
            return True
        if self._matcher is not None:
            if mask_W is None and not self._is_spent():
                return False
            self._grammar.is_spent = True
            self._leave()
        if mask_W is None and token_id not in self._grammar.eos_token_ids:
            return True  # its own matcher will decide when it gets there
        if mask_W is None:
            mask_W = self.look([]).masks_QW[0]
        return self.error is None and is_allowed(mask_W, token_id)

    def _mask_W(self) -> np.ndarray | None:
        """What may follow the accepted tokens, if the last look has determined it."""
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
    """Compiles grammars for one model; keeps the last `MAX_COMPILED`, and those that are held. Any thread.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: columns of the model's logits; may be more or fewer than the tokenizer's tokens.
        is_compact: JSON has no white space between its tokens; otherwise up to 32 characters at each place.
        budget: what following grammars may cost.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, is_compact: bool = True, budget: GrammarBudget | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._is_compact = is_compact
        self._budget = budget or GrammarBudget()
        self._eos_token_ids = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._executor = GrammarExecutor()
        self._compiles = GrammarExecutor()  # separate, so that no sequence waits for another's compilation
        self._tokens = _LibraryTokens(tokenizer, vocab_size, self._eos_token_ids)
        self._trial: GrammarTrial | None = None
        self._compiled: OrderedDict[GrammarSpec, HeldGrammar] = OrderedDict()
        self._held: WeakValueDictionary[GrammarSpec, HeldGrammar] = WeakValueDictionary()

    @property
    def spent_s(self) -> float:
        """Time that grammars have spent on their own threads: compilations, and sequences with their own matchers."""
        return self._executor.spent_s + self._compiles.spent_s

    def hold(self, spec: GrammarSpec) -> HeldGrammar:
        """The grammar, once it has passed its trial; while the result is kept, `begin` can be called at any time.

        Raises:
            InvalidGrammar: it is malformed, too complex, or matches no text of this model's tokens.
        """
        with self._lock:
            found = self._find(spec)
        if found is None:
            tried = self._tried(spec)
            with self._lock:
                found = self._find(spec) or self._keep(spec, tried)  # another thread may have been as fast
        return found

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compilation that new sequences of the grammar start from; waits until it is compiled.

        Raises:
            InvalidGrammar: as `hold`.
        """
        held = self.hold(spec)
        with self._lock:
            compiled = self._newest(held)
        compiled.made.result()
        return compiled

    def prepare(self) -> None:
        """Build what all grammars need, before any answer streams; holds the GIL, for a second with 150,000 tokens."""
        if self._eos_token_ids:
            with contextlib.suppress(InvalidGrammar):  # reported to each request that needs it
                self._tokens.get()

    def forget(self) -> None:
        """Make sequences that start from now on share nothing with earlier ones."""
        with self._lock:
            for held in self._held.values():
                held.newest.is_spent = True

    def start(self, spec: GrammarSpec, token_ids: Iterable[int] = ()) -> GrammarState:
        """The state of a sequence that already has these tokens; waits until the grammar is compiled.

        Raises:
            InvalidGrammar: as `compile`.
        """
        state = GrammarState(self.compile(spec))
        state.accept(token_ids)
        return state

    def begin(self, spec: GrammarSpec, token_ids: Iterable[int] = ()) -> GrammarState:
        """Same as `start` but without waiting, for a step: compilation runs on other threads, and may set `error`.

        The grammar has passed its trial, here or on rank 0. If it is not known here, it is not tried again.
        """
        with self._lock:
            held = self._find(spec)
            if held is None:
                kind, text, is_compact = spec.kind, spec.text, self._is_compact
                held = self._keep(spec, self._new(kind, lambda: library_text(kind, text, is_compact=is_compact)))
            compiled = self._newest(held)
        state = GrammarState(compiled)
        state.accept(token_ids)
        return state

    def _find(self, spec: GrammarSpec) -> HeldGrammar | None:
        """The held grammar, if known; needs the lock."""
        held = self._held.get(spec)
        return None if held is None else self._keep(spec, held)

    def _keep(self, spec: GrammarSpec, held: HeldGrammar) -> HeldGrammar:
        """Note that the grammar was used now; needs the lock."""
        self._held[spec] = self._compiled[spec] = held
        self._compiled.move_to_end(spec)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return held

    def _newest(self, held: HeldGrammar) -> CompiledGrammar:
        """The compilation that new sequences start from, which may still be in progress; needs the lock."""
        made, is_spent = held.newest.made, held.newest.is_spent and not held.newest.is_slow
        if is_spent or (made.done() and made.exception() is not None):
            held.newest = self._compilation(held.source)
        return held.newest

    def _tried(self, spec: GrammarSpec) -> HeldGrammar:
        check_grammar(spec.kind, spec.text)
        if not self._eos_token_ids:
            raise InvalidGrammar("this model names no end-of-sequence token, so no answer can be complete")
        self._tokens.get()
        with self._lock:
            if self._trial is None:
                self._trial = GrammarTrial(self._tokens.setup)
        text = self._trial.text_of(spec.kind, spec.text, self._budget.own, is_compact=self._is_compact)
        held = self._new(spec.kind, lambda: text)
        held.newest.made.result()
        state = GrammarState(held.newest)
        mask_W = state.masks([])[0]
        if state.error is not None:
            raise refusal(spec.kind, state.error.message)
        if not mask_W.any():
            raise refusal(spec.kind, "no text matches it")
        return held

    def _new(self, kind: str, text: Callable[[], str]) -> HeldGrammar:
        source = GrammarSource(self._tokens.get, kind, text)
        return HeldGrammar(source, self._compilation(source))

    def _compilation(self, source: GrammarSource) -> CompiledGrammar:
        return CompiledGrammar(
            self._executor,
            self._compiles,
            source,
            self._budget,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
        )


class _LibraryTokens:
    """The tokenizer in the library's form, built once. Any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._made: Any = None

    @property
    def setup(self) -> tuple[str, int, int]:
        """Arguments of `new_tokens`."""
        return self._tokenizer.to_json(), self._num_tokens, self._eos_token_ids[0]

    def get(self) -> Any:
        """The tokenizer in the library's form.

        Raises:
            InvalidGrammar: the library does not know what its tokens spell.
        """
        with self._lock:
            if self._made is None:
                self._made = new_tokens(*self.setup)
            return self._made


def check_compiles(
    spec: GrammarSpec | None, grammars: GrammarCompiler | None, token_ids: Sequence[int] = ()
) -> HeldGrammar | None:
    """Check that a request's grammar, if it has one, can be followed here, continuing after these tokens of its text.

    Returns:
        What the request's sequence must keep, so that nothing is compiled again when it gets its slot.

    Raises:
        InvalidGrammar: it does not compile, or nothing here compiles grammars, or the tokens do not fit.
        GrammarBudgetExceeded: following the tokens costs more than a request may spend.
    """
    if spec is None:
        return None
    if grammars is None:
        raise InvalidGrammar("this worker follows no grammars", kind=spec.kind)
    held = grammars.hold(spec)
    state = grammars.start(spec, token_ids)
    state.begin([])
    state.found([], None)  # so that it is known when the first step needs it
    if state.error is not None:
        raise state.error
    return held
