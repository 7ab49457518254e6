"""`baton runbook`: finds the executables of `runbook/`, beside this room, and becomes the one that is named."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import baton
from baton.cluster.outcome import ExitCode, Output, run_command
from baton.cluster.table import format_table
from baton.core.errors import ConfigInvalid

ROOM = Path(baton.__file__).resolve().parent / "runbook"


def runbook_names() -> list[str]:
    """What can be run."""
    return sorted(path.stem.replace("_", "-") for path in ROOM.glob("*.py") if path.name != "__init__.py")


def run_runbook(name: str | None, arguments: Sequence[str]) -> int:
    """Become the program that is named; without a name (or with flags alone) list them, and return an exit code."""
    if name is None or name.startswith("-"):
        return _list(flags=[name, *arguments] if name else arguments)
    if name not in runbook_names():

        def refuse(output: Output) -> ExitCode:
            raise ConfigInvalid(f"no runbook {name!r}; there are {', '.join(runbook_names())}", keys=["name"])

        return run_command("--json" in arguments, refuse)
    script = ROOM / f"{name.replace('-', '_')}.py"
    os.execv(sys.executable, [sys.executable, "-P", str(script), *arguments])


def _list(flags: Sequence[str]) -> int:
    def body(output: Output) -> ExitCode:
        unknown = set(flags) - {"--json", "--help"}
        if unknown:
            raise ConfigInvalid(f"{', '.join(sorted(unknown))}: a runbook's flags come after its name", keys=["name"])
        rows = [(name, about(name)) for name in runbook_names()]
        output.emit({"runbooks": [{"name": name, "about": text} for name, text in rows]}, format_table(HEADER, rows))
        return ExitCode.OK

    return run_command("--json" in flags, body)


HEADER = ("runbook", "what for")


def about(name: str) -> str:
    """The sentence its file opens with."""
    source = (ROOM / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    return source.split('"""')[1].strip().splitlines()[0]
