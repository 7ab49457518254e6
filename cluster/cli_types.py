"""What flags of several commands have in common."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="print exactly one JSON object on stdout")]
Text = str | None
Count = int | None
Command = Callable[..., int]


def option(
    text: str,
    *names: str,
    panel: str | None = None,
    variable: str | None = None,
    least: int | None = None,
    metavar: str = "",
) -> Any:
    """A flag whose help says its default, in brackets; of other `names` than the parameter's, in a panel of --help."""
    return typer.Option(
        *names,
        help=text.replace("[", r"\["),  # else rich takes a default in brackets for markup
        show_default=False,
        rich_help_panel=panel,
        envvar=variable,
        min=least,
        metavar=f"<{metavar}>" if metavar else None,
    )


def parameter(name: str, kind: Any, flag: Any) -> inspect.Parameter:
    """A parameter of a command that is None unless its flag is given."""
    annotation = Annotated[kind | None, flag]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def extended(command: Command, added: Sequence[inspect.Parameter], *, before: str | None = None) -> Command:
    """The command with more parameters, last or before one of its own; it gets them with its other keywords."""
    signature = inspect.signature(command)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    own = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
    at = [item.name for item in own].index(before) if before else len(own)
    parameters = [*own[:at], *added, *own[at:]]

    @functools.wraps(command)
    def reach(**values: Any) -> int:
        return command(**values)

    reach.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    reach.__annotations__ = {item.name: item.annotation for item in parameters} | {"return": int}
    return reach
