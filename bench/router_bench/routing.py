"""`baton bench routing`: prompts that share long prefixes, through routers with different policies.

Every policy has a deployment of its own: a router, and real workers in processes of their own. They are loaded one
after the other, round by round, so that disturbances affect all of them alike. The prefix cache of one prefill worker
holds some of the groups' prefixes, not all: a policy that sends a group anywhere computes its prefix again and again.
Each group is sent once before anything counts.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.result import result, spread
from baton.bench.router_bench.routed import RoutedDeployment
from baton.client import AsyncBatonClient
from baton.core.errors import ConfigInvalid
from baton.core.requests.sampling import SamplingParams
from baton.model.config import ModelConfig
from baton.proto import inference_pb2
from baton.router.placement.routing import ROUTINGS

TTFT_LIMIT = 0.5  # TTFT of `prefix` relative to `round_robin`
VOCAB = range(300, 4000)
ANSWER_LEN = 4
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """What is measured.

    Attributes:
        policies: policies, with one deployment each.
        num_prefill: prefill workers per deployment.
        num_groups: number of different prefixes.
        prefix_len: tokens of a prefix.
        suffix_len: tokens after it, different in every prompt.
        num_requests: requests per group and round.
        concurrency: requests open at the same time.
        cached_groups: approximate number of prefixes that fit into one prefill worker's pool.
        rounds: how often everything is measured.
        seed: seed of prompts and their order.
    """

    policies: tuple[str, ...] = ("round_robin", "least_cost", "prefix")
    num_prefill: int = 2
    num_groups: int = 8
    prefix_len: int = 1536
    suffix_len: int = 24
    num_requests: int = 2
    concurrency: int = 4
    cached_groups: int = 5
    rounds: int = 3
    seed: int = 0


def read_options(policies: str, **numbers: int) -> RoutingOptions:
    """Check the command line.

    Raises:
        ConfigInvalid: a policy does not exist, or a number is too small.
    """
    names = tuple(dict.fromkeys(policies.split(",")))
    for name in names:
        if name not in ROUTINGS:
            raise ConfigInvalid(f"--policies {name}: there are {', '.join(ROUTINGS)}", keys=["policies"])
    for key, value in numbers.items():
        if value < (0 if key == "seed" else 1):
            raise ConfigInvalid(f"--{key.replace('_', '-')} {value}: it starts at 1", keys=[key])
    return RoutingOptions(policies=names, **numbers)


def bench_routing(options: RoutingOptions, model_path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure; see `result`.

    Args:
        options: what to measure.
        model_path: a model directory.
        note: called with progress.

    Raises:
        ConfigInvalid: prompts do not fit the model.
        WorkerStartFailed: a worker did not start.
    """
    config = ModelConfig.from_directory(model_path)
    needed = options.prefix_len + options.suffix_len + ANSWER_LEN + 2
    if needed > config.max_model_len:
        message = f"prompts need {needed} positions, the model has {config.max_model_len}"
        raise ConfigInvalid(message, keys=["prefix_len"])
    kv_bytes = (config.num_layers + 1) * 2 * config.num_kv_heads * config.head_dim * FLOAT32_BYTES
    return asyncio.run(_measure(options, model_path, needed, kv_bytes, note))


async def _measure(
    options: RoutingOptions, model_path: Path, max_len: int, kv_bytes: int, note: Callable[[str], None]
) -> dict[str, Any]:
    mib = kv_bytes * options.prefix_len / (1 << 20)
    deployments = [
        RoutedDeployment(
            policy,
            model_path,
            num_prefill=options.num_prefill,
            prefill_kv_mib=max(1, round(options.cached_groups * mib)),
            decode_kv_mib=max(1, round(2 * options.concurrency * kv_bytes * max_len / (1 << 20))),
            chunk_len=256,
            max_model_len=max_len,
        )
        for policy in options.policies
    ]
    rng = random.Random(options.seed)
    groups = [rng.choices(VOCAB, k=options.prefix_len) for _ in range(options.num_groups)]
    try:
        for deployment in deployments:
            await deployment.start()
        for deployment in deployments:
            await deployment.ready()
        note(f"{len(deployments)} deployments serve")
        for deployment in deployments:
            await _load(deployment, _prompts(groups, 1, options.suffix_len, rng), options.concurrency)
        rounds: dict[str, list[dict[str, float]]] = {policy: [] for policy in options.policies}
        for at in range(options.rounds):
            prompts = _prompts(groups, options.num_requests, options.suffix_len, rng)
            for deployment in rng.sample(deployments, len(deployments)):
                begin_s = time.monotonic()
                stats = await _load(deployment, prompts, options.concurrency)
                rounds[deployment.routing].append(_figures(stats, time.monotonic() - begin_s))
            note(f"round {at + 1} of {options.rounds}")
        num_blocks, block_size = deployments[0].prefill_blocks()
    finally:
        for deployment in deployments:
            await deployment.close()
    cache = {
        "prefix_cache_tokens": num_blocks * block_size,
        "all_prefix_tokens": options.num_groups * options.prefix_len,
    }
    rows = [_row(policy, options, rounds[policy], cache) for policy in options.policies]
    return result("routing", rows, checks=checks(rows))


def _prompts(groups: Sequence[list[int]], num_each: int, suffix_len: int, rng: random.Random) -> list[list[int]]:
    prompts = [[*group, *rng.choices(VOCAB, k=suffix_len)] for group in groups for _ in range(num_each)]
    rng.shuffle(prompts)
    return prompts


async def _load(
    deployment: RoutedDeployment, prompts: Sequence[list[int]], concurrency: int
) -> list[inference_pb2.RequestStats]:
    """Send all prompts, `concurrency` at a time."""
    waiting = list(reversed(prompts))
    found: list[inference_pb2.RequestStats] = []
    sampling = SamplingParams(max_tokens=ANSWER_LEN, temperature=0.0, ignore_eos=True)

    async def client_turns(client: AsyncBatonClient) -> None:
        while waiting:
            prompt = waiting.pop()
            async for chunk in client.generate(token_ids=prompt, sampling=sampling):
                if chunk.HasField("finish"):
                    found.append(chunk.finish.stats)

    async with AsyncBatonClient(deployment.address, timeout_s=60.0) as client:
        await asyncio.gather(*(client_turns(client) for _ in range(concurrency)))
    assert len(found) == len(prompts), "every request has an end"
    return found


def _figures(stats: Sequence[inference_pb2.RequestStats], seconds: float) -> dict[str, float]:
    ttfts = sorted(each.ttft_ms for each in stats)
    return {
        "hit_rate": sum(each.num_cached_tokens for each in stats) / sum(each.prompt_len for each in stats),
        "ttft_mean_ms": statistics.fmean(ttfts),
        "ttft_p50_ms": statistics.median(ttfts),
        "ttft_p99_ms": ttfts[min(len(ttfts) - 1, int(0.99 * len(ttfts)))],
        "queue_mean_ms": statistics.fmean(each.queue_ms for each in stats),
        "expected_right": statistics.fmean(each.num_expected_cached_tokens == each.num_cached_tokens for each in stats),
        "requests_per_s": len(stats) / seconds,
    }


def _row(
    policy: str, options: RoutingOptions, rounds: Sequence[dict[str, float]], cache: dict[str, int]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "system": policy,
        "workload": "shared-prefix",
        "num_prefill": options.num_prefill,
        "num_groups": options.num_groups,
        "prefix_len": options.prefix_len,
        "suffix_len": options.suffix_len,
        "concurrency": options.concurrency,
        "num_requests": options.num_groups * options.num_requests,
        "rounds": options.rounds,
        **cache,
    }
    for name in rounds[0]:
        if name != "expected_right" or policy == "prefix":
            row |= spread(name, [figures[name] for figures in rounds])
    return row


def checks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check what prefix routing promises, if both policies were measured."""
    by_policy = {row["system"]: row for row in rows}
    if not {"prefix", "round_robin"} <= by_policy.keys():
        return []
    ratio = by_policy["prefix"]["ttft_mean_ms"] / by_policy["round_robin"]["ttft_mean_ms"]
    return [
        {
            "name": "mean TTFT of prefix to round_robin",
            "value": round(ratio, 3),
            "at_most": TTFT_LIMIT,
            "holds": ratio <= TTFT_LIMIT,
        }
    ]
