"""Rejection sampling is exact: what is emitted has the target's law, whatever is drafted, and a bias is caught."""

import pytest
import torch

from baton.engine.speculation import rejection
from baton.tests.engine import rejection_reference as reference
from baton.tests.engine.law import distance, emitted_law

TOLERANCE = 1e-6
KINDS = [("point", False), ("drawn", False), ("drawn", True)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gap(world, num_drafts, *, length=None, **options):
    """How far the emitted law is from the target's."""
    length = num_drafts + 1 if length is None else length
    law, mean_len = emitted_law(world, num_drafts, length=length, **options)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    return distance(law, reference.target_law(world, length)), mean_len


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(8, 0), (8, 1), (5, 2), (3, 3), (2, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_the_law_is_the_targets(kind, block, vocab_size, num_drafts, seed):
    world = reference.World(vocab_size, f"law {seed}", sharp=1.0 + seed)
    assert gap(world, num_drafts, is_point=kind == "point", block=block)[0] < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(8, 2), (8, 3), (4, 3)])
@pytest.mark.parametrize("seed", range(2))
def test_the_law_is_the_targets_with_more_tokens(kind, block, vocab_size, num_drafts, seed):
    world = reference.World(vocab_size, f"larger {seed}")
    assert gap(world, num_drafts, is_point=kind == "point", block=block)[0] < TOLERANCE


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize("head_tokens", [[4, 1, 2], [3]])
def test_the_law_is_the_targets_with_a_pruned_vocabulary(kind, block, head_tokens):
    world = reference.World(6, "pruned", head_tokens)
    assert gap(world, 2, is_point=kind == "point", block=block)[0] < TOLERANCE


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "head_tokens", "num_ranks"),
    [(8, 1, None, 3), (5, 2, None, 2), (5, 2, [4, 1, 2], 4), (3, 2, None, 8)],
)
@pytest.mark.long
def test_the_law_is_the_targets_where_ranks_share_it(kind, block, vocab_size, num_drafts, head_tokens, num_ranks):
    world = reference.World(vocab_size, "ranks", head_tokens)
    error, mean_len = gap(world, num_drafts, is_point=kind == "point", block=block, num_ranks=num_ranks)
    assert error < TOLERANCE
    alone, same_len = gap(world, num_drafts, is_point=kind == "point", block=block)
    assert alone < TOLERANCE
    assert mean_len == pytest.approx(same_len, abs=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize("num_usable", [0, 1, 2])
def test_the_law_is_the_targets_under_a_cap(kind, block, num_usable):
    world = reference.World(3, "cap")
    assert gap(world, 3, is_point=kind == "point", block=block, num_usable=num_usable)[0] < TOLERANCE


@pytest.mark.fast
@pytest.mark.parametrize("block", [False, True])
def test_drafts_from_the_targets_own_law_all_stand(block):
    world = reference.World(4, "same", zeros=0.0)
    world.q = world.p
    error, mean_len = gap(world, 2, is_point=False, block=block)
    assert error < TOLERANCE
    assert mean_len == pytest.approx(3.0, abs=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("seed", range(3))
def test_a_block_accepts_at_least_as_many(seed):
    world = reference.World(4, f"block {seed}")
    _, by_token = gap(world, 2, is_point=False, block=False)
    _, by_block = gap(world, 2, is_point=False, block=True)
    assert by_block >= by_token - 1e-6


# --- what a bias looks like -------------------------------------------------------------------------------------------


def is_caught(world, num_drafts, **options):
    try:
        return gap(world, num_drafts, **options)[0] > 100 * TOLERANCE
    except AssertionError:
        return True


def no_residual(p_SV, q_SV, reach_S):
    return p_SV


def absolute_residual(p_SV, q_SV, reach_S):
    return (p_SV * reach_S[:, None] - q_SV).abs()


def residual_without_reach(p_SV, q_SV, reach_S):
    return (p_SV - q_SV).clamp(min=0.0)


def chances_of_p(p_SK, q_SK):
    return p_SK


def generous_chances(p_SK, q_SK):
    return (p_SK / q_SK * 1.001).clamp(max=1.0)


def reach_without_limit(p_SK, q_SK):
    return torch.nn.functional.pad((p_SK / q_SK).cumprod(dim=1), (1, 0), value=1.0)


def no_leftover(reach_SQ, leftover_SK):
    return reach_SQ[:, 1:]


def shifted_leftover(reach_SQ, leftover_SK):
    missing_SK = 1.0 - reach_SQ[:, :-1]
    return leftover_SK / (leftover_SK + missing_SK)


def not_normalised(weights_SV, uniform_S):
    """Inverse CDF of weights that do not sum to 1; what lies past the sum falls to the last token."""
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    return (cumulative_SV <= uniform_S[:, None]).sum(dim=-1).clamp(max=weights_SV.shape[1] - 1)


def next_token_along(weights_SV, uniform_S):
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    chosen = (cumulative_SV <= uniform_S[:, None] * cumulative_SV[:, -1:]).sum(dim=-1)
    return (chosen + 1) % weights_SV.shape[1]


MUTANTS = [
    ("residual_weights", no_residual, False),
    ("residual_weights", absolute_residual, False),
    ("residual_weights", no_residual, True),
    ("residual_weights", residual_without_reach, True),
    ("accept_chances", chances_of_p, False),
    ("accept_chances", generous_chances, False),
    ("block_reach", reach_without_limit, True),
    ("block_chances", no_leftover, True),
    ("block_chances", shifted_leftover, True),
    ("pick", not_normalised, False),
    ("pick", not_normalised, True),
    ("pick", next_token_along, False),
]


@pytest.mark.fast
@pytest.mark.parametrize(("name", "mutant", "block"), MUTANTS)
@pytest.mark.long
def test_a_wrong_rule_is_caught(name, mutant, block, monkeypatch):
    world = reference.World(4, "mutant", zeros=0.0)
    options = {"is_point": False, "block": block}
    assert not is_caught(world, 2, **options)
    monkeypatch.setattr(rejection, name, mutant)
    assert is_caught(world, 2, **options)


@pytest.mark.fast
def test_the_likeliest_draft_with_the_whole_softmax_as_its_law_is_caught(monkeypatch):
    """The bug of another server: the proposal is an argmax, and verification is told the softmax it was taken from."""
    world = reference.World(5, "top-1", zeros=0.0)
    options = {"is_point": False, "block": False}
    assert not is_caught(world, 1, **options)

    def likeliest_only(world, num_drafts, is_point):
        drafts = (world.likeliest(()),)
        return [(drafts, 1.0)]

    monkeypatch.setattr(reference, "draft_paths", likeliest_only)
    assert is_caught(world, 1, **options)


@pytest.mark.fast
def test_drafts_at_another_temperature_than_told_are_caught():
    world = reference.World(5, "temperature", zeros=0.0)

    def sharper(drafts, place):
        weights = [chance**2 for chance in world.q(drafts[:place])]
        return [weight / sum(weights) for weight in weights]

    assert is_caught(world, 1, is_point=False, block=False, claim=sharper)


# --- the pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_pick_is_the_inverse_of_the_distribution_function_on_a_grid():
    weights = [0.0, 3.0, 0.0, 1.0, 2.0, 0.0, 0.5, 0.0]
    law = [weight / sum(weights) for weight in weights]
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    picked = rejection.pick(torch.tensor(weights).expand(len(grid), -1), grid).tolist()
    assert picked == [reference.inverse(law, float(u)) for u in grid]
    ends = torch.tensor([2.0**-33, 1.0 - 2.0**-33], dtype=torch.float64)
    assert rejection.pick(torch.tensor([weights, weights]), ends).tolist() == [1, 6]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_is_left_over_the_target_is_sampled(dtype):
    p_SV = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=dtype)
    weights_SV = rejection.or_target(torch.zeros_like(p_SV), p_SV)
    picked = [int(rejection.pick(weights_SV, torch.tensor([u]))) for u in (0.1, 0.3, 0.7, 0.99)]
    assert picked == [0, 2, 2, 3]
