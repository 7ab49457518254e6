"""The structure of an answer: thoughts, tool calls and text, as one grammar of kind `structure`.

The router writes a structure for each chat whose answer is constrained and may hold more than one of these; the engine
turns it into a grammar (`engine.grammar.text`). Its JSON form is part of the gRPC interface (`Grammar.structure`).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from baton.core.errors import InvalidGrammar

STRUCTURE: Final = "structure"  # name of this kind of grammar
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ARG_KEY, END_ARG_KEY = "<arg_key>", "</arg_key>"
ARG_VALUE, END_ARG_VALUE = "<arg_value>", "</arg_value>"
# Tags of DeepSeek and Kimi: start of the section and of a call, separator of a call's head and arguments, end of the
# call and of the section.
DEEPSEEK_TAGS: Final = tuple(
    f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")  # a fullwidth bar, and the tokenizer's mark for a space
    for words in ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")
)
KIMI_TAGS: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
FENCE, END_FENCE = "```json", "```"  # around DeepSeek-V3's arguments
BARE_KEYS: Final = ("name", "parameters", "arguments", "type", "id")  # a call without a tag starts with one of these
MAX_TOOLS: Final = 1024
TOOL_NAME: Final = r"^[A-Za-z0-9_.:-]{1,128}$"  # Anthropic's limit, which MCP tools rely on; OpenAI's is 64
_KEYS: Final = frozenset(("thought", "thought_form", "calls", "form", "tools", "parallel", "tokens", "text"))


class Thought(StrEnum):
    """Whether the answer begins with a thought, which is free text up to its closing tag."""

    NONE = "none"
    OPTIONAL = "optional"  # if the answer begins with the opening tag
    OPEN = "open"  # the prompt ends with the opening tag


class ThoughtForm(StrEnum):
    """The tag that opens a thought."""

    TAGS = "<think>"  # Qwen, DeepSeek, GLM
    BRACKETS = "[THINK]"  # Magistral

    @property
    def end(self) -> str:
        """The closing tag."""
        return f"{self[0]}/{self[1:]}"

    @property
    def marks(self) -> tuple[str, ...]:
        """Both tags; a tokenizer may have a single token for each."""
        return (self.value, self.end)


class Calls(StrEnum):
    """Whether the answer contains tool calls."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # calls only


ToolCallParserName = Literal[
    "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "glm45", "deepseek_v3", "deepseek_v31", "kimi_k2"
]


class CallForm(StrEnum):
    """How a call is written."""

    HERMES = "hermes"  # <tool_call>{"name", "arguments"}</tool_call>
    QWEN3_CODER = "qwen3_coder"  # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    LLAMA3_JSON = "llama3_json"  # {"name", "parameters"}, further ones after a semicolon; or the same after a tag
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name", "arguments"}, ...]
    MISTRAL_ARGS = "mistral_args"  # [TOOL_CALLS]NAME[ARGS]{...}, repeated for each call
    GLM45 = "glm45"  # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    DEEPSEEK_V3 = "deepseek_v3"  # in a section, per call: function, tool_sep, NAME and a fence of {...}
    DEEPSEEK_V31 = "deepseek_v31"  # in a section, per call: NAME, tool_sep and {...}
    KIMI_K2 = "kimi_k2"  # in a section, per call: functions.NAME:INDEX and {...}

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts around calls for which a tokenizer may have single tokens; a call begins with the first.

        In Llama's form a call may also begin without it.
        """
        match self:
            case CallForm.LLAMA3_JSON:
                return (PYTHON_TAG,)
            case CallForm.MISTRAL | CallForm.MISTRAL_ARGS:
                return (TOOL_CALLS, CALL_ID, ARGS)
            case CallForm.GLM45:
                return (CALL, END_CALL, ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE)
            case CallForm.DEEPSEEK_V3 | CallForm.DEEPSEEK_V31:
                return DEEPSEEK_TAGS
            case CallForm.KIMI_K2:
                return KIMI_TAGS
        return (CALL, END_CALL)

    @property
    def is_section(self) -> bool:
        """Whether all calls are in one section; `marks` then correspond to the five of `DEEPSEEK_TAGS`."""
        return self in (CallForm.DEEPSEEK_V3, CallForm.DEEPSEEK_V31, CallForm.KIMI_K2)


MARKS: Final = frozenset(mark for form in (*CallForm, *ThoughtForm) for mark in form.marks)


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A function that may be called.

    Attributes:
        name: the function's name.
        parameters: JSON Schema of its arguments; None: any JSON object.
    """

    name: str
    parameters: Mapping[str, Any] | bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStructure:
    """An optional thought, then calls of these tools or a text.

    Attributes:
        thought: whether a thought comes first.
        thought_form: tags around the thought.
        calls: whether there are calls.
        tools: functions that may be called.
        parallel: whether more than one call is allowed.
        form: how calls are written. A call whose schema cannot be expressed in the tags of Qwen3-Coder or GLM is
            written in Hermes' form.
        tokens: ids of those `MARKS` that the tokenizer's vocabulary has as single tokens; the others are spelled.
        text: kind and text of the grammar that the answer's text matches if there are no calls; None: any text, which
            may contain calls.
    """

    thought: Thought = Thought.NONE
    thought_form: ThoughtForm = ThoughtForm.TAGS
    calls: Calls = Calls.NONE
    tools: tuple[CallableTool, ...] = ()
    parallel: bool = True
    form: CallForm = CallForm.HERMES
    tokens: Mapping[str, int] = field(default_factory=dict)
    text: tuple[str, str] | None = None

    def to_json(self) -> str:
        """Serialize for `from_json`; equal structures give equal texts."""
        data: dict[str, Any] = {"thought": self.thought, "thought_form": self.thought_form, "calls": self.calls}
        if self.tools:
            data["tools"] = [
                {"name": tool.name} | ({} if tool.parameters is None else {"parameters": tool.parameters})
                for tool in self.tools
            ]
            data |= {"parallel": self.parallel, "form": self.form}
        if self.tokens:
            data["tokens"] = dict(sorted(self.tokens.items()))
        if self.text is not None:
            data["text"] = {"kind": self.text[0], "text": self.text[1]}
        return json.dumps(data, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "AnswerStructure":
        """Parse a structure from a client. Schemas and grammars in it are not checked.

        Raises:
            InvalidGrammar: the text is not a valid structure.
        """
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refusal(str(error)) from error
        _require(isinstance(data, dict), "is no object")
        unknown = sorted(data.keys() - _KEYS)
        _require(not unknown, f"has no {''.join(unknown[:1])[:40]!r}")
        try:
            thought, calls = Thought(data.get("thought", "none")), Calls(data.get("calls", "none"))
            thought_form = ThoughtForm(data.get("thought_form", ThoughtForm.TAGS))
            form = CallForm(data.get("form", CallForm.HERMES))
        except ValueError as error:
            raise _refusal(str(error)) from error
        tools = data.get("tools", [])
        _require(isinstance(tools, list) and len(tools) <= MAX_TOOLS, f"tools is no list of at most {MAX_TOOLS}")
        _require(bool(tools) == (calls is not Calls.NONE), "tools and calls go together")
        parallel, tokens = data.get("parallel", True), data.get("tokens", {})
        _require(isinstance(parallel, bool), "parallel is true or false")
        _require(isinstance(tokens, dict) and tokens.keys() <= MARKS, "tokens are of other texts than those of calls")
        _require(all(type(token_id) is int and token_id >= 0 for token_id in tokens.values()), "tokens are token ids")
        found = None if data.get("text") is None else _text(data["text"])
        _require(found is not None or calls is not Calls.NONE, "has neither calls nor a text")
        _require(found is None or calls is not Calls.REQUIRED, "calls are required, so that there is no text")
        return cls(
            thought=thought,
            thought_form=thought_form,
            calls=calls,
            tools=tuple(map(_tool, tools)),
            parallel=parallel,
            form=form,
            tokens=tokens,
            text=found,
        )


def _tool(data: Any) -> CallableTool:
    _require(isinstance(data, dict) and data.keys() <= {"name", "parameters"}, "a tool has a name and parameters")
    name, parameters = data.get("name"), data.get("parameters")
    if not isinstance(name, str) or re.fullmatch(TOOL_NAME, name) is None:
        raise _refusal("a tool has no usable name")
    _require(parameters is None or isinstance(parameters, dict | bool), f"{name}: parameters are no JSON Schema")
    return CallableTool(name, parameters)


def _text(data: Any) -> tuple[str, str]:
    _require(isinstance(data, dict) and data.keys() <= {"kind", "text"}, "text has a kind and a text")
    kind, text = data.get("kind"), data.get("text", "")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise _refusal("text has a kind and a text")
    _require(kind != STRUCTURE, "its text is no structure")
    return kind, text


def _refusal(why: str) -> InvalidGrammar:
    return InvalidGrammar(f"{STRUCTURE}: {why}"[:300], kind=STRUCTURE)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _refusal(why)


JSON_OBJECT: Final = "json_object"
GRAMMAR_KINDS: Final = ("json_schema", "regex", "grammar", JSON_OBJECT, STRUCTURE)
MAX_GRAMMAR_BYTES: Final = 64 << 10
# Compiling an object's optional properties takes time quadratic in their number.
MAX_OBJECT_KEYS: Final = 512
INLINE_JSON: Final = "%json"  # how a grammar embeds a schema, whose keys are not counted
MAX_INLINE_JSON_BYTES: Final = 8 << 10
LIBRARY_KEY: Final = "x-guidance"  # with this key, a schema could set options of the library that compiles it


def check_grammar(kind: str, text: str) -> None:
    """Check a grammar without compiling it.

    Raises:
        InvalidGrammar: the kind is unknown, the text is missing, too long or nested too deeply, or it is no JSON
            schema.
    """
    if kind not in GRAMMAR_KINDS:
        raise InvalidGrammar(f"grammar: {kind[:40]!r} is none of {', '.join(GRAMMAR_KINDS)}", kind=kind[:40])
    if kind == JSON_OBJECT:
        _require_valid(text == "", kind, "takes no text")
        return
    _require_valid(text != "", kind, "is empty")
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    _require_valid(num_bytes <= MAX_GRAMMAR_BYTES, kind, f"has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES}")
    _require_valid(_is_unicode(text), kind, "is not valid UTF-8")
    if kind == "json_schema":
        _check_schema(text)
    if kind == STRUCTURE:
        _check_structure(AnswerStructure.from_json(text))
    if kind == "grammar" and INLINE_JSON in text:
        why = f"holds {INLINE_JSON} and has {num_bytes} bytes; at most {MAX_INLINE_JSON_BYTES} of those"
        _require_valid(num_bytes <= MAX_INLINE_JSON_BYTES, kind, why)


def _check_schema(text: str) -> None:
    try:
        schema: Any = json.loads(
            text, parse_constant=_no_constant, parse_int=_integer, parse_float=_finite, object_pairs_hook=_small_object
        )
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"json_schema: {error}"[:300], kind="json_schema") from error
    _require_valid(isinstance(schema, dict | bool), "json_schema", "is neither an object nor a boolean")
    _require_valid(schema is not False, "json_schema", "allows nothing")
    _require_valid(
        not isinstance(schema, dict) or LIBRARY_KEY not in schema,
        "json_schema",
        f"holds {LIBRARY_KEY}, which is no keyword of JSON Schema",
    )


def _check_structure(structure: AnswerStructure) -> None:
    if structure.text is not None:
        check_grammar(*structure.text)
    for tool in structure.tools:
        if tool.parameters is None:
            continue
        try:
            check_grammar("json_schema", json.dumps(tool.parameters, ensure_ascii=False))
        except InvalidGrammar as error:
            raise InvalidGrammar(f"tool {tool.name}: {error.message}"[:300], kind=STRUCTURE) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _integer(digits: str) -> int:
    _finite(digits)
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is beyond the range of numbers")
    return number


def _small_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys; at most {MAX_OBJECT_KEYS}")
    return dict(pairs)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def _require_valid(holds: bool, kind: str, why: str) -> None:
    if not holds:
        raise InvalidGrammar(f"{kind}: {why}", kind=kind)
