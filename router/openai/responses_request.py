"""The body of `/v1/responses`."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.router.openai.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, JsonObject, Name, Text
from baton.router.openai.options import Wire
from baton.router.openai.translated import Translated

MAX_INCLUDED: Final = 64
MAX_METADATA: Final = 16
MAX_METADATA_LEN: Final = 512
LOGPROBS: Final = "message.output_text.logprobs"
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_FROM_CHAT: Final = ("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls")


class Part(Wire):
    """One part of an item's content; only text is read."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


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
    background: Literal[False] | None = None  # what follows asks for a store, which there is not
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None

    def data(self) -> dict[str, Any]:
        """The chat's body."""
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
        """What the response repeats: nothing that may be long."""
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
    """Makes messages of items: a thought, a text and calls that follow each other are one message of the assistant."""

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
            parts = item.content if item.content is not None else item.summary or ""
            content = _content(parts, field)
            self._new()["reasoning_content"] = (
                content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            )
        else:
            message = f"{field}: an item of type {kind[:40]!r} with these fields cannot be read"
            raise InvalidRequest(message, field="input")

    def _last(self) -> dict[str, Any]:
        return self._made[-1] if self._made and self._made[-1]["role"] == "assistant" else {}

    def _new(self) -> dict[str, Any]:
        self._made.append({"role": "assistant", "content": ""})
        return self._made[-1]


def _content(content: str | list[Part], field: str) -> str | list[dict[str, Any]]:
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
