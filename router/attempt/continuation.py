"""One answer over all its attempts: which tokens the next one starts from, and whether there is a next one. Pure.

An attempt that loses a worker is followed by another, which gets the prompt and what the client has of the answer as a
*forced prefix* and goes on behind it (a migration); so is one whose hand-off failed (a retry). Every token reaches the
client once and in order, whatever late words of earlier attempts still arrive. Without migration a retry computes
everything again with the same seed, and what the client has is only compared.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from baton.core.errors import (
    BatonError,
    HandoffTooLong,
    ModelOutputInvalid,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestDeadlineExceeded,
    TransferFailed,
    WorkerLost,
    WorkersIncompatible,
)
from baton.core.requests.request import AttemptKey, GenerationRequest


class TokenOrder:
    """The tokens emitted so far.

    A worker that leaves a gap, contradicts itself or exceeds `max_tokens` is broken, and nothing it says can be
    streamed.
    """

    __slots__ = ("_max_tokens", "token_ids")

    def __init__(self, max_tokens: int, token_ids: Sequence[int] = ()) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[int] = list(token_ids)  # those of earlier attempts to begin with

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Accept tokens whose first has this index in the answer; returns those that are new.

        Raises:
            ProtocolError: a gap, a repeated token that differs, or too many tokens.
        """
        have = len(self.token_ids)
        if index == have and have + len(token_ids) <= self._max_tokens:  # as a rule
            self.token_ids.extend(token_ids)
            return list(token_ids)
        if index > have:
            raise ProtocolError(f"a worker skipped from token {have} to {index}", expected=have, index=index)
        num_old = min(have - index, len(token_ids))
        if list(token_ids[:num_old]) != self.token_ids[index : index + num_old]:
            raise ProtocolError(f"a worker repeated token {index} with another value", index=index)
        new = list(token_ids[num_old:])
        if have + len(new) > self._max_tokens:
            raise ProtocolError(f"a worker sent more than {self._max_tokens} tokens", limit=self._max_tokens)
        self.token_ids.extend(new)
        return new


MAX_RETRIES: Final = 2  # after failed hand-offs
FIRST_DELAY_S: Final = 0.05
LAST_DELAY_S: Final = 1.0
_CAUSE: Final = "cause"  # field of an error that a lost stream ended with


class Cause(Enum):
    """Why an answer moved to other workers."""

    DEATH = "death"  # the connection broke, or the worker reports under a new epoch
    FENCE = "fence"  # it was silent for too long
    DRAIN = "drain"  # an operator empties it
    STREAM = "stream"  # it ended this stream alone, without a finish or with an error of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationLimits:
    """How far an answer is followed.

    Attributes:
        max_migrations: of one answer; 0 is no migration at all: who loses a worker ends.
        wait_s: without any pair to go on with, before it ends.
    """

    max_migrations: int = 2
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt that failed."""

    attempt: int
    prefill: str
    decode: str
    why: str

    def __str__(self) -> str:
        return f"{self.prefill} and {self.decode}: {self.why}"


@dataclass(frozen=True, slots=True)
class Again:
    """What follows a failed attempt: another, after a pause.

    Attributes:
        delay_s: the pause.
        cause: why it moves, if it is a migration.
        takes_budget: it is a retry of a request that nothing has come of yet.
    """

    delay_s: float
    cause: Cause | None = None
    takes_budget: bool = False


def cause_of(error: BatonError) -> Cause | None:
    """Why the answer should move, if this error says that a stream was lost and not that the request is at fault."""
    if type(error) in (WorkerLost, ProtocolError, BatonError):
        named = error.fields.get(_CAUSE)
        for cause in Cause:
            if cause.value == named:
                return cause
        if isinstance(error, WorkerLost):
            return Cause.DEATH
    return None


class Continuation:
    """Call `begin`, `take` what its attempt says, and after an error `failed`; in this order, again and again.

    Args:
        request: the client's, as its first attempt.
        limits: of migration.
        uniform: draws from [0, 1), so that those who lost a worker together do not come back together.
    """

    def __init__(self, request: GenerationRequest, limits: MigrationLimits, uniform: Callable[[], float]) -> None:
        self.request = request
        self.num_forced = 0  # tokens that the last attempt began with
        self.num_retries = 0
        self.num_migrations = 0
        self.tried: list[Tried] = []
        self._limits = limits
        self._uniform = uniform
        self._order = TokenOrder(request.sampling.max_tokens)
        self._attempt = request.key.attempt - 1
        self._num_delays = 0
        self._waiting_since_s: float | None = None
        self._ended = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that the client has."""
        return len(self._order)

    @property
    def token_ids(self) -> Sequence[int]:
        """Those."""
        return self._order.token_ids

    @property
    def migrates(self) -> bool:
        """Whether another migration is left to it."""
        return self.num_migrations < self._limits.max_migrations

    def begin(self, room_len: int) -> GenerationRequest:
        """The next attempt.

        Args:
            room_len: positions that its prefill worker can hold. What does not fit of the forced prefix is computed
                again, and compared.
        """
        assert not self._ended
        self._attempt += 1
        self.num_forced = 0
        request = dataclasses.replace(self.request, key=AttemptKey(self.request.key.request_id, self._attempt))
        if not self._order.token_ids:
            return request
        if self._limits.max_migrations:
            # All that were allowed came, and no word of the end: the last is asked for again.
            most = min(room_len - self.request.prompt_len, self.request.sampling.max_tokens - 1)
            self.num_forced = max(min(len(self._order), most), 0)
        forced = tuple(self._order.token_ids[: self.num_forced])
        return dataclasses.replace(
            request,
            prompt_token_ids=(*self.request.prompt_token_ids, *forced),
            sampling=dataclasses.replace(request.sampling, prompt_logprobs=None),  # they were reported
            num_forced=len(forced),
        )

    def take(self, attempt: int, index: int, token_ids: Sequence[int]) -> list[int]:
        """Tokens of an attempt, of which the first has this index in the answer; returns those the client lacks.

        Raises:
            ProtocolError: a gap, or another token where one is known, or too many.
            TransferFailed: likewise, where an attempt computed again what was known.
        """
        if attempt != self._attempt or self._ended:
            return []  # of an attempt that was given up
        self._waiting_since_s = None
        self._num_delays = 0
        was_known = index < len(self._order)
        try:
            return self._order.take(index, token_ids)
        except ProtocolError as error:
            if not was_known or not self.tried:
                raise
            # Default numerics promise equal tokens but for near-ties, and this was one.
            raise TransferFailed(f"a recompute gave other tokens: {error.message}", diverged=True) from error

    def finish(self) -> None:
        """The answer is complete: nothing more is taken."""
        self._ended = True

    def failed(self, error: BatonError, *, prefill: str, decode: str, now_s: float) -> Again:
        """What follows an attempt of these two workers that ended with an error.

        Raises:
            BatonError: nothing does: this error, with what was tried.
        """
        cause = cause_of(error)
        why = type(error).__name__ if cause is None else cause.value
        self.tried.append(Tried(self._attempt, prefill, decode, why))
        if now_s >= self.request.deadline_s:
            raise self._final(error)
        if isinstance(error, HandoffTooLong):
            return Again(0.0)  # by another pair, of which there are not many, or by the decode worker alone
        if isinstance(error, TransferFailed | ModelOutputInvalid):
            if self.num_retries >= MAX_RETRIES or error.fields.get("diverged"):
                raise self._final(error)
            self.num_retries += 1
            return Again(0.0 if self.num_retries == 1 else self._delay_s(), takes_budget=not self._has_begun)
        if isinstance(error, Overloaded) and self._may_wait:
            return Again(self._wait_s(error, now_s))  # who has begun is not turned away
        if cause is None or not self.migrates:
            raise self._final(error)
        self.num_migrations += 1
        return Again(0.0 if self.num_migrations == 1 else self._delay_s(), cause)

    def unaffordable(self, error: BatonError, retry_after_s: float) -> BatonError:
        """The error of a retry that the router cannot afford; says when the client may try again."""
        self.num_retries -= 1
        about = {"retry_after_s": round(retry_after_s, 2), "tried": [str(one) for one in self.tried[-8:]]}
        return type(error)(f"{error.message}; the router's retries are used up", **(error.fields | about))

    def no_pair(self, error: BatonError, now_s: float) -> float:
        """How long to wait before looking again for a pair, where there is none.

        Raises:
            BatonError: no worker is waited for (before the first attempt), or it has been too long.
            RequestDeadlineExceeded: its deadline passed.
        """
        if not self._may_wait or not isinstance(error, NoWorker | WorkersIncompatible):
            raise error
        return self._wait_s(error, now_s)

    @property
    def _may_wait(self) -> bool:
        """Whether it has begun: then it is not turned away, but waits."""
        return self._limits.max_migrations > 0 and self._has_begun

    @property
    def _has_begun(self) -> bool:
        """Whether the client has tokens, or the answer has moved already."""
        return self.num_migrations > 0 or bool(self._order.token_ids)

    def _wait_s(self, error: BatonError, now_s: float) -> float:
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        left_s = self.request.deadline_s - now_s
        if left_s <= 0:
            message = "the request's deadline passed while it waited for other workers"
            raise self._final(RequestDeadlineExceeded(message, num_tokens=len(self._order)), least=1)
        waited_s = now_s - self._waiting_since_s
        if waited_s >= self._limits.wait_s:
            raise self._final(error, least=1)
        return min(self._delay_s(), left_s, max(self._limits.wait_s - waited_s, 0.001))

    def _delay_s(self) -> float:
        delay_s: float = min(FIRST_DELAY_S * 2**self._num_delays, LAST_DELAY_S)
        self._num_delays = min(self._num_delays + 1, 16)
        return delay_s * (0.5 + self._uniform())

    def _final(self, error: BatonError, *, least: int = 2) -> BatonError:
        """The error, saying what was tried if that was so many attempts."""
        if len(self.tried) < least:
            return error
        tried = [str(one) for one in self.tried[-8:]]
        return type(error)(f"{error.message}; tried {'; '.join(tried)}", **(error.fields | {"tried": tried}))
