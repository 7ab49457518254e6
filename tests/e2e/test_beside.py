"""What the harness makes of pauses alone and beside an attack; the attacks themselves are a program's, not a test's."""

from collections import Counter

import pytest

from baton.tests.e2e.beside import judged, pairs

pytestmark = pytest.mark.fast


def turn(longest_ms):
    """The pauses of a turn, in order."""
    return [0.001] * 9 + [longest_ms / 1e3]


@pytest.mark.parametrize(
    ("alone_ms", "beside_ms", "allowed_ms", "is_kept"),
    [
        ([10.0], [100.0], 100.0, True),
        ([10.0], [101.0], 100.0, False),
        ([400.0], [800.0], 800.0, True),
        ([400.0], [801.0], 800.0, False),
        ([400.0, 400.0, 9000.0], [500.0, 9000.0, 500.0], 800.0, True),  # what the machine did in one turn
        ([9000.0, 400.0, 400.0], [900.0, 900.0, 500.0], 800.0, False),  # hides nothing that is there in most
    ],
)
def test_the_median_of_turns_beside_is_held_against_that_of_turns_alone(alone_ms, beside_ms, allowed_ms, is_kept):
    row = judged("what", [turn(each) for each in alone_ms], [turn(each) for each in beside_ms])
    assert (row["allowed_ms"], row["is_kept"]) == (allowed_ms, is_kept)
    assert row["alone_max_ms_of_turns"] == alone_ms
    assert row["beside_max_ms_of_turns"] == beside_ms
    assert row["num_turns"] == len(alone_ms)
    assert row["num_chunks"] == 10 * len(beside_ms)


@pytest.mark.asyncio
async def test_turns_alternate_and_each_is_first_as_often():
    order = []

    async def measure(is_beside):
        order.append(is_beside)
        return turn(800.0 if is_beside else 100.0), Counter({"200": 1} if is_beside else {})

    row = await pairs("what", 4, measure)
    assert order == [False, True, True, False, False, True, True, False]
    assert (row["alone_max_ms"], row["beside_max_ms"], row["attacks"]) == (100.0, 800.0, {"200": 4})
