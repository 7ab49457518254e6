"""A worker that is lost does not end a stream: the answer goes on elsewhere, each token once."""

import asyncio
import time

import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import (
    InvalidRequest,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestDeadlineExceeded,
    RequestQuarantined,
    WorkerLost,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import admin_pb2, admin_pb2_grpc
from baton.router.admission.fair_queue import FairQueue
from baton.router.attempt.attempts import Attempts
from baton.router.attempt.migration import MigrationConfig
from baton.router.placement.least_cost import LeastCost
from baton.tests.router.fakes import TOKENIZER, cluster

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
ANSWER = "hello world, how are you"


class Reading:
    """One client's stream, as a task."""

    def __init__(self, running, prompt="hi", sampling=GREEDY, timeout_s=15.0):
        self.token_ids = {}
        self.text = ""
        self.stats = {}
        self.task = asyncio.create_task(self._read(running, prompt, sampling, timeout_s))

    async def _read(self, running, prompt, sampling, timeout_s):
        async with AsyncBatonClient(running.address, timeout_s=timeout_s) as client:
            async for chunk in client.generate(prompt, sampling=sampling):
                have = self.token_ids.setdefault(chunk.choice, [])
                assert chunk.index == len(have), "a gap, or a token twice"
                have.extend(chunk.token_ids)
                self.text += chunk.text
                if chunk.HasField("finish"):
                    self.stats[chunk.choice] = chunk.finish.stats

    async def until(self, num_tokens):
        """Wait until it has so many tokens of each answer that has begun."""
        async with asyncio.timeout(10.0):
            while not self.token_ids or min(map(len, self.token_ids.values())) < num_tokens:
                await asyncio.sleep(0.005)

    async def seen(self, worker):
        """Wait until a worker has it."""
        async with asyncio.timeout(10.0):
            while not worker.seen:
                await asyncio.sleep(0.005)


def worker_of(running, worker_id):
    (worker,) = [worker for worker in running.workers if worker.worker_id == worker_id]
    return worker


async def kill(running, worker_id):
    """Its connections break, and it is not heard of again."""
    running.silent.add(worker_id)
    worker = worker_of(running, worker_id)
    running.workers.remove(worker)
    await worker.server.stop(None)


def serving(running, role):
    """The worker of a role that has a stream."""
    (worker,) = [worker for worker in running.of(role) if worker.running()]
    return worker.worker_id


async def status_of(running):
    async with AsyncBatonClient(running.address) as client:
        return await client.status()


def admin(running):
    return admin_pb2_grpc.AdminStub(running.channel)


@pytest.mark.fast
@pytest.mark.parametrize("num_tokens", [1, 5, 23])
async def test_a_stream_goes_on_when_its_decode_worker_dies(num_tokens):
    async with cluster(2, 2, alive_s=20.0) as running:
        running.script.answer = ANSWER
        running.script.decode_hangs_after = num_tokens - 1
        reading = Reading(running)
        await reading.until(num_tokens)
        running.script.decode_hangs_after = None
        dead = serving(running, "decode")
        start_s = time.monotonic()
        await kill(running, dead)
        await reading.task
        assert time.monotonic() - start_s < 8.0, "a broken connection needs no heartbeat to be seen"
        assert reading.text == ANSWER
        stats = reading.stats[0]
        num_had = num_tokens + (num_tokens - 1) % 2  # the script has two tokens in an event
        assert (stats.num_migrations, stats.num_handoff_retries) == (1, 0)
        assert (stats.prompt_len, stats.output_len, stats.num_forced_tokens) == (2, len(ANSWER), num_had)
        assert stats.output_len == stats.num_forced_tokens + 1 + stats.num_decode_tokens
        assert stats.decode_worker != dead
        # One token that is left comes from the prefill worker: the answer may end before a decode worker is asked.
        asked = running.of("decode")[0].seen
        assert len(asked) == 1 or (not asked and num_had + 1 == len(ANSWER))
        for seen in asked:
            assert list(seen.request.prompt_token_ids) == TOKENIZER.encode("hi" + ANSWER[:num_had])
            assert (seen.request.num_forced_tokens, seen.request.attempt.attempt) == (num_had, 2)
        assert (await status_of(running)).num_migrations == 1
        assert 'baton_migrations_total{cause="death"} 1.0' in running.router.metrics.render()
        await running.idle(3.0)


@pytest.mark.fast
async def test_a_stream_goes_on_when_its_prefill_worker_dies_before_its_first_token():
    async with cluster(2, 2) as running:
        running.script.prefill_hangs = True
        reading = Reading(running)
        while not any(worker.seen for worker in running.of("prefill")):
            await asyncio.sleep(0.005)
        running.script.prefill_hangs = False
        await kill(running, serving(running, "prefill"))
        await reading.task
        assert (reading.text, reading.stats[0].num_migrations) == ("hello world", 1)
        await running.idle(3.0)


async def test_a_silent_worker_is_left_after_its_fence():
    async with cluster(1, 2, alive_s=0.5) as running:
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        running.script.decode_hangs_after = None
        silent = serving(running, "decode")
        running.silent.add(silent)
        await reading.task
        assert (reading.text, reading.stats[0].num_migrations) == ("hello world", 1)
        assert 'baton_migrations_total{cause="fence"} 1.0' in running.router.metrics.render()
        assert worker_of(running, silent).seen[0].cancelled
        await running.idle(3.0)


async def test_a_stream_that_ends_without_a_finish_goes_on_elsewhere():
    async with cluster(1, 2) as running:
        running.script.no_finish = 1
        running.script.decode_ends_when = asyncio.Event()
        reading = Reading(running, sampling=SamplingParams(max_tokens=5, temperature=0.0))
        await reading.until(4)
        running.script.decode_ends_when.set()
        await reading.task
        assert (reading.text, reading.stats[0].num_migrations) == ("hello", 1)
        assert reading.stats[0].num_forced_tokens == 4, "the last is asked for again, for the word of the end"
        running.script.decode_error, running.script.decode_error_after = RuntimeError("a bug"), 4
        running.script.decode_ends_when = asyncio.Event()
        reading = Reading(running)
        await reading.until(5)
        running.script.decode_error = None
        running.script.decode_ends_when.set()
        await reading.task
        assert reading.text == "hello world"
        await running.idle(3.0)


async def test_two_migrations_and_no_more():
    async with cluster(1, 4, migration=MigrationConfig(quarantine_deaths=0)) as running:
        running.script.answer = ANSWER
        running.script.step = 1
        running.script.decode_hangs_after = 3 - 1
        reading = Reading(running)
        for num_tokens, then in ((3, 7), (7, 11), (11, 15)):
            await reading.until(num_tokens)
            running.script.decode_hangs_after = then - 1
            await kill(running, serving(running, "decode"))
        with pytest.raises(WorkerLost) as caught:
            await reading.task
        assert reading.text == ANSWER[:11]
        assert len(caught.value.fields["tried"]) == 3
        assert "tried prefill-0 and decode-" in caught.value.message
        assert running.router.metrics.total("migrations") == 2
        await running.idle(3.0)


async def test_a_stream_waits_for_a_worker_when_none_is_left():
    async with cluster() as running:
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        running.script.decode_hangs_after = None
        await kill(running, "decode-0")
        await asyncio.sleep(0.3)
        assert not reading.task.done()
        await running.add("decode", "decode-1")
        start_s = time.monotonic()
        await reading.task
        assert time.monotonic() - start_s < 5.0, "the longest pause between two looks is a second"
        assert reading.text == "hello world"


async def test_the_wait_is_bounded_by_itself_and_by_the_deadline():
    for config, kind in (
        ({"migration": MigrationConfig(wait_s=0.4)}, NoWorker),
        ({"request_timeout_s": 1.5}, RequestDeadlineExceeded),
    ):
        async with cluster(**config) as running:
            running.script.decode_hangs_after = 4
            reading = Reading(running)
            await reading.until(5)
            start_s = time.monotonic()
            await kill(running, "decode-0")
            with pytest.raises(kind) as caught:
                await reading.task
            assert time.monotonic() - start_s < 5.0, "else it would be half a minute"
            assert caught.value.fields["tried"] == ["prefill-0 and decode-0: death"]
            assert reading.text == "hello"
            await running.idle(3.0)


async def test_a_request_that_has_not_begun_is_refused_at_once_where_nobody_is():
    async with cluster(alive_s=1.5) as running:
        await kill(running, "decode-0")
        async with asyncio.timeout(10.0):
            while running.router.members.live("decode"):
                await asyncio.sleep(0.05)
        start_s = time.monotonic()
        with pytest.raises(NoWorker):
            await Reading(running).task
        assert time.monotonic() - start_s < 5.0, "else it would be half a minute"


async def test_a_connection_that_broke_alone_is_used_again():
    """The only worker is heard of after its stream broke: it lives."""
    async with cluster() as running:
        running.script.decode_error, running.script.decode_error_after = WorkerLost("flap"), 4
        running.script.decode_ends_when = asyncio.Event()
        reading = Reading(running)
        await reading.until(5)
        running.script.decode_error = None
        running.script.decode_ends_when.set()
        start_s = time.monotonic()
        await reading.task
        assert reading.text == "hello world"
        assert 0.4 < time.monotonic() - start_s < 8.0, "before it is known that the worker died"
        assert not running.router.migration.in_flight_requests.is_unsettled(worker_of(running, "decode-0"))


async def test_who_has_begun_is_not_turned_away():
    async with cluster(1, 2) as running:
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        running.script.decode_hangs_after = None
        running.script.attempt_errors = {2: Overloaded("full"), 3: Overloaded("full")}
        await kill(running, serving(running, "decode"))
        await reading.task
        assert (reading.text, reading.stats[0].num_migrations) == ("hello world", 1)
        await running.idle(3.0)


@pytest.mark.fast
async def test_each_answer_of_several_goes_on_by_itself():
    async with cluster(2, 2) as running:
        running.script.answer = ANSWER
        running.script.decode_hangs_after = 4
        reading = Reading(running, sampling=SamplingParams(max_tokens=64, temperature=0.0, n=3))
        async with asyncio.timeout(10.0):
            while len(reading.token_ids) < 3:
                await asyncio.sleep(0.005)
        await reading.until(5)
        running.script.decode_hangs_after = None
        await kill(running, "decode-0")
        for worker in running.of("decode"):
            for seen in worker.seen:
                seen.hang.set()
        await reading.task
        assert [TOKENIZER.decode(tokens) for tokens in reading.token_ids.values()] == [ANSWER] * 3
        assert sorted(stats.num_migrations for stats in reading.stats.values()) in ([0, 0, 1], [0, 1, 1])
        await running.idle(3.0)


async def test_a_prefix_that_no_prefill_worker_holds_is_computed_again_and_compared():
    async with cluster(0, 2) as running:
        await running.add("prefill", "prefill-0", block_size=2)  # ten blocks: prompt and 18 tokens
        running.script.answer = "x" * 40
        running.script.decode_hangs_after = 30
        reading = Reading(running)
        await reading.until(31)
        running.script.decode_hangs_after = None
        await kill(running, serving(running, "decode"))
        await reading.task
        assert reading.text == "x" * 40
        assert reading.stats[0].num_forced_tokens == 18
        await running.idle(3.0)


async def test_a_worker_that_knows_nothing_of_forced_tokens_is_found_out():
    async with cluster(1, 2) as running:
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        running.script.forgets_forced = True
        await kill(running, serving(running, "decode"))
        with pytest.raises(ProtocolError, match="began at token 0, not 5"):
            await reading.task


async def test_a_drained_worker_gets_nothing_new_and_is_left_after_the_grace():
    async with cluster(2, 2) as running:
        running.script.answer = ANSWER
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        drained = serving(running, "decode")
        reply = await admin(running).Drain(admin_pb2.DrainRequest(worker_id=drained, grace_ms=60_000))
        assert (reply.draining, reply.num_streams) == (True, 1)
        running.script.decode_hangs_after = None
        for _ in range(3):
            other = Reading(running)
            await other.task
            assert other.stats[0].decode_worker != drained
        await asyncio.sleep(0.15)
        assert reading.text == ANSWER[:5], "within the grace it may finish where it is"
        await admin(running).Drain(admin_pb2.DrainRequest(worker_id=drained, grace_ms=100))
        await reading.task
        assert (reading.text, reading.stats[0].num_migrations) == (ANSWER, 1)
        assert 'baton_migrations_total{cause="drain"} 1.0' in running.router.metrics.render()
        status = await status_of(running)
        assert {one.state.worker_id for one in status.workers if one.draining} == {drained}
        reply = await admin(running).Drain(admin_pb2.DrainRequest(worker_id=drained))
        assert (reply.draining, reply.num_streams) == (True, 0)
        reply = await admin(running).Drain(admin_pb2.DrainRequest(worker_id=drained, undo=True))
        assert not reply.draining
        await running.idle(3.0)


async def drain(running, *names, grace_ms=60_000):
    for name in names:
        await admin(running).Drain(admin_pb2.DrainRequest(worker_id=name, grace_ms=grace_ms))


@pytest.mark.fast
async def test_a_draining_worker_is_no_capacity_of_the_queue(monkeypatch):
    """What waits is promised by what the other workers do; and where no prefill worker is left, decode workers know."""
    monkeypatch.setattr(FairQueue, "num_waiting_tokens", 30)
    async with cluster(2, 0, local_prefill="auto", max_wait_s=None) as running:
        for at in range(3):
            await running.add("decode", f"decode-{at}", can_prefill=True)
        admission_queue = running.router._admission_queue
        admission_queue.look()
        whole = admission_queue.queue.capacity
        await drain(running, "prefill-0", "decode-0")
        admission_queue.look()
        rest = admission_queue.queue.capacity
        assert (whole.num_workers, rest.num_workers) == (2, 1)
        assert rest.num_positions == whole.num_positions * 2 // 3 > 0
        assert admission_queue.num_queued_tokens() == 0, "prefill-1 computes the prompts"
        assert not (await status_of(running)).local_prefill.only_way
        await drain(running, "prefill-1")
        admission_queue.look()
        assert admission_queue.queue.capacity.num_workers == 2, "the decode workers that are left"
        assert admission_queue.num_queued_tokens() == 15
        assert (await status_of(running)).local_prefill.only_way
        await drain(running, "decode-1", "decode-2")
        assert not (await status_of(running)).local_prefill.only_way, "there is no way"


@pytest.mark.fast
async def test_a_draining_workers_cache_is_no_promise(monkeypatch):
    seen = []
    monkeypatch.setattr(LeastCost, "cached_len", lambda _, *members: seen.append(members[:2]) or 0)
    async with cluster(2, 2, max_wait_s=None, routing="prefix") as running:
        await drain(running, "prefill-1", "decode-0")
        await Reading(running).task
    assert [[member.state.worker_id for member in role] for role in seen[0]] == [["prefill-0"], ["decode-1"]]


@pytest.mark.fast
async def test_a_stream_that_leaves_a_draining_decode_worker_says_nothing_of_prefill_workers(caplog):
    async with cluster(1, 0, local_prefill="auto") as running:
        for at in range(2):
            await running.add("decode", f"decode-{at}", can_prefill=True)
        running.script.answer = ANSWER
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        running.script.decode_hangs_after = None
        await drain(running, serving(running, "decode"), grace_ms=0)
        await reading.task
        assert (reading.text, reading.stats[0].path) == (ANSWER, "local")
        assert running.router.local.choices["local", "no_other_prefill_worker"] == 1
        assert "no prefill worker takes requests" not in caplog.text
        await drain(running, "prefill-0")
        await Reading(running).task
        assert running.router.local.choices["local", "no_prefill_worker"] == 1
        assert caplog.text.count("no prefill worker takes requests") == 1


async def test_where_all_drain_the_error_says_so():
    async with cluster(1, 1) as running:
        running.script.answer = ANSWER
        await admin(running).Drain(admin_pb2.DrainRequest(worker_id="decode-0"))
        with pytest.raises(NoWorker, match="no decode worker takes requests now: all are lost or draining"):
            await Reading(running).task
        await admin(running).Drain(admin_pb2.DrainRequest(worker_id="decode-0", undo=True))
        reading = Reading(running)
        await reading.task
        assert reading.text == ANSWER


async def test_a_drain_ends_no_stream():
    """Where no other worker is, or no migration is left, streams stay; new ones are refused."""
    async with cluster() as running:
        running.script.decode_hangs_after = 4
        reading = Reading(running)
        await reading.until(5)
        await admin(running).Drain(admin_pb2.DrainRequest(worker_id="decode-0", grace_ms=0))
        await asyncio.sleep(0.2)
        assert not reading.task.done()
        with pytest.raises(NoWorker):
            await Reading(running).task
        assert not running.router.migration.serving
        running.script.decode_hangs_after = None
        await running.add("decode", "decode-1")
        assert running.router.migration.serving
        await reading.task
        assert reading.stats[0].decode_worker == "decode-1"
        worker = worker_of(running, "decode-0")
        worker.epoch += 100_000
        running.router.members.heartbeat(worker.state())
        async with asyncio.timeout(10.0):  # the process that replaces it serves
            while running.router.migration.drains.incarnations():
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("why", ["too long to be handed over", "too small"])
async def test_a_drain_leaves_streams_that_no_other_pair_would_take(why, monkeypatch):
    answers = []  # to whether the stream may move
    original = Attempts._may_move
    monkeypatch.setattr(Attempts, "_may_move", lambda attempts: answers.append(original(attempts)) or answers[-1])
    async with cluster(1, 1, local_prefill="never") as running:
        running.script.answer = ANSWER
        running.script.decode_hangs_after = 4
        reading = Reading(running, prompt="x" * 20)
        await reading.until(5)
        other = await running.add("decode", "decode-1", **({"max_model_len": 32} if why == "too small" else {}))
        other.inventory = {"max_handoff_len": 24 if why == "too long to be handed over" else 0}
        prefill = running.of("prefill")[0]
        plain, path = prefill.state, {"kv_address": other.state().kv_address, "epoch": other.epoch, "data_path": "raw"}

        def with_path():
            state = plain()
            state.inventory.transfer.paths.add(**path)
            return state

        prefill.state = with_path
        for worker in (prefill, other):
            running.router.members.heartbeat(worker.state())
        await admin(running).Drain(admin_pb2.DrainRequest(worker_id="decode-0", grace_ms=0))
        async with asyncio.timeout(10.0):
            while len(answers) < 3:
                await asyncio.sleep(0.005)
        assert not any(answers)
        running.of("decode")[0].seen[0].hang.set()
        await reading.task
        assert (reading.text, reading.stats[0].decode_worker) == (ANSWER, "decode-0")


async def test_only_live_workers_are_drained():
    async with cluster() as running:
        for request in (
            admin_pb2.DrainRequest(worker_id="nobody"),
            admin_pb2.DrainRequest(),
            admin_pb2.DrainRequest(worker_id="nobody", undo=True),
        ):
            with pytest.raises(Exception, match="is alive") as caught:
                await admin(running).Drain(request)
            assert InvalidRequest.grpc_code in str(caught.value)


async def test_a_request_that_kills_workers_is_refused_until_it_is_pardoned():
    async with cluster(1, 3, alive_s=0.4) as running:
        running.script.answer = ANSWER
        running.script.step = 1
        bystanders = []
        running.script.decode_hangs_after = 3 - 1
        poison = Reading(running, prompt="poison")
        for num_tokens, then in ((3, 7), (7, 11)):
            await poison.until(num_tokens)
            running.script.decode_hangs_after = then - 1
            await kill(running, serving(running, "decode"))
        with pytest.raises(RequestQuarantined) as caught:
            await poison.task
        assert len(caught.value.fields["workers"]) == 2
        assert len(running.of("decode")) == 1, "no third worker"
        running.script.decode_hangs_after = None
        for attempt in range(2):
            with pytest.raises(RequestQuarantined):
                await Reading(running, prompt="poison").task
            bystanders.append(Reading(running, prompt=f"another {attempt}"))
        for bystander in bystanders:
            await bystander.task
        (blamed,) = (await status_of(running)).quarantined
        assert blamed.fingerprint == caught.value.fields["fingerprint"]
        assert 500 < blamed.left_s < 600
        reply = await admin(running).ClearQuarantine(admin_pb2.ClearQuarantineRequest(fingerprint=blamed.fingerprint))
        assert reply.num_cleared == 1
        again = Reading(running, prompt="poison")
        await again.task
        assert again.text == ANSWER


async def test_many_bystanders_of_one_death_go_on():
    async with cluster(1, 2, alive_s=3.0) as running:
        running.script.answer = ANSWER
        running.script.decode_hangs_after = 4
        readings = [Reading(running, prompt=f"prompt {number}") for number in range(16)]
        for reading in readings:
            await reading.until(5)
        running.script.decode_hangs_after = None
        await kill(running, "decode-0")
        for seen in worker_of(running, "decode-1").seen:
            seen.hang.set()
        await asyncio.gather(*(reading.task for reading in readings))
        assert {reading.text for reading in readings} == {ANSWER}
        assert sum(reading.stats[0].num_migrations for reading in readings) == 8
        async with asyncio.timeout(10.0):
            while len(running.router.members.live("decode")) > 1:
                await asyncio.sleep(0.02)
        assert (await status_of(running)).quarantined == []
        assert not running.router.migration.in_flight_requests.num_at(
            running.router.members.live("decode")[0].incarnation
        )
