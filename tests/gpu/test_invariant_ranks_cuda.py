"""Invariant numerics on a GPU with weights of published sizes: a rank's part of a GEMM has the bits of the whole."""

import pytest
import torch

from baton.kernels.attention.invariant import attention_decode_invariant
from baton.kernels.gemm.inner_sum import InnerSum
from baton.kernels.moe.moe import ExpertWeights, experts_invariant
from baton.kernels.tiles import matmul_rows, matmul_slices

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def values(*shape, dtype, seed=0):
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA).to(dtype) / shape[-1] ** 0.5


@DTYPES
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (24576, 4096), (1184, 2048)])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 70])
def test_outputs_of_a_rank(num_outputs, num_inputs, num_rows, dtype):
    x_TK, weight_NK = values(num_rows, num_inputs, dtype=dtype), values(num_outputs, num_inputs, dtype=dtype, seed=1)
    whole_TN = matmul_rows(x_TK, weight_NK)
    for size in (2, 4, 8):
        length = num_outputs // size
        for rank in (0, size - 1):
            rows = slice(rank * length, (rank + 1) * length)
            assert torch.equal(matmul_rows(x_TK, weight_NK[rows].contiguous()), whole_TN[:, rows]), (size, rank)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 64, 130])
def test_inner_slices_of_a_rank(num_rows, dtype):
    x_TK, weight_NK = values(num_rows, 12288, dtype=dtype), values(4096, 12288, dtype=dtype, seed=1)
    whole_CTN = matmul_slices(x_TK, weight_NK, 8)
    for size in (2, 4, 8):
        length, count = 12288 // size, 8 // size
        own = slice(length, 2 * length)
        part = matmul_slices(x_TK[:, own].contiguous(), weight_NK[:, own].contiguous(), count)
        assert torch.equal(part, whole_CTN[count : 2 * count]), size


@DTYPES
def test_heads_of_a_rank(dtype):
    key_NHSD, value_NHSD = (values(40, 8, 16, 128, dtype=dtype, seed=seed) for seed in (1, 2))
    query_BQAD = values(3, 2, 32, 128, dtype=dtype) * 10
    tables_BM = torch.randperm(36, device=CUDA).view(3, 12)
    positions_BQ = torch.tensor([[150, 151], [3, 4], [64, 65]], device=CUDA)

    def attend(first, count):
        heads, queries = slice(first, first + count), slice(4 * first, 4 * (first + count))
        keys, vals = key_NHSD[:, heads].contiguous(), value_NHSD[:, heads].contiguous()
        return attention_decode_invariant(query_BQAD[:, :, queries], keys, vals, tables_BM, positions_BQ, 192)

    whole = attend(0, 8)
    for size in (2, 4, 8):
        count = 8 // size
        assert torch.equal(attend(count, count), whole[:, :, 4 * count : 8 * count]), size


@DTYPES
def test_experts_of_a_rank(dtype):
    num_experts, inner, hidden = 16, 768, 2048
    x_TD = values(70, hidden, dtype=dtype)
    gate, up = (values(num_experts, inner, hidden, dtype=dtype, seed=seed) for seed in (1, 2))
    down = values(num_experts, hidden, inner, dtype=dtype, seed=3)
    weight_TK = torch.rand(70, 4, device=CUDA)
    expert_TK = torch.randint(num_experts, (70, 4), device=CUDA)

    def part(rank, size):
        own = slice(rank * inner // size, (rank + 1) * inner // size)
        weights = ExpertWeights(torch.cat([gate[:, own], up[:, own]], dim=1), down[:, :, own].contiguous())
        sums = []
        experts_invariant(x_TD, weight_TK, expert_TK, weights, False, InnerSum(size, lambda x: sums.append(x) or x))
        return sums[0]

    assert torch.equal(part(0, 2) + part(1, 2), part(0, 1))
    assert torch.equal((part(0, 4) + part(1, 4)) + (part(2, 4) + part(3, 4)), part(0, 1))
