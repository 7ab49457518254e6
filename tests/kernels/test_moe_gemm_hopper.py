"""Float8 experts' form for Hopper: what is not written in Gluon; for that see `test_gluon_protocols`."""

from types import SimpleNamespace

import pytest
import torch

from baton.kernels.moe import gemm, gemm_hopper_triton
from baton.kernels.moe.align import moe_align_quantize
from baton.kernels.moe.held_experts import HeldExperts
from baton.tests.kernels.harness import same_bits
from baton.tests.kernels.moe_inputs import Draw, some_experts

HIDDEN = 384


@pytest.mark.parametrize("num_tokens", [1, 40, 140])
@pytest.mark.parametrize(("first", "num_experts"), [(0, 3), (1, 2)])
def test_rows_are_placed_where_their_experts_have_them(num_tokens, first, num_experts):
    draw = Draw(num_tokens)
    x_TD = draw.normal(num_tokens, HIDDEN, dtype=torch.bfloat16)
    expert_TK = draw.experts(num_tokens, 3, 2)
    expert_TK[-1, 0] = -1
    alignment, values_TD, scale_TG = moe_align_quantize(
        x_TD, expert_TK, num_experts, gemm_hopper_triton.BLOCK_LEN, first_expert=first
    )
    num_places = len(alignment.rows)
    placed_PD = torch.full((num_places, HIDDEN), 7.0).to(torch.float8_e4m3fn)
    placed_scale_GP = torch.full((HIDDEN // 128, num_places), 7.0)
    gemm_hopper_triton.place_rows(values_TD, scale_TG, alignment, placed_PD, placed_scale_GP, num_chosen=2)
    used_P = (alignment.block_expert >= 0).repeat_interleave(gemm_hopper_triton.BLOCK_LEN)
    rows_P = torch.where(used_P, alignment.rows, -1)
    is_row_P = rows_P >= 0
    token_R = rows_P[is_row_P] // 2
    assert sorted(rows_P[is_row_P].tolist()) == [
        row for row, its in enumerate(expert_TK.flatten().tolist()) if first <= its < first + num_experts
    ]
    assert torch.equal(placed_PD[is_row_P].float(), values_TD[token_R].float())
    assert torch.equal(placed_scale_GP[:, is_row_P], scale_TG[token_R].T)
    assert placed_PD[~is_row_P].float().eq(7).all()
    assert placed_scale_GP[:, ~is_row_P].eq(7).all()


def test_it_is_for_hopper_alone():
    assert not gemm_hopper_triton.fits(Draw(0).weights(2, 128, 256, "fp8"), 1 << 20)


@pytest.fixture
def hopper(monkeypatch):
    """As if CPUs were Hopper GPUs of three multiprocessors."""
    monkeypatch.setattr(gemm_hopper_triton.attention_prefill_hopper_triton, "num_multiprocessors", lambda _: 3)


def some_weights(num_experts, inner_size, hidden):
    """What `fits` reads of weights, without their memory."""
    gate_up = torch.empty(1, dtype=torch.float8_e4m3fn).expand(num_experts, 2 * inner_size, hidden)
    return SimpleNamespace(gate_up_EJD=gate_up, down_EDI=gate_up.transpose(1, 2)[:, :, :inner_size])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sizes", "num_rows", "fits"),
    [
        ((8, 512, 2048), 8 * 96, True),
        ((8, 512, 2048), 8 * 96 - 1, False),
        ((8, 2048, 7168), 8 * 48, True),
        ((8, 2048, 7168), 8 * 48 - 1, False),
        ((8, 512, 2048 + 128), 8000, False),
        ((8, 512 + 64, 2048), 8000, False),
    ],
)
def test_experts_of_many_rows_and_whole_tiles_take_the_form_for_hopper(hopper, sizes, num_rows, fits):
    assert gemm_hopper_triton.fits(some_weights(*sizes), num_rows) == fits


@pytest.mark.parametrize("kind", ["fp8", "ue8m0"])
@pytest.mark.parametrize("held", [None, HeldExperts(1, 2, 4)])
def test_what_the_form_for_hopper_launches(hopper, kind, held, monkeypatch):
    """Both GEMMs' tiles, and what the first quantizes by; ranks count the rows that their experts get."""
    seen = []
    monkeypatch.setattr(gemm_hopper_triton, "_launch_grouped", lambda *given: seen.append(given))
    draw, inner_size, hidden = Draw(3), 128, 256
    weights = draw.weights(4, inner_size, hidden, kind)
    if held is not None:
        weights = some_experts(weights, slice(held.first, held.first + held.count), held)
    num_experts, num_tokens = len(weights.down_EDI), 192
    x_TD = draw.normal(num_tokens, hidden, dtype=torch.bfloat16)
    inputs = x_TD, torch.rand(num_tokens, 2), draw.experts(num_tokens, 4, 2)
    gemm.experts_grouped(*(part[:-1] for part in inputs), weights, implementation=gemm.Implementation.TRITON)
    assert not seen, "too few rows for each expert"
    gemm.experts_grouped(*inputs, weights, invariant=True, implementation=gemm.Implementation.TRITON)
    assert not seen, "another set of tiles"
    gemm.experts_grouped(*inputs, weights, implementation=gemm.Implementation.TRITON)
    names = gemm_hopper_triton.grouped_kernel.arg_names
    (first, second), grids = (
        [dict(zip(names, given, strict=False)) for _, given, _ in seen],
        [grid for grid, *_ in seen],
    )
    chosen = [constants.by_name for *_, constants in seen]
    assert grids == [(3,), (3,)]
    assert [(by_name["N"], by_name["K"]) for by_name in chosen] == [(2 * inner_size, hidden), (hidden, inner_size)]
    assert [by_name["GATED"] for by_name in chosen] == [True, False]
    assert [by_name["UE8M0"] for by_name in chosen] == [kind == "ue8m0", False]
    assert first["num_blocks"] * 128 == first["scale_stride"] == second["scale_stride"] == len(first["rows"])
    assert first["x"].shape == [len(first["rows"]), hidden] and second["x"].shape == [len(first["rows"]), inner_size]
    assert first["weight"].shape == [num_experts * 2 * inner_size, hidden]
    assert second["weight"].shape == [num_experts * hidden, inner_size]
    assert [part.block_shape for each in (first, second) for part in (each["x"], each["weight"])] == [
        [64, 128], [128, 128], [64, 128], [128, 128],
    ]  # fmt: skip
    assert second["x"].base is first["out"] and second["x_scales"] is first["out_scales"]
    assert same_bits(first["weight"].base, weights.gate_up_EJD.flatten(0, 1))
    # What the second writes may lie where the first read its rows, and nowhere else that it reads.
    parts, placed = second["out"].untyped_storage(), first["x"].base.untyped_storage()
    assert parts.data_ptr() == placed.data_ptr() and parts.nbytes() >= second["out"].nbytes
    assert second["x"].base.untyped_storage().data_ptr() != parts.data_ptr()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("num_tokens", [3, 100, 384])
@pytest.mark.parametrize("is_hopper", [False, True])
def test_no_more_is_allocated_than_is_reserved(kind, num_tokens, is_hopper, monkeypatch):
    """Outputs left out, and rounding up of the allocator's."""
    if is_hopper:
        monkeypatch.setattr(gemm_hopper_triton.attention_prefill_hopper_triton, "num_multiprocessors", lambda _: 3)
        monkeypatch.setattr(gemm_hopper_triton, "_launch_grouped", lambda *_: None)
    draw, inner_size, hidden = Draw(4), 128, 256
    weights = draw.weights(8, inner_size, hidden, kind)
    x_TD = draw.normal(num_tokens, hidden, dtype=torch.bfloat16)
    inputs = x_TD, torch.rand(num_tokens, 2), draw.experts(num_tokens, 8, 2)
    plain, num_bytes = torch.empty, []

    def empty(*given, **named):
        made = plain(*given, **named)
        num_bytes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    out_TD = gemm.experts_grouped(*inputs, weights, implementation=gemm.Implementation.TRITON)
    assert 0 < sum(num_bytes) - out_TD.nbytes <= gemm.most_bytes(num_tokens, 2, (8, hidden, inner_size))
