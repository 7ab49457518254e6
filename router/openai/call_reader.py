"""One tool call as a model writes it, `{"name": ..., "arguments": {...}}`, read character by character.

The name is known as soon as its string is closed, and the arguments are passed on as they are written; no more of JSON
is checked than is needed to know where a value ends. Of values with one meaning (a key twice, or `parameters` beside
`arguments`) the first counts.
"""

import json
from enum import Enum
from typing import Final

NAME: Final = "name"
ARGUMENTS: Final = ("arguments", "parameters")
MAX_NAME_LEN: Final = 256
_SPACE: Final = " \t\r\n"


class _State(Enum):
    BEFORE = "before"  # the object
    MEMBER = "member"  # a key, a comma or the end
    KEY = "key"
    COLON = "colon"
    BEFORE_VALUE = "before value"
    VALUE = "value"
    DONE = "done"
    BROKEN = "broken"


class CallReader:
    """Reads one object. Feed it characters until it has ended."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._state = _State.BEFORE
        self._text = ""  # of the key or the value that is being read
        self._key = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._is_of_arguments = False  # the value that is being read

    @property
    def is_done(self) -> bool:
        """Whether the object is closed."""
        return self._state is _State.DONE

    @property
    def is_broken(self) -> bool:
        """Whether it is no such object."""
        return self._state is _State.BROKEN

    def arguments(self) -> str:
        """The arguments read since the last time; nothing before the name is known. Without any, `{}`."""
        if self.name is None:
            return ""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def take_unread(self) -> str:
        """Characters that were taken and turned out to be no part of the call: none here."""
        return ""

    def feed(self, character: str) -> bool:
        """Take one character; False if it does not belong to the object, which has then ended or is broken."""
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
                    self._is_of_arguments = self._key in ARGUMENTS and not self._has_arguments  # the first counts
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
        elif character == "<":  # never outside a string: the call has been left
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
