"""Float8 experts' form for Hopper: what is not written in Gluon. GPU tests hold the rest against the other form."""

import pytest
import torch

from baton.kernels.moe import gemm_hopper_triton
from baton.kernels.moe.align import moe_align_quantize
from baton.tests.kernels.moe_inputs import Draw

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
