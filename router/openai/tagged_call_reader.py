"""One tool call as Qwen3-Coder writes it, read character by character.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

Values are bare text; what the tool's schema does not call a string is read as JSON where it is JSON. Each argument is
passed on when its value has ended.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from baton.router.openai.call_reader import CallReader

FUNCTION: Final = "<function="
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
END_FUNCTION: Final = "</function>"
MAX_NAME_LEN: Final = 256


class _State(Enum):
    BEFORE = "before"  # the function's tag
    NAME = "name"
    BODY = "body"  # a parameter's tag, or the end
    KEY = "key"
    VALUE = "value"
    DONE = "done"
    BROKEN = "broken"


class TaggedCallReader:
    """Reads one function. Feed it characters until it has ended.

    Args:
        schemas: of the parameters, by function.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self._unread = ""
        self._schemas = schemas
        self._state = _State.BEFORE
        self._text = ""  # of what is being read
        self._key = ""
        self._value: list[str] = []
        self._keys: set[str] = set()
        self._arguments = ""

    @property
    def is_done(self) -> bool:
        """Whether the function is closed."""
        return self._state is _State.DONE

    @property
    def is_broken(self) -> bool:
        """Whether it is no such thing; its arguments are closed then all the same."""
        return self._state is _State.BROKEN

    def arguments(self) -> str:
        """The arguments read since the last time, as parts of a JSON object."""
        text, self._arguments = self._arguments, ""
        return text

    def take_unread(self) -> str:
        """Characters that were taken and turned out to be no part of the call; once."""
        text, self._unread = self._unread, ""
        return text

    def feed(self, character: str) -> bool:
        """Take one character; False if it does not belong to the call, which has then ended or is broken."""
        match self._state:
            case _State.BEFORE:
                return self._tag(character, {FUNCTION: _State.NAME})
            case _State.BODY:
                return self._tag(character, {PARAMETER: _State.KEY, END_FUNCTION: _State.DONE})
            case _State.NAME | _State.KEY:
                return self._name(character)
            case _State.VALUE:
                self._value.append(character)
                if character == ">" and "".join(self._value[-len(END_PARAMETER) :]) == END_PARAMETER:
                    self._argument("".join(self._value[: -len(END_PARAMETER)]))
                    self._value.clear()
                    self._state = _State.BODY
                return True
        return False

    def _tag(self, character: str, tags: Mapping[str, _State]) -> bool:
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
        if not name or (self._state is _State.KEY and name in self._keys):
            return self._break()
        if self._state is _State.NAME:
            self.name, self._state = name, _State.BODY
        else:
            self._key, self._state = name, _State.VALUE
        self._text = ""
        return True

    def _break(self) -> bool:
        self._state, self._unread = _State.BROKEN, self._text
        if self.name is not None:
            self._close()
        return False

    def _argument(self, text: str) -> None:
        text = text.removeprefix("\n").removesuffix("\n")
        self._arguments += ", " if self._keys else "{"
        self._arguments += f"{json.dumps(self._key, ensure_ascii=False)}: {self._json(text)}"
        self._keys.add(self._key)

    def _json(self, text: str) -> str:
        schema = self._schemas.get(self.name or "", {}).get("properties")
        kind = schema.get(self._key) if isinstance(schema, Mapping) else None
        if not (isinstance(kind, Mapping) and kind.get("type") == "string"):
            try:
                return json.dumps(json.loads(text, parse_constant=_no_number), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass  # bare text
        return json.dumps(text, ensure_ascii=False)

    def _close(self) -> None:
        self._arguments += "}" if self._keys else "{}"


class EitherCallReader:
    """Reads a call in tags, or in JSON if it begins with a brace: what tags cannot say a grammar leaves to JSON.

    Args:
        schemas: as for `TaggedCallReader`.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._reader: CallReader | TaggedCallReader = TaggedCallReader(schemas)
        self._has_begun = False

    @property
    def name(self) -> str | None:
        """The function's, once it is known."""
        return self._reader.name

    @property
    def is_done(self) -> bool:
        """Whether the call is complete."""
        return self._reader.is_done

    @property
    def is_broken(self) -> bool:
        """Whether it is none."""
        return self._reader.is_broken

    def arguments(self) -> str:
        """The arguments read since the last time."""
        return self._reader.arguments()

    def take_unread(self) -> str:
        """What it took and does not belong to the call; once."""
        return self._reader.take_unread()

    def feed(self, character: str) -> bool:
        """Take one character; False if it does not belong to the call."""
        if not self._has_begun and not character.isspace():
            self._has_begun = True
            self._reader = CallReader() if character == "{" else self._reader
        return self._reader.feed(character)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
