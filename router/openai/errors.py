"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

import re
from http import HTTPStatus
from typing import Any, Final

from baton.core.errors import BatonError, ModelNotFound, Overloaded, PromptTooLong, Retry

DEFAULT_RETRY_AFTER_S: Final = 1.0
# What clients of OpenAI look for; every other error has its own name, in lower case.
_CODES: Final[dict[type[BatonError], str]] = {
    ModelNotFound: "model_not_found",
    PromptTooLong: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
}


class HttpRefusal(Exception):
    """A request that HTTP itself refuses: no such path, a method that is not served, a body too large."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def error_data(error: BatonError | HttpRefusal) -> dict[str, Any]:
    """The JSON of an error."""
    if isinstance(error, HttpRefusal):
        return _data(error.message, error_type(error.status), None, error.code)
    field = error.fields.get("field")
    code = _CODES.get(type(error)) or _snake(type(error).__name__)
    return _data(error.message, error_type(error.http_status), None if field is None else str(field), code)


def error_status(error: BatonError | HttpRefusal) -> int:
    """The HTTP status of an error."""
    return error.status if isinstance(error, HttpRefusal) else error.http_status


def error_headers(error: BatonError | HttpRefusal) -> dict[str, str]:
    """`Retry-After` where a pause helps; where it does not, OpenAI's clients are told not to try a 5xx again."""
    if isinstance(error, HttpRefusal):
        return {}
    if error.retry is Retry.NEVER:
        return {"x-should-retry": "false"} if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else {}
    after_s = float(error.fields.get("retry_after_s", DEFAULT_RETRY_AFTER_S))
    return {"retry-after": str(max(1, round(after_s))), "retry-after-ms": str(round(1e3 * after_s))}


def error_type(status: int) -> str:
    """OpenAI's word for a class of statuses."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def _data(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
