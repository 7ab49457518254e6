"""How a process logs: lines of text, or one JSON object a line for machines that collect them.

An object has `time`, `level`, `logger`, `message`, then what is known of whose line it is: `role`, `worker_id`, `epoch`
of the process, `request_id` and `attempt` of an AttemptKey among the arguments, `trace_id` of the call that runs, and
whatever of these the caller gave as `extra`. A traceback is `exception`. The setting changes the format, never what is
logged.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

from baton.core.request import AttemptKey
from baton.core.telemetry import LogFormat
from baton.core.trace_context import CURRENT_TRACE

FORMAT_VARIABLE: Final = "BATON_LOG_FORMAT"  # read where no flag is given; set for processes that this one starts
ABOUT_VARIABLE: Final = "BATON_LOG_ABOUT"  # set likewise: who started them, as JSON
TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NAMES: Final = ("role", "worker_id", "epoch", "request_id", "attempt", "trace_id")


class JsonFormatter(logging.Formatter):
    """One JSON object for each record.

    Args:
        about: what holds for every line of this process.
    """

    def __init__(self, about: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.about: dict[str, object] = dict(about or {})

    def format(self, record: logging.LogRecord) -> str:
        """The line; values that JSON does not know are written as text."""
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


def head(level: str, logger: str, message: str, created_s: float) -> dict[str, Any]:
    """What every line begins with; the time is UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s))
    moment = f"{whole}.{int(created_s % 1 * 1e3):03d}Z"
    return {"time": moment, "level": level, "logger": logger, "message": message}


def default_format() -> LogFormat:
    """What the environment asks for; text unless it says json."""
    return "json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text"


def configure_logging(
    log_format: LogFormat, about: Mapping[str, object] | None = None, stream: TextIO | None = None
) -> logging.Handler:
    """Log INFO and above to `stream` (stderr); processes that are started from here on log alike.

    Called once, by whoever owns the process; a later call replaces what it had set.
    """
    about = dict(about or {})
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(about) if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    root = logging.getLogger()
    for old in [item for item in root.handlers if getattr(item, "is_batons", False)]:
        root.removeHandler(old)
    handler.is_batons = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    os.environ[FORMAT_VARIABLE] = log_format
    os.environ[ABOUT_VARIABLE] = json.dumps(about, default=str)
    return handler


def configure_inherited(role: str) -> logging.Handler:
    """Log as the process does that started this one."""
    try:
        about = json.loads(os.environ.get(ABOUT_VARIABLE, "{}"))
    except ValueError:
        about = {}
    return configure_logging(default_format(), {**(about if isinstance(about, dict) else {}), "role": role})


def know(**about: object) -> None:
    """Say more with every line from here on; nothing happens where nobody has configured the process's log."""
    for handler in logging.getLogger().handlers:
        if getattr(handler, "is_batons", False):
            known = json.loads(os.environ.get(ABOUT_VARIABLE, "{}")) | about
            os.environ[ABOUT_VARIABLE] = json.dumps(known, default=str)
            if isinstance(handler.formatter, JsonFormatter):
                handler.formatter.about |= about
