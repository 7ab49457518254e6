"""What flags of several commands share: their types, keys of `ServeConfig`, and access options."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

Json = Annotated[bool, typer.Option("--json", help="print exactly one JSON object on stdout")]
Text = str | None
Count = int | None
Command = Callable[..., int]
MAX_PORT = 65535


def check_address(address: str | None) -> str | None:
    """Return an address unchanged if it is valid.

    Raises:
        BadParameter: it is an HTTP URL, or has no valid port.
    """
    if address is None or address.startswith("unix:"):
        return address
    if re.match("https?://", address):
        message = f"{address!r} is a URL; gRPC has HOST:PORT, such as 127.0.0.1:50051; `baton serve` prints both"
        raise typer.BadParameter(message)
    if not (found := re.fullmatch(r".+:([0-9]{1,9})", address)):
        raise typer.BadParameter(f"{address!r} is not HOST:PORT, such as 127.0.0.1:50051")
    if not 1 <= int(found[1]) <= MAX_PORT:
        raise typer.BadParameter(f"{address!r}: a port is between 1 and {MAX_PORT}")
    return address


Address = Annotated[str, typer.Option(help="HOST:PORT of a deployment", callback=check_address)]


def option(
    text: str,
    *names: str,
    panel: str | None = None,
    variable: str | None = None,
    least: int | None = None,
    metavar: str = "",
    check: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a flag; its help text states the default in brackets.

    `names` replace the parameter's name, and `panel` groups the flag in --help.
    """
    return typer.Option(
        *names,
        help=text.replace("[", r"\["),  # otherwise rich reads a default in brackets as markup
        show_default=False,
        rich_help_panel=panel,
        envvar=variable,
        min=least,
        metavar=f"<{metavar}>" if metavar else None,
        callback=check,
    )


def parameter(name: str, kind: Any, flag: Any) -> inspect.Parameter:
    """Make a command's parameter that is None unless its flag is given."""
    annotation = Annotated[kind | None, flag]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def extended(command: Command, added: Sequence[inspect.Parameter], *, before: str | None = None) -> Command:
    """Return the command with more parameters, at the end or before one of its own; it gets them as keywords."""
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


def with_every_key(app: typer.Typer) -> Callable[[Command], Command]:
    """Register a command with a flag for each key, in the panel that the key declares; a flag not given is None."""
    return _registered(app, lambda: _flags(None, condition="", has_panels=True))


def with_keys(app: typer.Typer, *names: str, condition: str = "") -> Callable[[Command], Command]:
    """Register a command with flags for a few keys, in no panel; the condition is put before their help."""
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
            """The command, whose flags are added when they are first needed."""

            _has_flags = False

            def get_params(self, ctx: Any) -> Any:
                """Return the function's parameters, with the flags before --json."""
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


KEY_VARIABLE = "BATON_API_KEY"
_ACCESS = {
    "tls_ca_file": "who signed the deployment's certificate; the connection is then encrypted",
    "tls_cert_file": "own certificate, where the deployment asks for one",
    "tls_key_file": "private key of --tls-cert-file",
    "tls_server_name": "the name in the deployment's certificate, if it is not the address",
    "api_key_file": f"file with an API key; or set {KEY_VARIABLE}",
}


def with_access(command: Command) -> Command:
    """Add flags for a client's certificates and key, which the command's connections use; defaults from `BATON_...`."""

    @functools.wraps(command)
    def reach(**values: Any) -> int:
        from baton.client.access import Access
        from baton.cluster.access import using
        from baton.cluster.outcome import ExitCode, Output, run_command
        from baton.core.errors import BatonError

        given = {name: values.pop(name) or "" for name in _ACCESS}
        try:
            access = Access.of(given, os.environ.get(KEY_VARIABLE, ""))
        except BatonError as error:
            refusal = error

            def refuse(output: Output) -> ExitCode:
                raise refusal

            return run_command(bool(values.get("json")), refuse)
        with using(access):
            return command(**values)

    flags = [
        parameter(name, str, option(text, panel="Access", variable=f"BATON_{name.upper()}"))
        for name, text in _ACCESS.items()
    ]
    return extended(reach, flags)
