"""Whatever any part of a request's way raises ends that request alone, typed and counted, and nothing stays behind.

A foreign exception is raised once, at one call or await of the router or of the workers of either role: in the slow
suite at every one that a request passes, by default at a sample that is fixed by where they stand in the source. Which
of them a request passes depends a little on timing: one that is not passed was not tried, and fails nothing. A loop of
a worker that ends by it is a dead worker, as anywhere else: its process would end, and another incarnation begins.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from baton.core.errors import RequestDeadlineExceeded, from_wire
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc, wire
from baton.router.attempt.migration import MigrationConfig
from baton.router.placement.local_prefill import ALWAYS, NEVER
from baton.tests.e2e.features import SCHEMA
from baton.tests.e2e.foreign import Foreign, Injection
from baton.tests.e2e.served import Served, served

MODULES = [
    f"baton.{name}"
    for name in (
        *(f"router.{name}" for name in (
            "inference", "attempt.choices", "attempt.attempts", "attempt.request_run", "attempt.channels",
            "admission.admission_queue", "admission.fair_queue", "admission.admission", "attempt.continuation",
            "attempt.stats", "attempt.in_flight_requests", "placement.refusals",
            "placement.policy", "placement.local_prefill",
        )),
        *(f"worker.{name}" for name in ("stream_mux",)),
        *(f"prefill_worker.{name}" for name in ("service", "worker")),
        *(f"decode_worker.{name}" for name in ("service", "worker", "request")),
        *(f"proto.{name}" for name in ("wire", "stream_mux_wire")),
        "core.requests.answer_text",
        "core.requests.validate",
        "engine.finish",
    )
]  # fmt: skip
PROMPT = tuple(range(40, 60))
WAIT_S = 120.0  # what has not happened by then never will: everything below waits for events, and lasts a second
NOT_PASSED = "not passed"
KINDS = {
    "stream_muxes": {"sampling": {"temperature": 0.0}},
    "several, reports": {"sampling": {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 2,
                         "prompt_logprobs": 1, "stop": ("zzzz",)}},
    "grammar": {"sampling": {"temperature": 0.0, "grammar": SCHEMA, "ignore_eos": False}},
    "local": {"local": True, "sampling": {"temperature": 0.0}},
}  # fmt: skip
SAMPLE = 30  # points of each kind by default, of which a request passes some 12
GROUP = 6  # after so many it is looked whether all is well


class Reviving(Served):
    """Begins a new incarnation of a worker whose loop has ended."""

    async def _beat(self):
        while True:  # heartbeats are this deployment's own here: one that meets the exception does not end them
            with suppress(Foreign):
                await super()._beat()

    async def revive(self):
        """Returns whether a loop had ended."""
        dead = [name for name, side in self.sides.items() if not side.worker._loop._thread.is_alive()]
        for name in dead:
            role = self.sides[name].role
            await self.kill(name)
            await self.add(role, name)
        self.fatal.clear()
        return bool(dead)


class Way:
    """One deployment, whose requests go by one way."""

    def __init__(self, running, injection, kind):
        self.running, self.injection = running, injection
        params = {"max_tokens": 6, "ignore_eos": True} | kind["sampling"]
        self._request = inference_pb2.GenerateRequest(sampling=wire.sampling_to_proto(SamplingParams(**params)))
        self._request.token_ids.ids.extend(PROMPT)
        self.findings = []

    async def ask(self):
        """(the code, what the trailers say, tokens by choice); never raises."""
        tokens = {}
        async with grpc.aio.insecure_channel(self.running.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(self._request, timeout=WAIT_S)
            try:
                async for chunk in call:
                    tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
            except grpc.aio.AioRpcError as error:
                typed = dict(error.trailing_metadata() or ()).get(wire.ERROR_KEY)
                return error.code().name, None if typed is None else from_wire(typed), tokens
        return "OK", None, tokens

    async def served_as_ever(self):
        """One that follows is; where a worker had to begin anew, as soon as it is heard of."""
        async with asyncio.timeout(WAIT_S):
            while (code := (await self.ask())[0]) == "UNAVAILABLE":
                await asyncio.sleep(0.05)
                await self.running.revive()  # a loop may end after its last request has
        return code == "OK"

    async def nothing_held(self):
        router = self.running.router
        async with asyncio.timeout(WAIT_S):
            while True:
                queue = router._admission_queue.queue
                held = {
                    "in flight": router.desired_state._admission.num_in_flight,
                    "waiting": queue.num_waiting,
                    "running": queue.num_running,
                    "bytes": queue.num_bytes,
                } | {name: side.worker._request_limit.num_inside for name, side in self.running.sides.items()}
                if not any(held.values()):
                    break
                await asyncio.sleep(0.02)
                await self.running.revive()
        await self.running.wait_idle(WAIT_S)

    async def inject(self, point):
        """Returns how the request ended; what is wrong goes to `findings`."""
        metrics, where = self.running.router.metrics, self.injection.points[point]
        before = metrics.total("requests_failed")
        self.injection.arm(point)
        asking = asyncio.create_task(self.ask())
        while not (await asyncio.wait({asking}, timeout=0.05))[0]:
            await self.running.revive()
        code, error, _ = asking.result()
        self.injection.armed = None
        if not self.injection.fired and code == "OK":
            return NOT_PASSED
        if code == "DEADLINE_EXCEEDED" or isinstance(error, RequestDeadlineExceeded):
            self.findings.append((where, "hung"))
        elif code != "OK" and error is None:
            self.findings.append((where, f"ended with {code} and no type"))
        if code != "OK" and metrics.total("requests_failed") == before:
            self.findings.append((where, f"{code} was not counted"))
        await self.running.revive()
        return code if error is None else type(error).__name__

    async def is_whole(self, where):
        """Whether the deployment serves the next request, and holds nothing; if not, that is a finding."""
        try:
            if not await self.served_as_ever():
                self.findings.append((where, "the next request failed"))
            await self.nothing_held()
        except TimeoutError:
            self.findings.append((where, "something is held, or the next request hangs"))
            return False
        return True


@asynccontextmanager
async def deployed(model, tokenizer, kind, injection):
    mode = ALWAYS if kind.get("local") else NEVER
    config = {"max_wait_s": None, "max_queue_len": None, "migration": MigrationConfig(wait_s=WAIT_S / 2)}
    config |= {"request_timeout_s": 2 * WAIT_S}  # no part of this
    async with served(model, tokenizer, 1, 1, local_prefill=mode, **config) as running:
        try:
            yield Way(running, injection, kind)
        finally:
            await running.revive()


async def sweep(model, tokenizer, kind, monkeypatch, number=None):
    """Inject at the points that a request passes, of a sample of `number` or of all; returns what was found."""
    monkeypatch.setattr("baton.tests.e2e.served.Served", Reviving)
    injection, findings, ends = Injection(MODULES), [], Counter()
    try:
        async with deployed(model, tokenizer, kind, injection) as way:
            assert (await way.ask())[0] == "OK"
            injection.is_watching = True
            assert (await way.ask())[0] == "OK"
            await way.nothing_held()
            injection.is_watching = False
        chosen = injection.sample(number or len(injection.points))
        left = sorted(injection.seen.intersection(chosen))
        assert len(left) > len(chosen) / 8, "the request passes hardly any of the code that is looked at"
        while left:
            async with deployed(model, tokenizer, kind, injection) as way:
                way.findings = findings
                while left:
                    group, left = left[:GROUP], left[GROUP:]
                    for point in group:
                        ends[await way.inject(point)] += 1
                    if not await way.is_whole([injection.points[point] for point in group]):
                        break  # and go on with another
        num_tried = ends.total() - ends[NOT_PASSED]
        print(f"\n{num_tried} tried of {len(chosen)} points, of {len(injection.points)}: {dict(ends)}")
        for finding in findings:
            print("FOUND", finding)
        return findings
    finally:
        injection.restore()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_foreign_exception_anywhere_ends_its_request_alone(kind, load_tiny, tokenizer, monkeypatch):
    assert await sweep(load_tiny(), tokenizer, KINDS[kind], monkeypatch, SAMPLE) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_foreign_exception_at_every_point_ends_its_request_alone(kind, load_tiny, tokenizer, monkeypatch):
    assert await sweep(load_tiny(), tokenizer, KINDS[kind], monkeypatch) == []


def test_an_injected_exception_is_raised_where_it_was_asked_for():
    injection = Injection(["baton.core.requests.validate"])
    try:
        assert len(injection.points) > 5
        with pytest.raises(Foreign):
            injection.arm(3)
            injection._pass(3)
        assert injection.fired
    finally:
        injection.restore()


def test_a_sample_of_points_does_not_change_with_what_stands_elsewhere():
    few, more = Injection(["baton.core.requests.validate"]), None
    few.restore()
    try:
        more = Injection(["baton.core.requests.answer_text", "baton.core.requests.validate"])
        chosen = [few.names[point] for point in few.sample(5)]
        kept = [name for name in map(more.names.__getitem__, more.sample(len(more.names))) if "validate" in name]
        assert kept[:5] == chosen
        assert len(set(more.names)) == len(more.names)
    finally:
        more.restore()
