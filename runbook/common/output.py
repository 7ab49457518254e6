"""Output of a runbook, whose work must not depend on whether its output can be written.

A pipe whose reader has ended, a full disk or a closed terminal ends the output, never the run.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class LenientOutput:
    """A text file that ignores further writes after its first error.

    Args:
        file: file to write to; None if the process was started without it.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write the text, if possible."""
        if self._file is not None:
            try:
                return self._file.write(text)
            except OSError:
                self._end()
        return len(text)

    def flush(self) -> None:
        """Flush, if possible."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError:
                self._end()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._file is not None and self._file.isatty()

    def _end(self) -> None:
        """Redirect what is left in buffers to /dev/null, because the interpreter would otherwise fail at exit."""
        file, self._file = self._file, None
        assert file is not None
        with contextlib.suppress(OSError):  # no file descriptor is behind it
            number = file.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


@contextlib.contextmanager
def lenient_output() -> Iterator[None]:
    """Make stdout and stderr of this process lenient."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    lenient: tuple[Any, Any] = LenientOutput(sys.stdout), LenientOutput(sys.stderr)
    sys.stdout, sys.stderr = lenient
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
