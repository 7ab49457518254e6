"""The kernels of the decision message: their numbers in the interpreter, and what they compile to for sm_90a."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.kernels.sampling import decision
from baton.kernels.sampling.decision import compare, pack, warm_up
from baton.kernels.sampling.decision_reference import (
    DIVERGED,
    HEAD_LEN,
    MAX_STATE,
    compare_reference,
    digest,
    message_number,
    pack_reference,
)

CPU = torch.device("cpu")


def assert_packed(values, state, number=7):
    own_N, decided_N = pack(values, state, number)
    wanted_N = pack_reference(values, state, number)
    assert own_N.dtype == decided_N.dtype == torch.int32
    assert torch.equal(own_N, wanted_N)
    assert torch.equal(decided_N, wanted_N)
    decided_N += 1  # the other is to be kept
    assert torch.equal(own_N, wanted_N)


def words(generator, shape, dtype=torch.int64):
    limits = torch.iinfo(dtype)
    values = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)
    edges = torch.tensor([limits.min, limits.max, -1, 0, (1 << 31) - 1, -(1 << 31)], dtype=dtype)
    flat = values.view(-1)
    flat[: len(edges)] = edges[: len(flat)]
    return values


def step_state(batch, num_blocks):
    """As a decode step has it: columns of one table, and block tables."""
    numbers_BC = torch.arange(batch * 5).view(batch, 5) * 3
    columns = numbers_BC.unbind(dim=1)
    return [torch.arange(batch).flip(0), columns[0], columns[1], columns[2], torch.randint(999, (batch, num_blocks))]


@pytest.mark.fast
@pytest.mark.parametrize("batch", [1, 2, 7, 64, 70])
def test_a_decode_steps_message_is_the_references(batch):
    values = torch.randint(0, 1 << 31, (batch, 4))
    assert_packed(values, step_state(batch, 9), message_number(batch))


@pytest.mark.parametrize("num_tensors", range(MAX_STATE + 1))
def test_any_number_of_tensors_of_any_words(num_tensors):
    generator = torch.Generator().manual_seed(num_tensors)
    for round_ in range(8):
        state = []
        for _ in range(num_tensors):
            dtype = (torch.int64, torch.int32)[int(torch.randint(2, (1,), generator=generator))]
            rows = int(torch.randint(0, 71, (1,), generator=generator))
            shape = (rows,) if round_ % 2 else (rows, int(torch.randint(1, 12, (1,), generator=generator)))
            state.append(words(generator, shape, dtype))
        num_values = int(torch.randint(1, 400, (1,), generator=generator))
        values = torch.randint(0, 1 << 31, (num_values,), generator=generator)
        assert_packed(values, state, 0x7FFFFFFF - round_)


@pytest.mark.parametrize("which", range(MAX_STATE))
def test_long_tensors_end_anywhere(which):
    block = decision.FIRST * decision.ROWS
    generator = torch.Generator().manual_seed(which)
    for count in (decision.FIRST - 1, decision.FIRST, decision.FIRST + 1, decision.FIRST + block + which, 2 * block):
        state = [torch.arange(3 + index) for index in range(MAX_STATE)]
        state[which] = words(generator, (count,))
        assert_packed(torch.arange(5), state)


@pytest.mark.fast
def test_a_block_table_of_many_and_values_of_many():
    assert_packed(torch.arange(64 * 30).view(64, 30), step_state(64, 128))


@pytest.mark.fast
def test_views_that_are_not_contiguous():
    table = torch.arange(60).view(6, 10)
    state = [table[:, 3], table[:, :4], table.T, table[2], table[0, :1].expand(9), torch.arange(24).view(2, 3, 4)]
    assert_packed(table[:, 1:3], state)
    assert_packed(table[:, 1], [torch.empty(0, 4, dtype=torch.int64), table[::2, 0]])


@pytest.mark.fast
@pytest.mark.parametrize("form", [pack, pack_reference])
def test_no_form_takes_more_tensors_than_the_kernel_has_arguments_for(form):
    with pytest.raises(AssertionError):
        form(torch.arange(3), [torch.arange(2)] * (MAX_STATE + 1), 1)


@pytest.mark.fast
def test_values_are_cut_as_torch_cuts_them():
    assert_packed(torch.tensor([1 << 31, (1 << 32) + 5, -1, -(1 << 63), (1 << 63) - 1]), [])


@pytest.mark.fast
def test_the_number_keeps_31_bits():
    assert message_number(5) == 5
    assert message_number(1 << 31) == 0
    assert message_number((1 << 31) + 9) == 9
    assert_packed(torch.arange(2), [], message_number((1 << 31) - 1))


def test_the_digest_sees_every_place_and_every_swap():
    def seen(state):
        own_N, _ = pack(torch.arange(2), state, 3)
        assert int(own_N[1:HEAD_LEN].view(torch.int64)) == int(digest(state, CPU))
        return tuple(own_N[1:HEAD_LEN].tolist())

    state = [torch.arange(6), torch.arange(6) * 7 + 1]
    found = {seen(state)}
    for place in range(12):
        for change in (1, -3, 1 << 31, 5 << 40):
            other = [tensor.clone() for tensor in state]
            other[place // 6][place % 6] += change
            found.add(seen(other))
    for place in range(11):  # the swap in the middle is of the last of one and the first of the other
        both = torch.cat(state)
        both[[place, place + 1]] = both[[place + 1, place]]
        found.add(seen(list(both.split(6))))
    assert len(found) == 1 + 12 * 4 + 11


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(1,), (3, 4), (64, 6)])
def test_equal_messages_give_the_values(shape):
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    own_N, decided_N = pack(values, [], 1)
    result = compare(own_N, decided_N, values)
    assert torch.equal(result, values)
    assert result.dtype == torch.int64
    assert result.data_ptr() != values.data_ptr()


@pytest.mark.parametrize("num_values", [9, 1100])
def test_one_word_that_differs_gives_diverged_everywhere(num_values):
    values = torch.arange(num_values)
    own_N, decided_N = pack(values, [torch.arange(3)], 1)
    assert torch.equal(compare(own_N, decided_N, values), values)
    borders = {0, 1, 2, 3, 500, 1023, 1024, 1025, num_values + 2}
    for place in range(len(own_N)) if num_values < 100 else sorted(borders):
        for change in (1, 1 << 31):
            other_N = decided_N.clone()
            other_N[place] ^= change - (1 << 32) if change >> 31 else change
            assert compare(own_N, other_N, values).eq(DIVERGED).all(), place
            assert torch.equal(compare(own_N, other_N, values), compare_reference(own_N, other_N, values))


@pytest.mark.fast
@pytest.mark.parametrize("num_values", [1023, 1024, 1025, 3000])
def test_many_values_come_back_in_place(num_values):
    wide = torch.arange(2 * num_values).view(num_values, 2)
    own_N, decided_N = pack(wide[:, 1], [], 1)
    assert torch.equal(compare(own_N, decided_N, wide[:, 1]), wide[:, 1])
    decided_N[-1] += 1
    assert compare(own_N, decided_N, wide[:, 1]).tolist() == [DIVERGED] * num_values


@pytest.mark.fast
def test_warming_up_uses_both():
    warm_up(CPU)


def test_for_hopper_both_compile_without_spills_and_load_at_once():
    script = Path(__file__).with_name("compile_decision.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    for name, facts in json.loads(run.stdout)["kernels"].items():
        assert facts["target"] == "sm_90a", name
        assert facts["specializations"] == 1, name  # so that no step compiles another
        assert facts["spills"] == 0, name
        assert facts["registers"] <= 128, name  # 16 warps on one multiprocessor
        assert facts["barriers"] == 2, name  # of one sum over the program
        assert facts["atomics"] == 0, name
        assert facts["loads_at_once"] >= (MAX_STATE if name.startswith("pack") else 1), name
