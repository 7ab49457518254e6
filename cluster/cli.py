"""The `baton` command: flags and help only. Each command's work is a module of its own, imported when it is called.

Exit codes: 0 ok, 1 failed, 2 usage (flags, configuration values, invalid requests), 3 precondition not met, 4 partial,
124 timeout. A ConfigInvalid is usage: the caller typed it.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cluster import bench_cli, keys_cli
from baton.cluster.cli_types import Count, Json, Text
from baton.cluster.cli_types import option as _option
from baton.cluster.outcome import ExitCode, Output, run_command
from baton.cluster.security_flags import with_access, with_serve_flags

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage (flags, configuration values, requests), 3 precondition not met, "
    "4 partial, 124 timeout.",
)

_model, _parallel = partial(_option, panel="Model"), partial(_option, panel="Parallelism")
_drafts, _kv = partial(_option, panel="Speculation"), partial(_option, panel="KV cache")
_schedule, _ports = partial(_option, panel="Scheduling"), partial(_option, panel="Ports and addresses")
_limits, _logs = partial(_option, panel="Limits and times"), partial(_option, panel="Logging and tracing")


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        from baton.core.build import build_id

        try:
            name = version("baton-pd")
        except PackageNotFoundError:
            name = "(not installed)"
        typer.echo(f"baton {name}, build {build_id()}")
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


@app.command()
@with_serve_flags
def serve(
    config: Annotated[Path | None, _model("YAML file with the same keys as the flags; flags override it")] = None,
    model: Annotated[Text, _model("model directory, or tiny, the bundled model  [tiny]")] = None,
    served_model_name: Annotated[
        list[str] | None, _model("name for clients; may be given several times  [the directory's]")
    ] = None,
    load_format: Annotated[
        Text, _model("auto|safetensors|dummy: dummy draws random weights, for speed tests  [auto]")
    ] = None,
    dtype: Annotated[Text, _model("auto|float64|float32|bfloat16  [auto]")] = None,
    quantization: Annotated[Text, _model("none|fp8: of weights, made at load  [none]")] = None,
    max_model_len: Annotated[Count, _model("shorter than the model's own length, to save memory")] = None,
    device: Annotated[Text, _model("auto|cpu|cuda  [auto]")] = None,
    kernels: Annotated[Text, _model("auto|triton|reference: what computes the model  [auto]")] = None,
    batch_invariant: Annotated[
        bool | None, _model("a row's result depends on that row alone, bit for bit  [off]")
    ] = None,
    prefill: Annotated[Count, _parallel("prefill workers; 0: decode workers compute the prompts  [1]")] = None,
    decode: Annotated[Count, _parallel("decode workers  [1]")] = None,
    tensor_parallel_size: Annotated[Count, _parallel("sets both --tp-prefill and --tp-decode")] = None,
    tp_prefill: Annotated[Count, _parallel("ranks per prefill worker, 1, 2, 4 or 8  [1]")] = None,
    tp_decode: Annotated[Count, _parallel("ranks per decode worker, 1, 2, 4 or 8  [1]")] = None,
    worker_threads: Annotated[Count, _parallel("torch threads per worker on a CPU  [1]")] = None,
    ray_address: Annotated[Text, _parallel("local starts a private Ray; auto or HOST:PORT joins one  [local]")] = None,
    speculative_method: Annotated[
        Text, _drafts("auto|mtp|none: auto drafts by the checkpoint's MTP head if it has one  [auto]")
    ] = None,
    num_speculative_tokens: Annotated[
        Text, _drafts("draft tokens per step, 0 to 4, or auto  [2; 0 without an MTP head]")
    ] = None,
    speculative_config: Annotated[Text, _drafts('as in vLLM: {"method": "mtp", "num_speculative_tokens": 2}')] = None,
    verification: Annotated[Text, _drafts("coupled|rejection: how drafts are verified  [coupled]")] = None,
    draft_sample_method: Annotated[Text, _drafts("with rejection: probabilistic|greedy  [probabilistic]")] = None,
    gpu_memory_utilization: Annotated[float | None, _kv("share of a GPU's memory for its workers  [0.9]")] = None,
    kv_memory_mib: Annotated[Count, _kv("KV pool per worker on a CPU  [256]")] = None,
    kv_staging_mib: Annotated[Count, _kv("host memory for KV on its way to a GPU, by sockets  [1024]")] = None,
    kv_cache_dtype: Annotated[Text, _kv("auto|fp8: of the KV pool; auto is the dtype  [auto]")] = None,
    block_size: Annotated[Count, _kv("positions per KV block: 16, 32 or 64  [16]")] = None,
    prefix_cache: Annotated[bool | None, _kv("keep prompts' KV for those that begin alike  [on]")] = None,
    kv_offloading_size: Annotated[float | None, _kv("GiB of host memory for preempted KV; 0: recompute  [0]")] = None,
    overcommit: Annotated[bool | None, _kv("admit more than the KV cache can finish, and preempt  [on]")] = None,
    transport: Annotated[Text, _kv("auto|zmq|grpc|shm|nvlink|nixl  [auto]")] = None,
    kv_digest: Annotated[bool | None, _kv("digest KV end to end; off, sockets check crc32c instead  [on]")] = None,
    max_num_seqs: Annotated[Count, _schedule("sequences a worker runs at once  [by device and KV pool]")] = None,
    max_num_batched_tokens: Annotated[Count, _schedule("prompt tokens per prefill step  [GPU 4096, CPU 256]")] = None,
    scheduling: Annotated[Text, _schedule("async|sync  [async]")] = None,
    cuda_graphs: Annotated[Text, _schedule("auto|off: replay decode steps on a GPU  [auto]")] = None,
    cuda_graph_sizes: Annotated[Text, _schedule("batch sizes to capture: 1,2,4  [by itself]")] = None,
    routing: Annotated[Text, _schedule("prefix|least_cost|round_robin: how workers are chosen  [prefix]")] = None,
    local_prefill: Annotated[Text, _schedule("auto|never|always: prompts that decode workers compute  [auto]")] = None,
    host: Annotated[Text, _ports("address that the router's ports bind to  [127.0.0.1]")] = None,
    grpc_port: Annotated[Count, _ports("gRPC port; 0 picks a free one  [50051]")] = None,
    http_port: Annotated[
        Count, _ports("HTTP port of OpenAI's and Anthropic's APIs; 0 picks a free one  [none]")
    ] = None,
    metrics_port: Annotated[Count, _ports("port of Prometheus metrics alone; 0 picks a free one  [none]")] = None,
    chat_template: Annotated[Text, _ports("for HTTP: jinja file, or chatml  [the model's own]")] = None,
    json_whitespace: Annotated[bool | None, _ports("let JSON answers have white space between tokens  [off]")] = None,
    allowed_origins: Annotated[Text, _ports("web pages that may call by HTTP, by commas; * is any  [none]")] = None,
    max_queue_len: Annotated[Count, _limits("requests the router holds; more are refused  [no limit]")] = None,
    max_wait_s: Annotated[
        float | None, _limits("requests that would wait longer are refused  [their deadline]")
    ] = None,
    request_timeout_s: Annotated[float | None, _limits("deadline of a request that has none  [600]")] = None,
    shutdown_grace_s: Annotated[float | None, _limits("after SIGTERM open streams end within this  [25]")] = None,
    start_timeout_s: Annotated[float | None, _limits("workers must report within this  [600]")] = None,
    canary_idle_s: Annotated[
        float | None, _limits("probe workers idle for this many seconds with a request; 0: never  [30]")
    ] = None,
    migration: Annotated[bool | None, _limits("streams that lose a worker go on at others  [on]")] = None,
    max_migrations: Annotated[Count, _limits("times that one answer may move  [2]")] = None,
    migration_wait_s: Annotated[float | None, _limits("a stream waits so long for workers to go on with  [30]")] = None,
    drain_grace_s: Annotated[float | None, _limits("streams of a drained worker move after this  [10]")] = None,
    quarantine_deaths: Annotated[Count, _limits("refuse a request that was at so many deaths; 0: none  [2]")] = None,
    quarantine_s: Annotated[float | None, _limits("how long it is refused  [600]")] = None,
    log_format: Annotated[Text, _logs("text|json: of every process's log  [text]")] = None,
    log_requests: Annotated[bool | None, _logs("a line for each request: ids, counts and times  [off]")] = None,
    trace_file: Annotated[Text, _logs("append spans to this file: OTLP as JSON lines")] = None,
    trace_endpoint: Annotated[Text, _logs("send spans to this OTLP/HTTP collector; needs baton-pd[otel]")] = None,
    trace_share: Annotated[float | None, _logs("trace so many of the requests that leave it open  [1]")] = None,
    json: Json = False,
    **more: Any,
) -> int:
    """Start a deployment and serve until SIGINT or SIGTERM."""
    flags = {name: value for name, value in locals().items() if name not in ("config", "json", "more")} | more

    def body(output: Output) -> ExitCode:
        from baton.cluster import resolve, serve

        return serve.serve(resolve.read_config(config, flags), output)

    return run_command(json, body)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="model directory, or tiny")] = "tiny",
    config: Annotated[Path | None, _option("YAML file of `baton serve`")] = None,
    tensor_parallel_size: Annotated[Count, _option("ranks per worker, 1, 2, 4 or 8  [1]")] = None,
    num_speculative_tokens: Annotated[Text, _option("draft tokens per step, 0 to 4, or auto")] = None,
    speculative_method: Annotated[Text, _option("auto|mtp|none  [auto]")] = None,
    load_format: Annotated[Text, _option("auto|safetensors|dummy  [auto]")] = None,
    dtype: Annotated[Text, _option("auto|float64|float32|bfloat16  [auto]")] = None,
    quantization: Annotated[Text, _option("none|fp8  [none]")] = None,
    kv_cache_dtype: Annotated[Text, _option("auto|fp8  [auto]")] = None,
    max_model_len: Annotated[Count, _option("shorter than the model's own length")] = None,
    device: Annotated[Text, _option("auto|cpu|cuda  [auto]")] = None,
    batch_invariant: Annotated[bool | None, _option("rows computed alone, bit for bit  [off]")] = None,
    json: Json = False,
) -> int:
    """Say what a model directory would run as, or why it cannot; nothing is started. Exits 3 if it cannot."""
    flags = {name: value for name, value in locals().items() if name not in ("config", "json")}

    def body(output: Output) -> ExitCode:
        from baton.cluster import resolve
        from baton.cluster.check import check

        return check(resolve.read_config(config, flags), output)

    return run_command(json, body)


@app.command()
@with_access
def generate(
    prompt: Annotated[Text, _option("the text to continue; - reads standard input")] = None,
    address: Annotated[Text, _option("HOST:PORT of a deployment  [127.0.0.1:50051]")] = None,
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
    model: Annotated[Text, _option("with --local: model directory, or tiny  [tiny]")] = None,
    num_speculative_tokens: Annotated[Text, _option("with --local: draft tokens per step, 0 to 4, or auto")] = None,
    speculative_method: Annotated[Text, _option("with --local: auto|mtp|none  [auto]")] = None,
    verification: Annotated[Text, _option("with --local: coupled|rejection  [coupled]")] = None,
    batch_invariant: Annotated[bool | None, _option("with --local: rows computed alone, bit for bit  [off]")] = None,
    dtype: Annotated[Text, _option("with --local: auto|float64|float32|bfloat16  [auto]")] = None,
    device: Annotated[Text, _option("with --local: auto|cpu|cuda  [auto]")] = None,
    quantization: Annotated[Text, _option("with --local: none|fp8  [none]")] = None,
    kv_cache_dtype: Annotated[Text, _option("with --local: auto|fp8  [auto]")] = None,
    kernels: Annotated[Text, _option("with --local: auto|triton|reference  [auto]")] = None,
    load_format: Annotated[Text, _option("with --local: auto|safetensors|dummy  [auto]")] = None,
    json: Json = False,
) -> int:
    """Continue one prompt; the text streams to stdout."""
    flags = dict(locals())

    def body(output: Output) -> ExitCode:
        from baton.client.messages import checked_timeout_s
        from baton.cluster.completion import Asked
        from baton.cluster.generate import LOCAL_OPTIONS, check_place, generate, more_sampling, read_prompt
        from baton.cluster.grammar import read_grammar

        local_options = {name: flags[name] for name in LOCAL_OPTIONS}
        check_place(local, address, local_options)
        asked = Asked(
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
    address: Annotated[str, typer.Option(help="HOST:PORT of a deployment")] = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Show a deployment's workers: lives, blocks, requests, and what decode steps did."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.status import status

        return status(address, output)

    return run_command(json, body)


@app.command()
@with_access
def speculation(
    mode: Annotated[
        Text, typer.Argument(help="draft tokens per step, or auto; without it, show the present one")
    ] = None,
    address: Annotated[str, typer.Option(help="HOST:PORT of a deployment")] = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Show or change how many drafts the decode workers make, while they serve."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.speculation import speculation

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
    address: Annotated[str, typer.Option(help="HOST:PORT of a deployment")] = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Give a worker nothing new and move its streams to others, so that it can be stopped."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.drain import drain

        return drain(worker, address, output, grace_s=grace, wait_s=wait, undo=undo)

    return run_command(json, body)


@app.command()
@with_access
def quarantine(
    clear: Annotated[Text, _option("take this request again; all takes every one")] = None,
    address: Annotated[str, typer.Option(help="HOST:PORT of a deployment")] = "127.0.0.1:50051",
    json: Json = False,
) -> int:
    """Show the requests that are refused because workers died of them, or pardon them."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.quarantine import quarantine

        return quarantine(address, clear, output)

    return run_command(json, body)


@app.command()
@with_access
def doctor(
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="port that `baton serve` would use")] = 50051,
    selftest: Annotated[bool, typer.Option("--selftest", help="also measure whether invariant numerics hold")] = False,
    address: Annotated[Text, _option("HOST:PORT of a deployment: also show its KV paths and decode steps")] = None,
    json: Json = False,
) -> int:
    """Check this machine: versions, devices, ports, limits. Exits 4 on warnings, 3 on failures."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.doctor import doctor

        return doctor(output, grpc_port=grpc_port, selftest=selftest, address=address)

    return run_command(json, body)


@app.command()
def demo(json: Json = False) -> int:
    """Serve the bundled model, stream three completions, compare them with one process."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.demo import demo

        return demo(output)

    return run_command(json, body)


def _refuse(name: str, as_json: bool) -> int:
    def body(output: Output) -> ExitCode:
        from baton.cluster.features import refuse_command

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
    from baton.cluster.runbooks import run_runbook

    return run_runbook(name, context.args)


@app.command()
@with_access
def top(
    address: Annotated[str, typer.Option(help="HOST:PORT of a deployment")] = "127.0.0.1:50051",
    interval: Annotated[
        float, typer.Option(help="seconds between two looks; rates are of what happened between")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one look as text, also on a terminal")] = False,
    json: Json = False,
) -> int:
    """Watch a deployment's load until Ctrl-C; with --once or --json, or into a pipe, print one look."""

    def body(output: Output) -> ExitCode:
        from baton.cluster.top import top

        return top(address, output, interval_s=interval, once=once)

    return run_command(json, body)


@app.command(context_settings=_LATER, hidden=True)
def plan(json: Json = False) -> int:
    """Choose numbers of workers for a load (a later version)."""
    return _refuse("plan", json)


def _path_of(error: typer.TyperException) -> str:
    """The command that refused its flags, with those above it; what was no command is not in it."""
    names = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(["baton", *reversed(names)])


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        output = Output("--json" in sys.argv)
        step = f"see `{_path_of(error)} --help`"
        output.note(f"baton: {error.format_message()}\nnext: {step}")
        if output.as_json:
            message = error.format_message()
            output.emit({"error": "Usage", "message": message, "next": step, "exit_code": ExitCode.USAGE})
        code = ExitCode.USAGE
    except typer.Abort:
        code = ExitCode.PARTIAL
    sys.exit(int(code or 0))
