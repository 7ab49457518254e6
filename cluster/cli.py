"""The `baton` command: flags and help only. Each command's work is in a module of its own, imported when called.

Exit codes: 0 ok, 1 failed, 2 usage (flags, configuration values, invalid requests), 3 precondition not met, 4 partial,
124 timeout. ConfigInvalid counts as usage, because the caller typed the value.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import baton
from baton.cluster.commands import bench_cli, keys_cli
from baton.cluster.flags import Address, Count, Json, Text, check_address, with_access, with_every_key, with_keys
from baton.cluster.flags import option as _option
from baton.cluster.outcome import ExitCode, Output, format_table, run_command, take_any_text
from baton.core.errors import ConfigInvalid, FeatureNotBuilt

COMMANDS = {
    "plan": "`baton plan` comes in a later version; choose --prefill and --decode by hand.",
}


def refuse_command(name: str) -> None:
    """Refuse a command of a later version.

    Raises:
        FeatureNotBuilt: always.
    """
    raise FeatureNotBuilt(COMMANDS[name], command=name)


RUNBOOKS = Path(baton.__file__).resolve().parent / "runbook"


def runbook_names() -> list[str]:
    """Names of the runbooks."""
    return sorted(path.stem.replace("_", "-") for path in RUNBOOKS.glob("*.py") if path.name != "__init__.py")


def run_runbook(name: str | None, arguments: Sequence[str]) -> int:
    """Replace this process by the named runbook; without a name list the runbooks, and return an exit code.

    Flags alone count as no name.
    """
    if name is None or name.startswith("-"):
        return _list(flags=[name, *arguments] if name else arguments)
    if name not in runbook_names():

        def refuse(output: Output) -> ExitCode:
            raise ConfigInvalid(f"no runbook {name!r}; there are {', '.join(runbook_names())}", keys=["name"])

        return run_command("--json" in arguments, refuse)
    script = RUNBOOKS / f"{name.replace('-', '_')}.py"
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
    """First sentence of a runbook's file."""
    source = (RUNBOOKS / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    return source.split('"""')[1].strip().splitlines()[0]


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage (flags, configuration values, requests), 3 precondition not met, "
    "4 partial, 124 timeout.",
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from baton.core.build import build_id, installed_version

        typer.echo(f"baton {installed_version()}, build {build_id()}")
        raise typer.Exit


@app.callback()
def baton_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="print the version, and the build as workers report it",
            callback=_say_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """LLM serving with prefill and decode on different workers."""


@with_every_key(app)
def serve(
    config: Annotated[
        Path | None, _option("YAML file with the same keys as the flags; flags override it", panel="Model")
    ] = None,
    json: Json = False,
    **flags: Any,
) -> int:
    """Start a deployment and serve until SIGINT or SIGTERM."""

    def body(output: Output) -> ExitCode:
        from baton.cluster import resolve
        from baton.cluster.commands import serve

        return serve.serve(resolve.read_config(config, flags), output)

    return run_command(json, body)


@with_keys(
    app,
    "tensor_parallel_size",
    "enable_expert_parallel",
    "enable_dp_attention",
    "enable_eplb",
    "num_redundant_experts",
    "num_speculative_tokens",
    "speculative_method",
    "draft_model",
    "load_format",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "state_checkpoint_interval",
    "max_model_len",
    "device",
    "batch_invariant",
)
def check(
    model: Annotated[
        Text, typer.Argument(help="model directory, or a bundled model; without it, that of --config, else tiny")
    ] = None,
    config: Annotated[Path | None, _option("YAML file of `baton serve`")] = None,
    json: Json = False,
    **flags: Any,
) -> int:
    """Say what a model directory would run as, or why it cannot; nothing is started. Exits 3 if it cannot."""

    def body(output: Output) -> ExitCode:
        from baton.cluster import resolve
        from baton.cluster.commands.check import check

        return check(resolve.read_config(config, flags | {"model": model}), output)

    return run_command(json, body)


@with_keys(
    app,
    "model",
    "num_speculative_tokens",
    "speculative_method",
    "draft_model",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "verification",
    "batch_invariant",
    "dtype",
    "device",
    "quantization",
    "kv_cache_dtype",
    "kernels",
    "load_format",
    condition="with --local: ",
)
@with_access
def generate(
    prompt: Annotated[Text, _option("the text to continue; - reads standard input")] = None,
    address: Annotated[Text, _option("HOST:PORT of a deployment  [127.0.0.1:50051]", check=check_address)] = None,
    local: Annotated[bool, typer.Option("--local", help="run the model in this process, without Ray")] = False,
    max_tokens: Annotated[Count, _option("at most this many tokens  [128]")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float | None, _option("keep the likeliest tokens up to this probability  [1]")] = None,
    top_k: Annotated[Count, _option("keep the k likeliest tokens; 0 keeps all  [0]")] = None,
    min_p: Annotated[float | None, _option("keep tokens this likely relative to the likeliest  [0]")] = None,
    seed: Annotated[Count, _option("equal seeds give equal tokens  [random]")] = None,
    stop: Annotated[list[str] | None, _option("end before this text; may be given several times")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the model's end token")] = False,
    stop_token_ids: Annotated[Text, _option("end after any of these tokens: 1,2,3")] = None,
    min_tokens: Annotated[Count, _option("no EOS, stop token or stop string before so many tokens  [0]")] = None,
    repetition_penalty: Annotated[float | None, _option("divides logits of tokens that occurred  [1]")] = None,
    presence_penalty: Annotated[float | None, _option("subtracted for tokens generated before  [0]")] = None,
    frequency_penalty: Annotated[float | None, _option("subtracted as often as generated before  [0]")] = None,
    logit_bias: Annotated[list[str] | None, _option("ID=NUMBER added to a token's logit; several times")] = None,
    bad_words: Annotated[list[str] | None, _option("never this sequence of tokens: 1,2,3; several times")] = None,
    allowed_token_ids: Annotated[Text, _option("only these tokens: 1,2,3  [all]")] = None,
    logprobs: Annotated[Count, _option("report log-probabilities, and of so many likeliest tokens  [none]")] = None,
    prompt_logprobs: Annotated[Count, _option("the same of the prompt's tokens  [none]")] = None,
    n: Annotated[Count, _option("answers to make  [1]")] = None,
    json_schema: Annotated[Path | None, _option("file: answer with JSON that this JSON Schema allows")] = None,
    regex: Annotated[Text, _option("answer with text that this regular expression matches")] = None,
    grammar: Annotated[Path | None, _option("file: answer with text of this Lark-like or EBNF grammar")] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="answer with any JSON object")] = False,
    timeout: Annotated[float, typer.Option(help="seconds until the request is given up")] = 600.0,
    json: Json = False,
    **local_options: Any,
) -> int:
    """Continue one prompt; the text streams to stdout."""
    flags = dict(locals())

    def body(output: Output) -> ExitCode:
        from baton.client.messages import checked_timeout_s
        from baton.cluster.commands.completion import CompletionArguments
        from baton.cluster.commands.generate import check_place, generate, more_sampling, read_grammar, read_prompt

        check_place(local, address, local_options)
        asked = CompletionArguments(
            prompt=read_prompt(prompt),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            grammar=read_grammar(json_schema=json_schema, regex=regex, grammar=grammar, json_object=json_object),
            timeout_s=checked_timeout_s(timeout),
            more=more_sampling(flags),
        )
        return generate(output, asked, local=local, address=address, local_options=local_options)

    return run_command(json, body)


@app.command()
@with_access
def status(
    address: Address = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Show a deployment's workers: incarnations, blocks, requests, and what decode steps did."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.status import status

        return status(address, output)

    return run_command(json, body)


@app.command()
@with_access
def speculation(
    mode: Annotated[
        Text, typer.Argument(help="draft tokens per step, or auto; without it, show the present one")
    ] = None,
    address: Address = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Show or change how many drafts the decode workers make, while they serve."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.speculation import speculation

        return speculation(address, mode, output)

    return run_command(json, body)


@app.command()
@with_access
def drain(
    worker: Annotated[str, typer.Argument(help="its name, as `baton status` shows it")],
    grace: Annotated[
        float | None, _option("seconds in which its streams may finish  [--drain-grace-s of serve]")
    ] = None,
    wait: Annotated[float, typer.Option(help="seconds to wait until it is empty; 0 only asks")] = 60.0,
    undo: Annotated[bool, typer.Option("--undo", help="let it serve again")] = False,
    address: Address = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Give a worker nothing new and move its streams to others, so that it can be stopped."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.drain import drain

        return drain(worker, address, output, grace_s=grace, wait_s=wait, undo=undo)

    return run_command(json, body)


@app.command()
@with_access
def quarantine(
    clear: Annotated[Text, _option("take this request again; all takes every one")] = None,
    address: Address = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Show the requests that are refused because workers died of them, or pardon them."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.quarantine import quarantine

        return quarantine(address, clear, output)

    return run_command(json, body)


@app.command()
@with_access
def doctor(
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="port that `baton serve` would use")] = 50051,
    selftest: Annotated[bool, typer.Option("--selftest", help="also measure whether invariant numerics hold")] = False,
    address: Annotated[
        Text, _option("HOST:PORT of a deployment: also show its KV paths and decode steps", check=check_address)
    ] = None,
    json: Json = False,
) -> int:
    """Check this machine: versions, devices, ports, limits. Exits 4 on warnings, 3 on failures."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.doctor.doctor import doctor

        return doctor(output, grpc_port=grpc_port, selftest=selftest, address=address)

    return run_command(json, body)


@app.command()
def demo(json: Json = False) -> int:
    """Serve the bundled model, stream three completions, compare them with one process."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.demo import demo

        return demo(output)

    return run_command(json, body)


def _refuse(name: str, as_json: bool) -> int:
    def body(output: Output) -> ExitCode:
        refuse_command(name)
        return ExitCode.PRECONDITION

    return run_command(as_json, body)


_LATER = {"ignore_unknown_options": True, "allow_extra_args": True}
_PASSED_ON = _LATER | {"help_option_names": [], "allow_interspersed_args": False}


app.add_typer(keys_cli.app, name="keys")
app.add_typer(bench_cli.app, name="bench")


@app.command(context_settings=_PASSED_ON)
def runbook(
    context: typer.Context, name: Annotated[Text, typer.Argument(help="which; without it, list them")] = None
) -> int:
    """Run a runbook: `baton runbook NAME --help` tells its flags. Without a name, list them."""
    return run_runbook(name, context.args)


@app.command()
@with_access
def top(
    address: Address = "127.0.0.1:50051",
    interval: Annotated[
        float, typer.Option(help="seconds between two looks; rates are of what happened between")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one look as text, also on a terminal")] = False,
    json: Json = False,
) -> int:
    """Watch a deployment's load until Ctrl-C; with --once or --json, or into a pipe, print one look."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.top import top

        return top(address, output, interval_s=interval, once=once)

    return run_command(json, body)


@app.command(context_settings=_LATER, hidden=True)
def plan(json: Json = False) -> int:
    """Choose numbers of workers for a load (a later version)."""
    return _refuse("plan", json)


def _path_of(error: typer.TyperException) -> str:
    """Name of the command that refused its flags, with its parent commands; an unknown command is not part of it."""
    names = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(["baton", *reversed(names)])


def main() -> None:
    """Run the command line and exit."""
    take_any_text()
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        code = _refuse_usage(error.format_message() or "no command is given", f"see `{_path_of(error)} --help`")
    except typer.Abort:
        code = ExitCode.PARTIAL
    sys.exit(int(code or 0))


def _refuse_usage(message: str, step: str) -> ExitCode:
    def body(output: Output) -> ExitCode:
        output.note(f"baton: {message}\nnext: {step}")
        if output.as_json:
            output.emit({"error": "Usage", "message": message, "next": step, "exit_code": ExitCode.USAGE})
        return ExitCode.USAGE

    return run_command("--json" in sys.argv, body)
