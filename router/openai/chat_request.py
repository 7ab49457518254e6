"""Request models of `/v1/chat/completions`."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.core.errors import ConflictingOptions, InvalidRequest, InvalidSampling
from baton.core.requests.answer_structure import TOOL_NAME
from baton.proto import inference_pb2
from baton.router.openai.limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    JsonObject,
    Name,
    Text,
)
from baton.router.openai.options import MAX_TOP_LOGPROBS, CommonOptions, Wire

# Fields in which clients of older or other models send a message's content.
_UNREAD = {"function_call": "use tool_calls", "audio": "messages are text"}
NEED_CONTENT = ("system", "developer", "user", "tool")  # for other roles, the template decides


_SURROGATE = "\\ud"  # start of the escape of a lone surrogate, half of a character


class CallArguments(dict[str, Any]):
    """Arguments of a tool call for a template: an object, but JSON text where the template prints or concatenates it.

    Published templates do either; DeepSeek's append the arguments to a text.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, more: str) -> str:
        return str(self) + more

    def __radd__(self, before: str) -> str:
        return before + str(self)


class FunctionCall(Wire):
    """A call in an assistant's earlier message."""

    name: Name
    arguments: Text | None = None


class ToolCall(Wire):
    """Likewise, with its id."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Wire):
    """One part of a message's content; only text is read."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


class Message(Wire):
    """One message of the conversation."""

    role: Name
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    refusal: Text | None = None  # an assistant's content, if it refused to answer

    def as_data(self, field: str) -> dict[str, Any]:
        """Build what a template reads: content as one string, and a call's arguments as an object if they are one.

        Raises:
            InvalidRequest: content is missing, is not text, or is in a field that no template reads.
        """
        for name, why in _UNREAD.items():
            if (self.model_extra or {}).get(name) is not None:
                raise InvalidRequest(f"{field}: {name} is not supported: {why}", field="messages")
        if self.content is None and self.role in NEED_CONTENT:
            raise InvalidRequest(f"{field}: content is missing", field="messages")
        role = "system" if self.role == "developer" else self.role
        data: dict[str, Any] = {"role": role, "content": self._text(field)}
        if self.name is not None:
            data["name"] = self.name
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            data["reasoning_content"] = reasoning
        if self.tool_calls:
            data["tool_calls"] = [_call_data(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            data["tool_call_id"] = self.tool_call_id
        return data

    def _text(self, field: str) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        texts = []
        for part in self.content:
            text = part.refusal if part.type == "refusal" else part.text
            if part.type not in ("text", "refusal") or text is None:
                raise InvalidRequest(f"{field}: content of type {part.type[:40]!r} is not supported", field="messages")
            texts.append(text)
        return "\n".join(texts)


class Function(Wire):
    """What may be called."""

    name: str = Field(pattern=TOOL_NAME, max_length=128)
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> JsonObject:
        """Schema of its arguments: a function without `parameters` has none, as in OpenAI's reference."""
        if self.parameters is not None:
            return self.parameters
        return {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Wire):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: Function

    def as_data(self) -> dict[str, Any]:
        """Build what a template reads."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(Wire):
    """The name in a `tool_choice`."""

    name: Name


class NamedToolChoice(Wire):
    """A `tool_choice` that names its function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Wire):
    """Some of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedToolsChoice(Wire):
    """A `tool_choice` that leaves all tools in the prompt, and allows calls of some."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str:
    """Tell which form a `tool_choice` has, so that an error is about that form only."""
    if isinstance(value, dict):
        return "allowed_tools" if value.get("type") == "allowed_tools" else "function"
    return value.type if isinstance(value, NamedToolChoice | AllowedToolsChoice) else "word"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedToolChoice, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]


class ChatRequest(CommonOptions):
    """What it asks."""

    nothing_said: ClassVar[list[Any]] = [{"role": "user", "content": ""}]  # if the prompt is already rendered

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Name | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    def message_data(self) -> list[dict[str, Any]]:
        """Build the conversation for the template.

        Raises:
            InvalidRequest: a message is invalid.
        """
        return data_of(self.messages, "messages")

    def complete(self, sampling: inference_pb2.Sampling) -> inference_pb2.Sampling:
        """Add the options that only chat requests have.

        Raises:
            ConflictingOptions: two different limits, or `top_logprobs` without `logprobs`.
            InvalidSampling: a number is out of range.
        """
        limit = self.max_completion_tokens
        if limit is not None:
            if self.max_tokens is not None and self.max_tokens != limit:
                message = "max_tokens and max_completion_tokens differ; give the latter"
                raise ConflictingOptions(message, field="max_tokens")
            if not 1 <= limit < 1 << 31:
                raise InvalidSampling(f"max_completion_tokens = {limit}: out of range", field="max_completion_tokens")
            sampling.max_tokens = limit
        if self.top_logprobs and not self.logprobs:
            raise ConflictingOptions("top_logprobs need logprobs = true", field="top_logprobs")
        if self.logprobs:
            num_top = self.top_logprobs or 0
            if not 0 <= num_top <= MAX_TOP_LOGPROBS:
                message = f"top_logprobs = {num_top}: must be between 0 and {MAX_TOP_LOGPROBS}"
                raise InvalidSampling(message, field="top_logprobs")
            sampling.logprobs = num_top
        return sampling


def data_of(messages: Sequence[Message], field: str) -> list[dict[str, Any]]:
    """Build a conversation for the template.

    Raises:
        InvalidRequest: a message is invalid.
    """
    return [message.as_data(f"{field}[{at}]") for at, message in enumerate(messages)]


def _call_data(call: ToolCall) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    try:
        arguments = json.loads(text)
        if _SURROGATE in text.lower():
            json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # includes a lone surrogate, which cannot be encoded
        arguments = None
    # Arguments that the model wrote and that are no object go back to it unchanged.
    given = CallArguments(arguments) if isinstance(arguments, dict) else text
    function = {"name": call.function.name, "arguments": given}
    return {"id": call.id, "type": "function", "function": function}
