"""A shared expert as the last choice of every token, in the interpreter, against the reference and its formula."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import baton
from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.moe import gemm as module
from baton.kernels.moe import shared_plan, vector_plan
from baton.kernels.moe.align import moe_align
from baton.kernels.moe.gemm import choose_tiles, experts_grouped
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.moe.select_topk import Scoring, select_topk
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits, strided
from baton.tests.kernels.moe_inputs import Draw, guarded_empty, some_experts  # noqa: F401
from baton.tests.kernels.test_moe_gemm import naive

REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON
BOTH = [REFERENCE, TRITON]
F32 = torch.float32
RESULTS = Path(baton.__file__).parent / "benchmarks/results"


def chosen(draw, num_tokens, num_experts, num_chosen, hidden):
    """Inputs of a layer whose last expert is the last choice of every token."""
    expert_TK = draw.experts(num_tokens, num_experts - 1, num_chosen - 1)
    expert_TK = torch.cat([expert_TK, torch.full((num_tokens, 1), num_experts - 1)], dim=1)
    x_TD = draw.normal(num_tokens, hidden, dtype=torch.bfloat16)
    return x_TD, draw.normal(num_tokens, num_chosen).sigmoid(), expert_TK


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 33])
def test_it_is_added_as_any_other_expert(kind, num_tokens, monkeypatch, guarded_empty):  # noqa: F811
    monkeypatch.setattr(vector_plan, "_APART", 0)
    draw = Draw(num_tokens)
    sizes = ((48, 80, 5, 4), (130, 264, 10, 6)) if kind == "bf16" else ((128, 128, 5, 4), (256, 384, 10, 3))
    for inner_size, hidden, num_experts, num_chosen in sizes[num_tokens % 2 :]:
        plain = draw.weights(num_experts, inner_size, hidden, kind)
        weights = replace(plain, has_shared=True)
        inputs = chosen(draw, num_tokens, num_experts, num_chosen, hidden)
        options = {"out_dtype": F32, "implementation": TRITON}
        found = assert_deterministic(lambda i=inputs, w=weights, o=options: experts_grouped(*i, w, **o), *inputs)
        wanted = experts_grouped(*inputs, weights, out_dtype=F32, implementation=REFERENCE)
        assert relative_error(found, wanted) < 1e-3
        assert relative_error(found, naive(*inputs, plain)) < 6e-3


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_ninth_choice_is_planned_for_as_eight_are(kind, monkeypatch):
    """Neither the form nor the tiles of the routed experts change."""
    monkeypatch.setattr(vector_plan, "_APART", 1)
    draw, asked = Draw(1), []
    is_quicker, choose = vector_plan.is_quicker, choose_tiles
    monkeypatch.setattr(vector_plan, "is_quicker", lambda *a, **k: asked.append(a) or is_quicker(*a, **k))
    monkeypatch.setattr(module, "choose_tiles", lambda *a: asked.append(a) or choose(*a))
    weights = replace(draw.weights(9, 128, 128, kind), has_shared=True)
    for num_tokens in (1, 5):
        experts_grouped(*chosen(draw, num_tokens, 9, 3, 128), weights, implementation=TRITON)
    assert asked == [(1, 2, 8, 128, 128), (5, 2, 8, 128, 128), (8, 128, 128, kind == "fp8", 10, 2, None)]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_its_weight_is_1_or_that_of_its_gate_whatever_the_others_weigh(implementation, dtype):
    draw = Draw(7)
    rows_TX = draw.normal(6, 24, dtype=dtype)
    logits_TE, gate_T1 = rows_TX[:, :16], rows_TX[:, 16:17]
    routers = (
        {"renormalise": True},
        {"scoring": Scoring.SIGMOID, "scaling": 2.5, "num_groups": 4, "num_kept_groups": 2, "renormalise": True},
    )
    for router, num_chosen, gate in itertools.product(routers, (1, 3, 8), (None, gate_T1)):
        options = router | {"implementation": implementation}
        weight_TK, expert_TK = select_topk(logits_TE, num_chosen, **options)
        found = select_topk(logits_TE, num_chosen, has_shared=True, gate_T1=gate, **options)
        assert same_bits(found[0][:, :-1], weight_TK)
        assert same_bits(found[1][:, :-1], expert_TK)
        assert found[0].is_contiguous()
        assert found[1].is_contiguous()
        assert found[1][:, -1].eq(16).all()
        wanted = torch.ones(6).double() if gate is None else 1 / (1 + torch.exp(-gate[:, 0].double()))
        assert torch.allclose(found[0][:, -1].double(), wanted, rtol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("num_experts", [2, 9, 65, 257, 264, 265])
def test_its_rows_are_in_blocks_behind_those_of_all_others(num_experts):
    """Its number is one past a power of two: bins are counted for the others alone."""
    for num_tokens in (1, 17, 40):
        num_chosen = min(8, num_experts - 1)
        expert_TK = chosen(Draw(num_tokens), num_tokens, num_experts, num_chosen + 1, 1)[2]
        found, wanted = (moe_align(expert_TK, num_experts, 16, implementation=which) for which in BOTH[::-1])
        num_used = int((wanted.block_expert >= 0).sum())
        assert torch.equal(found.block_expert, wanted.block_expert)
        assert torch.equal(found.rows[: 16 * num_used], wanted.rows[: 16 * num_used])
        assert found.block_expert[num_used - -(-num_tokens // 16) : num_used].eq(num_experts - 1).all()


@pytest.mark.fast
def test_plans():
    """Of Qwen3.5-35B-A3B in both dtypes, and of DeepSeek-V3."""
    assert shared_plan.steps(512, 2048, is_fp8=False) == range(1, 129)
    assert shared_plan.steps(512, 2048, is_fp8=True) == range(1, 257)
    assert shared_plan.steps(2048, 7168, is_fp8=True) == range(2, 33)
    assert shared_plan.steps(64, 64, is_fp8=True) == range(1, 257)
    assert shared_plan.steps(1408, 2048, is_fp8=True) == range(1, 65)
    assert shared_plan.steps(1 << 15, 1 << 13, is_fp8=False) == range(2, 17)


@pytest.mark.fast
def test_plans_take_what_was_measured_to_be_quicker():
    """But for 2 %, on an H200."""
    measured = json.loads((RESULTS / "moe-shared-h200.json").read_text())["rows"]
    sizes = {"qwen3.5-35b-a3b": (512, 2048), "deepseek-v3": (2048, 7168)}
    for row in measured:
        steps = shared_plan.steps(*sizes[row["shape"]], is_fp8=row["weights"] == "float8")
        planned_us = row["choice_us" if row["T"] in steps else "apart_us"]
        assert planned_us < 1.02 * min(row["choice_us"], row["apart_us"]), row
    assert len(measured) == 33


@pytest.mark.fast
@pytest.mark.parametrize("implementation", BOTH)
def test_what_does_not_fit_is_named(implementation):
    draw = Draw(3)
    weights = replace(draw.weights(3, 128, 128, "bf16"), has_shared=True)
    inputs = chosen(draw, 2, 3, 2, 128)
    options = {"implementation": implementation}
    with pytest.raises(KernelArgumentInvalid, match="has_shared"):
        experts_grouped(*inputs, replace(weights, held=HeldExperts(0, 3, 6)), **options)
    with pytest.raises(KernelArgumentInvalid, match="expert_TK"):
        experts_grouped(inputs[0], inputs[1][:, 1:], inputs[2][:, 1:], weights, **options)
    single = replace(some_experts(weights, torch.arange(1)), has_shared=True)
    with pytest.raises(KernelArgumentInvalid, match="expert_TK"):
        experts_grouped(*inputs, single, **options)
    logits_TE = draw.normal(2, 4)
    with pytest.raises(KernelArgumentInvalid, match="gate_T1"):
        select_topk(logits_TE, 2, gate_T1=logits_TE[:, :1], **options)
    with pytest.raises(KernelArgumentInvalid, match="gate_T1"):
        select_topk(logits_TE, 2, has_shared=True, gate_T1=logits_TE[:1, :1], **options)
    select_topk(strided(logits_TE), 2, has_shared=True, gate_T1=strided(logits_TE)[:, 1:2], **options)
