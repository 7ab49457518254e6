"""Tags in text that comes in pieces: what may already be shown, and what might still belong to a tag."""

from typing import Final

MAX_SPACE: Final = (
    256  # characters of white space that go with a tag; a longer run is text, so that little is held back
)


def certain_len(text: str, *tags: str) -> int:
    """How much of `text`, which holds none of `tags` in full, is certain to stay outside them.

    What might begin a tag is not, and neither is white space before it, which goes with the tag.
    """
    keep = len(text)
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                keep = min(keep, len(text) - size)
                break
    return stripped_len(text[:keep])


def stripped_len(text: str) -> int:
    """The length without the white space at its end, of which at most `MAX_SPACE` characters go."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)
