"""Layout identity and the pool's shape."""

import pytest
import torch

from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool, num_blocks_for_memory

pytestmark = pytest.mark.fast

FIELDS = {
    "model_hash": "m",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 8,
    "block_size": 16,
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_hash", "n"),
        ("num_layers", 4),
        ("num_kv_heads", 4),
        ("head_dim", 16),
        ("dtype", "float64"),
        ("has_mtp", True),
    ],
)
def test_every_field_that_peers_must_share_changes_the_hash(name, value):
    assert KVLayout.of_attention(**FIELDS).hash == KVLayout.of_attention(**FIELDS).hash
    assert KVLayout.of_attention(**FIELDS).hash != KVLayout.of_attention(**{**FIELDS, name: value}).hash


def test_a_head_range_of_a_block_is_contiguous():
    pool = KVPool(KVLayout.of_attention(**FIELDS), 5, torch.device("cpu"))
    k_NHSD, v_NHSD = pool.layer(1)
    assert k_NHSD.shape == (6, 2, 16, 8)
    assert k_NHSD[2, 1].is_contiguous()
    v_NHSD[2, 1] = 7.0
    assert pool.blocks(1)[2, 1, 1].eq(7.0).all()
    assert pool.blocks(1)[2, 1].is_contiguous()
    assert sum(int(pool.blocks(layer).count_nonzero()) for layer in range(3)) == 16 * 8
    assert pool.scratch_slot == 80


def test_a_pool_sized_from_memory_fits_it():
    layout = KVLayout.of_attention(**FIELDS)
    num_blocks = num_blocks_for_memory(layout, 1 << 20)
    assert (num_blocks + 1) * layout.bytes_per_block <= 1 << 20 < (num_blocks + 2) * layout.bytes_per_block
    assert KVPool(layout, num_blocks, torch.device("cpu")).data_bytes.nbytes <= 1 << 20
