"""Slots of experts that move: each choice goes to a slot of its expert, and each token of a sequence counts once."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.gemm.inner_sum import InnerSum, tree_sum
from baton.kernels.implementation import Implementation
from baton.kernels.moe.expert_map import first_map
from baton.kernels.moe.expert_slots import ExpertSlots, RoutedRows
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.ops import Ops
from baton.tests.kernels.harness import relative_error
from baton.tests.kernels.moe_inputs import Draw, some_experts
from baton.tests.kernels.test_held_experts import NUM_CHOSEN, NUM_EXPERTS, numerics, plain_inputs  # noqa: F401
from baton.tests.kernels.test_moe_gemm import KINDS, SIZES, batch

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")


def slots_of(num_redundant, size=4):
    return ExpertSlots(HeldExperts.of_rank(NUM_EXPERTS, 0, size, num_redundant), CPU)


def rows_of(positions, is_counted=None):
    is_counted = [True] * len(positions) if is_counted is None else is_counted
    return RoutedRows(torch.tensor(positions)[:, None], torch.tensor(is_counted)[:, None])


def random_map(draw, num_redundant):
    """Copies anywhere, also two at one rank."""
    more = draw.experts(num_redundant, NUM_EXPERTS, 1).flatten().tolist()
    experts = [*range(NUM_EXPERTS), *more]
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(num_redundant)).tolist()
    return tuple(experts[at] for at in order)


@pytest.mark.parametrize("num_redundant", [0, 4, 12])
def test_each_choice_goes_to_a_slot_of_its_expert(num_redundant):
    draw, slots = Draw(num_redundant), slots_of(num_redundant)
    for experts in (first_map(NUM_EXPERTS, num_redundant), random_map(draw, num_redundant)):
        slots.put(experts)
        choice_TK = draw.experts(50, NUM_EXPERTS, NUM_CHOSEN)
        slot_TK = slots.place(choice_TK.int(), rows_of([at % 7 for at in range(50)]))
        assert slot_TK.dtype == torch.int64
        assert torch.equal(torch.tensor(experts)[slot_TK], choice_TK)


def test_a_token_goes_to_one_copy_by_its_position_alone():
    slots = slots_of(4)
    choice_TK = torch.tensor([[0, 5, 3]] * 6)
    slot_TK = slots.place(choice_TK, rows_of([4, 0, 1, 5, 2, 1]))
    assert slot_TK[:, 0].tolist() == [0, 0, 12, 12, 0, 12]
    assert slot_TK[:, 2].tolist() == [3, 3, 15, 15, 3, 15]
    assert set(slot_TK[:, 1].tolist()) == {5}
    alone_TK = slots.place(choice_TK[2:3], rows_of([1]))
    assert torch.equal(alone_TK, slot_TK[2:3]), "whatever is beside it"


def test_rows_that_pad_a_batch_are_not_counted():
    slots = slots_of(4)
    choice_TK = torch.tensor([[0, 1, 2], [2, 3, 0], [7, 8, 9], [0, 10, 11]])
    slots.place(choice_TK, rows_of([0, 1, 0, 9], [True, True, False, True]))
    assert slots.load_E.tolist() == [3, 1, 2, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    slots.place(choice_TK[:1], rows_of([3]))
    assert slots.load_E.tolist() == [4, 2, 3, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert slots.load_E.dtype == torch.int64


def test_another_map_keeps_the_addresses_that_a_graph_has():
    slots = slots_of(4)
    before = [tensor.data_ptr() for tensor in (slots._slot_EC, slots._num_copies_E, slots.load_E)]
    slots.put(random_map(Draw(1), 4))
    assert [tensor.data_ptr() for tensor in (slots._slot_EC, slots._num_copies_E, slots.load_E)] == before


def placed(numerics, weights, inputs, experts, size, implementation=Implementation.REFERENCE):  # noqa: F811
    """Every rank's MoE layer with experts where a map says."""
    x_TD, weight_TK, choice_TK = inputs
    length, num_redundant = len(experts) // size, len(experts) - NUM_EXPERTS
    parts = []
    for rank in range(size):
        held = HeldExperts.of_rank(NUM_EXPERTS, rank, size, num_redundant)
        parts.append(some_experts(weights, list(experts[rank * length : (rank + 1) * length]), held))
    slots = slots_of(num_redundant, size)
    slots.put(experts)
    slot_TK, given = slots.place(choice_TK, rows_of(list(range(len(x_TD))))), []

    def record(x):
        given.append(x)
        return x

    for part in parts:
        Ops(numerics, InnerSum(size, record), implementation).experts(x_TD, weight_TK, slot_TK, part, True)
    total = tree_sum(given)
    ops = Ops(numerics, InnerSum(size, lambda _: total), implementation)
    return [ops.experts(x_TD, weight_TK, slot_TK, part, True) for part in parts]


@pytest.mark.parametrize(("num_redundant", "size"), [(0, 2), (4, 4), (12, 2)])
@pytest.mark.long
def test_the_moe_output_does_not_depend_on_where_experts_lie(num_redundant, size, numerics):  # noqa: F811
    for num_tokens in (1, 70):
        inputs, weights = plain_inputs(num_tokens, torch.float64)
        wanted_TD = Ops(numerics).experts(*inputs, weights, True)
        for experts in (first_map(NUM_EXPERTS, num_redundant), random_map(Draw(5), num_redundant)):
            for mixed_TD in placed(numerics, weights, inputs, experts, size):
                assert (mixed_TD - wanted_TD).abs().max() < 1e-12 * wanted_TD.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_take_slots_for_experts(kind):
    draw = Draw(7)
    weights = draw.weights(NUM_EXPERTS, *SIZES[kind], kind)
    inputs = batch(draw, 9, NUM_EXPERTS, NUM_CHOSEN, SIZES[kind][1])
    ops = Ops(Numerics.DEFAULT, implementation=Implementation.TRITON)
    wanted_TD = ops.added_up(ops.experts(*inputs, weights, True))
    for num_redundant, size in ((0, 2), (4, 4)):
        experts = random_map(draw, num_redundant)
        for mixed_TD in placed(Numerics.DEFAULT, weights, inputs, experts, size, Implementation.TRITON):
            assert relative_error(mixed_TD, wanted_TD) < 6e-3


def test_invariant_numerics_have_the_same_bits_wherever_experts_lie():
    inputs, weights = plain_inputs(70, torch.bfloat16)
    wanted_TD = Ops(Numerics.INVARIANT).experts(*inputs, weights, True)
    for num_redundant, size in ((0, 2), (4, 4), (12, 2)):
        for mixed_TD in placed(Numerics.INVARIANT, weights, inputs, random_map(Draw(6), num_redundant), size):
            assert torch.equal(mixed_TD, wanted_TD)
