"""Norms with what stands around them: Triton against the reference, the reference against float64, rows alone."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.gemm.quantize_fp8 import quantize_fp8_reference
from baton.kernels.implementation import Implementation
from baton.kernels.pointwise import rms_norm_triton
from baton.kernels.pointwise.rms_norm import rms_norm, rms_norm_fused, rms_norm_invariant
from baton.tests.kernels.harness import Guards, assert_deterministic, poison, relative_error, same_bits, strided

ROWS = [1, 2, 7, 8, 15, 16, 63, 64, 65, 128]
EPS = 1e-6
FORMS = [
    {},
    {"residual": True},
    {"plus_one": True},
    {"residual": True, "plus_one": True},
]


def values(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(num_rows, length, form, dtype=torch.bfloat16):
    named = {key: value for key, value in form.items() if key in ("plus_one", "num_padded")}
    if form.get("residual"):
        named["residual_TD"] = values(num_rows, length, seed=2, dtype=dtype)
    return values(num_rows, length, dtype=dtype), values(length, seed=1, dtype=dtype), EPS, named


def both(x_TD, weight_D, eps, named):
    wanted = (Implementation.TRITON, Implementation.REFERENCE)
    return [rms_norm_fused(x_TD, weight_D, eps, **named, implementation=kind) for kind in wanted]


def assert_close(found, wanted, dtype=torch.bfloat16):
    """Sums in another order may round a value to the one beside it, seldom."""
    assert found.dtype == wanted.dtype == dtype
    step = {torch.bfloat16: 2**-7, torch.float32: 1e-5}[dtype]
    assert torch.allclose(found.float(), wanted.float(), rtol=step, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (found != wanted).float().mean() < 0.01


@pytest.mark.parametrize("form", FORMS)
def test_triton_is_as_the_reference(form):
    for num_rows, length in ((1, 64), (3, 128), (2, 384), (5, 2048)):
        found, wanted = both(*arguments(num_rows, length, form))
        assert_close(found.rows, wanted.rows)
        assert (found.sum_TD is None) == (wanted.sum_TD is None) == ("residual" not in form)
        if found.sum_TD is not None:
            assert same_bits(found.sum_TD, wanted.sum_TD)


@pytest.mark.fast
def test_the_plain_form_is_what_models_compute():
    x_TD, weight_D, eps, _ = arguments(5, 256, {})
    wanted_TD = rms_norm(x_TD, weight_D, eps)
    found_TD = rms_norm_fused(x_TD, weight_D, eps, implementation=Implementation.REFERENCE).rows
    assert same_bits(found_TD, wanted_TD)
    residual_TD = values(5, 256, seed=2)
    found = rms_norm_fused(x_TD, weight_D, eps, residual_TD=residual_TD, implementation=Implementation.REFERENCE)
    assert same_bits(found.sum_TD, x_TD + residual_TD)
    assert same_bits(found.rows, rms_norm(x_TD + residual_TD, weight_D, eps))


@pytest.mark.fast
def test_the_reference_against_the_formulas():
    for form in FORMS:
        x_TD, weight_D, eps, named = arguments(9, 320, form, torch.float32)
        wide_TD = x_TD.double() + named.get("residual_TD", torch.zeros(())).double()
        wide_TD = wide_TD / (wide_TD.square().mean(dim=1, keepdim=True) + eps).sqrt()
        wide_TD *= weight_D.double() + (1 if form.get("plus_one") else 0)
        for found in both(x_TD, weight_D, eps, named):
            assert relative_error(found.rows, wide_TD) < 1e-6


def test_a_row_depends_on_itself_alone():
    for length, counts in ((128, ROWS), (2048, [1, 2, 7, 8])):
        x_TD, weight_D, eps, named = arguments(counts[-1], length, {"residual": True})
        whole = rms_norm_fused(x_TD, weight_D, eps, **named, implementation=Implementation.TRITON)
        for num_rows in counts[:-1]:
            first = counts[-1] - num_rows if num_rows % 2 else 0
            cut = slice(first, first + num_rows)
            part = {name: tensor[cut] for name, tensor in named.items()}
            found = rms_norm_fused(x_TD[cut], weight_D, eps, **part, implementation=Implementation.TRITON)
            assert same_bits(found.rows, whole.rows[cut]), (length, num_rows)
            assert same_bits(found.sum_TD, whole.sum_TD[cut])


@pytest.mark.fast
def test_what_a_row_is_divided_into_is_decided_by_its_length():
    for length in (64, 128, 2048, 4096, 5120):
        chosen = rms_norm_triton.options_of(length, torch.device("cpu"))
        assert chosen["rows"] * length <= 16_384
        assert chosen["num_warps"] in (1, 2, 4, 8, 16)


@pytest.mark.parametrize("num_padded", [None, 8])
def test_any_division_into_programs_gives_the_same(num_padded):
    """As a tuning run divides them."""
    x_TD, weight_D, eps, named = arguments(5, 512, {"residual": True})
    given = (x_TD, weight_D, eps, named["residual_TD"], num_padded)
    more = {"plus_one": False, "keep": num_padded is not None}
    wanted = rms_norm_triton.launch(*given, **more)
    assert len(wanted) == 4
    for rows, num_warps in ((1, 4), (2, 8), (8, 4)):
        found = rms_norm_triton.launch(*given, **more, options={"rows": rows, "num_warps": num_warps})
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or same_bits(one, other), rows


@pytest.mark.parametrize("ue8m0", [False, True])
def test_float8_is_as_if_made_afterwards(ue8m0):
    for num_rows, length, num_padded in ((1, 128, 4), (5, 512, 5), (6, 2048, 16), (3, 640, 8)):
        form = {"residual": True, "num_padded": num_padded}
        x_TD, weight_D, eps, named = arguments(num_rows, length, form)
        x_TD[0, :128] = 0
        named["residual_TD"][0, :128] = 0
        found = rms_norm_fused(
            x_TD, weight_D, eps, **named, ue8m0=ue8m0, keep=True, implementation=Implementation.TRITON
        )
        plain = {"residual_TD": named["residual_TD"]}
        rows_TD = rms_norm_fused(x_TD, weight_D, eps, **plain, implementation=Implementation.TRITON).rows
        wanted_RD, scale_GR = quantize_fp8_reference(rows_TD, ue8m0=ue8m0, num_padded=num_padded)
        assert same_bits(found.rows, wanted_RD)
        assert same_bits(found.scale_GR, scale_GR)
        assert same_bits(found.kept_TD, rows_TD)
        assert found.rows[num_rows:].float().eq(0).all()
        assert found.scale_GR[:, num_rows:].eq(1).all()
        assert found.rows[0, :128].float().eq(0).all()


@pytest.mark.fast
def test_float8_groups_against_their_definition():
    x_TK = values(7, 384) * torch.logspace(-12, 4, 7)[:, None].bfloat16()
    rows_TK, scale_GT = quantize_fp8_reference(x_TK)
    assert scale_GT.shape == (3, 7)
    wide_TGC, found_TGC = x_TK.double().unflatten(1, (3, 128)), rows_TK.double().unflatten(1, (3, 128))
    largest_TG = wide_TGC.abs().amax(dim=2).clamp(min=1e-10)
    assert torch.allclose(scale_GT.T.double(), largest_TG / 448, rtol=1e-6, atol=0)
    error_TGC = (found_TGC * scale_GT.T.double()[..., None] - wide_TGC).abs()
    step_TGC = torch.maximum(wide_TGC.abs() * 2**-4, (largest_TG / 448 * 2**-10)[..., None])
    assert (error_TGC <= step_TGC * 1.001).all()
    doubled_TK, doubled_GT = quantize_fp8_reference(x_TK[3:] * 2)
    assert same_bits(doubled_TK, rows_TK[3:])
    assert torch.equal(doubled_GT, scale_GT[:, 3:] * 2)
    x_TK[4, 7] = float("nan")
    found_TK, _ = quantize_fp8_reference(x_TK)
    assert found_TK[4, 7].float().isnan()
    assert found_TK.float().isnan().sum() == 1


def test_strides_guards_and_two_runs():
    x_TD, weight_D, eps, named = arguments(7, 256, {"residual": True})
    wanted = rms_norm_fused(x_TD, weight_D, eps, **named, implementation=Implementation.TRITON)
    guards = Guards()
    inputs = [strided(x_TD), guards.copy(weight_D), strided(named["residual_TD"])]

    def compute():
        found = rms_norm_fused(inputs[0], inputs[1], eps, residual_TD=inputs[2], implementation=Implementation.TRITON)
        return found.rows, found.sum_TD

    rows_TD, sum_TD = assert_deterministic(compute, *inputs)
    guards.check()
    assert same_bits(rows_TD, wanted.rows)
    assert same_bits(sum_TD, wanted.sum_TD)


def test_nothing_is_written_beyond_the_rows():
    guards = Guards()
    x_TD, weight_D = guards.copy(values(3, 192)), guards.copy(values(192, seed=1))
    out_TD, scale, kept = guards.empty(3, 192), guards.empty(1), guards.empty(1)
    no_parts = weight_D, weight_D, weight_D, 0
    plain = {"RESIDUAL": False, "CHOSEN": 0, "NUM_EXPERTS": 0, "GATED": False}
    rms_norm_triton._norm_kernel[(1,)](
        x_TD, 192, weight_D, x_TD, 0, out_TD, out_TD, scale, kept, 3, 3, EPS, *no_parts, D=192, R=4, N=2, C=128,
        **plain, PLUS_ONE=False, QUANTIZE=False, UE8M0=False, KEEP=False, EARLY=False,
    )  # fmt: skip
    guards.check()
    assert_close(out_TD, rms_norm(x_TD, weight_D, EPS))
    assert scale.isnan().all()
    assert kept.isnan().all()
    quantized_RD, scale_GR = guards.empty(5, 256, dtype=torch.float8_e4m3fn), guards.empty(2, 5, dtype=torch.float32)
    x_TD, weight_D, kept_TD = guards.copy(values(3, 256)), guards.copy(values(256, seed=1)), guards.empty(3, 256)
    rms_norm_triton._norm_kernel[(2,)](
        x_TD, 256, weight_D, x_TD, 0, quantized_RD, out_TD, scale_GR, kept_TD, 3, 5, EPS, *no_parts, D=256, R=4,
        N=2, C=128, **plain, PLUS_ONE=False, QUANTIZE=True, UE8M0=False, KEEP=True, EARLY=False,
    )  # fmt: skip
    guards.check()
    assert not scale_GR.isnan().any()
    assert_close(kept_TD, rms_norm(x_TD, weight_D, EPS))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy's, in the interpreter
def test_no_rows_and_nan():
    assert both(*arguments(0, 128, {"residual": True}))[0].rows.shape == (0, 128)
    x_TD, weight_D, eps, named = arguments(3, 128, {"num_padded": 3})
    poison(x_TD[1])
    for found in both(x_TD, weight_D, eps, named):
        assert found.rows[1].float().isnan().all()
        assert not found.rows[::2].float().isnan().any()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x_TD", {"x_TD": values(2, 3, 128)}),
        ("x_TD", {"x_TD": values(128, 2).T}),
        ("x_TD", {"x_TD": values(2, 128).double()}),
        ("weight_D", {"weight_D": values(127)}),
        ("weight_D", {"weight_D": values(128).float()}),
        ("residual_TD", {"residual_TD": values(3, 128)}),
        ("num_padded", {"x_TD": values(2, 64), "weight_D": values(64), "num_padded": 2}),
        ("num_padded", {"num_padded": 1}),
        ("keep", {"keep": True}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument, changes):
    given = {"x_TD": values(2, 128), "weight_D": values(128), "eps": EPS} | changes
    with pytest.raises(KernelArgumentInvalid, match=argument) as caught:
        rms_norm_fused(**given)
    assert caught.value.fields["argument"] == argument


@pytest.mark.fast
@pytest.mark.parametrize("norm", [rms_norm, rms_norm_invariant])
def test_one_is_added_to_weights_in_float32(norm):
    """As the fused form does, and rounded once: bfloat16 has no 1 + w for most w."""
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_D = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((5, 96), (96,)))
    weight_D = weight_D / 64
    wanted = rms_norm_fused(x_TD, weight_D, 1e-6, plus_one=True, implementation=Implementation.REFERENCE).rows
    found = norm(x_TD, weight_D, 1e-6, plus_one=True)
    assert (found != wanted).float().mean() < 0.01  # sums in another order
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7)
