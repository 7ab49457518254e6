"""Corrupt frames between real workers: the one that gets them is found and taken out of routing."""

import pytest

from baton.cluster.deployment import Deployment, Factories
from baton.cluster.ray.actors import decode_shell
from baton.core.config import ServeConfig
from baton.tests.runbook.conftest import CONFIG, answer, flagged
from baton.tests.runbook.flipping import flipping_shell

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def deployment():
    config = ServeConfig.from_mapping(CONFIG | {"prefill": 1, "transport": "tcp"})
    shells = {"prefill": flipping_shell, "decode": decode_shell}
    with Deployment(config, parts=Factories(shells=shells)) as running:
        yield running


def test_the_worker_with_corrupt_frames_is_taken_out_and_the_other_serves(runbook, client, standing):
    want = answer(client)[0]
    before = standing()
    dry = runbook("corruption-response", "--rounds", "1", "--dry-run")
    assert dry.code == 0, dry.stderr
    assert standing() == before
    (victim,) = dry.data["found"]["suspects"]
    for _ in range(2):
        done = runbook("corruption-response", "--rounds", "1")
        assert done.code == 0, done.stderr
        assert flagged(client) == {victim}
        stats = [answer(client)[1] for _ in range(4)]
        assert victim not in {one.decode_worker for one in stats}
    assert runbook("corruption-response", "--rounds", "1", "--tolerate", "1000000").code == 0
    assert runbook("drain-node", "--worker", victim, "--undo").code == 0
    assert standing() == before
    assert answer(client)[0] == want


def test_where_nobody_else_is_left_it_is_refused(runbook, client, standing):
    before = standing()
    suspects = runbook("corruption-response", "--rounds", "1", "--dry-run").data["found"]["suspects"]
    (other,) = {"decode-0", "decode-1"} - set(suspects)
    assert runbook("drain-node", "--worker", other).code == 0
    done = runbook("corruption-response", "--rounds", "1")
    assert done.code == 3, done.stderr
    assert flagged(client) == {other}
    assert runbook("drain-node", "--worker", other, "--undo").code == 0
    assert standing() == before
