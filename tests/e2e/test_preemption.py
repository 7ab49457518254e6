"""A decode worker whose blocks run out: the same tokens, everybody ends, nothing is left over.

In float64, against the one-process engine without preemption.
"""

import itertools
import time

import pytest

from baton.engine.sequence import MAX_PREEMPTIONS
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_groups import TPGroupTopology

MAX_TOKENS = 40
HOST_BYTES = {"recompute": 0, "offload": 1 << 26, "little": 3 * 196_608}
NUM_SMALL = 20  # blocks; the longest prompt with its answer takes 16


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, 20)


@pytest.fixture(scope="module")
def wanted(load_tiny, tokenizer, prompts):
    return {
        sampled: local_tokens(load_tiny(), tokenizer, requests_for(prompts, **options(sampled, 0)))
        for sampled in (False, True)
    }


def options(sampled, k):
    return {"sampled": sampled, "num_drafts": k, "max_tokens": MAX_TOKENS}


def cells(default, *drafts):
    """Every number of drafts and way; all but one are slow."""
    pairs = itertools.product(drafts, HOST_BYTES)
    return [pytest.param(*pair, marks=[] if pair == default else [pytest.mark.slow]) for pair in pairs]


def decode_inventory(topology):
    return topology.inventories()[-1]


@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_preempted_at_a_token(k, way, load_tiny, tokenizer, prompts, wanted):
    for at, sampled, scheduling in ((1, False, "sync"), (15, True, "async")):
        few = prompts[:7]
        with Topology(
            load_tiny(),
            tokenizer,
            num_drafts=k,
            chunk_len=64,
            preempt_at=(at,),
            host_kv_bytes=HOST_BYTES[way],
            scheduling=scheduling,
        ) as topology:
            outcomes = topology.generate(requests_for(few, **options(sampled, k)))
            topology.wait_idle()
            counts = decode_inventory(topology)
        assert [outcome.error for outcome in outcomes] == [None] * len(few)
        assert [outcome.token_ids for outcome in outcomes] == wanted[sampled][: len(few)]
        assert counts.num_preemptions >= len(few) - 2
        assert (counts.num_recomputed_tokens > 0) == (way == "recompute")
        assert counts.num_restored_blocks == counts.num_offloaded_blocks
        assert (counts.num_offloaded_blocks > 0) == (way == "offload")
        assert counts.num_host_blocks_used == 0


@pytest.mark.parametrize(("k", "way"), cells((2, "little"), 0, 2))
def test_twenty_requests_under_pressure(k, way, load_tiny, tokenizer, prompts, wanted):
    with Topology(
        load_tiny(),
        tokenizer,
        num_drafts=k,
        num_blocks=NUM_SMALL,
        num_prefill_blocks=1024,
        overcommit=True,
        host_kv_bytes=HOST_BYTES[way],
    ) as topology:
        for sampled in (k > 0,):
            outcomes = topology.generate(requests_for(prompts, tag=f"r{sampled}", **options(sampled, k)))
            assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
            assert [outcome.token_ids for outcome in outcomes] == wanted[sampled]
        topology.wait_idle()
        counts = decode_inventory(topology)
    assert 0 < counts.num_preemptions <= len(prompts) * MAX_PREEMPTIONS
    assert counts.num_host_blocks_used == 0
    assert (counts.num_offloaded_blocks > 0) == (way != "recompute")
    assert counts.num_recomputed_tokens == 0 if way == "offload" else counts.num_recomputed_tokens > 0


def test_cancelled_under_pressure_leaves_nothing(load_tiny, tokenizer, prompts, wanted):
    with Topology(
        load_tiny(),
        tokenizer,
        num_drafts=2,
        num_blocks=NUM_SMALL,
        num_prefill_blocks=1024,
        overcommit=True,
        host_kv_bytes=HOST_BYTES["little"],
    ) as topology:
        for turn, wait_s in enumerate((0.02, 0.1, 0.3)):
            gone = {"sampled": True, "num_drafts": 2, "max_tokens": 100}
            started = [topology.start(request) for request in requests_for(prompts, tag=f"gone{turn}-", **gone)]
            time.sleep(wait_s)
            for running in started:
                topology.cancel(running)
        topology.wait_idle(10.0)
        assert decode_inventory(topology).num_host_blocks_used == 0
        outcomes = topology.generate(requests_for(prompts, **options(True, 2)))
        assert [outcome.token_ids for outcome in outcomes] == wanted[True]


@pytest.mark.parametrize(("k", "way"), cells((2, "little"), 0, 2))
def test_two_ranks_under_pressure(k, way, processes, prompts, wanted):
    with TPGroupTopology(
        processes,
        TINY,
        1,
        2,
        num_decode_blocks=NUM_SMALL,
        overcommit=True,
        host_kv_bytes=HOST_BYTES[way] // 2,
        preempt_at=(7,),
    ) as topology:
        few = prompts[:12]
        outcomes = topology.generate(requests_for(few, **options(k > 0, k)))
        assert [outcome.error for outcome in outcomes] == [None] * len(few)
        assert [outcome.token_ids for outcome in outcomes] == wanted[k > 0][: len(few)]
        topology.wait_idle()
        counts = topology.inventories()[1]
    assert counts.num_preemptions >= len(few) - 3
    assert (counts.num_offloaded_blocks > 0) == (way != "recompute")
    assert counts.num_recomputed_tokens == 0 if way == "offload" else counts.num_recomputed_tokens > 0
    assert counts.num_host_blocks_used == 0
