"""Errors that cross from the thread where they happened to the thread that asks."""

import traceback


def without_frames(error: BaseException) -> BaseException:
    """The same error with its traceback as a note: frames keep alive whatever the failed work had captured."""
    text = "".join(traceback.format_exception(error))
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        following.__traceback__ = None
        seen.append(following)
        following = following.__cause__ or following.__context__
    error.add_note(f"Where it happened:\n{text}")
    return error
