"""State that the endpoints share (inference, model, template, metrics), and authentication of HTTP requests."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import PermissionDenied, as_internal
from baton.proto import inference_pb2
from baton.proto.roles import ALLOWED, require_roles
from baton.router.access.api_keys import Principal
from baton.router.access.authenticator import ANYBODY, Authenticator
from baton.router.inference import InferenceService
from baton.router.metrics import RouterMetrics
from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.connection import PLACE
from baton.router.openai.reply import JsonResponse, Manner
from baton.router.served_model import ServedModel

if TYPE_CHECKING:
    from baton.router.openai.body_reader import BodyReader

OPEN: Final = ("/health", "/ping", "/ready")  # these reveal nothing about any tenant
OPERATORS: Final = ("/metrics",)  # this reveals something about every tenant
_PRINCIPAL: Final = "baton.principal"


class Entrance:
    """ASGI middleware that authenticates requests.

    Args:
        app: the application for authenticated requests.
        authenticator: authenticates clients.
        operators: authenticates readers of metrics, which reveal all tenants' data, if clients need keys.
        metrics: counts internal failures.
        manner_of: the format in which a path's callers expect errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        operators: Authenticator,
        metrics: RouterMetrics,
        manner_of: Callable[[str], Manner],
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._operators = operators
        self._metrics = metrics
        self._manner_of = manner_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                if PLACE in scope:
                    self._require_role(scope["path"], scope[PLACE].roles)
                principal = self._authenticate(scope["path"], _key_header(Headers(scope=scope)))
                scope[_PRINCIPAL] = principal
                if PLACE in scope:
                    scope[PLACE].own(principal.tenant, self._authenticator.quota_of(principal).max_connections)
            except Exception as error:  # noqa: BLE001  the boundary around authentication
                typed = as_internal("the request", error)
                if typed is not error:
                    self._metrics.requests_failed.labels(type(typed).__name__).inc()
                await JsonResponse.of_error(typed, manner=self._manner_of(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _require_role(self, path: str, named: frozenset[str]) -> None:
        service = "baton.v1.Admin" if path in OPERATORS else "baton.v1.Inference"
        try:
            require_roles(named, ALLOWED[service], path)
        except PermissionDenied as error:
            self._authenticator.count(error, "certificate_role")
            raise

    def _authenticate(self, path: str, header: str | None) -> Principal:
        if path not in OPERATORS or self._authenticator.keys is None:
            return self._authenticator.authenticate(header)
        if self._operators.keys is None:
            self._authenticator.authenticate(header)
            raise PermissionDenied("metrics tell of all tenants: read them at --metrics-port, or name admin keys")
        return self._operators.authenticate(header)


def _key_header(headers: Headers) -> str | None:
    """Return `Authorization`, or else the header in which Anthropic's clients send a key."""
    found = headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]
    return ", ".join(found) if found else None  # if there are several, they are joined, and so refused


def principal_of(scope: Scope) -> Principal:
    """The authenticated caller."""
    found: Principal = scope.get(_PRINCIPAL, ANYBODY)
    return found


def connection_of(scope: Scope) -> str:
    """The connection's name for counting streams."""
    host, port = scope.get("client") or ("", 0)
    return f"{host}:{port}"


def num_header_bytes(scope: Scope) -> int:
    """Size of a request's headers, path and query string."""
    about = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    return about + sum(len(name) + len(value) for name, value in scope.get("headers", ()))


MAX_BODY_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Configuration of the router's HTTP side.

    Attributes:
        port: port to listen on; 0 picks a free one.
        template: chat template; chats are refused without one.
        defaults: sampling values for requests that set none.
        max_body_bytes: larger bodies are refused unread.
        allowed_origins: origins whose web pages may call (CORS); "*" allows any.
    """

    port: int
    template: ChatTemplate | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """What is needed to parse a body, limited to what can be sent to another process.

    Attributes:
        name: the model's name.
        encode: tokenizes text.
        template: chat template; chats are refused without one.
        defaults: sampling values for requests that set none.
        marks: token ids of the marks around calls and thoughts, as far as the tokenizer has them.
        hidden: those marks that decoded text leaves out.
    """

    name: str
    encode: Callable[[str], list[int]]
    template: ChatTemplate | None
    defaults: Mapping[str, Any]
    marks: Mapping[str, int] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    def with_defaults(self, sampling: inference_pb2.Sampling) -> inference_pb2.Sampling:
        """Fill in the recommended values where the client set none."""
        for name, value in self.defaults.items():
            if not sampling.HasField(name):
                setattr(sampling, name, value)
        return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What every endpoint needs."""

    inference: InferenceService
    model: ServedModel
    metrics: RouterMetrics
    config: HttpConfig
    is_serving: Callable[[], bool]
    authenticator: Authenticator
    operators: Authenticator
    reader: "BodyReader"
    now_unix_s: Callable[[], float] = time.time
