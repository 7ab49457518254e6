"""Layers of other kinds than K and V, and pools of layouts that have some."""

from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import Keep, LayerLayout


def latent(row_len, *, heads=1, parts=1, dtype="float32"):
    """Every rank has all of it."""
    return LayerLayout(num_heads=heads, num_parts=parts, row_len=row_len, dtype=dtype, whole=True)


def state(heads, row_len, *, parts=1, dtype="float32", length=1 << 20, whole=False):
    """One row; of a prompt shorter than `length` it is that of position 0."""
    return LayerLayout(
        num_heads=heads, num_parts=parts, row_len=row_len, dtype=dtype, keep=Keep.SNAPSHOT, length=length, ring=1,
        whole=whole,
    )  # fmt: skip


def window(heads, row_len, *, length=3, ring=8, parts=1, dtype="float32", whole=False):
    return LayerLayout(
        num_heads=heads, num_parts=parts, row_len=row_len, dtype=dtype, keep=Keep.WINDOW, length=length, ring=ring,
        whole=whole,
    )  # fmt: skip


def tail(heads, row_len, *, length=16, ring=32, parts=1, dtype="float32", whole=False):
    return LayerLayout(
        num_heads=heads, num_parts=parts, row_len=row_len, dtype=dtype, keep=Keep.TAIL, length=length, ring=ring,
        whole=whole,
    )  # fmt: skip


def num_state_slots_of(layout, num_blocks):
    """As many as blocks."""
    return num_blocks if layout.has_state else 0


def blocks_of(io, table, span):
    """Where a span's layer lies for what a table, or a grant, names."""
    return io.geometry.layer(span.layer).blocks_of(table.blocks, table.state_slot, span.end)


def geometry_of(layout, num_blocks, rank=0, size=1):
    """As many state slots as blocks, if there is state: so any block's number is that of a slot."""
    return PoolGeometry(layout, num_blocks, rank, size, num_state_slots=num_state_slots_of(layout, num_blocks))
