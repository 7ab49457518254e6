"""The answers to one request, side by side: each by attempts of its own, all in one stream of events."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from baton.core.requests.request import GenerationRequest, choices_of
from baton.router.admission.gate import Gate, Turn
from baton.router.attempt.attempts import Attempts
from baton.router.attempt.request_run import Emitted


@dataclass(slots=True)  # not frozen, which would make each three times as dear
class ChoiceEvent:
    """What one answer's attempts emitted."""

    choice: int
    emitted: Emitted


class Choices:
    """Iterate `events`, then `close` in any case.

    A request for one answer runs as it is; of several, each has its own name at the workers. The first that fails ends
    all of them.

    Args:
        request: checked.
        attempts_of: makes the attempts of one answer.
        gate: where it waits for its turn, if there is one.
    """

    def __init__(
        self,
        request: GenerationRequest,
        attempts_of: Callable[[GenerationRequest], Attempts],
        gate: Gate | None = None,
    ) -> None:
        self._request, self._gate = request, gate
        self._turn: Turn | None = None
        self.attempts = [attempts_of(_named(one)) for one in choices_of(request)]
        self._tasks: list[asyncio.Task[None]] = []

    async def events(self) -> AsyncIterator[ChoiceEvent]:
        """Tokens of all answers as they come; each answer's in order, its last with a finish reason.

        Raises:
            BatonError: what ended one of them, and with it the request; or it was refused its turn.
        """
        if self._gate is not None:
            self._turn = await self._gate.enter(self._request)
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
