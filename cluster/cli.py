"""The `baton` command: flags and help only. Each command's work is a module of its own, imported when it is called.

Exit codes: 0 ok, 1 failed, 2 usage (flags, configuration values, invalid requests), 3 precondition not met, 4 partial,
124 timeout. A ConfigInvalid is usage: the caller typed it.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cluster.outcome import ExitCode, Output, run_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    help="LLM serving with prefill and decode on different workers.",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage (flags, configuration values, requests), 3 precondition not met, "
    "4 partial, 124 timeout.",
)

Json = Annotated[bool, typer.Option("--json", help="print exactly one JSON object on stdout")]
Text = str | None
Count = int | None


def _option(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


@app.command()
def serve(
    config: Annotated[Path | None, _option("YAML file with the same keys as the flags; flags override it")] = None,
    model: Annotated[Text, _option("model directory, or tiny, the bundled model  [tiny]")] = None,
    prefill: Annotated[Count, _option("prefill workers  [1]")] = None,
    decode: Annotated[Count, _option("decode workers  [1]")] = None,
    tp_prefill: Annotated[Count, _option("ranks per prefill worker, 1, 2, 4 or 8  [1]")] = None,
    tp_decode: Annotated[Count, _option("ranks per decode worker, 1, 2, 4 or 8  [1]")] = None,
    mtp: Annotated[Text, _option("draft tokens per step, 0 to 4, or auto: what measurements advise  [2]")] = None,
    verification: Annotated[Text, _option("coupled|rejection: how drafts are verified  [coupled]")] = None,
    draft_sample_method: Annotated[Text, _option("with rejection: probabilistic|greedy  [probabilistic]")] = None,
    transport: Annotated[Text, _option("auto|zmq|grpc|shm|nvlink|nixl  [auto]")] = None,
    kv_digest: Annotated[
        bool | None,
        typer.Option(
            "--kv-digest/--no-kv-digest",
            help="digest KV end to end; off, sockets check crc32c instead  [on]",
            show_default=False,
        ),
    ] = None,
    kv_curve_key_file: Annotated[Text, _option("ZMQ key pair of the deployment: encrypts KV, admits no other")] = None,
    kv_tls_cert_file: Annotated[Text, _option("with --transport grpc: certificate of this host's workers")] = None,
    kv_tls_key_file: Annotated[Text, _option("and its private key")] = None,
    kv_tls_ca_file: Annotated[Text, _option("who signed the certificates; peers must present one")] = None,
    kv_tls_server_name: Annotated[Text, _option("the name in the certificates, if it is not the address")] = None,
    scheduling: Annotated[Text, _option("async|sync  [async]")] = None,
    cuda_graphs: Annotated[Text, _option("auto|off: replay decode steps on a GPU  [auto]")] = None,
    cuda_graph_sizes: Annotated[Text, _option("batch sizes to capture: 1,2,4  [by itself]")] = None,
    numerics: Annotated[Text, _option("default|invariant  [default]")] = None,
    dtype: Annotated[Text, _option("auto|float64|float32|bfloat16  [auto]")] = None,
    weights: Annotated[Text, _option("checkpoint|random  [checkpoint]")] = None,
    device: Annotated[Text, _option("auto|cpu|cuda  [auto]")] = None,
    host: Annotated[Text, _option("address the gRPC port binds to  [127.0.0.1]")] = None,
    grpc_port: Annotated[Count, _option("gRPC port; 0 picks a free one  [50051]")] = None,
    http_port: Annotated[Count, _option("OpenAI-compatible HTTP port")] = None,
    ray_address: Annotated[Text, _option("local starts a private Ray; auto or HOST:PORT joins one  [local]")] = None,
    block_size: Annotated[Count, _option("positions per KV block: 16, 32 or 64  [16]")] = None,
    kv_memory_mib: Annotated[Count, _option("KV pool per worker on a CPU  [256]")] = None,
    host_kv_gib: Annotated[float | None, _option("host memory for preempted requests' KV; 0: recompute  [0]")] = None,
    overcommit: Annotated[bool | None, _option("run more requests than the KV pool holds to their ends  [on]")] = None,
    gpu_memory_share: Annotated[float | None, _option("share of free GPU memory for KV  [0.8]")] = None,
    max_num_seqs: Annotated[Count, _option("sequences a decode worker runs at once  [16]")] = None,
    max_queue_len: Annotated[Count, _option("requests the router holds; more are refused  [256]")] = None,
    chunk_len: Annotated[Count, _option("prompt tokens per prefill step  [256]")] = None,
    prefix_cache: Annotated[bool | None, _option("keep prompts' KV for those that begin alike  [on]")] = None,
    max_model_len: Annotated[Count, _option("shorter than the model's own length, to save memory")] = None,
    request_timeout_s: Annotated[float | None, _option("deadline of a request that has none  [600]")] = None,
    start_timeout_s: Annotated[float | None, _option("workers must report within this  [120]")] = None,
    worker_threads: Annotated[Count, _option("torch threads per worker on a CPU  [1]")] = None,
    json: Json = False,
) -> int:
    """Start a deployment and serve until SIGINT or SIGTERM."""
    flags = {name: value for name, value in locals().items() if name not in ("config", "json")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.resolve import read_config
        from baton.cluster.serve import serve

        return serve(read_config(config, flags), output)

    return run_command(json, body)


@app.command()
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
    mtp: Annotated[Text, _option("with --local: draft tokens per step, 0 to 4, or auto  [2]")] = None,
    verification: Annotated[Text, _option("with --local: coupled|rejection  [coupled]")] = None,
    numerics: Annotated[Text, _option("with --local: default|invariant  [default]")] = None,
    dtype: Annotated[Text, _option("with --local: auto|float64|float32|bfloat16  [auto]")] = None,
    device: Annotated[Text, _option("with --local: auto|cpu|cuda  [auto]")] = None,
    weights: Annotated[Text, _option("with --local: checkpoint|random  [checkpoint]")] = None,
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


@app.command(hidden=True)
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


bench_app = typer.Typer(no_args_is_help=True, help="Measure speed.", rich_markup_mode=None)
app.add_typer(bench_app, name="bench")


@bench_app.command("kv")
def bench_kv(
    what: Annotated[str, typer.Option(help="transfer, or step: what a prefill step pays for its writer")] = "transfer",
    systems: Annotated[Text, _option("comma-separated  [all that can run here]")] = None,
    workloads: Annotated[str, typer.Option(help="comma-separated: a, b, c")] = "a,b,c",
    pace: Annotated[str, typer.Option(help="time between layers in the paced phase; 0 leaves it out")] = "4ms",
    gil_load: Annotated[str, typer.Option(help="comma-separated: none, inside, outside")] = "none",
    digest: Annotated[str, typer.Option(help="on, off or both, of Baton's own systems")] = "both",
    faults: Annotated[str, typer.Option(help="per frame, like drop=0.01,corrupt=0.001")] = "",
    rounds: Annotated[int, typer.Option(help="how often everything is measured")] = 5,
    seconds: Annotated[float, typer.Option(help="each phase of each cell lasts at least so long")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of order, block ids and contents")] = 0,
    calls: Annotated[bool, typer.Option(help="count system calls, if strace is there")] = True,
    plot: Annotated[Path | None, _option("draw the rows into a .png, .svg or .pdf (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure the KV hand-off, and other ways to move the same bytes, in interleaved rounds."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "calls", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.bench import bench_kv

        return bench_kv(output, plot=plot, count_calls=calls, **asked)

    return run_command(json, body)


@bench_app.command("decode")
def bench_decode(
    shape: Annotated[Text, _option("8b, 0.6b, 32b, 30b-a3b or tiny, with random weights  [8b; tiny on a CPU]")] = None,
    layers: Annotated[Count, _option("so many layers of the shape  [all]")] = None,
    scheduling: Annotated[str, typer.Option(help="comma-separated: sync, async")] = "sync,async",
    mtp: Annotated[str, typer.Option(help="comma-separated: draft tokens per step")] = "0,1",
    batch: Annotated[str, typer.Option(help="comma-separated: sequences")] = "1,16,64",
    cuda_graphs: Annotated[str, typer.Option(help="on, off, or auto: both on a GPU, neither on a CPU")] = "auto",
    prompt_len: Annotated[int, typer.Option(help="positions before the first step")] = 1024,
    chunk_len: Annotated[int, typer.Option(help="prompt tokens per prefill step")] = 2048,
    verification: Annotated[str, typer.Option(help="synthetic: drafts stand by chance; or coupled")] = "synthetic",
    rate: Annotated[float, typer.Option(help="with synthetic: of each draft once those before it stand")] = 0.8,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    numerics: Annotated[str, typer.Option(help="default|invariant")] = "default",
    dtype: Annotated[str, typer.Option(help="auto|float64|float32|bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    steps: Annotated[int, typer.Option(help="measured in each round")] = 32,
    rounds: Annotated[int, typer.Option(help="how often everything is measured")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="of weights, tokens, block ids and order")] = 0,
    plot: Annotated[Path | None, _option("draw the rows into a .png, .svg or .pdf (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure decode steps and the time to the first token, with random weights, in interleaved rounds."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.bench import bench_decode

        return bench_decode(output, plot=plot, **asked)

    return run_command(json, body)


@app.command(context_settings=_LATER)
def top(json: Json = False) -> int:
    """Watch a deployment (a later version)."""
    return _refuse("top", json)


@app.command(context_settings=_LATER)
def plan(json: Json = False) -> int:
    """Choose numbers of workers for a load (a later version)."""
    return _refuse("plan", json)


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        output = Output("--json" in sys.argv)
        command = " ".join(["baton", *(part for part in sys.argv[1:2] if not part.startswith("-"))])
        step = f"see `{command} --help`"
        output.note(f"baton: {error.format_message()}\nnext: {step}")
        if output.as_json:
            message = error.format_message()
            output.emit({"error": "Usage", "message": message, "next": step, "exit_code": ExitCode.USAGE})
        code = ExitCode.USAGE
    except typer.Abort:
        code = ExitCode.PARTIAL
    sys.exit(int(code or 0))
