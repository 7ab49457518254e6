"""Which requests are sent when: a pure function of load, seed and process, so that every system gets the same.

The whole point is drawn first and then divided, so that the number of processes changes only who sends what.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from baton.bench.serve.workload import Length, OfferedLoad

_ARRIVALS, _STREAMS, _PREFIXES, _CONTENTS = range(4)
_STREAM_REQUESTS: Final = 4096  # maximum per steady stream; no load lasts longer


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a point of a run; contents of prompts differ between rounds, those of prefixes do not.

    Attributes:
        seed: seed of the run.
        load: index of the load in its file.
        point: index among its `clients` or `rate`.
        round: round of the run; negative rounds do not count.
    """

    seed: int
    load: int
    point: int
    round: int

    def rng(self, *parts: int) -> np.random.Generator:
        """Make a generator for one purpose."""
        return np.random.default_rng([self.seed, self.load, self.point, self.round + (1 << 16), *parts])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before its tokens are drawn.

    Attributes:
        length: tokens, including those of the prefix.
        content: seed of its own content.
        prefix: which of the load's prefixes it begins with; None: none.
    """

    length: int
    content: tuple[int, ...]
    prefix: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """One request.

    Attributes:
        index: within the point, over all processes.
        due_s: time after the point's begin; None: as soon as the client's previous answer has ended (closed loop).
        client: index, over all processes, of the client that sends it in a closed loop; None in an open one.
        prompt: prompt to send.
        output_len: tokens of the answer.
        cancel_after: number of tokens after which the client cancels; None: never.
        tenant: tenant of the request; "" without tenants.
    """

    index: int
    due_s: float | None
    client: int | None
    prompt: Prompt
    output_len: int
    cancel_after: int | None = None
    tenant: str = ""


def schedule(load: OfferedLoad, key: Key, process: int = 0, num_processes: int = 1) -> list[Planned]:
    """Return the requests of one process at one point of a load, in order of their due time.

    In an open loop, process i has arrivals i, i + n, ...; in a closed loop, clients i, i + n, ...
    """
    assert 0 <= process < num_processes
    rng = key.rng(_ARRIVALS)
    due_s, clients = _arrivals(load, key.point, rng)
    num = len(due_s)
    prompt_len, output_len = draw(load.prompt_len, num, rng), draw(load.output_len, num, rng)
    prefixes = rng.integers(load.prefixes.count, size=num).tolist() if load.prefixes else [None] * num
    cancels: list[int | None] = [None] * num
    if load.cancel is not None:
        after = draw(load.cancel.after_tokens, num, rng)
        leaves = rng.random(num) < load.cancel.share
        cancels = [at if leave else None for at, leave in zip(after, leaves, strict=True)]
    tenants = _tenants(load, num, rng)
    contents = (key.point, key.round + (1 << 16), _CONTENTS)
    owners = [at if client is None else client for at, client in enumerate(clients)]
    return [
        Planned(
            index=at,
            due_s=due_s[at],
            client=clients[at],
            prompt=Prompt(prompt_len[at], (*contents, at), prefixes[at]),
            output_len=output_len[at],
            cancel_after=cancels[at],
            tenant=tenants[at],
        )
        for at in range(num)
        if owners[at] % num_processes == process
    ]


def steady(load: OfferedLoad, key: Key, process: int = 0, num_processes: int = 1) -> list[list[Planned]]:
    """Return the steady streams of one process: for each its first requests, which are repeated if too few."""
    if load.streams is None:
        return []
    rng = key.rng(_STREAMS)
    num = min(_STREAM_REQUESTS // load.streams.count + 1, 64)
    found = []
    for stream in range(load.streams.count):
        prompt_len, output_len = draw(load.streams.prompt_len, num, rng), draw(load.streams.output_len, num, rng)
        if stream % num_processes != process:
            continue
        contents = (key.point, key.round + (1 << 16), _STREAMS, stream)
        found.append(
            [Planned(at, None, stream, Prompt(prompt_len[at], (*contents, at)), output_len[at]) for at in range(num)]
        )
    return found


def draw(length: Length, num: int, rng: np.random.Generator) -> list[int]:
    """Draw `num` lengths, in tokens."""
    if length.mean is None:
        return [int(value) for value in rng.integers(length.low, length.high + 1, size=num)]
    variance = math.log1p(length.cv**2)
    values = rng.lognormal(math.log(length.mean) - variance / 2, math.sqrt(variance), size=num)
    return [int(value) for value in np.clip(np.rint(values), length.low, length.high)]


def tokens_of(prompt: Prompt, load: OfferedLoad, seed: int, load_index: int, vocab: tuple[int, int]) -> list[int]:
    """Draw the token ids of a prompt.

    Args:
        prompt: prompt of the schedule.
        load: load of the prompt.
        seed: seed of the run.
        load_index: index of the load in its file.
        vocab: range of ids, both ends included.
    """
    own = np.random.default_rng([seed, load_index, *prompt.content])
    if prompt.prefix is None:
        return _tokens(own, prompt.length, vocab)
    assert load.prefixes is not None
    shared = np.random.default_rng([seed, load_index, _PREFIXES, prompt.prefix])
    start = _tokens(shared, load.prefixes.len, vocab)
    return start + _tokens(own, prompt.length - load.prefixes.len, vocab)


def _tokens(rng: np.random.Generator, num: int, vocab: tuple[int, int]) -> list[int]:
    low, high = vocab
    drawn: list[int] = rng.integers(low, high + 1, size=num).tolist()
    return drawn


def _arrivals(load: OfferedLoad, point: int, rng: np.random.Generator) -> tuple[list[float | None], list[int | None]]:
    """Due times and clients."""
    if load.arrival == "closed":
        assert load.requests_per_client is not None
        num = load.clients[point]
        clients: list[int | None] = [*range(num)]
        return [None] * (num * load.requests_per_client), clients * load.requests_per_client
    assert load.seconds is not None
    shape = load.gap_cv**-2
    mean_s = 1 / load.rate[point]
    due_s: list[float | None] = []
    now_s = 0.0
    while now_s < load.seconds:
        for gap_s in rng.gamma(shape, mean_s / shape, size=1024).tolist():
            now_s += gap_s
            if now_s >= load.seconds:
                break
            due_s.append(now_s)
    return due_s, [None] * len(due_s)


def _tenants(load: OfferedLoad, num: int, rng: np.random.Generator) -> list[str]:
    if not load.tenants:
        return [""] * num
    names = sorted(load.tenants)
    weights = np.array([load.tenants[name].weight for name in names])
    return [names[at] for at in rng.choice(len(names), size=num, p=weights / weights.sum())]
