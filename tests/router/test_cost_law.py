"""The cost law: whatever a body or message holds, the event loop spends at most 2 ms and 20 ms a megabyte on it.

CPU time of the loop's own thread is measured, the least of a few tries, and against a fixed piece of work that is
measured beside it: how busy or how slow the machine is does not matter. What is admitted is ended before a worker is
asked, and nothing else runs on the loop, so that only the door's own work counts.
"""

import asyncio
import contextlib
import gc
import json
import random
import time
import tracemalloc

import pytest

from baton.core.errors import BatonError, Overloaded
from baton.proto import inference_pb2, unreadable
from baton.router.inference import InferenceService
from baton.tests.router.hostile_bodies import bodies, messages
from baton.tests.router.openai.served import served

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]
NUM_TRIES = 20
BASE_S = 2e-3
REFERENCE = "[" + ",".join(['{"a":[1,2,"b"]}'] * 5000) + "]"
REFERENCE_S = 1.2e-3  # on two quiet cores of 2025
NUM_SAMPLED = 300
S_PER_BYTE = 20e-9
MODEL_LEN = 100_000  # 1.7 MB of body


@pytest.fixture
def at_the_door(monkeypatch):
    """Requests end where workers would be asked."""

    async def refuse(self, *args):
        raise Overloaded("the test ends here")
        yield

    monkeypatch.setattr(InferenceService, "_stream", refuse)


class Front:
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


async def loop_s(work):
    """CPU seconds of this thread."""
    started_s = time.thread_time()
    await work()
    return time.thread_time() - started_s


async def find_dear(works):
    """(what, milliseconds, allowed) of each that costs more than the law allows for what comes and goes.

    Bodies of megabytes are made one by one, and what a request leaves in cycles is collected between them.
    """
    dear = []
    async for what, num_bytes, work in works:
        num_bytes += await work() or 0
        limit_s = BASE_S + S_PER_BYTE * num_bytes
        for _ in range(NUM_TRIES):
            slowness = max(1.0, reference_s() / REFERENCE_S)
            spent_s = await loop_s(work)
            if spent_s <= limit_s * slowness:
                break
        else:
            dear.append((what, round(1e3 * spent_s, 1), round(1e3 * limit_s, 1), round(slowness, 2)))
        gc.collect()
    return dear


@contextlib.contextmanager
def between_works():
    """Where garbage is collected, of what works leave alone."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def sampled(works, num):
    """So many of them, drawn."""
    for work in random.Random(0).sample([work async for work in works], num):
        yield work


def reference_s():
    """CPU seconds that a fixed piece of work takes just now."""
    started_s = time.thread_time()
    json.loads(REFERENCE)
    return time.thread_time() - started_s


async def http_works(running, num_bytes):
    door = Front(running.router)
    for path, what, body in bodies(num_bytes):
        yield f"{path} {what}", len(body), lambda path=path, body=body: door.post(path, body)


async def lengthen(running):
    """The workers' model takes long prompts from here on, so that long bodies are read at all."""
    for worker in running.of("prefill") + running.of("decode"):
        worker.overrides |= {"max_model_len": MODEL_LEN, "block_size": MODEL_LEN}
    while any(member.state.max_model_len != MODEL_LEN for member in members(running)):
        await asyncio.sleep(0.01)
    running._heartbeats.cancel()
    for task in asyncio.all_tasks():
        if task.get_coro().__qualname__ == "RouterServer._tick":
            task.cancel()


def members(running):
    return [member for role in ("prefill", "decode") for member in running.router.members.live(role)]


async def run_http(num_bytes, num_sampled=None):
    async with served(alive_s=1e6) as (running, _):
        await lengthen(running)
        door = Front(running.router)
        await door.post("/v1/completions", b'{"prompt":[' + b"1," * 5000 + b"1]}")  # a process starts
        works = http_works(running, num_bytes)
        with between_works():
            return await find_dear(works if num_sampled is None else sampled(works, num_sampled))


@pytest.mark.long
async def test_no_body_keeps_the_loop_busy(at_the_door):
    dear = await run_http(60_000, NUM_SAMPLED)
    assert not dear, "\n".join(map(str, dear))


async def grpc_works(running, num_bytes):
    """A message as gRPC hands it on: parsed, then asked of the service."""
    inference = running.router.inference
    parse = unreadable._returning_errors(
        inference_pb2.GenerateRequest.FromString, lambda name, size: inference.check_num_bytes(size)
    )

    async def ask(data):
        message = parse(data)
        if isinstance(message, BatonError):
            return
        with contextlib.suppress(BatonError):
            async with inference.open([message]) as answers:
                async for _ in answers.only():
                    pass

    for what, data in messages(num_bytes):
        yield f"gRPC {what}", len(data), lambda data=data: ask(data)


async def run_grpc(num_bytes):
    async with served(alive_s=1e6) as (running, _):
        await lengthen(running)
        with between_works():
            return await find_dear(grpc_works(running, num_bytes))


@pytest.mark.long
async def test_no_message_keeps_the_loop_busy(at_the_door):
    dear = await run_grpc(120_000)
    assert not dear, "\n".join(map(str, dear))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_bytes", [3_000, 30_000, 60_000, 1_600_000, 6_000_000])
async def test_no_body_of_any_size_keeps_the_loop_busy(at_the_door, num_bytes):
    dear = await run_http(num_bytes)
    assert not dear, "\n".join(map(str, dear))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_bytes", [1_000, 1_600_000, 12_000_000])
async def test_no_message_of_any_size_keeps_the_loop_busy(at_the_door, num_bytes):
    dear = await run_grpc(num_bytes)
    assert not dear, "\n".join(map(str, dear))


@pytest.mark.long
async def test_what_is_refused_is_freed_at_once(at_the_door):
    """No cycle of exception and frame holds a body: the garbage collector does not run here."""
    async with served(alive_s=1e6) as (running, _):
        await lengthen(running)
        door = Front(running.router)
        refused = [
            ("/v1/completions", b'{"guided_regex":"' + b"a" * 60_000 + b'","prompt":["a","a"]}'),
            ("/v1/completions", b'{"guided_regex":"' + b"a" * 60_000 + b'","prompt":[' + b'"a",' * 400 + b'"a"]}'),
            ("/v1/completions", b'{"guided_regex":"' + b"a" * 60_000 + b'","prompt":"a","n":99}'),
            ("/v1/chat/completions", b'{"guided_regex":"' + b"a" * 60_000 + b'","messages":[]}'),
            ("/v1/completions", b'{"prompt":"' + b"a" * 90_000 + b'","stop":"' + b"b" * 900 + b'"}'),
        ]
        for path, body in refused:
            await door.post(path, body)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for path, body in refused * 10:
                await door.post(path, body)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert after - before < 1 << 20, after - before
