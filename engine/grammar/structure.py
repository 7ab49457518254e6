"""The grammar of an answer's structure: thoughts, tool calls and text, in the words of the `llguidance` library.

The library reads text in lexemes and takes the longest, so that rules that may begin alike are kept apart by what their
terminals exclude: a free text holds no `<tool_call>`, and one that is bound by a regex does not begin with a tag. A
lexeme up to a tag is lazy: it ends with the first.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from baton.core.requests.answer_structure import CALL, END_THINK, THINK, AnswerStructure, CallableTool, Calls, Thought

MAX_GAP: Final = 2  # newlines between a thought and what follows
# A parameter that is a string is written as it is, so that only these say nothing that its characters must follow.
_NOTES: Final = frozenset(("type", "title", "description", "default", "examples", "deprecated"))
_TOP: Final = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_DEFINITIONS: Final = ("$defs", "definitions")
_KEY: Final = re.compile(r"[^\s<>][^\r\n<>]{0,126}[^\s<>]|[^\s<>]")
_END_PARAMETER: Final = "</parameter>"


def structure_text(structure: AnswerStructure, part_text: Callable[[str, str], str], options: str) -> str:
    """A structure in the library's words: a list of grammars, of which the first refers to the others.

    Args:
        structure: what an answer is made of.
        part_text: a grammar of one kind, in the library's words.
        options: of each grammar.

    Raises:
        InvalidGrammar: a schema or grammar in it cannot be said.
    """
    return _Writer(structure, part_text).written(options)


class _Writer:
    def __init__(self, structure: AnswerStructure, part_text: Callable[[str, str], str]) -> None:
        self._structure = structure
        self._part_text = part_text
        self._names: dict[str, str] = {}  # of grammars, by their text
        self._rules: list[str] = []

    def written(self, options: str) -> str:
        """All grammars."""
        structure = self._structure
        thought = {
            Thought.NONE: "",
            Thought.OPEN: "thought GAP?",
            Thought.OPTIONAL: f"({_quoted(THINK)} thought GAP?)?",
        }[structure.thought]
        if structure.thought is not Thought.NONE:
            self._rules.append(f"thought[lazy]: /(?s:.*){_pattern(END_THINK)}/")
        if structure.calls is not Calls.NONE:
            self._add_calls()
        if structure.calls is Calls.AUTO and structure.text is None:
            start = self._free()
        else:
            if thought:
                self._rules.append(f"GAP: /\\n{{1,{MAX_GAP}}}/")
            bound = [] if structure.calls is Calls.NONE else ["calls"]
            bound += [] if structure.text is None else [self._form(*structure.text)]
            start = f"{thought} ({' | '.join(bound)})"
        top = "\n".join([f"start: {start}", *self._rules, options])
        named = [{"name": name, "lark_grammar": text} for text, name in self._names.items()]
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": top}, *named]})

    def _free(self) -> str:
        """Calls among any text."""
        has_tag = f"(?s:.*){_pattern(CALL)}"
        self._rules += [f"opening[lazy]: /{has_tag}/", f"TEXT: /(?s:.+)/ & ~/{has_tag}(?s:.*)/"]
        many = "(opening call)*" if self._structure.parallel else "(opening call)?"
        if self._structure.thought is not Thought.OPTIONAL:
            thought = "thought " if self._structure.thought is Thought.OPEN else ""
            return f"{thought}{many} TEXT?"
        thinks = f"~/{_pattern(THINK)}(?s:.*)/"
        self._rules += [
            "first_opening[lazy]: FIRST_OPENING",
            f"FIRST_OPENING: /{has_tag}/ & {thinks}",
            f"FIRST_TEXT: /(?s:.+)/ & ~/{has_tag}(?s:.*)/ & {thinks}",
        ]
        more = "(opening call)* " if self._structure.parallel else ""
        return f"{_quoted(THINK)} thought {many} TEXT? | first_opening call {more}TEXT? | FIRST_TEXT?"

    def _add_calls(self) -> None:
        opened = f"{_quoted(CALL)} call"
        more = f' ("\\n" {opened})*' if self._structure.parallel else ""
        tools = [self._tool(at, tool) for at, tool in enumerate(self._structure.tools)]
        self._rules += [
            f"calls: {opened}{more}",
            'call: "\\n"? tool "\\n"? "</tool_call>"',
            f"tool: {' | '.join(f'tool{at}' for at in range(len(tools)))}",
            *(f"tool{at}: {rule}" for at, rule in enumerate(tools)),
        ]

    def _tool(self, at: int, tool: CallableTool) -> str:
        if self._structure.tagged:
            rule = self._tagged(at, tool)
            if rule is not None:
                return rule
        if tool.parameters is None:
            arguments = self._named("json_object", "")
        else:
            arguments = self._named("json_schema", json.dumps(tool.parameters, ensure_ascii=False))
        begin = f'{{"name": {_quoted(tool.name)}, "arguments": '
        return f'{_quoted(begin)} {arguments} "}}"'

    def _tagged(self, at: int, tool: CallableTool) -> str | None:
        """A call whose arguments are tags; None where these could not keep to the schema."""
        begin = _quoted(f"<function={tool.name}>")
        if tool.parameters is None:
            self._rules.append(f"any{at}[lazy]: /(?s:.*)<\\/function>/")
            return f"{begin} any{at}"
        if not isinstance(tool.parameters, Mapping) or not _can_be_tagged(tool.parameters):
            return None
        rule = f'{begin} "\\n"'
        required = tool.parameters.get("required", ())
        for key, schema in tool.parameters.get("properties", {}).items():
            value = self._value(schema, tool.parameters)
            if value is None:
                return None
            parameter = f'{_quoted(f"<parameter={key}>")} "\\n" {value} "\\n"'
            rule += f" {parameter}" if key in required else f" ({parameter})?"
        return f'{rule} "</function>"'

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str | None:
        """A parameter's value and the tag behind it."""
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            options = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if not schema.keys() <= _NOTES | {"enum", "const"} or ("enum" in schema and "const" in schema):
                return None
            if options is None:
                rule = f"value[lazy]: /(?s:.*){_pattern(_END_PARAMETER)}/"
                self._rules += [] if rule in self._rules else [rule]
                return "value"
            if not all(isinstance(one, str) and one == one.strip() and _END_PARAMETER not in one for one in options):
                return None
            return f'({" | ".join(map(_quoted, options))}) "\\n" {_quoted(_END_PARAMETER)}'
        references = list(_references(schema))
        brought = tuple(f"#/{name}/" for name in _DEFINITIONS)
        if not isinstance(schema, Mapping | bool) or not all(one.startswith(brought) for one in references):
            return None  # in a grammar of its own it could not find them
        definitions = {name: root[name] for name in _DEFINITIONS if references and name in root}
        whole = schema if isinstance(schema, bool) else definitions | dict(schema)
        named = self._named("json_schema", json.dumps(whole, ensure_ascii=False))
        return f'{named} "\\n" {_quoted(_END_PARAMETER)}'

    def _form(self, kind: str, text: str) -> str:
        """What a text matches, where it is no call."""
        if kind != "regex":
            return self._named(kind, text)
        written = self._part_text(kind, text).partition("\n")[0].removeprefix("start: ")
        tags = [CALL] if self._structure.calls is not Calls.NONE else []
        tags += [THINK] if self._structure.thought is Thought.OPTIONAL else []
        excluded = "".join(f" & ~/{_pattern(tag)}(?s:.*)/" for tag in tags)
        self._rules.append(f"FORM: {written}{excluded}")
        return "FORM"

    def _named(self, kind: str, text: str) -> str:
        written = self._part_text(kind, text)
        name = self._names.setdefault(written, f"part{len(self._names)}")
        return f"@{name}"


def _can_be_tagged(parameters: Mapping[str, Any]) -> bool:
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    return (
        parameters.keys() <= _TOP
        and parameters.get("type", "object") == "object"
        and parameters.get("additionalProperties", False) in (False, True)
        and isinstance(properties, Mapping)
        and all(_KEY.fullmatch(key) for key in properties)
        and isinstance(required, list)
        and all(key in properties for key in required)
    )


def _references(schema: Any) -> Iterator[str]:
    """To whatever is elsewhere."""
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        yield from _references(list(schema.values()))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(tag: str) -> str:
    """A tag in a regular expression between slashes."""
    return tag.replace("/", "\\/")
