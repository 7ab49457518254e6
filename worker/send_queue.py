"""What the streams of one call have said and the call has not carried yet: from any thread to one coroutine.

A stream says no more than its answer has tokens, so what waits here is bounded by the answers of the streams, however
slow the reader at the other end is; what has gathered goes in one frame.
"""

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

from baton.core.errors import BatonError
from baton.proto.stream_mux_wire import End
from baton.worker.write_coalescer import WriteCoalescer

Event = TypeVar("Event")


class SendQueue(Generic[Event]):
    """Of one call.

    Args:
        loop: the reader's.
        write_coalescer: what is said while it is held is taken in one piece.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, write_coalescer: WriteCoalescer) -> None:
        self._loop = loop
        self._write_coalescer = write_coalescer
        self._lock = threading.Lock()
        self._items: list[tuple[int, Event | End]] = []
        self._is_waking = False
        self._ready = asyncio.Event()

    def put(self, number: int, item: Event | End) -> None:
        """A stream says something. Any thread."""
        with self._lock:
            self._items.append((number, item))
            if self._is_waking:
                return
            self._is_waking = True
        try:
            self._write_coalescer.call(self._wake)
        except BaseException:  # it may not have come to `_wake`
            with self._lock:
                self._is_waking = False
            raise

    async def take(self) -> list[tuple[int, Event | End]]:
        """All that was said since, at least one item."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            items, self._items = self._items, []
            self._is_waking = False
        return items

    def _wake(self) -> None:
        # A closed event loop has no reader left, and closing may come between a check and the call.
        try:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)
        except BaseException:  # the next to say something wakes the reader, who else would sleep for ever
            with self._lock:
                self._is_waking = False
            raise


class MuxedStream(Generic[Event]):
    """One stream of a call: an `EventSink`."""

    def __init__(self, number: int, send_queue: SendQueue[Event]) -> None:
        self._number = number
        self._send_queue = send_queue
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def emit(self, event: Event) -> None:
        """Add an event. Any thread."""
        self._send_queue.put(self._number, event)

    def end(self, error: BatonError | None = None) -> None:
        """No event follows; `error` says why there are no more. Any thread; later calls change nothing."""
        if not self._ended:
            self._ended = True
            self._send_queue.put(self._number, End(error))
