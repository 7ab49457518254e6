"""Faults 7 to 13: the network between workers, and what it does to frames."""

import asyncio

from baton.tests.e2e.fleet import wait_until


def _ways_of(run, prefill=None):
    return [way for (name, _), way in run.fleet.ways.items() if prefill in (None, name)]


async def slow_network(run):
    """Every way takes 50 ms in each direction, and one chunk in a hundred is sent twice."""
    lost = []
    members = run.fleet.router.members
    for member in members.all():
        if member.alive:
            members.watch(member.incarnation, lambda name=member.state.worker_id: lost.append(name))
    proxies = [*run.fleet.ways.values(), *(worker.calls for worker in run.fleet.workers.values())]
    proxies += [worker.beats for worker in run.fleet.workers.values()]
    run.stream()
    await run.hit("pushing")
    for proxy in proxies:
        proxy.slow(0.05, 0.01)
    run.stream(6)
    await run.over()
    for proxy in proxies:
        proxy.heal()
    assert not lost, f"taken for dead: {lost}"


async def partition(run):
    """Nothing passes between two workers; everything else does."""
    way = run.fleet.ways["prefill-0", "decode-0"]
    run.stream()
    await run.hit("pushing")
    way.swallow()
    run.stream()
    await run.over()
    assert await run.fleet.is_healthy(), "I5 of a partition between two of them, no worker is ill"
    await _until_swallowed(run, way.there)
    way.heal()


async def _until_swallowed(run, direction):
    """Until something was really lost there."""

    def is_so():
        if len(run.open_ids) < 3:
            run.stream(4)
        return direction.num_swallowed > 0

    await wait_until(is_so, 60.0, "nothing took the way that is cut")
    await run.over()


async def one_way(run):
    """Acknowledgements, credits and grants are lost; what is pushed arrives. Then what was lost is asked for again."""
    for state in ("committing", "reserving"):
        ways = _ways_of(run, "prefill-0")
        before = sum(way.back.num_swallowed for way in ways)
        run.stream()
        await run.hit(state)
        for way in ways:
            way.swallow(there=False)

        def is_lost(ways=ways, before=before):
            if len(run.open_ids) < 3:
                run.stream(4)
            return sum(way.back.num_swallowed for way in ways) > before

        await wait_until(is_lost, 60.0, "no answer was lost")
        await asyncio.sleep(0.7)  # shorter than a lease: the same hand-offs go on
        for way in ways:
            way.heal()
        await run.over()


async def _frames(run, state="pushing", **faults):
    """At both prefill workers, until it has hit; returns how often it did."""
    prefill = run.fleet.of("prefill")
    before = [(await worker.report())["frame_hits"] for worker in prefill]
    for worker in prefill:
        worker.order("frames", faults=faults)
    run.stream()
    await run.hit(state)

    async def has_hit():
        if len(run.open_ids) < 3:
            run.stream(4)
        found = [(await worker.report())["frame_hits"] for worker in prefill]
        return sum(found) - sum(before)

    num_hits = await wait_until(has_hit, 60.0, f"no frame was hit by {faults}")
    await run.over()
    for worker in prefill:
        worker.order("frames", faults={})
    return num_hits


async def _sum(run, role, name):
    found = 0
    for worker in run.fleet.of(role):
        report = await worker.report()
        found += report[name] if name in report else report["inventory"][name]
    return found


async def partial_push(run):
    """Every third frame is lost: nothing is decoded before each was sent again."""
    before = await _sum(run, "prefill", "resent")
    await _frames(run, kind="drop", every=3, most=20)
    assert await _sum(run, "prefill", "resent") > before, "nobody sent again what was lost"


async def duplicate_push(run):
    """Frames come twice, and then twice with other content the second time."""
    await _frames(run, kind="repeat", every=2, most=40)
    await _frames(run, kind="contradict", every=4, most=20)


async def late_push(run):
    """Frames change places; and copies of frames come when their incoming transfer is over."""
    await _frames(run, kind="swap", every=2, most=40)
    before = await _sum(run, "decode", "frames_late_dropped")
    await _frames(run, kind="late", every=4, most=20, late_s=6.0)

    async def are_dropped():
        return await _sum(run, "decode", "frames_late_dropped") > before

    await wait_until(are_dropped, 60.0, "nobody counts frames that come after their incoming transfer's end")


async def flipped(run):
    """A bit of some payloads; and a byte on the wire, which takes framing with it."""
    before = await _sum(run, "decode", "frames_corrupt")
    await _frames(run, kind="flip", every=6, most=8)
    assert await _sum(run, "decode", "frames_corrupt") > before, "nobody has seen it"
    run.stream()
    await run.hit("pushing")
    for way in _ways_of(run, "prefill-1"):
        way.there.flips = 1
    run.stream()
    await run.over()
    for way in _ways_of(run):
        way.there.flips = 0
        way.cut()  # what framing was damaged is not to trouble the next row
