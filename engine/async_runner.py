"""One thread that prepares one thing at a time, beside the thread that will use it.

`launch` gives a ticket, and `Ticket.result` is the only way to what was prepared: there is no member to read too
early and no flag to forget. With a CUDA stream the task's work is ordered on the device, both ways: behind what the
caller's stream had been given at `launch`, and before what the stream of `result` is given after it.

What a task captured is dropped before its ticket counts as done. An error is raised by `result`; if nobody asks, by
the next `launch`, `drain` or `close`. After it the runner goes on as before.
"""

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from baton.engine.carried_error import without_frames

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0


class Ticket(Generic[T]):
    """What one task will have prepared."""

    def __init__(self, event: torch.cuda.Event | None, timeout_s: float, device: torch.device | None = None) -> None:
        self._done = threading.Event()
        self._event = event
        self._device = device  # of the event
        self._timeout_s = timeout_s
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_asked = False

    @property
    def is_done(self) -> bool:
        """Whether the task is over, on the host."""
        return self._done.is_set()

    def result(self, stream: torch.cuda.Stream | None = None) -> T:
        """What the task returned; waits for it on the host, and has `stream` wait for its work on the device.

        Args:
            stream: where the value will be used; the current one of the runner's device if None.

        Raises:
            Exception: what the task raised.
            TimeoutError: it is not over in time.
        """
        self._wait()
        self._is_asked = True
        if self._error is not None:
            raise self._error
        if self._event is not None:
            (stream or torch.cuda.current_stream(self._device)).wait_event(self._event)
        return self._value  # type: ignore[return-value]  # set together with done

    def _wait(self) -> None:
        if not self._done.wait(self._timeout_s):
            raise TimeoutError(f"a task did not end within {self._timeout_s} s")

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        self._value = value
        self._error = error
        self._done.set()

    def _raise_unasked(self) -> None:
        """Wait; raise the error that nobody has heard of."""
        self._wait()
        if self._error is not None and not self._is_asked:
            self._is_asked = True
            raise self._error


class _Work(Generic[T]):
    """A task on its way to the thread."""

    def __init__(self, task: Callable[[], T], ticket: Ticket[T], ready: torch.cuda.Event | None) -> None:
        self.task: Callable[[], T] | None = task
        self.ticket = ticket
        self.ready = ready
        self.is_inference = torch.is_inference_mode_enabled()


class _Mailbox:
    """The slot between the two threads; the worker thread knows this and not the runner."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.work: _Work[Any] | None = None
        self.is_closed = False

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class AsyncRunner:
    """A thread, a slot and, for CUDA, a stream. One thread launches.

    Args:
        name: of the thread.
        stream: where tasks enqueue their device work; None on a CPU.
        timeout_s: of every wait for a task.
    """

    def __init__(
        self, name: str = "prepare", stream: torch.cuda.Stream | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._name = name
        self._stream = stream
        self._timeout_s = timeout_s
        self._mailbox = _Mailbox()
        self._last: Ticket[Any] | None = None
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._mailbox.close)

    def launch(self, task: Callable[[], T]) -> Ticket[T]:
        """Have `task` run; waits for the one before.

        Raises:
            Exception: what the task before raised, if nobody asked for its result; `task` is not run then.
        """
        assert not self._mailbox.is_closed, "the runner is closed"
        self.drain()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._mailbox, self._stream), name=self._name, daemon=True
            )
            self._thread.start()
        ready = event = None
        if self._stream is not None:
            ready, event = torch.cuda.Event(), torch.cuda.Event()
            # The inputs are made on the caller's stream of the runner's device, whichever device is current.
            ready.record(torch.cuda.current_stream(self._stream.device))
        ticket: Ticket[T] = Ticket(event, self._timeout_s, None if self._stream is None else self._stream.device)
        with self._mailbox.changed:
            self._mailbox.work = _Work(task, ticket, ready)
            self._mailbox.changed.notify_all()
        self._last = ticket
        return ticket

    def drain(self) -> None:
        """Wait until no task runs.

        Raises:
            Exception: what the last one raised, if nobody asked for its result.
        """
        if self._last is not None:
            last, self._last = self._last, None
            last._raise_unasked()

    def close(self) -> None:
        """Finish the task that was launched and end the thread; nothing may be launched any more.

        Raises:
            Exception: what that task raised, if nobody asked for its result. The thread has ended all the same.
        """
        self._mailbox.close()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the thread {self._name} did not end within {self._timeout_s} s")
        self.drain()

    def __enter__(self) -> "AsyncRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._last = None  # one error at a time
        self.close()


def _serve(mailbox: _Mailbox, stream: torch.cuda.Stream | None) -> None:
    while (work := _next(mailbox)) is not None:
        ticket = work.ticket
        value, error = _do(work, stream)
        del work
        ticket._finish(value, error)
        del ticket, value, error  # else they would live until the next task comes


def _next(mailbox: _Mailbox) -> _Work[Any] | None:
    """The next task; None at the end. What was launched before the end is still done."""
    with mailbox.changed:
        while mailbox.work is None:
            if mailbox.is_closed:
                return None
            mailbox.changed.wait()
        work, mailbox.work = mailbox.work, None
        return work


def _do(work: _Work[Any], stream: torch.cuda.Stream | None) -> tuple[Any, BaseException | None]:
    """Run the task and drop it, with everything it captured."""
    task, work.task = work.task, None
    assert task is not None
    try:
        # Modes are a thread's own: the task gets its caller's.
        with torch.inference_mode(work.is_inference):
            if stream is None:
                return task(), None
            assert work.ready is not None
            assert work.ticket._event is not None
            with torch.cuda.stream(stream):
                stream.wait_event(work.ready)
                value = task()
                work.ticket._event.record(stream)
                return value, None
    # Not hidden: `Ticket.result` raises it, or whatever is called next.
    except BaseException as error:  # noqa: BLE001
        return None, without_frames(error)
    finally:
        del task
