"""Which worker comes or goes next, and what becomes of one that does not start."""

import pytest

from baton.cluster.ray import scaling
from baton.cluster.ray.scaling import Move, Scaling, next_move
from baton.core.errors import StartupError
from baton.proto import admin_pb2, worker_pb2

pytestmark = pytest.mark.fast

TWO = {"prefill-0": "prefill", "decode-0": "decode"}


@pytest.mark.parametrize(
    ("prefill", "decode", "roles", "move"),
    [
        (1, 1, TWO, None),
        (1, 2, TWO, Move("start", "decode-1", "decode")),
        (2, 2, TWO, Move("start", "prefill-1", "prefill")),
        (1, 1, TWO | {"decode-1": "decode"}, Move("end", "decode-1", "decode")),
        (1, 2, TWO | {"decode-2": "decode"}, None),
        (1, 3, TWO | {"decode-2": "decode"}, Move("start", "decode-1", "decode")),
        (1, 1, TWO | {"decode-9": "decode", "decode-10": "decode"}, Move("end", "decode-10", "decode")),
        (2, 1, TWO | {"decode-1": "decode"}, Move("start", "prefill-1", "prefill")),  # added first
    ],
)
def test_the_next_move(prefill, decode, roles, move):
    assert next_move({"prefill": prefill, "decode": decode}, roles) == move


class RayError(Exception):
    pass


class Ray:
    """Actors are their names; what becomes of one is in `fates`."""

    class exceptions:
        RayError = RayError

    def __init__(self):
        self.fates, self.killed = {}, []

    def wait(self, answers, timeout):
        done = [answer for answer in answers if self.fates.get(answer)]
        return done, [answer for answer in answers if answer not in done]

    def get(self, answer, timeout):
        if self.fates.get(answer) != "ready":
            raise RayError("it died")

    def kill(self, actor, no_restart):
        assert no_restart
        self.killed.append(actor.name)


class Actor:
    def __init__(self, name):
        self.name, self.ready = name, self

    def remote(self):
        return self.name


class Rig:
    """A deployment of stand-ins, and the status that its router would give."""

    def __init__(self, monkeypatch):
        self.ray, self.status = Ray(), admin_pb2.StatusReply()
        self.actors = {name: Actor(name) for name in TWO}
        self.drained, self.released = [], []
        self.scaling = Scaling(self.ray, "", self.actors, TWO, self.start, self.released.append)
        monkeypatch.setattr(scaling, "fetch_status", lambda address, timeout_s: self.status)
        monkeypatch.setattr(scaling.operate, "drain", lambda address, name: self.drain(name))

    def start(self, name, role):
        self.actors[name] = Actor(name)

    def drain(self, name):
        self.drained.append(name)
        next(worker for worker in self.status.workers if worker.state.worker_id == name).draining = True

    def ask(self, prefill, decode):
        self.status.scale.CopyFrom(admin_pb2.ScaleRequest(num_prefill=prefill, num_decode=decode))

    def show(self, name, **about):
        for worker in self.status.workers:
            if worker.state.worker_id == name:
                self.status.workers.remove(worker)
        state = worker_pb2.WorkerState(worker_id=name)
        self.status.workers.append(admin_pb2.WorkerStatus(state=state, **about))


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_nothing_is_done_unasked(rig):
    assert not rig.scaling.step()
    assert set(rig.actors) == set(TWO)


def test_one_is_started_after_the_other_was_ready(rig):
    rig.ask(1, 3)
    assert rig.scaling.step()
    assert not any(rig.scaling.step() for _ in range(3))
    assert set(rig.actors) == {*TWO, "decode-1"}
    rig.ray.fates["decode-1"] = "ready"
    assert not rig.scaling.step()
    assert rig.scaling.step()
    assert set(rig.actors) == {*TWO, "decode-1", "decode-2"}
    assert rig.scaling.roles["decode-2"] == "decode"


def test_one_that_does_not_start_is_given_up_until_something_else_is_asked_for(rig):
    rig.ask(1, 2)
    rig.scaling.step()
    rig.ray.fates["decode-1"] = "dead"
    assert rig.scaling.step()
    assert rig.ray.killed == rig.released == ["decode-1"]
    assert not any(rig.scaling.step() for _ in range(3))
    assert set(rig.actors) == set(rig.scaling.roles) == set(TWO)
    rig.ask(1, 3)
    assert rig.scaling.step()


def test_one_that_never_answers_is_given_up_in_time(rig, monkeypatch):
    rig.ask(1, 2)
    rig.scaling.step()
    now = scaling.time.monotonic()
    monkeypatch.setattr(scaling.time, "monotonic", lambda: now + scaling.START_TIMEOUT_S + 1)
    assert rig.scaling.step()
    assert rig.ray.killed == ["decode-1"]


def test_what_cannot_be_placed_is_given_up(rig, monkeypatch):
    def start(name, role):
        raise StartupError("no node has room")

    rig.scaling._start = start
    rig.ask(1, 2)
    assert not any(rig.scaling.step() for _ in range(3))
    assert set(rig.actors) == set(rig.scaling.roles) == set(TWO)


def test_one_is_drained_before_it_ends(rig):
    rig.ask(1, 2)
    rig.scaling.step()
    rig.ray.fates["decode-1"] = "ready"
    rig.scaling.step()
    rig.ask(1, 1)
    rig.show("decode-1", alive=True, num_streams=2)
    assert not any(rig.scaling.step() for _ in range(4))
    assert rig.drained == ["decode-1"]
    assert not rig.ray.killed
    rig.show("decode-1", alive=True, num_streams=0)  # another incarnation, which was not drained
    assert not rig.scaling.step()
    assert rig.drained == ["decode-1"] * 2
    assert rig.scaling.step()
    assert rig.ray.killed == rig.released == ["decode-1"]
    assert set(rig.actors) == set(TWO)


def test_a_router_that_does_not_answer_is_asked_again(rig, monkeypatch):
    def fail(address, timeout_s):
        raise StartupError("no answer")

    rig.ask(1, 2)
    monkeypatch.setattr(scaling, "fetch_status", fail)
    assert not rig.scaling.step()
    monkeypatch.setattr(scaling, "fetch_status", lambda address, timeout_s: rig.status)
    assert rig.scaling.step()
