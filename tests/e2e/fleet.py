"""A deployment that faults are put into: a router in this process, workers as processes, proxies on every way.

    router -> worker        gRPC, one proxy for each worker
    worker -> router        heartbeats, one for each worker
    prefill -> decode       the hand-off, one for each pair

Everything is at a fixed address, so that a worker's next incarnation is where its last one was. It knows where each
request is (`states`) and what is held for any (`held`); what of that is right is the `checker`'s to say.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time

from baton.client import AsyncBatonClient
from baton.core.errors import WorkerLost
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.tcp_proxy import Proxy

START_S = 120.0
ORDER_S = 10.0
CLOSE_S = 20.0
PACE_S = 0.02
ALIVE_S = 3.0  # longer than the default, as the machine may be busy
TRANSFER = {"transport": "zmq"}  # all of a hand-off in one connection, through the proxy
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Which state says more, where a request is at two workers.
ORDER = (
    *("queued", "admitted", "attending", "aborting", "reserving", "pushing", "committing"),
    *("complete", "preempted", "decoding", "finishing"),
)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def role_of(name):
    return name.partition("-")[0]


class Worker:
    """One worker: its place, its process, and what that says."""

    def __init__(self, name):
        self.name = name
        self.port, self.kv_port = free_port(), free_port()
        self.calls = Proxy(self.port)
        self.beats = None
        self.process = None
        self.epoch = 0
        self.rank_pids = []
        self.has_served = asyncio.Event()
        self.struck = asyncio.Queue()
        self.num_incarnations = 0
        self._answers = {}
        self._reading = None

    @property
    def kv_address(self):
        return f"tcp://127.0.0.1:{self.kv_port}"

    def launch(self, setup, prefix=()):
        command = [*prefix, sys.executable, "-P", "-m", "baton.tests.e2e.fault_worker", json.dumps(setup)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "BATON_TEST_LOUD" not in os.environ else None,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.num_incarnations += 1
        self.has_served.clear()
        self._reading = asyncio.create_task(self._read(self.process))

    async def _read(self, process):
        while line := await asyncio.to_thread(process.stdout.readline):
            said = json.loads(line)
            match said.pop("said"):
                case "serving":
                    self.epoch, self.rank_pids = said["epoch"], said["rank_pids"]
                    self.has_served.set()
                case "struck":
                    self.struck.put_nowait(said["states"])
                case "report":
                    answer = self._answers.pop(said["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(said)

    @property
    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def order(self, do, **fields):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps({"do": do, **fields}) + "\n").encode())
            self.process.stdin.flush()

    async def report(self, timeout_s=ORDER_S):
        """What it holds; None if it does not answer."""
        number = next(_NUMBERS)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.order("report", id=number)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self._answers.pop(number, None)
            return None

    def signal(self, number, *, group=False):
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    async def ended(self, timeout_s=CLOSE_S):
        """Its exit code."""
        code = await asyncio.to_thread(self.process.wait, timeout_s)
        await self._reading
        self.process.stdin.close()
        self.process.stdout.close()
        return code

    async def close(self):
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT, group=True)
            self.process.stdin.close()
            try:
                await asyncio.to_thread(self.process.wait, CLOSE_S)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL, group=True)
                self.process.wait()
                raise
            finally:
                await self._reading
                self.process.stdout.close()
        await self.calls.close()
        if self.beats is not None:
            await self.beats.close()


_NUMBERS = itertools.count(1)


class Fleet:
    """See above.

    Args:
        names: of the workers, each beginning with its role.
        config: of all workers, beyond the defaults.
        transfer: of all workers.
        tracer: of the router.
        router_port: of a router in another process; then this one has none.
        router: configuration of the router.
    """

    def __init__(self, names=NAMES, *, config=None, transfer=None, tracer=None, router_port=0, **router):
        self._names = names
        self._config = config or {}
        self._transfer = TRANSFER | (transfer or {})
        values = {
            "host": "127.0.0.1",
            "port": 0,
            "max_queue_len": 256,
            "request_timeout_s": 120.0,
            "alive_s": ALIVE_S,
            "routing": "prefix",
            "max_wait_s": 60.0,
        }
        self._router_port = router_port
        self.router = None
        if not router_port:
            model = ServedModel.from_directory("tiny", TINY)
            self.router = RouterServer(RouterConfig(**values | router), model, tracer=tracer)
        self.workers = {}
        self.ways = {}  # (prefill, decode) to the proxy between

    async def start(self):
        if self.router is not None:
            await self.router.start()
        self.workers = {name: Worker(name) for name in self._names}
        for worker in self.workers.values():
            await self._place(worker)
        for name in self.workers:
            self.launch(name)
        await self.ready()

    async def _place(self, worker):
        await worker.calls.start()
        worker.beats = Proxy(self._router_port or self.router.admin_port)
        await worker.beats.start()
        for prefill, decode in itertools.product(self.of("prefill"), self.of("decode")):
            if (prefill.name, decode.name) not in self.ways:
                way = self.ways[prefill.name, decode.name] = Proxy(decode.kv_port)
                await way.start()

    def of(self, role):
        return [worker for worker in self.workers.values() if role_of(worker.name) == role]

    def launch(self, name, *, prefix=(), transfer=None, poison=(), pace_s=PACE_S, **config):
        """An incarnation of a worker. `prefix`: of its command."""
        worker = self.workers[name]
        ways = {
            other.kv_address: f"tcp://{self.ways[name, other.name].address}"
            for other in self.of("decode")
            if (name, other.name) in self.ways
        }
        setup = {
            "role": role_of(name),
            "name": name,
            "config": self._config | config,
            "transfer": self._transfer | (transfer or {}),
            "port": worker.port,
            "kv_port": worker.kv_port,
            "shown": worker.calls.address,
            "router": worker.beats.address,
            "ways": ways,
            "pace_s": pace_s,
            "poison": list(poison),
        }
        worker.launch(setup, prefix)

    async def add(self, name, **options):
        """One more worker, which serves when this returns. Prefill workers of before do not reach it by a proxy."""
        self.workers[name] = Worker(name)
        await self._place(self.workers[name])
        self.launch(name, **options)
        await self.ready()

    async def remove(self, name):
        """Shut it down, and wait until the router knows."""
        worker = self.workers.pop(name)
        await worker.close()
        async with asyncio.timeout(START_S):
            while any(member.alive for member in self.router.members.all() if member.state.worker_id == name):
                await asyncio.sleep(0.05)

    async def ready(self):
        """Until every worker serves, and the router knows its present incarnation as alive."""
        async with asyncio.timeout(START_S):
            for worker in self.workers.values():
                while not worker.has_served.is_set():
                    assert worker.is_running, f"{worker.name} did not start"
                    await asyncio.sleep(0.05)
            while not await self.is_healthy():
                await asyncio.sleep(0.1)

    async def is_healthy(self):
        """Whether the router has the present incarnation of every worker, alive."""
        if self.router is None:
            async with AsyncBatonClient(f"127.0.0.1:{self._router_port}", timeout_s=ORDER_S) as client:
                try:
                    known = (await client.status()).workers
                except WorkerLost:
                    return False
        else:
            known = self.router.members.all()
        incarnations = {one.state.worker_id: one.state.epoch for one in known if one.alive}
        return all(incarnations.get(name) == worker.epoch for name, worker in self.workers.items())

    async def reports(self):
        """By worker, of those that answer."""
        workers = [worker for worker in self.workers.values() if worker.is_running]
        found = await asyncio.gather(*(worker.report(2.0) for worker in workers))
        return {worker.name: report for worker, report in zip(workers, found, strict=True) if report is not None}

    async def states(self, open_ids):
        """Where each open request is, by the name its client gave it."""
        reports = await self.reports()
        found = {}
        if self.router is not None:
            for visits in self.router.migration.in_flight_requests._visits.values():
                found |= {request_of(str(key), open_ids): "admitted" for key in visits}
            if self.router._admission_queue is not None and self.router._admission_queue.queue.num_waiting:
                found |= {name: "queued" for name in open_ids if name not in found}
        for report in reports.values():
            for key, state in report["states"].items():
                name = request_of(key, open_ids)
                if state in ORDER and ORDER.index(state) >= ORDER.index(found.get(name, "queued")):
                    found[name] = state
        found.pop(None, None)
        return {name: "admitted" if state == "attending" else state for name, state in found.items()}

    async def held(self):
        """Whatever is held for any request: empty where nothing is."""
        left = {} if self.router is None else self._held_by_router()
        reports = await self.reports()
        for name in self.workers:
            if name not in reports:
                left[name] = "does not answer"
                continue
            inventory = reports[name]["inventory"]
            if inventory["num_blocks_free"] != inventory["num_blocks"] or any(
                inventory[what]
                for what in ("num_blocks_quarantined", "num_kv_receives", "num_slots_in_use", "num_requests_held")
            ):
                left[name] = inventory
        return left

    def _held_by_router(self):
        router, in_flight_requests = self.router, self.router.migration.in_flight_requests
        counts = {
            "router streams": router.metrics.num_streams_open._value.get(),
            "router queue": 0 if router._admission_queue is None else router._admission_queue.queue.num_waiting,
            "router visits": sum(in_flight_requests.num_at(incarnation) for incarnation in in_flight_requests._visits),
            "router tasks": num_router_tasks(),
        }
        return {name: count for name, count in counts.items() if count}

    async def resources(self):
        """Descriptors, threads and tasks of each process, by the life it is in."""
        reports = await self.reports()
        return {
            (name, self.workers[name].epoch): {
                kind: report[kind] for kind in ("num_fds", "num_threads", "num_tasks", "fds")
            }
            for name, report in reports.items()
        }

    async def close(self):
        try:
            closing = [worker.close() for worker in self.workers.values()]
            failed = [one for one in await asyncio.gather(*closing, return_exceptions=True) if one is not None]
        finally:
            for way in self.ways.values():
                await way.close()
            if self.router is not None:
                await self.router.stop(0.0)
        assert not failed, failed


def request_of(key, open_ids):
    """The client's name of an attempt; None if it is not one of theirs."""
    return next((name for name in open_ids if key.startswith(f"{name}-")), None)


def num_router_tasks():
    """Tasks of the router that are there for a request, in this process."""
    found = 0
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        name = "" if code is None else code.co_qualname
        found += name.startswith(("RequestRun.", "Attempts.", "InferenceService.Generate"))
    return found


async def wait_until(is_so, timeout_s, what):
    """A condition, with a deadline; `is_so` may be a coroutine function."""
    end_s = time.monotonic() + timeout_s
    while True:
        now = is_so()
        if asyncio.iscoroutine(now):
            now = await now
        if now:
            return now
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.03)
