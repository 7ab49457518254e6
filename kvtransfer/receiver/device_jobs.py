"""Jobs that a KV receiver gives to the engine where pools are on GPUs, which the receiver's process cannot access.

Payloads of two-sided data paths first arrive in *staging* blocks of host memory. Complete layers become jobs
(`DigestWanted`, one per rank's pool): copy them from staging into the pool, if they are there, and digest them in the
pool. The engine's kernels report through flag words, one flag per rank. A job is done when all of its flags are up and
their digests have been combined (`RankDigests`).

A job covers all ready layers of one shape, adjacent or not: in a model whose layers keep state, pool layers of four
shapes alternate. Each transfer has one round of jobs at a time, one job per shape, so that layers gather while the
engine runs a step; once all have arrived, the rest is requested at once.

A job that was requested must end before its staging is used again and before its transfer has drained, because a kernel
may still read the one and write the other.
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
    """Which ranks of a worker hold which heads.

    Args:
        layout: layout of the worker.
        num_ranks: number of its ranks.
    """

    def __init__(self, layout: KVLayout, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._heads: list[tuple[Range, ...]] = []  # by layer and rank
        self._holders: list[tuple[tuple[int, ...], ...]] = []  # by layer: groups of ranks with the same heads
        for layer in range(layout.num_layers):
            heads = tuple(layout.heads_of(layer, rank, num_ranks) for rank in range(num_ranks))
            holders: dict[Range, list[int]] = {}
            for rank, its in enumerate(heads):
                holders.setdefault(its, []).append(rank)
            assert sum(its.count for its in holders) == layout.layers[layer].num_heads, "each head in one range"
            self._heads.append(heads)
            self._holders.append(tuple(tuple(ranks) for ranks in holders.values()))

    def heads(self, layer: int) -> tuple[Range, ...]:
        """Return the heads of a layer that each rank holds."""
        return self._heads[layer]

    def total(self, layer: int, digests: Sequence[int]) -> int:
        """Return the digest of all heads of a layer, or one that matches nothing if holders of the same heads differ.

        Args:
            layer: the layer.
            digests: digest of each rank's part, by rank.
        """
        assert len(digests) == self.num_ranks
        total = 0
        for ranks in self._holders[layer]:
            found = {digests[rank] for rank in ranks}
            total += found.pop() if len(found) == 1 else max(found) + 1
        return total & MASK


FLAGS_POOL = 1  # index in the shared region; staging memory is pool 0
SLOT_WORDS = 264  # MAX_LAYERS of a launch, and the sequence number
MAX_LAYERS = 256
NUM_SLOTS = 256  # jobs at a time, times the number of ranks
SCRATCH_SLOT = NUM_SLOTS  # where launches report that nothing waits for


def flag_bytes() -> int:
    """Return the size of a decode worker's flag memory."""
    return FlagPage.num_bytes(NUM_SLOTS + 1, SLOT_WORDS)


def flag_page(memory: memoryview) -> FlagPage:
    """Return the flags in that memory, cleared and without the scratch slot."""
    return FlagPage(memory[: FlagPage.num_bytes(NUM_SLOTS, SLOT_WORDS)], SLOT_WORDS)


@dataclass(slots=True, eq=False)
class _Filling:
    """An incoming transfer that was granted and has not ended here.

    Attributes:
        incoming: its record.
        staging: its staging blocks; empty on a one-sided data path.
        first_rank: first of the ranks into whose pools it goes.
        has_digest: whether its layers are digested.
        ready: complete layers that were not requested yet.
        num_open: number of jobs that were requested and not answered.
        is_over: whether it was fenced or has drained, so that nothing more is requested.
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
    """A job that was given to the engine.

    Attributes:
        filling: the transfer that it is for.
        flags: flag of each rank.
        layers: its layers.
    """

    filling: _Filling
    flags: tuple[Flag, ...]
    layers: tuple[int, ...]


class DeviceJobs:
    """All incoming transfers of one incarnation of a KV receiver process over pools on GPUs.

    Args:
        staging: geometry of the host memory.
        flags: flags shared with the engine.
        num_ranks: number of ranks with pools.
        has_owners: whether each incoming transfer goes into the pool of one rank, which holds all heads.
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
        """Whether a flag must be checked."""
        return bool(self._jobs)

    @property
    def staging_len(self) -> int:
        """Number of positions that fit the staging memory."""
        return self._staging.num_blocks * self._layout.block_size

    def begin(self, incoming: IncomingTransfer, *, has_digest: bool, owner: int = 0) -> bool:
        """Begin an incoming transfer that is to be granted; False if it has to wait for staging memory.

        Args:
            incoming: its record.
            has_digest: whether its layers are digested.
            owner: rank into whose pool it goes; 0 if it goes into all pools.
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
        """Return the staging blocks for payloads of an incoming transfer."""
        return self._fillings[attempt].staging

    def complete(self, attempt: AttemptKey, layer: int) -> bool:
        """Note a layer that arrived. True: the engine must process it. False: it counts as it is."""
        filling = self._fillings[attempt]
        if not filling.has_digest and not filling.staging.blocks:
            return False
        filling.ready.append(layer)
        return True

    def desired_state(self) -> list[DigestWanted]:
        """Return what the engine has to be asked for now."""
        found: list[DigestWanted] = []
        for filling in self._fillings.values():
            if filling.is_over or not self._may_ask(filling):
                continue
            while filling.ready:
                wanted = self._desired(filling)
                if not wanted:
                    return found
                found += wanted
        return found

    def answers(self) -> list[tuple[int, int, int]]:
        """Return (incoming transfer id, layer, digest) of every job that ended since the last call."""
        found = []
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if not all(self._flags.is_up(flag) for flag in job.flags):
                self._jobs.append(job)
                continue
            by_rank = [self._flags.digests(flag, len(job.layers)) for flag in job.flags]
            for flag in job.flags:  # no flag before all are up: a kernel may still use the blocks
                self._flags.release(flag)
            job.filling.num_open -= 1
            incoming_id = job.filling.incoming.incoming_id
            for layer, *digests in zip(job.layers, *by_rank, strict=True):
                found.append((incoming_id, layer, self._ranks.total(layer, digests)))
        return found

    def is_busy(self, attempt: AttemptKey) -> bool:
        """Return whether a kernel may still use an incoming transfer's blocks."""
        filling = self._fillings.get(attempt)
        return filling is not None and bool(filling.num_open)

    def stop(self, attempt: AttemptKey) -> None:
        """Request nothing more for an incoming transfer that was fenced."""
        filling = self._fillings.get(attempt)
        if filling is not None:
            filling.is_over = True
            filling.ready.clear()

    def end(self, attempt: AttemptKey) -> None:
        """Free the staging of a transfer that is complete or has drained; no kernel uses it any more."""
        filling = self._fillings.pop(attempt, None)
        if filling is not None:
            assert not filling.num_open
            if filling.staging.blocks:
                self._staging.release(filling.staging)

    def _may_ask(self, filling: _Filling) -> bool:
        return not filling.num_open or filling.incoming.coverage.is_complete()

    def _desired(self, filling: _Filling) -> list[DigestWanted]:
        """Build one launch per rank for the layers of one shape that are ready; empty if no flags are free."""
        flags = self._flags.claim(self._ranks.num_ranks)
        if flags is None:
            return []
        shape = self._shapes[filling.ready[0]]
        layers = tuple(layer for layer in filling.ready if self._shapes[layer] == shape)[:MAX_LAYERS]
        filling.ready = [layer for layer in filling.ready if layer not in layers]
        filling.num_open += 1
        self._jobs.append(_Job(filling, tuple(flags), layers))
        incoming = filling.incoming
        kept = self._layout.layers[layers[0]].span(incoming.prompt_len)
        return [
            DigestWanted(
                attempt=incoming.attempt,
                rank=rank,
                flag=flag.slot,
                sequence=flag.sequence,
                layers=layers,
                first=kept.first,
                count=kept.count,
                staging=filling.staging,
                has_digest=filling.has_digest,
            )
            for rank, flag in enumerate(flags, start=filling.first_rank)
        ]


def _shape(layer: LayerGeometry) -> tuple[int, ...]:
    return layer.num_heads, layer.num_parts, layer.rows_per_block, layer.row_bytes
