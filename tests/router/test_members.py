"""The table of workers, the policy, admission and token order: pure, under virtual time."""

import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import InvalidRequest, NoWorker, Overloaded, ProtocolError
from baton.proto import worker_pb2
from baton.router.admission.admission import Admission
from baton.router.attempt.continuation import TokenOrder
from baton.router.placement import members as members_module
from baton.router.placement.members import ALIVE_S, FORGET_S, GONE_S, MAX_GAP_S, MAX_WORKERS, Incarnation, Members
from baton.router.placement.policy import RoundRobin
from baton.router.placement.refusals import Outcasts

pytestmark = pytest.mark.fast


def state(worker_id, epoch=1, role="prefill"):
    return worker_pb2.WorkerState(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        address="h:1",
        kv_address="tcp://h:2" if role == "decode" else "",
        max_model_len=100,
        block_size=16,
        inventory=worker_pb2.Inventory(num_blocks=10),
    )


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def members(clock):
    return Members(clock)


def wait(members, clock, seconds, ended=frozenset()):
    """Time passes while the table is looked at as often as it asks to be; returns the lives lost."""
    lost = []
    while seconds > 0:
        step_s = min(seconds, MAX_GAP_S)
        clock.advance(step_s)
        lost += members.expire(ended)
        seconds -= step_s
    return lost


def test_alive_until_silent_for_too_long(members, clock):
    assert not members.heartbeat(state("p"))
    assert members.heartbeat(state("p"))
    assert wait(members, clock, ALIVE_S - 0.01) == []
    assert [member.state.worker_id for member in members.live("prefill")] == ["p"]
    assert wait(members, clock, 0.02) == [Incarnation("p", 1)]
    assert members.expire() == [], "lost once"
    assert members.live("prefill") == []
    assert members.heartbeat_age_s(members.all()[0]) == pytest.approx(ALIVE_S + 0.01)
    assert not members.heartbeat(state("p")), "it is told that it had been given up"
    assert members.live("prefill")
    assert members.all()[0].num_epochs == 1


def test_the_routers_own_stall_is_no_silence_of_workers(members, clock):
    members.heartbeat(state("p"))
    members.heartbeat(state("d", role="decode"))
    assert wait(members, clock, 1.0) == []
    clock.advance(100.0)
    members.heartbeat(state("d", role="decode"))  # it waited to be read
    assert members.expire() == []
    assert members.heartbeat_age_s(members.live("prefill")[0]) == pytest.approx(1.0 + MAX_GAP_S)
    assert members.heartbeat_age_s(members.live("decode")[0]) == 0.0, "a lease never begins later than now"
    assert wait(members, clock, ALIVE_S - 1.0 - MAX_GAP_S + 0.01) == [Incarnation("p", 1)]
    assert wait(members, clock, MAX_GAP_S) == []
    assert wait(members, clock, ALIVE_S) == [Incarnation("d", 1)]


def test_what_a_stall_forgives_was_not_heard(members, clock):
    members.heartbeat(state("p"))
    members.heartbeat(state("d", role="decode"))
    incarnation, broke_s = Incarnation("p", 1), clock.now_s()
    clock.advance(2.0)
    members.heartbeat(state("d", role="decode"))
    members.expire()
    assert members.live("prefill"), "nothing could be heard"
    assert not members.heard_since(incarnation, broke_s)
    assert members.heard_since(Incarnation("d", 1), broke_s)
    outcasts = Outcasts()
    outcasts.lost[incarnation] = broke_s
    assert outcasts.heard(members.all()) == members.live("decode")
    members.heartbeat(state("p"))
    assert members.heard_since(incarnation, broke_s)
    assert outcasts.heard(members.all()) == members.all()


def test_a_router_that_is_always_late_still_notices(members, clock):
    members.heartbeat(state("p"))
    num_looks = 0
    while members.live("prefill"):
        clock.advance(4 * MAX_GAP_S)
        members.expire()
        num_looks += 1
    assert num_looks == ALIVE_S / MAX_GAP_S


def test_a_new_epoch_replaces_the_old_and_the_old_never_returns(members):
    lost = []
    members.heartbeat(state("d", 7, "decode"))
    members.watch(Incarnation("d", 7), lambda: lost.append(7))
    assert not members.heartbeat(state("d", 3, "decode")), "epochs are names, not numbers"
    assert lost == [7]
    assert not members.heartbeat(state("d", 7, "decode"))
    assert members.all()[0].incarnation == Incarnation("d", 3)
    assert members.all()[0].num_epochs == 2
    assert members.heartbeat(state("d", 3, "decode"))


def test_watches_are_called_once_and_can_be_ended(members, clock):
    members.heartbeat(state("p"))
    told = []
    members.watch(Incarnation("p", 1), lambda: told.append("a"))
    end = members.watch(Incarnation("p", 1), lambda: told.append("b"))
    end()
    end()
    members.watch(Incarnation("p", 9), lambda: told.append("unknown life"))
    assert told == ["unknown life"]
    wait(members, clock, ALIVE_S)
    assert told == ["unknown life", "a"]
    members.watch(Incarnation("p", 1), lambda: told.append("dead"))
    assert told[-1] == "dead"
    assert members._watches == {}


def test_dead_workers_are_forgotten_in_time(members, clock):
    members.heartbeat(state("p"))
    wait(members, clock, ALIVE_S)
    wait(members, clock, FORGET_S)
    assert members.all() == []


def test_who_did_not_come_back_is_shown_for_a_day(members, clock):
    """Otherwise an alert on it would end by itself, with the worker still missing."""
    members.heartbeat(state("p"))
    wait(members, clock, ALIVE_S)
    assert members.gone() == []
    wait(members, clock, FORGET_S)
    assert [(one.state.worker_id, one.alive) for one in members.gone()] == [("p", False)]
    clock.advance(GONE_S - FORGET_S - ALIVE_S - 1.0)
    members.expire()
    assert members.gone()
    clock.advance(1.0)
    members.expire()
    assert members.gone() == []


def test_who_comes_back_or_is_no_longer_wanted_is_not_gone(members, clock):
    for name in "abc":
        members.heartbeat(state(name))
    wait(members, clock, ALIVE_S)
    wait(members, clock, FORGET_S, ended={Incarnation("c", 1)})
    assert [one.state.worker_id for one in members.gone()] == ["a", "b"]
    members.heartbeat(state("a"))
    assert [one.state.worker_id for one in members.gone()] == ["b"]
    members.dismiss_gone()
    assert members.gone() == []


def test_the_gone_are_bounded(members, clock, monkeypatch):
    monkeypatch.setattr(members_module, "MAX_WORKERS", 2)
    for name in ("a", "b", "c"):
        members.heartbeat(state(name))
        wait(members, clock, FORGET_S + ALIVE_S)
    assert [one.state.worker_id for one in members.gone()] == ["b", "c"]


def test_reports_that_lack_something_are_refused(members):
    for name in ("worker_id", "role", "epoch", "address", "kv_address", "max_model_len", "block_size"):
        bad = state("d", role="decode")
        bad.ClearField(name)
        with pytest.raises(InvalidRequest) as caught:
            members.heartbeat(bad)
        assert caught.value.fields["field"] == name
    assert members.all() == []


def test_the_table_is_bounded(members):
    for index in range(MAX_WORKERS):
        members.heartbeat(state(f"p{index}"))
    with pytest.raises(Overloaded):
        members.heartbeat(state("one more"))
    assert members.heartbeat(state("p0"))


def test_round_robin_goes_on_while_workers_come_and_go(members, clock):
    policy = RoundRobin()
    for name in "ac":
        members.heartbeat(state(name))
    with pytest.raises(NoWorker) as caught:
        policy.pick(members.live("prefill"), members.live("decode"))
    assert caught.value.fields == {"role": "decode"}
    members.heartbeat(state("d", role="decode"))

    def pick():
        pair = policy.pick(members.live("prefill"), members.live("decode"))
        assert pair.decode.state.worker_id == "d"
        return pair.prefill.state.worker_id

    assert [pick() for _ in range(3)] == ["a", "c", "a"]
    members.heartbeat(state("b"))
    assert [pick() for _ in range(3)] == ["b", "c", "a"]
    wait(members, clock, ALIVE_S)
    for name in ("a", "c"):
        members.heartbeat(state(name))
    members.heartbeat(state("d", role="decode"))
    assert [pick() for _ in range(2)] == ["c", "a"]


def test_admission_counts_and_gives_back():
    admission = Admission(2)
    with admission.slot(), admission.slot():
        with pytest.raises(Overloaded), admission.slot():
            pass
        assert admission.num_in_flight == 2
    with pytest.raises(KeyError), admission.slot():
        raise KeyError
    assert admission.num_in_flight == 0


def test_each_token_once_and_in_order():
    order = TokenOrder(5)
    assert order.take(0, [1]) == [1]
    assert order.take(0, [1, 2]) == [2]
    assert order.take(0, [1, 2]) == []
    assert order.take(2, []) == []
    for index, token_ids in [(3, [9]), (1, [9]), (2, [1, 2, 3, 4])]:
        with pytest.raises(ProtocolError):
            order.take(index, token_ids)
    assert order.take(1, [2, 3, 4, 5]) == [3, 4, 5]
    assert order.token_ids == [1, 2, 3, 4, 5]
