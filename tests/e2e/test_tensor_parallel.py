"""Prefill and decode workers of different tensor-parallel size give the tokens of one process: every rank a process.

Each prefill rank pushes its own KV heads through its own connection; one KV receiver writes the pools of all decode
ranks. The reference is the one-process engine without speculation and without chunking.
"""

import contextlib
import itertools
import time

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.features import SCHEMA
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_forced_prefix import going_on
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.test_sampling_everywhere import KINDS, request_of
from baton.tests.e2e.tp_groups import TPGroupTopology
from baton.tests.model.harness import prompt

CPU = torch.device("cpu")

NUM_PROMPTS = 8
MAX_TOKENS = 8
MODES = {"greedy": False, "coupled": True}
DATA_PATHS = ("inline", "raw", "shm")
DEFAULT = {(1, 2, "shm"), (2, 1, "raw"), (2, 2, "raw")}
CELLS = [
    pytest.param(*cell, marks=[] if cell in DEFAULT else [pytest.mark.slow])
    for cell in [
        (*pair, data_path)
        for pair in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2))
        for data_path in DATA_PATHS
    ]
]


class EndOfTest(Exception):
    """Leaves a topology without closing it."""


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, NUM_PROMPTS, max_len=130)


def reference(model, tokenizer, prompts):
    return {
        mode: local_tokens(
            model, tokenizer, requests_for(prompts, sampled=sampled, num_drafts=0, max_tokens=MAX_TOKENS)
        )
        for mode, sampled in MODES.items()
    }


@pytest.fixture(scope="module")
def wanted(load_tiny, tokenizer, prompts):
    return reference(load_tiny(), tokenizer, prompts)


def check(topology, prompts, wanted, *, modes=tuple(MODES), drafts=(0, 2), tag=""):
    """Every mode, without drafts and with two."""
    for mode, k in itertools.product(modes, drafts):
        options = {"sampled": MODES[mode], "num_drafts": k, "max_tokens": MAX_TOKENS}
        outcomes = topology.generate(requests_for(prompts, tag=f"{tag}{mode}-{k}-", **options))
        assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
        assert [outcome.token_ids for outcome in outcomes] == wanted[mode], (mode, k)
        if k == 0:
            assert not any(outcome.stats.num_draft_tokens for outcome in outcomes if outcome.stats)
    topology.wait_idle()


@pytest.mark.parametrize(("tp_prefill", "tp_decode", "data_path"), CELLS)
def test_same_tokens(tp_prefill, tp_decode, data_path, processes, prompts, wanted):
    with TPGroupTopology(processes, TINY, tp_prefill, tp_decode, data_path=data_path) as topology:
        check(topology, prompts, wanted)


@pytest.mark.parametrize(
    ("tp_prefill", "tp_decode", "num_kv_heads", "block_sizes"),
    [
        (2, 2, 1, (16, 64)),
        pytest.param(1, 2, 1, (64, 16), marks=pytest.mark.slow),
        pytest.param(4, 1, 2, (16, 16), marks=pytest.mark.slow),
        pytest.param(2, 4, 2, (64, 16), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("data_path", ["raw", pytest.param("shm", marks=pytest.mark.slow)])
def test_replicated_heads_and_other_block_sizes(
    data_path, tp_prefill, tp_decode, num_kv_heads, block_sizes, processes, tiny_checkpoint
):
    """With fewer KV heads than ranks, some ranks push nothing of their own, and some heads land at several."""
    path = tiny_checkpoint(num_heads=8, num_kv_heads=num_kv_heads, tokenizer=True)
    model = load_model(path, dtype=torch.float64, device=CPU, numerics=Numerics.DEFAULT, with_mtp=True)
    prompts = [tuple(prompt(length, seed=length).tolist()) for length in (1, 16, 33, 64, 90)]
    wanted = reference(model, Tokenizer.from_directory(path), prompts)
    with TPGroupTopology(
        processes, path, tp_prefill, tp_decode, data_path=data_path, block_sizes=block_sizes
    ) as topology:
        check(topology, prompts, wanted)


@pytest.mark.parametrize(("tp_prefill", "tp_decode"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_every_parameter_where_ranks_share_the_vocabulary(
    tp_prefill, tp_decode, processes, load_tiny, tokenizer, prompts
):
    """Tokens are chosen at no rank alone; the reference has whole rows."""

    def asked(k, tag):
        requests = []
        schema = {"schema": {"grammar": SCHEMA, "ignore_eos": False, "frequency_penalty": 0.5}}
        for at, (kind, values) in enumerate((KINDS | schema).items()):
            params = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": at, "ignore_eos": True} | values
            requests.append(request_of(prompts[at], SamplingParams(**params), k, f"{tag}{kind}"))
        return requests

    expected = local_tokens(load_tiny(), tokenizer, asked(0, "alone-"))
    with TPGroupTopology(processes, TINY, tp_prefill, tp_decode) as topology:
        for k in (0, 2):
            outcomes = topology.generate(asked(k, f"{k}-"))
            assert [outcome.error for outcome in outcomes] == [None] * (len(KINDS) + 1)
            assert [outcome.token_ids for outcome in outcomes] == expected
        # The same from tokens of an earlier attempt, which every rank must count alike.
        cuts = [len(outcome.token_ids) // 2 for outcome in outcomes]
        again = [going_on(*one, 2) for one in zip(asked(2, "on-"), outcomes, cuts, strict=True)]
        assert [one.token_ids for one in topology.generate(again)] == [
            tokens[cut:] for tokens, cut in zip(expected, cuts, strict=True)
        ]
        topology.wait_idle()


@pytest.mark.parametrize("data_path", [pytest.param("raw", marks=pytest.mark.slow), "shm"])
def test_cancelled_requests_leave_nothing_at_any_rank(data_path, processes, prompts, wanted):
    """Cancelled before, during and after their incoming transfer; those that follow in the same blocks are right."""
    with TPGroupTopology(processes, TINY, 2, 2, data_path=data_path, chunk_len=16) as topology:
        for turn, wait_s in enumerate((0.0, 0.01, 0.03, 0.1, 0.3)):
            options = {"sampled": True, "num_drafts": 2, "max_tokens": 200}
            started = [topology.start(request) for request in requests_for(prompts, tag=f"gone{turn}-", **options)]
            time.sleep(wait_s)
            for running in started:
                topology.cancel(running)
        topology.wait_idle()
        check(topology, prompts, wanted, modes=("coupled",), drafts=(2,))


@pytest.mark.slow
def test_invariant_numerics_in_float32(processes, load_tiny, tokenizer, prompts):
    """Bit for bit: the same tokens in float32 whatever the number of ranks on either side."""
    numerics = {"dtype": torch.float32, "numerics": Numerics.INVARIANT}
    wanted = reference(load_tiny(**numerics), tokenizer, prompts)
    with TPGroupTopology(processes, TINY, 2, 1, **numerics) as topology:
        check(topology, prompts, wanted, modes=("coupled",), drafts=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_that_dies_ends_its_worker_by_name(role, processes, prompts):
    with contextlib.suppress(EndOfTest), TPGroupTopology(processes, TINY, 2, 2) as topology:
        options = {"sampled": True, "num_drafts": 2, "max_tokens": 100}
        for request in requests_for(prompts, tag="before-", **options):
            topology.start(request)
        lead, follower = getattr(topology, role)
        follower.process.kill()
        for request in requests_for(prompts, tag="after-", **options):  # else nobody need notice
            topology.start(request)
        kind, why = lead.answers.get(timeout=1.0)
        assert kind == "fatal"
        assert "WorkerLost" in why
        assert "rank 1 of 2 has died" in why
        raise EndOfTest  # the processes are not to be used again
