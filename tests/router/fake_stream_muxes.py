"""Serves a stream mux by calling a method for each of its streams, as gRPC calls one for a call of its own."""

import asyncio

import grpc.aio

from baton.core.errors import BatonError, from_wire
from baton.proto.stream_mux_wire import End
from baton.proto.wire import ERROR_KEY


class _AbortedError(Exception):
    """What `abort` of a stream raises, as gRPC's does."""

    def __init__(self, error):
        super().__init__(error.message)
        self.error = error


class _StreamContext:
    """What the method sees of its call."""

    def __init__(self, say):
        self.write = say

    async def abort(self, code, details="", trailing_metadata=()):
        carried = dict(trailing_metadata).get(ERROR_KEY)
        raise _AbortedError(from_wire(carried) if carried else BatonError(f"{code.name}: {details}"))


async def serve_mux(method, frame_of, epoch, context):
    """Until the call ends; then all streams are cancelled."""
    first, items, tasks = frame_of(()), asyncio.Queue(), {}
    first.epoch = epoch
    await context.write(first)

    async def write():  # alone: a stream that is cancelled must not take a write with it
        while True:
            await context.write(frame_of([await items.get()]))

    async def say(number, said):
        items.put_nowait((number, said))
        await asyncio.sleep(0)

    async def run(number, request):
        end = End()
        try:
            await method(request, _StreamContext(lambda event: say(number, event)))
        except _AbortedError as aborted:
            end = End(aborted.error)
        except Exception as error:  # noqa: BLE001  as gRPC would say it
            end = End(BatonError(f"UNKNOWN: Unexpected {error!r}"))
        await say(number, end)

    writing = asyncio.create_task(write())
    try:
        while (commands := await context.read()) is not grpc.aio.EOF:
            for opened in commands.open:
                tasks[opened.stream] = asyncio.create_task(run(opened.stream, opened.request))
            for number in commands.cancelled:
                tasks[number].cancel()
    finally:
        for task in (writing, *tasks.values()):
            task.cancel()
