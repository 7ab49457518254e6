"""Who may come in, and how many: keys, tenants and streams, for every front door alike.

A front door asks `authenticate` with the caller's `Authorization` header, and holds `stream` while it answers. It
never sees a key again after that: principals are names.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from baton.core.errors import AccessRefused, BatonError, Overloaded, PermissionDenied, Unauthenticated
from baton.router.access.api_keys import ApiKeys, KeyEntry, Principal
from baton.router.access.quota import Account, ConnectionsHeld, Quota, holding
from baton.router.access.security import ClientLimits
from baton.router.access.security_metrics import SecurityMetrics

RETRY_AFTER_S: Final = 1.0
SAY_EVERY_S: Final = 10.0  # a refusal of each kind is logged no more often, and counted always
ANYBODY: Final = Principal("", "")
COUNTED: Final = ("streams_per_tenant", "queued_tokens", "header_bytes", "connections")

log = logging.getLogger(__name__)


class Authenticator:
    """One kind of callers' way in.

    Args:
        keys: the keys file; None: everybody may come in, as whichever tenant they say.
        limits: of streams.
        metrics: where refusals are counted.
        now_s: for what is said no more often than every few seconds.
        extra: keys beside the file's.

    Raises:
        ConfigInvalid: the keys file cannot be used.
    """

    def __init__(
        self,
        keys: Path | None = None,
        limits: ClientLimits | None = None,
        metrics: SecurityMetrics | None = None,
        now_s: Callable[[], float] = time.monotonic,
        extra: tuple[KeyEntry, ...] = (),
    ) -> None:
        self._limits = limits or ClientLimits()
        self._metrics = metrics or SecurityMetrics()
        self._now_s = now_s
        self._said_s: dict[str, float] = {}
        self._accounts: dict[str, Account] = {}
        self._num_of_connection: Counter[str] = Counter()
        self.connections = ConnectionsHeld()
        self.keys: ApiKeys | None = None
        if keys is not None:
            self.keys = ApiKeys(keys, on_reload=self._metrics.reloaded("api_keys"), extra=extra)

    def authenticate(self, header: str | None) -> Principal:
        """Who presents this `Authorization` header; `ANYBODY` where no keys are asked for.

        Raises:
            Unauthenticated: no key, or none that is good now.
        """
        if self.keys is None:
            return ANYBODY
        try:
            return self.keys.authenticate(header)
        except Unauthenticated as error:
            self.count(error, f"key_{error.fields['reason']}")
            raise

    def tenant_of(self, principal: Principal, asked: str) -> str:
        """Whose request it is: the key's tenant, if keys are asked for, whatever the caller says.

        Raises:
            PermissionDenied: the caller names another tenant than its own.
        """
        if self.keys is None:
            return asked
        if asked not in ("", principal.tenant):
            message = f"the key {principal.name!r} is of tenant {principal.tenant!r}, not of the one that was named"
            error = PermissionDenied(message, tenant=principal.tenant)
            self.count(error, "tenant")
            raise error
        return principal.tenant

    @contextmanager
    def stream(
        self,
        tenant: str,
        connection: str = "",
        num_answers: int = 1,
        principal: Principal | None = None,
        *,
        num_header_bytes: int = 0,
        is_grpc: bool = False,
    ) -> Iterator[None]:
        """Hold places for the answers of a call that streams.

        Args:
            tenant: whose.
            connection: over which; empty if it is not to be counted.
            num_answers: of all its prompts.
            principal: whose key it came with: its quota is the tenant's for this call.
            num_header_bytes: of the call.
            is_grpc: the connection counts as the principal's while calls hold it; HTTP's count while they are open.

        Raises:
            Overloaded: the tenant or the connection has as many as it may.
        """
        quota = self.quota_of(principal)
        # Without keys a caller's name for itself is nobody's: all are one.
        owner = tenant if self.keys is not None or principal is None else principal.tenant
        account = self._accounts.setdefault(owner, Account())
        try:
            account.check_answers(num_answers, quota)
            if connection:
                num, limit = self._num_of_connection[connection], self._limits.max_streams_per_connection
                self._require(num + num_answers - 1, limit, "streams_per_connection", "connection")
            with (
                self.connections.used(owner, connection if is_grpc else "", quota.max_connections),
                holding(account, quota, num_answers, num_header_bytes),
            ):
                self._num_of_connection[connection] += num_answers
                try:
                    yield
                finally:
                    self._num_of_connection[connection] -= num_answers
                    if not self._num_of_connection[connection]:
                        del self._num_of_connection[connection]
        except Overloaded as error:
            if error.fields.get("what") in COUNTED:
                self.count(error, str(error.fields["what"]))
            raise
        except PermissionDenied as error:
            self.count(error, "permission")
            raise
        finally:
            if account.is_empty:
                self._accounts.pop(owner, None)

    def quota_of(self, principal: Principal | None) -> Quota:
        """What a principal may hold: the deployment's limits, and its key's own."""
        limits = self._limits
        common = Quota(
            max_answers=limits.max_streams_per_tenant,
            max_queued_tokens=limits.max_queued_tokens_per_tenant,
            max_connections=limits.max_connections_per_tenant,
            max_header_bytes=limits.max_header_bytes_per_tenant,
        )
        return common if principal is None else common.within(principal.quota)

    def _require(self, num: int, limit: int | None, what: str, owner: str) -> None:
        if limit is not None and num >= limit:
            message = f"this {owner} has {num} answers streaming, the limit; try again in {RETRY_AFTER_S:g} s"
            error = Overloaded(message, limit=limit, what=what, retry_after_s=RETRY_AFTER_S)
            self.count(error, what)
            raise error

    def count(self, error: BatonError, reason: str) -> None:
        """A refusal: in the metric always, in the log now and then."""
        self._metrics.refused.labels(reason).inc()
        now_s = self._now_s()
        if now_s - self._said_s.get(reason, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._said_s[reason] = now_s
            level = logging.WARNING if isinstance(error, AccessRefused) else logging.INFO
            log.log(level, "refused (%s): %s", reason, error.message)
