"""`/v1/messages` and `/v1/messages/count_tokens`: chats in the format of Anthropic's API."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from baton.core.errors import BatonError, InvalidRequest
from baton.core.requests.answer_structure import TOOL_NAME
from baton.proto import inference_pb2
from baton.router.openai.body import Translated
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import ChatCall, Chats, ChatStep, chat_prompt, steps
from baton.router.openai.front import Forms, Front
from baton.router.openai.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, JsonObject, Name, StopStrings, Text
from baton.router.openai.options import Wire
from baton.router.openai.reply import HttpRefusal, JsonResponse, Manner, Usage, error_status
from baton.router.openai.understood import ReadingJob, Understood

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(Wire):
    """A block of a system prompt or of a tool's result; only text is read."""

    type: Name
    text: Text | None = None


class ContentBlock(TextBlock):
    """A block of a message; which fields it has depends on its type."""

    thinking: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: Name | None = None
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class InputMessage(Wire):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ClientTool(Wire):
    """What may be called; tools that a server would run are not offered."""

    type: Name | None = None
    name: str = Field(pattern=TOOL_NAME, max_length=128)
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


class MessagesToolChoice(Wire):
    """Whether a tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    """Whether the model thinks first, which it does only if asked. How long is not limited."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Wire):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema_: JsonObject | bool = Field(alias="schema")


class OutputConfig(Wire):
    """Likewise, and how much effort it is worth."""

    format: OutputFormat | None = None
    effort: Name | None = None


class CountTokensRequest(Translated):
    """A conversation, whose tokens are to be counted."""

    renamed: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "max_completion_tokens": "max_tokens",
    }
    unanswered: ClassVar[tuple[str, ...]] = (*Translated.unanswered, "logprobs")

    model: Name | None = None
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format

    def data(self) -> dict[str, Any]:
        """Translate the request into a chat's body."""
        messages = [] if self.system is None else [{"role": "system", "content": _texts(self.system, "system")}]
        for at, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{at}]")
        last, choice = messages[-1], self.tool_choice
        goes_on = last["role"] == "assistant" and "tool_calls" not in last
        asked = self.output_config
        format_ = self.output_format if asked is None or asked.format is None else asked.format
        return {
            "model": self.model,
            "messages": messages,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": None if choice is None else _tool_choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": self._variables(),
            "response_format": None if format_ is None else _format(format_),
            "reasoning_effort": None if asked is None else asked.effort,
            "add_generation_prompt": False if goes_on else None,
            "continue_final_message": True if goes_on else None,
        }

    def _variables(self) -> Any:
        given = (self.model_extra or {}).get("chat_template_kwargs")
        if not isinstance(given, dict | None):
            return given  # validation refuses it later
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return {"enable_thinking": thinks} | (given or {})


class MessagesRequest(CountTokensRequest):
    """A conversation, which is to be answered."""

    max_tokens: int
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def data(self) -> dict[str, Any]:
        """Translate the request into a chat's body."""
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return super().data() | same | {"stop": self.stop_sequences}


def _messages(turn: InputMessage, field: str) -> list[dict[str, Any]]:
    """Translate one message into chat messages; tool results become messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    made: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in turn.content:
        if block.type == "tool_result" and turn.role == "user":
            if texts:
                made.append({"role": "user", "content": texts})
                texts = []
            made.append(_result(block, field))
        elif block.type == "text" and block.text is not None:
            texts.append({"type": "text", "text": block.text})
        elif block.type == "tool_use" and turn.role == "assistant" and block.name is not None:
            function = {"name": block.name, "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking" and turn.role == "assistant" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            raise InvalidRequest(
                f"{field}: a {turn.role}'s block of type {block.type[:40]!r} cannot be read", field="messages"
            )
    if texts or calls or thoughts or not made:
        message: dict[str, Any] = {"role": turn.role, "content": texts}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        made.append(message)
    return made


def _result(block: ContentBlock, field: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{field}: tool_use_id is missing", field="messages")
    content = "" if block.content is None else _texts(block.content, "messages")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _texts(content: str | list[Any], field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise InvalidRequest(f"{field}: a block of type {block.type[:40]!r} cannot be read", field=field)
    return [{"type": "text", "text": block.text} for block in content]


def _tool(tool: ClientTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"tools: {tool.type[:40]!r} is not offered: tools are the client's", field="tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice: name is missing", field="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _format(asked: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": asked.schema_}}


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
    """Anthropic's reply format: named events, no final `[DONE]`, and Anthropic's error types."""

    def error(self, error: BatonError | HttpRefusal) -> Data:
        """Build Anthropic's JSON for an error; `param` and `code` are as at other endpoints."""
        said, status = super().error(error)["error"], error_status(error)
        kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        if said["param"] == "thread":  # then Anthropic's own client sends the whole conversation instead
            said["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": said | {"type": kind}}


class MessagesCall(ChatCall):
    """A chat whose answer is one message."""

    named_call_finishes = True

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        super().__init__(asked, front, understood)
        self.id = f"msg_{understood.request_id}"
        self._block_size = front.inference.prefix_block_size
        self._steps: list[tuple[ChatStep, list[str]]] = []  # (first step of each block, its texts)
        self._ending: Data = {}

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `document`, in the same blocks as a stream."""
        for choice in self.push(at, chunk):
            for step in steps(choice["delta"]):
                goes_on = step.kind == "arguments" or (step.kind != "call" and self._open_kind == step.kind)
                if not goes_on:
                    self._steps.append((step, []))
                self._steps[-1][1].append(step.text)
            if choice["finish_reason"] is not None:
                self._ending = _ending(choice)

    def document(self, envelope: Data, usage: Usage) -> Data:
        """The message."""
        content = [_block(first, "".join(texts)) for first, texts in self._steps]
        used = usage_data(usage, self._block_size())
        return _message(envelope, content) | self._ending | {"usage": used}

    def events(self, asked: ChatRequest, envelope: Data, usage: Usage) -> "MessageEvents":
        """The message's events, block by block."""
        return MessageEvents(self, envelope, usage, self._block_size)

    @property
    def _open_kind(self) -> str:
        """Kind of the last block; empty if there is none."""
        return self._steps[-1][0].kind if self._steps else ""


class MessageEvents:
    """The event stream of a message's blocks.

    Args:
        call: makes the choice that becomes the message.
        envelope: the message's id and model.
        usage: usage of the call.
        block_size: block size of the workers' prefix cache.
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
        """Announce the message, without content."""
        self._call.first()
        used = usage_data(self._usage, 0)
        message = _message(self._envelope, []) | {"stop_reason": None, "stop_sequence": None, "usage": used}
        return [{"type": "message_start", "message": message}]

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[Data]:
        """Events for the blocks in a chunk."""
        made: list[Data] = []
        for choice in self._call.push(at, chunk):
            for step in steps(choice["delta"]):
                made += self._step(step)
            if choice["finish_reason"] is not None:
                self._ending = _ending(choice)
        return made

    def last(self) -> list[Data]:
        """Events that end the message."""
        used = usage_data(self._usage, self._block_size())
        end: Data = {"type": "message_delta", "delta": self._ending, "usage": used}
        return [*self._stop(), end, {"type": "message_stop"}]

    def _step(self, step: ChatStep) -> list[Data]:
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
    """Serves `/v1/messages`."""

    kind = MessagesRequest
    manner = MessagesManner(
        names_events=True,
        done=b"",
        renamed=MessagesRequest.renamed,
    )

    def call(self, asked: ChatRequest, understood: Understood) -> MessagesCall:
        """Make the call for a request."""
        return MessagesCall(asked, self.front, understood)


class CountTokens:
    """Serves `/v1/messages/count_tokens`.

    Args:
        front: what all endpoints share.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    async def count(self, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        try:
            (written,) = (await self._front.reader.read(request, CountTokensRequest)).requests
            asked = inference_pb2.TokenizeRequest(
                model=written.model, text=written.text, add_special_tokens=written.add_special_tokens
            )
            return JsonResponse({"input_tokens": len(await self._front.inference.tokenize(asked))})
        except (BatonError, HttpRefusal) as error:
            return JsonResponse.of_error(error, manner=Messages.manner)


def understand_count(asked: ChatRequest, forms: Forms, job: ReadingJob) -> Understood:
    """Translate a conversation into the prompt whose tokens are to be counted.

    Raises:
        InvalidRequest: the request is invalid.
    """
    request = inference_pb2.GenerateRequest(
        model=asked.model or "",
        text=chat_prompt(asked, forms, asked.message_data()),
        add_special_tokens=asked.add_special_tokens is True,
    )
    return Understood(asked=asked, request_id=job.request_id, requests=[request])


def usage_data(usage: Usage, block_size: int) -> Data:
    """Build Anthropic's usage, whose three prompt counts add up. Full blocks of the prompt stay in the prefix cache.

    Args:
        usage: usage so far.
        block_size: of the prefix cache; 0 if there is none, or if it is unknown what is cached.
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


def _block(first: ChatStep, text: str) -> Data:
    """Build a block from its first step and its whole text."""
    if first.kind == "thought":
        return _thinking(text)
    if first.kind == "text":
        return {"type": "text", "text": text}
    id_, name = first.call
    return {"type": "tool_use", "id": id_, "name": name, "input": _input(text)}


def _input(text: str) -> Data:
    """Parse a call's arguments; empty if the end of the answer has cut them, or if they are no object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
