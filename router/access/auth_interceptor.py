"""The door of a gRPC port: callers without a key are refused unread, tenants are the keys', streams are counted.

It stands before every method. Health and reflection are open to everybody: they say nothing of any tenant.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.core.errors import BatonError
from baton.core.handshakes import Handshakes
from baton.core.requests.sampling import MAX_CHOICES
from baton.proto import wire
from baton.router.access.api_keys import Principal
from baton.router.access.authenticator import Authenticator

HEADER: Final = "authorization"
OPEN: Final = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # the stubs make the class generic; at run time it is not


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """To be the first of a server's interceptors.

    Args:
        authenticator: decides.
        open_services: that need no key.
        handshakes: told whose calls arrive; None without TLS.
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
        """Refuse, or let in what `continuation` found."""
        service = handler_call_details.method.lstrip("/").partition("/")[0]
        if service in self._open:
            return self._around(await continuation(handler_call_details), None)
        header = next((value for key, value in handler_call_details.invocation_metadata if key == HEADER), None)
        try:
            principal = self._authenticator.authenticate(header if isinstance(header, str) else None)
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
        return make(refuse)  # without a deserializer: what is refused is not read

    def _own(self, request: Any, principal: Principal) -> str:
        """Make the request its principal's; the tenant."""
        if not isinstance(request, Message) or "tenant" not in request.DESCRIPTOR.fields_by_name:
            return principal.tenant
        named: Any = request
        named.tenant = self._authenticator.tenant_of(principal, named.tenant)
        return str(named.tenant)

    def _seen(self, context: Context) -> None:
        if self._handshakes is not None:
            self._handshakes.called(context.peer())


def num_header_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Of a call's metadata, which is what its headers were."""
    return sum(len(name) + len(value) for name, value in metadata)


def num_answers(request: Any) -> int:
    """How many answers a request asks for, within what one may."""
    sampling = getattr(request, "sampling", None)
    return 1 if sampling is None else min(max(sampling.n, 1), MAX_CHOICES)


def _like(handler: Handler, method: Any) -> Handler:
    make: Any = (
        grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make(
        method, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
