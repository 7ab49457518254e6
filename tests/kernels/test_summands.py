"""A norm that adds up what experts made: to the bits of one launch after the other."""

import itertools
from dataclasses import replace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.moe.gemm import experts_apart, experts_grouped
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.summands import Summands, add_up
from baton.kernels.pointwise.rms_norm import rms_norm_fused
from baton.kernels.pointwise.sigmoid_gate import add_shared
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided
from baton.tests.kernels.moe_inputs import Draw

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
NUM_EXPERTS = 11
EPS = 1e-6
KINDS = pytest.mark.parametrize("kind", ["choices", "shared", "gated"])


def drawn(kind, num_rows, length, num_chosen=8, dtype=torch.bfloat16, seed=0):
    """Summands of which some ids are of no expert, whose parts are no numbers; rows to add them to; a weight."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    expert_TK = torch.randint(-1, NUM_EXPERTS + 1, (num_rows, num_chosen), generator=generator)
    part_ND = draw(num_rows * num_chosen, length)
    part_ND[((expert_TK < 0) | (expert_TK >= NUM_EXPERTS)).flatten()] = float("nan")
    made = Summands(part_ND, expert_TK, NUM_EXPERTS)
    if kind != "choices":
        made = replace(made, shared_TD=draw(num_rows, length))
    if kind == "gated":
        made = replace(made, gate_T1=draw(num_rows, 40)[:, 3:4] * 3)
    return made, draw(num_rows, length), draw(length)


def in_float64(made):
    """The sum, rounded nowhere."""
    shape = *made.expert_TK.shape, made.part_ND.shape[1]
    is_own = (made.expert_TK >= 0) & (made.expert_TK < made.num_experts)
    total = made.part_ND.double().view(shape).masked_fill(~is_own[..., None], 0).sum(1)
    if made.shared_TD is None:
        return total
    return total + made.shared_TD.double() * (1 if made.gate_T1 is None else made.gate_T1.double().sigmoid())


@KINDS
@pytest.mark.parametrize(("num_rows", "length", "num_chosen"), [(1, 128, 1), (5, 96, 9), (3, 640, 8), (2, 2048, 9)])
def test_bits_are_those_of_one_launch_after_the_other(kind, num_rows, length, num_chosen):
    made, x_TD, weight_D = drawn(kind, num_rows, length, num_chosen)
    mixed_TD = add_up(replace(made, shared_TD=None, gate_T1=None), implementation=TRITON)
    if kind != "choices":
        mixed_TD = add_shared(mixed_TD, made.shared_TD, made.gate_T1, implementation=TRITON)
    assert same_bits(add_up(made, implementation=TRITON), mixed_TD)
    assert not mixed_TD.isnan().any()
    forms = [{}, {"plus_one": True}]
    if length % 128 == 0:
        num_padded = num_rows + 3
        forms += [{"num_padded": num_padded}, {"num_padded": num_padded, "keep": True, "ue8m0": True}]
    for form in forms:
        options = form | {"implementation": TRITON}
        found = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=made, **options)
        wanted = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=mixed_TD, **options)
        for name in ("rows", "sum_TD", "scale_GR", "kept_TD"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert (one is None) == (other is None)
            assert one is None or same_bits(one, other), (form, name)


@KINDS
@pytest.mark.fast
def test_the_sum_against_float64_and_the_reference(kind):
    for num_chosen in (1, 8, 9):
        made, x_TD, weight_D = drawn(kind, 4, 96, num_chosen)
        wanted_TD = in_float64(made)
        for implementation in (TRITON, REFERENCE):
            found_TD = add_up(made, implementation=implementation)
            assert relative_error(found_TD, wanted_TD) < 2**-8
            normed = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=made, implementation=implementation)
            assert same_bits(normed.sum_TD, x_TD + found_TD)
    made, _, _ = drawn(kind, 4, 96, dtype=torch.float32)
    for implementation in (TRITON, REFERENCE):
        assert relative_error(add_up(made, implementation=implementation), in_float64(made)) < 1e-6


@pytest.mark.fast
def test_choices_are_added_in_their_order_and_rounded_before_a_shared_expert():
    """2 ** 24 + 1 - 2 ** 24 is 0 in float32, and 256 + 1 is 256 in bfloat16."""
    for parts, shared, wanted in (
        ([2.0**24, 1, -(2.0**24)], None, 0),
        ([2.0**24, -(2.0**24), 1], None, 1),
        ([256, 1], None, 256),
        ([256, 1], 1, 256),
        ([-256, 0, 255], 1, 0),
    ):
        part_ND = torch.tensor(parts).bfloat16()[:, None].expand(-1, 64).contiguous()
        shared_TD = None if shared is None else torch.full((1, 64), shared).bfloat16()
        made = Summands(part_ND, torch.arange(len(parts))[None], NUM_EXPERTS, shared_TD=shared_TD)
        zeros_TD, ones_D = torch.zeros(1, 64).bfloat16(), torch.ones(64).bfloat16()
        for implementation in (TRITON, REFERENCE):
            found = rms_norm_fused(zeros_TD, ones_D, EPS, residual_TD=made, implementation=implementation)
            assert found.sum_TD.eq(wanted).all(), (parts, implementation)


def test_a_row_depends_on_itself_alone():
    made, x_TD, weight_D = drawn("gated", 7, 256)
    whole = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=made, implementation=TRITON)
    for cut in (slice(0, 1), slice(2, 6), slice(6, 7)):
        part = replace(
            made,
            part_ND=made.part_ND[cut.start * 8 : cut.stop * 8],
            expert_TK=made.expert_TK[cut],
            shared_TD=made.shared_TD[cut],
            gate_T1=made.gate_T1[cut],
        )
        found = rms_norm_fused(x_TD[cut], weight_D, EPS, residual_TD=part, implementation=TRITON)
        assert same_bits(found.rows, whole.rows[cut])
        assert same_bits(found.sum_TD, whole.sum_TD[cut])


@KINDS
def test_strides_guards_and_two_runs(kind):
    made, x_TD, weight_D = drawn(kind, 3, 192)
    wanted = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=made, implementation=TRITON)
    guards = Guards()
    tensors = {"part_ND": guards.copy(made.part_ND), "expert_TK": guards.copy(made.expert_TK.int())}
    if made.shared_TD is not None:
        tensors["shared_TD"] = guards.copy(made.shared_TD)
    if made.gate_T1 is not None:
        tensors["gate_T1"] = strided(made.gate_T1)
    moved, inputs = replace(made, **tensors), (strided(x_TD), guards.copy(weight_D))

    def compute():
        found = rms_norm_fused(*inputs, EPS, residual_TD=moved, implementation=TRITON)
        return found.rows, found.sum_TD

    rows_TD, sum_TD = assert_deterministic(compute, *inputs, *tensors.values())
    guards.check()
    assert same_bits(rows_TD, wanted.rows)
    assert same_bits(sum_TD, wanted.sum_TD)


@pytest.mark.fast
def test_no_rows():
    for kind, implementation in itertools.product(("choices", "gated"), (TRITON, REFERENCE)):
        made, x_TD, weight_D = drawn(kind, 0, 128)
        found = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=made, implementation=implementation)
        assert found.rows.shape == found.sum_TD.shape == (0, 128)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("held", [None, HeldExperts(0, 6, 12)])
def test_experts_apart_are_experts_grouped_before_the_sum(kind, held):
    draw = Draw(5)
    inner_size, hidden = (48, 80) if kind == "bf16" else (128, 128)
    x_TD, weight_TK = draw.normal(5, hidden, dtype=torch.bfloat16), draw.normal(5, 3).softmax(1)
    expert_TK = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(row))[:3] for row in range(5)])
    expert_TK[1, 2] = 6
    weights = replace(draw.weights(6, inner_size, hidden, kind), held=held)
    options = {"implementation": TRITON, "invariant": True}
    made = experts_apart(x_TD, weight_TK, expert_TK, weights, **options)
    assert isinstance(made, Summands)
    assert (made.num_experts, made.held, made.shared_TD, made.gate_T1) == (6, held, None, None)
    for out_dtype in (None, torch.float32):
        wanted_TD = experts_grouped(x_TD, weight_TK, expert_TK, weights, out_dtype=out_dtype, **options)
        assert wanted_TD.dtype == (out_dtype or torch.bfloat16)
        assert same_bits(add_up(made, out_dtype=out_dtype, implementation=TRITON), wanted_TD)
    reference_TD = experts_apart(x_TD, weight_TK, expert_TK, weights, implementation=REFERENCE)
    assert relative_error(wanted_TD, reference_TD) < 1e-2


@pytest.mark.fast
def test_what_does_not_fit_is_refused_by_name():
    made, x_TD, weight_D = drawn("gated", 2, 128)
    refused = {
        "expert_TK": [made.expert_TK[:1], made.expert_TK.float(), made.expert_TK[:, :7], strided(made.expert_TK)],
        "part_ND": [made.part_ND[1:], made.part_ND[:, :64], made.part_ND.float(), strided(made.part_ND)],
        "shared_TD": [made.shared_TD[:1], made.shared_TD.float(), strided(made.shared_TD), None],
        "gate_T1": [made.gate_T1[:1], made.gate_T1.float(), made.gate_T1[:, 0]],
        "held": [HeldExperts(0, NUM_EXPERTS, 22)],
    }
    for implementation in (TRITON, REFERENCE):
        rms_norm_fused(x_TD, weight_D, EPS, residual_TD=made, implementation=implementation)
        for name, wrongs in refused.items():
            for wrong in wrongs:
                with pytest.raises(KernelArgumentInvalid, match="residual_TD"):
                    wrong_made = replace(made, **{name: wrong})
                    rms_norm_fused(x_TD, weight_D, EPS, residual_TD=wrong_made, implementation=implementation)
