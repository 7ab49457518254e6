"""A small JSON document as a response."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from baton.core.errors import BatonError
from baton.router.openai.errors import HttpRefusal, error_data, error_headers, error_status
from baton.router.openai.reply import OPENAI, Manner, json_bytes


class JsonResponse(Response):
    """JSON in ASCII.

    Args:
        data: to be shown.
        status: HTTP's.
        headers: further ones.
    """

    media_type = "application/json"

    def __init__(self, data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json_bytes(data), status, headers)

    @classmethod
    def of_error(
        cls, error: BatonError | HttpRefusal, headers: Mapping[str, str] | None = None, manner: Manner = OPENAI
    ) -> "JsonResponse":
        """An error, with the headers that belong to it."""
        return cls(manner.error(error), error_status(error), error_headers(error) | dict(headers or {}))


def error_bytes(refusal: HttpRefusal) -> bytes:
    """A whole HTTP reply, behind which the connection is closed: for where there is no request to reply to."""
    body = json_bytes(error_data(refusal))
    status = HTTPStatus(refusal.status)
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}\r\n".encode("ascii") + body
