"""A worker's prefix caching: the names of its blocks, and what the router hears of changes."""

import asyncio
import contextlib
import logging
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.block_hash import block_hashes
from baton.core.errors import WorkerLost
from baton.core.requests.request import GenerationRequest
from baton.kvcache.block_log import BlockLog
from baton.kvcache.layout import NO_PREFIX_CACHE, KVLayout
from baton.kvcache.pool import KVPool
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.state_checkpoints import StateCheckpoints
from baton.proto import worker_pb2
from baton.proto.wire import abort_with, change_to_proto

log = logging.getLogger(__name__)


def prefix_index(pool: KVPool, block_log: BlockLog, checkpoint_interval: int = 0) -> PrefixIndex:
    """Make an empty index over a worker's pool, with checkpoints if its sequences keep state."""
    if not pool.layout.has_state:
        return PrefixIndex(block_log)
    return PrefixIndex(block_log, StateCheckpoints(pool.checkpoint_slots, block_log, interval=checkpoint_interval))


class PrefixNames:
    """Makes the names (block hashes) of prompts' blocks.

    Args:
        layout: layout of the worker's pool.
        num_checkpoints: number of checkpoints that it has room for, for a layout with state.
        with_mtp: whether the pool includes the entries of an MTP head.
        enabled: whether the operator enabled the prefix cache.
        checkpoint_interval: tokens between checkpoints within a prompt; 0: there are none.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_checkpoints: int = 0,
        *,
        with_mtp: bool,
        enabled: bool,
        checkpoint_interval: int = 0,
    ) -> None:
        self.naming: worker_pb2.PrefixNaming | None = None  # from which the router makes the same names
        if enabled and layout.has_state and not num_checkpoints:
            # A recurrent state belongs to its last position only: it cannot be cut to a shorter prompt.
            log.warning(NO_PREFIX_CACHE)
        elif enabled:
            self.naming = worker_pb2.PrefixNaming(
                model=layout.model_hash,
                block_size=layout.block_size,
                with_mtp=with_mtp,
                with_checkpoints=layout.has_state,
                checkpoint_interval=checkpoint_interval if layout.has_state else 0,
            )

    def of(self, request: GenerationRequest) -> tuple[bytes, ...]:
        """Return the names of the full blocks of a request's prompt; none if it shares nothing."""
        # Log-probabilities of the prompt require computing every position.
        if self.naming is None or request.sampling.prompt_logprobs is not None:
            return ()
        return block_hashes(
            request.prompt_token_ids,
            model=self.naming.model,
            tenant=request.tenant,
            block_size=self.naming.block_size,
            with_mtp=self.naming.with_mtp,
        )


GATHER_S: Final = 0.005  # changes of the prefix cache within this time are sent together


async def serve_watch(
    log: BlockLog,
    epoch: int,
    request: worker_pb2.WatchPrefixesRequest,
    context: grpc.aio.ServicerContext[Any, Any],
) -> None:
    """Send a reader what it has missed, now and after every change; a slow reader gets larger changes.

    Args:
        log: log of the worker's prefix cache.
        epoch: this incarnation; a reader that knows another one is refused.
        request: what the reader has.
        context: context of the call, which never ends by itself.
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
