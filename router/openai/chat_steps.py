"""What one choice of a chat adds to its answer, one after the other: for APIs that stream an answer part by part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Step:
    """More of the answer.

    Attributes:
        kind: of what: a thought, text, a call that begins, or the arguments of the one that began last.
        text: that is added.
        call: its id and name, of one that begins.
    """

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    call: tuple[str, str] = ("", "")


def steps(delta: dict[str, Any]) -> Iterator[Step]:
    """What a choice's delta holds. A call is complete before text follows it."""
    if delta.get("reasoning"):
        yield Step("thought", delta["reasoning"])
    calls = delta.get("tool_calls", ())
    for call in calls:
        if "id" not in call:
            yield Step("arguments", call["function"]["arguments"])
    if delta.get("content"):
        yield Step("text", delta["content"])
    for call in calls:
        if "id" in call:
            yield Step("call", "", (call["id"], call["function"]["name"]))
            if call["function"]["arguments"]:
                yield Step("arguments", call["function"]["arguments"])
