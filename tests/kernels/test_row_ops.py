"""Each row-wise operation against its formula in float64, and bit for bit across batches in invariant numerics."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.kv.write import kv_write
from baton.kernels.moe.moe import ExpertWeights
from baton.kernels.ops import Ops
from baton.kernels.pointwise.rope import rope, rope_angles, rope_inverse_frequencies
from baton.kernels.tiles import ordered_sum

pytestmark = pytest.mark.fast
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}
CPU = torch.device("cpu")


def values(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def naive_moe(x_TD, router_ED, weights, num_chosen, renormalise):
    out_TD = torch.zeros_like(x_TD)
    for token, x_D in enumerate(x_TD):
        probability_E = (router_ED @ x_D).softmax(dim=0)
        chosen = probability_E.topk(num_chosen)
        scale = chosen.values.sum() if renormalise else 1.0
        for probability, expert in zip(chosen.values, chosen.indices, strict=True):
            gate_I, up_I = (weights.gate_up_EJD[expert] @ x_D).chunk(2)
            inner_I = gate_I * gate_I.sigmoid() * up_I
            out_TD[token] += probability / scale * (weights.down_EDI[expert] @ inner_I)
    return out_TD


def moe(ops, x_TD, router_ED, weights, num_chosen, renormalise):
    weight_TK, expert_TK = ops.route(ops.linear(x_TD, router_ED), num_chosen, renormalise)
    return ops.experts(x_TD, weight_TK, expert_TK, weights, may_wait=True)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_formulas(numerics, dtype):
    ops = Ops(numerics)
    x_TD = values(37, 48, dtype=dtype)
    weight_ND, scale_D = values(20, 48, dtype=dtype, seed=1) / 7, values(48, dtype=dtype, seed=2)
    wide_TD = x_TD.double()

    def check(result, wanted):
        assert result.dtype == dtype
        assert (result.double() - wanted).abs().max() <= TOLERANCES[dtype] * wanted.abs().max()

    check(ops.linear(x_TD, weight_ND), wide_TD @ weight_ND.double().T)
    mean_square = wide_TD.square().mean(dim=-1, keepdim=True)
    check(ops.rms_norm(x_TD, scale_D, 1e-3), wide_TD / (mean_square + 1e-3).sqrt() * scale_D.double())
    gate, up = wide_TD.chunk(2, dim=-1)
    check(ops.silu_mul(x_TD), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("num_tokens", [1, 5, 90])  # few tokens take the dense form in default numerics
def test_moe_layer(num_tokens, numerics, renormalise):
    weights = ExpertWeights(values(8, 24, 32, seed=1) / 6, values(8, 32, 12, seed=2) / 4)
    x_TD, router_ED = values(num_tokens, 32), values(8, 32, seed=3) / 4
    result = moe(Ops(numerics), x_TD, router_ED, weights, 3, renormalise)
    assert (result - naive_moe(x_TD, router_ED, weights, 3, renormalise)).abs().max() < 1e-12


@pytest.mark.parametrize("numerics", list(Numerics))
def test_equal_probabilities_go_to_the_lower_expert(numerics):
    weight_TK, expert_TK = Ops(numerics).route(torch.zeros(3, 8), 3, True)
    assert expert_TK.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(weight_TK, torch.full((3, 3), 1 / 3))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.long
def test_a_row_of_the_moe_output_depends_on_itself_alone(dtype):
    ops = Ops(Numerics.INVARIANT)
    weights = ExpertWeights(values(8, 160, 256, dtype=dtype, seed=1) / 16, values(8, 256, 80, dtype=dtype, seed=2) / 9)
    x_TD, router_ED = values(130, 256, dtype=dtype), values(8, 256, dtype=dtype, seed=3) / 4
    whole_TD = moe(ops, x_TD, router_ED, weights, 4, True)
    for first, end in ((0, 1), (3, 5), (100, 130), (17, 118)):
        assert torch.equal(moe(ops, x_TD[first:end], router_ED, weights, 4, True), whole_TD[first:end])


@pytest.mark.parametrize("length", [1, 2, 3, 64, 100, 129])
def test_ordered_sum(length):
    x = values(5, length)
    assert ordered_sum(x).shape == (5, 1)
    assert (ordered_sum(x)[:, 0] - x.sum(dim=-1)).abs().max() < 1e-12
    assert torch.equal(ordered_sum(x[2:3]), ordered_sum(x)[2:3])


def test_rope_turns_pairs_by_position_and_keeps_differences():
    inverse_F = rope_inverse_frequencies(16, 100.0, torch.float64, CPU)
    position_T = torch.tensor([0, 3, 40, 43])
    cos_TF, sin_TF = rope_angles(position_T, inverse_F)
    x_THD = values(1, 2, 16).expand(4, 2, 16)
    turned_THD = rope(x_THD, cos_TF, sin_TF)
    assert torch.equal(turned_THD[0], x_THD[0])
    pair = torch.complex(x_THD[1, 0, 2], x_THD[1, 0, 10]) * torch.exp(1j * 3 * 100.0 ** torch.tensor(-4 / 16).double())
    assert abs(torch.complex(turned_THD[1, 0, 2], turned_THD[1, 0, 10]) - pair) < 1e-12
    dot_H = [(turned_THD[a] * turned_THD[b]).sum(dim=-1) for a, b in ((0, 1), (2, 3))]
    assert (dot_H[0] - dot_H[1]).abs().max() < 1e-12


def test_kv_write_touches_only_its_slots():
    key_NHSD, value_NHSD = torch.zeros(2, 4, 2, 16, 8)
    key_THD, value_THD = values(3, 2, 8, dtype=torch.float32), values(3, 2, 8, dtype=torch.float32, seed=1)
    slots = [0, 37, 63]
    kv_write(key_THD, value_THD, torch.tensor(slots), key_NHSD, value_NHSD)
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, 16)
        assert torch.equal(key_NHSD[block, :, offset], key_THD[row])
        assert torch.equal(value_NHSD[block, :, offset], value_THD[row])
    assert key_NHSD.count_nonzero() == value_NHSD.count_nonzero() == 3 * 2 * 8
