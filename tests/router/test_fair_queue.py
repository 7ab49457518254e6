"""Admission under virtual time: overload, deadlines, shares, priorities, KV, refusals."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.errors import Overloaded
from baton.router.admission.admission import HIGH, LOW, NORMAL, Capacity, RequestWork
from baton.router.admission.deficit_round_robin import DeficitRoundRobin, Ticket, band_of
from baton.router.admission.fair_queue import MIN_RETRY_S, FairQueue, QueueLimits
from baton.tests.router.load_simulation import Simulation

SECONDS = 10.0


def work(tenant="t", tokens=100, deadline_s=1e9, priority=NORMAL, positions=None):
    num_positions = tokens if positions is None else positions
    return RequestWork(
        tenant=tenant, num_tokens=tokens, num_positions=num_positions, deadline_s=deadline_s, priority=priority
    )


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [(0, SECONDS), (1, SECONDS), *(pytest.param(at, 60.0, marks=pytest.mark.slow) for at in range(8))],
)
def test_at_three_times_the_capacity_nobody_accepted_is_late_and_hardly_anything_is_lost(seed, seconds):
    simulation = Simulation(seed=seed)
    simulation.arrivals(3.0, seconds, tenants={"a": 1, "b": 1, "c": 1})
    result = simulation.run(seconds)
    assert result.num_late == 0
    goodput = sum(result.tokens_in_time.values()) / seconds / simulation.capacity_tokens_per_s
    assert goodput >= 0.9
    assert result.refused.total() > 0
    assert all(hint_s >= MIN_RETRY_S for hint_s in result.hints_s)


@pytest.mark.fast
def test_at_half_load_nobody_is_refused_or_waits_long():
    simulation = Simulation(seed=5)
    simulation.arrivals(0.5, SECONDS, tenants={"a": 1, "b": 3})
    result = simulation.run(SECONDS)
    assert (result.refused.total(), result.num_late) == (0, 0)
    assert sorted(result.waits_s)[int(0.99 * len(result.waits_s))] < 0.05


def require_fair_shares(result):
    """Max-min fair, within 10 %: who asks least first."""
    left, tenants = sum(result.tokens_in_time.values()), sorted(result.offered, key=result.offered.__getitem__)
    for at, tenant in enumerate(tenants):
        share = min(result.offered[tenant], left / (len(tenants) - at))
        assert result.tokens_in_time[tenant] == pytest.approx(share, rel=0.1), (result.tokens_in_time, result.offered)
        left -= share


@pytest.mark.parametrize("seed", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 5))])
@pytest.mark.parametrize(
    "weights",
    [{"a": 10, "b": 3}, {"a": 20, "b": 4, "c": 4}, {"a": 12, "b": 5, "c": 1}],  # the last c asks for less than a third
)
def test_tenants_have_equal_shares_however_much_they_ask(weights, seed):
    seconds = 2 * SECONDS
    simulation = Simulation(seed=seed)
    simulation.arrivals(3.0, seconds, tenants=weights)
    result = simulation.run(seconds)
    assert result.num_late == 0
    total = sum(result.tokens_in_time.values())
    assert total / seconds / simulation.capacity_tokens_per_s >= 0.9
    require_fair_shares(result)


@pytest.mark.parametrize("seed", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 5))])
@pytest.mark.parametrize(
    ("loads", "deadlines_s"),
    [
        ({"a": 1.5, "b": 1.5}, {"a": 30.0, "b": 5.0}),
        ({"a": 0.75, "b": 0.75}, {"a": 60.0, "b": 6.0}),
        ({"a": 3.0, "b": 0.6}, {"a": 30.0, "b": 5.0}),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 40.0, "b": 10.0, "c": 4.0}),
        ({"a": 2.0, "b": 1.0, "c": 0.2}, {"a": 5.0, "b": 20.0, "c": 5.0}),
    ],
)
def test_tenants_have_equal_shares_however_near_their_deadlines_are(loads, deadlines_s, seed):
    seconds = 120.0
    simulation = Simulation(seed=seed, rate=2000.0)
    for tenant, load in loads.items():
        simulation.arrivals(load, seconds, tenants={tenant: 1}, deadline_s=deadlines_s[tenant])
    result = simulation.run(seconds)
    assert result.num_late == 0
    total = sum(result.tokens_in_time.values())
    assert total / seconds / simulation.capacity_tokens_per_s >= 0.9
    require_fair_shares(result)


@pytest.mark.fast
def test_far_deadlines_take_no_room_from_near_ones():
    queue = FairQueue(QueueLimits(ahead=1, margin_s=0.0))
    queue.set_capacity(Capacity(tokens_per_s=100.0))
    queue.offer(work("a"), 0.0)
    queue.grant(0.0)
    for _ in range(8):
        queue.offer(work("a", deadline_s=30.0), 0.0)
    queue.offer(work("b", deadline_s=6.0), 0.0)
    with pytest.raises(Overloaded) as refused:
        queue.offer(work("b", deadline_s=6.0), 0.0)
    assert refused.value.fields["reason"] == "tenant", "a part of so near a deadline is one request"
    for tenant in "cde":
        queue.offer(work(tenant, deadline_s=6.0), 0.0)
    with pytest.raises(Overloaded) as refused:
        queue.offer(work("f", deadline_s=6.0), 0.0)
    assert refused.value.fields["reason"] == "priority"


@pytest.mark.parametrize("seed", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 5))])
@pytest.mark.parametrize("priority", [NORMAL, HIGH])
@pytest.mark.parametrize("far_s", [7.0, 25.0, 600.0])
def test_one_tenants_far_and_near_deadlines_keep_each_other_out_at_no_load(far_s, priority, seed):
    """b has half of the capacity. Near and far ones of a have a quarter of the other half at least."""
    seconds = 120.0
    simulation = Simulation(seed=seed, rate=2000.0)
    for tenant, load, deadline_s in (("a", 1.5, far_s), ("a", 1.5, 5.0), ("b", 1.5, 12.0)):
        simulation.arrivals(load, seconds, tenants={tenant: 1}, deadline_s=deadline_s, priorities=(priority,))
    result = simulation.run(seconds)
    assert result.num_late == 0
    require_fair_shares(result)
    total = sum(result.tokens_in_time.values())
    assert total / seconds / simulation.capacity_tokens_per_s >= 0.9
    near, far = (result.tokens_in_time_by_deadline[deadline_s] for deadline_s in (5.0, far_s))
    assert min(near, far) >= total / 8


@pytest.mark.fast
@pytest.mark.long
def test_a_tenants_few_near_deadlines_all_find_room():
    seconds = 60.0
    simulation = Simulation(seed=1, rate=2000.0)
    simulation.arrivals(3.0, seconds, tenants={"a": 1}, deadline_s=600.0)
    simulation.arrivals(0.2, seconds, tenants={"a": 1}, deadline_s=5.0)
    offered = sum(work.num_tokens for work, deadline_s in simulation.deadlines_s.items() if deadline_s == 5.0)
    result = simulation.run(seconds)
    assert result.num_late == 0
    assert result.tokens_in_time_by_deadline[5.0] >= 0.95 * offered


@pytest.mark.fast
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.floats(0.1, 2.0),
            st.sampled_from((0.5, 3.0, 30.0, 600.0)),
            st.sampled_from((LOW, NORMAL, HIGH)),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_whatever_deadlines_are_asked_for_nobody_accepted_is_late(streams, seed):
    simulation = Simulation(seed=seed, rate=2000.0)
    for tenant, load, deadline_s, priority in streams:
        stream = {"tenants": {tenant: 1}, "deadline_s": deadline_s, "priorities": (priority,), "tokens": (50, 300)}
        simulation.arrivals(load, 5.0, **stream)
    result = simulation.run(5.0)
    assert result.num_late == 0
    assert not simulation.queue._num_waiting_of


@pytest.mark.fast
def test_a_tenants_far_deadlines_take_no_room_from_its_near_ones():
    queue = FairQueue(QueueLimits(ahead=1, margin_s=0.0))
    queue.set_capacity(Capacity(tokens_per_s=100.0))
    queue.first_token(queue.offer(work(deadline_s=30.0), 0.0))
    far = [queue.offer(work(deadline_s=30.0), 0.0) for _ in range(12)]
    near = queue.offer(work(deadline_s=6.0), 0.0)
    with pytest.raises(Overloaded, match=r"one of 1, and of that .* one of 2") as refused:
        queue.offer(work(deadline_s=6.0), 0.0)
    assert refused.value.fields["reason"] == "tenant"
    granted = []
    for now_s in range(1, 14):
        (ticket,) = queue.grant(now_s)
        granted.append(ticket)
        queue.first_token(ticket)
    assert granted.index(near) <= 4, "near ones do not wait behind far ones"
    assert granted.index(far[1]) <= 4, "nor far ones behind near ones"


@pytest.mark.fast
@pytest.mark.parametrize("hopeless_s", [-1.0, 0.0, 0.001])
def test_a_deadline_that_nothing_could_meet_keeps_no_other_out(hopeless_s):
    """Without keys, all callers are one tenant."""
    queue = FairQueue(QueueLimits(ahead=1, ahead_s=0.0, margin_s=0.0))
    queue.set_capacity(Capacity(tokens_per_s=1000.0))
    queue.offer(work(tokens=10, deadline_s=30.0), 0.0)
    (running,) = queue.grant(0.0)
    with pytest.raises(Overloaded) as refused:
        queue.offer(work(tokens=10, deadline_s=hopeless_s), 0.0)
    assert refused.value.fields["reason"] in ("deadline", "priority")
    for _ in range(8):  # 0.08 s of work, of a part of 0.7 / 2 * (0.25 s - 0.01 s)
        queue.offer(work(tokens=10, deadline_s=0.45), 0.0)
    with pytest.raises(Overloaded) as refused:
        queue.offer(work(tokens=10, deadline_s=0.45), 0.0)
    assert refused.value.fields["reason"] == "tenant"
    queue.leave(running)


@pytest.mark.fast
def test_bands_are_forgotten_with_their_tenants():
    queue = FairQueue(QueueLimits(memory_s=5.0))
    for at in range(20):
        queue.leave(queue.offer(work("a", deadline_s=at + 2.0**at), float(at)))
    assert len(queue._bands["a"]) <= 6, "of the last 5 s"
    queue.offer(work("b"), 100.0)
    assert list(queue._bands) == ["b"]


@pytest.mark.fast
@pytest.mark.long
def test_a_tenant_that_comes_later_has_its_share_soon():
    simulation = Simulation(seed=3)
    simulation.arrivals(3.0, 10.0, tenants={"a": 1})
    late = Simulation(seed=4)
    late.arrivals(3.0, 10.0, tenants={"b": 1})
    for time_s, _, _, (item,) in late.events:
        if time_s >= 5.0:
            simulation.at(time_s, simulation.offer, item)
    result = simulation.run(10.0)
    assert result.num_late == 0
    second_half = simulation.capacity_tokens_per_s * 5.0
    assert result.tokens_in_time["b"] / second_half > 0.35


@pytest.mark.fast
@pytest.mark.long
def test_higher_priorities_find_room_and_nobody_accepted_is_late():
    simulation = Simulation(seed=2)
    simulation.arrivals(3.0, SECONDS, tenants={"a": 1, "b": 1}, priorities=(LOW, NORMAL, HIGH))
    result = simulation.run(SECONDS)
    assert result.num_late == 0
    assert result.num_accepted[HIGH] > result.num_accepted[NORMAL] > result.num_accepted[LOW]


@pytest.mark.fast
@pytest.mark.long
def test_kv_is_never_overdrawn_and_counts_in_predictions():
    simulation = Simulation(seed=1, num_positions=20_000, residence_s=1.0)
    simulation.arrivals(3.0, SECONDS, tenants={"a": 1, "b": 1}, deadline_s=4.0)
    result = simulation.run(SECONDS)
    assert result.most_positions <= 20_000
    accepted = result.num_accepted.total()
    assert result.num_late <= 0.01 * accepted, "KV is a prediction by means; prompts differ"
    assert sum(result.tokens_in_time.values()) / SECONDS >= 0.75 * 20_000 / 1.2, (
        "KV is what limits, not 40 000 tokens/s"
    )


@pytest.mark.fast
def test_rates_that_are_a_little_wrong_make_few_late():
    simulation = Simulation(seed=1, error=0.1, margin_s=0.1)
    simulation.arrivals(3.0, SECONDS, tenants={"a": 1, "b": 1})
    result = simulation.run(SECONDS)
    assert result.num_late <= 0.01 * result.num_accepted.total()


@pytest.mark.fast
def test_what_is_not_known_limits_nothing_but_counts():
    queue = FairQueue(QueueLimits(max_waiting=2, max_running=3, ahead=10))
    tickets = [queue.offer(work(), 0.0)]
    assert queue.grant(0.0) == tickets
    tickets += [queue.offer(work(), 0.0) for _ in range(2)]
    with pytest.raises(Overloaded) as refused:
        queue.offer(work(), 0.0)
    assert refused.value.fields == {"reason": "queue", "retry_after_s": MIN_RETRY_S}
    assert queue.grant(0.0) == tickets[1:]
    waiting = queue.offer(work(), 0.0)
    assert queue.grant(0.0) == [], "three run"
    queue.leave(tickets[0])
    assert queue.grant(0.0) == [waiting]
    for ticket in (*tickets[1:], waiting):
        queue.first_token(ticket)
        queue.first_token(ticket)
        queue.leave(ticket)
    assert (queue.num_running, queue.num_waiting, queue._num_positions) == (0, 0, 0)


@pytest.mark.fast
def test_short_requests_fill_a_step():
    queue = FairQueue(QueueLimits(ahead=1, ahead_s=0.095))
    queue.set_capacity(Capacity(tokens_per_s=1000.0))
    for _ in range(20):
        queue.offer(work(tokens=10), 0.0)
    assert len(queue.grant(0.0)) == 10
    assert queue.grant(0.0) == []
    assert len(queue.grant(2.0)) == 10, "those are stuck by now"


@pytest.mark.fast
def test_a_refusal_says_when_there_may_be_room():
    queue = FairQueue(QueueLimits(ahead=1, margin_s=0.0))
    queue.set_capacity(Capacity(tokens_per_s=100.0))
    first = queue.offer(work(tokens=200), 0.0)
    queue.grant(0.0)
    assert queue.predicted_s(work(tokens=100)) == pytest.approx(3.0)
    with pytest.raises(Overloaded, match="try again in 1 s") as refused:
        queue.offer(work(tokens=100, deadline_s=2.0), 0.0)
    assert refused.value.fields == {"reason": "deadline", "retry_after_s": 1.0}
    assert queue.num_refused == {"deadline": 1}
    queue.first_token(first)
    queue.offer(work(tokens=100, deadline_s=2.0), 0.0)
    with pytest.raises(Overloaded, match="30 s"):
        queue.offer(work("u", tokens=100_000, deadline_s=2.0, priority=HIGH), 0.0)


@pytest.mark.fast
def test_an_early_deadline_may_not_make_others_late():
    queue = FairQueue(QueueLimits(ahead=1, margin_s=0.0))
    queue.set_capacity(Capacity(tokens_per_s=100.0))
    queue.offer(work("a", tokens=100, deadline_s=1.1), 0.0)
    with pytest.raises(Overloaded):
        queue.offer(work("b", tokens=50, deadline_s=0.6, priority=HIGH), 0.0)
    queue.offer(work("b", tokens=50, deadline_s=1.6, priority=HIGH), 0.0)


@pytest.mark.fast
def test_the_order_of_turns_gives_way_to_a_deadline():
    queue = FairQueue(QueueLimits(ahead=1, margin_s=0.0))
    queue.set_capacity(Capacity(tokens_per_s=100.0))
    urgent = queue.offer(work("low", tokens=100, deadline_s=1.5, priority=LOW), 0.0)
    high = queue.offer(work("high", tokens=100, deadline_s=9.0, priority=HIGH), 0.0)
    assert queue.grant(0.0) == [urgent]
    queue.first_token(urgent)
    relaxed = queue.offer(work("low", tokens=100, deadline_s=9.0, priority=LOW), 1.0)
    assert queue.grant(1.0) == [high]
    queue.leave(relaxed)
    assert queue.num_waiting == 0


@pytest.mark.fast
def test_a_request_larger_than_all_kv_still_goes_when_it_is_alone():
    queue = FairQueue(QueueLimits())
    queue.set_capacity(Capacity(num_positions=100))
    big = queue.offer(work(positions=500), 0.0)
    small = queue.offer(work(positions=10), 0.0)
    assert queue.grant(0.0) == [big]
    queue.leave(big)
    assert queue.grant(0.0) == [small]


def ring_of(items, quantum=10):
    ring = DeficitRoundRobin(quantum)
    tickets = [Ticket(work(tenant, tokens, priority=priority), *band) for tenant, tokens, priority, *band in items]
    for ticket in tickets:
        ring.add(ticket)
    return ring, tickets


def taken(ring):
    """Tickets in the order in which they are taken."""
    while (ticket := ring.next()) is not None:
        assert ring.next() is ticket
        ring.take(ticket)
        yield ticket


@pytest.mark.fast
def test_tenants_take_turns_by_tokens_and_priorities_go_first():
    ring, _ = ring_of([("a", 10, NORMAL)] * 8 + [("b", 40, NORMAL)] * 2 + [("c", 1, HIGH)])
    order = [ticket.work.tenant for ticket in taken(ring)]
    assert order[0] == "c"
    assert sorted(order[1:6]) == ["a"] * 4 + ["b"], "as many tokens each"


RING_ITEMS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 5000), st.sampled_from((LOW, NORMAL, HIGH)), st.sampled_from((0, 3, 10))
    ),
    max_size=60,
)


@pytest.mark.fast
@given(RING_ITEMS)
@settings(max_examples=100, deadline=None)
def test_a_ring_gives_everything_out_once_and_each_flow_in_order_of_arrival(items):
    ring, tickets = ring_of(items, quantum=64)
    served = list(taken(ring))
    assert len(served) == len(tickets) == len(set(served))
    assert not ring
    assert [ticket.work.priority for ticket in served] == sorted((item[2] for item in items), reverse=True)

    def flow_of(ticket):
        return ticket.work.priority, ticket.work.tenant, ticket.band

    for flow in {flow_of(ticket) for ticket in tickets}:
        key = [ticket for ticket in served if flow_of(ticket) == flow]
        assert key == [ticket for ticket in tickets if flow_of(ticket) == flow]


def require_equal_turns(served, flow_of, bound):
    """As long as two flows have requests waiting, one is never `bound` tokens ahead of the other."""
    last = {flow_of(ticket): at for at, ticket in enumerate(served)}
    tokens = dict.fromkeys(last, 0)
    for at, ticket in enumerate(served):
        tokens[flow_of(ticket)] += ticket.work.num_tokens
        waiting = [tokens[flow] for flow in tokens if last[flow] > at]
        assert not waiting or max(waiting) - min(waiting) <= bound


@pytest.mark.fast
@given(RING_ITEMS)
@example([("a", 100, NORMAL, 5)] * 6 + [("a", 100, NORMAL, 1)] * 6)
@settings(max_examples=100, deadline=None)
def test_waiting_tenants_and_bands_of_one_tenant_get_as_many_tokens_each(items):
    """So a request without a deadline waits only for its turn, however many near deadlines its tenant has."""
    quantum, most = 64, max((item[1] for item in items), default=0)
    ring, _ = ring_of([(tenant, tokens, NORMAL, band) for tenant, tokens, _, band in items], quantum)
    served = list(taken(ring))
    require_equal_turns(served, lambda ticket: ticket.work.tenant, 2 * (most + quantum))
    for tenant in "abc":
        own = [ticket for ticket in served if ticket.work.tenant == tenant]
        require_equal_turns(own, lambda ticket: ticket.band, 2 * (most + quantum))


@pytest.mark.fast
@given(RING_ITEMS, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_ring_survives_requests_that_come_give_up_and_go_out_of_turn(items, rng):
    ring, waiting = ring_of([], quantum=64)
    for tenant, tokens, priority, band in items:
        ticket = Ticket(work(tenant, tokens, priority=priority), band)
        ring.add(ticket)
        waiting.append(ticket)
        if rng.random() < 0.6:
            ticket = rng.choice([ring.next(), rng.choice(waiting)])
            rng.choice([ring.take, ring.drop])(ticket)
            waiting.remove(ticket)
        assert bool(ring) == bool(waiting)
        assert ring.next() in (waiting or [None])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("room_s", "band"),
    [(-1.0, -1), (0.0, -1), (0.49, -1), (0.5, 0), (1.0, 1), (7.9, 3), (8.0, 4), (600.0, 10), (4e3, 12), (math.inf, 12)],
)
def test_bands_are_powers_of_two_seconds(room_s, band):
    assert band_of(room_s) == band
