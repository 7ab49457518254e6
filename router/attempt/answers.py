"""The chunks of everything one call asked for, as one stream; it knows no transport."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Self

from baton.core.requests.request import GenerationRequest
from baton.proto import inference_pb2

Chunks = AsyncGenerator[inference_pb2.GenerateChunk]


class Answers:
    """Iterate `chunks` inside the context; leaving it ends whatever is under way.

    Args:
        requests: checked, in the order of the call.
        streams: the chunks of each.
    """

    def __init__(self, requests: Sequence[GenerationRequest], streams: Iterable[Chunks]) -> None:
        self.requests = requests
        self._streams = list(streams)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for stream in self._streams:
            await stream.aclose()
        # Whoever was refused may keep the error, and with it the frames that know this object.
        self._tasks.clear()
        self._streams.clear()

    def only(self) -> Chunks:
        """The chunks of a call that asked for one thing. To be iterated once, instead of `chunks`."""
        (stream,) = self._streams
        return stream

    async def chunks(self) -> AsyncGenerator[tuple[int, inference_pb2.GenerateChunk]]:
        """(which request, chunk), each request's in order. To be iterated once.

        Raises:
            BatonError: what ended one request, and with it the call.
        """
        if len(self._streams) == 1:
            async for chunk in self.only():
                yield 0, chunk
            return
        # No request has more events than tokens, so the queue needs no other bound.
        queue: asyncio.Queue[tuple[int, inference_pb2.GenerateChunk] | BaseException | None] = asyncio.Queue()

        async def read(at: int, stream: Chunks) -> None:
            async for chunk in stream:
                queue.put_nowait((at, chunk))

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                queue.put_nowait(task.exception())

        for at, stream in enumerate(self._streams):
            task = asyncio.create_task(read(at, stream))
            task.add_done_callback(ended)
            self._tasks.append(task)
        num_open = len(self._tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:  # it knows this frame: with the frame knowing it neither would be freed
                    del item
                    while not queue.empty():
                        queue.get_nowait()
            if item is None:
                num_open -= 1
            else:
                yield item
