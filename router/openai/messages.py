"""`/v1/messages` and `/v1/messages/count_tokens`: chats in the words of Anthropic's API."""

import json
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from baton.core.errors import BatonError
from baton.proto import inference_pb2
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chat_steps import Step, steps
from baton.router.openai.chats import ChatCall, Chats, chat_prompt
from baton.router.openai.errors import HttpRefusal, error_status
from baton.router.openai.front import Forms, Front
from baton.router.openai.json_response import JsonResponse
from baton.router.openai.messages_request import CountTokensRequest, MessagesRequest
from baton.router.openai.reply import Manner
from baton.router.openai.understood import Job, Understood
from baton.router.openai.usage import Usage

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
Data = dict[str, Any]


class MessagesManner(Manner):
    """Events have names, no other one ends a stream, and errors are of Anthropic's types."""

    def error(self, error: BatonError | HttpRefusal) -> Data:
        """Anthropic's JSON of it; `param` and `code` are those of other endpoints."""
        said, status = super().error(error)["error"], error_status(error)
        kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": said | {"type": kind}}


class MessagesCall(ChatCall):
    """A chat whose answer is one message."""

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        super().__init__(asked, front, understood)
        self.id = f"msg_{understood.request_id}"
        self._block_size = front.inference.prefix_block_size

    def document(self, envelope: Data, usage: Usage) -> Data:
        """The message."""
        (choice,) = self.whole()["choices"]
        said = choice["message"]
        content: list[Data] = []
        if said.get("reasoning"):
            content.append(_thinking(said["reasoning"]))
        if said["content"]:
            content.append({"type": "text", "text": said["content"]})
        content += [_tool_use(call["id"], call["function"]) for call in said.get("tool_calls", ())]
        used = usage_data(usage, self._block_size())
        return _message(envelope, content) | _ending(choice) | {"usage": used}

    def events(self, asked: ChatRequest, envelope: Data, usage: Usage) -> "MessageEvents":
        """The message, block by block."""
        return MessageEvents(self, envelope, usage, self._block_size)


class MessageEvents:
    """A stream of a message's blocks.

    Args:
        call: makes the choice that the message is.
        envelope: the message's id and model.
        usage: of the call.
        block_size: of the workers' prefix cache.
    """

    def __init__(self, call: ChatCall, envelope: Data, usage: Usage, block_size: Callable[[], int]) -> None:
        self._call = call
        self._envelope = envelope
        self._usage = usage
        self._block_size = block_size
        self._num_blocks = 0
        self._open = ""
        self._ending: Data = {}

    def first(self) -> list[Data]:
        """The message without its content."""
        self._call.first()
        used = usage_data(self._usage, 0)
        message = _message(self._envelope, []) | {"stop_reason": None, "stop_sequence": None, "usage": used}
        return [{"type": "message_start", "message": message}]

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[Data]:
        """Its blocks."""
        made: list[Data] = []
        for choice in self._call.push(at, chunk):
            for step in steps(choice["delta"]):
                made += self._step(step)
            if choice["finish_reason"] is not None:
                self._ending = _ending(choice)
        return made

    def last(self) -> list[Data]:
        """How it ended."""
        used = usage_data(self._usage, self._block_size())
        end: Data = {"type": "message_delta", "delta": self._ending, "usage": used}
        return [*self._stop(), end, {"type": "message_stop"}]

    def _step(self, step: Step) -> list[Data]:
        if step.kind == "arguments":
            return [self._delta({"type": "input_json_delta", "partial_json": step.text})]
        if step.kind == "call":
            id_, name = step.call
            return self._start("call", {"type": "tool_use", "id": id_, "name": name, "input": {}})
        if step.kind == "thought":
            begun = [] if self._open == "thought" else self._start("thought", _thinking(""))
            return [*begun, self._delta({"type": "thinking_delta", "thinking": step.text})]
        begun = [] if self._open == "text" else self._start("text", {"type": "text", "text": ""})
        return [*begun, self._delta({"type": "text_delta", "text": step.text})]

    def _start(self, kind: str, block: Data) -> list[Data]:
        stopped = self._stop()
        self._open = kind
        return [*stopped, {"type": "content_block_start", "index": self._num_blocks, "content_block": block}]

    def _delta(self, delta: Data) -> Data:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _stop(self) -> list[Data]:
        if not self._open:
            return []
        self._open = ""
        self._num_blocks += 1
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]


class Messages(Chats):
    """The endpoint that answers."""

    kind = MessagesRequest
    manner = MessagesManner(
        names_events=True,
        done=b"",
        renamed={"stop": "stop_sequences", "response_format": "output_config", "max_completion_tokens": "max_tokens"},
    )

    def call(self, asked: ChatRequest, understood: Understood) -> MessagesCall:
        """The call that a body is."""
        return MessagesCall(asked, self.front, understood)


class CountTokens:
    """The endpoint that counts.

    Args:
        front: what all endpoints share.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    async def count(self, request: Request) -> Response:
        """How many tokens a conversation's prompt has."""
        try:
            (written,) = (await self._front.reader.read(request, CountTokensRequest)).requests
            asked = inference_pb2.TokenizeRequest(model=written.model, text=written.text)
            return JsonResponse({"input_tokens": len(await self._front.inference.tokenize(asked))})
        except (BatonError, HttpRefusal) as error:
            return JsonResponse.of_error(error, manner=Messages.manner)


def understand_count(asked: ChatRequest, forms: Forms, job: Job) -> Understood:
    """What is to be counted: what the conversation becomes.

    Raises:
        InvalidRequest: it can be seen to be wrong.
    """
    request = inference_pb2.GenerateRequest(
        model=asked.model or "", text=chat_prompt(asked, forms, asked.message_data())
    )
    return Understood(asked=asked, request_id=job.request_id, requests=[request])


def usage_data(usage: Usage, block_size: int) -> Data:
    """Anthropic's usage, whose three counts of a prompt add up. Whole blocks of a prompt stay in the prefix cache.

    Args:
        usage: so far.
        block_size: of the prefix cache; 0 if there is none, or it is not known what of the prompt is there.
    """
    used = usage.as_data()
    prompt, read = used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]
    created = max(0, (prompt - 1) // block_size * block_size - read) if block_size else 0
    return {
        "input_tokens": prompt - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "output_tokens": used["completion_tokens"],
    }


def _message(envelope: Data, content: list[Data]) -> Data:
    about = {"id": envelope["id"], "type": "message", "role": "assistant", "model": envelope["model"]}
    return about | {"content": content}


def _ending(choice: Data) -> Data:
    reason, stopped_by = choice["finish_reason"], choice.get("stop_reason")
    if reason == "stop" and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _REASONS.get(reason, reason), "stop_sequence": None}


def _thinking(text: str) -> Data:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(id_: str, function: Data) -> Data:
    """A call whose arguments the answer's end has cut is shown with none."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": id_, "name": function["name"], "input": arguments}
