"""Decides, over all attempts of one answer, which tokens the next attempt starts from and whether there is one. Pure.

After an attempt loses a worker, the next one gets the prompt and the tokens that the client has as a *forced prefix*
and continues behind it: a migration. The same happens after a failed hand-off: a retry. Every token reaches the client
once and in order, even if late messages of earlier attempts still arrive. Without migration, a retry recomputes
everything with the same seed, and the tokens that the client has are only compared.
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

    A worker that leaves a gap, contradicts itself or exceeds `max_tokens` is broken: nothing it sends can be streamed.
    """

    __slots__ = ("_max_tokens", "token_ids")

    def __init__(self, max_tokens: int, token_ids: Sequence[int] = ()) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[int] = list(token_ids)  # begins with the tokens of earlier attempts

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Accept tokens, the first of which has this index in the answer; return those that are new.

        Raises:
            ProtocolError: there is a gap, a repeated token differs, or there are too many tokens.
        """
        have = len(self.token_ids)
        if index == have and have + len(token_ids) <= self._max_tokens:  # the common case
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
_CAUSE: Final = "cause"  # field of the error that a lost stream ended with


class Cause(Enum):
    """Why an answer moved to other workers."""

    DEATH = "death"  # the connection broke, or the worker reports under a new epoch
    FENCE = "fence"  # the worker was silent for too long
    DRAIN = "drain"  # an operator drains the worker
    STREAM = "stream"  # the worker ended only this stream, without a finish reason or with an error of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationLimits:
    """Limits of migration.

    Attributes:
        max_migrations: per answer; 0 disables migration, so that losing a worker ends the answer.
        wait_s: how long an answer waits for a pair to continue on before it ends.
    """

    max_migrations: int = 2
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Tried:
    """One failed attempt."""

    attempt: int
    prefill: str
    decode: str
    why: str

    def __str__(self) -> str:
        return f"{self.prefill} and {self.decode}: {self.why}"


@dataclass(frozen=True, slots=True)
class Again:
    """What follows a failed attempt: another attempt, after a delay.

    Attributes:
        delay_s: the delay.
        cause: why the answer moves; None unless it is a migration.
        takes_budget: whether it is a retry of a request that has emitted no token yet.
    """

    delay_s: float
    cause: Cause | None = None
    takes_budget: bool = False


def cause_of(error: BatonError) -> Cause | None:
    """Why the answer should move; None if the error does not mean that a stream was lost."""
    if type(error) in (WorkerLost, ProtocolError, BatonError):
        named = error.fields.get(_CAUSE)
        for cause in Cause:
            if cause.value == named:
                return cause
        if isinstance(error, WorkerLost):
            return Cause.DEATH
    return None


class Continuation:
    """The state of one answer. Call `begin`, then `take` for the attempt's tokens, and after an error `failed`; repeat.

    Args:
        request: the client's request, as its first attempt.
        limits: limits of migration.
        uniform: draws from [0, 1), so that requests that lost a worker together do not return together.
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
        """Number of the answer's tokens that the client has."""
        return len(self._order)

    @property
    def token_ids(self) -> Sequence[int]:
        """The answer's tokens that the client has."""
        return self._order.token_ids

    @property
    def migrates(self) -> bool:
        """Whether the answer may migrate once more."""
        return self.num_migrations < self._limits.max_migrations

    def begin(self, room_len: int) -> GenerationRequest:
        """Build the next attempt.

        Args:
            room_len: positions that its prefill worker can hold. The part of the forced prefix that does not fit is
                recomputed and compared.
        """
        assert not self._ended
        self._attempt += 1
        self.num_forced = 0
        request = dataclasses.replace(self.request, key=AttemptKey(self.request.key.request_id, self._attempt))
        if not self._order.token_ids:
            return request
        if self._limits.max_migrations:
            # If all allowed tokens came but no finish reason, the last token is requested again.
            most = min(room_len - self.request.prompt_len, self.request.sampling.max_tokens - 1)
            self.num_forced = max(min(len(self._order), most), 0)
        forced = tuple(self._order.token_ids[: self.num_forced])
        return dataclasses.replace(
            request,
            prompt_token_ids=(*self.request.prompt_token_ids, *forced),
            sampling=dataclasses.replace(request.sampling, prompt_logprobs=None),  # already reported
            num_forced=len(forced),
        )

    def take(self, attempt: int, index: int, token_ids: Sequence[int]) -> list[int]:
        """Accept tokens of an attempt, the first of which has this index in the answer; return those the client lacks.

        Raises:
            ProtocolError: there is a gap, a known token differs, or there are too many tokens.
            TransferFailed: likewise, where an attempt recomputed known tokens.
        """
        if attempt != self._attempt or self._ended:
            return []  # from an abandoned attempt
        self._waiting_since_s = None
        self._num_delays = 0
        was_known = index < len(self._order)
        try:
            return self._order.take(index, token_ids)
        except ProtocolError as error:
            if not was_known or not self.tried:
                raise
            # Default numerics promise equal tokens except at near-ties, and this was one.
            raise TransferFailed(f"a recompute gave other tokens: {error.message}", diverged=True) from error

    def finish(self) -> None:
        """Mark the answer as complete; later tokens are ignored."""
        self._ended = True

    def failed(self, error: BatonError, *, prefill: str, decode: str, now_s: float) -> Again:
        """Decide what follows an attempt of these two workers that ended with an error.

        Raises:
            BatonError: no attempt follows; the error, with a list of the attempts.
        """
        cause = cause_of(error)
        why = type(error).__name__ if cause is None else cause.value
        self.tried.append(Tried(self._attempt, prefill, decode, why))
        if now_s >= self.request.deadline_s:
            raise self._final(error)
        if isinstance(error, HandoffTooLong):
            return Again(0.0)  # another pair may carry it, of which there are few, or a decode worker alone
        if isinstance(error, TransferFailed | ModelOutputInvalid):
            if self.num_retries >= MAX_RETRIES or error.fields.get("diverged"):
                raise self._final(error)
            self.num_retries += 1
            return Again(0.0 if self.num_retries == 1 else self._delay_s(), takes_budget=not self._has_begun)
        if isinstance(error, Overloaded) and self._may_wait:
            return Again(self._wait_s(error, now_s))  # an answer that has begun waits instead of being refused
        if cause is None or not self.migrates:
            raise self._final(error)
        self.num_migrations += 1
        return Again(0.0 if self.num_migrations == 1 else self._delay_s(), cause)

    def unaffordable(self, error: BatonError, retry_after_s: float) -> BatonError:
        """Build the error of a retry that exceeds the router's retry budget; it says when the client may try again."""
        self.num_retries -= 1
        about = {"retry_after_s": round(retry_after_s, 2), "tried": [str(one) for one in self.tried[-8:]]}
        return type(error)(f"{error.message}; the router's retries are used up", **(error.fields | about))

    def no_pair(self, error: BatonError, now_s: float) -> float:
        """Return how long to wait before looking for a pair again.

        Raises:
            BatonError: the answer has not begun, migration is off, or the answer has waited too long.
            RequestDeadlineExceeded: the request's deadline passed.
        """
        if not self._may_wait or not isinstance(error, NoWorker | WorkersIncompatible):
            raise error
        return self._wait_s(error, now_s)

    @property
    def _may_wait(self) -> bool:
        """Whether the request waits for workers instead of being refused: its answer has begun, and migration is on."""
        return self._limits.max_migrations > 0 and self._has_begun

    @property
    def _has_begun(self) -> bool:
        """Whether the client has tokens, or the answer has already migrated."""
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
        """Add the list of attempts to the error, if there were at least `least`."""
        if len(self.tried) < least:
            return error
        tried = [str(one) for one in self.tried[-8:]]
        return type(error)(f"{error.message}; tried {'; '.join(tried)}", **(error.fields | {"tried": tried}))
