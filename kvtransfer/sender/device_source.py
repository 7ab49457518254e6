"""Reads a GPU pool as `sender.source`'s source for sockets: gathers payloads into pinned host memory and digests them.

A call waits for its own launch and lets other threads run meanwhile. PyTorch owns the pinned memory and reclaims it
when the last view of a payload is gone, that is, when the payload has been sent. This module never writes the pool.
"""

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import PoolAddress, ScatterRange, WriteCompletion, kv_scatter
from baton.kvcache.geometry import LayerGeometry
from baton.kvcache.pool import KVPool
from baton.kvtransfer.device_stream import DeviceStream, tuning_for
from baton.kvtransfer.protocol.frame import KVRange

MASK = (1 << 64) - 1


@dataclass(slots=True)
class _DataPath:
    """The launch state of one thread.

    Attributes:
        stream: the stream for launches.
        launches: helper that passes arguments to launches.
        words: pinned words where launches report.
        sequence: number of the last launch.
    """

    stream: torch.cuda.Stream
    launches: DeviceStream
    words: torch.Tensor
    sequence: int = 0


class DeviceSource:
    """A `sender.source.SourcePool` for a GPU pool. Any thread may use it; a writer thread launches on its own stream.

    Args:
        pool: the pool, on a GPU.
    """

    in_host_memory = False

    def __init__(self, pool: KVPool) -> None:
        assert pool.device.type == "cuda"
        self._pool = pool
        self._address = PoolAddress(pool.data_bytes.data_ptr(), pool.geometry.layers)
        self._local = threading.local()
        self._warm_up()

    def pieces(self, blocks: Sequence[int], span: KVRange, order_block_size: int) -> list[memoryview]:
        """Return a copy of the span as one piece, since no socket reads a GPU's memory."""
        return [self.read(blocks, span, order_block_size)]

    def read(self, blocks: Sequence[int], span: KVRange, order_block_size: int) -> memoryview:
        """Return a copy of the span, in payload order."""
        return self.read_digested(blocks, span, order_block_size, with_digest=False)[0]

    def read_digested(
        self, blocks: Sequence[int], span: KVRange, order_block_size: int, *, with_digest: bool
    ) -> tuple[memoryview, int | None]:
        """Return a copy of the span, and the digest of what was read if requested."""
        layer = self._pool.geometry.layer(span.layer)
        size = layer.rows_per_block
        assert order_block_size == size
        first_block, num_blocks = span.first // size, -(-(span.first + span.count) // size) - span.first // size
        gathered = _gathered_shape(layer, span, num_blocks)
        data = torch.empty(gathered.num_bytes, dtype=torch.uint8, pin_memory=True)
        # Indexed by logical block, as the kernel looks blocks up; entries before the first block are not read.
        places = torch.arange(-first_block, num_blocks, dtype=torch.int32)
        layers = [gathered] * (span.layer + 1)  # a pool that looks as if it held only this layer, under its number
        with self._data_path() as data_path:
            kv_scatter(
                self._address,
                data_path.launches.ids(tuple(blocks)),
                PoolAddress(data.data_ptr(), layers),
                data_path.launches.send(places),
                _piece(span),
                data_path.launches.workspace(span.first + span.count),
                self._completion(data_path),
                tuning_for(gathered.num_bytes),
                with_digest=with_digest,
            )
            digest = self._wait(data_path)
        payload = _close_up(data.numpy().data, gathered, span)
        return payload, digest if with_digest else None

    def digest(self, blocks: Sequence[int], span: KVRange) -> int:
        """Return the digest of a span."""
        with self._data_path() as data_path:
            kv_digest(
                self._address,
                data_path.launches.ids(tuple(blocks)),
                _piece(span),
                data_path.launches.workspace(span.first + span.count),
                self._completion(data_path),
                tuning_for(0),
            )
            return self._wait(data_path)

    def _warm_up(self) -> None:
        """Compile the kernels before the first push, by reading a block of every kind."""
        shapes = set()
        for index, layer in enumerate(self._pool.geometry.layers):
            shape = (layer.num_heads, layer.num_parts, layer.rows_per_block, layer.row_bytes)
            if shape not in shapes:
                shapes.add(shape)
                span = KVRange(index, 0, layer.rows_per_block, layer.head_first, layer.num_heads)
                for with_digest in (True, False):
                    self.read_digested((0,), span, layer.rows_per_block, with_digest=with_digest)
                self.digest((0,), span)

    def _data_path(self) -> "_Entered":
        """Return the state of this thread and its stream. A thread without its own stream gets one, not the model's."""
        device = self._pool.device
        current = torch.cuda.current_stream(device)
        data_paths: dict[int, _DataPath] = self._local.__dict__.setdefault("data_paths", {})
        key = current.cuda_stream
        if key not in data_paths:
            stream = torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current
            data_paths[key] = _DataPath(
                stream, DeviceStream(device), torch.zeros(2, dtype=torch.int64, pin_memory=True)
            )
        return _Entered(data_paths[key])

    def _completion(self, data_path: _DataPath) -> WriteCompletion:
        data_path.sequence += 1
        return WriteCompletion(data_path.words.data_ptr(), data_path.sequence)

    def _wait(self, data_path: _DataPath) -> int:
        """Wait until the launch is over; return its digest."""
        event = torch.cuda.Event(blocking=True)
        event.record(data_path.stream)
        event.synchronize()
        sequence, digest = data_path.words.tolist()
        assert sequence == data_path.sequence, "a launch ended without its word"
        return int(digest) & MASK


class _Entered:
    """Makes a data path's stream current for the duration of a block."""

    def __init__(self, data_path: _DataPath) -> None:
        self._data_path = data_path
        self._context = torch.cuda.stream(data_path.stream)

    def __enter__(self) -> _DataPath:
        self._context.__enter__()
        return self._data_path

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def _piece(span: KVRange) -> ScatterRange:
    return ScatterRange(
        layers=(span.layer,),
        first=span.first,
        count=span.count,
        head_first=span.head_first,
        head_count=span.head_count,
    )


def _gathered_shape(layer: LayerGeometry, span: KVRange, num_blocks: int) -> LayerGeometry:
    """Return a layer shape with only the heads of a span, in as many blocks as the span touches."""
    return dataclasses.replace(
        layer, offset_bytes=0, num_blocks=num_blocks, head_first=span.head_first, num_heads=span.head_count
    )


def _close_up(memory: memoryview, shape: LayerGeometry, span: KVRange) -> memoryview:
    """Compact the rows of partially used blocks towards the start, so that what is left is the payload.

    Whole blocks are already in payload order. In the others, each [head][part] keeps only the rows of the span. Later
    bytes always lie behind earlier ones, so bytes move downwards only.
    """
    size, row_bytes = shape.rows_per_block, shape.row_bytes
    end = span.first + span.count
    if span.first % size == 0 and end % size == 0:
        return memory
    filled = 0
    for block in range(shape.num_blocks):
        start = (span.first // size + block) * size
        low, high = max(span.first, start) - start, min(end, start + size) - start
        base = block * shape.block_bytes
        if high - low == size:
            filled = _move(memory, base, filled, shape.block_bytes)
            continue
        for part in range(shape.num_heads * shape.num_parts):
            begin = base + part * shape.part_bytes + low * row_bytes
            filled = _move(memory, begin, filled, (high - low) * row_bytes)
    return memory[:filled]


def _move(memory: memoryview, begin: int, to: int, num_bytes: int) -> int:
    if begin != to:
        memory[to : to + num_bytes] = memory[begin : begin + num_bytes]
    return to + num_bytes
