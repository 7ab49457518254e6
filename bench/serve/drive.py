"""Sends a schedule: decides when each request goes out, for any sender and any clock.

In an open loop a request is due when the schedule says so, with or without answers: a server that stalls gets all
requests that arrive meanwhile, and their times count from when they were due. This avoids coordinated omission.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from baton.bench.serve.schedule import Planned
from baton.core.clock import Clock


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of the host's monotonic clock.

    Attributes:
        due_s: when it was due; in a closed loop, when its client was free for it.
        sent_s: when the client began to send it.
        prompt_len: tokens sent.
        output_len: tokens requested.
        tenant: tenant of the request.
        steady: whether it belongs to a steady stream.
        is_open: whether it had a due time of its own (open loop).
        chunk_times_s: when each chunk with tokens arrived; the first is the first token.
        end_s: when the answer, or the error, was complete.
        prompt_tokens: prompt tokens by `usage`; None: the server did not report them.
        completion_tokens: answer tokens by `usage`.
        cached_tokens: cached prompt tokens by `usage`.
        status: HTTP status; 0: there was none.
        error: kind of the failure; "" without one.
        detail: what the server or the client's library reported.
        cancelled: whether the client cancelled as planned.
    """

    due_s: float
    sent_s: float
    prompt_len: int
    output_len: int
    tenant: str = ""
    steady: bool = False
    is_open: bool = False
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 0
    error: str = ""
    detail: str = ""
    cancelled: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer arrived."""
        return not self.error and not self.cancelled

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, or chunks if the server did not count tokens."""
        return len(self.chunk_times_s) if self.completion_tokens is None else self.completion_tokens


Send = Callable[[Planned, Record, Callable[[], None]], Awaitable[None]]
"""Sends one request and fills in its record; calls the function at the first token. Raises CancelledError alone."""

_STREAM_PAUSE_S = 0.1  # pause of a steady stream after a failure


class Driver:
    """One process's part of one point.

    Args:
        send: function that sends one request.
        clock: clock of every time in the records; asyncio's timers must use it.
    """

    def __init__(self, send: Send, clock: Clock) -> None:
        self._send, self._clock = send, clock
        self._records: list[Record] = []

    async def run(
        self,
        requests: Sequence[Planned],
        streams: Sequence[Sequence[Planned]],
        ready: Callable[[], Awaitable[float]],
        arrived: Callable[[], Awaitable[None]],
    ) -> list[Record]:
        """Send everything; return the records in the order of sending.

        Args:
            requests: the arrivals.
            streams: the steady streams, each with the requests it repeats.
            ready: called once every steady stream has its first token (or an error); returns when arrivals begin, on
                the clock.
            arrived: called once every arrival has ended; the steady streams are stopped when it returns.
        """
        first = [asyncio.Event() for _ in streams]
        tasks = [
            asyncio.create_task(self._stream(planned, event)) for planned, event in zip(streams, first, strict=True)
        ]
        try:
            for event in first:
                await event.wait()
            await self._arrivals(requests, await ready())
            await arrived()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._records

    async def _arrivals(self, requests: Sequence[Planned], begin_s: float) -> None:
        chains: defaultdict[int, list[Planned]] = defaultdict(list)
        for planned in requests:
            if planned.client is not None:
                chains[planned.client].append(planned)
        async with asyncio.TaskGroup() as group:
            for chain in chains.values():
                group.create_task(self._closed(chain, begin_s))
            for planned in requests:
                if planned.due_s is None:
                    continue
                due_s = begin_s + planned.due_s
                await self._until(due_s)
                group.create_task(self._one(planned, due_s))

    async def _closed(self, chain: Sequence[Planned], begin_s: float) -> None:
        await self._until(begin_s)
        for planned in chain:
            await self._one(planned)

    async def _stream(self, chain: Sequence[Planned], first: asyncio.Event) -> None:
        while True:
            for planned in chain:
                record = await self._one(planned, steady=True, on_first=first.set)
                first.set()
                if record.error:
                    await asyncio.sleep(_STREAM_PAUSE_S)

    async def _one(
        self,
        planned: Planned,
        due_s: float | None = None,
        *,
        steady: bool = False,
        on_first: Callable[[], None] = lambda: None,
    ) -> Record:
        now_s = self._clock.now_s()
        record = Record(
            due_s=now_s if due_s is None else due_s,
            sent_s=now_s,
            prompt_len=planned.prompt.length,
            output_len=planned.output_len,
            tenant=planned.tenant,
            steady=steady,
            is_open=due_s is not None,
        )
        self._records.append(record)
        try:
            await self._send(planned, record, on_first)
        except asyncio.CancelledError:
            record.cancelled = True
            raise
        finally:
            record.end_s = self._clock.now_s()
        return record

    async def _until(self, time_s: float) -> None:
        while (wait_s := time_s - self._clock.now_s()) > 0:
            await asyncio.sleep(wait_s)


async def beat(clock: Clock, period_s: float, lags_s: list[float]) -> None:
    """Record forever how late this process's event loop notices a timer, which adds to every time it records."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            due_s = clock.now_s() + period_s
            await asyncio.sleep(period_s)
            lags_s.append(max(0.0, clock.now_s() - due_s))
