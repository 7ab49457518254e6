"""Gives commands access to a deployment, by what their flags or the environment say."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from baton.client.access import Access
from baton.client.messages import OPTIONS

_ACCESS: ContextVar[Access | None] = ContextVar("access", default=None)


def current_access() -> Access:
    """Return the access that the command was given, or else that of the environment.

    Raises:
        ConfigInvalid: the key file cannot be read.
    """
    return _ACCESS.get() or Access.from_environment()


@contextmanager
def using(access: Access) -> Iterator[None]:
    """Make `current_access` return this access within the context."""
    token = _ACCESS.set(access)
    try:
        yield
    finally:
        _ACCESS.reset(token)


def open_with(access: Access, address: str) -> grpc.Channel:
    """Open a channel that sends the API key with every call.

    Raises:
        ConfigInvalid: the certificates cannot be used.
    """
    channel = access.open(address, OPTIONS)
    return grpc.intercept_channel(channel, _ShowKey(access)) if access.metadata else channel


class _ShowKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds the key to each call's metadata."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._shown(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._shown(client_call_details), request)

    def _shown(self, details: Any) -> Any:
        return details._replace(metadata=(*(details.metadata or ()), *self._access.metadata))
