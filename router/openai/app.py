"""Assembles the HTTP application: its paths, and the replies for errors that no endpoint has handled."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.core.build import installed_version
from baton.core.errors import BatonError, InternalError, NoWorker
from baton.router.openai.chats import Batches, Chats
from baton.router.openai.completions import Completions
from baton.router.openai.document import docs_page, openapi_document
from baton.router.openai.front import Entrance, Front
from baton.router.openai.messages import CountTokens, Messages
from baton.router.openai.reply import OPENAI, HttpRefusal, JsonResponse, Manner
from baton.router.openai.responses import Responses
from baton.router.openai.tokens import Tokens

SHOWN_HEADERS = ("x-request-id", "x-baton-ignored", "x-should-retry", "retry-after", "retry-after-ms")
log = logging.getLogger(__name__)
MESSAGES: Final = "/v1/messages"
_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(front: Front) -> ASGIApp:
    """Build the application that serves everything over HTTP."""
    tokens, plain = Tokens(front), PlainEndpoints(front)
    routes = [
        Route("/v1/completions", Completions(front), methods=["POST"]),
        Route("/v1/chat/completions", Chats(front), methods=["POST"]),
        Route("/v1/chat/completions/batch", Batches(front), methods=["POST"]),
        Route("/v1/responses", Responses(front), methods=["POST"]),
        Route(MESSAGES, Messages(front), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", CountTokens(front).count, methods=["POST"]),
        Route("/v1/models", plain.models),
        Route("/v1/models/{name:path}", plain.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/health", plain.health),
        Route("/ready", plain.ready),
        Route("/metrics", plain.metrics),
        Route("/openapi.json", plain.document),
        Route("/docs", plain.docs),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/version", plain.version),
        Route("/load", plain.load),
    ]

    async def on_bug(request: Request, error: Exception) -> Response:
        """Reply to an unexpected error. Starlette raises it again after the reply, so uvicorn logs it."""
        front.metrics.requests_failed.labels(InternalError.__name__).inc()
        return await _on_error(
            request, HttpRefusal(500, "an internal error; the router's log says more", "internal_error")
        )

    async def on_http(request: Request, error: Exception) -> Response:
        """Reply to an unknown path or a wrong method."""
        assert isinstance(error, HTTPException)
        hint = _hint(request.scope["path"], paths) if error.status_code == HTTPStatus.NOT_FOUND else ""
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}{hint}"
        code = _CODES.get(error.status_code, HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
        refusal = HttpRefusal(error.status_code, message, code)
        return JsonResponse.of_error(refusal, error.headers, _manner_of(request.scope["path"]))

    paths = frozenset(route.path for route in routes)
    handlers: Any = {BatonError: _on_error, HttpRefusal: _on_error, HTTPException: on_http, Exception: on_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    entrance = Entrance(app, front.authenticator, front.operators, front.metrics, _manner_of)
    return _for_pages(entrance, front.config.allowed_origins)


def _manner_of(path: str) -> Manner:
    return Messages.manner if path == MESSAGES or path.startswith(f"{MESSAGES}/") else OPENAI


def _hint(path: str, served: Collection[str]) -> str:
    """Name the path that was probably meant: a client's base URL lacks `/v1`, has it twice, or ends in a slash."""
    bare = path[:200].rstrip("/")
    while bare.startswith("/v1/"):
        bare = bare.removeprefix("/v1")
    meant = next((found for found in (f"/v1{bare}", bare) if found in served), None)
    return "; GET /docs shows what is served" if meant is None else f"; {meant} is served"


def _for_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap the application with CORS for web pages of these origins; a browser's preflight request carries no key."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=SHOWN_HEADERS
    )


class PlainEndpoints:
    """Endpoints that only report.

    Args:
        front: what all endpoints share.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(front.now_unix_s())
        self._document = openapi_document(front.model.name)
        self._version = installed_version()  # read now: an upgrade replaces the files meanwhile

    async def models(self, request: Request) -> Response:
        """List the served model under all its names."""
        return JsonResponse({"object": "list", "data": [self._model(name) for name in self._front.model.names]})

    async def model(self, request: Request) -> Response:
        """Describe the served model under one of its names."""
        if not request.path_params["name"]:
            raise HTTPException(HTTPStatus.NOT_FOUND)  # an empty name would mean the served model
        self._front.inference.check_model(request.path_params["name"])
        return JsonResponse(self._model(request.path_params["name"]))

    async def health(self, request: Request) -> Response:
        """Report that this process answers."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether requests can be served: enough live workers, and no shutdown."""
        self._front.inference.shutdown.require_open()
        if not self._front.is_serving():
            return JsonResponse.of_error(NoWorker("no pair of live workers could serve a request"))
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Export metrics in Prometheus' text format."""
        text = await asyncio.to_thread(self._front.metrics.render)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def document(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        return JsonResponse(self._document)

    async def docs(self, request: Request) -> Response:
        """Return the OpenAPI document as a web page."""
        return Response(docs_page(self._document), headers={"content-type": "text/html; charset=utf-8"})

    async def version(self, request: Request) -> Response:
        """Report the release that runs here."""
        return JsonResponse({"version": self._version})

    async def load(self, request: Request) -> Response:
        """Report the number of answers in progress."""
        return JsonResponse({"server_load": self._front.inference.num_answers})

    def _model(self, name: str) -> dict[str, Any]:
        served = self._front.inference.model()
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": served.name,
            "parent": None,
            "max_model_len": served.max_model_len,
        }


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError | HttpRefusal)
    return JsonResponse.of_error(error, manner=_manner_of(request.scope["path"]))
