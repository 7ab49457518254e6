"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from baton.core.errors import ConflictingOptions, EmptyPrompt, InvalidRequest, PromptTooLong
from baton.proto import inference_pb2
from baton.router.openai.chat_request import ChatRequest, Message
from baton.router.openai.chats import chat_prompt
from baton.router.openai.front import Forms, Front
from baton.router.openai.limits import MAX_MESSAGES, Name, Text
from baton.router.openai.options import Wire
from baton.router.openai.reply import JsonResponse, json_bytes
from baton.router.openai.token_names import TokenNames
from baton.router.openai.understood import ReadingJob, Understood

MAX_DETOKENIZED: Final = 1 << 20
NAMED_AT_ONCE: Final = 4096


class TokenizeRequest(ChatRequest):
    """A text, or a conversation."""

    prompt: Text | None = None
    messages: list[Message] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Token ids."""

    model: Name | None = None
    tokens: list[int] = Field(max_length=MAX_DETOKENIZED, fail_fast=True)


class Tokens:
    """The endpoints of the tokenizer.

    Args:
        front: what all endpoints share.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._names = TokenNames(front.model.tokenizer)
        self._info = json_bytes(_tokenizer_info(front))

    async def info(self, request: Request) -> Response:
        """Describe the tokenizer, for clients without a copy of it."""
        return Response(self._info, media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of a conversation's prompt."""
        understood = await self._front.reader.read(request, TokenizeRequest)
        asked: Any = understood.asked
        (written,) = understood.requests
        message = inference_pb2.TokenizeRequest(
            model=written.model, text=written.text, add_special_tokens=written.add_special_tokens
        )
        token_ids = await self._front.inference.tokenize(message)
        max_model_len = self._front.inference.model().max_model_len
        data: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len}
        names = await self._named(token_ids) if asked.return_token_strs else None
        parts = [json_bytes(data)[:-1], b',"tokens":', await _json_list(token_ids), b',"token_strs":']
        parts += [b"null" if names is None else await _json_list(names), b"}"]
        return Response(b"".join(parts), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids; special tokens are shown by their names."""
        (written,) = (await self._front.reader.read(request, DetokenizeRequest)).requests
        self._front.inference.check_model(written.model)
        token_ids, vocab_size = written.token_ids.ids, self._front.model.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            at = next(at for at, token_id in enumerate(token_ids) if token_id >= vocab_size)
            message = f"tokens[{at}] = {token_ids[at]} is not one of the model's {vocab_size}"
            raise InvalidRequest(message, field="tokens")
        decode = partial(self._front.model.tokenizer.decode, token_ids, skip_special_tokens=False)
        return JsonResponse({"prompt": await asyncio.to_thread(decode)})

    async def _named(self, token_ids: list[int]) -> list[str]:
        """Name tokens a few at a time, so that other streams go on in between."""
        named: list[str] = []
        for first in range(0, len(token_ids), NAMED_AT_ONCE):
            named += map(self._names.name, token_ids[first : first + NAMED_AT_ONCE])
            await asyncio.sleep(0)
        return named


def _tokenizer_info(front: Front) -> dict[str, Any]:
    """Build what the model's files say of its tokenizer, with the chat template in use."""
    known = {"tokenizer_class": "PreTrainedTokenizerFast", **front.model.tokenizer_config}
    template = front.config.template
    return known | {"chat_template": None if template is None else template.sources["default"]}


async def _json_list(items: Sequence[int] | Sequence[str]) -> bytes:
    """Encode a list in steps, like `_named`: a reply may be many times as long as its request."""
    written = json_bytes if items and isinstance(items[0], str) else to_json  # takes a quarter of the time for numbers
    parts = []
    for first in range(0, len(items), NAMED_AT_ONCE):
        parts.append(written(items[first : first + NAMED_AT_ONCE])[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def understand_tokenize(asked: TokenizeRequest, forms: Forms, job: ReadingJob) -> Understood:
    """Translate a request: the text itself, or a conversation's prompt.

    Raises:
        InvalidRequest: it has neither, or both.
    """
    if asked.prompt is not None and asked.messages:
        raise ConflictingOptions("give a prompt or messages, not both", field="messages")
    if asked.prompt is None and not asked.messages:
        raise EmptyPrompt("prompt is missing", field="prompt")
    text = chat_prompt(asked, forms, asked.message_data()) if asked.prompt is None else asked.prompt
    adds = asked.prompt is not None if asked.add_special_tokens is None else asked.add_special_tokens
    request = inference_pb2.GenerateRequest(model=asked.model or "", text=text, add_special_tokens=adds)
    return Understood(asked=asked, request_id=job.request_id, requests=[request])


def understand_detokenize(asked: DetokenizeRequest, forms: Forms, job: ReadingJob) -> Understood:
    """Translate a request into token ids.

    Raises:
        InvalidRequest: an id is out of range, or there are more than any prompt has.
    """
    if len(asked.tokens) > job.max_model_len:
        message = f"{len(asked.tokens)} tokens; the model's length is {job.max_model_len}"
        raise PromptTooLong(message, field="tokens", limit=job.max_model_len)
    request = inference_pb2.GenerateRequest(model=asked.model or "")
    request.token_ids.SetInParent()
    for at, token_id in enumerate(asked.tokens):
        if not 0 <= token_id < 1 << 32:
            raise InvalidRequest(f"tokens[{at}] = {token_id} is not one of the model's", field="tokens")
    request.token_ids.ids.extend(asked.tokens)
    return Understood(asked=asked, request_id=job.request_id, requests=[request])
