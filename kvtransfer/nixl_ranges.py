"""Where the heads of a span that two pools share lie in both of them: addresses for one-sided writes.

Pools may differ in block size and in which heads they hold. Shapes: T descriptors, 3 numbers each.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.kvcache.geometry import LayerGeometry, PoolGeometry
from baton.kvcache.layout import Range
from baton.kvtransfer.protocol.span import Span

Table = npt.NDArray[np.uint64]


def span_ranges(
    mine: LayerGeometry, theirs: LayerGeometry, blocks: Sequence[int], target_blocks: Sequence[int], span: Span
) -> Iterator[tuple[int, int, int]]:
    """The heads of a span that both hold, as (offset here, offset there, bytes); adjacent ones are joined."""
    heads = common_heads(Range(span.head_first, span.head_count), common_heads(mine.heads, theirs.heads))
    joined: tuple[int, int, int] | None = None
    for here, there, num_bytes in _runs(mine, theirs, blocks, target_blocks, span, heads):
        if joined is not None and (joined[0] + joined[2], joined[1] + joined[2]) == (here, there):
            joined = (joined[0], joined[1], joined[2] + num_bytes)
            continue
        if joined is not None:
            yield joined
        joined = (here, there, num_bytes)
    if joined is not None:
        yield joined


def _runs(
    mine: LayerGeometry,
    theirs: LayerGeometry,
    blocks: Sequence[int],
    target_blocks: Sequence[int],
    span: Span,
    heads: Range,
) -> Iterator[tuple[int, int, int]]:
    size = min(mine.rows_per_block, theirs.rows_per_block)
    first = span.first
    while first < span.end:
        stop = min((first // size + 1) * size, span.end)
        here = mine.offset_bytes + blocks[first // mine.rows_per_block] * mine.block_bytes
        there = theirs.offset_bytes + target_blocks[first // theirs.rows_per_block] * theirs.block_bytes
        here += (heads.first - mine.head_first) * mine.head_bytes
        there += (heads.first - theirs.head_first) * theirs.head_bytes
        if stop - first == mine.rows_per_block == theirs.rows_per_block:
            yield here, there, heads.count * mine.head_bytes
        else:
            num_bytes = (stop - first) * mine.row_bytes
            here += first % mine.rows_per_block * mine.row_bytes
            there += first % theirs.rows_per_block * theirs.row_bytes
            for part in range(heads.count * mine.num_parts):
                yield here + part * mine.part_bytes, there + part * theirs.part_bytes, num_bytes
        first = stop


def common_heads(one: Range, other: Range) -> Range:
    """Heads in both; count 0 if there are none."""
    first = max(one.first, other.first)
    return Range(first, max(0, min(one.stop, other.stop) - first))


def block_table(geometry: PoolGeometry, heads: Range, base: int) -> Table:
    """(address, bytes, device) of these heads of every block of every layer, scratch blocks included.

    A layer that does not hold them has rows of the right number that nobody uses.
    """
    tables = []
    for layer in geometry.layers:
        table_T3 = np.zeros((layer.num_blocks, 3), dtype=np.uint64)
        count = common_heads(heads, layer.heads).count
        skip = max(0, heads.first - layer.head_first) * layer.head_bytes if count else 0
        offsets_T = np.arange(layer.num_blocks, dtype=np.uint64) * np.uint64(layer.block_bytes)
        table_T3[:, 0] = offsets_T + np.uint64(base + layer.offset_bytes + skip)
        table_T3[:, 1] = max(1, count * layer.head_bytes)
        tables.append(table_T3)
    return np.concatenate(tables)
