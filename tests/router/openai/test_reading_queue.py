"""Whose body is read next, under virtual time."""

import asyncio
from collections import Counter

import pytest

from baton.core.clock import VirtualClock
from baton.router.openai.reading_queue import ReadingQueue

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def turns(clock):
    return ReadingQueue(2, clock.now_s)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Sender:
    """A tenant's bodies that wait, and those that are being read, in the order in which they had their turns."""

    def __init__(self, turns, tenant, num):
        self.reading = []
        self.tasks = [asyncio.create_task(self._send(turns, tenant)) for _ in range(num)]

    async def _send(self, turns, tenant):
        self.reading.append(await turns.take(tenant))

    def end_one(self):
        self.reading.pop(0)()


async def test_one_tenant_has_two_places_and_another_needs_not_wait(turns, clock):
    large, small, third = Sender(turns, "large", 5), Sender(turns, "small", 3), Sender(turns, "third", 1)
    await settle()
    assert [len(each.reading) for each in (large, small, third)] == [2, 1, 0]
    clock.advance(1.0)
    small.end_one()
    await settle()
    assert [len(each.reading) for each in (large, small, third)] == [2, 0, 1], "before the small one's second"
    assert turns.num_held == 3


async def test_tenants_have_the_same_time_however_long_their_bodies_take(turns, clock):
    lengths_s, spent_s, running = {"large": 10.0, "small": 1.0}, Counter(), []
    senders = {tenant: Sender(turns, tenant, 2000) for tenant in lengths_s}
    while clock.now_s() < 1000.0:
        await settle()
        for tenant, sender in senders.items():
            for _ in range(len(sender.reading) - sum(each == tenant for _, each in running)):
                running.append((clock.now_s() + lengths_s[tenant], tenant))
        end_s, tenant = min(running)
        running.remove((end_s, tenant))
        clock.advance(end_s - clock.now_s())
        spent_s[tenant] += lengths_s[tenant]
        senders[tenant].end_one()
    for sender in senders.values():
        for task in sender.tasks:
            task.cancel()
    assert spent_s["large"] == pytest.approx(spent_s["small"], abs=30.0)
    assert spent_s.total() == pytest.approx(2 * clock.now_s(), abs=60.0), "two processes, always"


async def test_after_a_large_body_others_come_first(turns, clock):
    first = [await turns.take("large") for _ in range(2)]
    other = await turns.take("other")
    waiting = Sender(turns, "large", 1)
    small = Sender(turns, "small", 2)
    clock.advance(10.0)
    first[0]()
    await settle()
    assert (len(waiting.reading), len(small.reading)) == (0, 1), "though it came later"
    other()
    await settle()
    assert (len(waiting.reading), len(small.reading)) == (0, 1), "the last place is for one that has none"
    small.end_one()
    await settle()
    assert (len(waiting.reading), len(small.reading)) == (0, 1), "it has spent less"
    first[1]()
    await settle()
    assert (len(waiting.reading), len(small.reading)) == (1, 1)


async def test_what_is_given_up_holds_no_place(turns):
    held = [await turns.take("one") for _ in range(2)]
    waiting, in_time, next_one = Sender(turns, "one", 1), Sender(turns, "one", 1), Sender(turns, "one", 1)
    await settle()
    waiting.tasks[0].cancel()
    await settle()
    held.pop()()  # it is the second one's turn, which is given up before it hears of it
    in_time.tasks[0].cancel()
    await settle()
    assert [len(each.reading) for each in (waiting, in_time, next_one)] == [0, 0, 1]
    held.pop()()
    next_one.end_one()
    assert turns.num_held == 0


@pytest.mark.parametrize("num_before", [0, 3])
async def test_one_that_fails_on_its_way_to_a_place_takes_none(turns, monkeypatch, num_before):
    """Before its turn, and when it has come; a place that nobody holds would never be given back."""
    before = Sender(turns, "t", num_before)
    await settle()
    give = turns._give
    monkeypatch.setattr(turns, "_give", lambda: [][0])
    with pytest.raises(IndexError):
        await turns.take("t")
    monkeypatch.setattr(turns, "_give", give)
    for _ in range(num_before):
        await settle()
        before.end_one()
    await settle()
    assert turns.num_held == 0
    monkeypatch.setattr(turns, "_now_s", lambda: [][0])
    with pytest.raises(IndexError):
        await turns.take("t")
    assert turns.num_held == 0
