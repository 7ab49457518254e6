"""One token of each row: the kernels, in the interpreter, and their reference against the engine's sampler."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.engine.sampling.sampler import sample as engine_sample
from baton.kernels.implementation import Implementation
from baton.kernels.sampling import bounds_triton
from baton.kernels.sampling.rows import DrawRows, EditedRows
from baton.kernels.sampling.sample import sample
from baton.tests.kernels.harness import Guards, assert_deterministic, strided
from baton.tests.kernels.sampling_cases import drawn_rows, sampling_of, small_tiles  # noqa: F401

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE


def logits_of(generator, rows, vocab_size, dtype=torch.bfloat16, scale=3.0):
    return (torch.randn(rows, vocab_size, generator=generator) * scale).to(dtype)


def check(logits_BV, rows, both=True):
    wanted_B = engine_sample(logits_BV.float(), sampling_of(rows), rows.position_B)
    assert sample(logits_BV, rows, implementation=REFERENCE).tolist() == wanted_B.tolist()
    if both:
        assert sample(logits_BV, rows, implementation=TRITON).tolist() == wanted_B.tolist()


@pytest.mark.parametrize("vocab_size", [1, 3, 130])
def test_greedy_and_drawn_rows_are_the_engines(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    check(logits_of(generator, 6, vocab_size), drawn_rows(generator, [0, 0.5, 1, 2, 1e-30, 30]))


def test_equal_logits_go_to_the_lowest_id_or_to_the_noise():
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.zeros(3, 200)
    logits_BV[2, 7::11] = 1.0
    check(logits_BV, drawn_rows(generator, [0, 1, 0]))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "scale"),
    [(5, 1.0, 0.0, 3), (20, 0.7, 0.0, 3), (0, 0.6, 0.0, 6), (0, 1.0, 0.05, 3), (9, 0.9, 0.02, 3), (1, 0.5, 0.9, 3)],
)
def test_a_row_is_cut_where_the_engine_cuts_it(top_k, top_p, min_p, scale):
    generator = torch.Generator().manual_seed(top_k)
    rows = drawn_rows(
        generator,
        [0.8, 1.5, 0.0],
        top_k_B=torch.full((3,), top_k),
        top_p_B=torch.full((3,), top_p, dtype=torch.float64),
        min_p_B=torch.full((3,), min_p, dtype=torch.float64) if min_p else None,
    )
    check(logits_of(generator, 3, 300, scale=scale), rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(6))
def test_a_border_behind_the_list_is_closed_in(seed, dtype):
    """Flat rows, long runs of equals, and more tokens to keep than are listed."""
    generator = torch.Generator().manual_seed(seed)
    logits_BV = logits_of(generator, 4, 300, dtype, 1.0)
    logits_BV[1] = (logits_BV[1] * 2).round() / 2
    logits_BV[2] = 0.25
    rows = drawn_rows(
        generator,
        [1.0, 0.7, 1.0, 2.0],
        top_k_B=torch.tensor([0, 90, 70, 150]),
        top_p_B=torch.tensor([0.9, 0.8, 0.5, 0.95], dtype=torch.float64),
        min_p_B=torch.tensor([0, 0, 0, 0.1], dtype=torch.float64),
    )
    check(logits_BV, rows)


@pytest.mark.long
@pytest.mark.fast
@pytest.mark.parametrize("cut", ["top_k_B", "top_p_B", "min_p_B"])
def test_a_row_without_any_token_gives_the_first_whoever_chooses(cut):
    """As where a grammar and other masks leave nothing: what is said is wrong, but the same, and a token."""
    generator = torch.Generator().manual_seed(8)
    number = torch.full((3,), 2) if cut == "top_k_B" else torch.full((3,), 0.5, dtype=torch.float64)
    rows, logits_BV = drawn_rows(generator, [0.0, 0.7, 1.0], **{cut: number}), torch.full((3, 70), -torch.inf)
    check(logits_BV, rows)
    assert sample(logits_BV, rows, implementation=TRITON).tolist() == [0, 0, 0]


def test_what_stays_is_what_the_engine_keeps():
    """The bounds themselves, of a row whose border lies among equals."""
    logits_1V = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    rows = DrawRows(
        temperature_B=torch.ones(1, dtype=torch.float64),
        seed_B=torch.zeros(1, dtype=torch.int64),
        choice_B=torch.zeros(1, dtype=torch.int64),
        position_B=torch.zeros(1, dtype=torch.int64),
        top_k_B=torch.tensor([3]),
    )
    bound_R, last_R = torch.empty(1), torch.empty(1, dtype=torch.int32)
    bounds_triton.launch(logits_1V[:, None], rows, None, None, bound_R, last_R)
    assert (bound_R.tolist(), last_R.tolist()) == ([2.0], [3])


def test_a_token_does_not_depend_on_its_place_or_its_neighbours():
    generator = torch.Generator().manual_seed(3)
    logits_BV, rows = logits_of(generator, 4, 150), drawn_rows(generator, [1.0, 0.0, 0.6, 1.0])
    found = sample(logits_BV, rows, implementation=TRITON).tolist()
    turned = DrawRows(
        **{name: getattr(rows, name).flip(0) for name in ("temperature_B", "seed_B", "choice_B", "position_B")}
    )
    assert sample(logits_BV.flip(0), turned, implementation=TRITON).tolist() == found[::-1]


def test_rows_may_be_strided_and_nothing_beside_them_is_touched():
    generator = torch.Generator().manual_seed(4)
    logits_BV, rows = logits_of(generator, 3, 70), drawn_rows(generator, [1.0, 0.0, 0.6])
    wanted = sample(logits_BV, rows, implementation=REFERENCE).tolist()
    assert sample(strided(logits_BV), rows, implementation=TRITON).tolist() == wanted
    guards = Guards()
    guarded = guards.copy(logits_BV)
    found = assert_deterministic(lambda: sample(guarded, rows, implementation=TRITON), guarded)
    guards.check()
    assert found.tolist() == wanted


def test_edited_rows_stand_for_the_models():
    generator = torch.Generator().manual_seed(5)
    logits_BV, rows = logits_of(generator, 3, 90), drawn_rows(generator, [1.0, 0.0, 0.6])
    edited = EditedRows(logits_EV=torch.randn(2, 90, generator=generator), place_R=torch.tensor([1, -1, 0]).int())
    whole_BV = logits_BV.float()
    whole_BV[0], whole_BV[2] = edited.logits_EV[1], edited.logits_EV[0]
    wanted = sample(whole_BV, rows, implementation=REFERENCE).tolist()
    for implementation in (TRITON, REFERENCE):
        assert sample(logits_BV, rows, edited=edited, implementation=implementation).tolist() == wanted


@pytest.mark.fast
def test_arguments_that_do_not_fit_are_named():
    generator = torch.Generator().manual_seed(6)
    logits_BV, rows = logits_of(generator, 2, 9), drawn_rows(generator, [1.0, 0.0])
    short = drawn_rows(generator, [1.0])
    for logits, given, name in (
        (logits_BV.double(), rows, "logits_BV"),
        (logits_BV[0], rows, "logits_BV"),
        (logits_BV.T.contiguous().T, rows, "logits_BV"),
        (logits_BV, short, "temperature_B"),
    ):
        with pytest.raises(KernelArgumentInvalid, match=name):
            sample(logits, given, implementation=TRITON)
