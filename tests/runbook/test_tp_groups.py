"""A tensor-parallel worker whose first rank hangs: no rank of it is left, and others take their places."""

import os
import signal

import psutil
import pytest

from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.tests.runbook.conftest import CONFIG, answer, incarnations, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def deployment():
    with Deployment(ServeConfig.from_mapping(CONFIG | {"prefill": 1, "decode": 1, "tp_decode": 2})) as running:
        yield running


def ranks(client):
    return next(list(w.state.rank_pids) for w in client.status().workers if w.state.worker_id == "decode-0")


def test_every_rank_of_a_tp_group_that_hangs_is_ended(runbook, client):
    want, pids = answer(client)[0], ranks(client)
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)
    try:
        wait_until(lambda: "decode-0" not in incarnations(client))
        done = runbook("hung-tp-group", "--worker", "decode-0", "--watch", "1")
    finally:
        if psutil.pid_exists(pids[0]):
            os.kill(pids[0], signal.SIGCONT)
    # A TP group mostly notices by itself, and ends; it may even be back before the runbook has looked.
    assert done.code in (0, 3), done.stderr
    assert set(map(int, done.data["found"].get("stacks", ()))) <= set(pids)
    wait_until(lambda: "decode-0" in incarnations(client))
    assert not any(map(psutil.pid_exists, pids))
    assert not set(ranks(client)) & set(pids)
    assert answer(client)[0] == want
