"""`baton bench serve`: rounds of every point at every system, in turns, and their rows."""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from baton.bench.result import result
from baton.bench.serve.figures import figures, is_client_limited, row_of
from baton.bench.serve.http import DETAIL_LEN, ServedSystem, ask_once, list_models, require_aiohttp
from baton.bench.serve.process import ClientJob, ClientProcesses
from baton.bench.serve.schedule import Key
from baton.bench.serve.workload import NAME, OfferedLoad, Workload, api_keys, read_key, read_workload
from baton.core.errors import ConfigInvalid, StartupError

MAX_PROCESSES: Final = 64
MAX_ROUNDS: Final = 100
MAX_VOCAB: Final = 1 << 24
_PROBE_S: Final = 120.0  # a first request may compile kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a run, made by `read_options`.

    Attributes:
        workload: loads to measure.
        systems: endpoints, in the order of their turns.
        rounds: how often every point is measured at every system.
        warmup: further rounds before them that do not count.
        processes: number of client processes.
        vocab: range of token ids of prompts, both ends included.
        seed: seed of schedules and prompts.
        pause_s: pause between two measurements.
        keys: API keys by environment variable.
        default_key: API key of requests whose tenant names none; None: none.
    """

    workload: Workload
    systems: tuple[ServedSystem, ...]
    rounds: int
    warmup: int
    processes: int
    vocab: tuple[int, int]
    seed: int
    pause_s: float
    keys: Mapping[str, str]
    default_key: str | None


def read_options(
    workload: str,
    *,
    url: Sequence[str],
    model: str | None = None,
    rounds: int = 3,
    warmup: int = 0,
    processes: int = 4,
    vocab: str = "1000-30000",
    seed: int | None = None,
    pause_s: float = 1.0,
    api_key_env: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServeOptions:
    """Check the options before anything starts.

    Raises:
        ConfigInvalid: a value does not exist or is out of range, or an API key is not set.
        PackageMissing: aiohttp is not installed.
    """
    found = os.environ if environment is None else environment
    read = read_workload(workload)
    for name, value, least, most in (
        ("rounds", rounds, 1, MAX_ROUNDS),
        ("warmup", warmup, 0, MAX_ROUNDS),
        ("processes", processes, 1, MAX_PROCESSES),
        ("pause-s", pause_s, 0, 3600),
    ):
        if not least <= value <= most:
            raise ConfigInvalid(f"--{name} {value}: it is within {least} ... {most}", keys=[name])
    systems = tuple(replace(system, model=model or "") for system in read_systems(url))
    options = ServeOptions(
        workload=read,
        systems=systems,
        rounds=rounds,
        warmup=warmup,
        processes=processes,
        vocab=read_vocab(vocab),
        seed=read.seed if seed is None else seed,
        pause_s=pause_s,
        keys=api_keys(read, found),
        default_key=read_key(api_key_env, found) if api_key_env else None,
    )
    require_aiohttp()
    return options


def read_vocab(text: str) -> tuple[int, int]:
    """Parse `LOW-HIGH`: the smallest and the largest token id of prompts.

    Raises:
        ConfigInvalid: it is not of that form.
    """
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if match is None or not int(match[1]) < int(match[2]) <= MAX_VOCAB:
        message = f"--vocab {text}: LOW-HIGH is wanted, two token ids, the lower first, at most {MAX_VOCAB}"
        raise ConfigInvalid(message, keys=["vocab"])
    return int(match[1]), int(match[2])


def read_systems(urls: Sequence[str]) -> list[ServedSystem]:
    """Parse `URL` or `NAME=URL`; without a name it is the URL's host and port.

    Raises:
        ConfigInvalid: there is none, one is not an http(s) URL, or two have the same name.
    """
    if not urls:
        raise ConfigInvalid("--url is wanted: [NAME=]http://HOST:PORT, once for each system", keys=["url"])
    systems = [_read_system(text) for text in urls]
    names = [system.name for system in systems]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigInvalid(f"--url: two systems are named {twice[0]}; give NAME=URL", keys=["url"])
    return systems


def _read_system(text: str) -> ServedSystem:
    match = re.fullmatch(f"(?:({NAME})=)?(.*)", text)
    assert match is not None
    name, url = match[1], match[2].rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        parts, has_port = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or parts.query or parts.fragment:
        raise ConfigInvalid(f"--url {text}: [NAME=]http://HOST:PORT is wanted", keys=["url"])
    if parts.username or parts.password:
        raise ConfigInvalid("--url: give an API key by --api-key-env, not in the URL", keys=["url"])
    return ServedSystem(name or parts.netloc, url)


def bench_serve(
    options: ServeOptions, note: Callable[[str], None], save: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Measure; see `bench.result.result`.

    Args:
        options: options of the run.
        note: called with progress.
        save: called with the result so far after every point.

    Raises:
        StartupError: a system does not answer.
        ConfigInvalid: a system refuses the model, the key or the token ids, or its model is too short for the workload.
        StepFailed: a client process ended.
    """
    systems = asyncio.run(_probe(options, note))
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    with ClientProcesses(options.processes) as clients:
        for at, load in enumerate(options.workload.load):
            for point in range(load.num_points):
                rows += _measure_point(options, systems, clients, (at, point), note)
                data = _result(options, systems, rows)
                save(data)
    return data


def _result(options: ServeOptions, systems: Sequence[ServedSystem], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return result(
        "serve",
        rows,
        seed=options.seed,
        rounds=options.rounds,
        processes=options.processes,
        vocab=list(options.vocab),
        systems={system.name: {"url": system.url, "model": system.model} for system in systems},
        workload=options.workload.model_dump(mode="json", exclude_defaults=True),
    )


def _measure_point(
    options: ServeOptions,
    systems: Sequence[ServedSystem],
    clients: ClientProcesses,
    place: tuple[int, int],
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    load, label = options.workload.load[place[0]], options.workload.load[place[0]].label(place[1])
    found: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    for number in range(-options.warmup, options.rounds):
        for system in systems:
            time.sleep(options.pause_s)
            key = Key(options.seed, place[0], place[1], number)
            measured = _measure_once(options, system, clients, load, key)
            what = f"round {number + 1} of {options.rounds}" if number >= 0 else "warm-up"
            note(f"{load.name}, {label}, {system.name}, {what}: {_in_short(measured)}")
            if number >= 0:
                found[system.name].append(measured)
    return [
        row_of(
            rounds,
            load=load.name,
            arrival=load.arrival,
            point=label,
            at=(load.clients or load.rate)[place[1]],
            system=name,
        )
        for name, rounds in found.items()
    ]


def _measure_once(
    options: ServeOptions, system: ServedSystem, clients: ClientProcesses, load: OfferedLoad, key: Key
) -> dict[str, Any]:
    num = len(clients)
    jobs = [
        ClientJob(system, load, key, process, num, options.vocab, options.keys, options.default_key)
        for process in range(num)
    ]
    reports, begin_s = clients.run(jobs)
    measured = figures([record for report in reports for record in report.records], load.slo, begin_s)
    lag_ms, cpu = max(report.loop_lag_p99_ms for report in reports), max(report.cpu for report in reports)
    measured |= {"client_loop_lag_p99_ms": lag_ms, "client_cpu_max": cpu}
    return measured | {"client_limited": is_client_limited(measured.get("send_lag_p99_ms", 0.0), lag_ms, cpu)}


def _in_short(measured: dict[str, Any]) -> str:
    text = f"{measured['num_ok']} answered, {measured['output_tokens_per_s']:.0f} tokens/s"
    if measured["num_failed"]:
        text += f", {measured['num_failed']} failed ({', '.join(measured['failures'])})"
    return text


async def _probe(options: ServeOptions, note: Callable[[str], None]) -> list[ServedSystem]:
    """Return the systems with their models, once each has answered a request."""
    first = options.workload.load[0]
    names = [tenant.api_key_env for tenant in first.tenants.values() if tenant.api_key_env]
    key = options.keys[names[0]] if names and options.default_key is None else options.default_key
    found = []
    for system in options.systems:
        status, body = await list_models(system, key, _PROBE_S)
        _refuse(system, "GET /v1/models", status, body)
        system = choose_model(system, body)
        check_length(system, options.workload, body)
        status, body = await ask_once(system, list(options.vocab), key, _PROBE_S)
        _refuse(system, "a first request", status, body)
        note(f"{system.name}: {system.url} serves {system.model}")
        found.append(system)
    return found


def _refuse(system: ServedSystem, what: str, status: int, said: str) -> None:
    if status == 200:
        return
    if status and 400 <= status < 500 and status not in (404, 429):
        message = (
            f"{system.name} refuses {what} ({status}): {said[:DETAIL_LEN]}; see --model, --vocab and --api-key-env"
        )
        raise ConfigInvalid(message, keys=["url"])
    raise StartupError(f"{system.name} ({system.url}) does not answer {what} ({status}): {said[:DETAIL_LEN]}")


def choose_model(system: ServedSystem, body: str) -> ServedSystem:
    """Return the system with the model to request: the one that was named, else the first one it lists.

    Args:
        system: system that answered.
        body: body of GET /v1/models.

    Raises:
        ConfigInvalid: it has no such model.
        StartupError: it is not the answer of an OpenAI endpoint.
    """
    names = [str(entry.get("id", "")) for entry in _models(system, body)]
    if system.model and system.model not in names:
        raise ConfigInvalid(f"{system.name} has no model {system.model}: {', '.join(names)}", keys=["model"])
    return system if system.model else replace(system, model=names[0])


def check_length(system: ServedSystem, workload: Workload, body: str) -> None:
    """Check that every request fits into the model, if the system states its length (`max_model_len`).

    Raises:
        ConfigInvalid: a load has longer requests.
    """
    limits = [entry.get("max_model_len") for entry in _models(system, body) if entry.get("id") == system.model]
    limit = next((value for value in limits if isinstance(value, int)), None)
    if limit is None:
        return
    for load in workload.load:
        pairs = [(load.prompt_len, load.output_len)]
        pairs += [(load.streams.prompt_len, load.streams.output_len)] if load.streams else []
        for prompt_len, output_len in pairs:
            if (most := prompt_len.high + output_len.high) > limit:
                message = (
                    f"load {load.name}: a request may have {most} tokens, and {system.name}'s model ends at {limit}"
                )
                raise ConfigInvalid(f"{message}; lower prompt_len, output_len or their max", keys=["load"])


def _models(system: ServedSystem, body: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(body)["data"]
        if entries and all(isinstance(entry, dict) for entry in entries):
            return list(entries)
    except (ValueError, KeyError, TypeError):
        pass
    raise StartupError(f"{system.name} ({system.url}) is no OpenAI endpoint: /v1/models said {body[:DETAIL_LEN]}")


def write_result(path: Path, data: dict[str, Any]) -> None:
    """Write a result atomically, so that a reader never sees a partial one."""
    from baton.bench.result import replace_file

    replace_file(path, json.dumps(data, indent=1) + "\n")
