"""A norm, a router and its choice in one launch, in the interpreter: against separate launches and the formula.

That programs wait for others, whichever run first, is for `tests/gpu/test_norm_route_cuda.py`: the interpreter's come
in order.
"""

import itertools

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.core.numerics import Numerics
from baton.kernels.gemm.linear import linear
from baton.kernels.gemm.workspace import GemmWorkspace
from baton.kernels.implementation import Implementation
from baton.kernels.moe import norm_route_triton
from baton.kernels.moe.norm_route import MAX_TOKENS, fits, norm_route
from baton.kernels.moe.select_topk import select_topk
from baton.kernels.ops import Ops
from baton.kernels.pointwise.rms_norm import rms_norm_fused
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits, strided
from baton.tests.kernels.moe_inputs import Draw, guarded_empty  # noqa: F401

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
BF16 = torch.bfloat16


def inputs(draw, num_tokens, num_rows, hidden):
    x_TD, added_TD = draw.normal(num_tokens, hidden, dtype=BF16), draw.normal(num_tokens, hidden, dtype=BF16)
    return x_TD, added_TD, (draw.normal(hidden) / 4).to(BF16), (draw.normal(num_rows, hidden) / hidden**0.5).to(BF16)


def parts_of(made):
    return made.rows_TD, made.sum_TD, made.weight_TK, made.expert_TK


def routed(given, eps, *others, **options):
    x_TD, added_TD, weight_D, router_XD = given
    return parts_of(norm_route(x_TD, added_TD, weight_D, eps, router_XD, *others, **options))


def apart(given, eps, num_chosen, *, num_experts, plus_one, renormalise, has_shared):
    """By launches of their own."""
    x_TD, added_TD, weight_D, router_XD = given
    made = rms_norm_fused(x_TD, weight_D, eps, residual_TD=added_TD, plus_one=plus_one, implementation=TRITON)
    logits_TX = linear(made.rows, router_XD)
    gate_T1 = logits_TX[:, num_experts : num_experts + 1]
    weight_TK, expert_TK = select_topk(
        logits_TX[:, :num_experts], num_chosen, renormalise=renormalise, has_shared=has_shared,
        gate_T1=gate_T1 if has_shared and gate_T1.shape[1] else None, implementation=TRITON,
    )  # fmt: skip
    return made.rows, made.sum_TD, weight_TK, expert_TK


def logits_as(logits_1E):
    """Inputs of which exactly these are the logits: a row of one element, and 16 after its norm."""
    x_TD = torch.eye(256, dtype=BF16)[:1]
    router_XD = torch.zeros(logits_1E.shape[1], 256, dtype=BF16)
    router_XD[:, 0] = logits_1E[0] / 16
    return x_TD, torch.zeros_like(x_TD), torch.ones(256, dtype=BF16), router_XD


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64])
def test_the_kernel_is_the_reference_for_any_number_of_tokens(num_tokens, guarded_empty):  # noqa: F811
    draw = Draw(num_tokens)
    flags = itertools.product((False, True), repeat=3)
    sizes = ((24, 24, 256, 3), (60, 61, 512, 4), (100, 108, 768, 1), (128, 136, 256, 8))
    for (num_experts, num_rows, hidden, num_chosen), (plus_one, renormalise, has_shared) in zip(
        sizes * 2, flags, strict=True
    ):
        given = inputs(draw, num_tokens, num_rows, hidden)
        options = {
            "num_experts": num_experts, "plus_one": plus_one, "renormalise": renormalise, "has_shared": has_shared,
        }  # fmt: skip
        found, wanted = (
            assert_deterministic(
                lambda g=given, k=num_chosen, o=options, i=which: routed(g, 1e-6, k, implementation=i, **o), *given
            )
            for which in (TRITON, REFERENCE)
        )
        assert same_bits(found[1], wanted[1])
        assert relative_error(found[0], wanted[0]) < 1e-3
        is_same_T = found[3].eq(wanted[3]).all(dim=1)  # but where sums that round apart make or break a tie
        assert is_same_T.double().mean() > 0.9
        assert torch.allclose(found[2][is_same_T], wanted[2][is_same_T], rtol=1e-2)


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_where_sums_are_exact_it_has_the_bits_of_launches_of_their_own(num_tokens, has_shared):
    """Rows of one magnitude, a power of two, whose norm is exact; whole weights. Logits tie often."""
    draw = Draw(num_tokens)
    for plus_one, hidden in ((False, 256), (True, 2048)):
        sign_TD = draw.choice(1, 4) * (2 * draw.integers(0, 2, num_tokens, hidden) - 1).to(BF16)
        added_TD = draw.integers(-2, 3, num_tokens, hidden).to(BF16)
        weight_D, router_XD = draw.integers(-2, 3, hidden).to(BF16), draw.integers(-1, 2, 132, hidden).to(BF16) / 64
        given = sign_TD - added_TD, added_TD, weight_D, router_XD
        options = {"num_experts": 128, "plus_one": plus_one, "renormalise": True, "has_shared": has_shared}
        found, wanted = routed(given, 0.0, 8, implementation=TRITON, **options), apart(given, 0.0, 8, **options)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        for one, other in zip(routed(given, 0.0, 8, implementation=REFERENCE, **options), wanted, strict=True):
            assert torch.allclose(one, other, rtol=2e-6)


@pytest.mark.fast
@pytest.mark.parametrize("renormalise", [False, True])
def test_among_equals_the_lowest_wins_and_no_number_is_chosen_last(renormalise):
    inf, nan, big = float("inf"), float("nan"), 3e38
    logits_TE = torch.tensor(
        [
            [1, 3, 3, 2, 3, -1],
            [0.0, -0.0, 0.0, -1, -0.0, -2],
            [-inf, -5, -inf, -inf, -inf, -inf],
            [-1, -3, -2, -1, -2, -3],
            [1e-30, -1e-30, 0.0, -0.0, 2e-30, -2e-30],
        ]
    ).to(BF16)
    experts = [1, 2, 4, 3], [0, 1, 2, 4], [1, 0, 2, 3], [0, 3, 2, 4], [4, 0, 2, 3]
    for logits_1E, chosen in zip(logits_TE.split(1), experts, strict=True):
        found = routed(logits_as(logits_1E), 0.0, 4, renormalise=renormalise, implementation=TRITON)
        wanted = select_topk(logits_1E, 4, renormalise=renormalise, implementation=REFERENCE)
        assert found[3].tolist() == wanted[1].tolist() == [chosen]
        assert torch.allclose(found[2], wanted[0], rtol=2e-6)
    # A row of the router that is not finite: its products with zeros are NaN, with others what is asked for here.
    router_XD = torch.ones(5, 256, dtype=BF16)
    for its, value in ((1, nan), (3, inf), (4, -inf)):
        router_XD[its] = value
    router_XD[2] = big / 256
    ones = torch.ones(1, 256, dtype=BF16)
    found = routed((ones, 0 * ones, ones[0], router_XD), 0.0, 5, implementation=TRITON)
    assert found[3].tolist() == [[3, 2, 0, 1, 4]]
    assert found[2].isfinite().all()


@pytest.mark.fast
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_counters_are_left_as_zeros_and_rows_may_be_strided(num_tokens, guarded_empty):  # noqa: F811
    x_TD, added_TD, weight_D, router_XD = inputs(Draw(1), num_tokens, 40, 512)
    workspace = GemmWorkspace(torch.device("cpu"))
    options = {"num_experts": 36, "has_shared": True, "workspace": workspace, "implementation": TRITON}
    wanted = routed((x_TD, added_TD, weight_D, router_XD), 1e-6, 4, **options)
    apart_XD = torch.full((40, 520), float("nan"), dtype=BF16)
    apart_XD[:, :512] = router_XD
    given = strided(x_TD), strided(added_TD), weight_D, apart_XD[:, :512]
    for _ in range(2):
        found = routed(given, 1e-6, 4, **options)
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))
        assert not workspace.counters.any()


@pytest.mark.fast
def test_a_single_row_may_have_any_stride(monkeypatch):
    """A launch sees one, that of rows side by side, so that none is compiled for another."""
    x_TD, added_TD, weight_D, router_XD = inputs(Draw(1), 1, 40, 512)
    strides = []
    launch = norm_route_triton._launch_route
    monkeypatch.setattr(
        norm_route_triton, "_launch_route", lambda *given: (strides.append(given[1][1:4:2]), launch(*given))
    )
    for given in ((x_TD, added_TD), (x_TD.as_strided((1, 512), (1, 1)), added_TD.as_strided((1, 512), (3, 1)))):
        routed((*given, weight_D, router_XD), 1e-6, 4, implementation=TRITON)
    assert strides == [(512, 512)] * 2


@pytest.mark.fast
def test_a_row_depends_on_itself_alone():
    """Among rows of the same tile."""
    given = inputs(Draw(2), 9, 70, 256)
    found = routed(given, 1e-6, 3, implementation=TRITON)
    for row in (0, 4, 8):
        alone = *(rows[row : row + 1].expand(9, -1).contiguous() for rows in given[:2]), *given[2:]
        for one, other in zip(routed(alone, 1e-6, 3, implementation=TRITON), found, strict=True):
            assert same_bits(one[3], other[row])


@pytest.mark.fast
def test_plans():
    """All programs run at once on 132 multiprocessors. Qwen3.5-35B-A3B, Qwen3-30B, Qwen3-235B, and larger ones."""
    for num_rows, hidden, num_experts, most in (
        (264, 2048, 256, 64), (128, 2048, 128, 64), (128, 4096, 128, 64), (520, 2048, 512, 32), (264, 5120, 256, 32),
        (264, 7168, 256, 0), (64, 2000, 64, 0), (512, 4096, 512, 4),
    ):  # fmt: skip
        router_XD = torch.empty(num_rows, hidden, dtype=BF16)
        found = [num_tokens for num_tokens in range(300) if fits(num_tokens, router_XD, num_experts, 8)]
        assert found == list(range(1, most + 1)), (num_rows, hidden)
        for num_tokens in found:
            assert norm_route_triton.num_programs(num_tokens, num_rows, hidden) <= 132
    router_XD = torch.empty(128, 2048, dtype=BF16)
    assert not fits(1, router_XD.float(), 128, 8)
    assert not fits(1, router_XD[:, 1:].as_strided((128, 1792), (2048, 1)), 128, 8)
    assert not fits(1, torch.empty(128, 2052, dtype=BF16)[:, :2048], 128, 8)
    assert not fits(1, router_XD, 128, 33)


@pytest.mark.fast
def test_only_fused_numerics_that_are_not_batch_invariant_have_it():
    x_TD, added_TD, weight_D, router_XD = given = inputs(Draw(4), 3, 24, 256)
    sizes = x_TD, added_TD, weight_D, 1e-6, router_XD, 24, 4
    assert Ops(Numerics.INVARIANT, implementation=TRITON).norm_route(*sizes) is None
    assert Ops(Numerics.DEFAULT, implementation=REFERENCE).norm_route(*sizes) is None
    ops = Ops(Numerics.DEFAULT, implementation=TRITON)
    made = ops.norm_route(*sizes)
    assert made is not None
    wanted = routed(given, 1e-6, 4, implementation=TRITON)
    assert all(same_bits(one, other) for one, other in zip(parts_of(made), wanted, strict=True))
    ops.rechoose = lambda weight_TK, expert_TK: (weight_TK.fill_(0.5), expert_TK.fill_(7))
    made = ops.norm_route(*sizes, has_shared=True)
    assert made is not None
    assert made.expert_TK[0].tolist() == [7, 7, 7, 7, 24]
    assert made.weight_TK[0].tolist() == [0.5, 0.5, 0.5, 0.5, 1]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_what_does_not_fit_is_named(implementation):
    x_TD, added_TD, weight_D, router_XD = given = inputs(Draw(5), 2, 24, 256)
    for wrong, name in (
        ((x_TD.float(), *given[1:]), "x_TD"),
        ((x_TD, added_TD[:1], weight_D, router_XD), "added_TD"),
        ((x_TD, strided(added_TD, 1), weight_D, router_XD), "added_TD"),
        ((x_TD, added_TD, weight_D[1:], router_XD), "weight_D"),
        ((x_TD, added_TD, weight_D, router_XD.half()), "router_XD"),
        ((x_TD, added_TD, weight_D, router_XD[:, :128]), "router_XD"),
        (([rows.repeat(MAX_TOKENS, 1) for rows in given[:2]] + [weight_D, router_XD]), "router_XD"),
    ):
        with pytest.raises(KernelArgumentInvalid, match=name):
            routed(wrong, 1e-6, 4, implementation=implementation)
    for options, name in (({"num_experts": 25}, "num_experts"), ({"num_experts": 3}, "num_chosen")):
        with pytest.raises(KernelArgumentInvalid, match=name):
            routed(given, 1e-6, 4, implementation=implementation, **options)
