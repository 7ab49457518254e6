"""Made-up choices: balanced and distinct, in place, and out of reach of whatever serves."""

import ast
from pathlib import Path

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.moe.fake_balance import ACKNOWLEDGEMENT, fake_balance_experts
from baton.tests.kernels.harness import Guards, same_bits

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON


def balanced(
    num_tokens, num_chosen, implementation=REFERENCE, dtype=torch.int64, wide=torch.float32, beside=0, **options
):
    """What is chosen, in rows that have `beside` columns more, which stay as they are."""
    guards = Guards()
    expert_TX = guards.empty(num_tokens, num_chosen + beside, dtype=dtype).fill_(-7)
    weight_TX = guards.empty(num_tokens, num_chosen + 2 * beside, dtype=wide).fill_(-7)
    expert_TK, weight_TK = expert_TX[:, :num_chosen], weight_TX[:, :num_chosen]
    fake_balance_experts(expert_TK, weight_TK, benchmark=ACKNOWLEDGEMENT, implementation=implementation, **options)
    guards.check()
    assert weight_TK.eq(1).all()
    assert expert_TX[:, num_chosen:].eq(-7).all()
    assert weight_TX[:, num_chosen:].eq(-7).all()
    return expert_TK


@pytest.mark.long
@pytest.mark.parametrize("num_experts", [128, 256])
@pytest.mark.parametrize("num_chosen", [4, 8])
def test_choices_are_distinct_and_every_expert_and_rank_gets_its_share(num_experts, num_chosen):
    for ep_size in (1, 2, 8, 64):
        for dp_size in {1, max(1, ep_size // 2), ep_size}:
            for num_tokens in (1, 7, 64):
                total_E = torch.zeros(num_experts, dtype=torch.int64)
                for dp_rank in range(dp_size):
                    options = {"dp_rank": dp_rank, "dp_size": dp_size, "ep_size": ep_size}
                    expert_TK = balanced(num_tokens, num_chosen, num_experts=num_experts, **options)
                    assert 0 <= expert_TK.min()
                    assert expert_TK.max() < num_experts
                    assert (expert_TK.sort(dim=1).values.diff(dim=1) > 0).all()
                    total_E += torch.bincount(expert_TK.flatten(), minlength=num_experts)
                assert total_E.max() - total_E.min() <= 1
                total_R = total_E.view(ep_size, -1).sum(dim=1)
                assert total_R.max() - total_R.min() <= 1


@pytest.mark.parametrize(("dtype", "wide"), [(torch.int32, torch.float32), (torch.int64, torch.float64)])
def test_the_kernel_is_the_reference(dtype, wide):
    for num_tokens, options in (
        (1, {"num_experts": 8}),
        (700, {"num_experts": 48, "ep_size": 6, "dp_rank": 2, "dp_size": 3}),
        (5, {"num_experts": 8, "ep_size": 8, "dp_rank": 3, "dp_size": 4}),
    ):
        for beside in (0, 1):
            options["beside"] = beside
            found, wanted = (balanced(num_tokens, 2, which, dtype, wide, **options) for which in (TRITON, REFERENCE))
            assert same_bits(found, wanted)


def test_who_does_not_say_that_it_is_a_benchmark_is_refused():
    expert_TK, weight_TK = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2)
    with pytest.raises(TypeError, match="benchmark"):
        fake_balance_experts(expert_TK, weight_TK, num_experts=4)
    with pytest.raises(KernelArgumentInvalid, match="refused while serving"):
        fake_balance_experts(expert_TK, weight_TK, num_experts=4, benchmark="yes")
    assert expert_TK.eq(0).all()
    assert weight_TK.eq(0).all()


@pytest.mark.long
def test_nothing_that_serves_can_reach_it():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[0] in ("bench", "tests") or path.name.startswith("fake_balance") or parts[0].startswith("."):
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "fake_balance" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert "fake_balance" not in " ".join([module, *names]), path


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("expert_TK", {"expert_TK": torch.zeros(2, 2)}),
        ("expert_TK", {"expert_TK": torch.zeros(2, 4, dtype=torch.int64)[:, ::2]}),
        ("weight_TK", {"weight_TK": torch.zeros(2, 4)[:, ::2]}),
        ("expert_TK", {"num_experts": 1}),
        ("weight_TK", {"weight_TK": torch.zeros(2, 3)}),
        ("num_experts", {"ep_size": 3}),
        ("num_experts", {"num_experts": 1 << 31}),
        ("ep_size", {"ep_size": 0}),
        ("dp_rank", {"dp_rank": 1}),
    ],
)
def test_bad_arguments_are_named(argument, change):
    arguments = {"expert_TK": torch.zeros(2, 2, dtype=torch.int64), "weight_TK": torch.zeros(2, 2), "num_experts": 4}
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        fake_balance_experts(**{**arguments, "benchmark": ACKNOWLEDGEMENT, **change})
