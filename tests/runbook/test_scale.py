"""Workers come and go while requests run."""

import threading

import pytest

from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.tests.runbook.conftest import CONFIG, Load, answer, incarnations

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def deployment():
    over = threading.Event()
    with Deployment(ServeConfig.from_mapping(CONFIG | {"prefill": 1, "decode": 1})) as running:

        def follow():
            while not over.wait(0.5):
                running.check()

        thread = threading.Thread(target=follow)
        thread.start()
        yield running
        over.set()
        thread.join()


def test_workers_are_added_and_taken_away_and_no_stream_notices(runbook, client, standing):
    before, want = standing(), answer(client)[0]
    assert runbook("scale", "--decode", "2", "--dry-run").code == 0
    assert standing() == before
    load = Load(client)
    for _ in range(2):
        done = runbook("scale", "--decode", "2")
        assert done.code == 0, done.stderr
        assert set(incarnations(client)) == {"prefill-0", "decode-0", "decode-1"}
    assert not done.data["changed"]
    for _ in range(2):
        done = runbook("scale", "--decode", "1")
        assert done.code == 0, done.stderr
        assert set(serving(client)) == {"prefill-0", "decode-0"}
    answers, errors = load.end()
    assert not errors
    assert set(answers) == {tuple(want)}
    for arguments, code in ((["--decode", "0"], 2), (["--prefill", "0"], 2), ([], 2), (["--decode", "99999"], 2)):
        assert runbook("scale", *arguments, "--timeout", "20").code == code
    assert set(serving(client)) == {"prefill-0", "decode-0"}


def serving(client):
    return [worker.state.worker_id for worker in client.status().workers if worker.alive and not worker.draining]
