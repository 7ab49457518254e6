"""Decides when a request may take its blocks and ask its decode worker for room.

Pure bookkeeping over host values: no tensors, no sockets, no clock of its own. No blocks are held while a request
queues: a sequence gets its own blocks, and asks the decode worker for room, only when fewer prompt tokens than the
lookahead are ahead of it. By then, blocks that other prompts have cached of its prefix are included.

A decode worker that is slow, full or dead does not hold up requests for others. Only granted sequences count as ahead.
A decode worker has at most a few requests that ask for room, and its sequences that wait to be granted, acknowledged or
drained hold no more than its share of the blocks. Requests for one decode worker start in order of arrival. Requests
for different ones do too, but none waits for blocks that only a stalled decode worker could free.
"""

from collections import Counter
from collections.abc import Iterator

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase
from baton.prefill_worker.request import PrefillRequest

MAX_ASKING = 2  # requests that wait for room at one decode worker; more would only hold blocks
STALL_S = 0.5  # a sequence that has waited this long for its decode worker is not expected to end soon


class PushLine:
    """The requests of one prefill worker, oldest first.

    Args:
        scheduler: scheduler of its engine.
        chunk_len: prompt tokens per step.
    """

    def __init__(self, scheduler: Scheduler, chunk_len: int) -> None:
        self._scheduler = scheduler
        self._chunk_len = chunk_len
        self._requests: dict[PrefillRequest, None] = {}

    def add(self, request: PrefillRequest) -> None:
        """Queue a request behind the others."""
        self._requests[request] = None

    def remove(self, request: PrefillRequest) -> None:
        """Remove a request that has ended and holds nothing."""
        del self._requests[request]

    def num_waiting(self) -> int:
        """Return the number of requests that hold nothing yet. Any thread may call this."""
        return sum(request.sequence.phase is Phase.WAITING for request in tuple(self._requests))

    def num_tokens_queued(self) -> int:
        """Return the prompt tokens to compute, without what waiting requests would find cached. Any thread."""
        num_tokens = 0
        for request in tuple(self._requests):
            sequence = request.sequence
            if sequence.phase in (Phase.WAITING, Phase.RESERVING, Phase.READY, Phase.RUNNING):
                num_tokens += sequence.num_left
            if sequence.phase is Phase.WAITING:
                num_tokens -= len(self._scheduler.match(sequence)) * self._scheduler.allocator.block_size
        return num_tokens

    def next_to_reserve(self, now_s: float) -> PrefillRequest | None:
        """Return the request that asks its decode worker for room now, with its blocks taken; None if there is none."""
        granted = [
            request.sequence
            for request in self._requests
            if request.sequence.phase in (Phase.READY, Phase.RUNNING) and request.sequence.num_left
        ]
        # One chunk of lookahead hides the round trip of RESERVE behind the step before.
        if sum(item.num_left for item in granted) >= 2 * self._chunk_len or len(granted) >= self._scheduler.num_slots:
            return None
        num_stalled = self._num_stalled_blocks(now_s)
        allocator = self._scheduler.allocator
        for request in self._next_of_each_peer():
            shared = self._scheduler.match(request.sequence)
            num_missing = allocator.num_missing(request.sequence.capacity_len, shared)
            if not num_missing:
                self._scheduler.hold(request.sequence, shared)
                return request
            # Blocks of sequences that make progress are freed soon, and no other request may take them before this one.
            if num_missing <= allocator.num_reserved - num_stalled:
                return None
        return None

    def _num_stalled_blocks(self, now_s: float) -> int:
        """Return the number of blocks that this worker's own progress does not free."""
        stalled: set[int] = set()
        for request in self._requests:
            sequence = request.sequence
            if request.seen is None or request.seen[0] is not sequence.phase:
                request.seen = (sequence.phase, now_s)
            elif request.waits_for_peer and sequence.table is not None and now_s - request.seen[1] > STALL_S:
                stalled.update(sequence.table.blocks)
        return len(stalled)

    def _next_of_each_peer(self) -> Iterator[PrefillRequest]:
        """Yield each decode worker's oldest waiting request, oldest first, if it may ask for room and hold blocks."""
        num_asking: Counter[str] = Counter()
        num_held: Counter[str] = Counter()
        peers: set[str] = set()
        for request in self._requests:
            peer = request.peer.worker_id
            peers.add(peer)
            num_asking[peer] += request.sequence.phase is Phase.RESERVING
            if request.waits_for_peer:
                num_held[peer] += request.num_blocks
        allocator = self._scheduler.allocator
        share = allocator.num_blocks // (len(peers) + 1)
        passed: set[str] = set()
        for request in self._requests:
            peer = request.peer.worker_id
            if request.sequence.phase is not Phase.WAITING or peer in passed:
                continue
            passed.add(peer)
            num_blocks = allocator.num_blocks_for(request.sequence.capacity_len)
            is_in_share = not num_held[peer] or num_held[peer] + num_blocks <= share
            if num_asking[peer] < MAX_ASKING and is_in_share:
                yield request
