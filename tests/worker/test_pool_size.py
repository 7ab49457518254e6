"""How many KV blocks a GPU has memory for, by what is free: no GPU needed."""

from types import SimpleNamespace

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels import attention_prefill_hopper_triton, kv_widen
from baton.kernels.implementation import Implementation
from baton.kvcache.layout import KVLayout
from baton.model.parallel import Alone
from baton.worker import loading

pytestmark = pytest.mark.fast
FREE_BYTES = 10 << 30


def num_blocks(monkeypatch, *, dtype, is_hopper=True, head_dim=128, **model):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE_BYTES, 2 * FREE_BYTES))
    monkeypatch.setattr(attention_prefill_hopper_triton, "_multiprocessors", lambda index: 132 * is_hopper)
    layout = KVLayout(model_hash="m", num_layers=2, num_kv_heads=4, head_dim=head_dim, block_size=16, dtype=dtype)
    known = {"implementation": Implementation.TRITON, "numerics": Numerics.DEFAULT, "device": torch.device("cuda", 0)}
    config = SimpleNamespace(gpu_memory_share=0.5)
    return loading._num_blocks(config, SimpleNamespace(**{**known, **model}), layout, Alone()), layout.bytes_per_block


def test_half_of_what_is_free_less_the_scratch_block(monkeypatch):
    found, block_bytes = num_blocks(monkeypatch, dtype="bfloat16")
    assert found == FREE_BYTES // 2 // block_bytes - 1


def test_float8_leaves_room_to_be_widened_where_it_is(monkeypatch):
    found, block_bytes = num_blocks(monkeypatch, dtype="float8_e4m3fn")
    assert found == (FREE_BYTES - 2 * kv_widen.MAX_BYTES) // 2 // block_bytes - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"is_hopper": False},
        {"head_dim": 32},
        {"implementation": Implementation.REFERENCE},
        {"numerics": Numerics.INVARIANT},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_nothing_is_widened_no_room_is_left_for_it(monkeypatch, changes):
    found, block_bytes = num_blocks(monkeypatch, dtype="float8_e4m3fn", **changes)
    assert found == FREE_BYTES // 2 // block_bytes - 1
