"""Routing: the kernel against its reference, both against Python's floats, ties and what is no number."""

import math

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.moe.select_topk import Scoring, select_topk
from baton.kernels.pointwise.silu_mul import silu_mul_fused
from baton.tests.kernels.harness import assert_deterministic, same_bits, strided
from baton.tests.kernels.moe_inputs import Draw, guarded_empty  # noqa: F401

BOTH = [Implementation.REFERENCE, Implementation.TRITON]
SIGMOID = Scoring.SIGMOID


def naive(logits, num_chosen, *, scoring, renormalise, bias, num_groups, num_kept, scaling):
    """One token, in Python's own floats."""
    if scoring is SIGMOID:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [math.exp(logit) / sum(math.exp(other) for other in logits) for logit in logits]
    choice = [score + bias[its] for its, score in enumerate(scores)] if bias else scores
    size = len(logits) // num_groups
    ranks = [sum(sorted(choice[group * size : group * size + size])[-2:]) for group in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda group: (-ranks[group], group))[:num_kept]
    allowed = [its for its in range(len(logits)) if its // size in kept]
    chosen = sorted(allowed, key=lambda its: (-choice[its], its))[:num_chosen]
    total = sum(scores[its] for its in chosen) if renormalise else 1
    return [scores[its] / total * scaling for its in chosen], chosen


ROUTERS = {
    "softmax": {},
    "renormalised": {"renormalise": True},
    "sigmoid": {"scoring": SIGMOID},
    "biased": {"scoring": SIGMOID, "bias": True, "renormalise": True, "scaling": 2.5},
    "groups": {"scoring": SIGMOID, "bias": True, "renormalise": True, "num_groups": 4, "num_kept_groups": 2},
    "biased softmax": {"bias": True},
}


def router(name, draw, num_experts):
    options = dict(ROUTERS[name])
    if options.pop("bias", False):
        options["bias_E"] = draw.normal(num_experts) / 5
    return options


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("name", ROUTERS)
def test_each_router_is_the_formula(name, implementation, guarded_empty):  # noqa: F811
    draw = Draw(len(name))
    for num_tokens, num_experts, num_chosen in ((5, 8, 3), (2, 24, 4), (1, 128, 8)):
        logits_TE = draw.normal(num_tokens, num_experts)
        options = router(name, draw, num_experts)
        weight_TK, expert_TK = assert_deterministic(
            lambda: select_topk(logits_TE, num_chosen, implementation=implementation, **options),  # noqa: B023
            logits_TE,
        )
        assert weight_TK.dtype == torch.float32
        bias = options.get("bias_E")
        for token in range(num_tokens):
            weights, experts = naive(
                logits_TE[token].double().tolist(),
                num_chosen,
                scoring=options.get("scoring", Scoring.SOFTMAX),
                renormalise=options.get("renormalise", False),
                bias=None if bias is None else bias.double().tolist(),
                num_groups=options.get("num_groups", 1),
                num_kept=options.get("num_kept_groups", 1),
                scaling=options.get("scaling", 1.0),
            )
            assert expert_TK[token].tolist() == experts
            assert torch.allclose(weight_TK[token].double(), torch.tensor(weights).double(), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 65])
def test_the_kernel_is_the_reference_for_any_number_of_tokens(num_tokens):
    draw = Draw(num_tokens)
    logits_TE = strided(draw.normal(num_tokens, 40, dtype=draw.choice(torch.bfloat16, torch.float16, torch.float32)))
    options = {"renormalise": True, "expert_dtype": draw.choice(torch.int32, torch.int64)}
    found, wanted = (select_topk(logits_TE, 2, implementation=which, **options) for which in BOTH)
    # bfloat16 logits tie often: the rule decides, and is the same.
    assert same_bits(found[1], wanted[1])
    assert torch.allclose(found[0], wanted[0], rtol=2e-6)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_zeros_are_one_among_logits_of_16_bits(dtype, implementation):
    """And what is no number, infinite, subnormal or negative is in its place."""
    inf, tiny = float("inf"), 2.0**-24
    logits_TE = torch.tensor(
        [
            [-1, -0.0, 0.0, -0.0, -2, -3],
            [-tiny, tiny, -0.0, 0.0, -2, -3],
            [float("nan"), inf, -inf, -60_000, 60_000, inf],
        ]
    ).to(dtype)
    weight_TK, expert_TK = select_topk(logits_TE, 5, implementation=implementation)
    assert expert_TK.tolist() == [[1, 2, 3, 0, 4], [1, 2, 3, 0, 4], [1, 5, 4, 3, 0]]
    assert weight_TK.isfinite().all()


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("scoring", list(Scoring))
def test_among_equals_the_lowest_index_wins(implementation, scoring):
    logits_TE = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 1.0, 1.0, 0.0], [2.0] * 8])
    _, expert_TK = select_topk(logits_TE, 5, scoring=scoring, implementation=implementation)
    assert expert_TK.tolist() == [[1, 2, 4, 0, 3], [0, 1, 2, 3, 4]]
    grouped = {"num_groups": 4, "num_kept_groups": 2}
    _, expert_TK = select_topk(logits_TE, 4, scoring=scoring, implementation=implementation, **grouped)
    assert expert_TK.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("scoring", list(Scoring))
def test_what_is_no_number_is_never_before_a_number(implementation, scoring):
    nan, inf = float("nan"), float("inf")
    logits_TE = torch.tensor([[nan, 1.0, nan, -2.0], [nan] * 4, [-inf] * 4, [0.0, inf, inf, nan]])
    weight_TK, expert_TK = select_topk(logits_TE, 3, scoring=scoring, renormalise=True, implementation=implementation)
    assert expert_TK.tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2], [1, 2, 0]]
    assert weight_TK.isfinite().all()
    assert weight_TK[0, 2] == 0
    assert weight_TK[1:3].eq(0).all()  # nothing is anything's share of nothing
    if scoring is Scoring.SOFTMAX:
        assert weight_TK[3].tolist() == [0.5, 0.5, 0]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
def test_groups_without_two_experts_are_kept_in_order(implementation):
    """Ranks of -inf tie, too: the lowest of these groups are kept, with whatever expert they have."""
    inf = float("inf")
    logits_TE = torch.tensor([[-inf, -inf, 5.0, -inf, 3.0, -inf], [-inf, -inf, -inf, 2.0, 1.0, 0.0]])
    grouped = {"num_groups": 3, "num_kept_groups": 2, "implementation": implementation}
    weight_TK, expert_TK = select_topk(logits_TE, 2, renormalise=True, **grouped)
    assert expert_TK.tolist() == [[2, 0], [4, 5]]
    assert weight_TK[0].tolist() == [1, 0]
    bias_E = torch.tensor([-inf, 0.1, -inf, 0.4, -inf, 0.2])
    _, expert_TK = select_topk(torch.zeros(1, 6), 2, scoring=SIGMOID, bias_E=bias_E, **grouped)
    assert expert_TK.tolist() == [[3, 1]]


@pytest.mark.parametrize("implementation", BOTH)
def test_a_token_is_routed_alike_beside_any_others(implementation):
    logits_TE = Draw(3).normal(9, 32, dtype=torch.bfloat16)
    whole = select_topk(logits_TE, 4, implementation=implementation)
    for token in range(9):
        alone = select_topk(logits_TE[token : token + 1], 4, implementation=implementation)
        assert same_bits(alone[0], whole[0][token : token + 1])
        assert same_bits(alone[1], whole[1][token : token + 1])


@pytest.mark.parametrize("implementation", BOTH)
def test_softmax_does_not_change_when_all_logits_are_shifted(implementation):
    logits_TE = Draw(4).integers(-40, 40, 6, 16).float() / 8  # so that shifts are exact
    before, after = (select_topk(logits_TE + by, 4, implementation=implementation) for by in (0.0, 1024.0))
    assert same_bits(before[0], after[0])
    assert same_bits(before[1], after[1])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("logits_TE", {"logits_TE": torch.zeros(8)}),
        ("logits_TE", {"logits_TE": torch.zeros(2, 8, dtype=torch.int32)}),
        ("logits_TE", {"logits_TE": torch.zeros(8, 2).T}),
        ("num_chosen", {"num_chosen": 0}),
        ("num_chosen", {"num_chosen": 9}),
        ("num_chosen", {"num_chosen": 5, "num_groups": 4, "num_kept_groups": 2}),
        ("num_groups", {"num_groups": 3}),
        ("num_groups", {"num_groups": 8}),
        ("num_kept_groups", {"num_kept_groups": 2}),
        ("bias_E", {"bias_E": torch.zeros(7)}),
        ("bias_E", {"bias_E": torch.zeros(8, dtype=torch.float64)}),
        ("expert_dtype", {"expert_dtype": torch.int16}),
    ],
)
def test_bad_arguments_are_named(argument, change):
    arguments = {"logits_TE": torch.zeros(2, 8), "num_chosen": 2, **change}
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        select_topk(**arguments)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
def test_no_token_is_no_choice(implementation):
    weight_TK, expert_TK = select_topk(torch.zeros(0, 8), 2, implementation=implementation)
    assert weight_TK.shape == expert_TK.shape == (0, 2)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("inner_size", [8, 512, 513, 1200])
def test_an_activation_beside_the_choice_has_the_bits_of_its_own_launch(inner_size, implementation, guarded_empty):  # noqa: F811
    """Of a view of the same rows, whatever its size; and the choice is the same."""
    draw = Draw(inner_size)
    for num_tokens, dtype in ((1, torch.bfloat16), (5, torch.float16), (70, torch.bfloat16)):
        rows_TX = draw.normal(num_tokens, 2 * inner_size + 24, dtype=dtype)
        gate_up_TJ, logits_TE = rows_TX.tensor_split([2 * inner_size], dim=1)
        inner_TI = torch.empty(num_tokens, inner_size, dtype=dtype)
        options = {"renormalise": True, "implementation": implementation}
        found = select_topk(logits_TE, 4, beside=(gate_up_TJ, inner_TI), **options)
        wanted = select_topk(logits_TE, 4, **options)
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))
        assert same_bits(inner_TI, silu_mul_fused(gate_up_TJ, implementation=implementation).rows)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
def test_an_activation_that_does_not_fit_is_refused_by_name(implementation):
    logits_TE, gate_up_TJ, inner_TI = torch.zeros(3, 8), torch.zeros(3, 12), torch.zeros(3, 6)
    for wrong in (
        (gate_up_TJ, inner_TI[:, :5]),
        (gate_up_TJ[:2], inner_TI),
        (gate_up_TJ, strided(inner_TI)),
        (strided(gate_up_TJ, 1), inner_TI),
        (gate_up_TJ.double(), inner_TI),
        (gate_up_TJ[:, :0], inner_TI[:, :0]),
    ):
        with pytest.raises(KernelArgumentInvalid, match="beside"):
            select_topk(logits_TE, 2, beside=wrong, implementation=implementation)
    select_topk(logits_TE, 2, beside=(strided(gate_up_TJ), inner_TI), implementation=implementation)
