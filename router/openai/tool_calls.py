"""The split of an answer into text and tool calls. However the text is cut into pieces, the parts are the same.

Qwen's models write calls as `<tool_call>` JSON `</tool_call>` among their text (Hermes' form), and Qwen3-Coder writes
functions and parameters as further tags.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from baton.core.requests.answer_structure import CALL, END_CALL
from baton.router.openai.call_reader import CallReader
from baton.router.openai.tags import certain_len, stripped_len

OPEN: Final = CALL
CLOSE: Final = END_CALL


@dataclass(slots=True)
class Parts:
    """What became certain with one piece of text.

    Attributes:
        content: text outside calls.
        begun: (number, name) of calls that have begun.
        arguments: (number, more of its arguments).
    """

    content: str
    begun: list[tuple[int, str]]
    arguments: list[tuple[int, str]]


class Reader(Protocol):
    """Reads one call, character by character."""

    @property
    def name(self) -> str | None:
        """The function's, once it is known."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the call is complete."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether it is none."""
        ...

    def arguments(self) -> str:
        """What was read of its arguments since the last time."""
        ...

    def take_unread(self) -> str:
        """Characters that it took and that turned out to be no part of the call; once."""
        ...

    def feed(self, character: str) -> bool:
        """Take one character; False if it does not belong to the call."""
        ...


class Splitter(Protocol):
    """Takes an answer's text as it comes."""

    def push(self, text: str) -> Parts:
        """What became certain with this piece."""
        ...

    def finish(self) -> Parts:
        """What was withheld at the end."""
        ...


class _Calls:
    """Numbers calls and passes on what is read of them."""

    def __init__(self, make_reader: Callable[[], Reader]) -> None:
        self.reader: Reader | None = None
        self.is_announced = False
        self._make_reader = make_reader
        self._num = 0

    def begin(self) -> None:
        self.reader, self.is_announced = self._make_reader(), False

    def feed(self, text: str, parts: Parts) -> int:
        """How many characters of `text` belong to the call."""
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
    """Calls between tags, among text.

    White space around calls is dropped. What stands between tags and is no call is text, tags and all.

    Args:
        make_reader: of what stands between the tags.
    """

    def __init__(self, make_reader: Callable[[], Reader] = CallReader) -> None:
        self._held = ""
        self._calls = _Calls(make_reader)
        self._raw = ""  # of a call that has not been announced
        self._after_call = False

    def push(self, text: str) -> Parts:
        """What became certain with this piece."""
        self._held += text
        parts = Parts("", [], [])
        while self._call(parts) if self._calls.reader is not None else self._text(parts):
            pass
        return parts

    def finish(self) -> Parts:
        """What was withheld at the end: an unfinished call without a name is text."""
        parts = Parts("", [], [])
        if self._calls.reader is None:
            parts.content = self._held
        elif not self._calls.is_announced:
            parts.content = OPEN + self._raw + self._held
        self._held = ""
        return parts

    def _text(self, parts: Parts) -> bool:
        """Show text up to a call; True if one begins."""
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
        self._calls.begin()
        return True

    def _call(self, parts: Parts) -> bool:
        """Read on in a call; True if it has ended."""
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
        if again >= 0 and (close < 0 or again < close):  # its end was forgotten
            ended, self._held = self._held[:again], self._held[again:]
        else:
            ended, self._held = self._held[:close] + CLOSE, self._held[close + len(CLOSE) :]
        if self._calls.is_announced:
            self._after_call = True
        else:
            parts.content += OPEN + self._raw + ended
        return True
