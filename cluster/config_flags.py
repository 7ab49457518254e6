"""Flags of the keys of `ServeConfig`, made from their declarations there.

They are made when a command is called or its help is asked for, not before: the configuration needs pydantic, which
`baton --help` does not wait for.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from baton.cluster.cli_types import Command, extended, option, parameter


def with_every_key(app: typer.Typer) -> Callable[[Command], Command]:
    """Register a command with a flag for each key, in the panel that it is declared in; one not given is None."""
    return _registered(app, lambda: _flags(None, condition="", has_panels=True))


def with_keys(app: typer.Typer, *names: str, condition: str = "") -> Callable[[Command], Command]:
    """Register a command with flags for a few keys, in no panel; the condition goes before their help."""
    return _registered(app, lambda: _flags(names, condition=condition, has_panels=False))


def _flags(names: tuple[str, ...] | None, *, condition: str, has_panels: bool) -> Iterator[inspect.Parameter]:
    from baton.core.config import ServeConfig
    from baton.core.config_key import keys_of

    keys = keys_of(ServeConfig)
    for name in keys if names is None else names:
        key = keys[name]
        panel = key.panel if has_panels else None
        yield parameter(name, key.kind, option(condition + key.help, panel=panel, metavar=key.metavar))


def _registered(app: typer.Typer, flags: Callable[[], Iterator[inspect.Parameter]]) -> Callable[[Command], Command]:
    def register(command: Command) -> Command:
        class KeyedCommand(TyperCommand):
            """The command; it has its flags from when they are first asked for."""

            _has_flags = False

            def get_params(self, ctx: Any) -> Any:
                """Those of the function, with the flags before --json."""
                if not self._has_flags:
                    alone = typer.Typer(add_completion=False)
                    alone.command()(extended(command, list(flags()), before="json"))
                    made = get_command(alone)
                    self.params, self.callback = made.params, made.callback
                    self._has_flags = True
                return super().get_params(ctx)

        app.command(cls=KeyedCommand)(extended(command, []))
        return command

    return register
