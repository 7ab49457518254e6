"""Who is killed for standing still: no one that loads, is heard, or is in another incarnation. No Ray."""

import types

import pytest

from baton.cluster.ray import worker_watch
from baton.cluster.ray.crew import Crew, CrewPlan
from baton.cluster.ray.worker_watch import AGAIN_S, INTERVAL_S, SILENT_S, SilenceWatch
from baton.cluster.resolve import find_model
from baton.core.config import ServeConfig
from baton.core.errors import StartupError
from baton.core.inside import DeploymentSecret
from baton.proto import admin_pb2, worker_pb2

pytestmark = pytest.mark.fast


class Session:
    """Ray knows a process id for each actor; None while it is not alive."""

    def __init__(self):
        self.pids, self.killed, self.ray = {"decode-0": 7, "decode-1": 8}, [], self

    def pid_of(self, actor):
        return self.pids[actor]

    def kill(self, actor, no_restart):
        assert no_restart is False
        self.killed.append(actor)


class World:
    def __init__(self, monkeypatch):
        self.now_s, self.session = 100.0, Session()
        self.age_s, self.alive, self.epoch, self.is_down = 2 * SILENT_S, False, 5, False
        self.watch = SilenceWatch(self.session, "router")
        monkeypatch.setattr(worker_watch, "time", types.SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(worker_watch, "fetch_status", self.status)

    def status(self, address, timeout_s):
        if self.is_down:
            raise StartupError("nobody")
        state = worker_pb2.WorkerState(worker_id="decode-0", epoch=self.epoch, rank_pids=[7])
        worker = admin_pb2.WorkerStatus(state=state, alive=self.alive, heartbeat_age_s=self.age_s)
        return admin_pb2.StatusReply(workers=[worker])

    def look(self):
        self.now_s += INTERVAL_S
        self.watch.check({name: name for name in self.session.pids})
        return self.session.killed


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_a_silent_process_is_killed_once_and_again_if_that_did_not_help(world):
    assert world.look() == ["decode-0"]
    assert world.look() == ["decode-0"]
    world.now_s += AGAIN_S
    assert world.look() == ["decode-0", "decode-0"]


@pytest.mark.parametrize(
    "change",
    [
        {"alive": True},
        {"age_s": SILENT_S / 2},
        {"is_down": True},
    ],
)
def test_who_may_be_well_is_left_alone(world, change):
    vars(world).update(change)
    assert world.look() == []


@pytest.mark.parametrize("pid", [None, 9])
def test_a_next_life_that_loads_is_left_alone(world, pid):
    world.session.pids["decode-0"] = pid
    assert world.look() == []


def test_it_does_not_look_all_the_time(world):
    world.alive = True
    world.look()
    world.alive = False
    world.watch.check({name: name for name in world.session.pids})
    assert world.session.killed == []


@pytest.mark.parametrize("is_private", [True, False])
def test_a_crew_of_any_ray_looks_who_is_silent(world, is_private):
    session = world.session
    session.is_private = is_private
    session.wait = lambda references, num_returns, timeout: ([], references)
    about = {"device": "cpu", "name": "baton-x", "router_address": "router", "secret": DeploymentSecret.new()}
    shells = {"prefill": None, "decode": None}
    config = ServeConfig.from_mapping({"decode": 2})
    crew = Crew(session, CrewPlan(config=config, model=find_model("tiny"), shells=shells, rank_shells=shells, **about))
    crew._scaling = types.SimpleNamespace(step=lambda: False, roles=dict.fromkeys(session.pids, "decode"))
    crew._actors.update({name: Actor(name) for name in session.pids})
    crew.check()
    assert session.killed == ["decode-0"]


class Actor(str):
    """A handle that is told by its name; it is asked for its process, and never answers."""

    @property
    def pid(self):
        return types.SimpleNamespace(remote=object)
