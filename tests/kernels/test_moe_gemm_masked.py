"""The masked grouped GEMM: against its reference and plain loops, and rows beyond the mask left as they are."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.moe.gemm_masked import MaskedTiles, choose_tiles, moe_gemm_masked
from baton.kernels.moe.gemm_masked_triton import QUANTIZE_GROUPS, QUANTIZE_ROWS, _quantize_masked_kernel
from baton.tests.kernels.harness import Guards, assert_deterministic, poison, relative_error, same_bits
from baton.tests.kernels.moe_inputs import Draw, guarded_empty, quantize_blocks, wide_blocks, wide_rows  # noqa: F401

BOTH = [Implementation.REFERENCE, Implementation.TRITON]
REFERENCE, TRITON = BOTH
FP8 = torch.float8_e4m3fn


def rows_of(draw, num_experts, num_rows, num_inputs, counts):
    """bfloat16, with NaN in the rows that do not count."""
    a_EMK = draw.normal(num_experts, num_rows, num_inputs, dtype=torch.bfloat16)
    for expert, count in enumerate(counts):
        poison(a_EMK[expert, max(count, 0) :])
    return a_EMK


def weights_of(draw, num_experts, num_outputs, num_inputs, kind):
    b_ENK = draw.normal(num_experts, num_outputs, num_inputs) / num_inputs**0.5
    if kind == "bf16":
        return {"b_ENK": b_ENK.bfloat16()}
    values, scale = quantize_blocks(b_ENK)
    return {"b_ENK": values, "b_scale": scale}


def check(out_EMN, before_EMN, a_EMK, counts, weights):
    is_fp8 = "b_scale" in weights
    wide_ENK = wide_blocks(weights["b_ENK"], weights["b_scale"]) if is_fp8 else weights["b_ENK"].double()
    for expert, count in enumerate(counts):
        count = min(max(count, 0), a_EMK.shape[1])
        assert same_bits(out_EMN[expert, count:], before_EMN[expert, count:])
        if count:
            a_MK = a_EMK[expert, :count]
            wanted = (wide_rows(a_MK) if is_fp8 else a_MK.double()) @ wide_ENK[expert].T
            assert relative_error(out_EMN[expert, :count], wanted) < 4e-3


@pytest.mark.long
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("swap_ab", [True, False])
def test_rows_that_count_are_gemms_and_others_stay(kind, swap_ab, implementation, guarded_empty):  # noqa: F811
    draw, counts = Draw(1), [0, 20, 3, -1, 17, 99]
    a_EMK = rows_of(draw, 6, 20, 256 if kind == "fp8" else 72, counts)
    weights = weights_of(draw, 6, 192, a_EMK.shape[2], kind)
    out_EMN = guarded_empty.empty(6, 20, 192)
    before_EMN = out_EMN.clone()
    masked_m_E = torch.tensor(counts, dtype=draw.choice(torch.int32, torch.int64))
    options = {"swap_ab": swap_ab, "num_sms": 1, "out_EMN": out_EMN, "implementation": implementation}
    found = moe_gemm_masked(a_EMK, masked_m_E, **weights, **options)
    assert found is out_EMN
    check(out_EMN, before_EMN, a_EMK, counts, weights)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 15, 16, 63, 64, 65, 128])
def test_any_number_of_rows(num_rows):
    draw = Draw(num_rows)
    kind = draw.choice("bf16", "fp8")
    counts = [num_rows, int(draw.integers(0, num_rows + 1, 1)[0])]
    a_EMK = rows_of(draw, 2, num_rows, 128, counts)
    weights = weights_of(draw, 2, 128, 128, kind)
    guards = Guards()
    out_EMN = guards.empty(2, num_rows, 128)
    before_EMN = out_EMN.clone()

    def compute():
        out_EMN.copy_(before_EMN)
        return moe_gemm_masked(a_EMK, torch.tensor(counts), **weights, out_EMN=out_EMN, implementation=TRITON).clone()

    assert_deterministic(compute, a_EMK, *weights.values())
    guards.check()
    check(out_EMN, before_EMN, a_EMK, counts, weights)


def test_quantizing_in_the_call_is_quantizing_before(guarded_empty):  # noqa: F811
    draw, counts = Draw(3), [5, 0, 9]
    a_EMK = rows_of(draw, 3, 9, 384, counts)
    weights, masked_m_E = weights_of(draw, 3, 128, 384, "fp8"), torch.tensor(counts)
    groups = a_EMK.float().unflatten(-1, (-1, 128))
    scale_EMG = groups.abs().amax(dim=-1).clamp(min=1e-10) / 448
    values_EMK = (groups / scale_EMG[..., None]).flatten(-2).to(FP8)
    scale_EGM = scale_EMG.transpose(1, 2).contiguous()
    assert scale_EGM.isnan().any()  # of rows that do not count
    for which in BOTH:
        within = moe_gemm_masked(a_EMK, masked_m_E, **weights, implementation=which)
        before = moe_gemm_masked(values_EMK, masked_m_E, a_scale_EGM=scale_EGM, **weights, implementation=which)
        for expert, count in enumerate(counts):
            assert same_bits(within[expert, :count], before[expert, :count])


@pytest.mark.fast
@pytest.mark.parametrize("counts", [[1, 4], [4, 2], [99, -1]])
def test_quantizing_stays_within_an_experts_rows_whatever_it_says(counts):
    """Three rows of each, so that a program's rows reach past them; what lies behind belongs to others."""
    draw, guards = Draw(8), Guards()
    a_EMK = draw.normal(3, 3, 256, dtype=torch.bfloat16)[:2]
    values = guards.empty(2, 3, 256, dtype=FP8)
    scales = guards.empty(2, 2, 3, dtype=torch.float32)
    _quantize_masked_kernel[(2, 1, 1)](
        a_EMK, torch.tensor(counts), values, scales, 3, 256, QUANTIZE_ROWS, QUANTIZE_GROUPS
    )
    guards.check()
    for expert, count in enumerate(counts):
        count = min(max(count, 0), 3)
        wanted_MG = a_EMK[expert, :count].float().unflatten(-1, (2, 128)).abs().amax(dim=-1) / 448
        assert torch.allclose(scales[expert, :, :count], wanted_MG.T)
        assert scales[expert, :, count:].isnan().all()
        assert values[expert, count:].float().isnan().all()


def test_neither_programs_nor_other_experts_rows_change_a_row():
    draw, counts = Draw(4), [3, 18, 0, 9]
    a_EMK = rows_of(draw, 4, 18, 128, counts)
    weights = weights_of(draw, 4, 256, 128, "fp8")
    masked_m_E = torch.tensor(counts)
    outs = [
        moe_gemm_masked(a_EMK, masked_m_E, **weights, num_sms=num_sms, invariant=True, implementation=TRITON)
        for num_sms in (1, 2, None)
    ]
    fewer_E = torch.tensor([2, 7, 0, 9])
    outs.append(moe_gemm_masked(a_EMK, fewer_E, **weights, invariant=True, implementation=TRITON))
    wider_EMK = torch.cat([a_EMK, a_EMK], dim=1)
    wide = moe_gemm_masked(wider_EMK, masked_m_E, **weights, invariant=True, implementation=TRITON)
    for expert, count in enumerate(fewer_E.tolist()):
        for other in [*outs[1:], wide]:
            assert same_bits(outs[0][expert, :count], other[expert, :count])


def test_tiles_of_the_tuner_give_the_same():
    draw, counts = Draw(5), [16, 2]
    a_EMK = rows_of(draw, 2, 16, 256, counts)
    weights = weights_of(draw, 2, 192, 256, "fp8")
    wanted = moe_gemm_masked(a_EMK, torch.tensor(counts), **weights, implementation=REFERENCE)
    for rows, outputs in ((16, 64), (32, 128)):
        tiles = MaskedTiles(rows, outputs, 4, 2, 1)
        found = moe_gemm_masked(a_EMK, torch.tensor(counts), **weights, tiles=tiles, implementation=TRITON)
        for expert, count in enumerate(counts):
            assert relative_error(found[expert, :count], wanted[expert, :count]) < 2e-3


@pytest.mark.fast
def test_invariant_tiles_come_from_no_batch():
    shape_ENK = (128, 1536, 2048)
    assert choose_tiles(shape_ENK, True, True, None, None).rows == 16
    assert [choose_tiles(shape_ENK, False, True, rows, None).rows for rows in (1, 16, 17, 33, 500)] == [
        16,
        16,
        32,
        64,
        64,
    ]


A, B = torch.zeros(2, 3, 128, dtype=torch.bfloat16), torch.zeros(2, 128, 128).to(FP8)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("a_EMK", {"a_EMK": A.float()}),
        ("a_EMK", {"a_EMK": A.mT.contiguous().mT}),
        ("a_EMK", {"a_EMK": A[:, :, :64].contiguous(), "b_ENK": B[:, :, :64].contiguous()}),
        ("masked_m_E", {"masked_m_E": torch.zeros(3).int()}),
        ("masked_m_E", {"masked_m_E": torch.zeros(2)}),
        ("b_ENK", {"b_ENK": B[:, :, :64]}),
        ("b_ENK", {"b_ENK": B.half(), "b_scale": None}),
        ("b_scale", {"b_scale": None}),
        ("b_scale", {"b_scale": torch.zeros(2, 2, 1)}),
        ("a_scale_EGM", {"a_EMK": A.to(FP8)}),
        ("a_scale_EGM", {"a_EMK": A.to(FP8), "a_scale_EGM": torch.zeros(2, 3, 1)}),
        ("num_sms", {"num_sms": 0}),
        ("out_EMN", {"out_EMN": torch.zeros(2, 3, 64).bfloat16()}),
        ("out_EMN", {"out_EMN": torch.zeros(2, 3, 128)}),
    ],
)
def test_bad_arguments_are_named(argument, change):
    arguments = {"a_EMK": A, "masked_m_E": torch.zeros(2).int(), "b_ENK": B, "b_scale": torch.zeros(2, 1, 1)}
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        moe_gemm_masked(**{**arguments, **change})


@pytest.mark.fast
def test_tiles_that_cut_groups_are_refused(monkeypatch):
    options = {"tiles": MaskedTiles(16, 256, 4, 3, 1), "implementation": TRITON}
    monkeypatch.setattr(torch, "empty", None)  # before anything is allocated
    with pytest.raises(KernelArgumentInvalid, match=r"^tiles: "):
        moe_gemm_masked(A, torch.ones(2, dtype=torch.int32), B, b_scale=torch.zeros(2, 1, 1), **options)
