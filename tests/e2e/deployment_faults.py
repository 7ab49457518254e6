"""Faults 17 to 19 and 26: the router, Ray's head, clocks and disks."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from baton.core.clock import MonotonicClock
from baton.core.errors import NoWorker, RequestCancelled, WorkerLost
from baton.core.telemetry.telemetry import Telemetry, TelemetryConfig
from baton.tests.e2e.checker import Clients
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.fleet import Fleet, free_port, wait_until

HOUR_S = 3600.0
FULL_DEVICE = "/dev/full"  # every write to it fails with ENOSPC


class RouterProcess:
    """`python -m baton.router` at a fixed port, in several incarnations."""

    def __init__(self, port):
        self.port = port
        self.process = None

    async def start(self):
        command = [sys.executable, "-P", "-m", "baton.router", "--port", str(self.port), "--model-name", "tiny"]
        command += ["--model-path", str(TINY), "--exit-with-parent"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert json.loads(line)["grpc_port"] == self.port

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


async def router_killed(run):
    """SIGKILL under streams: they end with a typed error, workers give everything back, the next router finds them.

    Clients ask again from the start: an answer's tokens follow from its seed, so what they had is its beginning.
    """
    router = RouterProcess(free_port())
    await router.start()
    fleet = run.fleet = Fleet(config={"max_num_seqs": 6}, router_port=router.port)
    clients = None
    try:
        await fleet.start()
        clients = Clients(f"127.0.0.1:{router.port}", "")
        run.use(clients)
        lost = run.stream(allowed=(WorkerLost,))
        await run.hit("decoding")
        router.kill()
        await run.over(lost)
        assert any(one.error for one in lost)
        await wait_until(lambda: _nothing_held(fleet), 30.0, "workers give back what the router had asked for")
        epochs = {name: worker.epoch for name, worker in fleet.workers.items()}
        await router.start()
        await fleet.ready()
        again = run.stream(asks=[one.ask for one in lost])
        await run.over(again)
        assert all(one.reason for one in again)
        for one, other in zip(lost, again, strict=True):
            assert other.token_ids[: len(one.token_ids)] == one.token_ids
        assert epochs == {name: worker.epoch for name, worker in fleet.workers.items()}, "I5"
        await wait_until(lambda: _nothing_held(fleet), 30.0, "everything is given back")
    finally:
        await run.close()
        await fleet.close()
        router.kill()


async def _nothing_held(fleet):
    return not await fleet.held()


async def head_killed(run):
    """Ray's GCS is killed. Ray only starts workers; streams, old and new, go on without it.

    For a minute: then Ray ends the process that has started them, and with it the deployment.
    """
    command = [sys.executable, "-P", "-m", "baton.tests.e2e.deployment_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    children = set()
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 180.0)
        assert line, "the deployment did not start"
        said = json.loads(line)
        children = _descendants(process.pid)
        run.use(Clients(said["address"], ""))
        asks = run.campaign.asks(10, max_tokens=150)
        run.stream(asks=asks)
        await wait_until(lambda: sum(bool(one.events) for one in run.deliveries) >= 5, 60.0, "streams run")
        run.note({one.name: "decoding" if one.events else "admitted" for one in run.deliveries if not one.is_over})
        (head,) = (pid for pid in children if "gcs_server" in _command_of(pid).partition(" ")[0])
        os.kill(head, signal.SIGKILL)
        run.stream(6)
        await run.over()
        run.stream(4)
        await run.over()
        assert all(one.reason for one in run.deliveries), [one.error for one in run.deliveries if one.error]
        assert all(_command_of(pid) for pid in said["pids"]), "I5 a worker died with the head"
    finally:
        await run.close()
        # A deployment without its head does not come to an orderly end in time; what is its own is ended here.
        children |= _descendants(process.pid)
        process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _descendants(pid):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, todo = set(), {pid}
    while todo:
        todo = {child for child, parent in parents.items() if parent in todo} - found
        found |= todo
    return found


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def has_time_namespaces():
    """Whether a process can be given a monotonic clock of its own."""
    try:
        tried = subprocess.run([*other_clock(HOUR_S), "true"], capture_output=True, timeout=10.0, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def other_clock(by_s):
    """The command that starts another with its monotonic clock set forward."""
    return ["unshare", "--time", "--monotonic", str(int(by_s)), "--fork", "--kill-child"]


async def clock_jumps(run):
    """A decode worker's monotonic clock is an hour ahead of everybody's: no two may compare theirs.

    Wall clocks cannot be set for a few processes alone; `tests/test_clocks.py` shows that nothing here follows one.
    """
    name = "decode-1"
    if has_time_namespaces():
        await _end(run.fleet.workers[name])
        run.fleet.launch(name, prefix=other_clock(HOUR_S))
        await run.fleet.ready()
    run.stream()
    await run.hit("pushing")
    run.stream()
    await run.hit("decoding")
    await run.over()
    served = [one for one in run.deliveries if name in one.workers]
    assert served, "nobody was served under the other clock"
    assert all(0 <= one.stats.ttft_ms < 1e3 * one.deadline_s for one in served)
    await _end(run.fleet.workers[name])
    run.fleet.launch(name)


async def _end(worker):
    worker.process.stdin.close()
    await worker.ended()


async def disk_full(run):
    """Spans go to a device without room, and the host tier of preempted KV has room for next to nothing.

    Both are given up: spans are lost and counted, KV that finds no room is dropped and computed again.
    """
    telemetry = Telemetry(TelemetryConfig(trace_file=FULL_DEVICE), "router", MonotonicClock())
    config = {"telemetry": {"trace_file": FULL_DEVICE}, "kv_memory_mib": 6, "host_kv_bytes": 600_000}
    fleet = run.fleet = Fleet(("prefill-0", "decode-0"), config=config, tracer=telemetry.tracer)
    try:
        await fleet.start()
        clients = Clients(f"127.0.0.1:{fleet.router.port}", "")
        run.use(clients)
        run.stream(12, run.campaign.asks(12, seed=26, max_len=60, max_tokens=60), allowed=(NoWorker, RequestCancelled))
        await run.hit("preempted", renew=True)
        await run.over()
        assert all(one.reason for one in run.deliveries), [one.error for one in run.deliveries]
        inventory = (await fleet.workers["decode-0"].report())["inventory"]
        assert inventory["num_preemptions"] > 0
        assert inventory["num_host_full"] > 0, "the tier was never full"
        await wait_until(lambda: _nothing_held(fleet), 30.0, "everything is given back")
    finally:
        await run.close()
        await fleet.close()
        telemetry.close()
    assert telemetry.num_dropped > 0, "spans were written where there is no room"
