"""Canaries to workers that are idle: who hangs is avoided until it answers, and clients' numbers show nothing of it."""

import asyncio
import logging

import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import Overloaded, StepFailed
from baton.core.requests.sampling import SamplingParams
from baton.router.placement.canaries import TENANT
from baton.router.placement.canary import CanaryConfig
from baton.router.placement.local_prefill import AUTO
from baton.tests.router.fakes import cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]

OFTEN = CanaryConfig(idle_s=0.1, retry_s=0.05, timeout_s=0.7)
PATIENT = CanaryConfig(idle_s=0.1, retry_s=0.05, timeout_s=10.0)  # where nothing hangs
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
STUCK = StepFailed("the step is stuck")


async def until(holds, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


def unfit(running):
    canary = running.router.migration.in_flight_tracker.canary
    return {member.state.worker_id for member in running.router.members.all() if canary.is_unfit(member.incarnation)}


def counts(running, outcome):
    """Canaries that ended like this, by worker."""
    found = running.router.canaries.counts.items()
    return {worker: count for (worker, _, how), count in found if how == outcome}


async def answer(running):
    async with AsyncBatonClient(running.address, timeout_s=20.0) as client:
        chunks = [chunk async for chunk in client.generate("hi", sampling=GREEDY)]
    return chunks[-1].finish.stats


async def status_of(running):
    async with AsyncBatonClient(running.address) as client:
        return await client.status()


def canaries_at(worker):
    return [seen for seen in worker.seen if seen.request.attempt.request_id.startswith("canary-")]


@pytest.mark.long
@pytest.mark.parametrize("name", ["decode-0", "prefill-1"])
async def test_an_idle_worker_that_hangs_is_avoided_until_it_answers(name, caplog):
    caplog.set_level(logging.WARNING, "baton.router.server")
    async with cluster(2, 2, canary=OFTEN) as running:
        running.script.hung = {name}
        await until(lambda: unfit(running) == {name})
        for _ in range(6):
            stats = await answer(running)
            assert name not in (stats.prefill_worker, stats.decode_worker)
        assert running.router.migration.serving
        status = await status_of(running)
        assert [(one.state.worker_id, bool(one.unfit_reason)) for one in status.workers if one.unfit] == [(name, True)]
        role = name.partition("-")[0]
        metrics = running.router.metrics.render()
        assert f'baton_worker_unfit{{role="{role}",worker="{name}"}} 1.0' in metrics
        assert metrics.count("baton_worker_unfit{") == 4
        assert f'baton_canaries_total{{outcome="failed",role="{role}",worker="{name}"}}' in metrics
        running.script.hung = set()
        await until(lambda: not unfit(running))
        served = set()
        while name not in served:
            stats = await answer(running)
            served |= {stats.prefill_worker, stats.decode_worker}
        said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
        assert len(said) == 2, "once each way"
        assert "is unfit" in said[0]
        assert "Error" in said[0] or "Exceeded" in said[0], "it says why"
        assert "is fit again" in said[1]
        for worker in running.of(role):
            running.router.migration.drains.begin(worker.worker_id, 60.0)  # no more canaries
        await running.idle(5.0)
        assert sum(seen.cancelled for seen in canaries_at(worker_of(running, name))) >= 2


def worker_of(running, name):
    return next(worker for worker in running.workers if worker.worker_id == name)


async def test_where_nobody_else_is_left_the_unfit_are_taken():
    async with cluster(1, 1, canary=OFTEN) as running:
        running.script.prefill_error = STUCK
        await until(lambda: unfit(running) == {"prefill-0", "decode-0"})
        assert running.router.migration.serving
        running.script.prefill_error = None
        assert (await answer(running)).decode_worker == "decode-0"
        await until(lambda: not unfit(running))


@pytest.mark.long
async def test_clients_numbers_show_nothing_of_canaries():
    own = ("baton_canaries", "baton_event_loop_lag", "baton_worker_", "baton_num_requests_held", "# ")

    def shown(running):
        return [line for line in running.router.metrics.render().splitlines() if not line.startswith(own)]

    async with cluster(2, 2, canary=PATIENT) as running:
        router = running.router
        await answer(running)
        await until(lambda: "baton_num_streams_open 0.0" in router.metrics.render())
        before = shown(running)
        names = {worker.worker_id for worker in running.workers}
        await until(lambda: {name for name, num in counts(running, "answered").items() if num >= 2} == names)
        assert shown(running) == before
        assert len(router.migration.poison_detector) == 0
        status = await status_of(running)
        assert (status.num_requests_finished, status.num_requests_failed) == (1, 0)
        assert [worker.num_streams for worker in status.workers] == [0] * 4
        assert sum(status.local_prefill.num_choices.values()) == 1
        prefill = [seen for worker in running.of("prefill") for seen in canaries_at(worker)]
        assert len(prefill) >= 4
        assert all(len(seen.request.prompt_token_ids) < 16 for seen in prefill), "it names no block"
        assert not any(seen.request.traceparent for seen in prefill)
        assert {(seen.request.tenant, seen.request.sampling.max_tokens) for seen in prefill} == {(TENANT, 2)}


@pytest.mark.long
async def test_workers_with_requests_get_none():
    async with cluster(1, 1, canary=OFTEN) as running:
        running.script.prefill_hangs = True
        asking = asyncio.create_task(answer(running))
        migration = running.router.migration
        await until(lambda: all(migration.in_flight_requests.num_at(one.incarnation) for one in members(running)))
        await until(lambda: migration.in_flight_tracker.canary.under_way is None)
        before = [len(canaries_at(worker)) for worker in running.workers]
        await asyncio.sleep(5 * OFTEN.idle_s)
        assert [len(canaries_at(worker)) for worker in running.workers] == before
        running.script.prefill_hangs = False
        for worker in running.of("prefill"):
            for seen in worker.running():
                seen.hang.set()
        await asking
        await until(lambda: counts(running, "answered").get("decode-0"))


@pytest.mark.parametrize("ends_at_first", [False, True])
async def test_what_workers_do_for_clients_counts(ends_at_first):
    async with cluster(1, 1, canary=CanaryConfig(idle_s=1000.0)) as running:
        canary = running.router.migration.in_flight_tracker.canary
        await until(lambda: canary.num_incarnations == 2)
        before = {incarnation.worker_id: record.came_s for incarnation, record in canary._records.items()}
        running.script.finish_at_first = "stop" if ends_at_first else ""
        await answer(running)
        moved = {
            incarnation.worker_id
            for incarnation, record in canary._records.items()
            if record.came_s > before[incarnation.worker_id]
        }
        assert moved == {"prefill-0"} | (set() if ends_at_first else {"decode-0"})


def members(running):
    return running.router.members.all()


async def test_none_is_sent_unless_asked_for():
    async with cluster(1, 1) as running:
        for _ in range(20):
            await asyncio.sleep(0.01)
            running.router.canaries.tick()
        assert [worker.seen for worker in running.workers] == [[], []]
        assert running.router.metrics.render().count("baton_worker_unfit{") == 2


@pytest.mark.long
async def test_decode_workers_that_do_it_all_are_asked_alone():
    async with cluster(0, 0, local_prefill=AUTO, canary=OFTEN) as running:
        for at in range(2):
            await running.add("decode", f"decode-{at}", can_prefill=True)
        running.script.hung = {"decode-0"}
        await until(lambda: unfit(running) == {"decode-0"} and counts(running, "answered").get("decode-1"))
        assert all(seen.request.prefill_here for worker in running.workers for seen in canaries_at(worker))
        assert (await answer(running)).decode_worker == "decode-1"
        running.script.hung = set()
        await until(lambda: not unfit(running))


@pytest.mark.long
async def test_a_death_under_a_canary_is_no_failure_and_blames_no_request():
    async with cluster(1, 1, canary=PATIENT, alive_s=1.5) as running:
        running.script.hung = {"decode-0"}
        decode = worker_of(running, "decode-0")
        await until(lambda: canaries_at(decode))
        running.silent.add("decode-0")
        running.workers.remove(decode)
        await decode.server.stop(None)
        await until(lambda: counts(running, "lost").get("prefill-0"))
        assert counts(running, "failed") == {}
        assert len(running.router.migration.poison_detector) == 0
        assert unfit(running) == set()
        assert not running.router.migration.in_flight_requests.is_unsettled(decode_incarnation(running))


def decode_incarnation(running):
    return next(member.incarnation for member in members(running) if member.state.role == "decode")


@pytest.mark.long
async def test_one_that_reports_and_takes_no_connection_is_unfit():
    async with cluster(1, 2, canary=OFTEN) as running:
        await worker_of(running, "decode-1").server.stop(None)
        await until(lambda: unfit(running) == {"decode-1"})
        assert (await answer(running)).decode_worker == "decode-0"


@pytest.mark.long
async def test_who_has_too_much_to_do_is_alive():
    async with cluster(1, 1, canary=OFTEN) as running:
        running.script.prefill_error = Overloaded("full")
        await until(lambda: counts(running, "overloaded").get("prefill-0", 0) >= 3)
        assert unfit(running) == set()
        assert counts(running, "failed") == {}


@pytest.mark.long
async def test_pairs_that_refuse_each_other_are_known_before_a_client_comes():
    async with cluster(1, 2, canary=OFTEN) as running:
        running.script.refused_pairs = {("prefill-0", "decode-0"): "another layout"}
        await until(lambda: running.router.refusals.all())
        await until(lambda: counts(running, "answered").get("decode-1", 0) >= 2)
        assert unfit(running) == set()
        assert len(canaries_at(worker_of(running, "decode-0"))) == 1
        status = await status_of(running)
        assert [pair.reason for pair in status.refused_pairs] == ["another layout"]
