"""Where a runbook's words go, also when no one takes them any more: its work does not depend on who reads of it.

A pipe whose reader has ended, a full disk or a terminal that is gone ends the output, never the run.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class LenientOutput:
    """A file of text that takes nothing more after its first error.

    Args:
        file: that is written to; None where the process was started without it.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write it, if it can be written."""
        if self._file is not None:
            try:
                return self._file.write(text)
            except OSError:
                self._end()
        return len(text)

    def flush(self) -> None:
        """The same for what was written."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError:
                self._end()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._file is not None and self._file.isatty()

    def _end(self) -> None:
        """What is left in buffers goes nowhere, or the interpreter fails over it at its end."""
        file, self._file = self._file, None
        assert file is not None
        with contextlib.suppress(OSError):  # nothing that the system knows is behind it
            number = file.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


@contextlib.contextmanager
def lenient_output() -> Iterator[None]:
    """For stdout and stderr of this process."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    lenient: tuple[Any, Any] = LenientOutput(sys.stdout), LenientOutput(sys.stderr)
    sys.stdout, sys.stderr = lenient
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
