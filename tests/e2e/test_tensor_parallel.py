"""Prefill and decode workers of different tensor-parallel size give the tokens of one process: every rank a process.

Each prefill rank pushes its own KV heads through its own connection; one landing process writes the pools of all decode
ranks. The reference is the one-process engine without speculation and without chunking.
"""

import pytest

from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.gangs import GangTopology, RankProcesses
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import local_tokens

NUM_PROMPTS = 9
MAX_TOKENS = 10
PAIRS = ((1, 1), (1, 2), (2, 1), (2, 2))
MODES = {"greedy": False, "coupled": True}


@pytest.fixture(scope="module")
def processes():
    started = RankProcesses()
    yield started
    started.close()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, NUM_PROMPTS, max_len=130)


@pytest.fixture(scope="module")
def wanted(load_tiny, tokenizer, prompts):
    return {
        mode: local_tokens(
            load_tiny(),
            tokenizer,
            requests_for(prompts, sampled=sampled, num_drafts=0, max_tokens=MAX_TOKENS, tag="reference"),
        )
        for mode, sampled in MODES.items()
    }


def check(topology, prompts, wanted, tag):
    """Every mode, without drafts and with two."""
    for mode, sampled in MODES.items():
        for k in (0, 2):
            requests = requests_for(
                prompts, sampled=sampled, num_drafts=k, max_tokens=MAX_TOKENS, tag=f"{tag}-{mode}-{k}-"
            )
            outcomes = topology.generate(requests)
            assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
            assert [outcome.token_ids for outcome in outcomes] == wanted[mode], (mode, k)
            num_accepted = sum(outcome.stats.num_accepted_tokens for outcome in outcomes if outcome.stats)
            assert (num_accepted > 0) == (k > 0)
    topology.wait_idle()


@pytest.mark.parametrize(("tp_prefill", "tp_decode"), PAIRS)
def test_same_tokens_over_sockets(tp_prefill, tp_decode, processes, prompts, wanted):
    with GangTopology(processes, TINY, tp_prefill, tp_decode) as topology:
        check(topology, prompts, wanted, "zmq")
