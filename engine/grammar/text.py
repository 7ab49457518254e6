"""Writes grammars in the form that the `llguidance` library reads, and creates the library's matchers with limits.

Both the worker and the process that tries grammars first (`grammar.trial`) use this module, so it imports little. It
converts everything that the library raises during conversion or compilation to `InvalidGrammar`.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import (
    ARG_KEY,
    ARG_VALUE,
    ARGS,
    BARE_KEYS,
    CALL_ID,
    END_ARG_KEY,
    END_ARG_VALUE,
    END_CALL,
    END_FENCE,
    FENCE,
    LIBRARY_KEY,
    STRUCTURE,
    AnswerStructure,
    CallableTool,
    CallForm,
    Calls,
    Thought,
)

MAX_GAP: Final = 2  # newlines between a thought and what follows it
# A string parameter is written as it is, so of all keywords only these put no constraint on its characters.
_NOTES: Final = frozenset(("type", "title", "description", "default", "examples", "deprecated"))
_TOP: Final = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_DEFINITIONS: Final = ("$defs", "definitions")
_KEY: Final = re.compile(r"[^\s<>][^\r\n<>]{0,126}[^\s<>]|[^\s<>]")
_ANY_KEY: Final = r"[^\s<>]([^\r\n<>]{0,126}[^\s<>])?"  # if no schema names them
_END_PARAMETER: Final = "</parameter>"
# A text that might be an untagged call: its first key is one of a call's, or contains escapes.
_BARE_CALL: Final = rf'[ \t\r\n]*\{{[ \t\r\n,]*"(({"|".join(BARE_KEYS)})"|[^"]*\\)(?s:.*)'


def structure_text(structure: AnswerStructure, part_text: Callable[[str, str], str], options: str) -> str:
    """A structure in the library's form: a list of grammars, of which the first refers to the others.

    Args:
        structure: what an answer consists of.
        part_text: converts a grammar of one kind to the library's form.
        options: of each grammar.

    Raises:
        InvalidGrammar: a schema or grammar in it cannot be expressed.
    """
    return _Writer(structure, part_text).written(options)


def parts_of(text: str) -> list[str]:
    """The grammars that a result of `structure_text` refers to, each by itself."""
    return [part["lark_grammar"] for part in json.loads(text)["grammars"][1:]]


class _Writer:
    def __init__(self, structure: AnswerStructure, part_text: Callable[[str, str], str]) -> None:
        self._structure = structure
        self._part_text = part_text
        self._names: dict[str, str] = {}  # names of grammars, by their text
        self._rules: list[str] = []
        self._has_text_value = False

    def written(self, options: str) -> str:
        """All grammars, as the library's JSON."""
        structure = self._structure
        begins = '"\\n"? ' if structure.form is CallForm.GLM45 else ""  # GLM's turns begin with a newline
        thought = {
            Thought.NONE: "",
            Thought.OPEN: "thought GAP?",
            Thought.OPTIONAL: f"({begins}{self._mark(structure.thought_form)} thought GAP?)?",
        }[structure.thought]
        if structure.thought is not Thought.NONE:
            self._add_up_to("thought", structure.thought_form.end)
        if structure.calls is not Calls.NONE:
            self._add_calls()
        if structure.calls is Calls.AUTO and structure.text is None:
            start = self._free_json() if structure.form is CallForm.LLAMA3_JSON else self._free()
        else:
            if thought:
                self._rules.append(f"GAP: /\\n{{1,{MAX_GAP}}}/")
            bound = [] if structure.calls is Calls.NONE else ["calls"]
            bound += [] if structure.text is None else [self._form(*structure.text)]
            start = f"{thought} ({' | '.join(bound)})"
        top = "\n".join([f"start: {start}", *self._rules, options])
        named = [{"name": name, "lark_grammar": text} for text, name in self._names.items()]
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": top}, *named]})

    def _mark(self, text: str) -> str:
        """A tag, spelled out or as the tokenizer's token for it: to the library, `<...>` tokens spell nothing."""
        token_id = self._structure.tokens.get(text)
        return _quoted(text) if token_id is None else f"<[{token_id}]>"

    def _add_up_to(self, name: str, mark: str, excluded: str = "") -> None:
        """Add a rule for any text up to a tag and the tag after it.

        Args:
            name: name of the rule.
            mark: the tag.
            excluded: what the text must not be.
        """
        before = name.upper()
        if mark in self._structure.tokens:
            text = f"/(?s:.+)/{_without([mark], '(?s:.*)')}{excluded}"
            self._rules += [f"{name}: {before}? {self._mark(mark)}", f"{before}: {text}"]
        else:
            self._rules += [f"{name}[lazy]: {before}", f"{before}: /(?s:.*){_pattern(mark)}/{excluded}"]

    def _free(self) -> str:
        """Calls within any text."""
        structure = self._structure
        mark = structure.form.marks[0]
        has_one = structure.form is CallForm.MISTRAL or structure.form.is_section  # one list or section for all calls
        is_many = structure.parallel and not has_one
        many, more = ("(opening call)*", "(opening call)* ") if is_many else ("(opening call)?", "")
        text = f"/(?s:.+)/{_without([mark], '(?s:.*)')}"
        self._add_up_to("opening", mark)
        self._rules.append(f"TEXT: {text}")
        if structure.thought is not Thought.OPTIONAL:
            thought = "thought " if structure.thought is Thought.OPEN else ""
            return f"{thought}{many} TEXT?"
        thinks = _without([structure.thought_form])
        self._add_up_to("first_opening", mark, thinks)
        self._rules.append(f"FIRST_TEXT: {text}{thinks}")
        thought = f"{self._mark(structure.thought_form)} thought"
        return f"{thought} {many} TEXT? | first_opening call {more}TEXT? | FIRST_TEXT?"

    def _free_json(self) -> str:
        """Calls alone, or any text that does not look like one, which tagged calls may follow."""
        structure = self._structure
        tag = structure.form.marks[0]
        plain = f"/(?s:.+)/ & ~/{_BARE_CALL}/{_without([tag], '(?s:.*)')}"
        tagged = f" ({self._mark(tag)} bare)?" if tag in structure.tokens else ""
        # Text may begin like a call. The library continues with the longer lexeme, so this begins with one lexeme, too.
        begins = (
            f'/\\n{{0,{MAX_GAP}}}{re.escape(self._head(tool))}/ arguments{at} "}}"'
            for at, tool in enumerate(structure.tools)
        )
        more = ' ("; " tool)*' if structure.parallel else ""
        self._rules += [f"PLAIN: {plain}", f"alone: ({' | '.join(begins)}){more}"]
        if structure.thought is not Thought.OPTIONAL:
            thought = "thought " if structure.thought is Thought.OPEN else ""
            return f"{thought}(alone | PLAIN?{tagged})"
        self._rules.append(f"FIRST_PLAIN: {plain}{_without([structure.thought_form])}")
        thought = f"{self._mark(structure.thought_form)} thought"
        return f"{thought} (alone | PLAIN?{tagged}) | alone | FIRST_PLAIN?{tagged}"

    def _add_calls(self) -> None:
        structure = self._structure
        mark = self._mark(structure.form.marks[0])
        tools = [self._tool(at, _of_object(tool)) for at, tool in enumerate(structure.tools)]
        match structure.form:
            case CallForm.LLAMA3_JSON:
                tag = f"{mark}? " if structure.form.marks[0] in structure.tokens else ""
                more = ' ("; " tool)*' if structure.parallel else ""
                self._rules += [f"calls: {tag}bare", f"bare: tool{more}"]
            case CallForm.MISTRAL:
                more = ' (", " tool)*' if structure.parallel else ""
                self._rules += [f"calls: {mark} call", f'call: " "? "[" tool{more} "]"']
            case CallForm.MISTRAL_ARGS:
                more = f" ({mark} call)*" if structure.parallel else ""
                self._rules += [f"calls: {mark} call{more}", "call: tool"]
            case CallForm.DEEPSEEK_V3 | CallForm.DEEPSEEK_V31 | CallForm.KIMI_K2:
                _, begin, _, end, close = map(self._mark, structure.form.marks)
                between = '"\\n" ' if structure.form is CallForm.DEEPSEEK_V3 else ""
                more = f" ({between}one)*" if structure.parallel else ""
                self._rules += [f"calls: {mark} call", f"call: one{more} {close}", f"one: {begin} tool {end}"]
            case _:
                more = f' ("\\n" {mark} call)*' if structure.parallel else ""
                self._rules += [f"calls: {mark} call{more}", f'call: "\\n"? tool "\\n"? {self._mark(END_CALL)}']
        self._rules += [
            f"tool: {' | '.join(f'tool{at}' for at in range(len(tools)))}",
            *(f"tool{at}: {rule}" for at, rule in enumerate(tools)),
        ]

    def _tool(self, at: int, tool: CallableTool) -> str:
        form = self._structure.form
        if form in (CallForm.QWEN3_CODER, CallForm.GLM45):
            rule = self._tagged(at, tool)
            if rule is not None:
                return rule
        text = self._structure.text
        if form is CallForm.LLAMA3_JSON and text is not None and text[0].startswith("json"):
            # If both may begin with a brace, the library can tell them apart only if both are its own JSON.
            return self._named("json_schema", json.dumps(_call_schema(tool), ensure_ascii=False))
        if tool.parameters is None:
            arguments = self._named("json_object", "")
        else:
            arguments = self._named("json_schema", json.dumps(tool.parameters, ensure_ascii=False))
        self._rules.append(f"arguments{at}: {arguments}")
        if form.is_section:
            return self._headed(at, tool)
        if form is CallForm.MISTRAL_ARGS:
            call_id = f"({self._mark(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if CALL_ID in self._structure.tokens else ""
            return f"{_quoted(tool.name)} {call_id}{self._mark(ARGS)} arguments{at}"
        return f'{_quoted(self._head(tool))} arguments{at} "}}"'

    def _headed(self, at: int, tool: CallableTool) -> str:
        """A call within a section, without the tags around it."""
        form = self._structure.form
        apart = self._mark(form.marks[2])
        match form:
            case CallForm.DEEPSEEK_V3:
                begin, end = _quoted(f"{tool.name}\n{FENCE}\n"), _quoted(f"\n{END_FENCE}")
                return f'"function" {apart} {begin} arguments{at} {end}'
            case CallForm.KIMI_K2:
                return f"{_quoted(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {apart} arguments{at}"
        return f"{_quoted(tool.name)} {apart} arguments{at}"

    def _head(self, tool: CallableTool) -> str:
        """A JSON call up to the arguments."""
        key = "parameters" if self._structure.form is CallForm.LLAMA3_JSON else "arguments"
        return f'{{"name": {_quoted(tool.name)}, "{key}": '

    def _tagged(self, at: int, tool: CallableTool) -> str | None:
        """A call whose arguments are tags; None if tags could not express the schema."""
        is_glm = self._structure.form is CallForm.GLM45
        begin = _quoted(f"{tool.name}\n" if is_glm else f"<function={tool.name}>")
        if tool.parameters is None and is_glm:
            self._rules.append(f'any{at}: ({self._parameter()} {self._text_value()} "\\n")*')
            return f"{begin} any{at}"
        if tool.parameters is None:
            self._rules.append(f"any{at}[lazy]: /(?s:.*)<\\/function>/")
            return f"{begin} any{at}"
        if not isinstance(tool.parameters, Mapping) or not _can_be_tagged(tool.parameters):
            return None
        rule = begin if is_glm else f'{begin} "\\n"'
        required = tool.parameters.get("required", ())
        for key, schema in tool.parameters.get("properties", {}).items():
            if schema is False:
                continue  # the parameter is left out
            value = self._value(schema, tool.parameters)
            if value is None:
                return None
            parameter = f'{self._parameter(key)} {value} "\\n"'
            rule += f" {parameter}" if key in required else f" ({parameter})?"
        return rule if is_glm else f'{rule} "</function>"'

    def _parameter(self, key: str | None = None) -> str:
        """A parameter up to its value; of any name if `key` is None."""
        if self._structure.form is CallForm.GLM45:
            name = f"/{_ANY_KEY}/" if key is None else _quoted(key)
            return f'{self._mark(ARG_KEY)} {name} {self._mark(END_ARG_KEY)} "\\n" {self._mark(ARG_VALUE)}'
        return f'{_quoted(f"<parameter={key}>")} "\\n"'

    def _text_value(self) -> str:
        """Any text, and the tag after it."""
        if not self._has_text_value:
            self._has_text_value = True
            if self._structure.form is CallForm.GLM45:
                self._add_up_to("value", END_ARG_VALUE)
            else:
                self._rules.append(f"value[lazy]: /(?s:.*){_pattern(_END_PARAMETER)}/")
        return "value"

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str | None:
        """A parameter's value, and the tag after it."""
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            options = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if not schema.keys() <= _NOTES | {"enum", "const"} or ("enum" in schema and "const" in schema):
                return None
            if not schema.keys() & {"enum", "const"}:
                return self._text_value()
            end = END_ARG_VALUE if self._structure.form is CallForm.GLM45 else _END_PARAMETER
            if not isinstance(options, list) or not options:
                return None  # as JSON, the library reports what is wrong
            if not all(isinstance(one, str) and one == one.strip() and end not in one for one in options):
                return None
            return f"({' | '.join(map(_quoted, options))}) {self._value_end()}"
        references = list(_references(schema))
        brought = tuple(f"#/{name}/" for name in _DEFINITIONS)
        if not isinstance(schema, Mapping | bool) or not all(one.startswith(brought) for one in references):
            return None  # a grammar of its own could not resolve them
        definitions = {name: root[name] for name in _DEFINITIONS if references and name in root}
        whole = definitions | ({} if isinstance(schema, bool) else dict(schema))
        named = self._named("json_schema", json.dumps(whole, ensure_ascii=False))
        return f"{named} {self._value_end()}"

    def _value_end(self) -> str:
        """What follows a value."""
        if self._structure.form is CallForm.GLM45:
            return self._mark(END_ARG_VALUE)
        return f'"\\n" {_quoted(_END_PARAMETER)}'

    def _form(self, kind: str, text: str) -> str:
        """What a text that is no call must match."""
        if kind != "regex":
            return self._named(kind, text)
        written = self._part_text(kind, text).partition("\n")[0].removeprefix("start: ")
        structure = self._structure
        tags = [structure.form.marks[0]] if structure.calls is not Calls.NONE else []
        tags += [structure.thought_form] if structure.thought is Thought.OPTIONAL else []
        excluded = _without(tags)
        if structure.calls is not Calls.NONE and structure.form is CallForm.LLAMA3_JSON:
            excluded += f" & ~/{_BARE_CALL}/"
        self._rules.append(f"FORM: {written}{excluded}")
        return "FORM"

    def _named(self, kind: str, text: str) -> str:
        written = self._part_text(kind, text)
        name = self._names.setdefault(written, f"part{len(self._names)}")
        return f"@{name}"


def _of_object(tool: CallableTool) -> CallableTool:
    """The tool with `type: object` for its arguments, as any form of a call requires; its schema need not say so.

    Raises:
        ValueError: the schema says that they are no object.
    """
    if tool.parameters is None or tool.parameters is False:
        return tool
    schema: Mapping[str, Any] = {} if tool.parameters is True else tool.parameters
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(f"tool {tool.name}: parameters are of type {kinds!r}, and a call's arguments are an object")
    return CallableTool(tool.name, {**schema, "type": "object"})


def _can_be_tagged(parameters: Mapping[str, Any]) -> bool:
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    return (
        parameters.keys() <= _TOP
        and parameters.get("type", "object") == "object"
        and isinstance(parameters.get("additionalProperties", False), bool)
        and isinstance(properties, Mapping)
        and all(_KEY.fullmatch(key) for key in properties)
        and isinstance(required, list)
        and all(isinstance(key, str) and properties.get(key, False) is not False for key in required)
    )


def _call_schema(tool: CallableTool) -> Any:
    """A whole call in Llama's form, as a schema."""
    arguments = {"type": "object"} if tool.parameters is None else _moved(tool.parameters, "#/properties/parameters")
    properties = {"name": {"const": tool.name}, "parameters": arguments}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _moved(schema: Any, to: str, *, are_names: bool = False) -> Any:
    """A schema whose internal references are adjusted for its place `to` within another schema."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "$ref" and not are_names and isinstance(value, str) and value.startswith("#"):
            found[key] = to + value[1:]
        elif key in _LITERAL and not are_names:
            found[key] = value
        else:
            found[key] = _moved(value, to, are_names=key in _NAMED and not are_names)
    return found


def _references(schema: Any) -> Iterator[str]:
    """References in a schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        yield from _references(list(schema.values()))


def _without(marks: Sequence[str], before: str = "") -> str:
    """Excludes texts with one of these tags at the beginning, or after what matches the pattern `before`."""
    return "".join(f" & ~/{before}{_pattern(mark)}(?s:.*)/" for mark in marks)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(tag: str) -> str:
    """A tag escaped for a regular expression between slashes."""
    return re.sub(r"([/|\[\]])", r"\\\1", tag)


MAX_ARRAYS: Final = 128  # maximum number of arrays that replace one schema
KEYWORD: Final = "uniqueItems"
_LITERAL: Final = frozenset(("const", "enum", "default", "examples"))  # their values are data, not schemas
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_ITEM_NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id", "$defs", "definitions")
)
_OF_ARRAY: Final = frozenset(("type", "items", "minItems", "maxItems", KEYWORD))
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


# The library refuses any other `format`. JSON Schema makes those remarks, which any string meets; pydantic, zod and
# OpenAPI have many: "path", "password", "binary", "byte", "url", "jwt".
FORMATS: Final = frozenset("date date-time duration email hostname ipv4 ipv6 time uri uuid".split())
MAX_EXACT: Final = 1 << 53  # the largest range of exact integers: the library reads numbers as floats
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Of an integer's exclusive bound: the key of the inclusive one, the difference, and which of two bounds holds.
_INCLUSIVE: Final[Mapping[str, tuple[str, int, Callable[[Any, Any], Any]]]] = {
    "exclusiveMinimum": ("minimum", 1, max),
    "exclusiveMaximum": ("maximum", -1, min),
}


def followed_schema(schema: Any) -> Any:
    """An equivalent schema that the library follows exactly.

    Raises:
        ValueError: there is none; the message says where and why.
    """
    try:
        return _rewritten(schema, schema, "#")
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"malformed: {error}") from error


def _require_exact(schema: Mapping[str, Any], path: str) -> None:
    """Reject integers that the library would change: it writes a value with the digits that a float needs."""
    for key in ("const", "enum"):
        for value in _integers(schema.get(key)):
            if abs(value) > MAX_EXACT and not _is_written(value):
                raise ValueError(f"{path}/{key}: {value} is not exact as a float; let it be a string")


def _exact_bounds(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """An equivalent schema whose bounds the library does not change.

    It reads numbers as floats, not always the nearest one to a text with a point. It clamps the bounds of an integer to
    64 bits, and takes one from or adds one to its exclusive bounds as floats. So those become inclusive here.

    Raises:
        ValueError: there is no such schema.
    """
    whole = {key: found for key in _BOUNDS if (found := _whole(schema.get(key))) is not None}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not whole or not any(kind in ("integer", "number", None) for kind in kinds):
        return schema
    schema = schema | whole
    is_integer = "integer" in kinds and "number" not in kinds
    for key, value in whole.items():
        if abs(value) < MAX_EXACT:
            continue
        if key in _INCLUSIVE and is_integer:
            inclusive, step, innermost = _INCLUSIVE[key]
            del schema[key]
            bound, other = value + step, schema.get(inclusive)
            if other is None or innermost(bound, other) == bound:
                schema[inclusive] = bound
        elif key in _INCLUSIVE and "number" not in kinds:
            raise ValueError(f"{path}/{key}: {value} is not exact without a type beside it")
        else:
            bound = value
        clamped = min(max(int(float(bound)), -1 << 63), (1 << 63) - 1)
        is_read = clamped == bound if is_integer else _is_written(bound)
        if not is_read or (None in kinds and clamped != bound):
            raise ValueError(f"{path}/{key}: {value} is not exact as a float; take one that is")
    return schema


def _whole(value: Any) -> int | None:
    """An integer that a JSON number is; None if it is none."""
    if isinstance(value, float) and math.isfinite(value):
        digits = Decimal(repr(value))
        return int(digits) if digits == digits.to_integral_value() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_written(value: int) -> bool:
    """Whether the digits that a float needs are this integer's."""
    return Decimal(repr(float(value))) == value


def _require_distinct(schema: Mapping[str, Any], path: str) -> None:
    """Reject counting properties that may have the same name: the library would count a repeated one twice."""
    least, kinds, required = schema.get("minProperties"), schema.get("type", "object"), schema.get("required")
    is_open = schema.get("additionalProperties", True) is not False or schema.get("patternProperties")
    if not isinstance(least, int | float) or not is_open:
        return
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return
    num_named = len({one for one in required if isinstance(one, str)}) if isinstance(required, list) else 0
    if least > num_named + 1:
        why = f"can be followed up to one more than the required properties, which are {num_named} here"
        raise ValueError(f"{path}: minProperties {why}; name more of them, or take a smaller number")


def _require_grounded(schema: Mapping[str, Any], root: Any, path: str) -> None:
    """Reject a reference that leads back to itself: no value matches it, and the library notices only in the answer."""
    seen: set[str] = set()
    at: Any = schema
    while isinstance(at, Mapping) and isinstance(at.get("$ref"), str) and at["$ref"].startswith("#"):
        where = at["$ref"]
        if where in seen:
            raise ValueError(f"{path}: $ref leads back to {where}")
        seen.add(where)
        at = root
        for key in where.split("/")[1:]:
            at = at.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None


def _integers(value: Any) -> Iterator[int]:
    """Integers within a JSON value."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _integers(one)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _rewritten(schema: Any, root: Any, path: str, *, are_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_rewritten(item, root, f"{path}/{at}") for at, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value
        if key in _LITERAL and not are_names
        else _rewritten(value, root, f"{path}/{key}", are_names=key in _NAMED and not are_names)
        for key, value in schema.items()
    }
    if not are_names:
        _require_exact(found, path)
        found = _exact_bounds(found, path)
        _require_distinct(found, path)
        _require_grounded(schema, root, path)
        if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
            del found["format"]
    if are_names or KEYWORD not in found:
        return found
    is_unique = found.pop(KEYWORD)
    if not isinstance(is_unique, bool):
        raise ValueError(f"{path}: {KEYWORD} is neither true nor false")
    return _listed(found, root, path) if is_unique else found


def _listed(schema: dict[str, Any], root: Any, path: str) -> Any:
    """An array of distinct items, as the list of all such arrays."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if (None not in kinds and "array" not in kinds) or most <= 1:
        return schema
    more = sorted(schema.keys() - _OF_ARRAY - _ITEM_NOTES)
    if None in kinds or more:
        why = f"beside {more[0]}" if more else "without a type"
        raise ValueError(f"{path}: {KEYWORD} {why} cannot be followed")
    values = _values(schema.get("items"), root)
    if values is None:
        why = "can be followed where the items are a few given values (enum, const, boolean, null); leave it out here"
        raise ValueError(f"{path}: {KEYWORD} {why}")
    if len(values) > MAX_ARRAYS:
        raise ValueError(f"{path}: {KEYWORD} of {len(values)} values leaves more than {MAX_ARRAYS} different arrays")
    sizes = range(least, int(min(most, len(values))) + 1)
    num = sum(math.perm(len(values), size) for size in sizes)
    if not 1 <= num <= MAX_ARRAYS:
        raise ValueError(f"{path}: {KEYWORD} leaves {num} different arrays; at least 1 and at most {MAX_ARRAYS}")
    arrays: list[dict[str, Any]] = [
        {"type": "array", "prefixItems": [{"const": one} for one in chosen], "minItems": size, "maxItems": size}
        for size in sizes
        for chosen in itertools.permutations(values, size)
    ]
    others = [{"type": kind} for kind in kinds if kind != "array"]
    return {key: value for key, value in schema.items() if key in _ITEM_NOTES} | {"anyOf": [*arrays, *others]}


def _values(items: Any, root: Any) -> list[Any] | None:
    """All values of a schema; None if they are not listed."""
    if isinstance(items, dict) and isinstance(items.get("$ref"), str) and items.keys() <= _ITEM_NOTES | {"$ref"}:
        where, _, name = items["$ref"].rpartition("/")
        if where not in ("#/$defs", "#/definitions") or not isinstance(root, dict):
            return None
        items = root.get(where[2:], {}).get(name)
    if not isinstance(items, dict) or not items.keys() <= _ITEM_NOTES | {"type", "enum", "const"}:
        return None
    kinds = items.get("type", list(_KINDS))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "const" in items:
        listed = [one for one in items.get("enum", [items["const"]]) if _key(one) == _key(items["const"])]
    elif "enum" in items:
        listed = items["enum"]
    elif set(kinds) <= {"boolean", "null"}:
        listed = [False, True] * ("boolean" in kinds) + [None] * ("null" in kinds)
    else:
        return None
    return list({_key(one): one for one in listed if any(_is_of(one, kind) for kind in kinds)}.values())


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return bool(kind == "boolean")
    whole = isinstance(value, float) and value.is_integer() and kind == "integer"
    return whole or isinstance(value, _KINDS.get(kind, ()))


def _key(value: Any) -> str:
    """A key that is equal for values that JSON Schema calls equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_key, value))}]"
    if isinstance(value, dict):
        return json.dumps({name: _key(one) for name, one in value.items()}, sort_keys=True)
    return json.dumps(value)


MAX_MESSAGE_LEN: Final = 300
MAX_WRITTEN_LEN: Final = 1 << 20  # sixteen times the largest grammar accepted
# For forced bytes, the library would allow only one tokenization, which depends on earlier calls. With this option, a
# mask holds every token that fits, and depends on the text alone.
OPTIONS: Final = '%llguidance {"no_forcing": true}'
JSON_OPTIONS: Final[dict[str, Any]] = {
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
# No white space by default, because a model might write nothing else. Where allowed, it is bounded for the same reason.
COMPACT: Final[dict[str, Any]] = {"whitespace_flexible": False}
SPACED: Final[dict[str, Any]] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
GBNF_SIGN: Final = "::="  # without it a grammar is Lark


def library_text(kind: str, text: str, *, is_compact: bool = True) -> str:
    """A specification in the library's own form.

    Raises:
        InvalidGrammar: it cannot be expressed there, or would become too long: listed arrays (`unique_items`) and
            definitions repeated for each parameter of a tool may grow to hundreds of times the request's size.
    """
    written = _written(kind, text, is_compact=is_compact)
    if len(written) > MAX_WRITTEN_LEN:
        why = f"{len(written)} characters once it is written out; at most {MAX_WRITTEN_LEN} of them"
        raise refusal(kind, why)
    return written


def _written(kind: str, text: str, *, is_compact: bool) -> str:
    try:
        match kind:
            case "json_schema":
                return _schema_rule(json.loads(text), is_compact=is_compact)
            case "json_object":
                return _schema_rule({"type": "object"}, is_compact=is_compact)
            case "regex":
                from llguidance import LLMatcher

                rule = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
                return f"{rule}\n{OPTIONS}"
            case _ if kind == STRUCTURE:

                def part(kind: str, text: str) -> str:
                    return library_text(kind, text, is_compact=is_compact)

                return structure_text(AnswerStructure.from_json(text), part, OPTIONS)
            case _:
                return f"{_from_gbnf(text) if GBNF_SIGN in text else text}\n{OPTIONS}"
    except (ValueError, RecursionError) as error:
        raise refusal(kind, str(error)) from error


def new_matcher(tokens: Any, kind: str, text: str, limits: Mapping[str, Any]) -> Any:
    """A matcher for a result of `library_text`, before the first token.

    Raises:
        InvalidGrammar: it does not compile within the limits.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        raise refusal(kind, matcher.get_error())
    return matcher


def failed_matcher(tokens: Any) -> Any:
    """A matcher that takes nothing and costs nothing."""
    from llguidance import LLMatcher

    return LLMatcher(tokens, "", log_level=0)


def new_tokens(tokenizer_json: str, vocab_size: int, eos_token_id: int) -> Any:
    """A tokenizer in the library's form.

    Raises:
        InvalidGrammar: the library does not know what its tokens spell.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
    except ValueError as error:
        message = f"answers of this model cannot follow a grammar: its tokenizer is unknown: {error}"
        raise InvalidGrammar(message[:MAX_MESSAGE_LEN]) from error


def refusal(kind: str, why: str) -> InvalidGrammar:
    """The error that says why a specification is invalid.

    Drops the library's marks for text it left out and its excerpt of the schema, and expands a bare name to a sentence.
    """
    why = re.sub(r"<[\w-]+/>", "", why).strip()
    _, is_of_schema, reason = why.partition("failed to compile JSON schema: ")
    if is_of_schema:
        why = re.split(r"\n +\d+ \| ", reason)[0]
    if re.fullmatch(r"\w+", why):
        why = f"the grammar library cannot follow it ({why})"
    return InvalidGrammar(f"{kind}: {why}"[:MAX_MESSAGE_LEN], kind=kind)


def _from_gbnf(text: str) -> str:
    """An EBNF (GBNF) grammar as Lark.

    Raises:
        InvalidGrammar: it is none. The converter raises bare `Exception` for a missing or doubly defined rule, so any
            exception of its own counts as a rejection.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        result: str = gbnf_to_lark(text)
    except Exception as error:
        raise refusal("grammar", str(error) or type(error).__name__) from error
    return result


def _schema_rule(schema: Any, *, is_compact: bool) -> str:
    """A grammar of one rule, which is the schema's."""
    if not isinstance(schema, Mapping | bool) or schema is False:
        raise ValueError("allows nothing" if schema is False else "is neither an object nor a boolean")
    keywords = {} if schema is True else followed_schema(schema)
    options = JSON_OPTIONS | (COMPACT if is_compact else SPACED)
    return f"start: %json {json.dumps(keywords | {LIBRARY_KEY: options})}\n{OPTIONS}"
