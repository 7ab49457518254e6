"""Where rows of a step stand and write: the kernel and the reference beside the rule, said row by row in Python."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention.row_places import row_places
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import assert_deterministic, poison, strided

pytestmark = pytest.mark.fast
KINDS = [Implementation.TRITON, Implementation.REFERENCE]
SCRATCH = 7_000


def by_rule(first, num_rows, limit, tables, block_size):
    positions, slots = [], []
    for start, room, table in zip(first, limit, tables, strict=True):
        for row in range(num_rows):
            wanted = start + row
            position = min(wanted, room - 1)
            positions.append(position)
            slot = table[position // block_size] * block_size + position % block_size
            slots.append(SCRATCH if wanted >= room else slot)
    return positions, slots


def drawn(num_sequences, num_rows, block_size, seed):
    """Rooms that end before the first row, within the rows, and behind them."""
    generator = torch.Generator().manual_seed(seed)
    first_B = torch.randint(0, 5 * block_size, (num_sequences,), generator=generator)
    limit_B = (first_B + torch.randint(-2, num_rows + 2, (num_sequences,), generator=generator)).clamp(min=1)
    tables_BM = torch.randint(0, 1 << 33, (num_sequences, 7), generator=generator)
    return first_B, limit_B, tables_BM


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_sequences", "num_rows"), [(1, 1), (3, 4), (64, 2), (65, 3), (5, 26)])
def test_every_row_is_where_the_rule_says(kind, num_sequences, num_rows):
    for block_size in (16, 12):
        first_B, limit_B, tables_BM = drawn(num_sequences, num_rows, block_size, num_sequences + block_size)
        found = assert_deterministic(
            lambda: torch.stack(
                row_places(
                    first_B, num_rows, limit_B, tables_BM, block_size=block_size, scratch_slot=SCRATCH,  # noqa: B023
                    implementation=kind,
                )
            ),
            first_B, limit_B, tables_BM,
        )  # fmt: skip
        wanted = by_rule(first_B.tolist(), num_rows, limit_B.tolist(), tables_BM.tolist(), block_size)
        assert found.shape == (2, num_sequences, num_rows)
        assert found.dtype == torch.int64
        assert (found[0].flatten().tolist(), found[1].flatten().tolist()) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_table_and_other_integers(kind):
    """As the engine has them: columns of one matrix; entries that no row reaches are not read."""
    first_B, limit_B, tables_BM = drawn(6, 3, 16, 1)
    numbers_BC = torch.cat([first_B[:, None], limit_B[:, None], tables_BM], dim=1)
    wanted = by_rule(first_B.tolist(), 3, limit_B.tolist(), tables_BM.tolist(), 16)
    wide = numbers_BC[:, 0], 3, numbers_BC[:, 1], numbers_BC[:, 2:]
    narrow = first_B.int(), 3, limit_B.int(), strided(tables_BM % 1000)
    for arguments, expected in ((wide, wanted), (narrow, None)):
        positions_BQ, slots_BQ = row_places(*arguments, block_size=16, scratch_slot=SCRATCH, implementation=kind)
        expected = expected or by_rule(first_B.tolist(), 3, limit_B.tolist(), (tables_BM % 1000).tolist(), 16)
        assert (positions_BQ.flatten().tolist(), slots_BQ.flatten().tolist()) == expected
        assert slots_BQ.dtype == positions_BQ.dtype == torch.int64
    beyond = poison(torch.empty_like(tables_BM))
    for row in range(6):
        beyond[row, : (limit_B[row] - 1) // 16 + 1] = tables_BM[row, : (limit_B[row] - 1) // 16 + 1]
    found = row_places(first_B, 3, limit_B, beyond, block_size=16, scratch_slot=SCRATCH, implementation=kind)
    assert found[1].flatten().tolist() == wanted[1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_has_no_row(kind):
    nobody = torch.zeros(0, dtype=torch.int64)
    found = row_places(nobody, 2, nobody, nobody[:, None], block_size=16, scratch_slot=0, implementation=kind)
    assert [item.shape for item in found] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"first_B": torch.zeros(3)}, "first_B"),
        ({"limit_B": torch.ones(4, dtype=torch.int64)}, "limit_B"),
        ({"block_tables_BM": torch.zeros(2, 4, dtype=torch.int64)}, "block_tables_BM"),
        ({"block_tables_BM": torch.zeros(3, 0, dtype=torch.int64)}, "block_tables_BM"),
        ({"block_tables_BM": torch.zeros(4, 3, dtype=torch.int64).t()}, "block_tables_BM"),
        ({"num_rows": 0}, "num_rows"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_what_does_not_fit_is_named(wrong, name):
    right = {"first_B": torch.zeros(3, dtype=torch.int64), "num_rows": 2, "limit_B": torch.ones(3, dtype=torch.int64)}
    right |= {"block_tables_BM": torch.zeros(3, 4, dtype=torch.int64), "block_size": 16, "scratch_slot": 9}
    for _ in range(2):
        row_places(**right)
        with pytest.raises(KernelArgumentInvalid, match=f"^{name}:"):
            row_places(**right | wrong)
