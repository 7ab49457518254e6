"""The command around a runbook: its flags, its report, its exit code. Every runbook has these."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from baton.client.access import Access
from baton.cluster.access import current_access
from baton.cluster.outcome import ExitCode, Output, run_command
from baton.core.clock import MonotonicClock
from baton.core.errors import ConfigInvalid
from baton.runbook.common.canary import require_client
from baton.runbook.common.interrupts import interruptible
from baton.runbook.common.output import lenient_output
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Run, RunbookReport, Step, Taken

DEFAULT_ADDRESS = "127.0.0.1:50051"
EXIT_CODES = (
    "Exit codes: 0 ok, 1 failed and undone, 2 usage, 3 precondition not met and nothing changed, "
    "4 partial: something stays changed or is left to be done, 124 timeout."
)
_MARKS = {"ok": "ok", "failed": "FAILED", "planned": "would", "not needed": "is so"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runbook:
    """Definition of a runbook.

    Attributes:
        name: name of its command and its page.
        about: one sentence for --help.
        steps: makes the steps for a deployment and the given flags.
        options: adds flags of its own.
        timeout_s: default of --timeout.
        sends_canaries: whether it sends requests as a client.
    """

    name: str
    about: str
    steps: Callable[[Site, argparse.Namespace], Sequence[Step]]
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    timeout_s: float = 300.0
    sends_canaries: bool = True


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are exit code 2 and, with --json, an object."""

    def error(self, message: str) -> NoReturn:
        raise ConfigInvalid(f"{self.prog}: {message}")


def main(runbook: Runbook, arguments: Sequence[str] | None = None) -> int:
    """Run the runbook, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(runbook)
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return int(ExitCode.OK)
    as_json = "--json" in arguments

    def body(output: Output) -> ExitCode:
        options = parser.parse_args(arguments)
        return _run(runbook, options, output)

    with lenient_output(), interruptible():
        return int(run_command(as_json, body))


def _parser(runbook: Runbook) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"baton runbook {runbook.name}", description=runbook.about, epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help=f"HOST:PORT of the router  [{DEFAULT_ADDRESS}]")
    parser.add_argument("--client-address", default="", help="where clients come, if --address is for operators alone")
    parser.add_argument("--client-api-key-file", default="", help="a client's key, if clients need another than you")
    runbook.options(parser)
    parser.add_argument("--dry-run", action="store_true", help="check what must hold, say what would be done")
    parser.add_argument(
        "--timeout", type=positive, default=runbook.timeout_s, help=f"seconds for all of it  [{runbook.timeout_s:g}]"
    )
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    return parser


def positive(text: str) -> float:
    """Parse a flag as a positive, finite number.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def count(text: str) -> int:
    """Parse a flag as a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count_or_none(text: str) -> int:
    """Parse a flag as a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    return 0 if text == "0" else count(text)


def _run(runbook: Runbook, options: argparse.Namespace, output: Output) -> ExitCode:
    clock = MonotonicClock()
    site = Site(options.address, clock, options.timeout, options.client_address, _client_access(options))

    def show(taken: Taken) -> None:
        output.write(format_taken(taken) + "\n")

    if runbook.sends_canaries:
        require_client(site)
    steps = runbook.steps(site, options)
    report = Run(clock, dry=options.dry_run, found=site.found, on_taken=show).carry_out(steps)
    data = {"runbook": runbook.name, "address": options.address, "dry_run": options.dry_run} | report_data(report)
    if report.error is not None:
        output.note(f"baton: {type(report.error).__name__}: {report.error.message}\nnext: {report.next}")
    output.emit(data, f"{runbook.name}: {_ending(report, options.dry_run)}")
    return report.exit_code


def _client_access(options: argparse.Namespace) -> Access:
    own = current_access()
    if not options.client_api_key_file:
        return own
    return replace(own, api_key=Access.of({"api_key_file": options.client_api_key_file}).api_key)


def report_data(report: RunbookReport) -> dict[str, Any]:
    """Build the `--json` form of a report."""
    data: dict[str, Any] = {
        "ok": report.exit_code is ExitCode.OK,
        "exit_code": report.exit_code,
        "changed": report.is_changed,
        "steps": [asdict(taken) for taken in report.taken],
        "found": report.found,
    }
    if report.error is not None:
        error = report.error
        data |= {"error": type(error).__name__, "message": error.message, "fields": error.fields, "next": report.next}
    return data


def format_taken(taken: Taken) -> str:
    """Format a step as a line of text."""
    seconds = f"  ({taken.seconds:.1f} s)" if taken.seconds >= 0.1 else ""
    detail = f": {taken.detail}" if taken.detail else ""
    return f"{_MARKS[taken.state]:6}  {taken.kind:12}  {taken.name}{detail}{seconds}"


def _ending(report: RunbookReport, dry_run: bool) -> str:
    if report.exit_code is not ExitCode.OK:
        what = "something was changed and stays so" if report.is_changed else "nothing stays changed"
        return f"exit code {int(report.exit_code)}; {what}"
    if dry_run:
        return "dry run, nothing was changed"
    return "done" if report.is_changed else "done; there was nothing to change"
