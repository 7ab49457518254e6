"""Splits an answer into text and tool calls. The parts do not depend on how the text is cut into pieces.

The forms of calls are those of `CallForm`. Qwen's models write calls as `<tool_call>` JSON `</tool_call>` in their text
(Hermes' form); Qwen3-Coder writes functions and parameters as further tags. Llama 3 writes JSON alone or after
`<|python_tag|>`. Mistral's models write `[TOOL_CALLS]`, then a list of JSON objects, or names and arguments. GLM writes
a name, then keys and values as tags. DeepSeek and Kimi write one section for all calls, with its own tags.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from baton.core.requests.answer_structure import (
    ARG_KEY,
    ARG_VALUE,
    ARGS,
    BARE_KEYS,
    CALL,
    CALL_ID,
    END_ARG_KEY,
    END_ARG_VALUE,
    END_CALL,
    END_FENCE,
    FENCE,
    CallForm,
)

NAME: Final = "name"
ARGUMENTS: Final = ("arguments", "parameters")
MAX_NAME_LEN: Final = 256
_SPACE: Final = " \t\r\n"


class _State(Enum):
    BEFORE = "before"  # the object
    MEMBER = "member"  # expects a key, a comma or the end
    KEY = "key"
    COLON = "colon"
    BEFORE_VALUE = "before value"
    VALUE = "value"
    DONE = "done"
    BROKEN = "broken"


class CallReader:
    """Reads one JSON object of a call. Feed it characters until it has ended."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._state = _State.BEFORE
        self._text = ""  # of the key or value being read
        self._key = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._is_of_arguments = False  # whether the current value is the arguments

    @property
    def is_done(self) -> bool:
        """Whether the object is closed."""
        return self._state is _State.DONE

    @property
    def is_broken(self) -> bool:
        """Whether the text is not such an object."""
        return self._state is _State.BROKEN

    @property
    def key(self) -> str:
        """The key that was read last."""
        return self._key

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return self._has_arguments

    @property
    def is_between(self) -> bool:
        """Whether the reader is after a member, or before the first."""
        return self._state is _State.MEMBER

    def arguments(self) -> str:
        """Return the arguments read since the last call; empty until the name is known.

        A call without arguments gets `{}`.
        """
        if self.name is None:
            return ""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def take_unread(self) -> str:
        """Return characters that were taken but are no part of the call: none here."""
        return ""

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the object, which has then ended or is broken."""
        match self._state:
            case _State.BEFORE:
                self._expect(character, "{", _State.MEMBER)
            case _State.MEMBER:
                if character == "}":
                    self._state = _State.DONE if self.name is not None else _State.BROKEN
                elif character == '"':
                    self._text, self._in_string, self._state = character, True, _State.KEY
                elif character != ",":
                    self._expect(character, "", _State.MEMBER)
            case _State.KEY:
                self._take(character)
                if self._ends_string(character) and not self.is_broken:
                    self._key, self._state = self._string(), _State.COLON
            case _State.COLON:
                self._expect(character, ":", _State.BEFORE_VALUE)
            case _State.BEFORE_VALUE:
                if character not in _SPACE:
                    self._text, self._state = "", _State.VALUE
                    self._is_of_arguments = self._key in ARGUMENTS and not self._has_arguments  # the first one counts
                    self._read_value(character)
            case _State.VALUE:
                self._read_value(character)
            case _:
                return False
        return not self.is_broken

    def _expect(self, character: str, wanted: str, then: _State) -> None:
        if character and character == wanted:
            self._state = then
        elif character not in _SPACE:
            self._state = _State.BROKEN

    def _read_value(self, character: str) -> None:
        if self._in_string:
            self._keep(character)
            if self._ends_string(character) and self._depth == 0:
                self._end_value()
        elif character == '"':
            self._in_string = True
            self._keep(character)
        elif character in "{[":
            self._depth += 1
            self._keep(character)
        elif character in "}]" and self._depth:
            self._depth -= 1
            self._keep(character)
            if self._depth == 0:
                self._end_value()
        elif self._depth == 0 and character in ",}" + _SPACE:  # after a number or a word
            self._end_value()
            if not self.is_broken:
                self.feed(character)
        elif character == "<":  # never outside a string: the model has left the call
            self._state = _State.BROKEN
        else:
            self._keep(character)

    def _keep(self, character: str) -> None:
        if self._is_of_arguments:
            self._arguments.append(character)
            self._has_arguments = True
        elif self._key == NAME and self.name is None:
            self._take(character)

    def _take(self, character: str) -> None:
        self._text += character
        if len(self._text) > MAX_NAME_LEN:
            self._state = _State.BROKEN

    def _end_value(self) -> None:
        if self.is_broken:
            return
        self._state = _State.MEMBER
        if self._key == NAME and self.name is None:
            self.name = self._string() or None
            if self.name is None:
                self._state = _State.BROKEN

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False

    def _string(self) -> str:
        try:
            value = json.loads(self._text, strict=False)
        except ValueError:
            return ""
        return value if isinstance(value, str) else ""


FUNCTION: Final = "<function="
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
END_FUNCTION: Final = "</function>"


class _TagState(Enum):
    BEFORE = "before"  # expects the function's tag
    NAME = "name"
    BODY = "body"  # expects a parameter's tag, or the end
    KEY = "key"
    BEFORE_VALUE = "before value"
    VALUE = "value"
    DONE = "done"
    BROKEN = "broken"


class TaggedCallReader:
    """Reads one function in tags. Feed it characters until it has ended.

    Args:
        schemas: schemas of the parameters, by function.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self._unread = ""
        self._schemas = schemas
        self._state = _TagState.BEFORE
        self._text = ""  # of what is being read
        self._key = ""
        self._value: list[str] = []
        self._keys: set[str] = set()
        self._arguments = ""

    @property
    def is_done(self) -> bool:
        """Whether the function is closed."""
        return self._state is _TagState.DONE

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call; its arguments are closed all the same."""
        return self._state is _TagState.BROKEN

    def arguments(self) -> str:
        """Return the arguments read since the last call, as parts of a JSON object."""
        text, self._arguments = self._arguments, ""
        return text

    def take_unread(self) -> str:
        """Return characters that were taken but are no part of the call; each is returned once."""
        text, self._unread = self._unread, ""
        return text

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call, which has then ended or is broken."""
        match self._state:
            case _TagState.BEFORE:
                return self._tag(character, {FUNCTION: _TagState.NAME})
            case _TagState.BODY:
                return self._tag(character, {PARAMETER: _TagState.KEY, END_FUNCTION: _TagState.DONE})
            case _TagState.NAME | _TagState.KEY:
                return self._name(character)
            case _TagState.VALUE:
                self._value.append(character)
                if character == ">" and "".join(self._value[-len(END_PARAMETER) :]) == END_PARAMETER:
                    value = "".join(self._value[: -len(END_PARAMETER)])
                    self._argument(value.removeprefix("\n").removesuffix("\n"))
                return True
        return False

    def _tag(self, character: str, tags: Mapping[str, _TagState]) -> bool:
        text = (self._text + character).lstrip()
        if text in tags:
            self._text, self._state = "", tags[text]
            if self.is_done:
                self._close()
        elif any(tag.startswith(text) for tag in tags):
            self._text = text
        else:
            return self._break()
        return True

    def _name(self, character: str) -> bool:
        if character in "\r\n<" or len(self._text) >= MAX_NAME_LEN:
            return self._break()
        if character != ">":
            self._text += character
            return True
        name = self._text.strip()
        if not name or (self._state is _TagState.KEY and name in self._keys):
            return self._break()
        if self._state is _TagState.NAME:
            self.name, self._state = name, _TagState.BODY
        else:
            self._key, self._state = name, _TagState.VALUE
        self._text = ""
        return True

    def _break(self) -> bool:
        self._state, self._unread = _TagState.BROKEN, self._text
        if self.name is not None:
            self._close()
        return False

    def _argument(self, text: str) -> None:
        self._arguments += ", " if self._keys else "{"
        self._arguments += f"{json.dumps(self._key, ensure_ascii=False)}: {self._json(text)}"
        self._keys.add(self._key)
        self._value.clear()
        self._state = _TagState.BODY

    def _json(self, text: str) -> str:
        schemas = self._schemas.get(self.name or "", {}).get("properties")
        types = _types(schemas.get(self._key)) if isinstance(schemas, Mapping) else set()
        return json.dumps(text, ensure_ascii=False) if types == {"string"} else _typed(text, types)

    def _close(self) -> None:
        self._arguments += "}" if self._keys else "{}"


_JSON_TYPES: Final[tuple[tuple[type, str], ...]] = (  # bool comes first, because a bool is an int
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
# Python's spellings, which Qwen's templates use: (type, JSON).
_PYTHON_WORDS: Final = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


def _types(schema: Any, *, is_option: bool = False) -> set[str]:
    """Return the JSON types that a schema names, itself or in its options; empty if it leaves the type open."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    options = schema.get("anyOf", schema.get("oneOf"))
    if is_option or not isinstance(options, list):
        return set()
    found = [_types(one, is_option=True) for one in options]
    return set().union(*found) if all(found) else set()


def _typed(text: str, types: Collection[str]) -> str:
    """Convert a bare value to JSON: its JSON meaning if the types allow that, else the text itself."""
    kind, word = _PYTHON_WORDS.get(text.strip(), ("", ""))
    if kind in types and "string" not in types:
        return word
    try:
        value = json.loads(text, parse_constant=_no_number)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    found = next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "string")
    is_other = found not in types and not (found == "integer" and "number" in types)
    if "string" in types and is_other:
        return json.dumps(text, ensure_ascii=False)
    return written


class PairCallReader(TaggedCallReader):
    """Reads a name, then keys and values in tags, up to the tag that closes the call, which stays unread (GLM)."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(schemas)
        self._state = _TagState.NAME
        self._head = ""  # the name, until a tag shows that this is a call

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call, which has then ended or is broken."""
        match self._state:
            case _TagState.NAME:
                return self._read_name(character)
            case _TagState.BODY:
                return self._read_body(character)
            case _TagState.KEY:
                return self._read_key(character)
            case _TagState.BEFORE_VALUE:
                return self._tag(character, {ARG_VALUE: _TagState.VALUE})
            case _TagState.VALUE:
                self._value.append(character)
                if character == ">" and "".join(self._value[-len(END_ARG_VALUE) :]) == END_ARG_VALUE:
                    self._argument("".join(self._value[: -len(END_ARG_VALUE)]))
                return True
        return False

    def _read_name(self, character: str) -> bool:
        if character != "<" and not (character == "\n" and self._text.strip()):
            if len(self._text) >= MAX_NAME_LEN:
                return self._break()
            self._text += character
            return True
        self._head = self._text.strip()
        if _NAME.fullmatch(self._head) is None:
            return self._break()
        self._text, self._state = "", _TagState.BODY
        return character == "\n" or self._read_body(character)

    def _read_body(self, character: str) -> bool:
        if not self._tag(character, {ARG_KEY: _TagState.KEY, END_CALL: _TagState.DONE}):
            return False
        if self._state is not _TagState.BODY:
            self.name = self._head
        if self.is_done:
            self._unread = END_CALL
        return True

    def _read_key(self, character: str) -> bool:
        text = self._text + character
        key = text.removesuffix(END_ARG_KEY).strip()
        if len(key) > MAX_NAME_LEN + len(END_ARG_KEY) or (text.endswith(END_ARG_KEY) and key in self._keys):
            return self._break()
        if text.endswith(END_ARG_KEY):
            self._key, self._text, self._state = key, "", _TagState.BEFORE_VALUE
        else:
            self._text = text
        return True


class EitherCallReader:
    """Reads a call in tags, or in JSON if it begins with a brace: grammars use JSON for what tags cannot express.

    Args:
        schemas: as for `TaggedCallReader`.
        tagged: class of the reader for calls in tags.
    """

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], tagged: type[TaggedCallReader] = TaggedCallReader
    ) -> None:
        self._reader: CallReader | TaggedCallReader = tagged(schemas)
        self._has_begun = False

    @property
    def name(self) -> str | None:
        """The function's name, once it is known."""
        return self._reader.name

    @property
    def is_done(self) -> bool:
        """Whether the call is complete."""
        return self._reader.is_done

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""
        return self._reader.is_broken

    def arguments(self) -> str:
        """Return the arguments read since the last call."""
        return self._reader.arguments()

    def take_unread(self) -> str:
        """Return characters that were taken but are no part of the call; each is returned once."""
        return self._reader.take_unread()

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call."""
        if not self._has_begun and not character.isspace():
            self._has_begun = True
            self._reader = CallReader() if character == "{" else self._reader
        return self._reader.feed(character)


class BareCallReader:
    """Reads an object without a tag, which is a call only if it names one of the tools and has arguments.

    A call's first key is one of `BARE_KEYS`, so other objects are recognized as text at their first key.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._reader = CallReader()
        self._is_call = False
        self._is_other = False

    @property
    def name(self) -> str | None:
        """The function's name, once it is known that this is a call."""
        return self._reader.name if self._is_call else None

    @property
    def is_done(self) -> bool:
        """Whether the call is complete."""
        return self._is_call and self._reader.is_done

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""
        return self._is_other or self._reader.is_broken

    def arguments(self) -> str:
        """Return the arguments read since the last call."""
        return self._reader.arguments() if self._is_call else ""

    def take_unread(self) -> str:
        """See `CallReader.take_unread`."""
        return ""

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call."""
        if self._is_other or not self._reader.feed(character):
            return False
        if not self._is_call:
            name, key = self._reader.name, self._reader.key
            is_known = name is not None and self._reader.has_arguments
            has_other_key = key != "" and key not in BARE_KEYS
            has_other_name = name is not None and name not in self._names
            self._is_other = has_other_key or has_other_name or (self._reader.is_done and not is_known)
            self._is_call = is_known and not self._is_other
        return True


class _HeadState(Enum):
    NAME = "name"
    TAG = "tag"
    ID = "id"
    BEFORE_ARGUMENTS = "before arguments"
    ARGUMENTS = "arguments"
    BROKEN = "broken"


class NamedCallReader:
    """Reads a name and its arguments, separated by `[ARGS]`, by `[CALL_ID]`, an id and `[ARGS]`, or by nothing."""

    def __init__(self) -> None:
        self._reader = CallReader()  # reads the same call rewritten as JSON
        self._state = _HeadState.NAME
        self._name = ""
        self._tag = ""
        self._num_id = 0  # characters of the id

    @property
    def name(self) -> str | None:
        """The function's name, once the arguments begin."""
        return self._reader.name

    @property
    def is_done(self) -> bool:
        """Whether the arguments are closed."""
        return self._reader.is_done

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""
        return self._state is _HeadState.BROKEN or self._reader.is_broken

    def arguments(self) -> str:
        """Return the arguments read since the last call."""
        return self._reader.arguments()

    def take_unread(self) -> str:
        """See `CallReader.take_unread`."""
        return ""

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call, which has then ended or is broken."""
        if self._state is not _HeadState.ARGUMENTS:
            self._read_head(character)
            return not self.is_broken
        if not self._reader.feed(character):
            return False
        if self._reader.is_between:
            self._reader.feed("}")
        return True

    def _read_head(self, character: str) -> None:
        match self._state:
            case _HeadState.TAG:
                self._read_tag(self._tag + character)
            case _HeadState.NAME | _HeadState.ID if character == "[":
                self._read_tag(character)
            case _HeadState.NAME | _HeadState.ID | _HeadState.BEFORE_ARGUMENTS if character == "{":
                self._begin_arguments()
            case _HeadState.NAME if _NAME.fullmatch(self._name + character):
                self._name += character
            case _HeadState.ID if _ID.fullmatch(character) and self._num_id < MAX_NAME_LEN:
                self._num_id += 1
            case _HeadState.NAME if character in _SPACE and not self._name:
                pass
            case _HeadState.BEFORE_ARGUMENTS if character in _SPACE:
                pass
            case _:
                self._state = _HeadState.BROKEN

    def _read_tag(self, tag: str) -> None:
        tags = (ARGS,) if self._num_id else (ARGS, CALL_ID)
        self._tag = tag
        if tag in tags:
            self._state = _HeadState.BEFORE_ARGUMENTS if tag == ARGS else _HeadState.ID
        elif self._name and any(one.startswith(tag) for one in tags):
            self._state = _HeadState.TAG
        else:
            self._state = _HeadState.BROKEN

    def _begin_arguments(self) -> None:
        if not self._name:
            self._state = _HeadState.BROKEN
            return
        for character in f'{{"{NAME}": "{self._name}", "{ARGUMENTS[0]}": {{':
            self._reader.feed(character)
        self._state = _HeadState.ARGUMENTS


_NAME: Final = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME_LEN - 2}}}")  # in quotes, it fits `CallReader`
_ID: Final = re.compile(r"[A-Za-z0-9_-]")
MAX_HEAD_LEN: Final = MAX_NAME_LEN + 64  # maximum characters before the arguments of a section's call


@dataclass(frozen=True, slots=True)
class _Section:
    """How the calls of one section are written.

    Attributes:
        tags: start of a call, end of a call, and end of the section.
        fence: may stand between the arguments and the end of a call.
        head: matches what stands before a call's arguments; has the group `name`, and `id` if the model writes ids.
    """

    tags: tuple[str, str, str]
    fence: str
    head: re.Pattern[str]


def _section(form: CallForm) -> _Section:
    _, begin, apart, end, close = form.marks
    return _Section((begin, end, close), END_FENCE if form is CallForm.DEEPSEEK_V3 else "", _head(form, apart))


def _head(form: CallForm, apart: str) -> re.Pattern[str]:
    name = rf"(?P<name>{_NAME.pattern})"
    match form:
        case CallForm.DEEPSEEK_V3:
            return re.compile(rf"\s*function\s*{re.escape(apart)}\s*{name}\s*(?:{FENCE}\s*)?")
        case CallForm.KIMI_K2:
            return re.compile(rf"\s*(?P<id>(?:functions\.)?{name}:[0-9]+)\s*{re.escape(apart)}\s*")
    return re.compile(rf"\s*{name}\s*{re.escape(apart)}\s*")


class HeadedCallReader:
    """Reads what stands before a call's arguments, then the arguments, which are an object.

    Args:
        head: see `_Section`.

    Attributes:
        id: the call's id, once the name is known; None if the model writes none.
    """

    def __init__(self, head: re.Pattern[str]) -> None:
        self.id: str | None = None
        self._pattern = head
        self._reader = CallReader()  # reads the same call rewritten as JSON
        self._head: list[str] = []
        self._is_broken = False

    @property
    def name(self) -> str | None:
        """The function's name, once the arguments begin."""
        return self._reader.name

    @property
    def is_done(self) -> bool:
        """Whether the arguments are closed."""
        return self._reader.is_done

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""
        return self._is_broken or self._reader.is_broken

    def arguments(self) -> str:
        """Return the arguments read since the last call."""
        return self._reader.arguments()

    def take_unread(self) -> str:
        """See `CallReader.take_unread`."""
        return ""

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call, which has then ended or is broken."""
        if self.name is None:
            self._read_head(character)
            return not self.is_broken
        if not self._reader.feed(character):
            return False
        if self._reader.is_between:
            self._reader.feed("}")
        return True

    def _read_head(self, character: str) -> None:
        if character != "{":
            self._is_broken = len(self._head) >= MAX_HEAD_LEN
            self._head.append(character)
            return
        found = self._pattern.fullmatch("".join(self._head))
        if found is None:
            self._is_broken = True
            return
        self.id = found.groupdict().get("id")
        for one in f'{{"{NAME}": "{found["name"]}", "{ARGUMENTS[0]}": {{':
            self._reader.feed(one)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


MAX_SPACE: Final = (
    256  # characters of white space that go with a tag; a longer run is text, so that little is held back
)


def certain_len(text: str, *tags: str) -> int:
    """Length of the start of `text` that is certain to stay outside `tags`, none of which it holds in full.

    Text that might begin a tag is not certain, and neither is white space before it, which belongs to the tag.
    """
    keep = len(text)
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                keep = min(keep, len(text) - size)
                break
    return stripped_len(text[:keep])


def stripped_len(text: str) -> int:
    """Length without trailing white space; at most `MAX_SPACE` characters are stripped."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)


OPEN: Final = CALL
CLOSE: Final = END_CALL


@dataclass(slots=True)
class CallParts:
    """What became certain with one piece of text.

    Attributes:
        content: text outside calls.
        begun: (index, name) of calls that have begun.
        arguments: (index, further arguments) of calls.
        ids: ids of calls that have begun, by index, where the model wrote one.
    """

    content: str
    begun: list[tuple[int, str]]
    arguments: list[tuple[int, str]]
    ids: dict[int, str] = field(default_factory=dict)


class CallFormReader(Protocol):
    """Reads one call, character by character."""

    @property
    def name(self) -> str | None:
        """The function's name, once it is known."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the call is complete."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""
        ...

    def arguments(self) -> str:
        """Return the arguments read since the last call."""
        ...

    def take_unread(self) -> str:
        """Return characters that were taken but are no part of the call; each is returned once."""
        ...

    def feed(self, character: str) -> bool:
        """Take one character; return False if it does not belong to the call."""
        ...


class Splitter(Protocol):
    """Splits an answer's text as it arrives."""

    def push(self, text: str) -> CallParts:
        """Return what became certain with this piece."""
        ...

    def finish(self) -> CallParts:
        """Return what was withheld until the end."""
        ...


class _Calls:
    """Numbers calls and passes on what their readers find."""

    def __init__(self) -> None:
        self.reader: CallFormReader | None = None
        self.is_announced = False
        self._num = 0

    def begin(self, reader: CallFormReader) -> None:
        self.reader, self.is_announced = reader, False

    def feed(self, text: str, parts: CallParts) -> int:
        """Feed `text` to the current call; return how many characters belong to it."""
        assert self.reader is not None
        size = 0
        while size < len(text) and not self.reader.is_done and self.reader.feed(text[size]):
            size += 1
        if self.reader.name is not None:
            if not self.is_announced:
                self.is_announced = True
                parts.begun.append((self._num, self.reader.name))
                self._num += 1
            arguments = self.reader.arguments()
            if arguments:
                parts.arguments.append((self._num - 1, arguments))
        return size


class TaggedCalls:
    """Splits off calls between tags.

    White space around calls is dropped. Text between tags that is not a call stays text, including the tags.

    Args:
        make_reader: makes a reader for the text between the tags.
    """

    def __init__(self, make_reader: Callable[[], CallFormReader] = CallReader) -> None:
        self._held = ""
        self._calls = _Calls()
        self._make_reader = make_reader
        self._raw = ""  # text of a call that has not been announced
        self._after_call = False

    def push(self, text: str) -> CallParts:
        """Return what became certain with this piece."""
        self._held += text
        parts = CallParts("", [], [])
        while self._call(parts) if self._calls.reader is not None else self._text(parts):
            pass
        return parts

    def finish(self) -> CallParts:
        """Return what was withheld until the end: an unfinished call without a name is text."""
        parts = CallParts("", [], [])
        if self._calls.reader is None:
            parts.content = self._held
        elif not self._calls.is_announced:
            parts.content = OPEN + self._raw + self._held
        self._held = ""
        return parts

    def _text(self, parts: CallParts) -> bool:
        """Emit text up to a call; return True if one begins."""
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        at = self._held.find(OPEN)
        size = stripped_len(self._held[:at]) if at >= 0 else certain_len(self._held, OPEN)
        parts.content += self._held[:size]
        if at < 0:
            self._held = self._held[size:]
            return False
        self._held = self._held[at + len(OPEN) :]
        self._raw = ""
        self._calls.begin(self._make_reader())
        return True

    def _call(self, parts: CallParts) -> bool:
        """Continue a call; return True if it has ended."""
        reader = self._calls.reader
        assert reader is not None
        size = self._calls.feed(self._held, parts)
        if not self._calls.is_announced:
            self._raw += self._held[:size]
        self._held = self._held[size:]
        if not (reader.is_done or reader.is_broken):
            return False
        unread = reader.take_unread()
        self._held = unread + self._held
        self._raw = self._raw.removesuffix(unread)
        close, again = self._held.find(CLOSE), self._held.find(OPEN)
        if close < 0 and again < 0:
            return False
        self._calls.reader = None
        if again >= 0 and (close < 0 or again < close):  # the model forgot the closing tag
            ended, self._held = self._held[:again], self._held[again:]
        else:
            ended, self._held = self._held[:close] + CLOSE, self._held[close + len(CLOSE) :]
        if self._calls.is_announced:
            self._after_call = True
        else:
            parts.content += OPEN + self._raw + ended
        return True


_BETWEEN: Final = f"{_SPACE},;"


class _MarkedCalls:
    """Splits off calls after a mark that nothing closes.

    White space around calls is dropped. Text after a mark that is not a call stays text, including the mark.

    Args:
        mark: the mark.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._calls = _Calls()
        self._held = ""
        self._raw: list[str] = []  # text of a call that has not been announced
        self._after_call = False
        self._step: Callable[[CallParts], bool] = (
            self._text
        )  # takes what it can of `_held`; returns True if there is more to do

    def push(self, text: str) -> CallParts:
        """Return what became certain with this piece."""
        self._held += text
        parts = CallParts("", [], [])
        while self._step(parts):
            pass
        return parts

    def finish(self) -> CallParts:
        """Return what was withheld: an unfinished call without a name is text, separators between calls are not."""
        held = "".join(self._raw) + self._held
        self._raw, self._held = [], ""
        is_nothing = self._calls.is_announced and not held.strip(_BETWEEN)
        return CallParts("" if is_nothing else held, [], [])

    def _text(self, parts: CallParts) -> bool:
        """Emit text up to a mark."""
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        at = self._held.find(self._mark)
        size = stripped_len(self._held[:at]) if at >= 0 else certain_len(self._held, self._mark)
        parts.content += self._held[:size]
        self._held = self._held[size:]
        if at < 0:
            return False
        self._calls.is_announced = False
        end = at - size + len(self._mark)
        self._raw, self._held = [self._held[:end]], self._held[end:]
        self._step = self._behind_mark
        return True

    def _behind_mark(self, parts: CallParts) -> bool:
        """Decide what follows a mark."""
        raise NotImplementedError

    def _behind_call(self, parts: CallParts) -> bool:
        """Decide what follows a call."""
        raise NotImplementedError

    def _begin(self, reader: CallFormReader) -> bool:
        self._calls.begin(reader)
        self._step = self._call
        return True

    def _no_call(self, parts: CallParts) -> bool:
        """Turn what was held for a call into text."""
        parts.content += "".join(self._raw)
        self._raw, self._step = [], self._text
        return True

    def _call(self, parts: CallParts) -> bool:
        """Continue a call."""
        reader = self._calls.reader
        assert reader is not None
        size = self._calls.feed(self._held, parts)
        self._take(size)
        if self._calls.is_announced:
            self._raw = []
        if reader.is_done:
            self._step = self._behind_call
            return True
        if reader.is_broken:
            self._after_call = self._calls.is_announced
            return self._no_call(parts)
        return False

    def _skip(self, characters: str) -> str:
        """Hold leading characters of this set; return the character after them, or nothing if it has not arrived."""
        self._take(len(self._held) - len(self._held.lstrip(characters)))
        return self._held[:1]

    def _take(self, size: int) -> None:
        """Hold `size` characters for a call."""
        self._raw.append(self._held[:size])
        self._held = self._held[size:]


class LlamaCalls(_MarkedCalls):
    """Splits off calls at an answer's start, more after semicolons or white space, and calls after a mark.

    Without a mark, an object is a call only if it names one of the tools; after one it may name any function.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(CallForm.LLAMA3_JSON.marks[0])
        self._names = names
        self._step = self._start

    def _start(self, parts: CallParts) -> bool:
        first = self._skip(_SPACE)
        is_near = sum(map(len, self._raw)) <= MAX_SPACE
        if first == "{" and is_near:
            return self._begin(BareCallReader(self._names))
        if not first and is_near:
            return False
        self._held = "".join(self._raw) + self._held
        self._raw, self._step = [], self._text
        return True

    def _behind_mark(self, parts: CallParts) -> bool:
        first = self._skip(_SPACE)
        if first == "{":
            return self._begin(CallReader())
        return self._no_call(parts) if first else False

    def _behind_call(self, parts: CallParts) -> bool:
        first = self._skip(f"{_SPACE};")
        self._raw = ["".join(self._raw).lstrip(_SPACE)]
        if first == "{":
            return self._begin(BareCallReader(self._names))
        if self._mark.startswith(self._held):
            return False
        if not self._held.startswith(self._mark):
            return self._no_call(parts)
        self._take(len(self._mark))
        self._step = self._behind_mark
        return True


class MistralCalls(_MarkedCalls):
    """Splits off calls after a mark: a list of objects, or a name and its arguments with a mark for each."""

    def __init__(self) -> None:
        super().__init__(CallForm.MISTRAL.marks[0])
        self._is_list = False

    def _behind_mark(self, parts: CallParts) -> bool:
        first = self._skip(_SPACE)
        if not first:
            return False
        self._is_list = first == "["
        if not self._is_list:
            return self._begin(CallReader() if first == "{" else NamedCallReader())
        self._take(1)
        self._step = self._in_list
        return True

    def _behind_call(self, parts: CallParts) -> bool:
        self._after_call = not self._is_list
        self._step = self._in_list if self._is_list else self._text
        return True

    def _in_list(self, parts: CallParts) -> bool:
        """Decide what stands before an object of a list, or after the last."""
        first = self._skip(f"{_SPACE},")
        if first == "{":
            return self._begin(CallReader())
        if not first:
            return False
        if first != "]":
            return self._no_call(parts)
        self._take(1)
        if self._calls.is_announced:
            self._raw, self._after_call = [], True
        return self._no_call(parts)


class SectionCalls(_MarkedCalls):
    """Splits off the calls of one section, each between tags of its own.

    Args:
        form: the form of DeepSeek or Kimi.
    """

    def __init__(self, form: CallForm) -> None:
        super().__init__(form.marks[0])
        self._section = _SECTIONS[form]
        self._is_fenced = False  # whether a fence has closed after the arguments

    def finish(self) -> CallParts:
        """Return what was withheld; after a call that is at most the start of a tag, which is dropped."""
        parts = super().finish()
        return CallParts("", [], []) if self._step in (self._behind_call, self._behind_end) else parts

    def _behind_mark(self, parts: CallParts) -> bool:
        begin, _, _ = self._section.tags
        tag = self._next(begin)
        if tag is None:
            return self._no_call(parts)
        return bool(tag) and self._begin(HeadedCallReader(self._section.head))

    def _call(self, parts: CallParts) -> bool:
        reader = self._calls.reader
        assert isinstance(reader, HeadedCallReader)
        goes_on = super()._call(parts)
        if reader.id is not None:
            parts.ids |= {number: reader.id for number, _ in parts.begun[-1:] if number not in parts.ids}
        return goes_on

    def _behind_call(self, parts: CallParts) -> bool:
        _, end, _ = self._section.tags
        fences = [self._section.fence] if self._section.fence and not self._is_fenced else []
        tag = self._next(end, *fences)
        if not tag:
            return False if tag is not None else self._left()
        self._is_fenced = tag != end
        if tag == end:
            self._raw, self._step = [], self._behind_end
        return True

    def _behind_end(self, parts: CallParts) -> bool:
        begin, _, close = self._section.tags
        tag = self._next(begin, close)
        if not tag:
            return False if tag is not None else self._left()
        if tag == begin:
            return self._begin(HeadedCallReader(self._section.head))
        self._raw, self._after_call, self._step = [], True, self._text
        return True

    def _left(self) -> bool:
        """Leave a section whose end is missing: what follows is text."""
        self._held = "".join(self._raw) + self._held
        self._raw, self._after_call, self._is_fenced, self._step = [], True, False, self._text
        return True

    def _next(self, *tags: str) -> str | None:
        """Hold and return the next tag; empty if it has not arrived in full, None if it is none of these."""
        self._skip(_SPACE)
        found = next((tag for tag in tags if self._held.startswith(tag)), None)
        if found is None:
            return "" if any(tag.startswith(self._held) for tag in tags) else None
        self._take(len(found))
        return found


_SECTIONS: Final = {form: _section(form) for form in CallForm if form.is_section}


def calls_of(form: CallForm, schemas: Mapping[str, Mapping[str, Any]]) -> Splitter:
    """Make the splitter for one answer's calls.

    Args:
        form: form of the calls.
        schemas: schemas of the tools' parameters, by name, if the form needs them.
    """
    match form:
        case CallForm.QWEN3_CODER:
            return TaggedCalls(lambda: EitherCallReader(schemas))
        case CallForm.LLAMA3_JSON:
            return LlamaCalls(schemas.keys())
        case CallForm.MISTRAL | CallForm.MISTRAL_ARGS:
            return MistralCalls()
        case CallForm.GLM45:
            return TaggedCalls(lambda: EitherCallReader(schemas, PairCallReader))
        case CallForm.DEEPSEEK_V3 | CallForm.DEEPSEEK_V31 | CallForm.KIMI_K2:
            return SectionCalls(form)
    return TaggedCalls()


# Forms that are read with the tools' schemas or names.
READ_BY_TOOLS: Final = frozenset((CallForm.QWEN3_CODER, CallForm.GLM45, CallForm.LLAMA3_JSON))
