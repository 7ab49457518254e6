"""One deployment of the tiny model for each module, and running runbooks on it as an operator does."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.client import BatonClient
from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.core.errors import BatonError
from baton.core.requests.sampling import SamplingParams
from baton.runbook.common.workers import held

RUNBOOKS = Path(__file__).parents[2] / "runbook"
CONFIG = {
    "num_speculative_tokens": 2,
    "dtype": "float64",
    "grpc_port": 0,
    "local_prefill": "never",  # streams are to depend on both workers
    "kv_memory_mib": 64,
    "prefill": 2,
    "decode": 2,
    "max_num_batched_tokens": 48,
    "start_timeout_s": 240,
    "max_queue_len": 256,  # as an operator who plans for overload sets it
}


@dataclass
class Done:
    """What a runbook printed, and its exit code."""

    code: int
    data: dict
    stderr: str

    def states(self):
        return {(step["kind"], step["name"]): step["state"] for step in self.data["steps"]}


@pytest.fixture(scope="module")
def deployment():
    with Deployment(ServeConfig.from_mapping(CONFIG)) as running:
        yield running


@pytest.fixture
def client(deployment):
    with BatonClient(deployment.address) as client:
        yield client


@pytest.fixture
def runbook(deployment):
    def run(name, *arguments, address=deployment.address, timeout_s=240):
        command = [sys.executable, "-P", str(RUNBOOKS / f"{name.replace('-', '_')}.py"), "--address", address, "--json"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s)
        assert done.stdout, done.stderr
        return Done(done.returncode, json.loads(done.stdout), done.stderr)

    return run


@pytest.fixture
def standing(client):
    """What must not change under a dry run, once every worker is heard and idle."""

    def look():
        status, inventory = calm(client)
        workers = {worker.state.worker_id: (worker.state.epoch, worker.draining) for worker in status.workers}
        held = {
            worker.state.worker_id: (
                worker.state.inventory.num_blocks_free,
                worker.state.inventory.num_blocks_quarantined,
                str(worker.state.speculation),
            )
            for worker in inventory.workers
        }
        return workers, held, status.max_queue_len, len(status.quarantined)

    return look


def calm(client):
    """Status and inventory, once every worker is heard in both and holds nothing of a request."""
    seen = []

    def is_calm():
        status, inventory = client.status(), client.inventory()
        seen[:] = [status, inventory]
        names = [{worker.state.worker_id for worker in one.workers} for one in seen]
        return (
            names[0] == names[1]
            and not status.num_requests_running
            and all(worker.alive and not worker.num_streams for worker in (*status.workers, *inventory.workers))
            and not any(held(worker) for worker in inventory.workers)
        )

    wait_until(is_calm)
    return seen


def wait_until(holds, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def incarnations(client):
    return {worker.state.worker_id: worker.state.epoch for worker in client.status().workers if worker.alive}


def flagged(client):
    """Workers out of routing."""
    return {worker.state.worker_id for worker in client.status().workers if worker.draining}


def answer(client, prompt="def main(argv=None):\n"):
    """Greedy tokens and what is said of them."""
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    chunks = list(client.generate(prompt, sampling=sampling))
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish.stats


class Load:
    """One request after the other, in a thread."""

    def __init__(self, client):
        self._client, self._over, self._answers, self._errors = client, threading.Event(), [], []
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self):
        while not self._over.is_set():
            try:
                self._answers.append(tuple(answer(self._client)[0]))
            except BatonError as error:
                self._errors.append(error)

    def end(self):
        self._over.set()
        self._thread.join(60)
        assert self._answers
        return self._answers, self._errors
