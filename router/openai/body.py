"""A request's body: read within a limit, and parsed into what it should be."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from baton.core.errors import InvalidRequest, RequestCancelled
from baton.router.openai.errors import HttpRefusal

Model = TypeVar("Model", bound=BaseModel)
MAX_SHOWN_PROBLEMS = 3
MAX_SHOWN_LEN = 300


async def read_body(request: Request, kind: type[Model], max_bytes: int) -> Model:
    """The body as a `kind`.

    Raises:
        HttpRefusal: more bytes than `max_bytes`, or a body that is not JSON by its own word.
        InvalidRequest: it is not JSON, or not what `kind` asks for; the first field that is wrong is named.
        RequestCancelled: the client went away before it had sent all of it.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpRefusal(415, f"the body is {content_type[:80]!r}; send application/json", "unsupported_media_type")
    return parse_body(await _read(request, max_bytes), kind)


def parse_body(body: bytes, kind: type[Model]) -> Model:
    """Bytes as a `kind`.

    Raises:
        InvalidRequest: see `read_body`.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    shown = [f"{_path(problem['loc'])}{problem['msg']}"[:MAX_SHOWN_LEN] for problem in problems[:MAX_SHOWN_PROBLEMS]]
    field = problems[0]["loc"][0] if problems[0]["loc"] else None
    raise InvalidRequest("; ".join(shown), **({} if field is None else {"field": str(field)}))


async def _read(request: Request, max_bytes: int) -> bytes:
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > max_bytes:
        raise _too_large(max_bytes)
    parts, num_bytes = [], 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise RequestCancelled("the client went away before its request was whole") from error
    return b"".join(parts)


def _too_large(max_bytes: int) -> HttpRefusal:
    return HttpRefusal(413, f"the body is larger than {max_bytes} bytes", "request_too_large")


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc)) + ": " if loc else ""
