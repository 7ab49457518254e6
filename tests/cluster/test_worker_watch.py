"""Noticing workers that are dead for good, against a stand-in for Ray that answers as told."""

import logging
import types

import pytest

from baton.cluster.ray.worker_watch import WorkerWatch
from baton.core.errors import WorkerLost

pytestmark = pytest.mark.fast
ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class ActorUnavailableError(RayError):
    pass


class FakeRay:
    """`answers` maps a worker to what its calls give: a pid, an error, or None while nothing has come yet."""

    def __init__(self):
        self.exceptions = types.SimpleNamespace(RayError=RayError, ActorDiedError=ActorDiedError)
        self.answers = dict.fromkeys(ROLES, 7)
        self.calls = []
        self.actors = {name: types.SimpleNamespace(pid=self._method(name)) for name in ROLES}

    def _method(self, name):
        def remote():
            self.calls.append(name)
            return (name, len(self.calls))

        return types.SimpleNamespace(remote=remote)

    def wait(self, references, *, num_returns, timeout):
        assert timeout == 0
        done = [reference for reference in references if self.answers[reference[0]] is not None]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference):
        answer = self.answers[reference[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer


def given_up(worker_id, why):
    return False


@pytest.fixture
def ray():
    return FakeRay()


def test_one_question_is_open_to_each_worker_and_no_answer_is_no_death(ray):
    watch = WorkerWatch(ray, ray.actors, ROLES, given_up)
    ray.answers = dict.fromkeys(ROLES)
    for _ in range(5):
        watch.check()
    assert sorted(ray.calls) == sorted(ROLES)


def test_a_worker_that_restarts_is_asked_again(ray):
    watch = WorkerWatch(ray, ray.actors, ROLES, given_up)
    ray.answers["prefill-0"] = ActorUnavailableError("between two incarnations")
    for _ in range(3):
        watch.check()
    ray.answers["prefill-0"] = 8
    watch.check()
    assert ray.calls.count("prefill-0") == 5


def test_a_dead_worker_is_logged_once_and_the_last_of_a_role_ends_it(ray, caplog):
    watch = WorkerWatch(ray, ray.actors, ROLES, given_up)
    ray.answers["decode-1"] = ActorDiedError("long\nkilled by signal 9")
    for _ in range(3):
        watch.check()
    assert [(record.levelno, "decode-1" in record.getMessage()) for record in caplog.records] == [(logging.ERROR, True)]
    ray.answers["decode-0"] = ActorDiedError("long\nkilled by signal 9")
    for _ in range(2):
        with pytest.raises(WorkerLost, match=r"no decode worker is left.*killed by signal 9") as lost:
            watch.check()
    assert lost.value.fields == {"role": "decode", "worker_ids": ["decode-0", "decode-1"]}
    assert len(caplog.records) == 2


def test_a_dead_worker_that_will_be_started_again_is_not_lost(ray, caplog):
    told = []

    def on_dead(worker_id, why):
        told.append((worker_id, why))
        return len(told) < 3

    watch = WorkerWatch(ray, ray.actors, ROLES, on_dead)
    for worker_id in ("decode-0", "decode-1"):
        ray.answers[worker_id] = ActorDiedError("long\nkilled by signal 9")
    for _ in range(3):
        watch.check()
    assert told == [("decode-0", "killed by signal 9"), ("decode-1", "killed by signal 9")]
    assert not caplog.records
    watch = WorkerWatch(ray, ray.actors, {**ROLES, "decode-1": "prefill"}, on_dead)
    with pytest.raises(WorkerLost, match="no decode worker is left"):
        watch.check()
