"""What ranks answer, put together: the digest of the whole layer, and one that matches nothing if copies differ."""

import numpy as np
import pytest

from baton.kernels.kv.digest import MASK
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.device_jobs import RankDigests
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.kept import geometry_of, latent, state

pytestmark = pytest.mark.fast
EXTRA = (latent(12), state(8, 20))
BLOCKS = (3, 0, 5)
LEN = 11


def ranks_of(layout, size):
    """A pool with all heads, and those of ranks with the same content."""
    geometry = geometry_of(layout, 6)
    whole = PoolIO(np.random.default_rng(1).integers(0, 256, geometry.num_bytes, dtype=np.uint8), geometry)
    pools = []
    for its in geometry_of(layout, 6, 0, size).of_all_ranks:
        pool = PoolIO(np.zeros(its.num_bytes, dtype=np.uint8), its)
        for layer, part in enumerate(its.layers):
            whole.copy(BLOCKS, pool, BLOCKS, span_of(layout, layer, part.heads))
        pools.append(pool)
    return whole, pools


def span_of(layout, layer, heads):
    return KVRange(layer, 0, layout.layers[layer].span(LEN).count, heads.first, heads.count)


def answers(layout, pools, layer):
    return [pool.digest(BLOCKS, span_of(layout, layer, pool.geometry.layer(layer).heads)) for pool in pools]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_the_parts_make_the_digest_of_the_whole(num_kv_heads, size):
    layout = make_layout(num_kv_heads=num_kv_heads, more=EXTRA)
    whole, pools = ranks_of(layout, size)
    together = RankDigests(layout, size)
    for layer, shape in enumerate(layout.layers):
        wanted = whole.digest(BLOCKS, KVRange(layer, 0, layout.layers[layer].span(LEN).count, 0, shape.num_heads))
        assert together.total(layer, answers(layout, pools, layer)) == wanted
        covered = {head for heads in together.heads(layer) for head in range(heads.first, heads.stop)}
        assert covered == set(range(shape.num_heads))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_one_wrong_part_or_copy_shows_at_whatever_rank(num_kv_heads, size):
    layout = make_layout(num_kv_heads=num_kv_heads, more=EXTRA)
    _, pools = ranks_of(layout, size)
    together = RankDigests(layout, size)
    for layer in range(layout.num_layers):
        right = answers(layout, pools, layer)
        for rank in range(size):
            for wrong in (right[rank] ^ 1, (right[rank] + 1) & MASK, (right[rank] - 1) & MASK, 0, MASK):
                damaged = [*right[:rank], wrong, *right[rank + 1 :]]
                assert together.total(layer, damaged) != together.total(layer, right)


def test_what_was_not_digested_adds_up_to_nothing():
    assert RankDigests(make_layout(num_kv_heads=2), 4).total(0, [0] * 4) == 0


def test_sums_are_those_of_64_bits():
    assert RankDigests(make_layout(num_kv_heads=2), 2).total(0, [MASK, 5]) == 4
