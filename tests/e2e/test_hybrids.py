"""Models with state or latents, with MTP heads, in float64: nothing about how they are served changes a token.

Drafts of any number, chunks, hand-off, ranks on either side, preemption and asynchronous steps, all against one plain
run: no drafts, no chunks, no hand-off, one rank, one step after the other. A bit of state that is damaged on its way is
noticed. Without an MTP head, `test_families` has the same families.
"""

import itertools
from functools import cache

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.kvcache.layout import Keep
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for
from baton.tests.e2e.test_async_equals_sync import PREEMPTIONS, sizes_of
from baton.tests.e2e.test_same_tokens import WHOLE
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.e2e.tp_groups import TPGroupTopology
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.deepseek_checkpoints import DEEPSEEKS
from baton.tests.model.harness import prompt
from baton.tests.model.hybrid_checkpoints import HYBRIDS

MODEL = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
LENS = (1, 2, 15, 16, 17, 33, 48, 60)  # about the ends of tiles
MAX_TOKENS = 20
MODES = {"greedy": False, "coupled": True}
KINDS = (*HYBRIDS, *DEEPSEEKS)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    @cache
    def write(kind):
        return write_checkpoint(tmp_path_factory.mktemp(kind), kind=kind, layers=3, tokenizer=True)

    return write


@pytest.fixture(scope="module")
def model_of(path_of):
    return cache(lambda kind: load_model(path_of(kind), **MODEL))


@pytest.fixture(scope="module")
def words(path_of):
    return Tokenizer.from_directory(path_of("qwen3_5"))


def asked(mode, k, tag=""):
    prompts = [tuple(prompt(length, seed=length).tolist()) for length in LENS]
    return requests_for(prompts, sampled=MODES[mode], num_drafts=k, max_tokens=MAX_TOKENS, tag=tag)


@pytest.fixture(scope="module")
def one_plain_run(model_of, words):
    @cache
    def run(kind, mode):
        engine = LocalEngine(model_of(kind), words, **sizes_of(0, WHOLE, scheduling="sync"))
        tokens = [list(result.token_ids) for result in engine.generate(asked(mode, 0))]
        assert len({token for text in tokens for token in text}) > 30, "texts say too little"
        return tokens

    return run


def marked(cells, default):
    """The slow ones among cells."""
    return [pytest.param(*cell, marks=[] if cell in default else [pytest.mark.slow]) for cell in cells]


DRAFTS = (0, 1, 2, 3, 4, 6)
HANDED_OVER = list(itertools.product(KINDS, MODES, DRAFTS, (7, 16, WHOLE)))


@pytest.mark.parametrize(
    ("kind", "mode", "k", "chunk_len"),
    marked(
        HANDED_OVER,
        {
            ("qwen3_5", "greedy", 3, 7),
            ("qwen3_5_moe", "coupled", 1, 16),
            ("qwen3_next", "greedy", 6, 7),
            ("deepseek_v3", "coupled", 3, 7),
            ("glm4_moe", "greedy", 1, 16),
        },
    ),
)
def test_disaggregated_tokens_are_those_of_one_plain_run(kind, mode, k, chunk_len, model_of, words, one_plain_run):
    with Topology(model_of(kind), words, num_decode=2, num_drafts=k, chunk_len=chunk_len) as topology:
        outcomes = topology.generate(asked(mode, k))
        topology.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(LENS)
    assert [outcome.token_ids for outcome in outcomes] == one_plain_run(kind, mode)
    stats = [outcome.decode_stats for outcome in outcomes if outcome.decode_stats]  # of those that a token did not end
    assert (sum(one.num_draft_tokens for one in stats) > 0) == (k > 0)


SCHEDULED = list(itertools.product(KINDS, MODES, DRAFTS, PREEMPTIONS, (16, WHOLE), (1, 2)))
SCHEDULED_DEFAULT = {
    ("qwen3_5", "coupled", 2, "to host memory", 16, 2),
    ("qwen3_5", "greedy", 4, "computed again", 16, 1),
    ("qwen3_5_moe", "greedy", 3, "to host memory", 16, 1),
    ("qwen3_next", "coupled", 1, "computed again", WHOLE, 2),
    ("deepseek_v3", "greedy", 3, "to host memory", 16, 2),
    ("deepseek_v3", "coupled", 4, "computed again", 16, 1),
    ("glm4_moe", "coupled", 2, "to host memory", WHOLE, 1),
}


@pytest.mark.parametrize(("kind", "mode", "k", "preemption", "chunk_len", "tp"), marked(SCHEDULED, SCHEDULED_DEFAULT))
def test_asynchronous_tokens_are_those_of_one_plain_run(
    kind, mode, k, preemption, chunk_len, tp, path_of, model_of, words, one_plain_run
):
    options = sizes_of(k, chunk_len, scheduling="async", **PREEMPTIONS[preemption])

    def work(engine):
        return engine.generate(asked(mode, k)), engine.preemptions

    if tp == 1:
        results, preempted = work(LocalEngine(model_of(kind), words, **options))
    else:
        results, preempted = run_over_ranks(tp, path_of(kind), words, work, model=MODEL, **options)
    assert [list(result.token_ids) for result in results] == one_plain_run(kind, mode)
    assert (preempted.num_preemptions > 0) == (preemption != "stays")
    assert (preempted.num_offloaded_blocks > 0) == (preemption == "to host memory")


SIZES = list(itertools.product(KINDS, (1, 2), (1, 2), ("raw", "shm")))
SIZES_DEFAULT = {
    ("qwen3_5_moe", 1, 2, "shm"), ("qwen3_next", 2, 1, "raw"), ("deepseek_v3", 2, 2, "raw"),
    ("deepseek_v3", 2, 1, "shm"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "tp_prefill", "tp_decode", "data_path"), marked(SIZES, SIZES_DEFAULT))
def test_ranks_on_either_side_change_no_token(
    kind, tp_prefill, tp_decode, data_path, path_of, processes, one_plain_run
):
    """State crosses by ranges of key heads, latents by ranges of positions."""
    with TPGroupTopology(
        processes, path_of(kind), tp_prefill, tp_decode, data_path=data_path, chunk_len=24
    ) as topology:
        for mode, k in (("greedy", 0), ("greedy", 3), ("coupled", 2)):
            outcomes = topology.generate(asked(mode, k, tag=f"{mode}-{k}-"))
            assert [outcome.error for outcome in outcomes] == [None] * len(LENS)
            assert [outcome.token_ids for outcome in outcomes] == one_plain_run(kind, mode), (mode, k)
        topology.wait_idle()


@pytest.mark.parametrize("keep", [Keep.SNAPSHOT, Keep.TAIL, Keep.WINDOW])
def test_a_flipped_bit_of_pushed_state_is_refused_and_pushed_again(keep, model_of, words, one_plain_run):
    with Topology(model_of("qwen3_5"), words, num_drafts=2, chunk_len=24) as topology:
        decode = topology.decode[0]
        io, flipped = decode.incoming._host.driver._io, []
        digest = io.digest

        def flip_one(blocks, span):
            if not flipped and decode.pool.layout.layers[span.layer].keep is keep:
                geometry = decode.pool.geometry.layer(span.layer)
                row = span.first % geometry.rows_per_block
                block = blocks[span.first // geometry.rows_per_block]
                place = geometry.offset_bytes + block * geometry.block_bytes + row * geometry.row_bytes
                decode.pool.data_bytes[place + 9] ^= 4
                flipped.append(span)
            return digest(blocks, span)

        io.digest = flip_one
        outcomes = topology.generate(asked("greedy", 2))
        topology.wait_idle()
        assert flipped
        assert decode.incoming.inventory()["frames_corrupt"] == 1
    assert [outcome.token_ids for outcome in outcomes] == one_plain_run("qwen3_5", "greedy")
