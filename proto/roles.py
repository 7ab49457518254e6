"""What a certificate says its holder is: roles, and which services each may call.

A certificate of the deployment names roles in its subject alternative names, as URIs `baton://role/NAME`; that of a
host may name several. One that names some is held to them, beside what a call has to prove anyway
(`baton.proto.inside`). One that names none is held to the proof alone.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.errors import PermissionDenied
from baton.proto import wire

PREFIX: Final = "baton://role/"
ROLES: Final = ("router", "prefill", "decode", "operator", "client")
SAY_EVERY_S: Final = 10.0
_NAMES_KEY: Final = "x509_subject_alternative_name"
# The operator of a router starts it and calls it, too; so its role does for what operators and clients do.
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "baton.v1.Inference": frozenset(("client", "operator", "router")),
    "baton.v1.Admin": frozenset(("operator", "router")),
    "baton.v1.Membership": frozenset(("prefill", "decode")),
    "baton.v1.KvTransfer": frozenset(("prefill",)),
}
ALLOWED_AT_WORKERS: Final = frozenset(("router",))  # every service

Handler = Any  # the stubs make the class generic; at run time it is not

log = logging.getLogger(__name__)


def roles_in(names: Iterable[bytes]) -> frozenset[str]:
    """The roles among the alternative names of a certificate; those that are unknown count, and allow nothing."""
    texts = (name.decode("utf-8", "replace") for name in names)
    return frozenset(text.removeprefix(PREFIX) for text in texts if text.startswith(PREFIX))


def roles_of(context: Any) -> frozenset[str]:
    """The roles in the certificate of a call's caller; none if it names none, or there is none."""
    return roles_in(context.auth_context().get(_NAMES_KEY, ()))


def require_roles(named: frozenset[str], allowed: frozenset[str], service: str) -> None:
    """Check what a certificate says against what a service is for.

    Raises:
        PermissionDenied: it names roles, and none that may call this.
    """
    if named and not named & allowed:
        said, needed = ", ".join(sorted(named))[:200], " or ".join(sorted(allowed))
        raise PermissionDenied(f"{service} is for {needed}; the certificate is one of: {said}", service=service)


class RequireRole(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers whose certificates name other roles than a service is for.

    Args:
        allowed_of: the roles that may call a service; None: any role may.
        on_refused: called at each refusal.
    """

    def __init__(
        self, allowed_of: Callable[[str], frozenset[str] | None], on_refused: Callable[[], None] = lambda: None
    ) -> None:
        self._allowed_of = allowed_of
        self._on_refused = on_refused
        self._said_s = -SAY_EVERY_S

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method."""
        service = handler_call_details.method.lstrip("/").partition("/")[0]
        handler, allowed = await continuation(handler_call_details), self._allowed_of(service)
        if handler is None or allowed is None:
            return handler
        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        kind += "stream" if handler.response_streaming else "unary"
        method = getattr(handler, kind)

        async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                require_roles(roles_of(context), allowed, service)
            except PermissionDenied as error:
                self._count(error)
                await wire.abort_with(context, error)
            return await method(request, context)

        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            checked, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def _count(self, error: PermissionDenied) -> None:
        self._on_refused()
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            log.warning("refused (certificate_role): %s", error.message)
