"""What flags of several commands have in common."""

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="print exactly one JSON object on stdout")]
Text = str | None
Count = int | None


def option(
    text: str, *names: str, panel: str | None = None, variable: str | None = None, least: int | None = None
) -> Any:
    """A flag whose help says its default, in brackets; of other `names` than the parameter's, in a panel of --help."""
    text = text.replace("[", r"\[")  # else rich takes a default in brackets for markup
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, envvar=variable, min=least)
