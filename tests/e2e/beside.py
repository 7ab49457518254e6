"""What streams feel of a hostile neighbour, through the front door: `python -m baton.tests.e2e.beside --out FILE`.

A real `baton serve` streams 16 answers. Beside them, one client after the other asks what costs most, without a rest:
the dearest bodies of each endpoint, then grammars whose masks or compilation take longest. Each attack is measured in
pairs: the streams alone, then beside it, in turns, so that what else the machine does falls on both. Each row holds the
medians over the turns of the longest and the 99th percentile of the pauses between a stream's chunks, and the turns.
Last, the router's resident memory is read before and after 50 refusals of the largest bodies.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx2
import psutil

from baton.bench.result import replace_file, result
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.tests.e2e.checker import Ask, Clients, Delivery
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.ends import NUM_STREAMS, Serve
from baton.tests.e2e.prompts import token_prompts
from baton.tests.router.hostile_bodies import bodies

FLAGS = ("--http-port", "0")
BODY_BYTES = 100_000
LEAST_ALLOWED_MS = 100.0  # of a pause; else twice the longest without the attack
# As the slow sweep of tests/router/test_cost_law.py ranks them.
DEAREST = (
    "/tokenize messages.content: a text",
    "/tokenize tools: Tool 1000 times",
    "/tokenize tools.function.description: escapes",
    "/v1/completions prompt: numbers",
    "/v1/completions grammar: escapes",
    "/v1/chat/completions messages: Message 100 times",
    "/v1/chat/completions messages: Message 1000 times",
    "/v1/chat/completions tools: Tool 1000 times",
    "/v1/chat/completions min_tokens: numbers",
    "/v1/chat/completions guided_regex: escapes",
    "/v1/chat/completions not closed",
    "/detokenize tokens: numbers",
)
BOMBS = (
    {"guided_grammar": 'start: s\ns: s s | s s s | "a" |\n'},
    {"guided_regex": "(.*[aeiou].{20})"},
    {"guided_regex": "(a|a|ab)*(b|ba)*.{16}c"},
    {"guided_regex": "([a-z]{1,200}[0-9]{1,200}){1,50}"},
    {"guided_json": {"type": "string", "pattern": "^(.*[aeiou].{14})$"}},
    {"guided_json": {"type": "integer", "multipleOf": 999983}},
    {"guided_json": {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(500)}}},
)


async def stream(clients, asks, ended, pauses):
    """One answer after the other; of each the pauses between its chunks."""
    for at in itertools.count():
        if ended.is_set():
            return
        one = Delivery(f"stream-{id(asks)}-{at}", next(asks), deadline_s=200.0)
        await clients.ask(one)
        assert one.reason, one.error
        pauses += [later[0] - earlier[0] for earlier, later in itertools.pairwise(one.events)]


async def turn(serve, asks, length_s, attack=None):
    """Streams for a while, with an attack or without: the pauses in order, and what the attacker was answered."""
    clients, ended, pauses = Clients(serve.address, "streams"), asyncio.Event(), []
    streams = [asyncio.create_task(stream(clients, asks, ended, pauses)) for _ in range(NUM_STREAMS)]
    asked = asyncio.create_task(attack(ended)) if attack else None
    await asyncio.sleep(length_s)
    ended.set()
    await asyncio.gather(*streams)
    statuses = await asked if asked else []
    await clients.close()
    return sorted(pauses), Counter(str(each) for each in statuses)


async def pairs(what, turns, measure):
    """One row: `measure(is_beside)` in turns; which of a pair comes first changes, so that drifts cancel."""
    found = {False: [], True: []}
    statuses = Counter()
    for at in range(turns):
        for is_beside in (False, True) if at % 2 == 0 else (True, False):
            pauses, said = await measure(is_beside)
            found[is_beside].append(pauses)
            statuses += said
    return judged(what, found[False], found[True]) | {"attacks": dict(sorted(statuses.items()))}


def judged(what, alone, beside):
    """What the turns' pauses say, in order each: whether the median of their longest is within the promise."""
    row = {"what": what, "num_turns": len(alone), "num_chunks": sum(map(len, beside))}
    for name, turns in (("alone", alone), ("beside", beside)):
        longest = [pauses[-1] for pauses in turns]
        row[f"{name}_max_ms"] = _ms(statistics.median(longest))
        row[f"{name}_max_ms_of_turns"] = [_ms(each) for each in longest]
        row[f"{name}_p99_ms"] = _ms(statistics.median(pauses[len(pauses) * 99 // 100] for pauses in turns))
        row[f"{name}_p50_ms"] = _ms(statistics.median(map(statistics.median, turns)))
    row["allowed_ms"] = max(LEAST_ALLOWED_MS, round(2 * row["alone_max_ms"], 1))
    return row | {"is_kept": row["beside_max_ms"] <= row["allowed_ms"]}


def _ms(seconds):
    return round(1e3 * seconds, 1)


def asking(url, requests):
    """An attack: one request after the other."""

    async def attack(ended):
        statuses = []
        async with httpx2.AsyncClient(base_url=url, timeout=120.0) as client:
            for path, body in itertools.cycle(requests):
                if ended.is_set():
                    return statuses
                reply = await client.post(path, content=body, headers={"content-type": "application/json"})
                statuses.append(reply.status_code)

    return attack


def dear_requests():
    """Those that are admitted ask for one token."""
    found = {f"{path} {what}": (path, body) for path, what, body in bodies(BODY_BYTES)}
    for path in ("/v1/completions", "/v1/chat/completions"):
        least = ((name, body) for name, (at, body) in found.items() if at == path and body[:1] == b"{")
        found |= {name: (path, b'{"max_tokens":1,' + body[1:]) for name, body in least}
    return {name: found[name] for name in DEAREST}


def bombs():
    for bomb in BOMBS:
        yield "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 64, **bomb}).encode()


def resident(serve):
    """MiB of the router's process, and of those that read bodies for it."""
    serve.look()
    sizes = {"router": 0.0, "readers": 0.0}
    for one in psutil.Process(serve.process.pid).children(recursive=True):
        line = " ".join(one.cmdline())
        kind = "readers" if "reader_process" in line else "router" if "baton.router" in line else None
        if kind:
            sizes[kind] += one.memory_info().rss / (1 << 20)
    return {name: round(size, 1) for name, size in sizes.items()}


async def refusals(url, serve):
    """Resident memory by the number of refused bodies of 50 MB and of those that are read at all."""
    oversize = b'{"prompt":"' + b"a" * (50 << 20) + b'"}'
    rows = [{"num": 0, **resident(serve)}]
    async with httpx2.AsyncClient(base_url=url, timeout=120.0) as client:
        for num in range(1, 51):
            for body in (oversize, *(body for path, body in dear_requests().values() if path == "/v1/completions")):
                try:
                    await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                except httpx2.HTTPError:  # the connection is closed on a body that is too long to be read
                    continue
            if num in (1, 10, 25, 50):
                rows.append({"num": num, **resident(serve)})
    return {"what": "resident MiB by the number of refusals", "rows": rows}


async def run(options, on_row, directory):
    serve = Serve(directory, *FLAGS)
    try:
        await serve.ready()
        url = serve.ready_line["http_url"]
        prompts = token_prompts(Tokenizer.from_directory(TINY), 64, seed=1, max_len=200)
        asks = itertools.cycle(
            Ask(tuple(prompt), SamplingParams(max_tokens=120, temperature=1.0, seed=at, ignore_eos=True))
            for at, prompt in enumerate(prompts)
        )
        attacks = dear_requests() | {body.decode()[:80]: (path, body) for path, body in bombs()}
        attacks = {name: request for name, request in attacks.items() if any(each in name for each in options.only)}
        async with httpx2.AsyncClient(base_url=url, timeout=120.0) as client:  # reading processes and compilers start
            for path, body in attacks.values():
                await client.post(path, content=body, headers={"content-type": "application/json"})
        await turn(serve, asks, 3.0)
        for name, request in attacks.items():

            async def measure(is_beside, request=request):
                return await turn(serve, asks, options.length_s, asking(url, [request]) if is_beside else None)

            on_row(await pairs(name, options.turns, measure))
        if options.only == [""]:
            on_row(await refusals(url, serve))
    finally:
        serve.end()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length-s", type=float, default=8.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3, help="pairs of an attack: alone and beside")
    parser.add_argument("--only", nargs="+", default=[""], help="attacks whose names hold one of these")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows, started_s = [], time.monotonic()

    def on_row(found):
        rows.append(found)
        replace_file(options.out, json.dumps(result("beside", rows), indent=1) + "\n")
        print(round(time.monotonic() - started_s), json.dumps(found), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(options, on_row, directory))


if __name__ == "__main__":
    main()
