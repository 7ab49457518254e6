"""Rows sorted by expert: every row once, in order, in blocks of one expert; the kernel is its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.moe.align import max_blocks, moe_align, moe_align_quantize
from baton.tests.kernels.harness import same_bits, strided
from baton.tests.kernels.moe_inputs import Draw, guarded_empty, wide_rows  # noqa: F401

BOTH = [Implementation.REFERENCE, Implementation.TRITON]


def expected(expert_TK, num_experts, block_len, first_expert=0):
    """[(expert, rows of a block, -1 where there is none)], in plain Python."""
    blocks = []
    flat = expert_TK.flatten().tolist()
    for expert in range(num_experts):
        rows = [row for row, its in enumerate(flat) if its == first_expert + expert]
        for start in range(0, len(rows), block_len):
            part = rows[start : start + block_len]
            blocks.append((expert, part + [-1] * (block_len - len(part))))
    return blocks


def check(expert_TK, num_experts, block_len, implementation, first_expert=0):
    alignment = moe_align(expert_TK, num_experts, block_len, first_expert=first_expert, implementation=implementation)
    wanted = expected(expert_TK, num_experts, block_len, first_expert)
    experts = alignment.block_expert.tolist()
    assert len(experts) == max_blocks(expert_TK.numel(), num_experts, block_len)
    assert experts == [expert for expert, _ in wanted] + [-1] * (len(experts) - len(wanted))
    rows = alignment.rows.view(-1, block_len)[: len(wanted)].tolist()
    assert rows == [part for _, part in wanted]
    return [row for part in rows for row in part if row >= 0]


@pytest.mark.long
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 15, 16, 63, 64, 65, 128])
def test_every_row_is_in_its_experts_blocks(num_tokens, implementation, guarded_empty):  # noqa: F811
    draw = Draw(num_tokens)
    dtype = draw.choice(torch.int32, torch.int64)
    check(draw.experts(num_tokens, 6, 3, dtype), 6, draw.choice(16, 32), implementation)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(300, 3), (90, 130), (600, 3), (4200, 2)])
def test_long_batches_and_many_experts(num_tokens, num_experts, implementation, guarded_empty):  # noqa: F811
    ids = Draw(num_tokens).integers(0, num_experts, num_tokens, 2)
    check(strided(ids), num_experts, 16, implementation)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.long
def test_all_to_one_expert_and_ids_of_none(implementation, guarded_empty):  # noqa: F811
    check(torch.full((40, 2), 4), 5, 16, implementation)
    check(torch.full((3, 2), -1), 5, 16, implementation)
    check(torch.tensor([[0, 5], [-1, 3], [3, 1 << 20], [-(1 << 31), 0]]), 5, 16, implementation)
    check(torch.tensor([[2]], dtype=torch.int32), 3, 16, implementation)


@pytest.mark.parametrize("implementation", BOTH)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_row_is_in_the_blocks_of_the_one_rank_that_holds_its_expert(implementation, data):
    size, count = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.integers(1, 5))
    num_tokens, num_chosen = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 4))
    ids = st.integers(-2, size * count + 1)  # some are no expert's
    flat = data.draw(st.lists(ids, min_size=num_tokens * num_chosen, max_size=num_tokens * num_chosen))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    expert_TK = torch.tensor(flat, dtype=dtype).view(num_tokens, num_chosen)
    block_len = data.draw(st.sampled_from([16, 32, 128, 256]))
    found = [check(expert_TK, count, block_len, implementation, count * rank) for rank in range(size)]
    assert sorted(row for rows in found for row in rows) == [
        row for row, its in enumerate(flat) if 0 <= its < size * count
    ]


@pytest.mark.parametrize("implementation", BOTH)
def test_long_batches_whose_experts_are_elsewhere(implementation, guarded_empty):  # noqa: F811
    """Several tiles of ids, of which this rank has a few, all or none."""
    ids = Draw(3).integers(0, 12, 700, 2)
    for first in (0, 4, 8):
        check(ids, 4, 16, implementation, first)
    assert check(ids, 4, 16, implementation, 12) == []
    assert len(check(ids, 12, 16, implementation)) == ids.numel()


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("implementation", BOTH)
def test_quantized_beside(implementation, ue8m0, guarded_empty):  # noqa: F811
    draw = Draw(1)
    x_TD = draw.normal(9, 384, dtype=torch.bfloat16)
    x_TD[3] = 0
    x_TD[4, 5] = 300.0
    expert_TK = draw.experts(9, 5, 2)
    how = {"ue8m0": ue8m0, "implementation": implementation}
    alignment, values_TD, scale_TG = moe_align_quantize(strided(x_TD), expert_TK, 5, **how)
    alone = moe_align(expert_TK, 5, implementation=implementation)
    some, also_TD, _ = moe_align_quantize(x_TD, expert_TK, 3, first_expert=2, **how)
    wanted = moe_align(expert_TK, 3, first_expert=2, implementation=implementation)
    assert same_bits(some.block_expert, wanted.block_expert)
    assert same_bits(also_TD, values_TD)  # also of tokens whose experts are elsewhere
    num_rows = 16 * int(alone.block_expert.ge(0).sum())
    assert same_bits(alignment.block_expert, alone.block_expert)
    assert same_bits(alignment.rows[:num_rows], alone.rows[:num_rows])
    wide_TD = values_TD.double() * scale_TG.double().repeat_interleave(128, dim=1)
    assert torch.equal(wide_TD, wide_rows(x_TD, ue8m0))
    assert scale_TG[3].gt(0).all()


@pytest.mark.fast
def test_the_bound_of_blocks_is_reached_and_never_passed():
    for num_rows in range(70):
        worst = 0
        for num_hit in range(min(num_rows, 5) + 1):
            if num_hit == 0 and num_rows:
                continue
            # One row each, and the rest with one expert.
            worst = max(worst, num_hit - 1 + -(-(num_rows - num_hit + 1) // 16) if num_hit else 0)
        assert max_blocks(num_rows, 5, 16) >= worst
        assert max_blocks(num_rows, 5, 16) <= worst + 1


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("expert_TK", {"expert_TK": torch.zeros(3)}),
        ("expert_TK", {"expert_TK": torch.zeros(3, 2)}),
        ("num_experts", {"num_experts": 0}),
        ("first_expert", {"first_expert": -1}),
        ("first_expert", {"first_expert": 4097}),
        ("block_len", {"block_len": 24}),
    ],
)
def test_bad_arguments_are_named(argument, change):
    arguments = {"expert_TK": torch.zeros(3, 2, dtype=torch.int64), "num_experts": 4, "block_len": 16, **change}
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        moe_align(**arguments)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("expert_TK", {"expert_TK": torch.tensor(1)}),
        ("num_experts", {"num_experts": 5000}),
        ("block_len", {"block_len": 24}),
    ],
)
def test_nothing_is_allocated_for_bad_arguments(argument, change, monkeypatch):
    arguments = {"expert_TK": torch.zeros(3, 2, dtype=torch.int64), "num_experts": 4, "block_len": 16, **change}
    x_TD = torch.zeros(3, 128)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        moe_align_quantize(x_TD, **arguments, implementation=Implementation.TRITON)


@pytest.mark.fast
@pytest.mark.parametrize(
    "x_TD", [torch.zeros(3, 100), torch.zeros(2, 128), torch.zeros(128, 3).T, torch.zeros(3, 128, dtype=torch.int32)]
)
def test_rows_that_cannot_be_quantized_are_refused(x_TD):
    with pytest.raises(KernelArgumentInvalid, match=r"^x_TD: "):
        moe_align_quantize(x_TD, torch.zeros(3, 2, dtype=torch.int64), 4)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("expert_TK", {"expert_TK": torch.zeros((), dtype=torch.int64)}),
        ("expert_TK", {"expert_TK": torch.zeros(3, 2)}),
        ("num_experts", {"num_experts": 4097}),
        ("block_len", {"block_len": 0}),
    ],
)
def test_nothing_is_allocated_for_choices_that_do_not_fit(argument, change, implementation, monkeypatch):
    arguments = {"x_TD": torch.zeros(3, 128), "expert_TK": torch.zeros(3, 2, dtype=torch.int64), "num_experts": 4}
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        moe_align_quantize(**{**arguments, **change}, implementation=implementation)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
def test_rows_are_quantized_whether_or_not_there_is_a_choice(implementation, guarded_empty):  # noqa: F811
    x_TD = Draw(2).normal(3, 128, dtype=torch.bfloat16)
    nothing_TK = torch.zeros(3, 0, dtype=torch.int64)
    alignment, values_TD, scale_TG = moe_align_quantize(x_TD, nothing_TK, 4, implementation=implementation)
    assert len(alignment.rows) == len(alignment.block_expert) == 0
    assert torch.equal(values_TD.double() * scale_TG.double().repeat_interleave(128, dim=1), wide_rows(x_TD))
