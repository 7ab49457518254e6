"""A model's chat template, which turns messages into the text of a prompt as Hugging Face's tokenizers do.

The environment is that of `transformers.apply_chat_template` (sandboxed jinja2, trimmed blocks, a `tojson` that escapes
nothing, `raise_exception`, `strftime_now`, `generation`), without transformers, which would take half a gigabyte.
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
TOOL_USE: Final = "tool_use"  # a model may have a separate template for conversations with tools
_MORE_TEMPLATES: Final = "additional_chat_templates"  # the folder where transformers 5 saves all but the default
RESERVED: Final = frozenset(("messages", "tools", "add_generation_prompt", "chat_template", *SPECIAL_TOKENS))
_MARK: Final = "\x00baton-final-message\x00"


class ChatTemplate:
    """One template, or two: for conversations with and without tools.

    Args:
        sources: jinja text by name; always has "default".
        special_tokens: `bos_token` and the like, for templates to read.
        tool_call_parser: the form of tool calls; `auto` detects it from the templates.

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
        """Whether the model writes thoughts."""
        return self.thought_form is not None

    @classmethod
    def load(
        cls, directory: Path, given: str = "", tool_call_parser: ToolCallParserName = "auto"
    ) -> "ChatTemplate | None":
        """Load the template that the operator names, else the model's own; None if there is neither.

        Args:
            directory: the model's directory.
            given: a file, `chatml` for the built-in template, or empty.
            tool_call_parser: see `ChatTemplate`.

        Raises:
            ConfigInvalid: the named file cannot be read, or is not a template.
            ModelFileDamaged: the model's own file is not a template.
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
        """Render the prompt of a conversation.

        Args:
            messages: as `Message.as_data` makes them.
            tools: as `Tool.as_data` makes them; None and an empty list are the same to a template.
            add_generation_prompt: end with the start of the assistant's turn.
            continue_final_message: leave the last message open instead.
            variables: additional variables for the template.

        Raises:
            InvalidRequest: the template refuses the conversation, or a variable has a reserved name.
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
    """The tag `{% generation %}` ... `{% endgeneration %}`, which marks the assistant's tokens for training.

    The text between is rendered unchanged; variables set there are not visible after it, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 (its base declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _call_form(text: str, parser: ToolCallParserName) -> CallForm:
    """Detect the form of tool calls from the templates; templates that show no known form get Hermes'."""
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
    is_llama_json = "<|start_header_id|>" in text and '"parameters": ' in text  # Llama 3.2's template contains no tag
    if CALL not in text and (PYTHON_TAG in text or is_llama_json):
        return CallForm.LLAMA3_JSON
    return CallForm.HERMES


def _without_empty_text(message: dict[str, Any]) -> dict[str, Any]:
    """Replace empty content by None: DeepSeek's first templates write calls only without content."""
    return message | {"content": None} if message.get("tool_calls") and message.get("content") == "" else message


def _thought_form(text: str) -> ThoughtForm | None:
    """Detect the form of thoughts.

    A template that only drops old thoughts contains just the closing tag (DeepSeek-R1).
    """
    for form in (ThoughtForm.BRACKETS, ThoughtForm.TAGS):
        if form in text or form.end in text:
            return form
    return None


def _sources(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jinja":
        second = path.parent / _MORE_TEMPLATES / f"{TOOL_USE}.jinja"
        return {"default": text} | ({TOOL_USE: second.read_text(encoding="utf-8")} if second.is_file() else {})
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
