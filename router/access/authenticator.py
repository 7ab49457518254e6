"""The authenticator: identifies callers and limits their streams, for gRPC and HTTP alike.

A server calls `authenticate` with the caller's `Authorization` header, and holds `stream` while it answers. After that
it handles only principals, which are names, and never sees the key.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.core.errors import AccessRefused, BatonError, InvalidRequest, Overloaded, PermissionDenied, Unauthenticated
from baton.core.handshakes import Handshakes
from baton.core.requests.sampling import MAX_CHOICES
from baton.proto import wire
from baton.router.access.api_keys import ApiKeys, KeyEntry, Principal
from baton.router.access.quota import Account, ConnectionsHeld, Quota, holding, require_room
from baton.router.access.security import ClientLimits, SecurityMetrics

SAY_EVERY_S: Final = 10.0  # a refusal of each kind is logged at most this often; all are counted
ANYBODY: Final = Principal("", "")
COUNTED: Final = ("streams_per_tenant", "streams_per_connection", "queued_tokens", "header_bytes", "connections")

log = logging.getLogger(__name__)


class Authenticator:
    """Authenticates one kind of caller.

    Args:
        keys: the keys file; None: every caller is let in, as any tenant that it names.
        limits: limits of streams.
        metrics: counts refusals.
        now_s: clock that limits the rate of log lines.
        extra: keys in addition to the file's.

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
        """Return the principal that presents this `Authorization` header; `ANYBODY` if no keys are required.

        Raises:
            Unauthenticated: there is no key, or none that is valid now.
        """
        if self.keys is None:
            return ANYBODY
        try:
            return self.keys.authenticate(header)
        except Unauthenticated as error:
            self.count(error, f"key_{error.fields['reason']}")
            raise

    def tenant_of(self, principal: Principal, asked: str) -> str:
        """Return the request's tenant: the key's if keys are required, else the one that the caller names.

        Raises:
            PermissionDenied: the caller names a tenant other than its own.
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
        """Hold places for the answers of a streaming call.

        Args:
            tenant: the call's tenant.
            connection: the connection's peer; empty if it is not to be counted.
            num_answers: number of answers to all its prompts.
            principal: the caller; its quota applies to the tenant for this call.
            num_header_bytes: size of the call's headers.
            is_grpc: whether the connection counts as the principal's while calls hold it; HTTP connections count while
                open.

        Raises:
            InvalidRequest: the call alone exceeds a limit of the tenant or the connection.
            Overloaded: the tenant or the connection is at its limit.
        """
        quota = self.quota_of(principal)
        # Without keys a tenant's name proves nothing, so all callers share one account.
        owner = tenant if self.keys is not None or principal is None else principal.tenant
        account = self._accounts.setdefault(owner, Account())
        try:
            account.check_answers(num_answers, quota)
            if connection:
                num, limit = self._num_of_connection[connection], self._limits.max_streams_per_connection
                require_room(num, num_answers, limit, "connection", "answers", "streams_per_connection")
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
        except (InvalidRequest, Overloaded) as error:
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
        """What a principal may hold: the deployment's limits, narrowed by its key's own."""
        limits = self._limits
        common = Quota(
            max_answers=limits.max_streams_per_tenant,
            max_queued_tokens=limits.max_queued_tokens_per_tenant,
            max_connections=limits.max_connections_per_tenant,
            max_header_bytes=limits.max_header_bytes_per_tenant,
        )
        return common if principal is None else common.within(principal.quota)

    def count(self, error: BatonError, reason: str) -> None:
        """Count a refusal, and log it unless one of its kind was logged recently."""
        self._metrics.refused.labels(reason).inc()
        now_s = self._now_s()
        if now_s - self._said_s.get(reason, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._said_s[reason] = now_s
            level = logging.WARNING if isinstance(error, AccessRefused) else logging.INFO
            log.log(level, "refused (%s): %s", reason, error.message)


HEADER: Final = "authorization"
OPEN: Final = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # generic in the type stubs only, not at run time


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Authenticates every call of a server's clients.

    Args:
        authenticator: identifies callers.
        open_services: services that need no key.
        handshakes: told which peers have made a call; None without TLS.
    """

    def __init__(
        self, authenticator: Authenticator, open_services: Collection[str] = OPEN, handshakes: Handshakes | None = None
    ) -> None:
        self._authenticator = authenticator
        self._open = frozenset(open_services)
        self._handshakes = handshakes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Refuse the call, or wrap the handler that `continuation` found."""
        service = handler_call_details.method.lstrip("/").partition("/")[0]
        if service in self._open:
            return self._around(await continuation(handler_call_details), None)
        headers = [value for key, value in handler_call_details.invocation_metadata if key == HEADER]
        header = ", ".join(value for value in headers if isinstance(value, str)) if headers else None
        try:
            principal = self._authenticator.authenticate(header)
        except BatonError as error:
            handler = await continuation(handler_call_details)
            return None if handler is None else self._refusing(handler, error)
        return self._around(await continuation(handler_call_details), principal)

    def _around(self, handler: Handler, principal: Principal | None) -> Handler:
        if handler is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            method = handler.unary_stream

            async def stream(request: Any, context: Context) -> None:
                self._seen(context)
                if principal is None:
                    await method(request, context)
                    return
                try:
                    tenant = self._own(request, principal)
                    num = num_answers(request)
                    num_bytes = num_header_bytes(context.invocation_metadata() or ())
                    with self._authenticator.stream(
                        tenant, context.peer(), num, principal, num_header_bytes=num_bytes, is_grpc=True
                    ):
                        await method(request, context)
                except BatonError as error:
                    wire.end_with(context, error)

            return _like(handler, stream)
        unary_method = handler.unary_unary

        async def unary(request: Any, context: Context) -> Any:
            self._seen(context)
            try:
                if principal is not None:
                    self._own(request, principal)
            except BatonError as error:
                await wire.abort_with(context, error)
            return await unary_method(request, context)

        return _like(handler, unary)

    def _refusing(self, handler: Handler, error: BatonError) -> Handler:
        async def refuse(request: bytes, context: Context) -> None:
            self._seen(context)
            await wire.abort_with(context, error)

        make: Any = grpc.unary_stream_rpc_method_handler
        if not handler.response_streaming:
            make = grpc.unary_unary_rpc_method_handler
        if handler.request_streaming:
            make = grpc.stream_stream_rpc_method_handler
        return make(refuse)  # no deserializer: a refused request is not parsed

    def _own(self, request: Any, principal: Principal) -> str:
        """Set the request's tenant to its principal's, and return it."""
        if not isinstance(request, Message) or "tenant" not in request.DESCRIPTOR.fields_by_name:
            return principal.tenant
        named: Any = request
        named.tenant = self._authenticator.tenant_of(principal, named.tenant)
        return str(named.tenant)

    def _seen(self, context: Context) -> None:
        if self._handshakes is not None:
            self._handshakes.called(context.peer())


def num_header_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Size of a call's headers, computed from its metadata."""
    return sum(len(name) + len(value) for name, value in metadata)


def num_answers(request: Any) -> int:
    """Number of answers a request asks for, clamped to what is allowed."""
    sampling = getattr(request, "sampling", None)
    return 1 if sampling is None else min(max(sampling.n, 1), MAX_CHOICES)


def _like(handler: Handler, method: Any) -> Handler:
    make: Any = (
        grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make(
        method, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
