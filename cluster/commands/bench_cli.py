"""`baton bench`: flags and help only."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cluster.flags import Count, Json, Text
from baton.cluster.flags import option as _option
from baton.cluster.outcome import ExitCode, Output, run_command

app = typer.Typer(no_args_is_help=True, help="Measure speed.", rich_markup_mode="rich")


@app.command("kv")
def bench_kv(
    what: Annotated[
        str, typer.Option(help="transfer; or step, the cost of the KV writer to a prefill step")
    ] = "transfer",
    systems: Annotated[Text, _option("comma-separated  [all that can run here]")] = None,
    workloads: Annotated[str, typer.Option(help="comma-separated: a, b, c")] = "a,b,c",
    pace: Annotated[str, typer.Option(help="time between two layers in the paced phase; 0 skips this phase")] = "4ms",
    gil_load: Annotated[str, typer.Option(help="comma-separated: none, inside, outside")] = "none",
    digest: Annotated[str, typer.Option(help="on, off or both, for Baton's own systems")] = "both",
    faults: Annotated[str, typer.Option(help="fault rates per frame: drop=0.01,corrupt=0.001")] = "",
    rounds: Annotated[int, typer.Option(help="number of interleaved rounds")] = 5,
    seconds: Annotated[float, typer.Option(help="minimum duration of each phase of each cell")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="seed for order, block ids and contents")] = 0,
    calls: Annotated[bool, typer.Option(help="count system calls, if strace is installed")] = True,
    plot: Annotated[Path | None, _option("plot the rows to a .png, .svg or .pdf file (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure the KV hand-off, and other ways to move the same bytes, in interleaved rounds."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "calls", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_kv

        return bench_kv(output, plot=plot, count_calls=calls, **asked)

    return run_command(json, body)


@app.command("decode")
def bench_decode(
    shape: Annotated[
        Text, _option("8b, 32b, llama-3.1-8b, ... or a bundled model, with random weights  [8b; tiny on a CPU]")
    ] = None,
    layers: Annotated[Count, _option("number of the shape's layers to run  [all]")] = None,
    scheduling: Annotated[str, typer.Option(help="comma-separated: sync, async")] = "sync,async",
    mtp: Annotated[
        str, typer.Option("--num-speculative-tokens", help="comma-separated numbers of draft tokens per step")
    ] = "0,1",
    batch: Annotated[str, typer.Option(help="comma-separated batch sizes, in sequences")] = "1,16,64",
    cuda_graphs: Annotated[str, typer.Option(help="on, off, or auto: both on a GPU, neither on a CPU")] = "auto",
    prompt_len: Annotated[int, typer.Option(help="context length before the first step")] = 1024,
    chunk_len: Annotated[int, typer.Option("--max-num-batched-tokens", help="prompt tokens per prefill step")] = 2048,
    verification: Annotated[
        str, typer.Option(help="synthetic accepts drafts at the given rates; or coupled")
    ] = "synthetic",
    rate: Annotated[
        str, typer.Option(help="with synthetic: acceptance rate of each draft if all before it were accepted: 0.75,0.6")
    ] = "0.8",
    drafter: Annotated[str, typer.Option(help="mtp: the shape's MTP head; eagle3: one layer, 32,000 tokens")] = "mtp",
    fake_balance: Annotated[
        bool,
        typer.Option(
            "--fake-balance", help="give each expert equally many tokens, whatever the router of experts chooses"
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="compute each row independently of the batch")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto|float64|float32|bfloat16")] = "auto",
    quantization: Annotated[str, typer.Option(help="none|fp8: weight quantization")] = "none",
    kv_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto|fp8: dtype of the KV pool")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto|triton|reference: kernels that compute the model")] = "auto",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    steps: Annotated[int, typer.Option(help="steps measured per round")] = 22,
    rounds: Annotated[int, typer.Option(help="number of interleaved rounds")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="seed for weights, tokens, block ids and order")] = 0,
    plot: Annotated[Path | None, _option("plot the rows to a .png, .svg or .pdf file (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure decode steps and the time to the first token, with random weights, in interleaved rounds."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "plot", "batch_invariant")}
    asked["numerics"] = "invariant" if batch_invariant else "default"

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_decode

        return bench_decode(output, plot=plot, **asked)

    return run_command(json, body)


@app.command("kernels")
def bench_kernels(
    only: Annotated[
        str, typer.Option(help="comma-separated parts of module, kernel and shape names; empty selects all")
    ] = "",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    rounds: Annotated[int, typer.Option(help="measurements of every system of a row")] = 5,
    limit_s: Annotated[
        float, typer.Option(help="time limit of the whole run; rows not started by then are listed")
    ] = 1800.0,
    case_limit_s: Annotated[
        float, typer.Option(help="time limit of one row, on a GPU; a row that hangs is killed and listed")
    ] = 90.0,
    jobs: Annotated[Count, _option("processes that compile beforehand, on a GPU; 0 disables  [at most 8]")] = None,
    out: Annotated[Path | None, _option("write the result so far to this .json file after every row")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed for buffers and order")] = 0,
    plot: Annotated[Path | None, _option("plot the rows to a .png, .svg or .pdf file (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure every kernel beside its floor and other kernels for the same, by replays of CUDA graphs."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_kernels

        return bench_kernels(output, plot=plot, **asked)

    return run_command(json, body)


@app.command("routing")
def bench_routing(
    policies: Annotated[str, typer.Option(help="comma-separated routing policies")] = "round_robin,least_cost,prefix",
    num_prefill: Annotated[int, typer.Option(help="prefill workers per deployment")] = 2,
    num_groups: Annotated[int, typer.Option(help="number of distinct prompt prefixes")] = 8,
    prefix_len: Annotated[int, typer.Option(help="tokens per prefix")] = 1536,
    suffix_len: Annotated[int, typer.Option(help="tokens of each prompt after its prefix")] = 24,
    num_requests: Annotated[int, typer.Option(help="requests per prefix and round")] = 2,
    concurrency: Annotated[int, typer.Option(help="concurrent requests")] = 4,
    cached_groups: Annotated[int, typer.Option(help="prefixes that fit one prefill worker's pool")] = 5,
    rounds: Annotated[int, typer.Option(help="number of interleaved rounds")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="seed for prompts and their order")] = 0,
    json: Json = False,
) -> int:
    """Measure hit rate and time to first token of routing policies, with real workers on this machine's CPUs."""
    asked = {name: value for name, value in locals().items() if name != "json"}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_routing

        return bench_routing(output, **asked)

    return run_command(json, body)


@app.command("crossover")
def bench_crossover(
    lengths: Annotated[str, typer.Option(help="comma-separated prompt lengths, in tokens")] = "4,16,48,96,192,400,800",
    streams: Annotated[int, typer.Option(help="streams that decode beside the prompts in half of the runs")] = 4,
    rounds: Annotated[int, typer.Option(help="number of interleaved rounds")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="seed for prompts and their order")] = 0,
    plot: Annotated[Path | None, _option("plot the rows to a .png, .svg or .pdf file (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure prompts on prefill workers and on decode workers, and what the router chooses, on this machine's CPUs."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_crossover

        return bench_crossover(output, plot=plot, **asked)

    return run_command(json, body)


@app.command("router")
def bench_router(
    seconds: Annotated[float, typer.Option(help="duration of each load")] = 5.0,
    rounds: Annotated[int, typer.Option(help="measurements of every load on each system")] = 2,
    idle_streams: Annotated[int, typer.Option(help="streams open while the router's memory is read")] = 5000,
    step_ms: Annotated[float, typer.Option(help="time between two tokens of a stream")] = 20.0,
    json: Json = False,
) -> int:
    """Measure what a request and a token cost the router's process, with echo workers, beside a bare relay."""
    asked = {name: value for name, value in locals().items() if name != "json"}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_router

        return bench_router(output, **asked)

    return run_command(json, body)


@app.command("overload")
def bench_overload(
    seconds: Annotated[float, typer.Option(help="duration of the overload")] = 60.0,
    capacity_s: Annotated[float, typer.Option(help="time for which the capacity is measured first")] = 20.0,
    factor: Annotated[float, typer.Option(help="offered load, as a multiple of the capacity")] = 3.0,
    deadline_s: Annotated[float, typer.Option(help="deadline of each request")] = 2.0,
    num_clients: Annotated[int, typer.Option(help="client processes")] = 2,
    json: Json = False,
) -> int:
    """Measure goodput and refusals at a multiple of the capacity, with echo workers and an open loop."""
    asked = {name: value for name, value in locals().items() if name != "json"}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_overload

        return bench_overload(output, **asked)

    return run_command(json, body)


@app.command("serve")
def bench_serve(
    workload: Annotated[str, typer.Argument(help="a workload file (TOML), or a shipped one: concurrency, streams")],
    url: Annotated[list[str], typer.Option(help="[NAME=]URL of an OpenAI endpoint; again for each to compare")],
    model: Annotated[Text, _option("served model name  [the first one of each system]")] = None,
    rounds: Annotated[int, typer.Option(help="measurements of each point on each system, interleaved")] = 3,
    warmup: Annotated[int, typer.Option(help="rounds before these that are not counted")] = 0,
    processes: Annotated[int, typer.Option(help="client processes that share the load")] = 4,
    vocab: Annotated[str, typer.Option(help="range of prompt token ids, LOW-HIGH")] = "1000-30000",
    seed: Annotated[Count, _option("seed for arrivals, lengths and prompts  [the file's]", least=0)] = None,
    pause_s: Annotated[float, typer.Option(help="seconds between two measurements")] = 1.0,
    api_key_env: Annotated[Text, _option("environment variable with the API key of requests without a tenant")] = None,
    out: Annotated[Path | None, _option("write the result (JSON) to this file after every point")] = None,
    plot: Annotated[Path | None, _option("plot the rows to a .png, .svg or .pdf file (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure OpenAI endpoints, Baton or others, under one workload: TTFT, ITL, TPOT, E2E, goodput."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "out", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_serve

        return bench_serve(output, out=out, plot=plot, **asked)

    return run_command(json, body)
