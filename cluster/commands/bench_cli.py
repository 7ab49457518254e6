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
        from baton.cluster.commands.bench import bench_kv

        return bench_kv(output, plot=plot, count_calls=calls, **asked)

    return run_command(json, body)


@app.command("decode")
def bench_decode(
    shape: Annotated[
        Text, _option("8b, 32b, llama-3.1-8b, ... or a bundled model, with random weights  [8b; tiny on a CPU]")
    ] = None,
    layers: Annotated[Count, _option("so many layers of the shape  [all]")] = None,
    scheduling: Annotated[str, typer.Option(help="comma-separated: sync, async")] = "sync,async",
    mtp: Annotated[
        str, typer.Option("--num-speculative-tokens", help="comma-separated: draft tokens per step")
    ] = "0,1",
    batch: Annotated[str, typer.Option(help="comma-separated: sequences")] = "1,16,64",
    cuda_graphs: Annotated[str, typer.Option(help="on, off, or auto: both on a GPU, neither on a CPU")] = "auto",
    prompt_len: Annotated[int, typer.Option(help="positions before the first step")] = 1024,
    chunk_len: Annotated[int, typer.Option("--max-num-batched-tokens", help="prompt tokens per prefill step")] = 2048,
    verification: Annotated[str, typer.Option(help="synthetic: drafts stand by chance; or coupled")] = "synthetic",
    rate: Annotated[
        str, typer.Option(help="with synthetic: of each draft once those before it stand: 0.75,0.6")
    ] = "0.8",
    drafter: Annotated[str, typer.Option(help="mtp: the shape's MTP head; eagle3: one layer, 32,000 tokens")] = "mtp",
    fake_balance: Annotated[
        bool, typer.Option("--fake-balance", help="each expert gets as many tokens, whatever the router says")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="rows computed alone")] = False,
    dtype: Annotated[str, typer.Option(help="auto|float64|float32|bfloat16")] = "auto",
    quantization: Annotated[str, typer.Option(help="none|fp8: of the weights")] = "none",
    kv_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto|fp8: of the KV pool")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto|triton|reference: what computes the model")] = "auto",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    steps: Annotated[int, typer.Option(help="measured in each round")] = 22,
    rounds: Annotated[int, typer.Option(help="how often everything is measured")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="of weights, tokens, block ids and order")] = 0,
    plot: Annotated[Path | None, _option("draw the rows into a .png, .svg or .pdf (needs matplotlib)")] = None,
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
    only: Annotated[str, typer.Option(help="comma-separated: parts of module, kernel and shape; nothing is all")] = "",
    device: Annotated[str, typer.Option(help="auto|cpu|cuda")] = "auto",
    rounds: Annotated[int, typer.Option(help="how often every system of a row is measured")] = 5,
    limit_s: Annotated[float, typer.Option(help="of the whole run; rows not begun by then are named")] = 1800.0,
    case_limit_s: Annotated[float, typer.Option(help="of one row, on a GPU; what hangs is ended and named")] = 90.0,
    jobs: Annotated[Count, _option("processes that compile first, on a GPU; 0 for none  [at most 8]")] = None,
    out: Annotated[Path | None, _option("a .json file that holds the result so far after every row")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of buffers and order")] = 0,
    plot: Annotated[Path | None, _option("draw the rows into a .png, .svg or .pdf (needs matplotlib)")] = None,
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
    policies: Annotated[str, typer.Option(help="comma-separated")] = "round_robin,least_cost,prefix",
    num_prefill: Annotated[int, typer.Option(help="prefill workers of each deployment")] = 2,
    num_groups: Annotated[int, typer.Option(help="different beginnings of prompts")] = 8,
    prefix_len: Annotated[int, typer.Option(help="tokens of a beginning")] = 1536,
    suffix_len: Annotated[int, typer.Option(help="tokens of each prompt after it")] = 24,
    num_requests: Annotated[int, typer.Option(help="of each group in each round")] = 2,
    concurrency: Annotated[int, typer.Option(help="requests open at the same time")] = 4,
    cached_groups: Annotated[int, typer.Option(help="beginnings that one prefill worker's pool holds")] = 5,
    rounds: Annotated[int, typer.Option(help="how often everything is measured")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of prompts and their order")] = 0,
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
    lengths: Annotated[str, typer.Option(help="comma-separated: tokens of prompts")] = "4,16,48,96,192,400,800",
    streams: Annotated[int, typer.Option(help="that decode beside the prompts of half of the runs")] = 4,
    rounds: Annotated[int, typer.Option(help="how often everything is measured")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="of prompts and their order")] = 0,
    plot: Annotated[Path | None, _option("draw the rows into a .png, .svg or .pdf (needs matplotlib)")] = None,
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
    seconds: Annotated[float, typer.Option(help="of each load")] = 5.0,
    rounds: Annotated[int, typer.Option(help="how often every load is put on each system")] = 2,
    idle_streams: Annotated[int, typer.Option(help="open at once while the router's memory is read")] = 5000,
    step_ms: Annotated[float, typer.Option(help="between two tokens of a stream")] = 20.0,
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
    seconds: Annotated[float, typer.Option(help="of the overload")] = 60.0,
    capacity_s: Annotated[float, typer.Option(help="for which the capacity is measured before")] = 20.0,
    factor: Annotated[float, typer.Option(help="offered, in capacities")] = 3.0,
    deadline_s: Annotated[float, typer.Option(help="of each request")] = 2.0,
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
    model: Annotated[Text, _option("the name it is served by  [the first one of each system]")] = None,
    rounds: Annotated[int, typer.Option(help="how often each point is measured at each system, in turns")] = 3,
    warmup: Annotated[int, typer.Option(help="rounds before them that do not count")] = 0,
    processes: Annotated[int, typer.Option(help="client processes that share the load")] = 4,
    vocab: Annotated[str, typer.Option(help="token ids of prompts, LOW-HIGH")] = "1000-30000",
    seed: Annotated[Count, _option("of arrivals, lengths and prompts  [the file's]", least=0)] = None,
    pause_s: Annotated[float, typer.Option(help="seconds between two measurements")] = 1.0,
    api_key_env: Annotated[Text, _option("environment variable with the API key of requests without a tenant")] = None,
    out: Annotated[Path | None, _option("write the result (JSON) there after every point")] = None,
    plot: Annotated[Path | None, _option("draw the rows into a .png, .svg or .pdf (needs matplotlib)")] = None,
    json: Json = False,
) -> int:
    """Measure OpenAI endpoints, Baton or others, under one workload: TTFT, ITL, TPOT, E2E, goodput."""
    asked = {name: value for name, value in locals().items() if name not in ("json", "out", "plot")}

    def body(output: Output) -> ExitCode:
        from baton.cluster.commands.bench import bench_serve

        return bench_serve(output, out=out, plot=plot, **asked)

    return run_command(json, body)
