"""A model's chat template: messages to the text of a prompt, as Hugging Face's tokenizers render it.

The environment is that of `transformers.apply_chat_template` (sandboxed jinja2, blocks trimmed, `tojson` that escapes
nothing, `raise_exception`, `strftime_now`, `generation`), without transformers, which would cost half a gigabyte.
"""

import datetime
import json
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import ConfigInvalid, InvalidRequest, ModelFileDamaged
from baton.core.requests.answer_structure import (
    ARG_KEY,
    ARGS,
    CALL,
    DEEPSEEK_TAGS,
    FENCE,
    KIMI_TAGS,
    PYTHON_TAG,
    TOOL_CALLS,
    CallForm,
    ThoughtForm,
    ToolCallParserName,
)
from baton.core.requests.special_tokens import SPECIAL_TOKENS, special_tokens

TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
BUILT_IN: Final = "chatml"
TOOL_USE: Final = "tool_use"  # a model may have a template of its own for conversations with tools
RESERVED: Final = frozenset(("messages", "tools", "add_generation_prompt", "chat_template", *SPECIAL_TOKENS))
_MARK: Final = "\x00baton-final-message\x00"


class ChatTemplate:
    """One template, or one for conversations with tools and one for those without.

    Args:
        sources: jinja text by name; "default" is always there.
        special_tokens: what templates may read: `bos_token` and its like.
        tool_call_parser: the form of tool calls; `auto`: the one that the templates speak of.

    Attributes:
        call_form: how the model writes tool calls.
        thought_form: how it writes thoughts; None if it has none.
    """

    def __init__(
        self,
        sources: dict[str, str],
        special_tokens: dict[str, str] | None = None,
        tool_call_parser: ToolCallParserName = "auto",
    ) -> None:
        extensions = [loopcontrols, _Generation]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.sources = sources
        self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        self.special_tokens = special_tokens or {}
        self.tool_call_parser = tool_call_parser
        self.call_form = _call_form("\n".join(sources.values()), tool_call_parser)
        self.thought_form = _thought_form("\n".join(sources.values()))

    @property
    def thinks(self) -> bool:
        """Whether the model has thoughts."""
        return self.thought_form is not None

    @classmethod
    def load(
        cls, directory: Path, given: str = "", tool_call_parser: ToolCallParserName = "auto"
    ) -> "ChatTemplate | None":
        """The template an operator names, or else the model's own; None where there is neither.

        Args:
            directory: the model's.
            given: a file, `chatml` for the built-in one, or nothing.
            tool_call_parser: see `ChatTemplate`.

        Raises:
            ConfigInvalid: the file cannot be read, or is no template.
            ModelFileDamaged: the model's own is none.
        """
        tokens = special_tokens(directory)
        if given:
            path = Path(__file__).with_name("chatml.jinja") if given == BUILT_IN else Path(given).expanduser()
            try:
                return cls({"default": path.read_text(encoding="utf-8")}, tokens, tool_call_parser)
            except (OSError, ValueError, RecursionError, TemplateError) as error:
                raise ConfigInvalid(f"chat_template: {given}: {error}", keys=["chat_template"]) from error
        for name in TEMPLATE_FILES:
            path = directory / name
            if not path.is_file():
                continue
            try:
                sources = _sources(path)
                if sources:
                    return cls(sources, tokens, tool_call_parser)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, TemplateError) as error:
                raise ModelFileDamaged(f"{path} holds no usable chat template: {error}", path=str(path)) from error
        return None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: as `Message.as_data` makes them.
            tools: likewise; None or none are the same to a template.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: leave the last message open instead.
            variables: further ones, which the template may read.

        Raises:
            InvalidRequest: the template refuses the conversation, or a variable is one of its own.
        """
        clash = sorted(RESERVED & (variables or {}).keys())
        if clash:
            raise InvalidRequest(f"chat_template_kwargs: {clash[0]} is set otherwise", field="chat_template_kwargs")
        if continue_final_message:
            if add_generation_prompt:
                message = "continue_final_message and add_generation_prompt exclude each other"
                raise InvalidRequest(message, field="continue_final_message")
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + _MARK}]
        if self.call_form in (CallForm.DEEPSEEK_V3, CallForm.DEEPSEEK_V31):
            messages = [_without_empty_text(message) for message in messages]
        template = self._templates.get(TOOL_USE if tools else "default") or self._templates["default"]
        values = self.special_tokens | (variables or {}) | {"messages": messages, "tools": tools or None}
        try:
            text = template.render(add_generation_prompt=add_generation_prompt, **values)
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                f"the chat template refuses this conversation: {error}"[:500], field="messages"
            ) from error
        if continue_final_message:
            text, mark, _ = text.rpartition(_MARK)
            if not mark:
                message = "the chat template changes the final message, so it cannot be continued"
                raise InvalidRequest(message, field="continue_final_message")
        return text


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, between which training looks for the assistant's tokens.

    What is between them is written as it is; what it sets is not seen behind it, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 (its base declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _call_form(text: str, parser: ToolCallParserName) -> CallForm:
    """What templates show a model of calls; those that show none of these forms get Hermes'."""
    says_mistral = CallForm.MISTRAL_ARGS if ARGS in text else CallForm.MISTRAL
    if parser != "auto":
        return says_mistral if parser == "mistral" else CallForm(parser)
    if TOOL_CALLS in text:
        return says_mistral
    if KIMI_TAGS[0] in text:
        return CallForm.KIMI_K2
    if DEEPSEEK_TAGS[0] in text:
        return CallForm.DEEPSEEK_V3 if FENCE in text else CallForm.DEEPSEEK_V31
    if ARG_KEY in text:
        return CallForm.GLM45
    if "<function=" in text:
        return CallForm.QWEN3_CODER
    is_llama_json = "<|start_header_id|>" in text and '"parameters": ' in text  # 3.2 names no tag
    if CALL not in text and (PYTHON_TAG in text or is_llama_json):
        return CallForm.LLAMA3_JSON
    return CallForm.HERMES


def _without_empty_text(message: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek's first templates write calls only where the content is none."""
    return message | {"content": None} if message.get("tool_calls") and message.get("content") == "" else message


def _thought_form(text: str) -> ThoughtForm | None:
    """A template that only drops old thoughts names the closing tag alone (DeepSeek-R1)."""
    for form in (ThoughtForm.BRACKETS, ThoughtForm.TAGS):
        if form in text or form.end in text:
            return form
    return None


def _sources(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jinja":
        return {"default": text}
    found = json.loads(text).get("chat_template")
    if not found:
        return {}
    if isinstance(found, str):
        return {"default": found}
    named = {str(item["name"]): str(item["template"]) for item in found}
    return {"default": next(iter(named.values()))} | named


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
