"""Reads, writes, copies and digests spans of one rank's pool, in bytes. It does not check who owns the blocks.

It knows neither dtypes nor torch, so that a process that maps the pool's memory needs neither.

Order of a payload: for each block of the *sender's* size that the span touches, [head][part][position in it][row]. So
with blocks of one size on both sides, whole blocks of a head range are one contiguous piece of either pool.

Words: what a digest is made of, eight bytes each (`kernels.kv.digest`).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.kernels.kv.digest import MASK, Words, WordWeights, layer_weight
from baton.kvcache.geometry import LayerGeometry, PoolGeometry
from baton.kvcache.layout import WORD_BYTES
from baton.kvcache.rank_blocks import RankBlocks
from baton.kvtransfer.protocol.frame import Bytes, KVRange

Blocks = Sequence[int]
PoolMemory = npt.NDArray[np.uint8]


class PoolIO:
    """One rank's pool on the CPU. Several threads may call it; they access different blocks.

    Args:
        memory: memory of the pool; may be read-only for a pool that is only read.
        geometry: geometry of the pool.
    """

    in_host_memory = True

    def __init__(self, memory: PoolMemory, geometry: PoolGeometry) -> None:
        assert memory.nbytes == geometry.num_bytes
        self.geometry = geometry
        self._memory = memory.data.cast("B")
        words = memory.view(np.uint64)
        self._words: list[Words] = []  # of each layer: [N + 1, H, P, S, W]
        shapes: dict[tuple[int, ...], WordWeights] = {}
        self._weights: list[WordWeights] = []
        for layer in geometry.layers:
            start, num_words = layer.offset_bytes // WORD_BYTES, layer.row_bytes // WORD_BYTES
            shape = (layer.num_blocks, layer.num_heads, layer.num_parts, layer.rows_per_block, num_words)
            self._words.append(words[start : start + layer.num_bytes // WORD_BYTES].reshape(shape))
            key = (layer.head_first, layer.num_heads, layer.num_parts, num_words, layer.rows_per_block)
            if key not in shapes:
                shapes[key] = WordWeights(*key)
            self._weights.append(shapes[key])

    def pieces(self, blocks: Blocks, span: KVRange, order_block_size: int) -> list[memoryview]:
        """Return the span's memory, in as few pieces in payload order as possible."""
        return [self._memory[start:stop] for start, stop in self._ranges(blocks, span, order_block_size)]

    def read(self, blocks: Blocks, span: KVRange, order_block_size: int) -> memoryview:
        """Return a copy of the span, in payload order."""
        pieces = self.pieces(blocks, span, order_block_size)
        payload = np.empty(sum(len(piece) for piece in pieces), dtype=np.uint8)
        start = 0
        for piece in pieces:
            payload[start : start + len(piece)] = piece
            start += len(piece)
        return payload.data

    def read_digested(
        self, blocks: Blocks, span: KVRange, order_block_size: int, *, with_digest: bool
    ) -> tuple[memoryview, int | None]:
        """Return the copy, and the digest if requested."""
        return self.read(blocks, span, order_block_size), self.digest(blocks, span) if with_digest else None

    def write(self, blocks: Blocks, span: KVRange, payload: Bytes, order_block_size: int) -> None:
        """Write a payload to its place; it has exactly the span's size."""
        source, start = memoryview(payload), 0
        for piece in self.pieces(blocks, span, order_block_size):
            piece[:] = source[start : start + len(piece)]
            start += len(piece)
        assert start == len(source)

    def digest(self, blocks: Blocks, span: KVRange) -> int:
        """Return the digest of what the pool holds for the span."""
        geometry = self.geometry.layer(span.layer)
        words_NHPSW, weights = self._words[span.layer], self._weights[span.layer]
        head, count = span.head_first - geometry.head_first, span.head_count
        assert 0 <= head <= head + count <= geometry.num_heads
        size = geometry.rows_per_block
        total = 0
        for index, first, stop in _block_parts(span.first, span.end, size):
            if stop - first == size:
                words = words_NHPSW[blocks[index], head : head + count].reshape(-1)
                total += weights.of_block(words, first, head, count)
            else:
                row = first % size
                part_HPSW = words_NHPSW[blocks[index], head : head + count, :, row : row + stop - first]
                total += weights.of_rows(part_HPSW, first, head)
        return total * layer_weight(span.layer) & MASK

    def copy(
        self, blocks: Blocks, target: "PoolIO", target_blocks: Blocks, span: KVRange, *, with_digest: bool = False
    ) -> int:
        """Copy a span into another pool, block by block while each is in the cache; return its digest here, or 0."""
        mine, theirs = self.geometry.layer(span.layer), target.geometry.layer(span.layer)
        assert mine.row_bytes == theirs.row_bytes
        here, there = span.head_first - mine.head_first, span.head_first - theirs.head_first
        weights = self._weights[span.layer]
        size = mine.rows_per_block
        total = 0
        if size == theirs.rows_per_block and not span.first % size and not span.count % size:  # almost always
            whole = slice(span.first // size, span.end // size)
            source_NW = self._heads(span.layer, here, span.head_count)
            target_NW = target._heads(span.layer, there, span.head_count)
            first = span.first
            for block, target_block in zip(blocks[whole], target_blocks[whole], strict=True):
                target_NW[target_block] = source_NW[block]
                if with_digest:  # the words are still in the cache
                    total += weights.of_block(source_NW[block], first, here, span.head_count)
                    first += size
            return total * layer_weight(span.layer) & MASK
        source_NHPSW = self._words[span.layer][:, here : here + span.head_count]
        target_NHPSW = target._words[span.layer][:, there : there + span.head_count]
        for _, first, stop in _block_parts(span.first, span.end, min(size, theirs.rows_per_block)):
            row, place = first % size, first % theirs.rows_per_block
            part_HPSW = source_NHPSW[blocks[first // size], :, :, row : row + stop - first]
            block = target_blocks[first // theirs.rows_per_block]
            target_NHPSW[block, :, :, place : place + stop - first] = part_HPSW
            if with_digest and stop - first == size:
                total += weights.of_block(part_HPSW.reshape(-1), first, here, span.head_count)
            elif with_digest:
                total += weights.of_rows(part_HPSW, first, here)
        return total * layer_weight(span.layer) & MASK

    def _heads(self, layer: int, head: int, count: int) -> Words:
        """Return a layer as [N + 1, W]: the words of some heads of each block, which are contiguous."""
        words_NHPSW = self._words[layer]
        head_words = self.geometry.layer(layer).head_bytes // WORD_BYTES
        return words_NHPSW.reshape(len(words_NHPSW), -1)[:, head * head_words : (head + count) * head_words]

    def _ranges(self, blocks: Blocks, span: KVRange, order_block_size: int) -> Iterator[tuple[int, int]]:
        """Yield offsets [start, stop) of the span's memory in payload order, adjacent ones joined."""
        geometry = self.geometry.layer(span.layer)
        head = span.head_first - geometry.head_first
        assert 0 <= head <= head + span.head_count <= geometry.num_heads
        start = stop = -1
        for begin, end in self._runs(geometry, blocks, span, head, order_block_size):
            if begin == stop:
                stop = end
                continue
            if stop > start:
                yield start, stop
            start, stop = begin, end
        if stop > start:
            yield start, stop

    def _runs(
        self, geometry: LayerGeometry, blocks: Blocks, span: KVRange, head: int, order_block_size: int
    ) -> Iterator[tuple[int, int]]:
        size, row_bytes = geometry.rows_per_block, geometry.row_bytes
        if order_block_size == size and not span.first % size and not span.count % size:  # almost always
            start, block_bytes = geometry.offset_bytes + head * geometry.head_bytes, geometry.block_bytes
            num_bytes = span.head_count * geometry.head_bytes
            for block in blocks[span.first // size : span.end // size]:
                yield start + block * block_bytes, start + block * block_bytes + num_bytes
            return
        for _, first, stop in _block_parts(span.first, span.end, order_block_size):
            inside = tuple(_block_parts(first, stop, size))
            if len(inside) == 1 and stop - first == size:
                start = geometry.offset_bytes + blocks[inside[0][0]] * geometry.block_bytes + head * geometry.head_bytes
                yield start, start + span.head_count * geometry.head_bytes
                continue
            for part in range(head * geometry.num_parts, (head + span.head_count) * geometry.num_parts):
                for index, low, high in inside:
                    block = geometry.offset_bytes + blocks[index] * geometry.block_bytes
                    start = block + part * geometry.part_bytes + low % size * row_bytes
                    yield start, start + (high - low) * row_bytes


class RankedPoolIO:
    """The pools of all ranks of a worker, seen as one; a head that several ranks hold is written to each.

    Args:
        pools: pools of every rank, in order.
    """

    def __init__(self, pools: Sequence[PoolIO]) -> None:
        assert pools
        self._pools = tuple(pools)

    @property
    def ranks(self) -> tuple[PoolIO, ...]:
        """The pool of each rank."""
        return self._pools

    def write(self, blocks: Blocks, span: KVRange, payload: Bytes, order_block_size: int) -> None:
        """Write a payload to its place, on every rank that holds a part of it."""
        source, start = memoryview(payload), 0
        for _, first, stop in _block_parts(span.first, span.end, order_block_size):
            for head in range(span.head_first, span.head_first + span.head_count):
                part = KVRange(span.layer, first, stop - first, head, 1)
                num_bytes = 0
                for pool in self._holders(span.layer, head):
                    pieces = pool.pieces(blocks, part, order_block_size)
                    num_bytes = sum(len(piece) for piece in pieces)
                    pool.write(blocks, part, source[start : start + num_bytes], order_block_size)
                start += num_bytes
        assert start == len(source)

    def pieces(self, blocks: Blocks, span: KVRange, order_block_size: int) -> list[memoryview]:
        """Return the target memory of a payload, on the first holder of each head; `spread` copies it to the others."""
        whole = self._whole(span)
        if whole is not None:
            return whole.pieces(blocks, span, order_block_size)
        found: list[memoryview] = []
        for _, first, stop in _block_parts(span.first, span.end, order_block_size):
            for head in range(span.head_first, span.head_first + span.head_count):
                part = KVRange(span.layer, first, stop - first, head, 1)
                found += self._holders(span.layer, head)[0].pieces(blocks, part, order_block_size)
        return found

    def spread(self, blocks: Blocks, span: KVRange) -> None:
        """Copy each head from its first holder to the others."""
        if self._whole(span) is not None:
            return
        for head in range(span.head_first, span.head_first + span.head_count):
            first, *others = self._holders(span.layer, head)
            for other in others:
                first.copy(blocks, other, blocks, KVRange(span.layer, span.first, span.count, head, 1))

    def digest(self, blocks: Blocks, span: KVRange) -> int:
        """Return the digest of the span, or one that matches nothing if holders of the same head differ."""
        whole = self._whole(span)
        if whole is not None:
            return whole.digest(blocks, span)
        total = 0
        for head in range(span.head_first, span.head_first + span.head_count):
            part = KVRange(span.layer, span.first, span.count, head, 1)
            found = {pool.digest(blocks, part) for pool in self._holders(span.layer, head)}
            total += found.pop() if len(found) == 1 else max(found) + 1
        return total & MASK

    def _whole(self, span: KVRange) -> PoolIO | None:
        """Return the only pool that holds any of these heads, if it holds all of them."""
        if len(self._pools) == 1:  # almost always
            return self._pools[0]
        first = self._holders(span.layer, span.head_first)
        last = self._holders(span.layer, span.head_first + span.head_count - 1)
        return first[0] if len(first) == len(last) == 1 and first[0] is last[0] else None

    def _holders(self, layer: int, head: int) -> list[PoolIO]:
        return [pool for pool in self._pools if pool.geometry.layer(layer).heads.first <= head < _stop(pool, layer)]


class OwnerPoolIO:
    """The pools of ranks that have sequences of their own, seen as one: only the pool of the blocks' owner is accessed.

    Args:
        pools: pools of every rank, in order; each holds all heads.
        numbers: numbering of their blocks.
    """

    def __init__(self, pools: Sequence[PoolIO], numbers: RankBlocks) -> None:
        assert len(pools) == numbers.num_pools > 1
        self._pools = tuple(pools)
        self._numbers = numbers

    @property
    def ranks(self) -> tuple[PoolIO, ...]:
        """The pool of each rank."""
        return self._pools

    def pieces(self, blocks: Blocks, span: KVRange, order_block_size: int) -> list[memoryview]:
        """Return the target memory of a payload."""
        pool, own = self._of(blocks)
        return pool.pieces(own, span, order_block_size)

    def spread(self, blocks: Blocks, span: KVRange) -> None:
        """Do nothing: no other rank has a part of it."""

    def digest(self, blocks: Blocks, span: KVRange) -> int:
        """Return the digest of the span."""
        pool, own = self._of(blocks)
        return pool.digest(own, span)

    def _of(self, blocks: Blocks) -> tuple[PoolIO, Blocks]:
        owner, own = self._numbers.at_owner(blocks)
        return self._pools[owner], own


WorkerPoolIO = RankedPoolIO | OwnerPoolIO


def _stop(pool: PoolIO, layer: int) -> int:
    return pool.geometry.layer(layer).heads.stop


def _block_parts(first: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block index, first, stop) of every block of `size` positions that [first, stop) touches."""
    while first < stop:
        index = first // size
        end = min((index + 1) * size, stop)
        yield index, first, end
        first = end
