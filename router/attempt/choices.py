"""Runs the answers to one request side by side, and merges the chunks of a call's requests."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from baton.core.requests.request import GenerationRequest, choices_of
from baton.proto import inference_pb2
from baton.router.admission.admission_queue import AdmissionQueue, AdmissionTicket
from baton.router.attempt.attempts import Attempts
from baton.router.attempt.request_run import CertainTokens

Chunks = AsyncGenerator[inference_pb2.GenerateChunk]


class Answers:
    """The chunks of one call. Iterate `chunks` inside the context; leaving it ends what is still running.

    Args:
        requests: the checked requests, in the order of the call.
        streams: each request's chunks.
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
        # A caller that was refused may keep the error, whose traceback holds frames that refer to this object.
        self._tasks.clear()
        self._streams.clear()

    def only(self) -> Chunks:
        """The chunks of a call with a single request. Iterate it once, instead of `chunks`."""
        (stream,) = self._streams
        return stream

    async def chunks(self) -> AsyncGenerator[tuple[int, inference_pb2.GenerateChunk]]:
        """Yield (index of the request, chunk), each request's chunks in order. Iterate it once.

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
                finally:  # The error's traceback holds this frame: a cycle that would keep both alive.
                    del item
                    while not queue.empty():
                        queue.get_nowait()
            if item is None:
                num_open -= 1
            else:
                yield item


@dataclass(slots=True)  # not frozen, which would make construction three times as expensive
class ChoiceEvent:
    """Tokens emitted by the attempts of one answer."""

    choice: int
    emitted: CertainTokens


class Choices:
    """The `n` answers to one request. The caller iterates `events`, then always calls `close`.

    A request for one answer runs as it is; with several, each has its own name at the workers. The first answer that
    fails ends all of them.

    Args:
        request: the checked request.
        attempts_of: makes the attempts of one answer.
        admission_queue: where the request waits to be admitted; None if there is no queue.
    """

    def __init__(
        self,
        request: GenerationRequest,
        attempts_of: Callable[[GenerationRequest], Attempts],
        admission_queue: AdmissionQueue | None = None,
    ) -> None:
        self._request, self._admission_queue = request, admission_queue
        self._turn: AdmissionTicket | None = None
        self.attempts = [attempts_of(_named(one)) for one in choices_of(request)]
        self._tasks: list[asyncio.Task[None]] = []

    async def events(self) -> AsyncIterator[ChoiceEvent]:
        """Yield tokens of all answers as they arrive; each answer's are in order, its last event has a finish reason.

        Raises:
            BatonError: what ended one answer, and with it the request; or the queue refused the request.
        """
        if self._admission_queue is not None:
            self._turn = await self._admission_queue.enter(self._request)
            for attempts in self.attempts:
                attempts.on_arrival = self._turn.arrived
        if len(self.attempts) == 1:
            async for emitted in self.attempts[0].events():
                yield ChoiceEvent(0, emitted)
            return
        async for event in self._events():
            yield event

    async def _events(self) -> AsyncIterator[ChoiceEvent]:
        # Each answer has at most `max_tokens` events, so the queue needs no other bound.
        queue: asyncio.Queue[ChoiceEvent | asyncio.Task[None]] = asyncio.Queue()
        for choice, attempts in enumerate(self.attempts):
            task = asyncio.create_task(_read(choice, attempts, queue))
            self._tasks.append(task)
            # The callback is `put_nowait` itself: if code of ours in between raised, the loop below would wait for
            # ever.
            task.add_done_callback(queue.put_nowait)
        num_open = len(self._tasks)
        while num_open:
            event = await queue.get()
            if isinstance(event, asyncio.Task):
                event.result()
                num_open -= 1
            else:
                yield event

    def close(self) -> None:
        """End the answers still running, and leave the admission queue."""
        with ExitStack() as stack:  # runs every callback, even if one raises
            if self._turn is not None:
                stack.callback(self._turn.leave)
            for attempts in self.attempts:
                stack.callback(attempts.close)
            for task in self._tasks:
                task.cancel()


async def _read(choice: int, attempts: Attempts, queue: "asyncio.Queue[ChoiceEvent | asyncio.Task[None]]") -> None:
    async for emitted in attempts.events():
        queue.put_nowait(ChoiceEvent(choice, emitted))


def _named(one: GenerationRequest) -> GenerationRequest:
    if one.choice == 0:
        return one
    return dataclasses.replace(one, key=dataclasses.replace(one.key, request_id=f"{one.key.request_id}.{one.choice}"))
