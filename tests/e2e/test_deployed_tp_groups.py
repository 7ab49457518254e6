"""`baton serve --tp-prefill 2 --tp-decode 2` on real Ray: the tokens of one process; groups that live and die whole."""

import os
import signal
import time

import psutil
import pytest
import torch

from baton.client import BatonClient
from baton.cluster.commands.status import format_status
from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_deployment import NEXT_INCARNATION_S, Reader, generate, wait_idle, wait_new_epoch
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.shared_memory import owned_by

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CONFIG = {
    "num_speculative_tokens": 2,
    "dtype": "float64",
    "grpc_port": 0,
    "max_num_batched_tokens": 48,
    "kv_memory_mib": 64,
    "tp_prefill": 2,
    "tp_decode": 2,
    "migration_wait_s": 2 * NEXT_INCARNATION_S,
}
MAX_TOKENS = 16
SEEN: set[int] = set()  # processes that lived before a rank was lost


@pytest.fixture(scope="module")
def deployment():
    with Deployment(ServeConfig.from_mapping(CONFIG)) as running:
        yield running


@pytest.fixture
def client(deployment):
    with BatonClient(deployment.address) as client:
        yield client


@pytest.fixture(scope="module")
def requests(tokenizer):
    prompts = token_prompts(tokenizer, 4, max_len=120)
    return [
        request
        for sampled in (False, True)
        for request in requests_for(prompts, sampled=sampled, num_drafts=2, max_tokens=MAX_TOKENS, tag=f"{sampled}-")
    ]


@pytest.fixture(scope="module")
def wanted(requests, tokenizer, load_tiny):
    return local_tokens(load_tiny(torch.float64, with_mtp=False), tokenizer, requests)


def rank_pids(client):
    return {worker.state.worker_id: list(worker.state.rank_pids) for worker in client.status().workers}


def all_pids():
    """Of the deployment's processes that live now, and of whatever else this one has started."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_tokens_equal_one_process_and_status_shows_the_ranks(deployment, client, requests, wanted):
    for request, tokens in zip(requests, wanted, strict=True):
        assert generate(client, request)[0] == list(tokens)
    wait_idle(client, 5.0)
    pids = rank_pids(client)
    assert {name: len(ranks) for name, ranks in pids.items()} == {"prefill-0": 2, "decode-0": 2}
    assert len({pid for ranks in pids.values() for pid in ranks}) == 4
    shown = format_status(deployment.status() | {"address": deployment.address, "decode": []})
    for ranks in pids.values():
        assert f"2 ({', '.join(map(str, ranks))})" in shown


@pytest.mark.parametrize(
    ("worker_id", "rank", "number"),
    [
        ("decode-0", 1, signal.SIGKILL),
        ("decode-0", 1, signal.SIGSTOP),
        ("decode-0", 0, signal.SIGSTOP),
        ("prefill-0", 1, signal.SIGKILL),
    ],
)
def test_a_tp_group_that_loses_a_rank_comes_back_whole(
    deployment, client, requests, wanted, tokenizer, worker_id, rank, number
):
    del deployment
    before = {worker.state.worker_id: worker.state.epoch for worker in client.status().workers}
    old = rank_pids(client)[worker_id]
    SEEN.update(all_pids())
    long = requests_for(
        token_prompts(tokenizer, 1, max_len=64), sampled=False, num_drafts=2, max_tokens=300, tag=f"{rank}{number}"
    )[0]
    reader = Reader(client, long)
    while reader.first_s is None:
        assert reader.is_alive()
        time.sleep(0.005)
    os.kill(old[rank], number)
    reader.join(3 * NEXT_INCARNATION_S)
    assert not reader.is_alive(), "the stream hangs"
    assert reader.error is None, reader.error
    assert reader.token_ids == generate(client, long)[0], "it went on in the next incarnation"
    wait_new_epoch(client, worker_id, before[worker_id])
    new = rank_pids(client)[worker_id]
    assert len(new) == 2
    assert not set(new) & set(old)
    gone_s = time.monotonic() + 5.0
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in old):
        assert time.monotonic() < gone_s, "a rank of the old incarnation is still there"
        time.sleep(0.05)
    for request, tokens in list(zip(requests, wanted, strict=True))[:2]:
        assert generate(client, request)[0] == list(tokens)
    wait_idle(client, 5.0)


def test_nothing_of_any_incarnation_is_left(deployment):
    """Runs last: the deployment's own memory is there, that of incarnations that ended is not."""
    del deployment
    dead = {pid for pid in SEEN if not psutil.pid_exists(pid)}
    assert len(dead) >= 2, "groups have lost their ranks"
    assert owned_by(all_pids()), "its own"
    assert not owned_by(dead)
