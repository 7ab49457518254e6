"""How a worker of either role tells a router which prefixes it holds (`WatchPrefixes`)."""

import asyncio
import contextlib
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.errors import WorkerLost
from baton.kvcache.block_log import BlockLog
from baton.proto import worker_pb2
from baton.proto.block_wire import change_to_proto
from baton.proto.wire import abort_with

GATHER_S: Final = 0.005  # changes of the prefix cache within so long are sent together


async def serve_watch(
    log: BlockLog,
    epoch: int,
    request: worker_pb2.WatchPrefixesRequest,
    context: grpc.aio.ServicerContext[Any, Any],
) -> None:
    """Send a reader what it misses, now and whenever something changes; a slow one gets larger changes.

    Args:
        log: of the worker's prefix cache.
        epoch: of this incarnation; a reader that knows another one is refused.
        request: what the reader has.
        context: of the call, which never ends by itself.
    """
    if request.epoch != epoch:
        await abort_with(context, WorkerLost("this worker was restarted", epoch=epoch))
    loop, version = asyncio.get_running_loop(), request.version
    while True:
        changed = asyncio.Event()

        def wake(changed: asyncio.Event = changed) -> None:
            with contextlib.suppress(RuntimeError):  # the host has closed its event loop: there is no reader any more
                loop.call_soon_threadsafe(changed.set)

        forget = log.call_at_change(wake)
        try:
            for change in log.since(version):  # after the registration, so that no change is missed
                await context.write(change_to_proto(change))
                version = change.version
            if log.version == version:
                await changed.wait()
        finally:
            forget()
        await asyncio.sleep(GATHER_S)
