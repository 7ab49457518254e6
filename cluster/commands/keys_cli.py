"""Flags and help of `baton keys`."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cluster.flags import option
from baton.cluster.outcome import ExitCode, Output, run_command

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.", rich_markup_mode="rich")

File = Annotated[Path, typer.Option("--file", help="the file of --api-keys-file or --admin-keys-file")]
Name = Annotated[str, typer.Argument(help="of the key")]
Json = Annotated[bool, typer.Option("--json", help="print exactly one JSON object on stdout")]


@app.command("create")
def create(
    name: Name,
    file: File,
    tenant: Annotated[str, typer.Option(help="whose requests it is for; KV is shared only within a tenant")],
    expires_days: Annotated[float | None, option("days until it expires  [never]")] = None,
    max_priority: Annotated[str, option("its requests may ask for: low, normal or high  [normal]")] = "normal",
    max_answers: Annotated[int | None, option("at once, prompts times n  [no limit]", least=1)] = None,
    max_queued_tokens: Annotated[int | None, option("of prompts under way  [no limit]", least=1)] = None,
    max_connections: Annotated[int | None, option("open over HTTP, in use over gRPC  [no limit]", least=1)] = None,
    max_header_bytes: Annotated[int | None, option("of calls under way  [no limit]", least=1)] = None,
    json: Json = False,
) -> int:
    """Make a key and print it, once; the file keeps its digest."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands import keys

        quota = {
            "max_priority": max_priority,
            "max_answers": max_answers,
            "max_queued_tokens": max_queued_tokens,
            "max_connections": max_connections,
            "max_header_bytes": max_header_bytes,
        }
        return keys.create(output, file=file, name=name, tenant=tenant, days=expires_days, quota=quota)

    return run_command(json, body)


@app.command("list")
def list_keys(file: File, json: Json = False) -> int:
    """Show names, tenants and when keys expire. Exits 4 if one has."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands import keys

        return keys.list_keys(output, file=file)

    return run_command(json, body)


@app.command("revoke")
def revoke(name: Name, file: File, json: Json = False) -> int:
    """Take a key out of the file; routers follow within a second."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands import keys

        return keys.revoke(output, file=file, name=name)

    return run_command(json, body)
