"""What flags of several commands have in common."""

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="print exactly one JSON object on stdout")]
Text = str | None
Count = int | None


def option(text: str) -> Any:
    """A flag whose help says its default, in brackets."""
    return typer.Option(help=text, show_default=False)
