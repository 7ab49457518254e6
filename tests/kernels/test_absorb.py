"""Up-projections of heads for few rows, in the interpreter: against float64, and float8 as if it were made apart."""

from types import SimpleNamespace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.gemm.quantize_fp8 import quantize_fp8_reference
from baton.kernels.implementation import Implementation
from baton.kernels.mla import absorb, absorb_triton
from baton.kernels.mla.absorb import MAX_ROWS, absorb_queries, absorb_values
from baton.tests.kernels.harness import (
    Guards,
    assert_deterministic,
    poison,
    relative_error,
    same_bits,
    strided,
)

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
ROWS = [(1, 2), (16, 2), (17, 1), (32, 2), (64, 2), (65, 2)]
LARGE = [(16, 128), (65, 16), (256, 16)]
CASES = [*ROWS, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)]
CLOSE = 4e-3  # one rounding to bfloat16


def values(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def problem(num_rows, num_heads, dtype=torch.bfloat16):
    """Queries, attention's outputs, and the halves of one up-projection."""
    expand_AYC = values(num_heads, 256, 512, seed=1, dtype=dtype)
    query_TAE, mixed_TAC = values(num_rows, num_heads, 192, dtype=dtype), values(num_rows, num_heads, 512, dtype=dtype)
    return query_TAE, mixed_TAC, expand_AYC[:, :128], expand_AYC[:, 128:]


def wanted_queries(query_TAE, key_ANC):
    absorbed_TAC = torch.einsum("tan,anc->tac", query_TAE[..., :128].double(), key_ANC.double())
    return torch.cat([absorbed_TAC, query_TAE[..., 128:].double()], dim=2)


def wanted_values(mixed_TAC, value_AVC):
    return torch.einsum("tac,avc->tav", mixed_TAC.double(), value_AVC.double()).flatten(1)


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels that were launched."""
    made = []
    for name in ("launch_queries", "launch_values"):
        launch = getattr(absorb_triton, name)

        def noted(*given, _launch=launch, _name=name, **named):
            made.append(_name)
            return _launch(*given, **named)

        monkeypatch.setattr(absorb_triton, name, noted)
    return made


@pytest.mark.parametrize(("num_rows", "num_heads"), CASES)
def test_queries(num_rows, num_heads, launched):
    query_TAE, _, key_ANC, _ = problem(num_rows, num_heads)
    found = absorb_queries(query_TAE, key_ANC, implementation=TRITON)
    assert launched == ["launch_queries"]
    assert found.shape == (num_rows, num_heads, 576) and found.is_contiguous()
    wanted = wanted_queries(query_TAE, key_ANC)
    for head in range(num_heads):
        assert relative_error(found[:, head], wanted[:, head]) < CLOSE
    assert same_bits(found[..., 512:], query_TAE[..., 128:])


@pytest.mark.parametrize(("num_rows", "num_heads"), CASES)
def test_values_and_float8_of_them(num_rows, num_heads, launched):
    _, mixed_TAC, _, value_AVC = problem(num_rows, num_heads)
    found = absorb_values(mixed_TAC, value_AVC, implementation=TRITON)
    assert found.scale_GR is None
    assert found.rows.shape == (num_rows, num_heads * 128)
    assert relative_error(found.rows, wanted_values(mixed_TAC, value_AVC)) < CLOSE
    for num_padded, ue8m0 in ((num_rows, False), (num_rows + 5, True)):
        rounded = absorb_values(mixed_TAC, value_AVC, num_padded=num_padded, ue8m0=ue8m0, implementation=TRITON)
        wanted_RQ, wanted_GR = quantize_fp8_reference(found.rows, ue8m0=ue8m0, num_padded=num_padded)
        assert same_bits(rounded.rows, wanted_RQ)
        assert same_bits(rounded.scale_GR, wanted_GR)
    assert launched == ["launch_values"] * 3


def test_programs_go_on_to_further_tiles_where_there_are_enough_of_them(monkeypatch):
    """As of 128 heads; the second of two takes what the first one leaves."""
    query_TAE, mixed_TAC, key_ANC, value_AVC = problem(150, 1)
    for num_programs in (1, 2):
        monkeypatch.setattr(absorb_triton, "_MULTIPROCESSORS", num_programs)
        monkeypatch.setattr(absorb_triton, "_QUERY_PROGRAMS", 4 * num_programs)
        found = absorb_queries(query_TAE, key_ANC, implementation=TRITON)
        assert relative_error(found, wanted_queries(query_TAE, key_ANC)) < CLOSE
        rows = absorb_values(mixed_TAC, value_AVC, implementation=TRITON).rows
        assert relative_error(rows, wanted_values(mixed_TAC, value_AVC)) < CLOSE
        made = absorb_values(mixed_TAC, value_AVC, num_padded=200, implementation=TRITON)
        wanted_RQ, wanted_GR = quantize_fp8_reference(rows, num_padded=200)
        assert same_bits(made.rows, wanted_RQ) and same_bits(made.scale_GR, wanted_GR)


@pytest.mark.fast
def test_no_row_depends_on_another():
    """Whatever tile it is in, and whatever lies beside it."""
    query_TAE, mixed_TAC, key_ANC, value_AVC = problem(20, 1)
    wanted = absorb_queries(query_TAE, key_ANC, implementation=TRITON)
    wanted_values = absorb_values(mixed_TAC, value_AVC, num_padded=20, implementation=TRITON)
    query_TAE[7], mixed_TAC[7] = float("nan"), float("nan")
    found = absorb_queries(query_TAE, key_ANC, implementation=TRITON)
    found_values = absorb_values(mixed_TAC, value_AVC, num_padded=20, implementation=TRITON)
    others = [row for row in range(20) if row != 7]
    assert same_bits(found[others], wanted[others])
    assert same_bits(found_values.rows[others], wanted_values.rows[others])
    assert same_bits(found_values.scale_GR[:, others], wanted_values.scale_GR[:, others])
    assert found[7].isnan().all() and found_values.rows[7].float().isnan().all()


@pytest.mark.fast
def test_scales_of_what_is_special():
    """A row of zeros, and one with an infinity."""
    _, mixed_TAC, _, value_AVC = problem(3, 1)
    mixed_TAC[0], mixed_TAC[1, 0, 5] = 0, float("inf")
    rows = absorb_values(mixed_TAC, value_AVC, implementation=TRITON).rows
    found = absorb_values(mixed_TAC, value_AVC, num_padded=4, implementation=TRITON)
    wanted_RQ, wanted_GR = quantize_fp8_reference(rows, num_padded=4)
    assert same_bits(found.rows, wanted_RQ) and same_bits(found.scale_GR, wanted_GR)


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_may_be_strided_and_nothing_beside_them_is_read_or_written(num_rows, monkeypatch):
    """As of a GEMM with more columns, whose last ones are NaN, and of weights that lie in one tensor."""
    query_TAE, mixed_TAC, key_ANC, value_AVC = problem(num_rows, 2)
    wanted = absorb_queries(query_TAE, key_ANC, implementation=TRITON)
    wanted_values = absorb_values(mixed_TAC, value_AVC, num_padded=num_rows + 1, implementation=TRITON)
    wide_TX = poison(torch.empty(num_rows, 2 * 192 + 40, dtype=torch.bfloat16))
    cut_TAE = wide_TX[:, : 2 * 192].unflatten(1, (2, 192))
    cut_TAE.copy_(query_TAE)
    guards = Guards()
    guarded = SimpleNamespace(
        empty=lambda *shape, dtype, device: guards.empty(*shape, dtype=dtype), float32=torch.float32
    )
    monkeypatch.setattr(absorb_triton, "torch", guarded)
    for given in (cut_TAE, strided(query_TAE), strided(query_TAE, 1)):
        found = assert_deterministic(lambda x=given: absorb_queries(x, key_ANC, implementation=TRITON), given)
        assert same_bits(found, wanted)
    for given in (strided(mixed_TAC), strided(mixed_TAC, 1)):
        for weight in (value_AVC, strided(value_AVC), strided(value_AVC, 1)):
            found = absorb_values(given, weight, num_padded=num_rows + 1, implementation=TRITON)
            assert same_bits(found.rows, wanted_values.rows)
            assert same_bits(found.scale_GR, wanted_values.scale_GR)
    guards.check()


def test_options_change_no_more_than_the_order_of_sums():
    query_TAE, mixed_TAC, key_ANC, value_AVC = problem(20, 1)
    for rows, swap in ((16, True), (32, False), (64, True), (64, False), (128, False)):
        for columns in (64, 128, 256):
            options = {"rows": rows, "columns": columns, "swap": swap, "warps": 4}
            found = absorb_triton.launch_queries(query_TAE, key_ANC, options=options)
            assert relative_error(found, wanted_queries(query_TAE, key_ANC)) < CLOSE, options
        for step in (64, 128, 512):
            options = {"rows": rows, "step": step, "swap": swap, "warps": 8, "stages": 4}
            found, _ = absorb_triton.launch_values(mixed_TAC, value_AVC, None, options=options)
            assert relative_error(found, wanted_values(mixed_TAC, value_AVC)) < CLOSE, options


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sizes", "dtype", "is_served"),
    [
        ((3, 2, 128, 64, 512, 128), torch.bfloat16, True),
        ((3, 2, 128, 64, 512, 128), torch.float16, True),
        ((3, 2, 128, 64, 512, 128), torch.float32, False),
        ((MAX_ROWS + 1, 1, 128, 64, 512, 128), torch.bfloat16, False),
        ((3, 2, 64, 64, 512, 64), torch.bfloat16, False),
        ((3, 2, 128, 32, 256, 128), torch.bfloat16, False),
        ((0, 2, 128, 64, 512, 128), torch.bfloat16, False),
    ],
)
def test_torch_has_what_no_kernel_is_for(sizes, dtype, is_served, launched):
    num_rows, num_heads, nope, turned, latent, value = sizes
    expand_AYC = values(num_heads, nope + value, latent, seed=1, dtype=dtype)
    key_ANC, value_AVC = expand_AYC[:, :nope], expand_AYC[:, nope:]
    query_TAE = values(num_rows, num_heads, nope + turned, dtype=dtype)
    mixed_TAC = values(num_rows, num_heads, latent, dtype=dtype)
    found = absorb_queries(query_TAE, key_ANC, implementation=TRITON)
    rows = absorb_values(mixed_TAC, value_AVC, implementation=TRITON).rows
    assert launched == (["launch_queries", "launch_values"] if is_served else [])
    wanted_TAC = torch.einsum("tan,anc->tac", query_TAE[..., :nope].double(), key_ANC.double())
    assert found.shape == (num_rows, num_heads, latent + turned)
    assert relative_error(found[..., :latent], wanted_TAC) < CLOSE
    assert same_bits(found[..., latent:], query_TAE[..., nope:])
    assert relative_error(rows, wanted_values(mixed_TAC, value_AVC)) < CLOSE
    if dtype == torch.bfloat16 and num_rows:
        made = absorb_values(mixed_TAC, value_AVC, num_padded=num_rows + 3, implementation=TRITON)
        wanted_RQ, wanted_GR = quantize_fp8_reference(rows, num_padded=num_rows + 3)
        assert same_bits(made.rows, wanted_RQ) and same_bits(made.scale_GR, wanted_GR)


@pytest.mark.fast
def test_torch_has_what_is_not_aligned(launched):
    query_TAE, mixed_TAC, key_ANC, value_AVC = problem(3, 2)
    odd_TX = torch.zeros(3, 2 * 512 + 1, dtype=torch.bfloat16)
    cut_TAE, cut_TAC = (odd_TX[:, : 2 * length].unflatten(1, (2, length)) for length in (192, 512))
    assert same_bits(
        absorb_queries(cut_TAE.copy_(query_TAE), key_ANC, implementation=TRITON),
        absorb_queries(query_TAE, key_ANC, implementation=REFERENCE),
    )
    assert same_bits(
        absorb_values(cut_TAC.copy_(mixed_TAC), value_AVC, implementation=TRITON).rows,
        absorb_values(mixed_TAC, value_AVC, implementation=REFERENCE).rows,
    )
    assert not launched


@pytest.mark.fast
def test_sizes_between_powers_of_two_have_the_form_of_the_next_one():
    """So that a warm-up of those sizes compiles all forms."""
    for num_rows in range(1, MAX_ROWS + 1):
        above = 1 << (num_rows - 1).bit_length()
        for num_heads in (8, 16, 40, 64, 128):
            assert absorb_triton.value_options(num_rows, num_heads) == absorb_triton.value_options(above, num_heads)
            options = absorb_triton.query_options(num_rows, num_heads)
            assert options == absorb_triton.query_options(above, num_heads)
            num_programs = num_heads * (512 // options["columns"])
            assert num_programs >= 64 and num_programs <= 4 * 132


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query_TAE", {"query_TAE": values(3, 384)}),
        ("query_TAE", {"query_TAE": values(3, 2, 128)}),
        ("query_TAE", {"query_TAE": values(3, 192, 2).transpose(1, 2)}),
        ("key_ANC", {"key_ANC": values(3, 128, 512)}),
        ("key_ANC", {"key_ANC": values(2, 128, 512).half()}),
        ("key_ANC", {"key_ANC": values(2, 512, 128).transpose(1, 2)}),
        ("mixed_TAC", {"mixed_TAC": values(3, 2, 576)}),
        ("value_AVC", {"value_AVC": values(1, 128, 512)}),
        ("num_padded", {"num_padded": 2}),
        ("num_padded", {"value_AVC": values(2, 96, 512), "num_padded": 3}),
    ],
)
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_what_does_not_fit_is_refused_by_name(argument, changes, implementation):
    absorb._FORMS._kept.clear()
    query_TAE, mixed_TAC, key_ANC, value_AVC = problem(3, 2)
    right = {"query_TAE": query_TAE, "key_ANC": key_ANC, "mixed_TAC": mixed_TAC, "value_AVC": value_AVC}
    given = right | {"num_padded": None} | changes
    calls = (absorb_queries, ("query_TAE", "key_ANC")), (absorb_values, ("mixed_TAC", "value_AVC", "num_padded"))
    function, names = next(call for call in calls if argument in call[1])
    with pytest.raises(KernelArgumentInvalid, match=argument) as refused:
        function(**{name: given[name] for name in names}, implementation=implementation)
    assert refused.value.fields["argument"] == argument
