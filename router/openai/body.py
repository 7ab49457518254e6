"""Request bodies: reads them within a limit, validates them as models, or translates them into a chat's body."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from baton.core.errors import ConflictingOptions, InvalidGrammar, InvalidRequest, InvalidSampling, RequestCancelled
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.options import Wire
from baton.router.openai.reply import HttpRefusal

Model = TypeVar("Model", bound=BaseModel)
MAX_SHOWN_PROBLEMS = 3
SAMPLING_FIELDS = frozenset(("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"))
GRAMMAR_FIELDS = frozenset(
    "guided_json guided_regex guided_choice guided_grammar structured_outputs regex ebnf grammar".split()
)
MAX_SHOWN_LEN = 300
_PLAIN: Final = {"content-encoding": ("identity",), "transfer-encoding": ("chunked",)}  # that leave a body as it is


async def read_bytes(request: Request, check: Callable[[int], None], timeout_s: float) -> bytes:
    """Read the body without parsing it, and stop as soon as it is too large.

    Args:
        request: the HTTP request.
        check: called with the announced number of bytes, then with those received; raises if they are too many.
        timeout_s: time within which the whole body must arrive.

    Raises:
        HttpRefusal: the body is not JSON or is compressed, or it arrives too slowly.
        RequestCancelled: the client disconnected before it had sent the whole body.
        BatonError: raised by `check`.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpRefusal(415, f"the body is {content_type[:80]!r}; send application/json", "unsupported_media_type")
    for name, plain in _PLAIN.items():
        codings = request.headers.get(name, "").lower().replace(",", " ").split()
        if other := next((coding for coding in codings if coding not in plain), None):
            message = f"{name} {other[:80]!r} is not supported: send the body uncompressed"
            raise HttpRefusal(415, message, "unsupported_media_type")
    said = request.headers.get("content-length", "")
    if said.isdecimal():
        check(int(said[:19]))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                check(len(body))
    except ClientDisconnect as error:
        raise RequestCancelled("the client went away before its request was whole") from error
    except TimeoutError as error:
        raise HttpRefusal(408, f"the body was not whole after {timeout_s:g} s", "request_timeout") from error
    return bytes(body)


def parse_body(body: bytes, kind: type[Model]) -> Model:
    """Parse bytes as a `kind`.

    Raises:
        InvalidRequest: they are not JSON, or not a valid `kind`; the error names the first invalid field.
    """
    return _checked(lambda: kind.model_validate_json(body))


def as_model(data: Any, kind: type[Model]) -> Model:
    """Validate parsed data as a `kind`.

    Raises:
        InvalidRequest: it is not a valid `kind`; the error names the first invalid field.
    """
    return _checked(lambda: kind.model_validate(data))


def _checked(make: Callable[[], Model]) -> Model:
    try:
        return make()
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[: MAX_SHOWN_PROBLEMS + 1]
        too_long = next((one for one in problems if one["type"] in ("too_long", "string_too_long")), None)
        if too_long is not None:
            raise _beyond(too_long) from None
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    shown = [text[:MAX_SHOWN_LEN] for text in _told(problems[:MAX_SHOWN_PROBLEMS])]
    field = problems[0]["loc"][0] if problems[0]["loc"] else None
    raise InvalidRequest("; ".join(shown), **({} if field is None else {"field": str(field)}))


def _told(problems: list[Any]) -> list[str]:
    """Describe problems by field; of a field of several kinds, the one that is wrong deepest inside."""
    by_field: dict[tuple[int | str, ...], list[Any]] = {}
    for problem in problems:
        loc = problem["loc"]
        at = next((index for index, part in enumerate(loc) if _is_kind(part)), len(loc))
        by_field.setdefault(loc[:at], []).append(problem)
    told: dict[str, list[str]] = {}
    for alike in by_field.values():
        deepest = max(len(problem["loc"]) for problem in alike)
        for problem in alike:
            if len(problem["loc"]) == deepest:
                told.setdefault(_path(problem["loc"]), []).append(problem["msg"])
    return [path + _either(list(dict.fromkeys(messages))) for path, messages in told.items()]


def _either(messages: list[str]) -> str:
    return " or ".join([messages[0], *(message.removeprefix("Input should be ") for message in messages[1:])])


def _is_kind(part: int | str) -> bool:
    """Whether a part of a place is no field, but pydantic's name of one of the kinds that a field may be of."""
    return isinstance(part, str) and (part.startswith("constrained-") or "[" in part)


def _beyond(problem: Any) -> InvalidRequest:
    """Turn a field that exceeds its limit into the error that gRPC gives for the same excess."""
    field = str(problem["loc"][0]) if problem["loc"] else "body"
    what = "characters" if problem["type"] == "string_too_long" else "entries"
    limit = problem["ctx"]["max_length"]
    kind = (
        InvalidSampling if field in SAMPLING_FIELDS else InvalidGrammar if field in GRAMMAR_FIELDS else InvalidRequest
    )
    message = f"{_path(problem['loc'])}more than {limit} {what}"
    return kind(message, field=field, limit=limit)


def too_large(max_bytes: int) -> HttpRefusal:
    """Build the refusal of a body that is too large for any request."""
    return HttpRefusal(413, f"the body is larger than {max_bytes} bytes", "request_too_large")


def _path(loc: tuple[int | str, ...]) -> str:
    path = ".".join(str(part) for part in loc if not _is_kind(part))
    return f"{path}: " if path else ""


_ONE_ANSWER = (None, 1)
_MERGED = "chat_template_kwargs"  # `data` adds to those of the body


class Translated(Wire):
    """One of them. Fields that it does not name are those of a chat, and are read, refused or ignored as there.

    Attributes:
        renamed: this API's names of a chat's fields.
        unanswered: fields of a chat that ask for what this API's replies have no place for.
    """

    renamed: ClassVar[Mapping[str, str]] = {}
    unanswered: ClassVar[tuple[str, ...]] = ("prompt_logprobs", "return_token_ids", "return_timings")

    def data(self) -> dict[str, Any]:
        """Translate the body into a chat's.

        Raises:
            InvalidRequest: it asks for something that no chat can express.
        """
        raise NotImplementedError

    def echoed(self) -> dict[str, Any]:
        """Return the options that the reply repeats."""
        return {}

    def as_chat(self) -> ChatRequest:
        """Translate the body into a chat request.

        Raises:
            InvalidRequest: the body is not valid as a chat, or asks for what the reply cannot hold.
            ConflictingOptions: a chat's field differs from this API's field for the same.
        """
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if more.get("n") not in _ONE_ANSWER:
            raise InvalidRequest("n is not supported: there is one answer", field="n")
        for name in self.unanswered:
            if more.get(name, False) is not False:  # 0 is a number of log-probabilities
                raise InvalidRequest(f"{name} is not supported: replies here have no place for it", field=name)
        data = {name: value for name, value in self.data().items() if value is not None}
        for name in more.keys() & data.keys() - {_MERGED}:
            if more[name] != data[name]:
                own = self.renamed.get(name, "another field")
                raise ConflictingOptions(f"{name} and {own} differ; give only one of them", field=name)
        return as_model(more | data, ChatRequest)
