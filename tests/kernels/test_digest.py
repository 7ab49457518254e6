"""The digest against a plain-integer reference, and the properties the hand-off relies on."""

import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels import digest
from baton.kernels.digest import MASK, Digester, element_weight, layer_weight, position_weight, weight

CPU = torch.device("cpu")
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
pytestmark = pytest.mark.fast


def reference(values_NHSD, layer, kv, first_positions, head_first=0):
    total = 0
    bits = values_NHSD.contiguous().view(BITS[values_NHSD.dtype]).tolist()
    for block, first in zip(bits, first_positions, strict=True):
        for head, rows in enumerate(block):
            for offset, row in enumerate(rows):
                for element, value in enumerate(row):
                    weights = position_weight(first + offset) * element_weight(head_first + head, element)
                    total += (value + 1) * weights * layer_weight(layer, kv)
    return total & MASK


def of(values, layer=0, kv=0, first=(0,), heads=4, head_first=0):
    first_N = torch.tensor(first, dtype=torch.int64)
    digester = Digester(heads, values.shape[-1], CPU)
    return digester.of(values, layer=layer, kv=kv, first_position_N=first_N, head_first=head_first)


def random(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", BITS)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 1))
@settings(max_examples=15, deadline=None)
def test_it_is_what_the_definition_says(dtype, num_blocks, num_heads, num_positions, head_dim, layer, kv):
    values = random((num_blocks, num_heads, num_positions, head_dim), dtype)
    first = [7 + 11 * block for block in range(num_blocks)]
    assert of(values, layer, kv, first) == reference(values, layer, kv, first)


@pytest.mark.parametrize("dtype", BITS)
def test_it_adds_up_over_block_sizes_and_head_ranges(dtype):
    values = random((1, 4, 24, 8), dtype)  # 24 positions from 5
    whole = of(values, 2, 1, [5])
    in_blocks = values.view(4, 6, 4, 8).transpose(0, 1)  # six blocks of four
    assert of(in_blocks, 2, 1, [5 + 4 * n for n in range(6)]) == whole
    by_heads = [of(values[:, h : h + 2], 2, 1, [5], head_first=h) for h in (0, 2)]
    assert sum(by_heads) & MASK == whole
    by_rows = [of(values[:, :, :7], 2, 1, [5]), of(values[:, :, 7:], 2, 1, [12])]
    assert sum(by_rows) & MASK == whole


@pytest.mark.parametrize("dtype", BITS)
def test_every_single_bit_and_every_swap_shows(dtype):
    values = random((1, 4, 6, 8), dtype)
    clean = of(values)
    width = values.dtype.itemsize * 8
    for bit in range(width):
        flipped = values.clone()
        flipped.view(BITS[dtype])[0, 1, 2, 3] ^= 1 << bit if bit < width - 1 else -(1 << bit)
        assert of(flipped) != clean
    for dim in (1, 2, 3):
        order = torch.arange(values.shape[dim])
        order[[0, 1]] = order[[1, 0]]
        assert of(values.index_select(dim, order)) != clean
    assert of(values, layer=1) != clean
    assert of(values, kv=1) != clean
    assert of(values, first=[1]) != clean


def test_zeros_have_weight_and_sign_of_zero_counts():
    zeros = torch.zeros(1, 4, 2, 8)
    assert of(zeros) != 0
    assert of(zeros) != of(zeros, first=[2])
    assert of(-zeros) != of(zeros)


def test_weights_are_odd_and_different():
    values = [weight(index) for index in range(4096)]
    assert all(value & 1 for value in values)
    assert len(set(values)) == len(values)


def test_large_content_is_digested_in_chunks_alike():
    values = random((40, 4, 16, 64), torch.bfloat16)
    first = [16 * n for n in range(40)]
    parts = [of(values[n : n + 1], 0, 0, [16 * n]) for n in range(40)]
    assert of(values, 0, 0, first) == sum(parts) & MASK


def test_the_form_for_any_device_and_the_one_for_cpus_agree(monkeypatch):
    values, blocks = random((9, 4, 16, 8), torch.bfloat16), torch.tensor([7, 0, 3])
    digester = Digester(4, 8, CPU)
    first_N = torch.tensor([0, 16, 32])
    fast = digester.of(values, layer=1, kv=1, first_position_N=first_N, blocks_N=blocks)
    monkeypatch.setattr(digest, "_sum_on_cpu", digest._sum)
    assert digester.of(values, layer=1, kv=1, first_position_N=first_N, blocks_N=blocks) == fast
    assert digester.of(values[blocks], layer=1, kv=1, first_position_N=first_N) == fast


def test_threads_that_grow_the_table_at_once_get_their_own_weights():
    errors = []

    def grow(digester, first, gate):
        gate.wait()
        try:
            weight_NS = digester._position_weights(torch.tensor([first]), 16)
            assert int(weight_NS[0, 3]) & MASK == position_weight(first + 3)
        except (AssertionError, IndexError) as error:
            errors.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            digester, gate = Digester(2, 8, CPU), threading.Barrier(4)
            threads = [threading.Thread(target=grow, args=(digester, first, gate)) for first in (0, 5000, 0, 3000)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert errors == []
