"""Configures a process's logs: lines of text, or one JSON object per line for collectors.

An object has `time`, `level`, `logger` and `message`, then what is known about the line's origin: `role`, `worker_id`
and `epoch` of the process, `request_id` and `attempt` of an AttemptKey among the arguments, `trace_id` of the current
call, and any of these given as `extra`. A traceback is in `exception`. The setting changes the format, never what is
logged.
"""

import hashlib
import json
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from baton.core.errors import InvalidRequest
from baton.core.requests.request import AttemptKey
from baton.core.telemetry.span import CURRENT_TRACE
from baton.core.telemetry.telemetry import LogFormat

FORMAT_VARIABLE: Final = "BATON_LOG_FORMAT"  # used if no flag is given; set for processes started by this one
ABOUT_VARIABLE: Final = "BATON_LOG_ABOUT"  # set likewise: the identity of the process that started them, as JSON
TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_FILE_BYTES: Final = 64 << 20  # per log file, of which there are two: the current and the previous one
STDERR: Final = 2
NAMES: Final = ("role", "worker_id", "epoch", "request_id", "attempt", "trace_id")


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object.

    Args:
        about: fields of every line of this process.
    """

    def __init__(self, about: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.about: dict[str, object] = dict(about or {})

    def format(self, record: logging.LogRecord) -> str:
        """Format a line; values that JSON cannot represent are written as text."""
        line = head(record.levelname, record.name, record.getMessage(), record.created) | self.about
        trace_id = CURRENT_TRACE.get()
        if trace_id:
            line["trace_id"] = trace_id
        for argument in record.args.values() if isinstance(record.args, Mapping) else record.args or ():
            if isinstance(argument, AttemptKey):
                line |= {"request_id": argument.request_id, "attempt": argument.attempt}
        line |= {name: record.__dict__[name] for name in NAMES if name in record.__dict__}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats each record as one line, whatever its text: clients' text can neither begin a line nor move the cursor.

    Lines of a traceback follow a bar.
    """

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Format the line, and the traceback, ignoring another handler's cached one."""
        before, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = before

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line with control characters escaped."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Format the traceback, indented."""
        return _behind_bar(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Format the stack, indented."""
        return _behind_bar(super().formatStack(stack_info))


def escaped(text: str) -> str:
    """Escape control characters, and others that might begin a line, as in Python."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shown(error: BaseException) -> str:
    """What a log may show of an error; for one that quotes a client's request, only its kind, length and a digest."""
    name = type(error).__name__
    if not isinstance(error, InvalidRequest):
        return f"{name}: {error}"
    text = str(error)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    field = error.fields.get("field")
    return f"{name}{'' if field is None else f' of {str(field)[:64]}'} ({len(text)} characters, {digest})"


def _behind_bar(text: str) -> str:
    return "\n".join(f"  | {escaped(line)}" for line in text.split("\n"))


def head(level: str, logger: str, message: str, created_s: float) -> dict[str, Any]:
    """The fields that every line begins with; the time is UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s))
    moment = f"{whole}.{int(created_s % 1 * 1e3):03d}Z"
    return {"time": moment, "level": level, "logger": logger, "message": message}


def default_format() -> LogFormat:
    """The format that the environment selects; text unless it is json."""
    return "json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text"


class RotatingStderr(logging.StreamHandler[TextIO]):
    """Writes to stderr; if that is a file, renames it to `.1` when it has grown, and starts a new one.

    Everything that the process writes to stderr moves along, including C++ lines, and so does any other process that
    writes to the same file and logs this way.
    """

    def __init__(self, max_bytes: int = MAX_FILE_BYTES) -> None:
        super().__init__(sys.stderr)
        self._max_bytes = max_bytes
        self._path = file_behind(STDERR)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        super().emit(record)
        if self._path is not None:
            self._rotate(self._path)

    def _rotate(self, path: Path) -> None:
        ours = os.fstat(STDERR)
        try:
            if path.exists() and os.path.samestat(ours, path.stat()):
                if ours.st_size < self._max_bytes:
                    return
                path.replace(path.with_name(path.name + ".1"))
            file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            self._path = None  # the folder is gone or not writable: keep the file as it is
            return
        os.dup2(file, STDERR)
        os.close(file)


def file_behind(number: int) -> Path | None:
    """The file behind a file descriptor; None if it is no regular file, or no longer has a name."""
    try:
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        return path if is_file and path.exists() and os.path.samestat(path.stat(), os.fstat(number)) else None
    except OSError:
        return None


def configure_logging(
    log_format: LogFormat,
    about: Mapping[str, object] | None = None,
    stream: TextIO | None = None,
    *,
    rotates: bool = False,
) -> logging.Handler:
    """Log INFO and above to `stream` (default: stderr), also in processes started from here on.

    With `rotates`, stderr is a file of Baton's own, which must not grow for ever.

    It is called once in a process, at its start; a later call replaces the earlier settings.
    """
    about = dict(about or {})
    handler: logging.Handler
    handler = RotatingStderr() if rotates and stream is None else logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(about) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [item for item in root.handlers if getattr(item, "is_batons", False)]:
        root.removeHandler(old)
    vars(handler)["is_batons"] = True
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    os.environ[FORMAT_VARIABLE] = log_format
    os.environ[ABOUT_VARIABLE] = json.dumps(about, default=str)
    return handler


def rotates() -> bool:
    """Whether this process rotates its log file."""
    return any(isinstance(handler, RotatingStderr) for handler in logging.getLogger().handlers)


def configure_inherited(role: str, *, rotates: bool = True) -> logging.Handler:
    """Log as the parent process does."""
    try:
        about = json.loads(os.environ.get(ABOUT_VARIABLE, "{}"))
    except ValueError:
        about = {}
    return configure_logging(
        default_format(), {**(about if isinstance(about, dict) else {}), "role": role}, rotates=rotates
    )


def know(**about: object) -> None:
    """Add fields to every line from here on; does nothing if the process's log is not configured."""
    for handler in logging.getLogger().handlers:
        if getattr(handler, "is_batons", False):
            known = json.loads(os.environ.get(ABOUT_VARIABLE, "{}")) | about
            os.environ[ABOUT_VARIABLE] = json.dumps(known, default=str)
            if isinstance(handler.formatter, JsonFormatter):
                handler.formatter.about |= about
