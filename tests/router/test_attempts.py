"""A failed hand-off is tried again elsewhere, invisibly; two workers that refuse each other are not paired again."""

import asyncio

import pytest

from baton.client import AsyncBatonClient
from baton.core.clock import VirtualClock
from baton.core.errors import (
    NoWorker,
    Overloaded,
    RequestDeadlineExceeded,
    TransferFailed,
    WorkerLost,
    WorkersIncompatible,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import worker_pb2
from baton.router.attempt.continuation import MAX_RETRIES
from baton.router.placement.members import Members
from baton.router.placement.policy import RoundRobin
from baton.router.placement.refusals import Refusals
from baton.tests.router.fakes import OFF, cluster

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
CORRUPT = TransferFailed("corrupt twice")


async def answer(running, sampling=GREEDY, timeout_s=5.0):
    """The text that came, and the stats or the error that ended it."""
    text = ""
    async with AsyncBatonClient(running.address, timeout_s=timeout_s) as client:
        try:
            async for chunk in client.generate("hi", sampling=sampling):
                text += chunk.text
        except (TransferFailed, WorkersIncompatible, Overloaded, WorkerLost, RequestDeadlineExceeded) as error:
            return text, error
    return text, chunk.finish.stats


def pairs_of(prefill):
    return [seen.request.decode.worker_id for seen in prefill]


@pytest.mark.asyncio
@pytest.mark.fast
@pytest.mark.parametrize("after_first", [False, True])
@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.long
async def test_a_failed_hand_off_is_tried_again_and_the_client_sees_nothing_of_it(after_first, num_failures):
    async with cluster(2, 2) as running:
        running.script.attempt_errors = dict.fromkeys(range(1, num_failures + 1), CORRUPT)
        running.script.errors_after_first = after_first
        text, stats = await answer(running)
        assert text == running.script.answer
        assert (stats.num_handoff_retries, stats.output_len) == (num_failures, len(text))
        seen = [seen for worker in running.workers for seen in worker.seen]
        assert sorted({s.request.attempt.attempt for s in seen}) == list(range(1, num_failures + 2))
        assert len({s.request.attempt.request_id for s in seen}) == 1
        async with AsyncBatonClient(running.address) as client:
            status = await client.status()
        assert (status.num_handoff_retries, status.num_requests_failed) == (num_failures, 0)
        assert f"baton_handoff_retries_total {num_failures}.0" in running.router.metrics.render()
        await running.idle(3.0)


@pytest.mark.asyncio
@pytest.mark.fast
async def test_the_retry_goes_to_another_pair_and_to_the_same_if_there_is_no_other():
    async with cluster(1, 2) as running:
        running.script.attempt_errors = {1: CORRUPT, 2: CORRUPT}
        assert (await answer(running))[0] == "hello world"
        prefill, _ = await running.idle(3.0)
        names = pairs_of(prefill)
        assert names[0] != names[1]
        assert len(names) == 3


@pytest.mark.asyncio
@pytest.mark.fast
async def test_retries_end():
    async with cluster() as running:
        running.script.attempt_errors = dict.fromkeys(range(1, 9), CORRUPT)
        running.script.errors_after_first = True
        text, error = await answer(running)
        assert (text, type(error)) == ("hel", TransferFailed), "each attempt made one token more"
        assert error.message.startswith("corrupt twice; tried prefill-0 and decode-0: TransferFailed; ")
        assert len(error.fields["tried"]) == 1 + MAX_RETRIES
        prefill, _ = await running.idle(3.0)
        assert len(prefill) == 1 + MAX_RETRIES


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [Overloaded("full"), WorkerLost("gone")])
async def test_without_migration_only_failed_hand_offs_are_tried_again(error):
    async with cluster(2, 2, migration=OFF) as running:
        running.script.attempt_errors = {1: error}
        assert type((await answer(running))[1]) is type(error)
        prefill, _ = await running.idle(3.0)
        assert len(prefill) == 1


@pytest.mark.asyncio
async def test_the_deadline_holds_over_all_attempts():
    async with cluster(request_timeout_s=1.0) as running:
        running.script.attempt_errors = {1: CORRUPT}
        running.script.first_delay_s = 0.6
        assert type((await answer(running))[1]) is RequestDeadlineExceeded
        await running.idle(3.0)


@pytest.mark.asyncio
@pytest.mark.fast
async def test_an_unseeded_request_has_one_seed_in_all_attempts():
    async with cluster() as running:
        running.script.attempt_errors = {1: CORRUPT}
        _, stats = await answer(running, sampling=None)
        prefill, decode = await running.idle(3.0)
        assert {seen.request.sampling.seed for seen in (*prefill, *decode)} == {stats.seed}


@pytest.mark.asyncio
@pytest.mark.fast
async def test_a_recompute_that_differs_is_an_error_not_another_answer():
    async with cluster(migration=OFF) as running:
        running.script.attempt_errors = {1: CORRUPT}
        running.script.errors_after_first = True
        running.script.attempt_answers = {2: "jello world"}
        text, error = await answer(running)
        assert (text, type(error)) == ("h", TransferFailed)
        assert error.fields["diverged"]
        await running.idle(3.0)


@pytest.mark.asyncio
@pytest.mark.fast
async def test_workers_that_refuse_each_other_are_not_paired_again():
    async with cluster(1, 2) as running:
        running.script.refused_pairs = {("prefill-0", "decode-0"): "dtype: float32 here, float16 there"}
        outcomes = [await answer(running) for _ in range(6)]
        assert [text for text, _ in outcomes] == ["hello world"] * 6
        assert sum(stats.num_handoff_retries for _, stats in outcomes) == 1
        prefill, _ = await running.idle(3.0)
        assert pairs_of(prefill).count("decode-0") == 1
        async with AsyncBatonClient(running.address) as client:
            (pair,) = (await client.status()).refused_pairs
        assert (pair.prefill_worker, pair.decode_worker) == ("prefill-0", "decode-0")
        assert "float16" in pair.reason


@pytest.mark.asyncio
@pytest.mark.fast
async def test_when_no_pair_is_left_the_error_says_why_until_one_has_another_life():
    async with cluster() as running:
        running.script.refused_pairs = {("prefill-0", "decode-0"): "model: other weights"}
        for _ in range(2):
            text, error = await answer(running)
            assert (text, type(error)) == ("", WorkersIncompatible)
            assert "prefill-0 and decode-0: model: other weights" in error.message
        prefill, _ = await running.idle(3.0)
        assert len(prefill) == 1, "asked once"
        worker = running.of("decode")[0]
        worker.epoch += 1000
        running.router.members.heartbeat(worker.state())
        running.script.refused_pairs = {}
        assert (await answer(running))[0] == "hello world"
        assert running.router.refusals.all() == []


@pytest.mark.asyncio
async def test_a_client_that_leaves_between_attempts_leaves_nothing():
    async with cluster() as running:
        running.script.attempt_errors = dict.fromkeys(range(1, 9), CORRUPT)
        running.script.first_delay_s = 0.02
        for delay_s in (0.01, 0.03, 0.05):
            task = asyncio.create_task(answer(running))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await running.idle(3.0)
        async with AsyncBatonClient(running.address) as client:
            assert (await client.status()).num_requests_running == 0


def member_state(name, role, epoch=1):
    return worker_pb2.WorkerState(
        worker_id=name,
        role=role,
        epoch=epoch,
        address="a",
        kv_address="k",
        max_model_len=9,
        block_size=16,
        inventory=worker_pb2.Inventory(num_blocks=1),
    )


@pytest.mark.fast
def test_an_excluded_pair_is_never_chosen_and_takes_no_turn():
    clock = VirtualClock()
    members = Members(clock)
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        members.heartbeat(member_state(name, role))
    prefill, decode = members.live("prefill"), members.live("decode")
    incarnations = {member.state.worker_id: member.incarnation for member in (*prefill, *decode)}
    excluded = {
        (incarnations["p0"], incarnations["d0"]),
        (incarnations["p0"], incarnations["d1"]),
        (incarnations["p1"], incarnations["d0"]),
    }
    policy = RoundRobin()
    for _ in range(4):
        assert policy.pick(prefill, decode, excluded).incarnations == (incarnations["p1"], incarnations["d1"])
    with pytest.raises(WorkersIncompatible):
        policy.pick(prefill, decode, excluded | {(incarnations["p1"], incarnations["d1"])})
    with pytest.raises(NoWorker):
        policy.pick([], decode, excluded)


@pytest.mark.fast
def test_a_refusal_is_forgotten_with_either_life_but_not_with_a_short_silence():
    clock = VirtualClock()
    members = Members(clock)
    refusals = Refusals(members)
    members.heartbeat(member_state("p", "prefill"))
    members.heartbeat(member_state("d", "decode"))
    pair = RoundRobin().pick(members.live("prefill"), members.live("decode"))
    refusals.add(pair, "layouts differ")
    for _ in range(40):
        clock.advance(0.2)
        members.expire()
    assert not members.live("decode")
    assert [refusal.reason for refusal in refusals.all()] == ["layouts differ"]
    members.heartbeat(member_state("d", "decode", epoch=2))
    assert refusals.all() == []
    assert refusals.incarnations() == set()
