"""`baton bench crossover`: finds which prompts a prefill worker computes faster than the decode worker itself.

There is one deployment: the real router, in this process, and two real workers in processes of their own. Each prompt
is sent with the path forced to `local` and to `split`, and with the router's choice (`auto`), in random order, round by
round, so that disturbances affect all three alike. *Fresh* prompts are in no cache; of *cached* ones the prefill worker
has all but the end. Both are sent to idle workers, and beside streams that decode all the time; then the gaps between
those streams' tokens are measured, too.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from baton.bench.result import result, spread
from baton.bench.router_bench.routed import RoutedDeployment
from baton.client import AsyncBatonClient
from baton.core.errors import ConfigInvalid
from baton.core.requests.sampling import SamplingParams
from baton.model.config import ModelConfig
from baton.proto import inference_pb2
from baton.router.placement.local_prefill import ALWAYS, AUTO, LOCAL, NEVER, SPLIT

MODES: Final = {LOCAL: ALWAYS, SPLIT: NEVER, AUTO: AUTO}
FRESH: Final = "fresh"
CACHED: Final = "cached"
IDLE: Final = "idle"
BUSY: Final = "busy"
CELLS: Final = tuple(itertools.product((FRESH, CACHED), (IDLE, BUSY)))
VOCAB: Final = range(300, 4000)
ANSWER_LEN: Final = 4
STREAM_LEN: Final = 600  # tokens of a background stream; then the next one begins
UNCACHED_LEN: Final = 16
FLOAT32_BYTES: Final = 4
AUTO_LIMIT: Final = 1.25  # time of `auto` relative to the faster path, on idle workers
NUM_WARM: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverOptions:
    """What is measured.

    Attributes:
        lengths: prompt lengths.
        streams: number of streams that decode beside the prompts of `busy`.
        rounds: how often everything is measured.
        seed: seed of prompts and their order.
    """

    lengths: tuple[int, ...] = (4, 16, 48, 96, 192, 400, 800)
    streams: int = 4
    rounds: int = 5
    seed: int = 0


@dataclass(slots=True)
class Beside:
    """Arrival times of tokens in the background streams."""

    arrivals_s: list[list[float]] = field(default_factory=list)

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Gaps between two chunks of one stream that overlap a time span."""
        gaps = []
        for arrivals in self.arrivals_s:
            for one, other in itertools.pairwise(arrivals):
                if other >= begin_s and one <= end_s:
                    gaps.append(1e3 * (other - one))
        return gaps


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """One prompt's path and times."""

    path: str
    ttft_ms: float
    second_ms: float
    beside_itl_ms: float | None
    beside_gap_ms: float | None


def read_options(lengths: str, **numbers: int) -> CrossoverOptions:
    """Check the command line.

    Raises:
        ConfigInvalid: a value is not a length, or a number is too small.
    """
    try:
        found = tuple(sorted({int(part) for part in lengths.split(",")}))
    except ValueError:
        raise ConfigInvalid(f"--lengths {lengths}: not numbers with commas between", keys=["lengths"]) from None
    if found[0] < 2:
        raise ConfigInvalid(f"--lengths {lengths}: they start at 2", keys=["lengths"])
    for key, value in numbers.items():
        if value < (0 if key == "seed" else 1):
            raise ConfigInvalid(f"--{key} {value}: it starts at 1", keys=[key])
    return CrossoverOptions(lengths=found, **numbers)


def bench_crossover(options: CrossoverOptions, model_path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure; see `result`.

    Raises:
        ConfigInvalid: prompts do not fit the model.
        WorkerStartFailed: a worker did not start.
    """
    config = ModelConfig.from_directory(model_path)
    needed = max(options.lengths[-1] + ANSWER_LEN, STREAM_LEN + UNCACHED_LEN) + 2
    if needed > config.max_model_len:
        message = f"prompts and streams need {needed} positions, the model has {config.max_model_len}"
        raise ConfigInvalid(message, keys=["lengths"])
    kv_bytes = (config.num_layers + 1) * 2 * config.num_kv_heads * config.head_dim * FLOAT32_BYTES
    return asyncio.run(_measure(options, model_path, needed, kv_bytes, note))


async def _measure(
    options: CrossoverOptions, model_path: Path, max_len: int, kv_bytes: int, note: Callable[[str], None]
) -> dict[str, Any]:
    mib = max(8, round(2 * (options.streams + 4) * kv_bytes * max_len / (1 << 20)))
    deployment = RoutedDeployment(
        "prefix",
        model_path,
        num_prefill=1,
        prefill_kv_mib=mib,
        decode_kv_mib=mib,
        chunk_len=256,
        max_model_len=max_len,
    )
    found: dict[tuple[str, str, str, int], list[TimedPrompt]] = {}
    rng = random.Random(options.seed)
    base = rng.choices(VOCAB, k=options.lengths[-1])
    try:
        await deployment.start()
        await deployment.ready()
        note("the deployment serves")
        async with AsyncBatonClient(deployment.address, timeout_s=60.0) as client:
            await _warm(deployment, client, options, base, rng)
            for at in range(options.rounds):
                for load in (IDLE, BUSY):
                    await _round(deployment, client, options, load, base, rng, found)
                note(f"round {at + 1} of {options.rounds}")
    finally:
        await deployment.close()
    rows = [_row(options, *cell, found[cell]) for cell in sorted(found)]
    return result("crossover", rows, checks=checks(rows), crossovers=crossovers(rows))


async def _warm(
    deployment: RoutedDeployment,
    client: AsyncBatonClient,
    options: CrossoverOptions,
    base: Sequence[int],
    rng: random.Random,
) -> None:
    """Let both workers measure all lengths, and the prefill worker cache the beginnings of cached prompts."""
    for _, length, system in itertools.product(range(NUM_WARM), options.lengths, (LOCAL, SPLIT)):
        deployment.set_local_prefill(MODES[system])
        await _ask(client, rng.choices(VOCAB, k=length), None)
    deployment.set_local_prefill(NEVER)
    await _ask(client, base, None)


async def _round(
    deployment: RoutedDeployment,
    client: AsyncBatonClient,
    options: CrossoverOptions,
    load: str,
    base: Sequence[int],
    rng: random.Random,
    found: dict[tuple[str, str, str, int], list[TimedPrompt]],
) -> None:
    cells = list(itertools.product((FRESH, CACHED), MODES, options.lengths))
    rng.shuffle(cells)
    beside = Beside() if load == BUSY else None
    streams = []
    try:
        if beside is not None:
            deployment.set_local_prefill(NEVER)
            streams = [asyncio.create_task(_decode(client, beside, rng)) for _ in range(options.streams)]
            await _until_all_decode(beside, options.streams, streams)
        for workload, system, length in cells:
            kept = max(0, length - UNCACHED_LEN) if workload == CACHED else 0
            prompt = [*base[:kept], *rng.choices(VOCAB, k=length - kept)]
            deployment.set_local_prefill(MODES[system])
            await deployment.heard()  # otherwise earlier requests would still be counted
            asked = await _ask(client, prompt, beside)
            found.setdefault((workload, load, system, length), []).append(asked)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _until_all_decode(beside: Beside, num_streams: int, streams: Sequence["asyncio.Task[None]"]) -> None:
    async with asyncio.timeout(60.0):
        while len(beside.arrivals_s) < num_streams or not all(beside.arrivals_s):
            for stream in streams:
                if stream.done():
                    stream.result()
            await asyncio.sleep(0.01)


async def _decode(client: AsyncBatonClient, beside: Beside, rng: random.Random) -> None:
    """Run one stream after the other, until cancelled."""
    sampling = SamplingParams(max_tokens=STREAM_LEN, temperature=0.0, ignore_eos=True)
    while True:
        arrivals: list[float] = []
        beside.arrivals_s.append(arrivals)
        async for _ in client.generate(token_ids=rng.choices(VOCAB, k=UNCACHED_LEN), sampling=sampling):
            arrivals.append(time.monotonic())


async def _ask(client: AsyncBatonClient, prompt: Sequence[int], beside: Beside | None) -> TimedPrompt:
    sampling = SamplingParams(max_tokens=ANSWER_LEN, temperature=0.0, ignore_eos=True)
    begin_s = time.monotonic()
    stats = inference_pb2.RequestStats()
    async for chunk in client.generate(token_ids=list(prompt), sampling=sampling):
        if chunk.HasField("finish"):
            stats = chunk.finish.stats
    end_s = begin_s + stats.second.total_ms / 1e3
    gaps = [] if beside is None else beside.gaps_ms(begin_s, end_s)
    return TimedPrompt(
        stats.path,
        stats.ttft_ms,
        stats.second.total_ms,
        statistics.fmean(gaps) if gaps else None,
        max(gaps) if gaps else None,
    )


def _row(
    options: CrossoverOptions, workload: str, load: str, system: str, length: int, asked: Sequence[TimedPrompt]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "system": system,
        "workload": workload,
        "load": load,
        "prompt_len": length,
        "num_streams": options.streams if load == BUSY else 0,
        "rounds": len(asked),
        "local_share": round(statistics.fmean(one.path == LOCAL for one in asked), 3),
    }
    for name in ("ttft_ms", "second_ms", "beside_itl_ms", "beside_gap_ms"):
        row |= spread(name, [getattr(one, name) for one in asked])
    return row


def _by_system(rows: Sequence[dict[str, Any]], workload: str, load: str) -> dict[str, dict[int, dict[str, Any]]]:
    shown = [row for row in rows if (row["workload"], row["load"]) == (workload, load)]
    return {system: {row["prompt_len"]: row for row in shown if row["system"] == system} for system in MODES}


def crossovers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell, find the shortest prompt from which on `split` has the second token first; None: there is none."""
    found = []
    for workload, load in CELLS:
        by_system = _by_system(rows, workload, load)
        local, split = by_system[LOCAL], by_system[SPLIT]
        lengths = sorted(local.keys() & split.keys())
        slower = [length for length in lengths if local[length]["second_ms"] > split[length]["second_ms"]]
        first = next((at for at in lengths if {length for length in lengths if length >= at} <= set(slower)), None)
        found.append({"workload": workload, "load": load, "split_is_faster_from": first})
    return found


def checks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that `auto` is near the faster path at every length, with idle workers.

    Beside streams `auto` must also spare these, so it is not checked there.
    """
    found = []
    for workload in (FRESH, CACHED):
        by_system = _by_system(rows, workload, IDLE)
        ratios = [
            by_system[AUTO][length]["second_ms"] / min(by_system[way][length]["second_ms"] for way in (LOCAL, SPLIT))
            for length in by_system[AUTO]
        ]
        if ratios:
            worst = round(max(ratios), 3)
            name = f"second token of auto to the better way, {workload} prompts, idle, at the worst length"
            found.append({"name": name, "value": worst, "at_most": AUTO_LIMIT, "holds": worst <= AUTO_LIMIT})
    return found
