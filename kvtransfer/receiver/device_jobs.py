"""What a transfer asks of the engine where pools are on GPUs, which the KV receiver process cannot touch.

Payloads of two-sided data paths lie in *staging* blocks of host memory first. Each complete layer becomes a job
(`DigestWanted`, one for each rank's pool): bring it from staging into the pool, if it is there, and digest it in the
pool. The engine's kernels answer through flag words, one flag for each rank; a job is done when all of them are
up, and their digests are put together (`rank_digests`). One job of a transfer is open at a time, so that layers gather
while the engine is at a step; once all have arrived, the rest is asked for at once.

A job once asked for is waited for: until then its staging is not used again, and its transfer has not drained, because
a kernel may still read the one and write the other.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kernels.kv.digest import MASK
from baton.kvcache.allocator import BlockAllocator, BlockTable, OutOfBlocks
from baton.kvcache.geometry import LayerGeometry, PoolGeometry
from baton.kvcache.layout import KVLayout, Range
from baton.kvtransfer.flag_page import Flag, FlagPage
from baton.kvtransfer.receiver.actions import DigestWanted
from baton.kvtransfer.receiver.table import IncomingTransfer


class RankDigests:
    """Who of the ranks of a worker holds what.

    Args:
        layout: of the worker.
        num_ranks: its ranks.
    """

    def __init__(self, layout: KVLayout, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._heads: list[tuple[Range, ...]] = []  # by layer and rank
        self._holders: list[tuple[tuple[int, ...], ...]] = []  # by layer: ranks with the same heads
        for layer in range(layout.num_layers):
            heads = tuple(layout.heads_of(layer, rank, num_ranks) for rank in range(num_ranks))
            holders: dict[Range, list[int]] = {}
            for rank, its in enumerate(heads):
                holders.setdefault(its, []).append(rank)
            assert sum(its.count for its in holders) == layout.layers[layer].num_heads, "each head in one range"
            self._heads.append(heads)
            self._holders.append(tuple(tuple(ranks) for ranks in holders.values()))

    def heads(self, layer: int) -> tuple[Range, ...]:
        """What each rank holds of a layer."""
        return self._heads[layer]

    def total(self, layer: int, digests: Sequence[int]) -> int:
        """The digest of all heads of a layer, or one that matches nothing if holders of the same heads differ.

        Args:
            layer: whose.
            digests: of the part of each rank, in order.
        """
        assert len(digests) == self.num_ranks
        total = 0
        for ranks in self._holders[layer]:
            found = {digests[rank] for rank in ranks}
            total += found.pop() if len(found) == 1 else max(found) + 1
        return total & MASK


FLAGS_POOL = 1  # of the shared region; staging memory is pool 0
SLOT_WORDS = 264  # MAX_LAYERS of a launch, and the number
MAX_LAYERS = 256
NUM_SLOTS = 256  # jobs at a time, times the ranks
SCRATCH_SLOT = NUM_SLOTS  # where launches report that are not asked about


def flag_bytes() -> int:
    """Size of a decode worker's memory for flags."""
    return FlagPage.num_bytes(NUM_SLOTS + 1, SLOT_WORDS)


def flag_page(memory: memoryview) -> FlagPage:
    """The flags in that memory, but for the scratch slot; cleared."""
    return FlagPage(memory[: FlagPage.num_bytes(NUM_SLOTS, SLOT_WORDS)], SLOT_WORDS)


@dataclass(slots=True, eq=False)
class _Filling:
    """An incoming transfer that was granted and has not ended here.

    Attributes:
        incoming: its record.
        staging: its blocks there; empty on a one-sided data path.
        first_rank: of those whose pools it goes into.
        has_digest: its layers are to be digested.
        ready: complete layers that were not asked for yet.
        num_open: jobs that were asked for and not answered.
        is_over: it was fenced, or has drained: nothing more is asked for.
    """

    incoming: IncomingTransfer
    staging: BlockTable
    has_digest: bool
    first_rank: int
    ready: list[int] = field(default_factory=list)
    num_open: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What was asked of the engine.

    Attributes:
        filling: for which.
        flags: of each rank.
        layer: first.
        num_layers: that it is about.
    """

    filling: _Filling
    flags: tuple[Flag, ...]
    layer: int
    num_layers: int


class DeviceJobs:
    """All incoming transfers of one incarnation of a KV receiver process over pools on GPUs.

    Args:
        staging: of the host memory.
        flags: shared with the engine.
        num_ranks: whose pools they are.
        has_owners: each incoming transfer goes into the pool of one rank, which holds all heads.
    """

    def __init__(self, staging: PoolGeometry, flags: FlagPage, num_ranks: int = 1, *, has_owners: bool = False) -> None:
        layout = self._layout = staging.layout
        self._flags = flags
        self._staging = BlockAllocator(staging.num_blocks, layout.block_size, num_state_slots=staging.num_state_slots)
        self._fillings: dict[AttemptKey, _Filling] = {}
        self._jobs: deque[_Job] = deque()
        self._ranks = RankDigests(layout, 1 if has_owners else num_ranks)
        self._shapes = [
            (layout.layers[index], *_shape(layer), *self._ranks.heads(index))
            for index, layer in enumerate(staging.layers)
        ]

    @property
    def is_waiting(self) -> bool:
        """Whether a flag is to be looked at."""
        return bool(self._jobs)

    @property
    def staging_len(self) -> int:
        """Positions that the staging memory has room for."""
        return self._staging.num_blocks * self._layout.block_size

    def begin(self, incoming: IncomingTransfer, *, has_digest: bool, owner: int = 0) -> bool:
        """An incoming transfer is to be granted; False if it has to wait for staging memory.

        Args:
            incoming: its record.
            has_digest: its layers are to be digested.
            owner: the rank into whose pool it goes; 0 where it goes into those of all.
        """
        if is_one_sided(incoming.data_path):
            staging = BlockTable((), self._layout.block_size)
        else:
            try:
                staging = self._staging.reserve(incoming.prompt_len)
            except OutOfBlocks:
                return False
        self._fillings[incoming.attempt] = _Filling(incoming, staging, has_digest, owner)
        return True

    def staging_of(self, attempt: AttemptKey) -> BlockTable:
        """Where payloads of an incoming transfer go."""
        return self._fillings[attempt].staging

    def complete(self, attempt: AttemptKey, layer: int) -> bool:
        """A layer has landed. True: the engine has to do with it. False: it counts as it is."""
        filling = self._fillings[attempt]
        if not filling.has_digest and not filling.staging.blocks:
            return False
        filling.ready.append(layer)
        return True

    def desired_state(self) -> list[DigestWanted]:
        """What the engine has to be asked for now."""
        found: list[DigestWanted] = []
        for filling in self._fillings.values():
            while filling.ready and not filling.is_over and self._may_ask(filling):
                wanted = self._desired(filling)
                if not wanted:
                    return found
                found += wanted
        return found

    def answers(self) -> list[tuple[int, int, int]]:
        """(incoming transfer id, layer, digest) of every job that was done since the last call."""
        found = []
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if not all(self._flags.is_up(flag) for flag in job.flags):
                self._jobs.append(job)
                continue
            by_rank = [self._flags.digests(flag, job.num_layers) for flag in job.flags]
            for flag in job.flags:  # none before all: a kernel may still be at the blocks
                self._flags.release(flag)
            job.filling.num_open -= 1
            incoming_id = job.filling.incoming.incoming_id
            for layer, digests in enumerate(zip(*by_rank, strict=True), start=job.layer):
                found.append((incoming_id, layer, self._ranks.total(layer, digests)))
        return found

    def is_busy(self, attempt: AttemptKey) -> bool:
        """Whether a kernel may still be at an incoming transfer's blocks."""
        filling = self._fillings.get(attempt)
        return filling is not None and bool(filling.num_open)

    def stop(self, attempt: AttemptKey) -> None:
        """The incoming transfer was fenced: ask for nothing more."""
        filling = self._fillings.get(attempt)
        if filling is not None:
            filling.is_over = True
            filling.ready.clear()

    def end(self, attempt: AttemptKey) -> None:
        """The incoming transfer was complete, or has drained, and no kernel is at it; its staging is free."""
        filling = self._fillings.pop(attempt, None)
        if filling is not None:
            assert not filling.num_open
            if filling.staging.blocks:
                self._staging.release(filling.staging)

    def _may_ask(self, filling: _Filling) -> bool:
        return not filling.num_open or filling.incoming.coverage.is_complete()

    def _desired(self, filling: _Filling) -> list[DigestWanted]:
        """A launch for each rank: layers of one shape that follow each other. Nothing if there are no flags for it."""
        flags = self._flags.claim(self._ranks.num_ranks)
        if flags is None:
            return []
        filling.ready.sort()
        first = filling.ready[0]
        incoming = filling.incoming
        kept = self._layout.layers[first].span(incoming.prompt_len)
        num_layers = 1
        while (
            num_layers < min(len(filling.ready), MAX_LAYERS)
            and filling.ready[num_layers] == first + num_layers
            and self._shapes[first + num_layers] == self._shapes[first]
        ):
            num_layers += 1
        del filling.ready[:num_layers]
        filling.num_open += 1
        self._jobs.append(_Job(filling, tuple(flags), first, num_layers))
        return [
            DigestWanted(
                attempt=incoming.attempt,
                rank=rank,
                flag=flag.slot,
                sequence=flag.sequence,
                layer=first,
                num_layers=num_layers,
                first=kept.first,
                count=kept.count,
                staging=filling.staging,
                has_digest=filling.has_digest,
            )
            for rank, flag in enumerate(flags, start=filling.first_rank)
        ]


def _shape(layer: LayerGeometry) -> tuple[int, ...]:
    return layer.num_heads, layer.num_parts, layer.rows_per_block, layer.row_bytes
