"""The cost law: whatever a body or message holds, the event loop spends at most 2 ms and 20 ms a megabyte on it.

CPU time of the loop's own thread is measured, the least of a few tries: how busy the machine is does not matter. What
is admitted is ended before a worker is asked, so that only the door's own work counts.
"""

import asyncio
import gc
import time

import pytest

from baton.core.errors import Overloaded
from baton.router.inference import InferenceService
from baton.tests.router.hostile_bodies import bodies
from baton.tests.router.openai.served import served

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]
NUM_TRIES = 4
BASE_S = 2e-3
S_PER_BYTE = 20e-9
BASE_BYTES = 2 << 20
MAX_TIMES = 32
MAX_BYTES = 64 << 20
MODEL_LEN = 100_000  # 1.7 MB of body


@pytest.fixture
def at_the_door(monkeypatch):
    """Requests end where workers would be asked."""

    async def refuse(self, *args):
        raise Overloaded("the test ends here")
        yield

    monkeypatch.setattr(InferenceService, "_stream", refuse)


class Door:
    """Asks a router's application, without sockets."""

    def __init__(self, router):
        self._app = router._http._app
        self.status = 0
        self.num_bytes = 0  # of the last reply

    async def post(self, path, body):
        self.num_bytes = 0
        sent = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if sent:
                return sent.pop()
            await asyncio.Event().wait()

        async def send(message):
            self.status = message.get("status", self.status)
            self.num_bytes += len(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        scope |= {"client": ("test", 1), "server": ("test", 1), "http_version": "1.1", "scheme": "http"}
        scope["root_path"] = ""
        await self._app(scope | {"asgi": {"version": "3.0"}, "raw_path": path.encode()}, receive, send)
        return self.num_bytes if path == "/tokenize" else 0


async def loop_s(work, limit_s):
    """CPU seconds of this thread, the least of a few tries; no more tries than it takes to hold the law."""
    least = float("inf")
    for _ in range(NUM_TRIES):
        started_s = time.thread_time()
        await work()
        least = min(least, time.thread_time() - started_s)
        if least <= limit_s:
            break
    return least


async def find_dear(works):
    """(what, milliseconds, allowed) of each that costs more than the law allows for what comes and goes."""
    dear = []
    for what, num_bytes, work in works:
        num_bytes += await work() or 0
        limit_s = BASE_S + S_PER_BYTE * num_bytes
        spent_s = await loop_s(work, limit_s)
        if spent_s > limit_s:
            dear.append((what, round(1e3 * spent_s, 1), round(1e3 * limit_s, 1)))
    return dear


async def http_works(running, num_bytes):
    door = Door(running.router)
    for path, what, body in bodies(num_bytes):
        yield f"{path} {what}", len(body), lambda path=path, body=body: door.post(path, body)


async def run_http(num_bytes):
    async with served() as (running, _):
        for worker in running.of("prefill") + running.of("decode"):
            worker.overrides |= {"max_model_len": MODEL_LEN, "block_size": MODEL_LEN}
        while running.router.members.live("decode")[0].state.max_model_len != MODEL_LEN:
            await asyncio.sleep(0.01)
        door = Door(running.router)
        await door.post("/v1/completions", b'{"prompt":[' + b"1," * 5000 + b"1]}")  # a process starts
        gc.collect()
        gc.disable()
        try:
            return await find_dear([work async for work in http_works(running, num_bytes)])
        finally:
            gc.enable()


async def test_no_body_keeps_the_loop_busy(at_the_door):
    dear = await run_http(60_000)
    assert not dear, "\n".join(map(str, dear))
