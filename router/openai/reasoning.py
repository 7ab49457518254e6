"""Splits an answer into thoughts and the rest, for models that write thoughts between tags (`ThoughtForm`).

White space around the tags belongs to neither part. The parts do not depend on how the text is cut into pieces.
"""

from collections.abc import Iterable
from enum import Enum

from baton.core.requests.answer_structure import ThoughtForm
from baton.core.requests.tokenizer import TokenStream
from baton.router.openai.tool_calls import MAX_SPACE, certain_len, stripped_len


class _State(Enum):
    START = "start"
    THINKING = "thinking"
    AFTER = "after"
    REST = "rest"


class ReasoningSplitter:
    """Splits an answer's text as it arrives.

    Args:
        is_open: whether the prompt ended inside a thought, so that the answer begins with its continuation.
        form: the tags.
    """

    def __init__(self, *, is_open: bool = False, form: ThoughtForm = ThoughtForm.TAGS) -> None:
        self.is_open = is_open
        self.form = form
        self._state = _State.START
        self._held = ""
        self._shown_any = False

    def push(self, text: str) -> tuple[str, str]:
        """Return the (thoughts, rest) that became certain with this piece."""
        self._held += text
        reasoning = ""
        if self._state is _State.START:
            self._start()
        if self._state is _State.THINKING:
            reasoning = self._think()
        return reasoning, self._rest()

    def finish(self) -> tuple[str, str]:
        """Return what was withheld until the end."""
        held, self._held = self._held, ""
        in_thought = self._state is _State.THINKING or (self._state is _State.START and self.is_open)
        if self._state is _State.AFTER:
            return "", ""
        return (held, "") if in_thought else ("", held)

    def _start(self) -> None:
        """Detect a thought's opening tag, which counts only at the very beginning."""
        begun = self._held.lstrip()
        is_late = len(self._held) - len(begun) > MAX_SPACE
        if begun.startswith(self.form) and not is_late:
            self._held = begun[len(self.form) :].lstrip()
            self._state = _State.THINKING
        elif is_late or not self.form.startswith(begun):
            self._state = _State.THINKING if self.is_open else _State.REST

    def _think(self) -> str:
        if not self._shown_any:
            self._held = self._held.lstrip()
        at = self._held.find(self.form.end)
        if at >= 0:
            shown, self._held = self._held[: stripped_len(self._held[:at])], self._held[at + len(self.form.end) :]
            self._state = _State.AFTER
        else:
            size = certain_len(self._held, self.form.end)
            shown, self._held = self._held[:size], self._held[size:]
        self._shown_any = self._shown_any or bool(shown)
        return shown

    def _rest(self) -> str:
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.REST
        if self._state is not _State.REST:
            return ""
        shown, self._held = self._held, ""
        return shown


class ReasoningCount:
    """Counts the tokens of an answer's thoughts: those that start after the opening tag and before the closing one.

    Args:
        stream: detokenizes the answer.
        is_open: see `ReasoningSplitter`.
        form: see `ReasoningSplitter`.

    Attributes:
        num_before_text: tokens up to the end of the closing tag; 0 until it has arrived.
    """

    def __init__(self, stream: TokenStream, *, is_open: bool, form: ThoughtForm = ThoughtForm.TAGS) -> None:
        self.num_before_text = 0
        self._num_pushed = 0
        self._num_certain = 0
        self._stream = stream
        self._form = form
        self._is_open = is_open  # past the opening tag
        self._is_over = False
        self._text = ""  # text that may contain a tag
        self._begins: list[int] = []  # offsets in `_text` of tokens that may belong to a tag

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far; the last ones may turn out to belong to the closing tag."""
        return self._num_certain + (len(self._begins) if self._is_open and not self._is_over else 0)

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the tokens that follow."""
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_pushed += 1
            self._begins.append(len(self._text))
            self._text += self._stream.push(token_id)
            self._look()

    def _look(self) -> None:
        if not self._is_open:
            begun = self._text.lstrip()
            if not begun.startswith(self._form):
                self._is_over = not self._form.startswith(begun)  # the answer has no thoughts
                return
            self._is_open = True
            self._text, self._begins = begun[len(self._form) :], []
        at = self._text.find(self._form.end)
        self._is_over = at >= 0
        if self._is_over:
            self.num_before_text = self._num_pushed
        # The last characters may be the start of the closing tag.
        num_certain = at if self._is_over else max(0, len(self._text) - len(self._form.end) + 1)
        later = [begin for begin in self._begins if begin >= num_certain]
        self._num_certain += len(self._begins) - len(later)
        self._begins = [begin - num_certain for begin in later]
        self._text = self._text[num_certain:]
