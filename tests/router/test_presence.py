"""Who is where, who died and who was there; workers that are emptied; workers that failed one request."""

import dataclasses
import gc
import weakref

import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import InvalidRequest
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.proto import worker_pb2
from baton.router.attempt.in_flight_requests import (
    BROKEN_S,
    HEARD_S,
    InFlightRequests,
    InFlightTracker,
    Leaving,
    Visitor,
    fingerprint,
)
from baton.router.attempt.poison_detector import PoisonDetector
from baton.router.placement.drains import Drains
from baton.router.placement.members import FORGET_S, Incarnation, Members
from baton.router.placement.policy import Pair
from baton.router.placement.refusals import Outcasts, fits

pytestmark = pytest.mark.fast


class World:
    """Members, presence and drains under a virtual clock."""

    def __init__(self):
        self.clock = VirtualClock(100.0)
        self.members = Members(self.clock)
        self.poison_detector = PoisonDetector()
        self.blamed = []
        self.in_flight_requests = InFlightRequests(self.members, self.poison_detector, self.clock, self.blamed.append)
        self.drains = Drains(self.members, self.clock)
        self.silent = set()
        self.epochs = {"p0": 1, "d0": 1, "d1": 1, "d2": 1}
        self.beat()

    def beat(self):
        for name, epoch in self.epochs.items():
            if name not in self.silent:
                role = "prefill" if name[0] == "p" else "decode"
                self.members.heartbeat(
                    worker_pb2.WorkerState(
                        worker_id=name,
                        role=role,
                        epoch=epoch,
                        address="a",
                        kv_address="k",
                        max_model_len=9,
                        block_size=16,
                        inventory=worker_pb2.Inventory(num_blocks=1),
                    )
                )

    def pass_s(self, seconds):
        for _ in range(round(seconds / 0.1)):
            self.clock.advance(0.1)
            self.beat()
            self.members.expire()
            self.drains.tick()
            self.in_flight_requests.tick()

    def restart(self, name):
        """Another process has the name."""
        self.silent.discard(name)
        self.epochs[name] += 1
        self.pass_s(0.2)

    def incarnation(self, name):
        return Incarnation(name, self.epochs[name])

    def visitor(self, prompt, may_move=lambda: True):
        request = GenerationRequest(
            key=AttemptKey(str(prompt), 1), prompt_token_ids=(prompt,), sampling=SamplingParams(), deadline_s=1e9
        )
        in_flight_tracker = InFlightTracker(self.members, self.drains, self.in_flight_requests)
        return Visitor(in_flight_tracker, request, may_move), fingerprint(request)


@pytest.fixture
def world():
    return World()


def enter(world, visitor, name, attempt, lost=None):
    on_lost = (lost if lost is not None else []).append
    return visitor.enter(world.incarnation(name), "decode", AttemptKey("r", attempt), on_lost)


def test_a_request_that_was_alone_at_two_deaths_is_blamed(world):
    visitor, name = world.visitor(1)
    lost = []
    enter(world, visitor, "d0", 1, lost)
    world.silent.add("d0")
    world.pass_s(2.0)
    assert [error.fields["cause"] for error in lost] == ["fence"]
    leave = enter(world, visitor, "d1", 2, lost)
    world.pass_s(0.5)
    leave(Leaving.BROKEN)
    world.pass_s(0.2)
    world.epochs["d1"] = 2
    world.beat()
    assert world.blamed == [], "d0 was only silent until now"
    world.restart("d0")
    assert [one.fingerprint for one in world.blamed] == [name]
    assert world.blamed[0].workers == ("d1", "d0"), "as they became known"
    assert len(lost) == 1, "it had left"


def silence(world, name, visitor, attempt):
    """An attempt goes to a worker that is not heard of then, though no stream breaks; returns its end."""
    leave = enter(world, visitor, name, attempt)
    world.silent.add(name)
    world.pass_s(2.0)
    return leave


def test_silence_is_no_death_of_one_that_comes_back_as_it_was(world):
    visitor, _ = world.visitor(1)
    for attempt, name in enumerate(("d0", "d1", "d2")):
        silence(world, name, visitor, attempt)
        world.silent.clear()
        world.pass_s(1.0)
    assert (world.blamed, len(world.poison_detector)) == ([], 0)
    assert not world.in_flight_requests.has_silences


def test_silence_is_a_death_of_one_that_does_not_come_back(world):
    visitor, name = world.visitor(1)
    for attempt, worker in enumerate(("d0", "d1")):
        silence(world, worker, visitor, attempt)
    assert len(world.poison_detector) == 0
    world.pass_s(FORGET_S)
    assert [one.fingerprint for one in world.blamed] == [name]


def test_silence_after_a_stream_broke_is_a_death_until_it_is_heard_of(world, caplog):
    """A process that is gone breaks its streams; that another one takes its place may be minutes later."""
    visitor, name = world.visitor(1)
    for attempt, worker in enumerate(("d0", "d1")):
        enter(world, visitor, worker, attempt)(Leaving.BROKEN)
        world.silent.add(worker)
        world.pass_s(2.0)
    assert [one.fingerprint for one in world.blamed] == [name]
    assert world.poison_detector.find(name, world.clock.now_s())
    world.silent.remove("d1")
    world.pass_s(0.2)
    assert world.poison_detector.find(name, world.clock.now_s()) is None, "d1 lives"
    assert "is not refused any more: d1 has not died" in caplog.text
    world.restart("d0")
    assert len(world.poison_detector) == 0


def test_who_has_ended_well_meanwhile_was_not_at_the_death(world):
    visitor, name = world.visitor(1)
    other, other_name = world.visitor(2)
    silence(world, "d0", other, 2)
    silence(world, "d1", visitor, 1)
    world.in_flight_requests.finished(name)
    world.restart("d1")
    assert len(world.poison_detector) == 0
    world.in_flight_requests.finished(name)
    world.restart("d0")
    assert other_name in world.poison_detector._records


def test_a_stream_that_breaks_at_a_worker_that_lives_on_is_no_death(world):
    visitor, _ = world.visitor(1)
    enter(world, visitor, "d0", 1)(Leaving.BROKEN)
    assert world.in_flight_requests.is_unsettled(world.incarnation("d0"))
    assert world.in_flight_requests.num_at(world.incarnation("d0")) == 0
    world.pass_s(HEARD_S - 0.2)
    assert world.in_flight_requests.is_unsettled(world.incarnation("d0"))
    world.pass_s(0.4)
    assert not world.in_flight_requests.is_unsettled(world.incarnation("d0"))
    world.epochs["d0"] = 2
    world.beat()
    assert len(world.poison_detector) == 0


def test_who_was_turned_away_was_not_there_but_the_worker_is_in_doubt(world):
    visitor, _ = world.visitor(1)
    enter(world, visitor, "d0", 1)(Leaving.TURNED_AWAY)
    assert world.in_flight_requests.is_unsettled(world.incarnation("d0"))
    world.epochs["d0"] = 2
    world.beat()
    assert len(world.poison_detector) == 0


def test_who_failed_to_hand_over_was_there_if_the_worker_died_but_it_is_not_in_doubt(world):
    visitor, _ = world.visitor(1)
    enter(world, visitor, "d0", 1)(Leaving.DOUBTED)
    enter(world, visitor, "d1", 1)(Leaving.DOUBTED)
    assert not world.in_flight_requests.is_unsettled(world.incarnation("d0"))
    world.silent.add("d0")
    world.pass_s(2.0)
    assert len(world.poison_detector) == 1
    world.epochs["d1"] = 2
    world.beat()
    assert world.blamed == [], "d1 was heard of since"


class Watched(GenerationRequest):
    """One that tells when it is gone."""

    __slots__ = ("__weakref__",)


def test_nothing_is_kept_of_who_failed_to_hand_over_to_a_worker_that_lives(world):
    requests = []
    for at in range(20):
        plain = world.visitor(at)[0]._request
        asked = Watched(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
        requests.append(weakref.ref(asked))
        key = AttemptKey("r", at)
        world.in_flight_requests.enter(world.incarnation("d0"), key, asked)
        world.in_flight_requests.leave(world.incarnation("d0"), key, Leaving.DOUBTED)
        del asked
    gc.collect()
    assert not any(one() for one in requests), "their prompts may be long"
    assert world.in_flight_requests._left
    world.pass_s(HEARD_S + 0.2)
    assert not world.in_flight_requests._left
    enter(world, world.visitor(1)[0], "d0", 1)(Leaving.DOUBTED)
    world.silent.add("d0")
    world.pass_s(1.0)
    assert world.in_flight_requests._left, "it may have died"


def test_what_broke_long_ago_is_settled_even_where_nothing_is_heard(world):
    world.members = Members(world.clock, alive_s=1e6)
    world.in_flight_requests = InFlightRequests(world.members, world.poison_detector, world.clock, world.blamed.append)
    world.beat()
    visitor, _ = world.visitor(1)
    enter(world, visitor, "d0", 1)(Leaving.BROKEN)
    world.silent.add("d0")
    world.pass_s(BROKEN_S - 1)
    assert world.in_flight_requests.is_unsettled(world.incarnation("d0"))
    world.pass_s(2)
    assert not world.in_flight_requests.is_unsettled(world.incarnation("d0"))


def test_who_left_in_order_was_not_there(world):
    visitor, _ = world.visitor(1)
    leave = enter(world, visitor, "d0", 1)
    assert world.in_flight_requests.num_at(world.incarnation("d0")) == 1
    leave(Leaving.IN_ORDER)
    leave(Leaving.IN_ORDER)
    world.silent.add("d0")
    world.pass_s(2.0)
    assert len(world.poison_detector) == 0
    assert not world.in_flight_requests.is_unsettled(world.incarnation("d0"))


def test_a_life_that_is_lost_already_says_so_at_once_and_leaves_nothing(world):
    incarnation = world.incarnation("d0")
    world.epochs["d0"] = 2
    world.beat()
    lost = []
    visitor, _ = world.visitor(1)
    leave = visitor.enter(incarnation, "decode", AttemptKey("r", 1), lost.append)
    leave(Leaving.BROKEN)
    assert [error.fields for error in lost] == [{"worker_id": "d0", "role": "decode", "cause": "death"}]
    assert world.in_flight_requests._visits == world.in_flight_requests._broken == world.drains._watches == {}
    assert len(world.poison_detector) == 0


def test_drained_streams_are_told_to_move_after_the_grace_until_they_can(world):
    moves = iter([False, False, True, True, True])
    visitor, _ = world.visitor(1, may_move=lambda: next(moves))
    lost = []
    leave = enter(world, visitor, "d0", 1, lost)
    assert world.drains.begin("d0", 1.0).incarnation == world.incarnation("d0")
    assert world.drains.incarnations() == {world.incarnation("d0")}
    world.pass_s(0.9)
    assert lost == []
    world.pass_s(0.4)
    assert {error.fields["cause"] for error in lost} == {"drain"}
    leave(Leaving.IN_ORDER)
    num_told = len(lost)
    world.pass_s(0.5)
    assert len(lost) == num_told <= 2
    assert world.drains._watches == {}


def test_a_drain_ends_with_its_life_and_by_word(world):
    world.drains.begin("d0", 0.0)
    world.drains.begin("d1", 0.0)
    world.epochs["d0"] = 2
    world.beat()
    world.pass_s(0.2)
    assert world.drains.incarnations() == {world.incarnation("d1")}
    assert world.drains.end("d1")
    assert not world.drains.end("d1")
    world.silent.add("d2")
    world.pass_s(2.0)
    for name in ("d2", "d3", ""):
        with pytest.raises(InvalidRequest):
            world.drains.begin(name, 1.0)
        with pytest.raises(InvalidRequest):
            world.drains.end(name)


def test_who_failed_a_request_is_out_until_it_is_heard_of(world):
    outcasts = Outcasts()
    prefill, decode = world.members.live("prefill"), world.members.live("decode")
    assert outcasts.heard(decode) == outcasts.without(decode) == decode
    outcasts.add(Pair(prefill[0], decode[0]), role="decode", now_s=world.clock.now_s())
    assert [one.state.worker_id for one in outcasts.heard(decode)] == ["d1", "d2"]
    assert outcasts.heard(prefill) == prefill, "it lost nothing"
    assert outcasts.without(prefill) == []
    world.pass_s(0.4)
    assert len(outcasts.heard(decode)) == 2
    world.pass_s(0.3)
    assert len(outcasts.heard(decode)) == 3
    assert len(outcasts.without(decode)) == 2
    outcasts.add(Pair(prefill[0], decode[1]), role=None, now_s=world.clock.now_s())
    assert outcasts.heard(decode) == decode, "a failed hand-off says nothing about either"
    outcasts.add(Pair(prefill[0], decode[1]), role="prefill", now_s=world.clock.now_s())
    assert outcasts.heard(prefill) == []


def test_a_worker_that_came_later_may_be_too_small(world):
    request = GenerationRequest(
        key=AttemptKey("r", 1),
        prompt_token_ids=(1,) * 20,
        sampling=SamplingParams(max_tokens=10),
        deadline_s=1e9,
        num_draft_tokens=2,
    )
    for name, changes, fit in (
        ("d0", {}, True),
        ("d0", {"num_blocks": 1}, False),
        ("d0", {"max_model_len": 29}, False),
        ("d0", {"num_draft_tokens": 1}, False),
        ("p0", {"num_draft_tokens": 0}, True),
        ("p0", {"num_blocks": 1}, False),
    ):
        (member,) = [one for one in world.members.all() if one.state.worker_id == name]
        member.state.max_model_len, member.state.num_draft_tokens, member.state.inventory.num_blocks = 30, 2, 2
        for field, value in changes.items():
            setattr(member.state.inventory if field == "num_blocks" else member.state, field, value)
        assert fits(request, member) == fit, (name, changes)


def test_why_a_life_was_lost(world):
    assert world.members.heard_since(world.incarnation("d0"), 99.0)
    world.silent.add("d0")
    world.pass_s(2.0)
    assert world.members.why_lost(world.incarnation("d0")) == "fence"
    assert world.members.heard_since(world.incarnation("d0"), 99.0)
    assert not world.members.heard_since(world.incarnation("d0"), 101.0)
    world.silent.clear()
    world.pass_s(0.1)
    old = world.incarnation("d0")
    world.epochs["d0"] = 2
    world.beat()
    assert world.members.why_lost(old) == "death"
    assert world.members.why_lost(Incarnation("nobody", 1)) == "death"
