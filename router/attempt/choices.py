"""The answers to one request, side by side: attempts, text and one stream of events."""

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
        # A caller that was refused may keep the error, and with it the frames that know this object.
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


@dataclass(slots=True)  # not frozen, which would make each three times as dear
class ChoiceEvent:
    """What one answer's attempts emitted."""

    choice: int
    emitted: CertainTokens


class Choices:
    """Iterate `events`, then `close` in any case.

    A request for one answer runs as it is; of several, each has its own name at the workers. The first that fails ends
    all of them.

    Args:
        request: checked.
        attempts_of: makes the attempts of one answer.
        admission_queue: where it waits for its turn, if there is one.
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
        """Tokens of all answers as they come; each answer's in order, its last with a finish reason.

        Raises:
            BatonError: what ended one of them, and with it the request; or it was refused its turn.
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
            # As it is, without code of ours in between: what that raised would leave the loop below waiting for ever.
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
        """End what is under way."""
        with ExitStack() as stack:  # all of it, whatever one of them raises
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
