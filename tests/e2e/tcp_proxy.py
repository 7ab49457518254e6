"""A port that passes bytes on to another, as a network that can be slow, lossy, cut, or open in one direction only.

What a real network loses of a connection's bytes is sent again, so loss is a delay here; what a partition swallows is
gone, and such a connection is cut when the partition heals.
"""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass

CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 256  # on their way in one direction
RESEND_S = 0.2  # until a lost packet is sent again


@dataclass
class Direction:
    """How bytes go one way."""

    delay_s: float = 0.0
    loss: float = 0.0  # part of the chunks
    swallows: bool = False
    bytes_per_s: float = 0.0  # 0: as fast as they can
    num_bytes: int = 0
    num_swallowed: int = 0
    flips: int = 0  # chunks to come in which a bit is turned over


class Proxy:
    """See above. `there` is from who connects to the target, `back` the answers.

    Args:
        target_port: on this host.
    """

    def __init__(self, target_port, seed=0):
        self._target_port = target_port
        self._random = random.Random(seed)
        self._server = None
        self._links = {}  # task to the writers of its two ends
        self._damaged = set()
        self.port = 0
        self.there, self.back = Direction(), Direction()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def slow(self, delay_s, loss=0.0):
        for direction in (self.there, self.back):
            direction.delay_s, direction.loss = delay_s, loss

    def swallow(self, *, there=True, back=True):
        """A partition, of one direction or both."""
        self.there.swallows, self.back.swallows = there, back

    def heal(self):
        """As a network without faults; what a partition has damaged is cut."""
        for direction in (self.there, self.back):
            direction.delay_s = direction.loss = direction.bytes_per_s = 0.0
            direction.swallows = False
        for task in tuple(self._damaged):
            self._cut(task)
        self._damaged.clear()

    def cut(self):
        """Break all connections."""
        for task in tuple(self._links):
            self._cut(task)

    def _cut(self, task):
        for writer in self._links.get(task, ()):
            writer.transport.abort()

    async def close(self):
        if self._server is not None:
            self._server.close()
        tasks = tuple(self._links)
        self.cut()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._links[task] = [writer]
        try:
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            except OSError:
                return
            self._links[task].append(far_writer)
            ways = (
                asyncio.create_task(self._pump(task, reader, far_writer, self.there)),
                asyncio.create_task(self._pump(task, far_reader, writer, self.back)),
            )
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except asyncio.CancelledError:
            pass
        finally:
            for one in self._links.pop(task):
                one.transport.abort()
            self._damaged.discard(task)

    async def _pump(self, task, reader, writer, direction):
        chunks = asyncio.Queue(MAX_CHUNKS)
        sending = asyncio.create_task(self._send(chunks, writer))
        due_s = 0.0
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(CHUNK_BYTES):
                    direction.num_bytes += len(data)
                    if direction.swallows:
                        direction.num_swallowed += len(data)
                        self._damaged.add(task)
                        continue
                    if direction.flips and len(data) > 256:
                        direction.flips -= 1
                        data = bytearray(data)
                        data[len(data) // 2] ^= 1
                    extra_s = RESEND_S if direction.loss and self._random.random() < direction.loss else 0.0
                    due_s = max(due_s, time.monotonic() + direction.delay_s + extra_s)
                    if direction.bytes_per_s:
                        due_s += len(data) / direction.bytes_per_s
                    await chunks.put((due_s, data))
                await chunks.put(None)
                await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    @staticmethod
    async def _send(chunks, writer):
        with contextlib.suppress(ConnectionError):
            while (chunk := await chunks.get()) is not None:
                due_s, data = chunk
                wait_s = due_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
