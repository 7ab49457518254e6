"""A rank of a decode or prefill group is killed, stopped or corrupted at a random step: named in time, served again.

Every rank is a process. What Baton leaves to Ray, starting the group again under a new epoch, the test does; who
ends the old one, and how soon, is Baton's. Nothing of an old incarnation may be left.
"""

import itertools
import os
import random
import signal
import time

import pytest

from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.tp_groups import TPGroupTopology
from baton.tests.shared_memory import regions_of

DEATH_S = 1.0
HANG_S = 2.0
MARGIN_S = 0.5  # of a busy machine, between the verdict and the test that reads of it
MAX_TOKENS = 96
WHATS = {"kill": DEATH_S, "stop": HANG_S, "corrupt": DEATH_S}
NAMES = {"kill": "has died", "stop": "hangs", "corrupt": "diverged"}


@pytest.fixture(scope="module")
def requests(tokenizer):
    prompts = token_prompts(tokenizer, 3, max_len=100)
    return requests_for(prompts, sampled=True, num_drafts=2, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def wanted(requests, tokenizer, load_tiny):
    return local_tokens(load_tiny(), tokenizer, requests)


def tagged(requests, tag):
    return [
        type(request)(
            key=type(request.key)(f"{request.key.request_id}-{tag}", 1),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            deadline_s=request.deadline_s,
            num_draft_tokens=request.num_draft_tokens,
        )
        for request in requests
    ]


def strike(topology, what, role, rank, requests, when):
    """Start requests, do it at that many tokens; returns (seconds until a survivor named the rank, what it said)."""
    ranks = getattr(topology, role)
    started = [topology.start(request) for request in requests]
    if role == "decode":
        topology.wait_tokens(started[0], when)
    else:
        time.sleep(when * 1e-3)
    struck_s = time.monotonic()
    match what:
        case "kill":
            ranks[rank].process.kill()
        case "stop":
            os.kill(ranks[rank].process.pid, signal.SIGSTOP)
        case "corrupt":
            ranks[rank].pipe.send(("corrupt",))
    survivor = ranks[1 - rank]
    kind, why = survivor.answers.get(timeout=20.0)
    took_s = time.monotonic() - struck_s
    assert kind == "fatal", (kind, why)
    for running in started:  # no stream is stuck: each one ends, with an error where its worker is gone
        topology.finish_or_lose(running)
    for process in ranks:
        process.process.join(5.0)
        assert not process.process.is_alive(), "a rank outlives its TP group"
    return took_s, why


def run_faults(processes, requests, wanted, faults, margin_s):
    took = {}
    topology = TPGroupTopology(processes, TINY, 2, 2, data_path="raw")
    epochs = set()
    try:
        for turn, (what, role, rank, when) in enumerate(faults):
            epochs.add(topology.epochs[role])
            took_s, why = strike(topology, what, role, rank, tagged(requests, f"hit{turn}"), when)
            assert f"rank {rank} of 2 {NAMES[what]}" in why, (what, role, rank, why)
            took.setdefault(what, []).append(took_s)
            old = [process.process.pid for process in topology.prefill + topology.decode]
            topology.abandon()
            assert not regions_of(old)
            topology = TPGroupTopology(processes, TINY, 2, 2, data_path="raw")
            assert topology.epochs[role] not in epochs
            outcomes = topology.generate(tagged(requests[:1], f"after{turn}"))
            assert [outcome.token_ids for outcome in outcomes] == wanted[:1]
        topology.wait_idle()
    finally:
        topology.abandon()
    print({what: f"max {max(times):.2f} s of {len(times)}" for what, times in took.items()})
    for what, times in took.items():
        assert max(times) <= WHATS[what] + margin_s, (what, times)


def faults(seed, count):
    """(what, role, rank, at which token); corruption shows where another rank compares, so it hits a follower."""
    chance = random.Random(seed)
    kinds = itertools.cycle(["kill", "stop", "corrupt"])
    for what in itertools.islice(kinds, count):
        role = "decode" if what == "corrupt" else chance.choice(["decode", "decode", "prefill"])
        yield what, role, 1 if what == "corrupt" else chance.randrange(2), chance.randrange(1, MAX_TOKENS - 20)


def test_a_few_faults(processes, requests, wanted):
    run_faults(processes, requests, wanted, faults(1, 4), margin_s=5.0)  # on any machine, also one that stalls


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_faults(processes, requests, wanted):
    run_faults(processes, requests, wanted, faults(2, 50), margin_s=MARGIN_S)
