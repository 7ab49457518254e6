"""Turns a body's bytes into a parsed request: on the event loop for light bodies, in another process for others."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pydantic import BaseModel

from baton.core.errors import InvalidRequest
from baton.router.openai.body import Translated, parse_body
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import BatchRequest, understand_batch, understand_chat
from baton.router.openai.completions import CompletionRequest, understand_completion
from baton.router.openai.front import Forms
from baton.router.openai.limits import check_shape
from baton.router.openai.messages import CountTokensRequest, MessagesRequest, understand_count
from baton.router.openai.options import CommonOptions
from baton.router.openai.responses import ResponsesRequest
from baton.router.openai.tokens import DetokenizeRequest, TokenizeRequest, understand_detokenize, understand_tokenize
from baton.router.openai.understood import REQUEST_ID, ReadingJob, Understood

KINDS: Final[dict[str, tuple[type[BaseModel], Callable[[Any, Forms, ReadingJob], Understood]]]] = {
    "ChatRequest": (ChatRequest, understand_chat),
    "BatchRequest": (BatchRequest, understand_batch),
    "CompletionRequest": (CompletionRequest, understand_completion),
    "MessagesRequest": (MessagesRequest, understand_chat),
    "ResponsesRequest": (ResponsesRequest, understand_chat),
    "CountTokensRequest": (CountTokensRequest, understand_count),
    "TokenizeRequest": (TokenizeRequest, understand_tokenize),
    "DetokenizeRequest": (DetokenizeRequest, understand_detokenize),
}


def understand(body: bytes, forms: Forms, job: ReadingJob) -> Understood:
    """Parse and translate a body; nothing is allocated for it yet.

    Raises:
        InvalidRequest: the request is invalid.
    """
    kind, write = KINDS[job.kind]
    check_shape(body)
    asked = parse_body(body, kind)
    if not isinstance(asked, Translated):
        return _understand(asked, write, forms, job)
    understood = _understand(asked.as_chat(), write, forms, job)
    understood.echoed = asked.echoed()
    return understood


def _understand(
    asked: BaseModel, write: Callable[[Any, Forms, ReadingJob], Understood], forms: Forms, job: ReadingJob
) -> Understood:
    ignored: list[str] = []
    if isinstance(asked, CommonOptions):
        asked.refuse_unbuilt()
        ignored = asked.ignored()
        asked.request_id = _checked(asked.request_id or job.request_id)
        job = replace(job, request_id=asked.request_id)
    understood = write(asked, forms, job)
    understood.ignored = ignored
    understood.constrained_by = asked.constrained_by() if isinstance(asked, CommonOptions) else ""
    return understood


def _checked(request_id: str) -> str:
    if not request_id:
        return secrets.token_hex(16)
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id: 1 to 128 visible ASCII characters", field="request_id")
    return request_id
