"""Turns by what was spent."""

import pytest

from baton.core.start_time_fair_queue import OwnerUsage, StartTimeFairQueue

pytestmark = pytest.mark.fast


def serve(turns, shares, costs, num):
    """So many turns of owners that always have something to do; returns their order."""
    order = []
    for name, share in shares.items():
        turns.add(share, name)
    for _ in range(num):
        name = turns.next()
        order.append(name)
        shares[name].charge(costs[name])
        turns.add(shares[name], name)
    return "".join(order)


def test_who_spends_little_comes_before_who_spends_much():
    shares = {"a": OwnerUsage(), "b": OwnerUsage()}
    assert serve(StartTimeFairQueue(), shares, {"a": 10.0, "b": 1.0}, 22) == 2 * ("a" + 10 * "b")


def test_the_same_cost_is_served_in_turn():
    assert (
        serve(
            StartTimeFairQueue(),
            {"a": OwnerUsage(), "b": OwnerUsage(), "c": OwnerUsage()},
            dict.fromkeys("abc", 1.0),
            9,
        )
        == "abcabcabc"
    )


def test_one_owner_comes_in_order():
    turns, share = StartTimeFairQueue(), OwnerUsage()
    for at in range(3):
        turns.add(share, at)
    assert len(turns) == 3
    assert [turns.next(), turns.next(), turns.next(), turns.next()] == [0, 1, 2, None]
    assert len(turns) == 0


def test_leaving_pays_no_debt():
    turns, heavy, light = StartTimeFairQueue(), OwnerUsage(), OwnerUsage()
    for _ in range(3):  # its queue is empty each time
        turns.add(heavy, "heavy")
        assert turns.next() == "heavy"
        heavy.charge(5.0)
    turns.add(light, "light 1")
    turns.add(heavy, "heavy")
    turns.add(light, "light 2")
    assert [turns.next(), turns.next()] == ["light 1", "light 2"]


def test_waiting_saves_no_turns_up():
    """One that is new, or was away, begins where those are that were served meanwhile."""
    turns, old, new = StartTimeFairQueue(), OwnerUsage(), OwnerUsage()
    for _ in range(100):
        turns.add(old, "old")
        turns.next()
        old.charge(1.0)
    turns.add(old, "old")
    for _ in range(5):
        turns.add(new, "new")
    order = []
    for _ in range(4):
        name = turns.next()
        order.append(name)
        {"old": old, "new": new}[name].charge(1.0)
    assert order == ["new", "old", "new", "new"], "not before all that were asked since"


def test_some_are_passed_over():
    turns, one, two = StartTimeFairQueue(), OwnerUsage(), OwnerUsage()
    turns.add(one, "one")
    turns.add(two, "two")
    assert turns.next(frozenset([one])) == "two"
    assert turns.next(frozenset([one])) is None
    assert turns.next() == "one"
