"""Ends of a deployment's processes under streams: who is killed, what clients see, what stays, what comes back.

`python -m baton.tests.e2e.ends --kills 20 --out FILE [FAULT ...]` makes the table; `test_ends.py` is a short one. Each
row is one SIGKILL (or SIGTERM) of a real `baton serve` with 16 streams, whose tokens are compared with one process's.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from baton.bench.result import replace_file, result
from baton.client import AsyncBatonClient
from baton.core.errors import BatonError, WorkerLost
from baton.core.numerics import KVDtype, Numerics
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model
from baton.tests.e2e.checker import Ask, Clients, Delivery, Replay
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import token_prompts
from baton.tests.shared_memory import owned_by

NUM_STREAMS = 16
NUM_TOKENS = 160
NUM_ASKS = 48  # so many different ones; what is replayed is kept
PATIENCE_S = 240.0
FLAGS = (
    "--grpc-port 0 --prefill 2 --decode 2 --dtype float64 --num-speculative-tokens 2 --kv-memory-mib 64 "
    "--max-num-batched-tokens 64 --max-num-seqs 16 --migration-wait-s 120 --max-wait-s 120 --request-timeout-s 200 "
    "--max-migrations 8"
).split()
# They are survived: one deployment goes through all of them.
SURVIVED = ("router", "prefill", "decode", "incoming")
ENDING = ("raylet", "gcs_server", "serve", "sigterm")
ON_A_CLUSTER = ("supervisor",)
EXITS = {"raylet": 1, "gcs_server": 1, "serve": -signal.SIGKILL, "sigterm": 0}
WORDS = {"raylet": "RayLost: the raylet", "gcs_server": "RayLost: the gcs_server", "sigterm": "baton: stopped"}


class Serve:
    """One `baton serve`, and every process that descends from it."""

    def __init__(self, directory, *flags):
        self._err = Path(directory) / "serve.err"
        self.started_s = time.monotonic()
        command = [sys.executable, "-P", "-m", "baton.cluster", "serve", "--json", *FLAGS, *flags]
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err)
        self.tree = set()
        self.address = ""

    async def ready(self):
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), PATIENCE_S)
        assert line, self.said()
        self.ready_line = json.loads(line)
        self.address = self.ready_line["address"]
        self.took_s = time.monotonic() - self.started_s
        self.look()

    def look(self):
        """Whom there is now; those that were there before stay known."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.tree.update(psutil.Process(self.process.pid).children(recursive=True))

    def said(self):
        return self._err.read_text(errors="replace")

    def pid_of(self, kind, workers, rng):
        """Of whom a fault is to hit."""
        self.look()
        match kind:
            case "serve" | "sigterm":
                return self.process.pid
            case "prefill" | "decode":
                return workers[rng.choice([name for name in workers if kind in name])][1]
            case "incoming":
                found = [psutil.Process(pid) for name, (_, pid) in workers.items() if "decode" in name]
                return rng.choice([child.pid for one in found for child in _incoming_transfers(one)])
        signs = {"router": "baton.router", "supervisor": "baton.cluster.supervisor"}
        return next(one.pid for one in _live(self.tree) if _is(one, signs.get(kind, kind)))

    def left(self):
        """Processes that still run."""
        return [f"{one.name()} {one.pid}" for one in _live(self.tree)]

    def directories(self):
        return [str(path) for path in self.known if path.exists()]

    def remember(self):
        """Where its files are: in directories and shared memory that name one of its processes."""
        pids = {self.process.pid, *(one.pid for one in self.tree)}
        homes = {
            Path(found)
            for one in _live(self.tree)
            for found in re.findall("/tmp/baton-[^/ ]+", " ".join(_command(one)))
        }
        self.known = [*owned_by(pids), *homes]

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        self.process.stdout.close()
        for one in _live(self.tree):
            one.kill()


def _command(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _is(process, sign):
    return any(part == sign or part.endswith(f"/{sign}") for part in _command(process))


def _incoming_transfers(worker):
    return [child for child in worker.children(recursive=True) if _is(child, "baton.kvtransfer.receiver.process")]


def _live(processes):
    found = []
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


class Campaign:
    """Rows, one after the other; of each what was seen, and no opinion."""

    def __init__(self, directory, seed=0):
        self._directory = directory
        self.rng = random.Random(seed)
        tokenizer = Tokenizer.from_directory(TINY)
        self._replay = Replay(
            load_model(
                TINY,
                dtype=torch.float64,
                device=torch.device("cpu"),
                numerics=Numerics.DEFAULT,
                with_mtp=False,
                kv_dtype=KVDtype.AUTO,
            ),
            tokenizer,
        )
        prompts = token_prompts(tokenizer, 8 + NUM_ASKS, seed=seed, max_len=200)[8:]
        self._asks = [
            Ask(
                (*prompt, *range(300, 340)),
                SamplingParams(max_tokens=NUM_TOKENS, temperature=float(at % 2), seed=at, ignore_eos=True),
            )
            for at, prompt in enumerate(prompts)
        ]
        self._replay.learn(self._asks)
        self._num = itertools.count()

    async def row(self, serve, kind):
        """One fault."""
        name = f"{kind}-{next(self._num)}"
        client, clients = AsyncBatonClient(serve.address, timeout_s=10.0), Clients(serve.address, name)
        before = await workers_of(client)
        streams = [Delivery(f"{name}-{at}", ask, deadline_s=200.0) for at, ask in enumerate(self._picked())]
        tasks = [asyncio.create_task(clients.ask(one)) for one in streams]
        await _until(lambda: sum(bool(one.events) for one in streams) >= NUM_STREAMS // 2, "streams run")
        pid = serve.pid_of(kind, before, self.rng)
        serve.remember()
        num_over = sum(one.is_over for one in streams)
        hit_s = time.monotonic()
        os.kill(pid, signal.SIGTERM if kind == "sigterm" else signal.SIGKILL)
        found = {"fault": kind, "num_streams": NUM_STREAMS, "num_over_before": num_over}
        if kind in ENDING:
            found |= await self._ended(serve, kind, hit_s)
        else:
            found |= await self._survived(serve, client, kind, pid, before, hit_s)
        found |= await self._streams(streams, tasks, hit_s)
        if kind == "router":
            found |= await self._again(serve, name, [one for one in streams if one.error is not None], hit_s)
        await clients.close()
        await client.close()
        return found

    def _picked(self):
        return self.rng.sample(self._asks, NUM_STREAMS)

    async def _streams(self, streams, tasks, hit_s):
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        wrong = 0
        for one in streams:
            want, got = self._replay.tokens(one.ask), one.token_ids
            wrong += got != (want if one.reason else want[: len(got)])
        pauses = sorted(round(_pause(one, hit_s), 3) for one in streams if one.reason)
        errors = [type(one.error).__name__ for one in streams if one.error is not None]
        return {
            "num_whole": sum(bool(one.reason) for one in streams),
            "num_wrong": wrong,
            "errors": {kind: errors.count(kind) for kind in sorted(set(errors))},
            "num_hanging": sum(not one.is_over for one in streams),
            "pauses_s": pauses,
        }

    async def _survived(self, serve, client, kind, pid, before, hit_s):
        """Until everybody is there again, and who is another one than before."""
        hit = next((name for name, (_, one) in before.items() if one == pid), "")
        if kind == "incoming":
            await _until(
                lambda: len(_all_incoming_transfers(serve)) >= 2 and pid not in _all_incoming_transfers(serve),
                "an incoming transfer",
            )
            await asyncio.sleep(0)
        if kind == "supervisor":
            await _until(lambda: any(_is(one, "baton.cluster.supervisor") for one in _looked(serve)), "a supervisor")

        async def is_whole():
            try:
                now = await workers_of(client)
            except BatonError:
                return False
            return set(now) == set(before) and (not hit or now[hit][0] != before[hit][0])

        await _until(is_whole, "everybody is there again")
        back_s = time.monotonic() - hit_s
        now = await workers_of(client)
        others = [name for name in before if name != hit and now[name] != before[name]]
        return {"back_s": round(back_s, 2), "num_others_ended": len(others)}

    async def _again(self, serve, tenant, lost, hit_s):
        """Clients ask again, as soon and as often as they like, until they are served."""
        clients = Clients(serve.address, tenant)
        served, cached, wrong = [], 0, 0
        num_begun = sum(bool(one.events) for one in lost)  # whose prompt was computed

        async def again(one):
            nonlocal cached, wrong
            while True:
                other = Delivery(f"{one.name}-again", one.ask, deadline_s=200.0)
                await clients.ask(other)
                if not isinstance(other.error, (WorkerLost, BatonError)):
                    break
                assert time.monotonic() - hit_s < PATIENCE_S, other.error
                await asyncio.sleep(0.1)
            served.append(other.events[0][0] - max(hit_s, one.ended_s))
            cached += bool(one.events) and other.stats.num_cached_tokens > 0
            wrong += other.token_ids != self._replay.tokens(one.ask)

        await asyncio.gather(*(again(one) for one in lost))
        await clients.close()
        return {
            "num_again": len(lost),
            "num_again_begun": num_begun,
            "num_again_cached": cached,
            "num_again_wrong": wrong,
            "again_first_s": sorted(round(one, 3) for one in served),
        }

    async def _ended(self, serve, kind, hit_s):
        """How `serve` ends, and what is left ten seconds after the kill, or after its end."""
        code = await asyncio.to_thread(serve.process.wait, PATIENCE_S)
        ended_s = time.monotonic() - hit_s
        with contextlib.suppress(TimeoutError):
            await _until(lambda: not serve.left() and not serve.directories(), "nothing is left", 10.0)
        clear_s = time.monotonic() - hit_s
        return {
            "code": code,
            "ended_s": round(ended_s, 2),
            "clear_s": round(clear_s, 2),
            "has_words": WORDS.get(kind, "") in serve.said(),
            "left": serve.left() + serve.directories(),
        }


def _all_incoming_transfers(serve):
    return [one.pid for one in _looked(serve) if _is(one, "baton.kvtransfer.receiver.process")]


def _looked(serve):
    serve.look()
    return _live(serve.tree)


def _pause(one, hit_s):
    """The longest time without a token of those that reach beyond the fault."""
    times = [one.started_s, *(at_s for at_s, _, token_ids in one.events if token_ids)]
    return max((b - a for a, b in itertools.pairwise(times) if b > hit_s), default=0.0)


async def workers_of(client):
    """Epoch and process of each that lives."""
    status = await client.status()
    return {
        one.state.worker_id: (one.state.epoch, one.state.rank_pids[0])
        for one in status.workers
        if one.alive and one.state.rank_pids
    }


async def _until(is_so, what, timeout_s=PATIENCE_S):
    end_s = time.monotonic() + timeout_s
    while True:
        found = is_so()
        if await found if asyncio.iscoroutine(found) else found:
            return
        if time.monotonic() > end_s:
            raise TimeoutError(what)
        await asyncio.sleep(0.05)


def summary(rows):
    """By fault: the numbers that the issue asks for."""
    found = {}
    for kind in dict.fromkeys(row["fault"] for row in rows):
        of_kind = [row for row in rows if row["fault"] == kind]
        pauses = sorted(pause for row in of_kind for pause in row["pauses_s"])
        one = {
            "num_kills": len(of_kind),
            "num_streams": sum(row["num_streams"] for row in of_kind),
            "num_whole": sum(row["num_whole"] for row in of_kind),
            "num_wrong": sum(row["num_wrong"] for row in of_kind),
            "num_hanging": sum(row["num_hanging"] for row in of_kind),
            "num_others_ended": sum(row.get("num_others_ended", 0) for row in of_kind),
            "errors": sorted({error for row in of_kind for error in row["errors"]}),
            "num_left": sum(len(row.get("left", ())) for row in of_kind),
        }
        if pauses:
            one |= {"pause_p50_s": statistics.median(pauses), "pause_max_s": pauses[-1]}
        for name in ("back_s", "ended_s", "clear_s", "start_s"):
            values = [row[name] for row in of_kind if name in row]
            if values:
                one |= {f"{name[:-2]}_p50_s": statistics.median(values), f"{name[:-2]}_max_s": max(values)}
        again = sorted(first for row in of_kind for first in row.get("again_first_s", ()))
        if again:
            one |= {"again_first_p50_s": statistics.median(again), "again_first_max_s": again[-1]}
            for name in ("num_again", "num_again_begun", "num_again_cached", "num_again_wrong"):
                one[name] = sum(row.get(name, 0) for row in of_kind)
        if kind in EXITS:
            one["num_right_exits"] = sum(row["code"] == EXITS[kind] and row["has_words"] for row in of_kind)
        found[kind] = one
    return found


@contextlib.contextmanager
def ray_head(directory):
    """A cluster of one node, as an operator starts one; ended by its processes' ids."""
    port = 20000 + os.getpid() % 9000
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}"]
    command += [f"--temp-dir={directory}", "--include-dashboard=false", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += ["--object-store-memory=83886080", "--disable-usage-stats"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tree = set()
    try:
        end_s = time.monotonic() + 60.0
        while sum("raylet" in one.name() for one in tree) == 0:
            assert process.poll() is None and time.monotonic() < end_s, "Ray's head does not start"
            tree.update(psutil.Process(process.pid).children(recursive=True))
            time.sleep(0.2)
        time.sleep(3.0)
        yield f"127.0.0.1:{port}"
    finally:
        tree.update(psutil.Process(process.pid).children(recursive=True))
        for one in _live(tree):
            one.kill()
        process.kill()
        process.wait()


async def run(faults, num_kills, on_row, directory):
    """Every fault so often."""
    campaign = Campaign(directory)
    survived = [kind for kind in faults if kind in SURVIVED]
    if survived:
        await _lasting(campaign, survived, num_kills, on_row, directory)
    for kind in (kind for _ in range(num_kills) for kind in faults if kind in ENDING):
        serve = Serve(directory)
        try:
            await serve.ready()
            on_row(await campaign.row(serve, kind) | {"start_s": round(serve.took_s, 2)})
        finally:
            serve.end()
    if "supervisor" in faults:
        with ray_head(tempfile.mkdtemp(prefix="e-", dir="/tmp")) as address:
            os.environ["RAY_AUTH_MODE"] = "disabled"
            await _lasting(campaign, ["supervisor"], num_kills, on_row, directory, "--ray-address", address)


async def _lasting(campaign, kinds, num_kills, on_row, directory, *flags):
    serve = Serve(directory, *flags)
    try:
        await serve.ready()
        for kind in kinds * num_kills:
            on_row(await campaign.row(serve, kind) | {"start_s": round(serve.took_s, 2)})
            assert serve.process.poll() is None, serve.said()
    finally:
        serve.end()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", nargs="*", default=[*SURVIVED, *ENDING, *ON_A_CLUSTER])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []

    def on_row(row):
        rows.append(row)
        replace_file(options.out, json.dumps(result("ends", rows, summary=summary(rows)), indent=1) + "\n")
        print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(options.faults, options.kills, on_row, directory))


if __name__ == "__main__":
    main()
