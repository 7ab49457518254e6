"""One request's events in order, from the worker's loop thread: ending with the last one or an error."""

from typing import Protocol, TypeVar

from baton.core.errors import BatonError

EventIn = TypeVar("EventIn", contravariant=True)


class EventSink(Protocol[EventIn]):
    """Where a worker puts one request's events; `worker.send_queue` and tests each have their own."""

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
