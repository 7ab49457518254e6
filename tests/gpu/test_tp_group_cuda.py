"""A TP group over NCCL: what the group does, and tokens of two GPUs equal to those of one. Each rank is a process."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.sampling.decision_reference import DIVERGED
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.engine.test_tp_group import CHECKPOINT, generate, load, runner_of
from baton.tests.gpu.tp_group_ranks import (
    GpuRanks,
    K,
    diverge,
    leave_a_rank_waiting,
    use_decisions,
    use_exchange,
    use_group,
    use_model,
    use_vocab,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def ranks():
    started = GpuRanks()
    yield started
    started.close()


def test_the_group_adds_broadcasts_and_carries_bytes(ranks):
    for total, parts, told, said, broadcast_us in ranks.run(use_group):
        assert total == [3.0]
        assert parts == [[[0, 7]], [[1, 7]]]
        assert told == [0, 1, 2, 3]
        assert said == ([b"\0", b"\1"], b"from 0")
        print(f"broadcast of a decision: {broadcast_us:.1f} us, launched one by one")


@pytest.mark.parametrize("seed", range(4))
def test_what_crosses_through_shared_memory_has_the_bits_of_the_reference(seed, ranks):
    for how, bad, replayed in ranks.run(use_exchange, seed):
        assert how.startswith("ranks exchange up to 4 MiB through memory")
        assert (bad, replayed) == ([], [])


def test_a_rank_that_leaves_its_group_waits_for_no_other():
    alone = GpuRanks()
    try:
        assert alone.run(leave_a_rank_waiting)[0] == (True, True)
    finally:
        alone._kill()


def test_decisions_are_the_references_and_agreed_in_graphs_too(ranks):
    for found in ranks.run(use_decisions):
        assert found == [(True, True)] * 5


@pytest.mark.parametrize("what", ["values", "state", "order", "number"])
def test_a_rank_that_diverged_finds_no_value_and_is_told(what, ranks):
    (own, is_told, is_agreed), (others, other_is_told, other_is_agreed) = ranks.run(diverge, what)
    assert not is_told and DIVERGED not in own
    assert other_is_told and others == [DIVERGED] * len(own)
    assert is_agreed and other_is_agreed  # the next decision is one again


@pytest.mark.parametrize("vocab_size", [151_936, 1003])
def test_tokens_are_chosen_among_ranks(vocab_size, ranks):
    for is_right, is_kept_alike, num_operations, graph_us in ranks.run(use_vocab, vocab_size, 8):
        assert is_right
        assert is_kept_alike
        assert num_operations == 1
        print(f"argmax of 8 rows of {vocab_size}: {graph_us:.1f} us, in a graph")


@pytest.mark.parametrize("mode", ["greedy", "coupled", "cut", "everything"])
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [(torch.float64, Numerics.DEFAULT), (torch.float32, Numerics.INVARIANT), (torch.bfloat16, Numerics.INVARIANT)],
)
def test_two_gpus_give_the_tokens_of_one(dtype, numerics, mode, tiny_checkpoint, ranks):
    path = tiny_checkpoint(**CHECKPOINT)
    one = load(path, None, dtype, numerics, torch.device("cuda", 0))
    wanted = generate(runner_of(one, K), K, mode)
    assert ranks.run(use_model, path, dtype, numerics, mode) == [wanted, None]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_two_gpus_give_the_tokens_of_one_in_a_published_shape(mode, tmp_path, ranks):
    """With random weights in bfloat16, whose tokens any bit may change."""
    path = write_shape("qwen3-8b", tmp_path, num_hidden_layers=3)
    options = {"dtype": torch.bfloat16, "numerics": Numerics.INVARIANT, "random_seed": 0}
    one = load_model(path, device=torch.device("cuda", 0), with_mtp=True, **options)
    wanted = generate(runner_of(one, K), K, mode)
    del one
    assert ranks.run(use_model, path, torch.bfloat16, Numerics.INVARIANT, mode, 0) == [wanted, None]
