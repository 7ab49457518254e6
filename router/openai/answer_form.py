"""What a chat's answer may be: the thought, the tools and the format of its request as one grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.core.errors import InvalidRequest, InvalidText
from baton.core.requests.answer_structure import END_THINK, THINK, AnswerStructure, CallableTool, Calls, Thought
from baton.core.requests.grammar_check import JSON_OBJECT
from baton.proto import inference_pb2
from baton.router.openai.chat_request import AllowedToolsChoice, ChatRequest, Function, NamedToolChoice
from baton.router.openai.chat_template import ChatTemplate

_FIELD: Final = "tool_choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What `tools` and `tool_choice` say together.

    Attributes:
        calls: whether the answer may or must hold calls.
        functions: which may be called.
        is_restricted: some of the tools may not.
        parallel: more than one call.
    """

    calls: Calls
    functions: Sequence[Function] = ()
    is_restricted: bool = False
    parallel: bool = True


def tool_use(asked: ChatRequest) -> ToolUse:
    """Which calls a request allows.

    Raises:
        InvalidRequest: a choice among no tools, or of one that is not there.
    """
    choice, functions = asked.tool_choice, [tool.function for tool in asked.tools or ()]
    parallel = asked.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        named = _named(functions, [choice.function.name])
        return ToolUse(calls=Calls.REQUIRED, functions=named[:1], parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        allowed = _named(functions, [tool.function.name for tool in choice.allowed_tools.tools])
        return ToolUse(
            calls=Calls(choice.allowed_tools.mode),
            functions=allowed,
            is_restricted=len(allowed) < len(functions),
            parallel=parallel,
        )
    if choice == "required" and not functions:
        raise InvalidRequest("tool_choice is required, and there are no tools", field=_FIELD)
    if choice == "none" or not functions:
        return ToolUse(calls=Calls.NONE)
    calls = Calls.REQUIRED if choice == "required" else Calls.AUTO
    return ToolUse(calls=calls, functions=functions, parallel=parallel)


def thought_of(asked: ChatRequest, prompt: str, template: ChatTemplate | None) -> Thought:
    """Whether the answer to a prompt begins with a thought."""
    if template is None or not template.thinks:
        return Thought.NONE
    if is_open(prompt):
        return Thought.OPEN
    is_over = asked.continue_final_message or prompt.rstrip().endswith(END_THINK)
    return Thought.NONE if is_over else Thought.OPTIONAL


def is_open(prompt: str) -> bool:
    """Whether a prompt ends with the beginning of a thought."""
    return prompt.rstrip().endswith(THINK)


def bind(sampling: inference_pb2.Sampling, use: ToolUse, thought: Thought, *, tagged: bool) -> inference_pb2.Sampling:
    """Bind an answer to calls of the tools or a text of the format, if any of them is binding; thoughts are free.

    Args:
        sampling: its grammar is the format.
        use: of the tools.
        thought: whether one comes first.
        tagged: the model writes arguments as tags.

    Raises:
        InvalidText: a tool's schema is not Unicode text.
    """
    has_format = sampling.HasField("grammar")
    is_strict = any(function.strict for function in use.functions)
    if use.calls is Calls.NONE and (not has_format or thought is Thought.NONE):
        return sampling
    if use.calls is Calls.AUTO and not (has_format or use.is_restricted or is_strict):
        return sampling
    is_required = use.calls is Calls.REQUIRED
    structure = AnswerStructure(
        thought=thought,
        calls=use.calls,
        tools=tuple(
            CallableTool(function.name, function.parameters if function.strict or is_required else None)
            for function in use.functions
        ),
        parallel=use.parallel,
        tagged=tagged,
        text=_format(sampling.grammar) if has_format and not is_required else None,
    )
    try:
        sampling.grammar.structure = structure.to_json()
    except UnicodeEncodeError as error:
        raise InvalidText(f"tools: not valid UTF-8 at character {error.start}", field="tools") from error
    return sampling


def _format(grammar: inference_pb2.Grammar) -> tuple[str, str]:
    kind = grammar.WhichOneof("form") or JSON_OBJECT
    return kind, "" if kind == JSON_OBJECT else getattr(grammar, kind)


def _named(functions: Sequence[Function], names: Sequence[str]) -> list[Function]:
    known = {function.name for function in functions}
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise InvalidRequest(f"tool_choice: no tool is named {missing[:64]!r}", field=_FIELD)
    return [function for function in functions if function.name in names]
