"""Faults 1 to 6, 21, 28 and 30: processes that die, stand still, or are told to end."""

import asyncio
import os
import signal

from baton.core.errors import RequestQuarantined, WorkerLost
from baton.proto import admin_pb2
from baton.tests.e2e.checker import Ask
from baton.tests.e2e.fault_run import errors_of, lost
from baton.tests.e2e.fleet import CLOSE_S, wait_until


async def decode_killed(run):
    run.stream()
    await run.strike("decode-0", "decoding")
    await run.relaunch("decode-0")
    run.stream(4)
    await run.over()
    run.fleet.workers["decode-0"].order("pace", s=0.05)
    run.stream()
    await run.strike("decode-0", "finishing")
    await run.relaunch("decode-0")


async def prefill_killed_before_push(run):
    run.stream()
    await run.strike("prefill-0", "reserving")
    await run.relaunch("prefill-0")


async def prefill_killed_in_push(run):
    run.stream()
    await run.strike("prefill-0", "pushing")
    await run.relaunch("prefill-0")
    run.stream()
    await run.strike("prefill-1", "committing")
    await run.relaunch("prefill-1")


async def stopped(run):
    """The whole process group: a decode worker's incoming transfer stands still with it."""
    for name, state in (("decode-1", "decoding"), ("prefill-1", "pushing")):
        run.stream()
        await run.strike(name, state, signal.SIGSTOP, group=True)
        await lost(run.fleet, name)
        await run.over()  # nobody waits for it to come back
        run.fleet.workers[name].signal(signal.SIGCONT, group=True)
        await run.fleet.ready()


async def _tp_group_rank(run, number):
    """A TP group of two ranks serves alone, until one of them is hit; then the others take over."""
    await run.fleet.add("decode-2", tp_size=2)
    tp_group = run.fleet.workers["decode-2"]
    async with run.admin() as client:
        for name in ("decode-0", "decode-1"):
            await _drain(client, name)
        run.stream()
        await run.hit("decoding")
        for name in ("decode-0", "decode-1"):
            await _drain(client, name, undo=True)
    os.kill(tp_group.rank_pids[0], number)
    assert await tp_group.ended() != 0, "rank 0 outlives its TP group"
    await lost(run.fleet, "decode-2")
    if number == signal.SIGSTOP:
        await wait_until(lambda: not _runs(tp_group.rank_pids[0]), CLOSE_S, "the rank that stood still is killed")
    await run.over()
    assert sum(one.stats.num_migrations for one in run.deliveries if one.stats) > 0
    await run.fleet.remove("decode-2")


async def rank_killed(run):
    await _tp_group_rank(run, signal.SIGKILL)


async def rank_stopped(run):
    await _tp_group_rank(run, signal.SIGSTOP)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def _drain(client, name, *, undo=False):
    return await client._admin.Drain(admin_pb2.DrainRequest(worker_id=name, grace_ms=0, undo=undo), timeout=10.0)


async def poison(run):
    """A request that kills whoever decodes it. Others come and go meanwhile, so that it is told from them.

    Who happens to be with it at every death, as there is nowhere else to go, uses up its migrations with it: a typed
    error is right for those, and whoever comes later must not notice.
    """
    first, *_ = run.campaign.asks(1, seed=21)
    bad = Ask((7, 7, 7, 7, *first.prompt_token_ids), first.sampling)
    names = ("decode-0", "decode-1")
    for name in names:
        run.fleet.workers[name].order("poison", token_ids=[7, 7, 7, 7])
    incarnations = sum(run.fleet.workers[name].num_incarnations for name in names)
    (poisoned,) = run.stream(1, [bad], allowed=(WorkerLost, RequestQuarantined), must_fail=True)
    while not poisoned.is_over:
        if len(run.open_ids) < 4:
            run.stream(3, allowed=(WorkerLost,))
        for name in names:
            worker = run.fleet.workers[name]
            if not worker.is_running:
                while not worker.struck.empty():
                    run.note(worker.struck.get_nowait())
                await run.relaunch(name, poison=[7, 7, 7, 7])
        await asyncio.sleep(0.05)
    num_deaths = 0
    for name in names:
        worker = run.fleet.workers[name]
        if not worker.is_running:
            while not worker.struck.empty():
                run.note(worker.struck.get_nowait())
            await run.relaunch(name)
    num_deaths = sum(run.fleet.workers[name].num_incarnations for name in names) - incarnations
    assert num_deaths <= 3, f"{num_deaths} workers died of one request"
    await run.fleet.ready()
    for name in names:
        run.fleet.workers[name].order("poison", token_ids=[])
    if isinstance(poisoned.error, RequestQuarantined):
        run.stream(1, [bad], allowed=(RequestQuarantined,), must_fail=True)
        await run.over()
        assert sum(run.fleet.workers[name].num_incarnations for name in names) == incarnations + num_deaths
    async with run.admin() as client:
        await client._admin.ClearQuarantine(admin_pb2.ClearQuarantineRequest(), timeout=10.0)
    assert len(errors_of([poisoned])) == 1


async def restarted_at_its_address(run):
    worker = run.fleet.workers["decode-1"]
    before = worker.epoch
    run.stream()
    await run.strike("decode-1", "pushing")
    await run.relaunch("decode-1")
    run.stream()
    await run.fleet.ready()
    assert worker.epoch != before
    (member,) = (m for m in run.fleet.router.members.all() if m.state.worker_id == "decode-1")
    assert (member.state.address, member.state.kv_address) == (worker.calls.address, worker.kv_address)
    assert before in member.retired_epochs
    await wait_until(lambda: _renew(run, "decode-1"), 60.0, "the next incarnation is used")


def _renew(run, name):
    if any(name in one.workers and one.started_s > 0 for one in run.deliveries[-20:] if one.reason):
        return True
    if len(run.open_ids) < 3:
        run.stream(4)
    return False


async def told_to_end(run):
    """A drained worker, and one that is not: both end in time, with pushes under way."""
    async with run.admin() as client:
        run.stream()
        await run.hit("pushing")
        await _drain(client, "prefill-1")
        run.fleet.workers["prefill-1"].signal(signal.SIGTERM)
        assert await run.fleet.workers["prefill-1"].ended() == 0
        await lost(run.fleet, "prefill-1")
        run.fleet.launch("prefill-1")
        await run.over()
        await run.fleet.ready()
        await _drain(client, "prefill-1", undo=True)
    run.stream()
    await run.strike("decode-1", "pushing", signal.SIGTERM)
    assert await run.fleet.workers["decode-1"].ended() == 0
    run.fleet.launch("decode-1")
