"""On a GPU: launches by a form found before, places of rows, slots filled in one launch, and the library's GEMM."""

import pytest
import torch

from baton.engine.step.slots import SlotTable
from baton.kernels.attention.row_places import row_places
from baton.kernels.gemm.fp8 import linear_fp8
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.workspace import default_workspace
from baton.kernels.implementation import Implementation
from baton.kernels.pointwise.rms_norm import rms_norm_fused
from baton.kernels.pointwise.silu_mul import silu_mul_fused
from baton.tests.gpu.test_row_kernels_cuda import assert_same, replayed
from baton.tests.kernels.harness import same_bits
from baton.tests.kernels.test_row_places import SCRATCH, drawn

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)


def shifted(values, by):
    """The same values, `by` elements behind an aligned address."""
    memory = torch.empty(values.numel() + by, dtype=values.dtype, device=values.device)
    view = memory[by:].view(values.shape)
    view.copy_(values)
    return view


def test_forms_that_were_found_before_give_the_bits_of_the_first_launch():
    """Shapes and alignments in turns, each many times: every launch after the first takes the kept form."""
    weight_D = torch.randn(4096, device=CUDA).to(torch.bfloat16)
    inputs = [
        (rows, by, torch.randn(rows, 4096, device=CUDA).to(torch.bfloat16))
        for rows in (1, 16, 64, 1000)
        for by in (0, 1, 8)
    ]
    wanted = {}
    for _ in range(4):
        for at, (_, by, x_TD) in enumerate(inputs):
            view_TD = shifted(x_TD, by)
            found = [
                rms_norm_fused(view_TD, weight_D, 1e-6, residual_TD=x_TD).rows,
                rms_norm_fused(view_TD, weight_D, 1e-6, num_padded=len(view_TD)).rows.view(torch.uint8),
                silu_mul_fused(view_TD).rows,
            ]
            assert_same(found, wanted.setdefault(at, found))
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        found = rms_norm_fused(inputs[-1][2], weight_D, 1e-6, residual_TD=inputs[-1][2]).rows
        torch.cuda.current_stream().synchronize()
    assert same_bits(found, rms_norm_fused(inputs[-1][2], weight_D, 1e-6, residual_TD=inputs[-1][2]).rows)


@pytest.mark.parametrize(("num_sequences", "num_rows"), [(1, 1), (3, 4), (64, 2), (256, 4)])
def test_places_of_rows(num_sequences, num_rows):
    first_B, limit_B, tables_BM = (item.to(CUDA) for item in drawn(num_sequences, num_rows, 16, num_sequences))
    arguments = first_B, num_rows, limit_B, tables_BM
    sizes = {"block_size": 16, "scratch_slot": SCRATCH}
    wanted = row_places(*arguments, **sizes, implementation=Implementation.REFERENCE)
    assert_same(row_places(*arguments, **sizes), wanted)
    assert_same(replayed(lambda: row_places(*arguments, **sizes)), wanted)


@pytest.mark.parametrize("hidden_on", ["cpu", "cuda", None])
def test_a_slot_is_filled_without_waiting(hidden_on):
    sides = [
        SlotTable(
            num_slots=4, max_blocks=2560, hidden_size=4096, vocab_size=9, eos_token_ids=(), dtype=torch.bfloat16,
            device=device,
        )
        for device in (CUDA, torch.device("cpu"))
    ]  # fmt: skip
    room = {"blocks": range(7, 300), "limit": 4000, "null_block": 5, "draft_cap": 3}
    hidden_D = None if hidden_on is None else torch.randn(4096)
    for side in sides:
        own_D = hidden_D if hidden_D is None or side is sides[1] else hidden_D.to(hidden_on)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slot in (1, 2, 1, 3):
                side.place(slot, last_token=slot, draft_token=8, hidden_D=own_D, length=7 + slot, **room)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    on_gpu, on_cpu = ([side._numbers_NC.cpu(), side._tables_NM.cpu(), side._hidden_ND.cpu()] for side in sides)
    assert_same(on_gpu, on_cpu)


@pytest.mark.parametrize("num_rows", [129, 1023, 1024])
def test_the_librarys_gemm_is_the_same_with_an_output_of_ones_own(num_rows):
    default_workspace(CUDA)
    x_MK = torch.randn(num_rows, 4096, device=CUDA).to(torch.bfloat16)
    weight = quantize_weight(torch.randn(6144, 4096, device=CUDA))
    out_MN = torch.empty(num_rows, 6144, dtype=torch.bfloat16, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [linear_fp8(x_MK, weight) for _ in range(3)]
        linear_fp8(x_MK, weight, out_MN=out_MN)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(same_bits(one, out_MN) for one in found)
    assert found[0].shape == out_MN.shape
    assert found[0].is_contiguous()
