import math

import pytest
import torch

from baton.kernels.sampling.noise import Purpose, gumbel, philox4x32, uniform
from baton.tests.engine.reference import gumbel_noise, philox

pytestmark = pytest.mark.fast

# Random123's known answers (kat_vectors, philox4x32 with 10 rounds).
ONES = 0xFFFFFFFF
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def tensor(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    words = philox4x32(tuple(map(tensor, counter)), tuple(map(tensor, key)))
    assert tuple(int(word) for word in words) == expected
    assert philox(counter, key) == expected  # the tests' own reference, too


def test_random_counters_against_python_integers():
    numbers = torch.randint(0, 2**32, (6, 200), generator=torch.Generator().manual_seed(1))
    words = torch.stack(philox4x32(tuple(numbers[:4]), tuple(numbers[4:])))
    for column in range(200):
        values = numbers[:, column].tolist()
        assert tuple(words[:, column].tolist()) == philox(values[:4], values[4:])


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("vocab_size", [1, 4, 7, 33])
def test_gumbel_against_reference(seed, vocab_size):
    noise_NV = gumbel(tensor(seed), tensor(3), tensor(17), Purpose.SAMPLE, vocab_size, torch.float64)
    expected = gumbel_noise(seed, 17, vocab_size, choice=3, purpose=int(Purpose.SAMPLE))
    assert noise_NV[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    seeds, positions = torch.arange(40) * 977, torch.arange(40) % 7
    together = gumbel(seeds, positions * 0, positions, Purpose.SAMPLE, 50, torch.float32)
    for row in (0, 13, 39):
        alone = gumbel(seeds[row : row + 1], tensor(0), positions[row : row + 1], Purpose.SAMPLE, 50, torch.float32)
        assert torch.equal(alone[0], together[row])
    monkeypatch.setattr("baton.kernels.sampling.noise._MAX_ELEMENTS", 120)  # rows drawn two at a time
    assert torch.equal(gumbel(seeds, positions * 0, positions, Purpose.SAMPLE, 50, torch.float32), together)


def test_every_part_of_the_counter_and_key_matters():
    base = dict(seed=5, choice=0, position=9)
    changed = [base, base | {"seed": 6}, base | {"seed": 5 + 2**32}, base | {"choice": 1}, base | {"position": 10}]
    draws = [
        uniform(tensor(item["seed"]), tensor(item["choice"]), tensor(item["position"]), Purpose.SAMPLE, 64)
        for item in changed
    ]
    for one in range(len(draws)):
        for other in range(one):
            assert not torch.isclose(draws[one], draws[other]).any()


def test_a_wider_vocabulary_only_adds():
    narrow = gumbel(tensor(8), tensor(0), tensor(2), Purpose.SAMPLE, 10, torch.float64)
    wide = gumbel(tensor(8), tensor(0), tensor(2), Purpose.SAMPLE, 1000, torch.float64)
    assert torch.equal(narrow, wide[:, :10])


def test_noise_is_finite_and_has_the_moments_of_a_gumbel():
    noise = gumbel(torch.arange(50), torch.zeros(50).long(), torch.arange(50), Purpose.SAMPLE, 2000, torch.float64)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_uniforms_never_reach_zero_or_one():
    # The extreme words, by the same arithmetic.
    low, high = (0 + 0.5) * 2.0**-32, (ONES + 0.5) * 2.0**-32
    assert 0.0 < low
    assert high < 1.0
    assert math.isfinite(-math.log(-math.log(low)))
    assert math.isfinite(-math.log(-math.log(high)))
