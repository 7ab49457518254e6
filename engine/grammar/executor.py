"""Runs matchers that belong to single sequences on threads beside the step's.

A thread of the executor prepares a look (the masks for a sequence's next step) while other sequences continue, and
without the GIL: computing masks releases it, and tokens are consumed by the library's executor, which releases it for
two matchers or more.

A thread without the GIL still uses a core. So these threads have a lower priority (nice) than the step's, and there are
half as many as cores: dozens of nice threads would outweigh one that is not. Grammars take turns by the time they have
spent, those that spent little first: a slow one delays its own sequences, and others by no more than the look in
progress.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Final, TypeVar

from baton.core.errors import GrammarBudgetExceeded, InvalidGrammar
from baton.core.start_time_fair_queue import OwnerUsage, StartTimeFairQueue
from baton.engine.grammar.text import MAX_MESSAGE_LEN
from baton.engine.grammar.walk import Ends, GrammarLookahead, is_allowed, walk

MAX_THREADS: Final = 64  # sequences whose masks are computed at the same time; others wait for their turn
NICENESS: Final = 10
# States allowed for each byte of text, so that the automaton may grow with the answer.
STATES_PER_TOKEN: Final = 64

Looked = tuple[list[int], GrammarLookahead]
Made = TypeVar("Made")


def num_threads() -> int:
    """Half of the cores that this process may use, so that the step has the others, whatever grammars take."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


class GrammarExecutor:
    """The threads, which start when they are needed, and the time spent on them.

    Args:
        num: number of threads.
    """

    def __init__(self, num: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(num or num_threads(), "grammar-executor", initializer=_be_nice)
        self._lock = threading.Lock()
        self._turns: StartTimeFairQueue[tuple[Callable[[], Any], Future[Any]]] = StartTimeFairQueue()
        self._spent_s = 0.0

    @property
    def spent_s(self) -> float:
        """Total time spent on the threads."""
        return self._spent_s

    def submit(self, work: Callable[[], Made], share: OwnerUsage, after: Future[Any] | None = None) -> Future[Made]:
        """Run work when it is the owner's turn.

        Args:
            work: the work.
            share: what its owner has spent so far; the work's time is added.
            after: work that must have ended before.
        """
        result: Future[Made] = Future()
        if after is None:
            self._enqueue(work, share, result)
        else:
            after.add_done_callback(lambda _: self._enqueue(work, share, result))
        return result

    def _enqueue(self, work: Callable[[], Any], share: OwnerUsage, result: Future[Any]) -> None:
        with self._lock:
            self._turns.add(share, (lambda: self._timed(work, share), result))
        self._pool.submit(self._serve)

    def _serve(self) -> None:
        """Run one turn, on a thread; called once per submitted work."""
        with self._lock:
            turn = self._turns.next()
        assert turn is not None
        work, result = turn
        try:
            made = work()
        except BaseException as error:  # noqa: BLE001  the submitter gets it
            result.set_exception(error)
        else:
            result.set_result(made)

    def _timed(self, work: Callable[[], Made], share: OwnerUsage) -> Made:
        start_s = time.monotonic()
        try:
            return work()
        finally:
            spent_s = time.monotonic() - start_s
            with self._lock:
                self._spent_s += spent_s
                share.charge(spent_s)


class OwnMatcher:
    """The matcher of a single sequence. The sequence's thread calls `begin` and `found`.

    Args:
        grammar: the grammar.
        executor: provides the threads.
        share: time spent on this grammar.
        build: creates a matcher before the first token, with the given limits.
        idle: creates a matcher that does nothing.
        limits: the library's limits.
        max_spent_s: time that the sequence may spend.
        token_ids: the text so far.
    """

    def __init__(
        self,
        grammar: Ends,
        executor: GrammarExecutor,
        share: OwnerUsage,
        build: Callable[[dict[str, Any]], Any],
        idle: Callable[[], Any],
        limits: dict[str, Any],
        max_spent_s: float,
        token_ids: Sequence[int],
    ) -> None:
        self._grammar = grammar
        self._executor = executor
        self._share = share
        self._build = build
        self._limits = limits
        self._max_spent_s = max_spent_s
        self._spent_s = 0.0
        self._matcher: Any = None
        self._num_consumed = 0
        self._takes = _FreeTaker(idle)
        self._job: Future[Looked] | None = None
        self._job_len = len(token_ids)

    def begin(self, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Start a look at the drafts after this text, unless one is in progress."""
        if self._job is None or self._job_len != len(token_ids):
            text, ahead = list(token_ids), list(drafts)
            self._job_len = len(text)
            # Two looks at a time would advance the same matcher. The step waits for neither.
            self._job = self._executor.submit(lambda: (ahead, self._look(text, ahead)), self._share, after=self._job)

    def found(self, token_ids: Sequence[int], drafts: Sequence[int], patience_s: float | None) -> GrammarLookahead:
        """What is known about these drafts in time.

        Raises:
            GrammarBudgetExceeded: the text cannot be followed within the budget.
            InvalidGrammar: the grammar forbids the text.
        """
        self.begin(token_ids, drafts)
        assert self._job is not None
        try:
            before, look = self._job.result(patience_s)
        except NotYet:
            return GrammarLookahead.unknown(len(drafts), self._grammar.num_words)
        return look.along(before, drafts)

    def _look(self, text: list[int], drafts: list[int]) -> GrammarLookahead:
        """Look at the drafts, on a thread of the executor."""
        if self._job_len != len(text):  # the sequence has advanced meanwhile and no longer needs this
            return GrammarLookahead.unknown(len(drafts), self._grammar.num_words)
        start_s = time.monotonic()
        try:
            return self._looked(text, drafts)
        finally:
            self._spent_s += time.monotonic() - start_s

    def _looked(self, text: list[int], drafts: list[int]) -> GrammarLookahead:
        if self._spent_s > self._max_spent_s:
            raise GrammarBudgetExceeded(f"following its grammar has taken more than {self._max_spent_s:g} s")
        if self._matcher is not None and self._consumes(text):
            look, is_intact = walk(self._matcher, self._grammar, drafts, self._takes)
            if not is_intact:
                self._matcher = None
            if look.num_rows:
                return look
        # From here on, only the text and this one look decide.
        self._restart(text)
        assert self._matcher is not None
        why, num_consumed = self._matcher.get_error(), self._num_consumed
        if num_consumed < len(text):
            self._judge(text, num_consumed)
        else:
            look, is_intact = walk(self._matcher, self._grammar, [], self._takes)
            if is_intact and drafts:
                look, is_intact = walk(self._matcher, self._grammar, drafts, self._takes)
            if not is_intact:
                why, self._matcher = self._matcher.get_error(), None
            if look.num_rows:
                return look
        self._matcher = None
        message = f"its grammar is too complex to be followed any further: {why or 'it takes too many states'}"
        raise GrammarBudgetExceeded(message[:MAX_MESSAGE_LEN])

    def _judge(self, text: list[int], place: int) -> None:
        """Handle a token that a new matcher did not take, by checking it against the mask before it.

        Raises:
            InvalidGrammar: the grammar forbids the token.
        """
        self._restart(text[:place])
        look, _ = walk(self._matcher, self._grammar, [], self._takes)
        if look.num_rows and not is_allowed(look.masks_QW[0], text[place]):
            raise InvalidGrammar(f"the grammar cannot be followed any further: it forbids token {text[place]}")

    def _restart(self, text: list[int]) -> None:
        self._matcher, self._num_consumed = self._build(self._limits_for(text)), 0
        self._consumes(text)

    def _limits_for(self, text: list[int]) -> dict[str, Any]:
        """The limits, raised for twice the text, so that it seldom has to be followed again from the start."""
        num_states = self._limits["max_lexer_states"] + 2 * STATES_PER_TOKEN * len(text)
        return self._limits | {"max_lexer_states": num_states}

    def _consumes(self, text: list[int]) -> bool:
        for token_id in text[self._num_consumed :]:
            if not self._takes(self._matcher, token_id):
                return False
            self._num_consumed += 1
        return True


class _FreeTaker:
    """Advances the matchers of one sequence without the GIL."""

    def __init__(self, idle: Callable[[], Any]) -> None:
        self._make_idle = idle
        self._idle: Any = None
        self._executor: Any = None

    def __call__(self, matcher: Any, token_id: int) -> bool:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor, self._idle = LLExecutor(1), self._make_idle()
        # With a single matcher, the executor would keep the GIL.
        taken, _ = self._executor.consume_token_par([(matcher, token_id), (self._idle, token_id)])
        return bool(taken)


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
