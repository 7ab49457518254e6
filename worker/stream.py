"""From the worker's loop thread to one gRPC stream: events in order, ending with the last one or an error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Generic, Protocol, TypeVar

from baton.core.errors import BatonError

Event = TypeVar("Event")
EventIn = TypeVar("EventIn", contravariant=True)


class EventSink(Protocol[EventIn]):
    """Where a worker puts one request's events; the gRPC service and tests each have their own."""

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        ...

    def emit(self, event: EventIn) -> None:
        """Add an event."""
        ...

    def end(self, error: BatonError | None = None) -> None:
        """No event follows; `error` says why there are no more."""
        ...


class EventStream(Generic[Event]):
    """Events that a loop thread emits and one coroutine reads.

    The number of events is bounded by the request's `max_tokens`, so the queue needs no limit of its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Event | BatonError | None] = asyncio.Queue()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def emit(self, event: Event) -> None:
        """Add an event. Any thread."""
        self._put(event)

    def end(self, error: BatonError | None = None) -> None:
        """No event follows; with `error`, the reader raises it. Any thread; later calls change nothing."""
        if not self._ended:
            self._ended = True
            self._put(error)

    def _put(self, item: Event | BatonError | None) -> None:
        # A closed event loop has no reader left, and closing may come between a check and the call.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def events(self) -> AsyncIterator[Event]:
        """The events, until the end.

        Raises:
            BatonError: the error the stream was ended with.
        """
        while True:
            item = await self._queue.get()
            if item is None:
                return
            if isinstance(item, BatonError):
                raise item
            yield item
