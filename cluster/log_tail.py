"""Copies what a deployment's processes log to serve's stderr: warnings, errors, tracebacks, and requests if enabled.

Every process writes to a file of its own in the deployment's directory, which is removed at the deployment's end. A
thread reads what was added and passes on what an operator needs; the rest stays in the files.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.3
MAX_LINES = 100  # per file and poll; a process that logs without end must not bury the others
MAX_LINE_LEN = 2000
REQUEST_LOGGER = "baton.router.inference"
_PATTERNS = ("router.err", "ray/session_*/logs/worker-*.err")
_HEAD = re.compile(r"\d{4}-\d\d-\d\d \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+): ")
_SHOWN = ("WARNING", "ERROR", "CRITICAL")
_CRASH = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called|\*\*\* SIG|Segmentation")


class LogTail:
    """Follows the log files below a directory from its construction to `close`.

    Args:
        directory: directory of the deployment.
        on_line: called with each line to show, on a thread of its own.
    """

    def __init__(self, directory: Path, on_line: Callable[[str], None]) -> None:
        self._directory = directory
        self._on_line = on_line
        self._files: dict[Path, _File] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-tail", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show what remains, and stop."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._poll()
        self._poll()

    def _poll(self) -> None:
        for path in sorted(path for pattern in _PATTERNS for path in self._directory.glob(pattern)):
            if path.parent.parent.is_symlink():  # session_latest, the same files again
                continue
            file = self._files.setdefault(path, _File(path))
            for line in file.shown():
                self._on_line(line)


class _File:
    """A log file, with the position up to which it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""
        self._is_shown = False  # whether the lines that follow continue a shown message
        self._is_named = path.name == "router.err"
        self._prefix = "router: " if self._is_named else f"{path.stem.rpartition('-')[2]}: "

    def shown(self) -> Iterator[str]:
        """New complete lines to show."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._at)
                data = stream.read()
        except OSError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_shown = 0
        for raw in lines:
            text = raw.decode("utf-8", errors="replace")
            if text.startswith(":actor_name:"):
                self._prefix = f"{text.removeprefix(':actor_name:')[:40]} {self._prefix}"
            if not text.strip() or not self._belongs(text):
                continue
            num_shown += 1
            if num_shown <= MAX_LINES:
                if text.startswith("{"):  # JSON stays JSON
                    yield text
                    continue
                if not self._is_named:
                    self._is_named = True
                    yield f"{self._prefix}logs to {self._path}"
                yield self._prefix + printable(text[:MAX_LINE_LEN])
        if num_shown > MAX_LINES:
            yield f"{self._prefix}{num_shown - MAX_LINES} more lines in {self._path}"

    def _belongs(self, text: str) -> bool:
        level, logger = _level_of(text)
        if level:
            self._is_shown = level in _SHOWN or logger == REQUEST_LOGGER
        elif _CRASH.match(text):
            self._is_shown = True
        return self._is_shown


def _level_of(text: str) -> tuple[str, str]:
    """Level and logger of a line that begins a message; empty strings for a continuation line."""
    found = _HEAD.match(text)
    if found:
        return found.group(1), found.group(2)
    if text.startswith('{"time"'):
        try:
            line = json.loads(text)
        except ValueError:
            return "", ""
        return str(line.get("level", "")), str(line.get("logger", ""))
    return "", ""


def printable(text: str) -> str:
    """Escape control characters, so that no text controls the terminal; tabs and line ends stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
