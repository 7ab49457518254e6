"""Calls inside a deployment over gRPC: channels that prove who calls, and servers that ask for it.

Every call carries a proof in its metadata (`baton.core.inside`). A server looks at it before it reads the message, for
every service that is not named open: one that is added is closed until it is named there.
"""

import contextvars
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.errors import Unauthenticated
from baton.core.inside import Caller, ProofVerifier
from baton.proto import wire

HEADER: Final = "baton-proof"
ALWAYS_OPEN: Final = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)
SAY_EVERY_S: Final = 10.0  # a refusal of each kind is logged no more often, and counted always
_caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller")

Handler = Any  # the stubs make the class generic; at run time it is not

log = logging.getLogger(__name__)


def caller_name() -> str:
    """Whose call this is; of a method that a `RequireProof` stands before. Empty if there was no proof."""
    return _caller.get("")


def proof(caller: Caller, method: str, callee: str) -> tuple[str, str]:
    """The metadata of one call, made now."""
    return HEADER, caller.prove(method, callee, time.time(), secrets.token_hex(16))


class InsideChannel:
    """A channel whose calls all carry a proof; for stubs, of asyncio or not.

    Args:
        channel: underneath.
        caller: who calls.
        callee: the server in the incarnation that is meant; asked for at each call.
    """

    def __init__(self, channel: Any, caller: Caller, callee: Callable[[], str]) -> None:
        self._channel = channel
        self._caller = caller
        self._callee = callee

    def __getattr__(self, name: str) -> Any:
        """Closing, states and the like."""
        return getattr(self._channel, name)

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See gRPC."""
        return self._proving(method, self._channel.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See gRPC."""
        return self._proving(method, self._channel.unary_stream(method, *arguments, **options))

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See gRPC."""
        return self._proving(method, self._channel.stream_unary(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See gRPC."""
        return self._proving(method, self._channel.stream_stream(method, *arguments, **options))

    def _proving(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*arguments: Any, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
            both = (*(metadata or ()), proof(self._caller, method, self._callee()))
            return call(*arguments, metadata=both, **options)

        return begin


class RequireProof(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls that prove nothing, unread; to be the first of a server's interceptors that looks at callers.

    Args:
        verifier: checks proofs.
        open_services: that need none.
        on_refused: told the reason of each refusal.
        on_call: told the caller's address of each call that is refused here.
    """

    def __init__(
        self,
        verifier: ProofVerifier,
        open_services: Collection[str] = (),
        on_refused: Callable[[str], None] = lambda reason: None,
        on_call: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._verifier = verifier
        self._open = frozenset((*ALWAYS_OPEN, *open_services))
        self._on_refused = on_refused
        self._on_call = on_call
        self._said_s: dict[str, float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Let it in, or refuse."""
        method = handler_call_details.method
        if method.lstrip("/").partition("/")[0] in self._open:
            return await continuation(handler_call_details)
        header = next((value for key, value in handler_call_details.invocation_metadata if key == HEADER), None)
        try:
            _caller.set(self._verifier.verify(method, header if isinstance(header, str) else None))
        except Unauthenticated as error:
            handler = await continuation(handler_call_details)
            return None if handler is None else self._refusing(handler, method, error)
        return await continuation(handler_call_details)

    def _refusing(self, handler: Handler, method: str, error: Unauthenticated) -> Handler:
        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._on_call(context.peer())
            self._count(str(error.fields["reason"]), method, context.peer(), error)
            await wire.abort_with(context, error)

        make: Any = grpc.unary_unary_rpc_method_handler
        if handler.request_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler
            )
        elif handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
        return make(refuse)  # without a deserializer: what is refused is not read

    def _count(self, reason: str, method: str, peer: str, error: Unauthenticated) -> None:
        if reason == "callee":
            return  # of this deployment, and about to ask again: how a worker meets a router
        self._on_refused(reason)
        now_s = time.monotonic()
        if now_s - self._said_s.get(reason, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._said_s[reason] = now_s
            log.warning("refused (proof_%s): %s from %s: %s", reason, method[:100], peer, error.message)
