"""The HTTP application: paths, and what becomes of errors that no endpoint has turned into a reply."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.core.errors import BatonError, NoWorker
from baton.router.openai.chats import Chats
from baton.router.openai.completions import Completions
from baton.router.openai.document import openapi_document
from baton.router.openai.entrance import Entrance
from baton.router.openai.errors import HttpRefusal
from baton.router.openai.front import Front
from baton.router.openai.json_response import JsonResponse
from baton.router.openai.tokens import Tokens

log = logging.getLogger(__name__)
_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(front: Front) -> ASGIApp:
    """Everything that is served over HTTP."""
    tokens, plain = Tokens(front), PlainEndpoints(front)
    routes = [
        Route("/v1/completions", Completions(front), methods=["POST"]),
        Route("/v1/chat/completions", Chats(front), methods=["POST"]),
        Route("/v1/models", plain.models),
        Route("/v1/models/{name:path}", plain.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", plain.health),
        Route("/ready", plain.ready),
        Route("/metrics", plain.metrics),
        Route("/openapi.json", plain.document),
    ]
    handlers: Any = {BatonError: _on_error, HttpRefusal: _on_error, HTTPException: _on_http, Exception: _on_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Entrance(app, front.door, front.operators)


class PlainEndpoints:
    """What is only looked at.

    Args:
        front: what all endpoints share.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(front.now_unix_s())
        self._document = openapi_document(front.model.name)

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        self._front.inference.check_model(request.path_params["name"])
        return JsonResponse(self._model())

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Both roles have a live worker, so requests are served."""
        if not self._front.is_serving():
            return JsonResponse.of_error(NoWorker("a role has no live worker"))
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        text = await asyncio.to_thread(self._front.metrics.render)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def document(self, request: Request) -> Response:
        """What is served, in OpenAPI."""
        return JsonResponse(self._document)

    def _model(self) -> dict[str, Any]:
        served = self._front.inference.model()
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": served.name,
            "parent": None,
            "max_model_len": served.max_model_len,
        }


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError | HttpRefusal)
    return JsonResponse.of_error(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    code = _CODES.get(error.status_code, HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    return JsonResponse.of_error(HttpRefusal(error.status_code, message, code), error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises it again behind the reply, so uvicorn logs it."""
    return JsonResponse.of_error(HttpRefusal(500, "an internal error; the router's log says more", "internal_error"))
