"""Keeps the prefix index fed: one stream from each live worker that keeps prefixes, for as long as it lives.

What is a gap and what is known is the index's to say. A stream that breaks or skips something is opened again from the
version that the index has; an incarnation that is lost is dropped from it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.errors import MalformedMessage
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.block_wire import change_from_proto
from baton.router.attempt.channels import Channels
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member, Members
from baton.router.placement.prefix_index import PrefixIndex

PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0
_HOPELESS: Final = (grpc.StatusCode.UNIMPLEMENTED,)  # an older worker: it is routed to by its load alone

log = logging.getLogger(__name__)


class PrefixFeed:
    """Call `follow` now and then; new incarnations are watched from then on.

    Args:
        index: what is fed.
        members: who lives.
        channels: to them.
        spawn: runs a coroutine in the background and keeps hold of it.
        roles: whose workers may compute prompts.
    """

    def __init__(
        self,
        index: PrefixIndex,
        members: Members,
        channels: Channels,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        roles: Sequence[str] = (PREFILL, DECODE),
    ) -> None:
        self._index = index
        self._members = members
        self._channels = channels
        self._spawn = spawn
        self._roles = roles
        self._known: set[Incarnation] = set()
        self._unheard: set[Incarnation] = set()  # of those

    def follow(self) -> None:
        """Watch every live worker that keeps prefixes and is not watched yet."""
        for member in (member for role in self._roles for member in self._members.live(role)):
            if member.incarnation not in self._known and member.state.HasField("prefix_naming"):
                self._known.add(member.incarnation)
                self._unheard.add(member.incarnation)
                self._spawn(self._watch(member, member.incarnation))

    @property
    def is_caught_up(self) -> bool:
        """Whether every worker that is watched has told what it holds, or cannot."""
        return not self._unheard

    async def _watch(self, member: Member, incarnation: Incarnation) -> None:
        lost = asyncio.Event()
        self._index.join(incarnation)
        unwatch = self._members.watch(incarnation, lost.set)
        reading = asyncio.create_task(self._read(member, incarnation))
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait({reading, losing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()  # raises what should not have happened
                await losing
        finally:
            unwatch()
            for task in (reading, losing):
                task.cancel()
            self._index.drop(incarnation)
            self._unheard.discard(incarnation)
            self._known.discard(incarnation)

    async def _read(self, member: Member, incarnation: Incarnation) -> None:
        pause_s = PAUSE_S
        while member.alive and member.incarnation == incarnation:  # else the watch is about to end this
            before = self._index.version(incarnation)
            try:
                await self._read_once(member, incarnation)
            except grpc.aio.AioRpcError as error:
                if error.code() in _HOPELESS:
                    self._unheard.discard(incarnation)
                    log.warning("%s does not say what prefixes it holds: %s", incarnation.worker_id, error.details())
                    return
                log.info("the prefixes of %s are not heard of now: %s", incarnation.worker_id, error.code())
            except MalformedMessage as error:
                log.warning("%s names prefixes otherwise than this router: %s", incarnation.worker_id, error.message)
                return
            pause_s = PAUSE_S if self._index.version(incarnation) != before else min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _read_once(self, member: Member, incarnation: Incarnation) -> None:
        request = worker_pb2.WatchPrefixesRequest(epoch=incarnation.epoch, version=self._index.version(incarnation))
        stub = worker_pb2_grpc.DecodeStub if member.state.role == DECODE else worker_pb2_grpc.PrefillStub
        call = stub(self._channels.to(member)).WatchPrefixes(request)
        try:
            async for message in call:
                self._unheard.discard(incarnation)
                if not self._index.apply(incarnation, change_from_proto(message)):
                    return  # something was missed
        finally:
            call.cancel()
