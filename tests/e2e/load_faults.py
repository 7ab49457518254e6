"""Faults 14 to 16, 20, 23, 24 and 29: clients that want too much, go away, do not read, or come back too soon."""

import asyncio

from baton.core.errors import (
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestDeadlineExceeded,
    TransferFailed,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import admin_pb2
from baton.router.attempt.continuation import MAX_RETRIES
from baton.tests.e2e.checker import Ask
from baton.tests.e2e.fault_run import errors_of
from baton.tests.e2e.fleet import PACE_S


async def decode_pool_full(run):
    """More KV than both decode workers have: who finds no blocks waits, and nobody's are taken unseen.

    And then more sequences than they have slots for.
    """
    run.stream(30, run.campaign.asks(20, seed=14, max_len=400, max_tokens=60))
    await run.hit("reserving")
    await run.over()
    _set_pace(run, 0.06)
    run.stream(24)
    await run.hit("complete")
    _set_pace(run, PACE_S)
    await run.over()


async def prefill_pool_full(run):
    """Decode workers are slow to take what is pushed: prefill workers stop beginning, and lose nothing."""
    _set_pace(run, 0.4)
    run.stream(24, run.campaign.asks(12, seed=15, max_len=600, max_tokens=6))
    await run.hit("reserving")
    _set_pace(run, PACE_S)
    await run.over()


def _set_pace(run, pace_s):
    for worker in run.fleet.of("decode"):
        worker.order("pace", s=pace_s)


async def disconnects(run):
    """A client goes away in each phase; nobody else notices."""
    gone = (asyncio.CancelledError,)
    for state in ("queued", "admitted", "reserving", "pushing", "committing", "decoding", "finishing"):
        run.stream(16 if state == "queued" else 8)
        states = await run.aim(state)
        leaving = [one for one in run.deliveries if states.get(one.name) == state]
        run.note({one.name: state for one in leaving})
        for one in leaving:
            one.allowed = gone
            run.disconnect(one)
        await run.over()


async def queue_full(run):
    """The router's places are taken: refused at once, with the time after which to come again."""
    async with run.admin() as client:
        limit = await client._admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=6), timeout=10.0)
        run.stream(6)
        await run.hit("decoding", renew=False)
        refused = run.stream(12, allowed=(Overloaded,))
        await run.over()
        await client._admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=limit.previous), timeout=10.0)
    errors = errors_of(refused, Overloaded)
    assert errors, "nobody was refused"
    assert all(error.fields["retry_after_s"] > 0 for error in errors)


async def oversized(run):
    """Prompts and answers longer than anybody can hold, and numbers that are none: refused before anything is held."""
    run.stream()
    states = await run.aim("decoding")
    run.note(states)
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    too_long = Ask(tuple(300 + at % 600 for at in range(5000)), greedy)
    ones = run.stream(2, [too_long], allowed=(PromptTooLong,), must_fail=True)
    for max_tokens in (2**31 - 1, 100_000, -1):
        ask = Ask((5, 6, 7), SamplingParams(max_tokens=max_tokens, temperature=0.0))
        ones += run.stream(1, [ask], allowed=(InvalidRequest,), must_fail=True)
    ones += run.stream(1, [Ask((), greedy)], allowed=(InvalidRequest,), must_fail=True)
    ones += run.stream(1, [Ask(((1 << 32) - 1,), greedy)], allowed=(InvalidRequest,), must_fail=True)
    await run.over(ones)
    assert not any(one.events for one in ones)


async def slow_reader(run):
    """One client stops reading what is more than its connection holds, one reads slowly; the others do not notice."""
    prompt, *_ = (ask.prompt_token_ids for ask in run.campaign.asks(1, seed=24))
    heavy = Ask(prompt, SamplingParams(max_tokens=300, temperature=0.0, logprobs=20, ignore_eos=True))
    may_go_on = asyncio.Event()

    async def wait():
        await may_go_on.wait()

    async def sleep():
        await asyncio.sleep(0.02)

    (stuck,) = run.stream(1, [heavy], pause=wait)
    run.stream(2, pause=sleep)
    await run.hit("decoding")
    others = run.stream()
    await run.over(others)
    assert all(one.reason for one in others)
    assert not stuck.is_over
    may_go_on.set()
    await run.over()
    assert stuck.reason
    late = Ask(prompt, SamplingParams(max_tokens=600, temperature=0.0, logprobs=20, ignore_eos=True))
    never = asyncio.Event()
    (lost,) = run.stream(1, [late], pause=never.wait, deadline_s=4.0, allowed=(RequestDeadlineExceeded,))
    await asyncio.sleep(6.0)
    never.set()
    await run.over([lost])


async def retry_storm(run):
    """All hand-offs fail for a while, and clients come back at once, in numbers: tries stay bounded."""
    async with run.admin() as client:
        before = (await client.status()).num_handoff_retries
        limit = await client._admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=8), timeout=10.0)
        for worker in run.fleet.of("prefill"):
            worker.order("frames", faults={"kind": "drop", "every": 1, "most": 1 << 30})
        run.stream(8, allowed=(TransferFailed, Overloaded))
        await run.hit("pushing", renew=False)
        num_asked = 8
        while any(not one.is_over for one in run.deliveries[:8]):
            run.stream(4, allowed=(TransferFailed, Overloaded))
            num_asked += 4
            await asyncio.sleep(0.5)
        for worker in run.fleet.of("prefill"):
            worker.order("frames", faults={})
        await run.over()
        num_retries = (await client.status()).num_handoff_retries - before
        await client._admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=limit.previous), timeout=10.0)
    num_let_in = num_asked - len(errors_of(run.deliveries, Overloaded))
    assert num_retries <= MAX_RETRIES * num_let_in, (num_retries, num_let_in)
    assert errors_of(run.deliveries, Overloaded), "a storm, and nobody was refused"
