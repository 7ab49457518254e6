"""How a command ends: its exit code, its one JSON object, and the next step after a failure.

Results go to stdout, everything else to stderr. With `--json` stdout gets exactly one object, also after a failure. If
stdout is closed, nothing is printed; if writing to it fails, the command fails. If the reader has closed the pipe, no
error is reported.
"""

import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TextIO

from baton.cluster.log_tail import printable
from baton.core.errors import (
    AccessRefused,
    BatonError,
    ConfigInvalid,
    Draining,
    FeatureNotBuilt,
    InvalidRequest,
    ModelFileDamaged,
    ModelMissing,
    ModelTensorMisshapen,
    ModelTensorMissing,
    ModelTensorUnexpected,
    ModelUnsupported,
    NoWorker,
    NumericsUnsupported,
    Overloaded,
    PackageMissing,
    PortInUse,
    PreconditionUnmet,
    RayAccessRefused,
    RayLost,
    RayUnavailable,
    RayVersionMismatch,
    RequestDeadlineExceeded,
    RouterLost,
    StartupError,
    WorkerLost,
    WorkerStartFailed,
)
from baton.core.telemetry.logs import default_format, head


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format columns as wide as their content, two spaces apart; columns of numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numeric = [bool(rows) and all(cell[:1].isdigit() for cell in column) for column in zip(*rows, strict=True)]
    numeric = numeric or [False] * len(header)

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), *map(line, rows)])


class ExitCode(IntEnum):
    """Meaning of every command's exit status."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PRECONDITION = 3
    PARTIAL = 4
    TIMEOUT = 124


_DAMAGED = "fix or download the directory again"
_NEXT_STEPS: tuple[tuple[type[BatonError], str], ...] = (
    (
        ModelMissing,
        "give a Hugging Face directory, or a bundled one: tiny, tiny-hybrid, tiny-mla; for --draft-model: tiny-eagle3",
    ),
    (ModelFileDamaged, _DAMAGED),
    (ModelTensorMissing, _DAMAGED),
    (ModelTensorUnexpected, _DAMAGED),
    (ModelTensorMisshapen, _DAMAGED),
    (ModelUnsupported, "change the option that is named, or choose a model of the families that README.md names"),
    (FeatureNotBuilt, "do without it; CHANGELOG.md says what there is"),
    (PackageMissing, "install the package that is named, or leave the option out"),
    (PortInUse, "choose another port for that flag (0 picks a free one), or stop what listens there"),
    (RayAccessRefused, "give Ray's own variables, as where the cluster was started (docs/operations.md)"),
    (RayUnavailable, "install ray, or start a cluster, or use --ray-address local"),
    (RayVersionMismatch, "install the Ray version that is named, on every node"),
    (NumericsUnsupported, "leave --batch-invariant out, or run `baton doctor --selftest` for the measurement"),
    (WorkerStartFailed, "read the worker's own error above; `baton doctor` checks the machine"),
    (ConfigInvalid, "correct what is named; the command's --help lists every option"),
    (StartupError, "run `baton doctor`, then try again"),
    (RequestDeadlineExceeded, "raise --timeout, or ask for fewer tokens"),
    (AccessRefused, "give a key that may do this with --api-key-file or BATON_API_KEY; `baton keys list` shows them"),
    (RouterLost, "read the router's last words above, mend that, and start `baton serve` again"),
    (RayLost, "find out who ended it (dmesg tells of memory that ran out), and start `baton serve` again"),
    (Draining, "try again after a pause, or ask another deployment"),
    (Overloaded, "try again after a pause"),
    (WorkerLost, "try again; where no worker is left, find out why it died and start `baton serve` again"),
    (NoWorker, "see `baton status` for the workers that are missing"),
    (InvalidRequest, "correct the request"),
    (BatonError, "see `baton status`, then try again"),
)
_MODEL_FLAGS = ("kernels", "kv_dtype", "quantization", "tp")  # options for which a model may allow other values
_LATE_STEP = (
    "see whether hosts have room for every worker (`ray status`; another deployment may hold it), then "
    "read the workers' logs, or raise --start-timeout-s"
)
_FLAG_STEP = "change what is named, or leave it out; the command's --help lists every option"


def exit_code_of(error: BatonError) -> ExitCode:
    """Exit code for an error: USAGE for what the caller typed, PRECONDITION for what must hold beforehand."""
    if isinstance(error, RequestDeadlineExceeded) or error.fields.get("timed_out"):
        return ExitCode.TIMEOUT
    if isinstance(error, (ConfigInvalid, InvalidRequest)):
        return ExitCode.USAGE
    if isinstance(error, (StartupError, PreconditionUnmet)):
        return ExitCode.PRECONDITION
    return ExitCode.FAILED


def next_step(error: BatonError) -> str:
    """What the operator should do about an error."""
    if isinstance(error, ModelUnsupported) and error.fields.get("option") in _MODEL_FLAGS:
        return _FLAG_STEP
    if type(error) is StartupError and "address" in error.fields:
        return f"run `baton doctor --address {error.fields['address']}` with the same options, then try again"
    if isinstance(error, WorkerStartFailed) and error.fields.get("timed_out"):
        return _LATE_STEP
    return next(text for kind, text in _NEXT_STEPS if isinstance(error, kind))


class OutputLost(OSError):
    """Stdout could not be written."""


def take_any_text() -> None:
    """Make stdout write characters that its encoding lacks as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class Output:
    """Stdout and stderr of one command.

    Attributes:
        stdout: output stream; None if it is closed.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.log_format = default_format()  # format of notes
        self._emitted = False
        take_any_text()
        self.stdout: TextIO | None = sys.stdout

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal."""
        return self.stdout is not None and self.stdout.isatty()

    def require_stdout(self) -> None:
        """Check that printed text goes somewhere.

        Raises:
            OutputLost: stdout is closed.
        """
        if self.stdout is None:
            raise OutputLost(errno.EBADF, "stdout is closed")

    def emit(self, data: dict[str, Any], text: str = "") -> None:
        """Print the result: `data` with `--json`, otherwise `text`. At most one object is ever printed.

        Raises:
            OutputLost: stdout cannot be written.
        """
        if self.as_json:
            if not self._emitted:
                self._print(json.dumps(data) + "\n")
        elif text:
            self._print(text + "\n")
        self._emitted = True

    def write(self, text: str) -> None:
        """Print a piece of text to stdout at once, unless stdout is reserved for the JSON object.

        Raises:
            OutputLost: stdout cannot be written.
        """
        if not self.as_json and text:
            if self.is_terminal:  # a model's text must not control the terminal
                text = printable(text)
            self._print(text)

    def _print(self, text: str) -> None:
        stdout = self.stdout
        if stdout is None:
            return
        try:
            stdout.write(text)
            stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as error:
            self._emitted = True
            own = sys.__stdout__
            if own is not None and own is stdout:  # so that exit does not try to write the rest again
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), own.fileno())
            raise OutputLost(error.errno, error.strerror) from error

    def note(self, text: str, level: str = "INFO") -> None:
        """Print a line to stderr."""
        if self.log_format == "json":
            text = json.dumps(head(level, "baton.cluster", text, time.time()) | {"role": "cli"})
        print(text, file=sys.stderr, flush=True)

    def fail(self, error: BatonError, code: ExitCode | None = None) -> ExitCode:
        """Print an error with its next step and return its exit code."""
        code = exit_code_of(error) if code is None else code
        step = next_step(error)
        name = type(error).__name__
        self.note(f"baton: {name}: {error.message}\nnext: {step}", "ERROR")
        if self.as_json:
            data = {"error": name, "message": error.message, "fields": error.fields, "next": step, "exit_code": code}
            self.emit(data)
        return code


def run_command(as_json: bool, body: Callable[[Output], ExitCode]) -> ExitCode:
    """Run a command's body; operating errors become messages and exit codes, bugs keep their tracebacks."""
    output = Output(as_json)
    try:
        return _run(output, body)
    except OutputLost as error:
        step = "make room where stdout goes, or send it elsewhere"
        output.note(f"baton: cannot write the output: {error.strerror}\nnext: {step}", "ERROR")
        return ExitCode.FAILED


def _run(output: Output, body: Callable[[Output], ExitCode]) -> ExitCode:
    try:
        # Stdout is for results; what libraries print (Ray does when a worker dies) goes to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            return body(output)
    except BatonError as error:
        return output.fail(error)
    except KeyboardInterrupt:
        output.note("baton: interrupted")
        output.emit({"error": "Interrupted", "message": "interrupted", "exit_code": ExitCode.PARTIAL})
        return ExitCode.PARTIAL
