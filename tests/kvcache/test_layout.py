"""What n positions leave in a layer, against plain loops; what a layer may be; what two peers must agree on."""

import tracemalloc
from dataclasses import fields, replace

import pytest

from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import Keep, KVLayout, LayerLayout, Range
from baton.kvcache.pool import num_blocks_for_memory
from baton.tests.kvtransfer.kept import latent, state, tail, window
from baton.tests.kvtransfer.reshard import kept

pytestmark = pytest.mark.fast
WINDOWS = (window(2, 8), window(2, 8, length=64, ring=64))
KINDS = (latent(8), *WINDOWS, tail(2, 8), tail(2, 8, length=5), state(2, 8, length=16))


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: f"{layer.keep} {layer.length}")
def test_a_span_is_what_a_loop_says(layer):
    for num_done in range(1, 200):
        span = layer.span(num_done)
        assert list(range(span.first, span.stop)) == kept(layer, num_done)
        if layer.is_state:
            rows = {position % layer.ring for position in range(span.first, span.stop)}
            assert len(rows) == span.count <= layer.ring, "each position has a row of its own"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"num_heads": 0}, "0 heads"),
        ({"row_len": 3}, "rows of 12 bytes"),
        ({"ring": 8}, "all positions, and a ring of 8"),
        ({"length": 8}, "all positions"),
        ({"keep": Keep.WINDOW, "length": 0, "ring": 8}, "keeps 0 positions"),
        ({"keep": Keep.WINDOW, "length": 9, "ring": 8}, "9 positions in a ring of 8"),
        ({"keep": Keep.WINDOW, "length": 3, "ring": 12}, "ring of 12"),
        ({"keep": Keep.WINDOW, "length": 3, "ring": 96}, "ring of 96"),
        ({"keep": Keep.TAIL, "length": 16, "ring": 8}, "16 positions in a ring of 8"),
        ({"keep": Keep.SNAPSHOT, "length": 16, "ring": 2}, "one state in a ring of 2"),
    ],
)
def test_a_layer_that_cannot_be_is_named(changes, problem):
    layer = replace(LayerLayout(num_heads=2, num_parts=2, row_len=8, dtype="float32"), **changes)
    assert problem in layer.problem
    if "dtype" not in changes:
        assert KVLayout(model_hash="m", layers=(latent(8), layer), block_size=16).problem == f"layer 1 {layer.problem}"


def test_a_layout_of_state_alone_says_that_it_has_no_attention_layer():
    layer = LayerLayout(num_heads=2, num_parts=1, row_len=8, dtype="float32", keep=Keep.SNAPSHOT, length=16, ring=1)
    with pytest.raises(AssertionError, match="without an attention layer"):
        _ = KVLayout(model_hash="m", layers=(layer,), block_size=16).head_dim


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: f"{layer.keep} {layer.length}")
def test_every_field_of_a_layer_changes_the_hash(layer):
    layout = KVLayout(model_hash="m", layers=(latent(16), layer), block_size=16)
    assert layout.problem == ""
    others = {
        "num_heads": 7, "num_parts": 7, "row_len": 77, "dtype": "bfloat16", "length": 7, "ring": 77, "whole": None,
        "keep": next(keep for keep in Keep if keep is not layer.keep),
    }  # fmt: skip
    assert set(others) == {field.name for field in fields(LayerLayout)}
    for name, value in others.items():
        changed = replace(layer, **{name: not layer.whole if value is None else value})
        assert replace(layout, layers=(latent(16), changed)).hash != layout.hash, name
    assert replace(layout, layers=layout.layers[::-1]).hash != layout.hash, "their order"
    assert layout.in_blocks_of(64).hash == layout.hash


def test_ranges_meet():
    assert Range(2, 5).shared_with(Range(4, 9)) == Range(4, 3)
    assert Range(4, 9).shared_with(Range(2, 5)) == Range(4, 3)
    assert Range(0, 2).shared_with(Range(5, 2)).count == 0


def test_layers_of_a_pool_lie_side_by_side_and_within_the_memory_asked_for():
    layout = KVLayout(
        model_hash="m", layers=(window(2, 8, length=100, ring=128), latent(8), state(2, 3, dtype="float64")),
        block_size=16,
    )  # fmt: skip
    num_blocks = num_blocks_for_memory(layout, 1 << 20, 5)
    geometry = PoolGeometry(layout, num_blocks, num_state_slots=5)
    assert (1 << 20) - 2 * layout.bytes_per_block < geometry.num_bytes <= (1 << 20) + 48, "but for what aligns them"
    end = 0
    for layer in geometry.layers:
        assert layer.offset_bytes % 16 == 0
        assert 0 <= layer.offset_bytes - end < 16
        end = layer.offset_bytes + layer.num_bytes
    assert geometry.layer(0).num_blocks == 6 * 2
    assert list(geometry.layer(0).blocks_of((), 3, 200)) == [6, 7, 6, 7], "blocks of a ring follow each other"
    assert list(geometry.layer(2).blocks_of((), 3, 2)) == [3, 3]
    assert geometry.layer(1).blocks_of((9, 4), 3, 20) == (9, 4)


def test_blocks_of_rings_are_not_kept_for_every_prompt_there_was():
    layout = KVLayout(model_hash="m", layers=(window(2, 8, length=32, ring=32),), block_size=16)
    layer = PoolGeometry(layout, 4, num_state_slots=64).layer(0)
    tracemalloc.start()
    for index in range(256):
        layer.blocks_of((), index % 64, 262_144 - index)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 8 << 20


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("block_size", [16, 64])
def test_positions_of_whole_rows_are_dealt_to_all_ranks(size, block_size):
    """Position p is pushed by rank (p // 64) mod size alone; all other layers' by who pushes the head."""
    others = (window(2, 8, length=3, ring=8, whole=True), state(1, 8, length=16, whole=True))
    layout = KVLayout.of_attention(
        model_hash="m", num_layers=1, num_kv_heads=8, head_dim=8, block_size=block_size, dtype="float32",
        more=(latent(8), *others),
    )  # fmt: skip
    for first, count in ((0, 1), (0, 700), (63, 2), (100, 300), (64, 64), (5, 0)):
        pushers = {position: [] for position in range(first, first + count)}
        for rank in range(size):
            assert layout.pushed_heads(1, rank, size) == Range(0, 1)
            runs = list(layout.pushed_positions(1, first, count, rank, size))
            assert all(run.count for run in runs)
            for position in (position for run in runs for position in range(run.first, run.stop)):
                pushers[position].append(rank)
        assert pushers == {position: [position // 64 % size] for position in pushers}
        for layer in (0, 2, 3):
            runs = list(layout.pushed_positions(layer, first, count, size - 1, size))
            assert runs == ([Range(first, count)] if count else [])
    for layer in (2, 3):
        assert [layout.pushed_heads(layer, rank, size).count > 0 for rank in range(size)] == [True] + [False] * (
            size - 1
        )
