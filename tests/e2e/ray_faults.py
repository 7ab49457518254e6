"""`python -m baton.tests.e2e.ray_faults`: workers and head of a real cluster hit under sixteen streams, in rounds.

Each fault hits while all streams decode. Every stream must end with the tokens of the fault-free run, in float64; the
longest pause of each is noted, and afterwards every worker must be back and hold nothing. With one prefill worker,
those who ask while it is away wait for its next incarnation: they are counted apart, as newcomers.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from baton.bench.result import result
from baton.core.errors import BatonError
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.hosts import in_namespaces, why_not
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.ray_cluster import RayCluster, signal_to, wait_calm

NUM_STREAMS = 16
NUM_NEWCOMERS = 4
NUM_TOKENS = 240
STARTED_LEN = 8
KINDS = ("kill", "stop", "link")
AWAY_S = 4.0  # stopped, or unplugged: longer than the router's patience and than a lease
BACK_S = 120.0


class Stream:
    """One request to its end."""

    def __init__(self):
        self.token_ids, self.times_s, self.num_moved, self.error = [], [], 0, None
        self.started = asyncio.Event()

    async def read(self, cluster, prompt, sampling):
        self.asked_s = time.monotonic()
        try:
            async with cluster.client() as client:
                async for chunk in client.generate(token_ids=prompt, sampling=sampling):
                    if chunk.token_ids:
                        assert chunk.index == len(self.token_ids)
                        self.token_ids += chunk.token_ids
                        self.times_s.append(time.monotonic())
                    if len(self.token_ids) >= STARTED_LEN:
                        self.started.set()
                self.num_moved = chunk.finish.stats.num_migrations
                self.workers = chunk.finish.stats.prefill_worker, chunk.finish.stats.decode_worker
        except BatonError as error:
            self.error = f"{type(error).__name__}: {error.message}"
        finally:
            self.started.set()
        return self

    def longest(self, hit_s):
        """(longest pause, when it began after the fault, tokens before it, migrations, workers in the end)."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        at, (a, b) = max(enumerate(pairs), key=lambda item: item[1][1] - item[1][0], default=(0, (0.0, 0.0)))
        return round(b - a, 3), round(a - hit_s, 3), at, self.num_moved, *getattr(self, "workers", ())

    def pause_s(self):
        """The longest between two tokens."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


class Campaign:
    """Faults on one cluster."""

    def __init__(self, cluster):
        self.cluster = cluster
        tokenizer = Tokenizer.from_directory(TINY)
        prompts = token_prompts(tokenizer, 8 + NUM_STREAMS, seed=9, max_len=100)[-NUM_STREAMS:]
        self.asked = [
            (prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=float(at % 2), seed=at, ignore_eos=True))
            for at, prompt in enumerate(prompts)
        ]
        self.want = None
        self.rows = []

    async def fault_free(self):
        """What every stream must say."""
        whole = await asyncio.gather(*(Stream().read(self.cluster, *one) for one in self.asked))
        assert not any(one.error for one in whole), [one.error for one in whole]
        self.want = [one.token_ids for one in whole]
        assert all(len(tokens) == NUM_TOKENS for tokens in self.want)
        self.free_pause_s = max(one.pause_s() for one in whole)

    async def hit(self, kind, worker_id):
        """One fault under streams; a row."""
        row = await self._under_streams(lambda: self._fault(kind, worker_id), kind, worker_id)
        return row

    async def _under_streams(self, fault, kind, where):
        streams = [Stream() for _ in self.asked]
        tasks = [
            asyncio.create_task(stream.read(self.cluster, *one))
            for stream, one in zip(streams, self.asked, strict=True)
        ]
        for stream in streams:
            await stream.started.wait()
        num_running = sum(not task.done() for task in tasks)
        hit_s = time.monotonic()
        undo = await fault()
        newcomers = [Stream() for _ in range(NUM_NEWCOMERS)]
        tasks += [
            asyncio.create_task(stream.read(self.cluster, *one))
            for stream, one in zip(newcomers, self.asked, strict=False)
        ]
        await undo()
        await asyncio.gather(*tasks)
        ended_s = time.monotonic()
        held = await wait_calm(self.cluster, BACK_S)
        row = {
            "fault": kind,
            "worker": where,
            "num_running": num_running,
            "num_streams": NUM_STREAMS,
            "num_equal": sum(one.token_ids == want for one, want in zip(streams, self.want, strict=True)),
            "num_newcomers": NUM_NEWCOMERS,
            "num_newcomers_equal": sum(one.token_ids == want for one, want in zip(newcomers, self.want, strict=False)),
            "errors": sorted({one.error for one in (*streams, *newcomers) if one.error}),
            "num_moved": sum(one.num_moved for one in streams),
            "pauses_s": sorted(round(one.pause_s(), 3) for one in streams),
            "newcomer_ttft_s": [round(one.times_s[0] - one.asked_s, 3) for one in newcomers if one.times_s],
            "longest": sorted((one.longest(hit_s) for one in streams), reverse=True)[:4],
            "held": held,
            "streams_s": round(ended_s - hit_s, 2),
            "back_s": round(time.monotonic() - ended_s, 2),
        }
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    async def _fault(self, kind, worker_id):
        cluster = self.cluster
        async with cluster.operator() as client:
            host, pid = cluster.place_of(await client.status(), worker_id)
        if kind == "link":
            host.link(up=False)

            async def plug():
                await asyncio.sleep(AWAY_S)
                host.link(up=True)

            return plug
        signal_to(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

        async def go_on():
            if kind == "stop":
                await asyncio.sleep(AWAY_S)
                signal_to(pid, signal.SIGCONT)

        return go_on

    async def head(self):
        """The head's Ray is killed and started again under streams; then it must be of use again."""
        cluster, epochs = self.cluster, await self._epochs()

        async def fault():
            assert cluster.kill_head()

            async def back():
                await asyncio.sleep(AWAY_S)
                code, data = await asyncio.to_thread(cluster.restart_head)
                restarted.update(code=code, steps=data["steps"])

            return back

        restarted = {}
        row = await self._under_streams(fault, "kill", "head")
        row["is_same_incarnations"] = await self._epochs() == epochs
        row["runbook"] = restarted["code"]
        if restarted["code"]:
            row["steps"] = restarted["steps"]
        row["is_scaled"] = await self._scales()
        return row

    async def _scales(self):
        """The next supervisor ends a worker, starts one, and starts one again that is drained and ended."""
        for runbook in (
            ("scale", "--decode", "1"),
            ("scale", "--decode", "2"),
            ("replace-decode", "--worker", "decode-1"),
        ):
            code, data = await asyncio.to_thread(self.cluster.runbook, *runbook)
            if code:
                print(json.dumps(data), file=sys.stderr, flush=True)
                return False
        return not await wait_calm(self.cluster, BACK_S)

    async def _epochs(self):
        async with self.cluster.operator() as client:
            status = await client.status()
        return {worker.state.worker_id: worker.state.epoch for worker in status.workers if worker.alive}


def summary(rows, free_pause_s):
    """Over all faults."""
    pauses_s = sorted(pause_s for row in rows for pause_s in row["pauses_s"])
    return {
        "num_faults": len(rows),
        "num_streams": sum(row["num_streams"] for row in rows),
        "num_equal": sum(row["num_equal"] for row in rows),
        "num_newcomers": sum(row["num_newcomers"] for row in rows),
        "num_newcomers_equal": sum(row["num_newcomers_equal"] for row in rows),
        "num_leaking": sum(bool(row["held"]) for row in rows),
        "pause_fault_free_s": round(free_pause_s, 3),
        "pause_p50_s": statistics.median(pauses_s),
        "pause_p99_s": pauses_s[min(len(pauses_s) - 1, int(0.99 * len(pauses_s)))],
        "pause_max_s": pauses_s[-1],
    }


async def run(cluster, rounds, kinds, workers, with_head):
    """All faults, `rounds` times; (rows, summary)."""
    campaign = Campaign(cluster)
    assert not await wait_calm(cluster, BACK_S)
    await campaign.fault_free()
    for _ in range(rounds):
        for kind in kinds:
            for worker_id in workers:
                await campaign.hit(kind, worker_id)
    if with_head:
        await campaign.head()
    return campaign


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--workers", nargs="*")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--no-head", action="store_true", help="leave the head alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        why = why_not()
        if why:
            print(f"skipped: {why}", file=sys.stderr)
            return 3
        command = [sys.executable, "-P", "-m", "baton.tests.e2e.ray_faults", "--inside", *sys.argv[1:]]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return subprocess.run(in_namespaces(command), env=environment).returncode
    directory = tempfile.mkdtemp(prefix="bh", dir="/var/tmp")
    try:
        with RayCluster(directory, num_prefill=options.prefill) as cluster:
            workers = options.workers or cluster.workers
            campaign = asyncio.run(run(cluster, options.rounds, options.kinds, workers, not options.no_head))
    finally:
        if "BATON_KEEP" not in os.environ:
            shutil.rmtree(directory, ignore_errors=True)
    found = result("faults-rayup", campaign.rows, summary=summary(campaign.rows, campaign.free_pause_s))
    text = json.dumps(found)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    good = all(row["num_equal"] == row["num_streams"] and not row["held"] for row in campaign.rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
