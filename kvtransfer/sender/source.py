"""The writer threads' work on one part of a layer: digest it, and gather it or write it into the decode worker's pool.

The raw data path sends from the pool itself, so nothing is copied for it. The route's fence decides whether a write may
begin. It is not an error if the transfer has ended meanwhile.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.kv_transports import is_one_sided
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import FrameShape, KVRange, crc_of
from baton.kvtransfer.sender.data_path import DataPathFailed, Written
from baton.kvtransfer.sender.route import Frame, KeptBytes, Route

MASK = (1 << 64) - 1

log = logging.getLogger(__name__)


class SourcePool(Protocol):
    """The pool to push from.

    Attributes:
        in_host_memory: whether sockets may send its memory directly; if not, `pieces` returns copies.
    """

    @property
    def in_host_memory(self) -> bool:
        """Whether sockets may send the pool's memory directly."""
        ...

    def pieces(self, blocks: Sequence[int], span: KVRange, order_block_size: int) -> list[memoryview]:
        """Return the memory of a span in payload order, to be read while it is sent."""
        ...

    def read(self, blocks: Sequence[int], span: KVRange, order_block_size: int) -> memoryview:
        """Return a copy of a span, in payload order."""
        ...

    def read_digested(
        self, blocks: Sequence[int], span: KVRange, order_block_size: int, *, with_digest: bool
    ) -> tuple[memoryview, int | None]:
        """Return a copy of a span, and its digest if requested."""
        ...

    def digest(self, blocks: Sequence[int], span: KVRange) -> int:
        """Return the digest of a span."""
        ...


@dataclass(slots=True, eq=False)
class PushedRange:
    """One part of one layer, on its way from a writer thread to the push thread.

    Attributes:
        route: route of its transfer.
        layer: layer of the model.
        first: first position.
        count: number of positions.
        digest: sum of the digests of the frames that are done.
        writes: frames whose write was posted and may not be done.
        problem: why a write failed.
    """

    route: Route
    layer: int
    first: int
    count: int
    digest: int = 0
    writes: tuple[tuple[int, int, Written], ...] = ()
    problem: str = ""


class PushSource:
    """Makes frames of parts. Thread-safe.

    Args:
        pool: pool of this rank.
        layout: layout of the pool.
        rank: rank in its tensor-parallel group.
        size: size of that group.
        config: limits.
        clock: the worker's clock.
        on_left: called with a route when its fence is shut and the last writer has left.
    """

    def __init__(
        self,
        *,
        pool: SourcePool,
        layout: KVLayout,
        rank: int,
        size: int,
        config: KVTransferConfig,
        clock: Clock,
        on_left: Callable[[Route], None],
    ) -> None:
        self.num_frames_not_kept = 0
        self._pool = pool
        self._layout = layout
        self._shape = FrameShape(layout, config.max_frame_bytes)
        self._rank, self._size = rank, size
        self._heads = [layout.pushed_heads(layer, rank, size) for layer in range(layout.num_layers)]
        self._has_digest = config.digest
        self._clock = clock
        self._kept = KeptBytes(config.window_bytes)
        self._on_left = on_left

    def part(self, route: Route, layer: int, first: int, count: int) -> PushedRange | None:
        """Digest a part, and gather or write its frames; None if this rank pushes nothing of the layer.

        Positions that other ranks push are not in its frames.
        """
        heads = self._heads[layer]
        if not heads.count:
            return None
        spec = self._layout.layers[layer]
        if spec.is_state:
            if first + count < route.prompt_len:
                return None  # decode continues only from the state after the last position
            kept = spec.span(route.prompt_len)
            if not kept.count:
                return None
            first, count = kept.first, kept.count
        part = PushedRange(route, layer, first, count)
        for own in self._layout.pushed_positions(layer, first, count, self._rank, self._size):
            for start, length in self._shape.split(layer, own.first, own.count, heads.count):
                self._frame(part, KVRange(layer, start, length, heads.first, heads.count))
        part.digest &= MASK
        return part

    def make(self, route: Route, span: KVRange) -> Frame:
        """Make a frame again that was posted before, or is now split differently; digests it from the pool."""
        return Frame(span.count, self._pool.digest(route.blocks_of(span), span) if self._has_digest else None)

    def payload(self, route: Route, span: KVRange, frame: Frame) -> list[memoryview]:
        """Return the payload of a frame, to be sent."""
        if frame.data is not None:
            return [frame.data]
        return self._pool.pieces(route.blocks_of(span), span, self._layout.rows_per_block(span.layer))

    def write(self, route: Route, span: KVRange, *, with_digest: bool) -> Written:
        """Write a frame that the push thread asked for.

        Raises:
            DataPathFailed: the frame is not written.
        """
        assert route.opened is not None
        return route.opened.write(route.blocks_of(span), route.target_blocks_of(span), span, with_digest=with_digest)

    def give_back(self, route: Route, frame: Frame) -> None:
        """Return a frame's memory: the frame was sent, or will not be."""
        if frame.data is not None:
            self._kept.give(route.address, len(frame.data))

    def forget(self, route: Route) -> None:
        """Drop all frames that were read for a route."""
        while route.frames:
            self.give_back(route, route.frames.popitem()[1])

    def _frame(self, part: PushedRange, span: KVRange) -> None:
        route = part.route
        if is_one_sided(route.data_path) and route.fence.enter(self._clock.now_s()):
            self._write(part, span)
            return
        data, digest = self._gather(route, span) if self._is_gathered(route) else (None, None)
        crc = None
        if self._has_digest:
            digest = self._pool.digest(route.blocks_of(span), span) if digest is None else digest
            part.digest += digest
        elif data is not None:
            crc = crc_of([data])
        elif not is_one_sided(route.data_path) and self._pool.in_host_memory:
            crc = crc_of(self._pool.pieces(route.blocks_of(span), span, self._layout.rows_per_block(span.layer)))
        route.frames[span.layer, span.first] = Frame(span.count, digest, crc, data)

    def _is_gathered(self, route: Route) -> bool:
        """Return whether a payload must be copied before it is sent. The transport gathers from host memory itself."""
        return bool(route.data_path) and not is_one_sided(route.data_path) and not self._pool.in_host_memory

    def _gather(self, route: Route, span: KVRange) -> tuple[memoryview | None, int | None]:
        num_bytes = self._shape.payload_bytes(span.layer, span.count, span.head_count)
        if self._kept.take(route.address, num_bytes):
            order = self._layout.rows_per_block(span.layer)
            return self._pool.read_digested(route.blocks_of(span), span, order, with_digest=self._has_digest)
        self.num_frames_not_kept += 1  # it is read again when it is sent
        return None, None

    def _write(self, part: PushedRange, span: KVRange) -> None:
        """Write a frame inside the fence. A write that is not over when this returns stays inside until it is."""
        route = part.route
        try:
            written = self.write(route, span, with_digest=self._has_digest)
            if written.done:
                digest = written.digest
                part.digest += digest or 0
                route.frames[span.layer, span.first] = Frame(span.count, digest, is_written=True)
                self._leave(route)
            else:
                part.writes = (*part.writes, (span.first, span.count, written))
        except DataPathFailed as error:
            part.problem = str(error) or "the data path failed"
            self._leave(route)
        # The boundary of a transfer: what its peer lets it write where must not end the pushes to others.
        except Exception as error:
            log.exception("layer %d of %s could not be written", span.layer, route.attempt)
            part.problem = f"the write failed: {error!r}"
            self._leave(route)
        except BaseException:
            self._leave(route)
            raise

    def finish(self, part: PushedRange) -> bool:
        """Return whether all writes of a part are over; the push thread calls this until they are."""
        route, open_writes = part.route, []
        for first, count, written in part.writes:
            try:
                if not written.done:
                    open_writes.append((first, count, written))
                    continue
                digest = written.digest
                part.digest = (part.digest + (digest or 0)) & MASK
                route.frames[part.layer, first] = Frame(count, digest, is_written=True)
            except DataPathFailed as error:
                part.problem = str(error) or "the data path failed"
            self._leave(route)
        part.writes = tuple(open_writes)
        return not open_writes

    def _leave(self, route: Route) -> None:
        if route.fence.leave():
            self._on_left(route)
