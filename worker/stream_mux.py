"""The worker's side of a stream multiplexer: one call that carries all the streams of one router.

A stream that fails is one item of a frame, and the others go on. When the call ends, for whatever reason, the router no
longer reads any of its streams, and all are cancelled.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio

from baton.core.errors import BatonError, MalformedMessage, as_internal
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.proto.stream_mux_wire import MAX_FRAME_BYTES, MAX_ITEMS, End
from baton.proto.unreadable import read_of
from baton.proto.wire import abort_with

EventIn = TypeVar("EventIn", contravariant=True)


class EventSink(Protocol[EventIn]):
    """Where a worker puts one request's events: a `MuxedStream`, or a test's own."""

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        ...

    def emit(self, event: EventIn) -> None:
        """Add an event."""
        ...

    def end(self, error: BatonError | None = None) -> None:
        """End the events; `error` says why there are no more."""
        ...


class WriteCoalescer:
    """Delays wake-ups while one thread holds it, to batch writes; other threads' wake-ups pass."""

    def __init__(self) -> None:
        self._holder: int | None = None
        self._held: dict[Callable[[], None], None] = {}

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold wake-ups until the end of the block; must not be nested."""
        assert self._holder is None
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            held, self._held = self._held, {}
            with contextlib.ExitStack() as stack:  # calls each, even if another raises
                for wake in reversed(held):
                    stack.callback(wake)

    def call(self, wake: Callable[[], None]) -> None:
        """Call `wake` now, or once when this thread releases the write coalescer that it holds."""
        if self._holder == threading.get_ident():
            self._held[wake] = None
        else:
            wake()


Event = TypeVar("Event")


class SendQueue(Generic[Event]):
    """The send queue of one call.

    Args:
        loop: the reader's event loop.
        write_coalescer: items that are put while it is held are taken together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, write_coalescer: WriteCoalescer) -> None:
        self._loop = loop
        self._write_coalescer = write_coalescer
        self._lock = threading.Lock()
        self._items: list[tuple[int, Event | End]] = []
        self._is_waking = False
        self._ready = asyncio.Event()

    def put(self, number: int, item: Event | End) -> None:
        """Append an item of a stream. Any thread may call this."""
        with self._lock:
            self._items.append((number, item))
            if self._is_waking:
                return
            self._is_waking = True
        try:
            self._write_coalescer.call(self._wake)
        except BaseException:  # `_wake` may not have been called
            with self._lock:
                self._is_waking = False
            raise

    async def take(self) -> list[tuple[int, Event | End]]:
        """Return all items since the last call, at least one."""
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
        except BaseException:  # the next item wakes the reader, which would otherwise sleep forever
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
        """Add an event. Any thread may call this."""
        self._send_queue.put(self._number, event)

    def end(self, error: BatonError | None = None) -> None:
        """End the events; `error` says why there are no more. Any thread may call this; later calls change nothing."""
        if not self._ended:
            self._ended = True
            self._send_queue.put(self._number, End(error))


Message = TypeVar("Message")

MessageIn = TypeVar("MessageIn", contravariant=True)


class StreamRole(Protocol[MessageIn, Event]):
    """What a worker does with a stream."""

    def read(self, message: MessageIn) -> GenerationRequest:
        """Return the attempt that a message opens.

        Raises:
            BatonError: it opens none.
        """
        ...

    def check(self, attempt: GenerationRequest) -> None:
        """Do what may take a while before `begin`. Called on a thread, for attempts with a grammar.

        Raises:
            InvalidRequest: the attempt can never be served here.
        """
        ...

    def begin(self, message: MessageIn, attempt: GenerationRequest, stream: MuxedStream[Event]) -> None:
        """Serve the attempt.

        Raises:
            BatonError: the attempt is refused.
        """
        ...

    def cancel(self, key: AttemptKey, stream: MuxedStream[Event]) -> None:
        """Cancel an attempt whose stream the router no longer reads."""
        ...


class StreamMux(Generic[Message, Event]):
    """One call; `serve` runs until it ends.

    Args:
        role: serves the streams.
        frame_of: converts the streams' items to a message.
        write_coalescer: held by the worker while it emits what belongs together.
        epoch: this incarnation.
    """

    def __init__(
        self,
        role: StreamRole[Message, Event],
        frame_of: Callable[[Sequence[tuple[int, Event | End]]], Any],
        write_coalescer: WriteCoalescer,
        epoch: int,
    ) -> None:
        self._role = role
        self._frame_of = frame_of
        self._epoch = epoch
        self._send_queue: SendQueue[Event] = SendQueue(asyncio.get_running_loop(), write_coalescer)
        self._streams: dict[int, tuple[AttemptKey, MuxedStream[Event]]] = {}
        self._last = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Open and cancel streams and send their events, until the caller or the connection ends the call."""
        frame = self._frame_of(())
        frame.epoch = self._epoch
        await context.write(frame)
        writing = self._spawn(self._write(context))
        try:
            while (commands := await self._next(context, writing)) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                for opened in commands.open:
                    self._open(opened.stream, opened.request)
                for number in commands.cancelled:
                    self._cancel(number)
        except Exception as error:  # noqa: BLE001  the call's boundary: its streams end with it, and the caller knows why
            await abort_with(context, as_internal("a worker's call of all streams", error))
        finally:
            for task in self._tasks:
                task.cancel()
            for number in tuple(self._streams):
                self._cancel(number)

    @staticmethod
    async def _next(context: grpc.aio.ServicerContext[Any, Any], writing: asyncio.Task[None]) -> Any:
        """Return the next commands; raise the writer's error if it ended, since no stream could be read any more."""
        reading = asyncio.ensure_future(read_of(context))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                return reading.result()
        finally:
            reading.cancel()
        return writing.result()

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            items = await self._send_queue.take()
            while items:
                part = items[: self._room(items)]
                items = items[len(part) :]
                for number, item in part:
                    if isinstance(item, End):
                        self._streams.pop(number, None)
                for frame in self._frames(part):
                    await context.write(frame)

    def _frames(self, part: Sequence[tuple[int, Any]]) -> list[Any]:
        """Encode items, normally as one frame; a stream with an item that no frame can carry ends alone."""
        try:
            return [self._frame_of(part)]
        except Exception as error:  # noqa: BLE001  the items are encoded one by one below, to find which one fails
            if len(part) == 1:
                ((number, _),) = part
                self._cancel(number)
                return [self._frame_of([(number, End(as_internal("a worker's stream", error)))])]
        return [frame for item in part for frame in self._frames([item])]

    @staticmethod
    def _room(items: Sequence[tuple[int, Any]]) -> int:
        """Return how many items fit one frame."""
        num_bytes = 0
        for at, (_, item) in enumerate(items[:MAX_ITEMS]):
            num_bytes += 0 if isinstance(item, End) else item.ByteSize()
            if num_bytes > MAX_FRAME_BYTES:
                return max(at, 1)
        return min(len(items), MAX_ITEMS)

    def _open(self, number: int, message: Message) -> None:
        if number <= self._last:
            raise MalformedMessage(f"stream {number} was opened after {self._last}", field="open.stream")
        self._last = number
        stream = MuxedStream(number, self._send_queue)
        try:
            attempt = self._role.read(message)
            self._streams[number] = (attempt.key, stream)
            if attempt.sampling.grammar is None:
                self._role.begin(message, attempt, stream)
            else:
                self._spawn(self._check(number, message, attempt, stream))
        except Exception as error:  # noqa: BLE001  the stream's boundary
            self._fail(number, stream, error)

    def _fail(self, number: int, stream: MuxedStream[Event], error: Exception) -> None:
        """End a stream with the error that was raised for it, and release what the worker may have taken for it."""
        typed = as_internal("a request's beginning", error)
        if typed is not error:
            self._cancel(number)
        stream.end(typed)

    async def _check(
        self, number: int, message: Message, attempt: GenerationRequest, stream: MuxedStream[Event]
    ) -> None:
        """Let other streams go on while a grammar compiles."""
        try:
            await asyncio.to_thread(self._role.check, attempt)
            if number in self._streams:
                self._role.begin(message, attempt, stream)
        except Exception as error:  # noqa: BLE001  the stream's boundary
            self._fail(number, stream, error)

    def _cancel(self, number: int) -> None:
        key, stream = self._streams.pop(number, (None, None))
        if key is not None and stream is not None and not stream.ended:
            try:
                self._role.cancel(key, stream)
            except Exception as error:  # noqa: BLE001  the other streams must still be cancelled
                as_internal("the cancellation of a request", error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
