"""`/v1/responses`: chats in the format of OpenAI's newer API. Nothing is stored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from baton.core.errors import BatonError, InvalidRequest
from baton.proto import inference_pb2
from baton.router.openai.body import Translated
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chats import ChatCall, Chats, ChatStep, steps
from baton.router.openai.front import Front
from baton.router.openai.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, JsonObject, Name, Text
from baton.router.openai.options import STORELESS, Wire
from baton.router.openai.reply import HttpRefusal, Manner, Usage
from baton.router.openai.understood import Understood

MAX_INCLUDED: Final = 64
MAX_METADATA: Final = 16
MAX_METADATA_LEN: Final = 512
LOGPROBS: Final = "message.output_text.logprobs"
# What else OpenAI's API can include. Responses here have none of it, as tools do not run on the server.
_NEVER_INCLUDED: Final = frozenset(
    "code_interpreter_call.outputs computer_call_output.output.image_url file_search_call.results "
    "message.input_image.image_url reasoning.encrypted_content web_search_call.action.sources "
    "web_search_call.results".split()
)
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_FROM_CHAT: Final = ("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls")


class ResponsePart(Wire):
    """One part of an item's content; only text is read."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


Parts = Annotated[list[ResponsePart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Item(Wire):
    """What was said, called, answered or thought; which fields it has depends on its type."""

    type: Name | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Parts | None = None
    summary: Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | Parts | None = None


class FunctionTool(Wire):
    """What may be called; tools that a server would run are not offered."""

    type: Name
    name: Name | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedTool(Wire):
    """One of them, by its name."""

    type: Name
    name: Name | None = None


class ResponsesToolChoice(NamedTool):
    """The one that must be called, or those that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class TextFormat(Wire):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: JsonObject | bool | None = Field(None, alias="schema")


class TextConfig(Wire):
    """Likewise."""

    format: TextFormat | None = None


class Reasoning(Wire):
    """How long the model thinks, if its template knows that."""

    effort: Name | None = None


class ResponsesRequest(Translated):
    """What it asks."""

    renamed: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
        "truncate_prompt_tokens": "truncation",
    }

    model: Name | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Name], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    metadata: (
        Annotated[dict[Name, Annotated[str, Field(max_length=MAX_METADATA_LEN)]], Field(max_length=MAX_METADATA)] | None
    ) = None
    prompt: None = None  # prompts cannot be stored

    def data(self) -> dict[str, Any]:
        """Translate the request into a chat's body.

        Raises:
            InvalidRequest: an item cannot be read, or `include` has an unknown name.
        """
        unknown = next((name for name in self.include or () if name not in {LOGPROBS, *_NEVER_INCLUDED}), None)
        if unknown is not None:
            raise InvalidRequest(f"include: {unknown[:64]!r} is not known", field="include")
        format_, choice = None if self.text is None else self.text.format, self.tool_choice
        reports = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return {name: getattr(self, name) for name in _FROM_CHAT} | {
            "messages": self._messages(),
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": _tool_choice(choice) if isinstance(choice, ResponsesToolChoice) else choice,
            "response_format": None if format_ is None else _format(format_),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": True if reports else None,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }

    def echoed(self) -> dict[str, Any]:
        """Return the options that the response repeats; none of them can be long."""
        choice, format_ = self.tool_choice, None if self.text is None else self.text.format
        return {
            "background": False,
            "instructions": None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text" if format_ is None else format_.type}},
            "tool_choice": _shown(choice) if isinstance(choice, ResponsesToolChoice) else choice or "auto",
            "tools": [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
        }

    def _messages(self) -> list[dict[str, Any]]:
        made = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*made, {"role": "user", "content": self.input}]
        messages = _Messages(made)
        for at, item in enumerate(self.input):
            messages.add(item, f"input[{at}]")
        return made


class _Messages:
    """Builds messages from items: a thought, a text and calls in a row become one message of the assistant."""

    def __init__(self, made: list[dict[str, Any]]) -> None:
        self._made = made

    def add(self, item: Item, field: str) -> None:
        kind = item.type or "message"
        if kind == "message" and item.role is not None and item.content is not None:
            content = _content(item.content, field)
            last = self._last()
            if item.role == "assistant" and last.keys() == {"role", "content", "reasoning_content"}:
                last["content"] = content
            else:
                self._made.append({"role": item.role, "content": content})
        elif kind == "function_call" and item.name is not None and item.call_id is not None:
            function = {"name": item.name, "arguments": item.arguments or ""}
            last = self._last() or self._new()
            last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif kind == "function_call_output" and item.call_id is not None and item.output is not None:
            content = _content(item.output, field)
            self._made.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif kind == "reasoning":
            parts = item.content or item.summary or ""
            content = _content(parts, field)
            self._new()["reasoning_content"] = (
                content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            )
        elif kind == "item_reference":  # a client sends these until it is told that nothing is stored
            message = f"{field}: item_reference is not supported: {STORELESS}, with store = false"
            raise InvalidRequest(message, field="input")
        else:
            message = f"{field}: an item of type {kind[:40]!r} with these fields cannot be read"
            raise InvalidRequest(message, field="input")

    def _last(self) -> dict[str, Any]:
        return self._made[-1] if self._made and self._made[-1]["role"] == "assistant" else {}

    def _new(self) -> dict[str, Any]:
        self._made.append({"role": "assistant", "content": ""})
        return self._made[-1]


def _content(content: str | list[ResponsePart], field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    made = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXTS else None
        if text is None:
            raise InvalidRequest(f"{field}: content of type {part.type[:40]!r} is not supported", field="input")
        made.append({"type": "text", "text": text})
    return made


def _tool(tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function":
        raise InvalidRequest(
            f"tools: {tool.type[:40]!r} is not offered: tools are the client's functions", field="tools"
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _tool_choice(choice: ResponsesToolChoice) -> dict[str, Any]:
    if choice.type == "allowed_tools":
        tools = [{"type": tool.type, "function": {"name": tool.name}} for tool in choice.tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": tools}}
    return {"type": choice.type, "function": {"name": choice.name}}


def _shown(choice: ResponsesToolChoice) -> Any:
    return {"type": choice.type, "name": choice.name} if choice.type == "function" else choice.mode or "auto"


def _format(asked: TextFormat) -> dict[str, Any]:
    return {"type": asked.type} | ({"json_schema": {"schema": asked.schema_}} if asked.type == "json_schema" else {})


Data = dict[str, Any]
# Prefixes of ids, by kind of item.
_PREFIXES: Final = {"thought": "rs", "text": "msg", "call": "fc"}


class ResponsesManner(Manner):
    """OpenAI's newer reply format: events have names and sequence numbers, and no final `[DONE]`."""

    def error_event(self, error: BatonError | HttpRefusal, num_events: int) -> Data:
        """Build the event `error`."""
        return {"type": "error", "sequence_number": num_events} | self.error(error)


class ResponsesCall(ChatCall):
    """A chat whose answer is a list of items."""

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        super().__init__(asked, front, understood)
        self.id = f"resp_{understood.request_id}"
        self._echoed = understood.echoed
        self.items = Items(understood.request_id)

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `document`."""
        self.feed(at, chunk)

    def feed(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[Data]:
        """Return the events for what a chunk adds to the items."""
        pieces = self.push(at, chunk)
        num_before_text = self._choices[chunk.choice].num_before_text
        return [event for piece in pieces for event in self.items.add(piece, num_before_text)]

    def document(self, envelope: Data, usage: Usage) -> Data:
        """The completed response."""
        self.items.end()
        is_cut = self.items.is_cut
        details = {"reason": "max_output_tokens"} if is_cut else None
        end = {"status": "incomplete" if is_cut else "completed", "incomplete_details": details}
        return self.response(envelope) | end | {"output": self.items.output, "usage": _usage_data(usage)}

    def response(self, envelope: Data) -> Data:
        """The response before it has any output."""
        about = {"id": self.id, "object": "response", "created_at": envelope["created"], "model": envelope["model"]}
        state: Data = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
        return about | state | dict(self._echoed)

    def events(self, asked: ChatRequest, envelope: Data, usage: Usage) -> "ResponseEvents":
        """The response's events, item by item."""
        return ResponseEvents(self, envelope, usage)


class ResponseEvents:
    """A response's stream of numbered events, item by item.

    Args:
        call: makes the items.
        envelope: the response's id, model and time.
        usage: usage of the call.
    """

    def __init__(self, call: ResponsesCall, envelope: Data, usage: Usage) -> None:
        self._call = call
        self._envelope = envelope
        self._usage = usage
        self._num = 0

    def first(self) -> list[Data]:
        """Announce the response, without output."""
        self._call.first()
        begun = self._call.response(self._envelope)
        return self._numbered(
            [{"type": f"response.{state}", "response": begun} for state in ("created", "in_progress")]
        )

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[Data]:
        """Events for a chunk's additions."""
        return self._numbered(self._call.feed(at, chunk))

    def last(self) -> list[Data]:
        """Events that end the response, with the whole of it."""
        ended = self._call.items.end()
        whole = self._call.document(self._envelope, self._usage)
        return self._numbered([*ended, {"type": f"response.{whole['status']}", "response": whole}])

    def _numbered(self, events: list[Data]) -> list[Data]:
        first, self._num = self._num, self._num + len(events)
        return [event | {"sequence_number": first + at} for at, event in enumerate(events)]


class Items:
    """A response's output as it grows; only the last item grows.

    Args:
        request_id: part of the items' ids.
    """

    def __init__(self, request_id: str) -> None:
        self.output: list[Data] = []
        self.is_cut = False
        self._request_id = request_id
        self._kind = ""  # of the item that grows
        self._call = ("", "")
        self._texts: list[str] = []
        self._logprobs: list[Data] = []
        self._unshown: list[Data] = []  # log-probabilities of tokens whose text has not arrived yet
        self._num_thought = 0  # tokens of thoughts, which are shown without log-probabilities

    def add(self, choice: Data, num_before_text: int = 0) -> list[Data]:
        """Return the events for a piece of the choice. The items do not depend on how the answer is cut into pieces.

        Args:
            choice: the piece.
            num_before_text: number of the answer's tokens that belong to thoughts.
        """
        self._unshown += (choice["logprobs"] or {}).get("content", ())
        if num_before_text and not self._num_thought:
            self._num_thought = num_before_text
            del self._unshown[:num_before_text]
        made = [event for step in steps(choice["delta"]) for event in self._step(step)]
        if choice["finish_reason"] is not None:
            self.is_cut = choice["finish_reason"] == "length"
        return made

    def end(self) -> list[Data]:
        """Return the final events; none at the second call."""
        if self._kind == "text":  # tokens without text, such as the EOS token
            self._logprobs += self._unshown
            self._unshown = []
        return self._close("incomplete" if self.is_cut else "completed")

    def _step(self, step: ChatStep) -> list[Data]:
        if step.kind == "call":
            return self._open("call", step.call)
        if step.kind == "arguments":
            self._texts.append(step.text)
            return [self._event("response.function_call_arguments.delta", {"delta": step.text})]
        opened = [] if self._kind == step.kind else self._open(step.kind)
        self._texts.append(step.text)
        if step.kind == "thought":
            return [*opened, self._event("response.reasoning_text.delta", {"content_index": 0, "delta": step.text})]
        logprobs, self._unshown = self._unshown, []
        self._logprobs += logprobs
        more = {"content_index": 0, "delta": step.text, "logprobs": logprobs}
        return [*opened, self._event("response.output_text.delta", more)]

    def _open(self, kind: str, call: tuple[str, str] = ("", "")) -> list[Data]:
        closed = self._close("completed")
        self._kind, self._call = kind, call
        made = [*closed, self._whole("response.output_item.added", self._item("in_progress"))]
        if kind != "call":
            made.append(self._event("response.content_part.added", {"content_index": 0, "part": self._part()}))
        return made

    def _close(self, status: str) -> list[Data]:
        kind, text = self._kind, "".join(self._texts)
        if not kind:
            return []
        if kind == "call":
            called = {"name": self._call[1], "arguments": text}
            made = [self._event("response.function_call_arguments.done", called)]
        else:
            more = {"logprobs": self._logprobs} if kind == "text" else {}
            done = "output_text" if kind == "text" else "reasoning_text"
            made = [self._event(f"response.{done}.done", {"content_index": 0, "text": text} | more)]
            made.append(self._event("response.content_part.done", {"content_index": 0, "part": self._part()}))
        item = self._item(status)
        made.append(self._whole("response.output_item.done", item))
        self.output.append(item)
        self._kind, self._texts, self._logprobs = "", [], []
        return made

    @property
    def _id(self) -> str:
        return f"{_PREFIXES[self._kind]}_{self._request_id}_{len(self.output)}"

    def _event(self, kind: str, more: Data) -> Data:
        return {"type": kind, "output_index": len(self.output), "item_id": self._id} | more

    def _whole(self, kind: str, item: Data) -> Data:
        return {"type": kind, "output_index": len(self.output), "item": item}

    def _part(self) -> Data:
        text = "".join(self._texts)
        if self._kind == "thought":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _item(self, status: str) -> Data:
        about = {"id": self._id, "status": status}
        if self._kind == "call":
            id_, name = self._call
            called = {"call_id": id_, "name": name, "arguments": "".join(self._texts)}
            return about | {"type": "function_call"} | called
        content = [self._part()] if self._texts else []
        if self._kind == "thought":
            return about | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return about | {"type": "message", "role": "assistant", "content": content}


class Responses(Chats):
    """Serves `/v1/responses`."""

    kind = ResponsesRequest
    manner = ResponsesManner(
        names_events=True,
        done=b"",
        renamed=ResponsesRequest.renamed,
    )

    def call(self, asked: ChatRequest, understood: Understood) -> ResponsesCall:
        """Make the call for a request."""
        return ResponsesCall(asked, self.front, understood)


def _usage_data(usage: Usage) -> Data:
    used = usage.as_data()
    thought = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": used["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": used["total_tokens"],
    }
