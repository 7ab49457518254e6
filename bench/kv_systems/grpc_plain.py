"""A first attempt with gRPC: a client stream of 1 MiB messages for each request, joined and copied."""

import queue
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from baton.bench.kv_bench.memory import Blocks, allocate
from baton.bench.kv_systems.faces import REQUEST_LIMIT_S, Address, OnDone, TransferCell

MESSAGE_BYTES = 1 << 20
_METHOD = "/baton.bench.Plain/Push"


class GrpcPlainReceiver:
    """A server whose handler copies each message into the pool."""

    def __init__(self, cell: TransferCell, on_done: OnDone) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=False)
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._on_done = on_done
        handler = grpc.stream_unary_rpc_method_handler(self._push)
        service, method = _METHOD[1:].split("/")
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def address(self) -> Address:
        """Address of the server."""
        return {"address": f"127.0.0.1:{self._port}"}

    def turn(self, timeout_s: float) -> None:
        """Only sleep, because the server has threads of its own."""
        time.sleep(timeout_s)

    def close(self) -> None:
        """Stop the server."""
        self._server.stop(None).wait(REQUEST_LIMIT_S)

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        metadata = dict(context.invocation_metadata())
        index = int(metadata["request"])
        workload = self._cell.workload
        targets = workload.target_blocks(self._cell.seed, index)
        places = [(layer, block) for layer in range(workload.num_layers) for block in targets]
        position = 0
        for message in messages:
            for block_B in np.frombuffer(message, np.uint8).reshape(-1, workload.block_bytes):
                self.blocks[places[position]] = block_B
                position += 1
        self._on_done(index, time.monotonic())
        return b""


class GrpcPlainSender:
    """Opens one stream for each request; a queue feeds it."""

    def __init__(self, cell: TransferCell) -> None:
        self.blocks: Blocks = allocate(cell.workload.pool_shape, shared=False)
        self.data_path = ""
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._sources: tuple[int, ...] = ()
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel: grpc.Channel
        self._answer: Any

    def connect(self, address: Address) -> None:
        """Open the channel."""
        self._channel = grpc.insecure_channel(address["address"])
        grpc.channel_ready_future(self._channel).result(REQUEST_LIMIT_S)

    def prepare(self, index: int) -> None:
        """Open the request's stream."""
        self._sources = self._cell.workload.source_blocks(self._cell.seed, index)
        self._messages = queue.SimpleQueue()
        call = self._channel.stream_unary(_METHOD, bytes, bytes)
        metadata = (("request", str(index)),)
        self._answer = call.future(iter(self._messages.get, None), timeout=REQUEST_LIMIT_S, metadata=metadata)

    def submit(self, layer: int) -> None:
        """Join the layer's blocks into messages."""
        step = max(1, MESSAGE_BYTES // self._cell.workload.block_bytes)
        for start in range(0, len(self._sources), step):
            blocks = (self.blocks[layer, block].tobytes() for block in self._sources[start : start + step])
            self._messages.put(b"".join(blocks))

    def finish(self) -> None:
        """End the stream."""
        self._messages.put(None)

    def wait(self) -> None:
        """Wait for the server's answer."""
        self._answer.result(REQUEST_LIMIT_S)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
