"""GEMMs with a float8 weight: the kernel in the interpreter in all its forms, the reference, the choice of plans."""

from dataclasses import replace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels import tuning
from baton.kernels.gemm import fp8 as module
from baton.kernels.gemm import fp8_triton as gemm_fp8_triton
from baton.kernels.gemm.fp8 import gemm_fp8, gemm_fp8_reference, linear_fp8, linear_quantized, num_quantized
from baton.kernels.gemm.fp8_hopper_triton import is_form, num_counters, programs_at_once
from baton.kernels.gemm.fp8_plan import (
    TABLES,
    GemmPlan,
    SwapAB,
    invariant_plan,
    machine_of,
    plan_of,
    predicted_plan,
    rule,
    size_of,
    splits_of,
)
from baton.kernels.gemm.fp8_weight import Fp8Weight, quantize_weight
from baton.kernels.gemm.quantize_fp8 import Fp8Rows, dequantize_fp8, quantize_fp8
from baton.kernels.gemm.workspace import GemmWorkspace, default_workspace
from baton.kernels.implementation import Implementation
from baton.kernels.memo import Memo
from baton.tests.kernels.harness import Guards, assert_deterministic, bits, poison, relative_error, same_bits, strided

TRITON = Implementation.TRITON
ROWS = [1, 2, 7, 8, 15, 16, 63, 64, 65, 128]
CPU = torch.device("cpu")
# Sums that differ by some units of float32 are rounded to bfloat16, a few of them to the other side.
CLOSE = 1e-3


def data(M, N, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(N, K, generator=generator) * torch.rand(N, 1, generator=generator)
    return x, quantize_weight(weight)


def exact(a, scales, weight):
    """Group by group in float64, from the definition."""
    total = torch.zeros(len(a), weight.num_outputs, dtype=torch.float64)
    row_block = torch.arange(weight.num_outputs) // 128
    for group in range(weight.num_inputs // 128):
        columns = slice(128 * group, 128 * group + 128)
        part = a[:, columns].double() @ weight.values_NK[:, columns].double().t()
        total += part * scales[group].double()[:, None] * weight.scales_BG[row_block, group].double()[None, :]
    return total


def assert_gemm(found, a, scales, weight):
    """Every element within one rounding to bfloat16 of the exact one, and of what float32 loses in a sum."""
    wanted = exact(a, scales, weight)
    positive = Fp8Weight(weight.values_NK.float().abs().to(torch.float8_e4m3fn), weight.scales_BG)
    magnitude = exact(a.float().abs().to(torch.float8_e4m3fn), scales, positive)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + magnitude * 1e-6).all()


@pytest.mark.fast
def test_the_reference_is_the_definition():
    x, weight = data(9, 200, 384)
    a, scales = quantize_fp8(x)
    assert_gemm(gemm_fp8_reference(a, scales, weight), a, scales, weight)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("swap_ab", ["on", "off"])
def test_rows_of_all_numbers(num_rows, swap_ab):
    x, weight = data(num_rows, 130, 256, num_rows)
    a, scales = quantize_fp8(x)
    found = assert_deterministic(
        lambda: gemm_fp8(a, scales, weight, swap_ab=swap_ab, implementation=TRITON), a, scales, weight.values_NK
    )
    assert_gemm(found, a, scales, weight)


PLANS = [
    GemmPlan(BM=16, BN=64),
    GemmPlan(BM=16, BN=128, splits=3),
    GemmPlan(BM=32, BN=64, groups=2, stages=3, splits=2),
    GemmPlan(BM=16, BN=64, splits=5, tma=True, copied=True),
    GemmPlan(BM=64, BN=128, groups=2, tma=True),
    GemmPlan(swap=False, BM=16, BN=128, splits=4),
    GemmPlan(swap=False, BM=64, BN=32, tma=True, groups=2),
    GemmPlan(swap=False, BM=32, BN=64, tma=True, groups=2, copied=True),
    GemmPlan(BM=16, BN=64, fused=True, splits=2),
    GemmPlan(BM=16, BN=128, fused=True, tma=True, groups=2),
    GemmPlan(BM=16, BN=128, fused=True, copied=True, groups=2, splits=2),
    GemmPlan(BM=16, BN=64, pdl=True, splits=6),
    GemmPlan(BM=16, BN=32, groups=2, copied=True, splits=3),
    GemmPlan(BM=8, BN=32, groups=2, tma=True),
    GemmPlan(BM=8, BN=16, groups=4, stages=2, copied=True, fused=True, splits=2),
]


@pytest.mark.parametrize(
    ("plan", "num_sms"), [(plan, None) for plan in PLANS] + [(PLANS[0], 1), (PLANS[3], 3), (PLANS[7], 5)]
)
def test_every_form_of_the_kernel_between_guards(plan, num_sms):
    x, weight = data(17, 70, 1024 if plan.groups == 4 else 768, 1)
    guards = Guards()
    guarded = Fp8Weight(guards.copy(weight.values_NK), weight.scales_BG)
    x = guards.copy(x)
    a, scales = (guards.copy(tensor) for tensor in quantize_fp8(x))
    workspace = GemmWorkspace(CPU)
    out = guards.empty(17, 70)
    linear_out = guards.empty(17, 70)
    found = gemm_fp8(a, scales, guarded, out_MN=out, plan=plan, num_sms=num_sms, workspace=workspace,
                     implementation=TRITON)  # fmt: skip
    linear_fp8(x, guarded, out_MN=linear_out, plan=plan, num_sms=num_sms, workspace=workspace, implementation=TRITON)
    guards.check()
    assert found is out
    assert_gemm(out, a, scales, weight)
    assert same_bits(out, linear_out), "quantizing in the same call changes nothing"
    assert not workspace.counters.any(), "the next launch finds zeros"


@pytest.mark.long
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_one_call_has_the_bits_of_two(fused, ue8m0):
    x, weight = data(5, 72, 384, 2)
    weight, plan = replace(weight, ue8m0=ue8m0), GemmPlan(fused=fused)
    found = linear_fp8(x, weight, plan=plan, implementation=TRITON)
    a, scales = quantize_fp8(x, ue8m0=ue8m0)
    assert same_bits(found, gemm_fp8(a, scales, weight, plan=plan, implementation=TRITON))


@pytest.mark.fast
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.long
def test_strided_rows_of_everything(fused):
    x, weight = data(6, 70, 256, 3)
    wanted = linear_fp8(x, weight, implementation=TRITON, plan=GemmPlan())
    out = poison(torch.empty(6, 200, dtype=torch.bfloat16))
    linear_fp8(strided(x), weight, out_MN=out[:, 64:134], plan=GemmPlan(fused=fused, splits=2), implementation=TRITON)
    assert relative_error(out[:, 64:134], wanted) < CLOSE
    assert out[:, :64].isnan().all() and out[:, 134:].isnan().all()
    a, scales = quantize_fp8(x)
    found = gemm_fp8(strided(a), strided(scales), weight, plan=GemmPlan(), implementation=TRITON)
    assert same_bits(found, wanted)


@pytest.mark.fast
@pytest.mark.parametrize("swap", [True, False])
def test_a_rows_nan_stays_in_its_row(swap):
    x, weight = data(5, 70, 256, 4)
    plan = GemmPlan(swap=swap)
    wanted = linear_fp8(x, weight, plan=plan, implementation=TRITON)
    x[2, 200] = float("nan")
    x[3, 7] = float("inf")
    found = linear_fp8(x, weight, plan=plan, implementation=TRITON)
    assert found[2:4].isnan().all()
    assert same_bits(found[[0, 1, 4]], wanted[[0, 1, 4]])


@pytest.mark.fast
def test_swapped_and_plain_are_the_same_sums():
    x, weight = data(16, 128, 384, 5)
    a, scales = quantize_fp8(x)
    swapped = gemm_fp8(a, scales, weight, plan=GemmPlan(BM=16, splits=3), implementation=TRITON)
    plain = gemm_fp8(a, scales, weight, plan=GemmPlan(swap=False, BM=16, splits=3), implementation=TRITON)
    assert relative_error(swapped, plain) < CLOSE


@pytest.mark.parametrize("implementation", [TRITON, Implementation.REFERENCE])
def test_invariant_rows_know_no_neighbours(implementation):
    x, weight = data(70, 70, 1024, 6)
    whole = linear_fp8(x, weight, invariant=True, implementation=implementation)
    assert relative_error(whole, linear_fp8(x, weight)) < CLOSE
    for rows in (slice(0, 1), slice(64, 70), slice(1, 66)):
        part = linear_fp8(x[rows], weight, invariant=True, implementation=implementation)
        assert same_bits(part, whole[rows].contiguous())
    a, scales = quantize_fp8(x)
    found = gemm_fp8(a, scales, weight, invariant=True, implementation=implementation)
    assert same_bits(found, whole)


def test_many_rows_with_splits_go_in_several_launches(monkeypatch):
    x, weight = data(37, 70, 256, 7)
    plan = GemmPlan(splits=2)
    wanted = linear_fp8(x, weight, plan=plan, implementation=TRITON)
    monkeypatch.setattr(gemm_fp8_triton, "_MAX_SPLIT_ROWS", 16)
    assert same_bits(linear_fp8(x, weight, plan=plan, implementation=TRITON), wanted)
    monkeypatch.setattr(gemm_fp8_triton, "MAX_TILES", 2)
    assert same_bits(linear_fp8(x, weight, plan=plan, implementation=TRITON), wanted)


@pytest.mark.fast
def test_no_rows_at_all():
    _, weight = data(1, 64, 128)
    for implementation in (TRITON, Implementation.REFERENCE):
        found = linear_fp8(torch.empty(0, 128, dtype=torch.bfloat16), weight, implementation=implementation)
        assert found.shape == (0, 64)


@pytest.mark.fast
def test_a_cpu_computes_the_reference():
    x, weight = data(3, 64, 128)
    a, scales = quantize_fp8(x)
    assert same_bits(linear_fp8(x, weight), gemm_fp8_reference(a, scales, weight))
    assert relative_error(linear_fp8(x, weight), dequantize_fp8(a, scales) @ weight.dequantize().t()) < 3e-3


@pytest.mark.fast
def test_what_does_not_fit_is_refused_by_name():
    x, weight = data(3, 64, 256)
    a, scales = quantize_fp8(x)
    for argument, call in {
        "a_MK": lambda: gemm_fp8(a[:, :128], scales, weight),
        "scales_GM": lambda: gemm_fp8(a, scales[:, :2], weight),
        "x_MK": lambda: linear_fp8(x.float(), weight, implementation=TRITON),
        "out_MN": lambda: linear_fp8(x, weight, out_MN=torch.empty(3, 63, dtype=torch.bfloat16)),
        "num_sms": lambda: linear_fp8(x, weight, num_sms=0),
        "swap_ab": lambda: linear_fp8(x, weight, swap_ab="yes", implementation=TRITON),
    }.items():
        with pytest.raises(KernelArgumentInvalid, match=rf"^{argument}:"):
            call()
    for others in ({"implementation": Implementation.REFERENCE}, {"implementation": TRITON, "plan": GemmPlan()}):
        with pytest.raises(KernelArgumentInvalid, match=r"^swap_ab:"):
            gemm_fp8(a, scales, weight, swap_ab="yes", **others)


@pytest.mark.fast
@pytest.mark.parametrize(
    "plan",
    [
        GemmPlan(splits=3),
        GemmPlan(groups=4),
        GemmPlan(swap=False, BN=16),
        GemmPlan(BN=48),
        GemmPlan(swap=False, BM=64, BN=48),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused_by_name(plan):
    x, weight = data(3, 64, 512 if plan.groups == 4 else 256)
    with pytest.raises(KernelArgumentInvalid, match=r"^plan:"):
        linear_fp8(x, weight, plan=plan, implementation=TRITON)


@pytest.mark.fast
def test_the_reference_takes_and_gives_float32():
    x, weight = data(3, 64, 256)
    wide = linear_fp8(x.float(), weight)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.bfloat16(), linear_fp8(x, weight))
    assert linear_fp8(x[:0].float(), weight).dtype is torch.float32


@pytest.mark.fast
def test_swapping_is_refused_where_no_instruction_gains_by_it():
    with pytest.raises(KernelArgumentInvalid, match=r"^swap_ab:"):
        plan_of("gemm_fp8", 4, 64, 128, SwapAB.ON, can_swap=False, device_index=None)
    plan = plan_of("gemm_fp8", 4, 64, 128, SwapAB.AUTO, can_swap=False, device_index=None)
    assert plan is not None and not plan.swap


@pytest.mark.fast
def test_the_table_decides_and_may_name_the_library(monkeypatch):
    rows = {"gemm_fp8": {"512x256": {"16": GemmPlan(splits=2).row(), "64": {"library": True}}}}
    monkeypatch.setattr("baton.kernels.gemm.fp8_plan.find", lambda kernel, shape, size, _: (
        rows.get(kernel, {}).get(shape, {}).get("16" if size <= 16 else "64")
    ))  # fmt: skip

    def chosen(num_rows, swap_ab=SwapAB.AUTO, table="gemm_fp8"):
        return plan_of(table, num_rows, 512, 256, swap_ab, can_swap=True, device_index=None)

    def predicted(num_rows):
        return predicted_plan(size_of(num_rows), 512, 256, machine_of(None))[0]

    assert chosen(9) == GemmPlan(splits=2)
    assert chosen(17) is None
    assert chosen(17, SwapAB.ON) == rule(17, 512, 256, swap=True)
    assert chosen(9, SwapAB.OFF) == rule(9, 512, 256, swap=False)
    assert chosen(9, table="linear_fp8") == predicted(9)
    assert chosen(600, table="linear_fp8") is None, "of many rows there is one table"
    assert chosen(300) == predicted(300), "a row of the table stands for its own power of two"
    rows["gemm_fp8"]["512x256"]["64"] = GemmPlan(BM=64, BN=128).row()
    assert chosen(100) == GemmPlan(BM=64, BN=128)
    assert chosen(600) == predicted(600), "what was tuned for few rows says nothing of many"
    monkeypatch.setattr("baton.kernels.gemm.fp8_cost.library_us", lambda *_: 0.0)
    predicted_plan.cache_clear()
    assert chosen(300) is None
    predicted_plan.cache_clear()


@pytest.mark.fast
@pytest.mark.long
def test_plans_with_workers_are_for_hopper_and_rows_that_it_can_copy(monkeypatch):
    plan = GemmPlan(swap=False, BM=64, BN=32, stages=8, workers=2)
    monkeypatch.setattr("baton.kernels.gemm.fp8_plan.find", lambda *_: plan.row())
    launched = []
    monkeypatch.setattr(module.gemm_fp8_triton, "launch", lambda *arguments, **_: launched.append(arguments[4]))
    monkeypatch.setattr(module.gemm_fp8_hopper_triton, "launch", lambda *arguments: launched.append(arguments[4]))
    x, weight = data(20, 64, 256)
    a, scales = quantize_fp8(x)
    linear_fp8(x, weight, implementation=TRITON)
    assert launched.pop() == rule(20, 64, 256, swap=True), "Triton's interpreter cannot run it"
    with pytest.raises(KernelArgumentInvalid, match=r"^plan:"):
        linear_fp8(x, weight, plan=plan, implementation=TRITON)
    monkeypatch.setattr(module.gemm_fp8_hopper_triton, "_is_hopper", lambda _: True)
    _, weight = data(20, 72, 256)  # none of what was decided is about it
    linear_fp8(x, weight, implementation=TRITON)
    assert launched.pop() == plan
    gemm_fp8(a, scales, weight, implementation=TRITON)
    assert launched.pop() == plan
    gemm_fp8(torch.cat([a, a[:, :8]], 1)[:, :256], scales, weight, implementation=TRITON)
    assert launched.pop() == rule(20, 72, 256, swap=True), "rows are not 16 bytes apart"
    gemm_fp8(a, scales, weight, num_sms=4, implementation=TRITON)
    assert launched.pop() == rule(20, 72, 256, swap=True)
    linear_fp8(x, weight, invariant=True, implementation=TRITON)
    assert launched.pop() == invariant_plan(72, 256)
    monkeypatch.setattr(module, "_capability", lambda _: (8, 9))
    _, weight = data(20, 80, 256)
    linear_fp8(x, weight, implementation=TRITON)
    assert launched.pop().workers == 2, "what the device is, is asked in one place"
    monkeypatch.setattr(module.gemm_fp8_hopper_triton, "_is_hopper", lambda _: False)
    _, weight = data(20, 88, 256)
    linear_fp8(x, weight, implementation=TRITON)
    assert launched.pop() == rule(20, 88, 256, swap=False)
    assert not launched


@pytest.mark.fast
def test_which_plans_with_workers_there_are():
    plan = GemmPlan(swap=False, BM=64, BN=32, stages=16, workers=2)
    assert is_form(plan)
    assert is_form(replace(plan, splits=4))
    half = replace(plan, stages=8)
    assert (programs_at_once(plan), programs_at_once(half)) == (1, 2)
    assert is_form(half)
    for other in (
        replace(half, splits=2),
        replace(plan, stages=18),
        replace(plan, stages=3),
        replace(plan, workers=3),
        replace(plan, BM=128, stages=8, workers=1),
        replace(plan, BM=32),
        replace(plan, groups=2),
        replace(plan, fused=True),
        replace(plan, depth=0),
    ):
        assert not is_form(other), other
    assert num_counters(plan, 65, 100) == 0
    assert num_counters(replace(plan, splits=2), 65, 100) == 2 * 4
    assert num_counters(replace(plan, BM=128, stages=10, splits=2), 65, 100) == 4 * 2


@pytest.mark.fast
def test_rows_of_the_table_with_workers_are_such_programs_and_no_split_is_empty():
    found = 0
    for name in TABLES:
        for shape, sizes in tuning.table()[name].items():
            num_groups = int(shape.split("x")[1]) // 128
            for row in sizes.values():
                if row.get("workers"):
                    assert is_form(GemmPlan(**row)), (name, shape, row)
                    assert row["splits"] <= num_groups, (name, shape, row)
                    found += 1
    assert found > 20


@pytest.mark.fast
def test_rules_fill_the_device_and_cut_no_split_too_short():
    assert splits_of(24576, 4096, 64) == 1
    assert splits_of(4096, 4096, 64) == 4
    assert splits_of(2112, 7168, 64) == 8
    assert splits_of(64, 128, 64) == 1
    for N, K in ((2112, 7168), (6144, 4096), (7168, 16384)):
        assert invariant_plan(N, K) == invariant_plan(N, K)
        for num_rows in (1, 17, 64, 500):
            for swap in (True, False):
                plan = rule(num_rows, N, K, swap=swap)
                assert plan.splits <= max(1, K // 128 // 4)


@pytest.mark.fast
def test_a_library_that_refuses_is_replaced_and_counted(monkeypatch):
    x, weight = data(3, 64, 128)
    monkeypatch.setattr(module, "_chosen", lambda *_: None)
    before = module.LIBRARY.num_refused
    found = linear_fp8(x, weight, implementation=TRITON)
    assert module.LIBRARY.num_refused == before + 1
    assert found.shape == (3, 64)
    assert relative_error(found, linear_fp8(x, weight)) < CLOSE


@pytest.mark.fast
@pytest.mark.long
def test_on_hopper_a_predicted_plan_replaces_a_library_that_refuses(monkeypatch):
    x, weight = data(300, 256, 384)
    launched = []
    monkeypatch.setattr(module, "_chosen", lambda *_: None)
    monkeypatch.setattr(module.gemm_fp8_hopper_triton, "_is_hopper", lambda _: True)
    monkeypatch.setattr(module.gemm_fp8_hopper_triton, "launch", lambda *arguments: launched.append(arguments[4]))
    linear_fp8(x, weight, implementation=TRITON)
    assert launched == [predicted_plan(512, 256, 384, machine_of(None))[0]]


@pytest.mark.fast
def test_what_the_library_pads_is_cut_off(monkeypatch):
    x, weight = data(3, 64, 128)
    monkeypatch.setattr(module, "_chosen", lambda *_: None)
    monkeypatch.setattr(module.LIBRARY, "gemm", gemm_fp8_reference)
    assert torch.equal(bits(linear_fp8(x, weight, implementation=TRITON)), bits(linear_fp8(x, weight)))


@pytest.mark.parametrize(
    ("plan", "counts"),
    [(None, {1: 4, 4: 4, 5: 8}), (GemmPlan(BM=16, BN=64), {1: 1, 5: 5}), (GemmPlan(fused=True), {1: None, 5: None})],
)
def test_rows_that_come_quantized_are_as_many_as_the_call_makes_and_give_its_bits(plan, counts, monkeypatch):
    """The library's are padded, and none are where each program quantizes for itself."""
    for memo in ("_LINEARS", "_ROWS", "_QUANTIZED"):
        monkeypatch.setattr(module, memo, Memo())
    monkeypatch.setattr(module, "_chosen", lambda *_: plan)
    monkeypatch.setattr(module.LIBRARY, "gemm", gemm_fp8_reference)
    for num_rows, wanted in counts.items():
        x, weight = data(num_rows, 64, 256)
        num_padded = num_quantized(num_rows, weight, implementation=TRITON)
        assert num_padded == wanted
        rows = Fp8Rows(*quantize_fp8(x, pad_to=num_padded or 1), num_rows)
        if num_padded is None:
            with pytest.raises(KernelArgumentInvalid, match="by itself"):
                linear_quantized(rows, weight, implementation=TRITON)
        else:
            found = linear_quantized(rows, weight, implementation=TRITON)
            assert same_bits(found, linear_fp8(x, weight, implementation=TRITON))
    assert num_quantized(5, weight) is None, "the reference takes wide rows"


@pytest.mark.fast
def test_the_workspace_of_a_device_is_one():
    assert default_workspace(CPU) is default_workspace(CPU)
