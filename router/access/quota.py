"""Quotas: what one principal may hold at once. A tenant has one account for all its calls, over gRPC and HTTP.

Without keys every caller is the same principal, because a tenant's name proves nothing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from baton.core.errors import InvalidRequest, Overloaded, PermissionDenied
from baton.router.admission.admission import HIGH, NORMAL

RETRY_AFTER_S: Final = 1.0
PRIORITY_NAMES: Final = {"low": 0, "normal": NORMAL, "high": HIGH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of a principal; None means unlimited.

    Attributes:
        max_answers: answers in progress at once; a call has as many as its prompts times `n`.
        max_queued_tokens: prompt tokens of all calls in progress.
        max_connections: connections open over HTTP, or in use over gRPC, whose library shows a connection only with its
            calls.
        max_header_bytes: headers of all calls in progress.
        max_priority: highest priority that its requests may have.
    """

    max_answers: int | None = None
    max_queued_tokens: int | None = None
    max_connections: int | None = None
    max_header_bytes: int | None = None
    max_priority: int = HIGH

    def within(self, other: "Quota") -> "Quota":
        """The lower of both, limit by limit."""
        return Quota(
            max_answers=_least(self.max_answers, other.max_answers),
            max_queued_tokens=_least(self.max_queued_tokens, other.max_queued_tokens),
            max_connections=_least(self.max_connections, other.max_connections),
            max_header_bytes=_least(self.max_header_bytes, other.max_header_bytes),
            max_priority=min(self.max_priority, other.max_priority),
        )


NO_LIMITS: Final = Quota()


class Account:
    """What one principal currently holds.

    Args:
        owner: the kind of principal, for messages.
    """

    def __init__(self, owner: str = "tenant") -> None:
        self._owner = owner
        self.num_answers = 0
        self.num_tokens = 0
        self.num_header_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self.num_answers and not self.num_tokens and not self.num_header_bytes

    def check_answers(self, num: int, quota: Quota) -> None:
        """Check that the quota allows `num` more answers.

        Raises:
            InvalidRequest, Overloaded: as for `require_room`.
        """
        require_room(self.num_answers, num, quota.max_answers, self._owner, "answers", "streams_per_tenant")

    def check_header_bytes(self, num: int, quota: Quota) -> None:
        """Check that the quota allows a call with `num` more bytes of headers.

        Raises:
            InvalidRequest, Overloaded: as for `require_room`.
        """
        limit = quota.max_header_bytes
        require_room(self.num_header_bytes, num, limit, self._owner, "bytes of headers", "header_bytes")

    def check_tokens(self, num: int, quota: Quota, num_held: int) -> None:
        """Check that the quota allows a prompt of `num` more tokens to a call that holds `num_held`.

        Raises:
            InvalidRequest, Overloaded: as for `require_room`.
        """
        others, limit = self.num_tokens - num_held, quota.max_queued_tokens
        require_room(others, num_held + num, limit, self._owner, "prompt tokens", "queued_tokens")


@dataclass(slots=True)
class Hold:
    """What one call holds of an account."""

    account: Account
    quota: Quota
    num_tokens: int = 0

    def add_tokens(self, num: int) -> None:
        """Charge the tokens of one of the call's prompts.

        Raises:
            InvalidRequest, Overloaded: they exceed the quota, as for `require_room`.
        """
        self.account.check_tokens(num, self.quota, self.num_tokens)
        self.num_tokens += num
        self.account.num_tokens += num

    def check_priority(self, priority: int) -> None:
        """Check that the principal may use this priority.

        Raises:
            PermissionDenied: it may not.
        """
        if priority > self.quota.max_priority:
            message = f"priority {priority} needs a key that permits it; this one permits {self.quota.max_priority}"
            raise PermissionDenied(message, field="priority", limit=self.quota.max_priority)


class ConnectionsHeld:
    """Number of connections by principal, over gRPC and HTTP."""

    def __init__(self) -> None:
        self._num_of: Counter[str] = Counter()
        self._num_calls: Counter[tuple[str, str]] = Counter()

    def num_of(self, principal: str) -> int:
        """Number of connections that a principal holds."""
        return self._num_of[principal]

    def add(self, principal: str, limit: int | None) -> None:
        """Count one more connection.

        Raises:
            Overloaded: the principal is at its limit.
        """
        if limit is not None and self._num_of[principal] >= limit:
            message = f"{limit} connections are open for this key, the limit; try again in {RETRY_AFTER_S:g} s"
            raise Overloaded(message, limit=limit, what="connections", retry_after_s=RETRY_AFTER_S)
        self._num_of[principal] += 1

    def remove(self, principal: str) -> None:
        """Count one connection less."""
        self._num_of[principal] -= 1
        if not self._num_of[principal]:
            del self._num_of[principal]

    @contextmanager
    def used(self, principal: str, connection: str, limit: int | None) -> Iterator[None]:
        """Count a gRPC connection while a call uses it; an empty `connection` is counted elsewhere.

        Raises:
            Overloaded: as for `add`, if no other call uses the connection.
        """
        if not connection:
            yield
            return
        place = principal, connection
        if not self._num_calls[place]:
            self.add(principal, limit)
        self._num_calls[place] += 1
        try:
            yield
        finally:
            self._num_calls[place] -= 1
            if not self._num_calls[place]:
                del self._num_calls[place]
                self.remove(principal)


# The current call's hold. Tokens and priority, which are known only after authentication, are charged to it.
CURRENT: ContextVar[Hold | None] = ContextVar("baton_quota", default=None)


@contextmanager
def holding(account: Account, quota: Quota, num_answers: int, num_header_bytes: int = 0) -> Iterator[None]:
    """Hold answers and headers, and what is added meanwhile, until the end of a call.

    Raises:
        InvalidRequest, Overloaded: the quota does not allow them, as for `require_room`.
    """
    account.check_answers(num_answers, quota)
    account.check_header_bytes(num_header_bytes, quota)
    account.num_answers += num_answers
    account.num_header_bytes += num_header_bytes
    hold = Hold(account, quota)
    token = CURRENT.set(hold)
    try:
        yield
    finally:
        CURRENT.reset(token)
        account.num_answers -= num_answers
        account.num_header_bytes -= num_header_bytes
        account.num_tokens -= hold.num_tokens


def require_room(held: int, num: int, limit: int | None, owner: str, what: str, reason: str) -> None:
    """Check that `num` more than what other calls hold are within a limit.

    Raises:
        InvalidRequest: the call alone exceeds the limit, so a retry would fail, too.
        Overloaded: it has to wait until others have ended.
    """
    if limit is None or held + num <= limit:
        return
    if num > limit:
        message = f"this call asks for {num} {what}; {limit} are the limit of this {owner}"
        raise InvalidRequest(message, limit=limit, what=reason)
    message = f"this {owner} has {held} {what} under way, and asks for {num}: {limit} are the limit"
    retry = f"; try again in {RETRY_AFTER_S:g} s"
    raise Overloaded(message + retry, limit=limit, what=reason, retry_after_s=RETRY_AFTER_S)


def _least(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)
