"""Index of the prompt blocks that each worker's incarnation holds, as far as the router has heard. Pure.

It is a hint: a missing hash costs a recompute elsewhere, a stale one a recompute at the worker, which alone decides
what it shares. Each incarnation's changes are applied in order of version (`core.block_hash.BlockChange`); a gap is
noticed, and the feed asks again. A lookup takes one step per block of the prompt, however many workers there are.

Besides the reported hashes there are expected ones: hashes that a request on its way will leave at its worker. They
count until they are reported, or until they expire.

For models with recurrent state, workers also report the names of state checkpoints: blocks alone are useless there.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.block_hash import BlockChange, checkpoint_name
from baton.core.errors import MalformedMessage
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.wire import change_from_proto
from baton.router.attempt.channels import Channels
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member, Members

MAX_NAMES: Final = 1 << 20  # over all incarnations; about 200 bytes each
MAX_EXPECTED: Final = 1 << 16


@dataclass(slots=True)
class _Held:
    """What one incarnation holds."""

    bit: int
    version: int = 0
    part: int = -1  # last part of a snapshot in progress; -1: none in progress
    names: set[bytes] = field(default_factory=set)


class FleetPrefixIndex:
    """Block hashes by incarnation, and incarnations by block hash.

    Args:
        max_names: maximum number of hashes over all incarnations; further ones are only counted in `num_ignored`.
        max_expected: maximum number of expected hashes; the oldest is dropped.
    """

    def __init__(self, max_names: int = MAX_NAMES, max_expected: int = MAX_EXPECTED) -> None:
        self._max_names = max_names
        self._max_expected = max_expected
        self._held: dict[Incarnation, _Held] = {}
        self._incarnations: dict[int, Incarnation] = {}  # by bit
        self._bits: dict[bytes, int] = {}  # incarnations that hold each hash
        self._expected: OrderedDict[bytes, tuple[Incarnation, float]] = OrderedDict()
        self.num_names = 0
        self.num_ignored = 0
        self.num_gaps = 0

    def join(self, incarnation: Incarnation) -> None:
        """Start to track an incarnation."""
        if incarnation not in self._held:
            free = ~sum(self._incarnations)  # each bit is a distinct power of two, so their sum is the set of used bits
            bit = free & -free
            self._held[incarnation] = _Held(bit)
            self._incarnations[bit] = incarnation

    def drop(self, incarnation: Incarnation) -> None:
        """Forget an incarnation; an unknown one is ignored."""
        held = self._held.get(incarnation)
        if held is not None:
            self._clear(held)
            del self._held[incarnation], self._incarnations[held.bit]

    def incarnations(self) -> tuple[Incarnation, ...]:
        """Tracked incarnations."""
        return tuple(self._held)

    def version(self, incarnation: Incarnation) -> int:
        """Version of an incarnation's last change; 0 if there was none."""
        held = self._held.get(incarnation)
        return 0 if held is None else held.version

    def apply(self, incarnation: Incarnation, change: BlockChange) -> bool:
        """Apply a change of a tracked incarnation; return False and change nothing if an earlier change was missed."""
        held = self._held[incarnation]
        is_next = change.after == held.version and change.part in (0, held.part + 1 if held.part >= 0 else 0)
        if not (change.cleared or is_next):
            self.num_gaps += 1
            return False
        if change.cleared:
            self._clear(held)
        for name in change.removed:
            self._remove(held, name)
        for name in change.stored:
            self._add(incarnation, held, name)
        goes_on = change.version == 0 and (change.cleared or change.part > 0)
        held.version, held.part = change.version, change.part if goes_on else -1
        return True

    def names(self, incarnation: Incarnation) -> frozenset[bytes]:
        """Block hashes that an incarnation is thought to hold."""
        held = self._held.get(incarnation)
        return frozenset() if held is None else frozenset(held.names)

    def num_names_of(self, incarnation: Incarnation) -> int:
        """Number of block hashes that an incarnation is thought to hold."""
        held = self._held.get(incarnation)
        return 0 if held is None else len(held.names)

    def expect(self, incarnation: Incarnation, names: Iterable[bytes], until_s: float) -> None:
        """Expect these hashes at an incarnation until `until_s`: a request sent there will leave them."""
        if incarnation not in self._held:
            return
        for name in names:
            self._expected[name] = (incarnation, until_s)
            self._expected.move_to_end(name)
        while len(self._expected) > self._max_expected:
            self._expected.popitem(last=False)

    def match(self, names: Sequence[bytes], now_s: float) -> dict[Incarnation, int]:
        """For every incarnation, count how many of a prompt's leading hashes it holds or is about to hold."""
        found: dict[Incarnation, int] = {}
        left = sum(self._incarnations)
        for at, name in enumerate(names):
            here = left & (self._bits.get(name, 0) | self._expected_bit(name, now_s))
            self._note(left & ~here, at, found)
            left = here
            if not left:
                break
        self._note(left, len(names), found)
        return found

    def match_checkpoints(self, names: Sequence[bytes], now_s: float) -> dict[Incarnation, int]:
        """As `match`, but count only up to the last block that also has a state checkpoint."""
        found = dict.fromkeys(self._held, 0)
        left = sum(self._incarnations)
        for length, name in enumerate(names, start=1):
            left &= self._bits.get(name, 0) | self._expected_bit(name, now_s)
            if not left:
                break
            state = checkpoint_name(name)
            self._note(left & (self._bits.get(state, 0) | self._expected_bit(state, now_s)), length, found)
        return found

    def _note(self, bits: int, length: int, found: dict[Incarnation, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._incarnations[bit]] = length
            bits ^= bit

    def _expected_bit(self, name: bytes, now_s: float) -> int:
        expected = self._expected.get(name)
        if expected is None:
            return 0
        incarnation, until_s = expected
        held = self._held.get(incarnation)
        if held is None or until_s <= now_s:
            del self._expected[name]
            return 0
        return held.bit

    def _add(self, incarnation: Incarnation, held: _Held, name: bytes) -> None:
        if name in held.names:
            return
        if self.num_names >= self._max_names:
            self.num_ignored += 1
            return
        held.names.add(name)
        self.num_names += 1
        self._bits[name] = self._bits.get(name, 0) | held.bit
        expected = self._expected.get(name)
        if expected is not None and expected[0] == incarnation:
            del self._expected[name]

    def _remove(self, held: _Held, name: bytes) -> None:
        if name not in held.names:
            return
        held.names.remove(name)
        self.num_names -= 1
        bits = self._bits[name] & ~held.bit
        if bits:
            self._bits[name] = bits
        else:
            del self._bits[name]

    def _clear(self, held: _Held) -> None:
        for name in tuple(held.names):
            self._remove(held, name)
        held.version = 0


PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0
_HOPELESS: Final = (grpc.StatusCode.UNIMPLEMENTED,)  # an older worker: it is placed by load alone

log = logging.getLogger(__name__)


class PrefixFeed:
    """Feeds the index from the workers' logs. Call `follow` periodically; it starts watching new incarnations.

    Args:
        index: the index to feed.
        members: live and lost workers.
        channels: gRPC channels to workers.
        spawn: runs a coroutine in the background and keeps a reference to its task.
        roles: roles whose workers may compute prompts.
    """

    def __init__(
        self,
        index: FleetPrefixIndex,
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
        self._unheard: set[Incarnation] = set()  # those of `_known` that have reported nothing yet

    def follow(self) -> None:
        """Watch every live worker that keeps prefixes and is not watched yet."""
        for member in (member for role in self._roles for member in self._members.live(role)):
            if member.incarnation not in self._known and member.state.HasField("prefix_naming"):
                self._known.add(member.incarnation)
                self._unheard.add(member.incarnation)
                self._spawn(self._watch(member, member.incarnation))

    @property
    def is_caught_up(self) -> bool:
        """Whether every watched worker has reported what it holds, or cannot."""
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
                reading.result()  # raises an unexpected error
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
        while member.alive and member.incarnation == incarnation:  # else `_watch` is about to end this
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
                    return  # a change was missed: ask again
        finally:
            call.cancel()


class PrefixCollector(Collector):
    """Exports one index's metrics."""

    def __init__(self, index: FleetPrefixIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        blocks = GaugeMetricFamily(
            "baton_prefix_index_blocks",
            "Cached blocks, and checkpoints of state, that the router has heard of",
            labels=("worker",),
        )
        for incarnation in self._index.incarnations():
            blocks.add_metric((incarnation.worker_id,), self._index.num_names_of(incarnation))
        yield blocks
        counts = (
            ("gaps", "Changes of a prefix cache that the router has missed and asked for", self._index.num_gaps),
            ("ignored", "Cached blocks that the router's index had no room for", self._index.num_ignored),
        )
        for name, text, count in counts:
            counter = CounterMetricFamily(f"baton_prefix_index_{name}", text)
            counter.add_metric((), count)
            yield counter
