import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.sampler import choose, draw_noise, process_logits, sample, sampling_rows
from baton.tests.engine import reference

CPU = torch.device("cpu")


def params_of(temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def kept(logits, **values):
    """Ids that process_logits leaves over for one row."""
    logits_11V = torch.tensor([[logits]], dtype=torch.float64)
    processed = process_logits(logits_11V, sampling_rows([params_of(**values)], CPU))[0, 0]
    return [token for token, value in enumerate(processed.tolist()) if value != -math.inf]


any_params = st.builds(
    params_of,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(any_params, st.integers(0, 5000)), min_size=1, max_size=6), data=st.integers(0, 999))
def test_against_reference_and_independent_of_neighbours(rows, data):
    generator = torch.Generator().manual_seed(data)
    # Quarter steps: ties are frequent.
    logits_BV = (torch.randn(len(rows), 13, generator=generator, dtype=torch.float64) * 8).round() / 4
    position_B = torch.tensor([position for _, position in rows])
    ids = sample(logits_BV, sampling_rows([params for params, _ in rows], CPU), position_B).tolist()
    for row, (params, position) in enumerate(rows):
        assert ids[row] == reference.choose(logits_BV[row].tolist(), params, position)
        alone = sample(logits_BV[row : row + 1], sampling_rows([params], CPU), position_B[row : row + 1])
        assert alone.tolist() == [ids[row]]


@pytest.mark.fast
@settings(max_examples=100, deadline=None)
@given(params=any_params.filter(lambda item: not item.greedy), data=st.integers(0, 999))
@pytest.mark.long
def test_processed_logits_against_reference(params, data):
    generator = torch.Generator().manual_seed(data)
    logits = ((torch.randn(40, generator=generator, dtype=torch.float64) * 8).round() / 4).tolist()
    processed = process_logits(torch.tensor([[logits]], dtype=torch.float64), sampling_rows([params], CPU))[0, 0]
    expected = dict(reference.processed(logits, params))
    top = max(logits) / params.temperature
    for token, value in enumerate(processed.tolist()):
        assert value == (pytest.approx(expected[token] - top) if token in expected else -math.inf)


@pytest.mark.fast
def test_top_k_breaks_ties_by_the_lower_id():
    assert kept([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2]
    assert kept([5.0] * 1000, top_k=3) == [0, 1, 2]
    assert kept([1.0, 2.0], top_k=7) == [0, 1]
    assert kept([0.0, -0.0, 0.0], top_k=1) == [0]


@pytest.mark.fast
def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = [math.log(value) for value in (0.25, 0.5, 0.125, 0.125)]
    assert kept(logits, top_p=0.5) == [1]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.75) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]


@pytest.mark.fast
def test_top_p_counts_what_top_k_left():
    logits = [math.log(value) for value in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_k=2, top_p=0.57) == [0]  # 0.4 / 0.7 = 0.571...
    assert kept(logits, top_k=2, top_p=0.58) == [0, 1]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(dtype, temperature):
    logits_BV = torch.tensor([[0.0, 80.0, 80.5, -80.0]], dtype=dtype)
    rows = sampling_rows([params_of(temperature=temperature, seed=3)], CPU)
    assert not process_logits(logits_BV[:, None], rows).isnan().any()
    token = int(sample(logits_BV, rows, torch.tensor([1])))
    assert token == 2 if temperature < 1 else 0 <= token < 4


@pytest.mark.fast
def test_greedy_takes_the_lowest_id_among_equals():
    logits_BV = torch.zeros(5, 70_001)
    logits_BV[1, 40_000:] = 1
    logits_BV[2, [5, 69_999]] = 1
    logits_BV[3, [64, 65]] = 1
    logits_BV[4] = -torch.inf
    expected = [0, 40_000, 5, 64, 0]
    assert sample(logits_BV, None, torch.zeros(5).long()).tolist() == expected
    assert sample(logits_BV.double(), None, torch.zeros(5).long()).tolist() == expected


@pytest.mark.fast
def test_greedy_rows_read_no_noise_and_no_neighbour():
    generator = torch.Generator().manual_seed(4)
    logits_BQV = torch.randn(3, 2, 11, generator=generator)
    rows = sampling_rows([params_of(temperature=0.0), params_of(seed=9, top_k=4), params_of(temperature=0.0)], CPU)
    noise_SQV = torch.full((1, 2, 11), torch.nan)
    logits_BQV[1] = torch.nan
    ids_BQ = choose(logits_BQV, rows, noise_SQV)
    assert torch.equal(ids_BQ[[0, 2]], logits_BQV[[0, 2]].argmax(-1))
    assert rows.index_S.tolist() == [1]
    assert sampling_rows([params_of(temperature=0.0)] * 3, CPU) is None
    assert draw_noise(None, torch.zeros(3).long(), 2, 11, torch.float32) is None


@pytest.mark.fast
def test_sorting_only_where_a_row_needs_it(monkeypatch):
    def refuse(*_):
        raise AssertionError("sorted")

    monkeypatch.setattr("baton.engine.sampling.sampler.truncate", refuse)
    rows = sampling_rows([params_of(seed=1), params_of(temperature=0.0, top_k=3)], CPU)
    assert rows.truncated_U is None
    sample(torch.randn(2, 9), rows, torch.tensor([4, 4]))


@pytest.mark.fast
def test_noise_of_consecutive_positions_is_that_of_each():
    rows = sampling_rows([params_of(temperature=0.0), params_of(seed=1), params_of(seed=2)], CPU)
    noise_SPV = draw_noise(rows, torch.tensor([50, 7, 9]), 3, 6, torch.float64)
    for place, (seed, first) in enumerate([(1, 7), (2, 9)]):
        for offset in range(3):
            expected = reference.gumbel_noise(seed, first + offset, 6)
            assert noise_SPV[place, offset].tolist() == pytest.approx(expected, rel=1e-12)


def chi_square(num_draws, **values):
    """Statistic and degrees of freedom of `num_draws` tokens against the exact probabilities."""
    logits = [0.3, -1.0, 2.0, 0.7, 0.0, -2.0, 1.1]
    left = reference.processed(logits, params_of(**values))
    weights = {token: math.exp(logit) for token, logit in left}
    total = sum(weights.values())
    rows = sampling_rows([params_of(**values, seed=77)], CPU)
    logits_11V = torch.tensor([[logits]], dtype=torch.float64)
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for first in range(0, num_draws, 5000):
        noise_1PV = draw_noise(rows, torch.tensor([first]), 5000, len(logits), torch.float64)
        ids = choose(logits_11V.expand(1, 5000, -1), rows, noise_1PV)
        counts += torch.bincount(ids.flatten(), minlength=len(logits))
    expected = {token: num_draws * weight / total for token, weight in weights.items()}
    assert int(counts.sum()) == sum(int(counts[token]) for token in expected)
    statistic = sum((int(counts[token]) - value) ** 2 / value for token, value in expected.items())
    return statistic, len(expected) - 1


# 99.9 % quantiles; the seed is fixed, so the test cannot flicker.
QUANTILE = {6: 22.46, 3: 16.27, 2: 13.82}


@pytest.mark.fast
@pytest.mark.parametrize("values", [{}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8}])
def test_chi_square(values):
    statistic, freedom = chi_square(10_000, **values)
    assert statistic < QUANTILE[freedom]


@pytest.mark.parametrize("values", [{}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8}])
def test_chi_square_of_many_draws(values):
    statistic, freedom = chi_square(100_000, **values)
    assert statistic < QUANTILE[freedom]
