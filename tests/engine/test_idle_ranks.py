"""Ranks that hold different experts, and random patterns in which some have nothing to do: none hangs or diverges.

Neither where each rank attends for its own sequences alone, of which it may have none.
"""

import contextlib

import pytest
import torch

from baton.bench.actor import SpawnedRemote
from baton.bench.model_shapes import write_shape
from baton.tests.engine.idle_rank import IdleRank

AT_ONCE = 50  # patterns of one call, which has a deadline


@contextlib.contextmanager
def group_of(size, path, dp_attention):
    ranks = [SpawnedRemote(IdleRank, rank, size, str(path), dp_attention) for rank in range(size)]
    try:
        place = ranks[0].call("open")
        for wait in [rank.post("meet", *place) for rank in ranks]:
            wait()
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of latent attention with a layer of experts, and an MTP head that has them; a token's are at one rank."""
    return write_shape("tiny-mla", tmp_path_factory.mktemp("model"), num_hidden_layers=2, topk_group=1)


@pytest.fixture(scope="module")
def alone(path):
    """Patterns of a process that holds every expert, each computed once."""
    before = torch.get_num_threads()
    rank, known = IdleRank(0, 1, path), {}
    rank.lead()

    def play(seeds):
        known.update(rank.play([seed for seed in seeds if seed not in known]))
        return {seed: known[seed] for seed in seeds}

    yield play
    rank.stop()
    torch.set_num_threads(before)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dp_attention", [False, True], ids=["shared attention", "own attention"])
@pytest.mark.parametrize(
    ("size", "num_patterns"),
    [(2, 8), (4, 4), *(pytest.param(size, 1000, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_no_pattern_of_idle_ranks_hangs_or_makes_one_diverge(size, num_patterns, dp_attention, path, alone):
    """And tokens are those of one process: a hang is the deadline of a call, a rank that differs names itself."""
    with group_of(size, path, dp_attention) as ranks:
        followed = [rank.post("follow") for rank in ranks[1:]]
        ranks[0].call("lead")
        for first in range(0, num_patterns, AT_ONCE):
            seeds = range(first, min(first + AT_ONCE, num_patterns))
            assert ranks[0].call("play", seeds) == alone(seeds)
        ranks[0].call("stop")
        for wait in followed:
            wait()
        decided, passes = zip(*(rank.call("seen") for rank in ranks), strict=True)
    assert len(set(decided)) == 1
    assert decided[0][1] > num_patterns
    for of_rank in passes:
        assert of_rank[False] > num_patterns / 4, "a rank that never was idle shows nothing"
        assert of_rank[True] > num_patterns
