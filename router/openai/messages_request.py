"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.core.requests.answer_structure import TOOL_NAME
from baton.router.openai.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, JsonObject, Name, StopStrings, Text
from baton.router.openai.options import Wire
from baton.router.openai.translated import Translated

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(Wire):
    """A block of a system prompt or of a tool's result; only text is read."""

    type: Name
    text: Text | None = None


class Block(TextBlock):
    """A block of a message; which fields it has depends on its type."""

    thinking: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: Name | None = None
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class Turn(Wire):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class ClientTool(Wire):
    """What may be called; tools that a server would run are not offered."""

    type: Name | None = None
    name: str = Field(pattern=TOOL_NAME, max_length=64)
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

    model: Name | None = None
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def data(self) -> dict[str, Any]:
        """The chat's body."""
        messages = [] if self.system is None else [{"role": "system", "content": _texts(self.system, "system")}]
        for at, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{at}]")
        last, choice = messages[-1], self.tool_choice
        goes_on = last["role"] == "assistant" and "tool_calls" not in last
        asked = self.output_config
        return {
            "model": self.model,
            "messages": messages,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": None if choice is None else _tool_choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": self._variables(),
            "response_format": None if asked is None or asked.format is None else _format(asked.format),
            "reasoning_effort": None if asked is None else asked.effort,
            "add_generation_prompt": False if goes_on else None,
            "continue_final_message": True if goes_on else None,
        }

    def _variables(self) -> Any:
        given = (self.model_extra or {}).get("chat_template_kwargs")
        if not isinstance(given, dict | None):
            return given  # it is refused
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
        """The chat's body."""
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return super().data() | same | {"stop": self.stop_sequences}


def _messages(turn: Turn, field: str) -> list[dict[str, Any]]:
    """What one message is among those of a chat: results of tools are messages of their own there."""
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


def _result(block: Block, field: str) -> dict[str, Any]:
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
