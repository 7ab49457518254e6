"""Prefixes of models that keep state: a prompt that begins with a checkpoint says what it says when all is computed.

Prompts begin alike, by 0 to 90 %, at and around the ends of blocks and tiles, alone and many at once; with drafts, a
tight pool, preemption, steps ahead of the host, hand-off and ranks; each against one plain run: no cache, no drafts, no
chunks, one step after the other. Tokens alone would not show a wrong draft entry, so accepted drafts are compared too.
"""

import dataclasses
import itertools
from functools import cache

import pytest
import torch

from baton.core.errors import RequestCancelled
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for
from baton.tests.e2e.test_async_equals_sync import sizes_of
from baton.tests.e2e.test_hybrids import marked
from baton.tests.e2e.test_same_tokens import WHOLE, pairwise
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_groups import TPGroupTopology
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.harness import prompt
from baton.tests.model.hybrid_checkpoints import HYBRIDS

FLOAT64 = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
INVARIANT = {**FLOAT64, "dtype": torch.float32, "numerics": Numerics.INVARIANT}
MAX_TOKENS = 20
MODES = {"greedy": False, "coupled": True}
BASE_LEN = 120
FORKS = ((0, 75), (16, 64), (64, 20), (65, 30), (79, 34), (80, 31), (96, 9), (108, 12))  # shared, own; and some ends
ENDS = (17, 73, 96, 120)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    @cache
    def write(kind):
        return write_checkpoint(tmp_path_factory.mktemp(kind), kind=kind, layers=3, tokenizer=True)

    return write


@pytest.fixture(scope="module")
def model_of(path_of):
    return cache(lambda kind: load_model(path_of(kind), **FLOAT64))


@pytest.fixture(scope="module")
def words(path_of):
    return Tokenizer.from_directory(path_of("qwen3_5"))


def prompts():
    """A, B, A with others between: those that begin alike, and two again whose last block has a checkpoint."""
    base = prompt(BASE_LEN, seed=1).tolist()
    forks = [base[:shared] + prompt(own, seed=shared + 2).tolist() for shared, own in FORKS]
    return [tuple(one) for one in (*forks, *(base[:end] for end in ENDS), forks[3], base)]


def asked(mode, k, tag=""):
    return requests_for(prompts(), sampled=MODES[mode], num_drafts=k, max_tokens=MAX_TOKENS, tag=tag)


@pytest.fixture(scope="module")
def one_plain_run(model_of, words):
    @cache
    def run(kind, mode):
        engine = LocalEngine(model_of(kind), words, **sizes_of(0, WHOLE, scheduling="sync"))
        tokens = [list(result.token_ids) for result in engine.generate(asked(mode, 0))]
        assert len({token for text in tokens for token in text}) > 30, "texts say too little"
        return tokens

    return run


def accepted(outcome):
    stats = outcome.decode_stats
    return stats and (stats.num_verify_steps, stats.num_draft_tokens, stats.num_accepted_tokens)


def check_empty(*sides):
    """No slot is a sequence's or in between, and none is lost."""
    for side in sides:
        allocator = side.worker.engine.scheduler.allocator
        checkpoints = allocator.index.checkpoints
        assert allocator.state_slots.num_held == allocator.state_slots.num_quarantined == 0
        assert checkpoints.num_filling == checkpoints.num_in_use == 0
        assert len(checkpoints) + len(checkpoints._free) == checkpoints.num_slots


def hits_of(*sides):
    return sum(side.worker.engine.scheduler.num_prefix_hits for side in sides)


def with_default(cells, default):
    """Those that are run by default, and the others, which are slow."""
    return marked([*sorted(default), *(cell for cell in cells if cell not in default)], default)


PRESSURES = {
    "none": {},
    "computed again": {"preempt_at": (0, 5)},
    "to host memory": {"preempt_at": (0, 5), "host_kv_bytes": 4 << 20},
    "few blocks": {"num_blocks": 11, "overcommit": True, "preempt_at": (5,)},
    "few checkpoints": {"num_checkpoints": 2},
}
CELLS = pairwise(list(itertools.product(HYBRIDS, MODES, (0, 1, 2, 3, 4), ("async", "sync"), PRESSURES, (20, WHOLE))))
DEFAULT = {
    ("qwen3_5", "greedy", 2, "async", "none", 20),
    ("qwen3_5", "coupled", 4, "async", "computed again", 20),
    ("qwen3_5", "greedy", 1, "async", "few blocks", 20),
    ("qwen3_5_moe", "greedy", 3, "sync", "few checkpoints", WHOLE),
    ("qwen3_next", "coupled", 0, "sync", "to host memory", 20),
    ("qwen3_next", "greedy", 3, "async", "few checkpoints", 20),
}


@pytest.mark.parametrize(
    ("kind", "mode", "k", "scheduling", "pressure", "chunk_len"),
    with_default(CELLS, DEFAULT),
)
def test_tokens_are_those_of_one_plain_run(
    kind, mode, k, scheduling, pressure, chunk_len, model_of, words, one_plain_run
):
    """A worker that computes prompts and decodes: one after the other, then all at once."""
    options = {"num_drafts": k, "scheduling": scheduling, "chunk_len": chunk_len, "max_num_seqs": 6}
    with Topology(model_of(kind), words, num_prefill=0, **options | PRESSURES[pressure]) as topology:
        alone = [topology.finish(topology.start_local(request)) for request in asked(mode, k, "a")]
        running = [topology.start_local(request) for request in asked(mode, k, "b")]
        together = [topology.finish(one) for one in running]
        topology.wait_idle()
        check_empty(*topology.decode)
        num_hits = hits_of(*topology.decode)
        counts = topology.decode[0].worker.engine.preemptions
    for outcomes in (alone, together):
        assert [outcome.error for outcome in outcomes] == [None] * len(prompts())
        assert [outcome.token_ids for outcome in outcomes] == one_plain_run(kind, mode)
    assert num_hits >= (2 if "few" in pressure else len(prompts()))
    if pressure in ("computed again", "to host memory", "few blocks"):
        assert counts.num_preemptions > 0
    assert (counts.num_restored_blocks > 0) == (pressure == "to host memory")


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_drafts_are_accepted_as_without_a_cache(k, model_of, words):
    """Draft entries of shared blocks are those that would have been computed."""
    found = []
    for num_checkpoints in (0, 24):
        options = {"num_drafts": k, "num_checkpoints": num_checkpoints, "chunk_len": 20}
        with Topology(model_of("qwen3_5"), words, num_prefill=0, **options) as topology:
            made = []
            for tag in "ab":
                outcomes = [topology.finish(topology.start_local(request)) for request in asked("greedy", k, tag)]
                made += [(outcome.token_ids, accepted(outcome)) for outcome in outcomes]
            assert (hits_of(*topology.decode) > 0) == (num_checkpoints > 0)
            found.append(made)
    assert found[0] == found[1]


HANDED_OVER = pairwise(list(itertools.product(HYBRIDS, MODES, (0, 1, 2, 3, 4), (20, WHOLE), (24, 2))))
HANDED_OVER_DEFAULT = {
    ("qwen3_5", "greedy", 2, 20, 24),
    ("qwen3_5_moe", "coupled", 3, WHOLE, 24),
    ("qwen3_next", "greedy", 1, 20, 2),
}


@pytest.mark.parametrize(
    ("kind", "mode", "k", "chunk_len", "num_checkpoints"), with_default(HANDED_OVER, HANDED_OVER_DEFAULT)
)
def test_handed_over_tokens_are_those_of_one_plain_run(
    kind, mode, k, chunk_len, num_checkpoints, model_of, words, one_plain_run
):
    """Hits at the prefill worker; rows and state cross as without. Then decode workers compute the same prompts."""
    options = {"num_drafts": k, "chunk_len": chunk_len, "num_checkpoints": num_checkpoints}
    with Topology(model_of(kind), words, num_decode=2, **options) as topology:
        made = [topology.generate(asked(mode, k, tag)) for tag in "ab"]
        made += [[topology.finish(topology.start_local(request)) for request in asked(mode, k, "c")]]
        topology.wait_idle()
        check_empty(*topology.prefill, *topology.decode)
        assert hits_of(*topology.prefill) >= (1 if num_checkpoints == 2 else len(prompts()))
    for outcomes in made:
        assert [outcome.error for outcome in outcomes] == [None] * len(prompts())
        assert [outcome.token_ids for outcome in outcomes] == one_plain_run(kind, mode)


SIZES = [(kind, *sizes) for kind, sizes in itertools.product(HYBRIDS, ((1, 2), (2, 1), (2, 2)))]


@pytest.mark.parametrize(("kind", "tp_prefill", "tp_decode"), marked(SIZES, {("qwen3_5", 2, 1)}))
def test_every_rank_copies_its_part_of_a_checkpoint(kind, tp_prefill, tp_decode, path_of, processes, one_plain_run):
    with TPGroupTopology(processes, path_of(kind), tp_prefill, tp_decode, data_path="raw", chunk_len=24) as topology:
        for tag, k in (("a", 0), ("b", 2)):
            outcomes = topology.generate(asked("greedy", k, tag))
            assert [outcome.error for outcome in outcomes] == [None] * len(prompts())
            assert [outcome.token_ids for outcome in outcomes] == one_plain_run(kind, "greedy")
        topology.wait_idle()
        assert topology.inventories()[0].num_prefix_hits >= len(prompts()) / 2


def test_invariant_float32_has_the_same_bits_behind_a_checkpoint(path_of, words):
    """Log-probabilities of every token and of those beside it, to the last bit."""
    model = load_model(path_of("qwen3_5"), **INVARIANT)

    def with_logprobs(tag):
        made = asked("greedy", 2, tag)
        return [dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, logprobs=5)) for one in made]

    with Topology(model, words, num_prefill=0, num_drafts=2, num_checkpoints=0) as topology:
        wanted = [topology.finish(topology.start_local(request)) for request in with_logprobs("a")]
    with Topology(model, words, num_prefill=0, num_drafts=2, chunk_len=20) as topology:
        for tag in "ab":
            found = [topology.finish(topology.start_local(request)) for request in with_logprobs(tag)]
            assert [outcome.logprobs for outcome in found] == [outcome.logprobs for outcome in wanted]
            assert all(outcome.logprobs for outcome in found)
        assert hits_of(*topology.decode) > len(prompts())


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_aborts_at_any_point_lose_no_slot(num_prefill, model_of, words, one_plain_run):
    with Topology(model_of("qwen3_5"), words, num_prefill=num_prefill, num_drafts=2, chunk_len=20) as topology:
        start = topology.start if num_prefill else topology.start_local
        for turn in range(3):
            running = [start(request) for request in asked("greedy", 2, f"{turn}-")]
            for at, one in enumerate(running):
                if at % 3 != turn % 3:
                    topology.cancel(one)
            for one in running:
                error = topology.finish(one).error
                assert error is None or isinstance(error, RequestCancelled)
        outcomes = [topology.finish(start(request)) for request in asked("greedy", 2, "after")]
        topology.wait_idle()
        check_empty(*topology.prefill, *topology.decode)
        assert [outcome.token_ids for outcome in outcomes] == one_plain_run("qwen3_5", "greedy")
