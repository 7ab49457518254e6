"""`/tokenize` and `/detokenize`, as in vLLM."""

from typing import Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from baton.core.errors import ConflictingOptions, EmptyPrompt, InvalidRequest
from baton.proto import inference_pb2
from baton.router.openai.body import read_body
from baton.router.openai.chat_request import ChatRequest, Message
from baton.router.openai.chats import chat_prompt
from baton.router.openai.front import Front
from baton.router.openai.json_response import JsonResponse
from baton.router.openai.options import Wire
from baton.router.openai.token_names import TokenNames

MAX_DETOKENIZED: Final = 1 << 20


class TokenizeRequest(ChatRequest):
    """A text, or a conversation."""

    prompt: str | None = None
    messages: list[Message] = Field(default_factory=list)
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Token ids."""

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_DETOKENIZED)


class Tokens:
    """Both endpoints.

    Args:
        front: what all endpoints share.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._names = TokenNames(front.model.tokenizer)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of the prompt that a conversation becomes."""
        asked = await read_body(request, TokenizeRequest, self._front.config.max_body_bytes)
        if asked.prompt is not None and asked.messages:
            raise ConflictingOptions("give a prompt or messages, not both", field="messages")
        if asked.prompt is None and not asked.messages:
            raise EmptyPrompt("prompt is missing", field="prompt")
        text = await chat_prompt(asked, self._front) if asked.prompt is None else asked.prompt
        message = inference_pb2.TokenizeRequest(model=asked.model or "", text=text)
        token_ids = await self._front.inference.tokenize(message)
        max_model_len = self._front.inference.model().max_model_len
        data: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}
        data["token_strs"] = [self._names.name(token_id) for token_id in token_ids] if asked.return_token_strs else None
        return JsonResponse(data)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids; special tokens are none."""
        asked = await read_body(request, DetokenizeRequest, self._front.config.max_body_bytes)
        self._front.inference.check_model(asked.model or "")
        vocab_size = self._front.model.vocab_size
        for at, token_id in enumerate(asked.tokens):
            if not 0 <= token_id < vocab_size:
                message = f"tokens[{at}] = {token_id} is not one of the model's {vocab_size}"
                raise InvalidRequest(message, field="tokens")
        return JsonResponse({"prompt": self._front.model.tokenizer.decode(asked.tokens)})
