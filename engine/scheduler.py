"""Decides which sequences hold blocks and slots, which wait, and which tokens the next step computes.

The scheduler is pure bookkeeping over host values: no tensor, no socket, no clock. One thread uses it.

Sequences wait for blocks in one queue, in order of arrival, and none overtakes another: prompts that are computed here,
prompts whose KV a prefill worker wants to push here, and preempted sequences, which keep their place and so go before
all that arrived later. With its blocks, a sequence waits for a slot (`READY`), also in order, and then runs.

With `overcommit` a sequence starts with blocks for its tokens and one step, and grows as it decodes; when no block is
left the youngest sequence is preempted (`preemption`). Without `overcommit` it starts with all the blocks that it may
ever need.

Sequences whose KV is pushed to a decode worker do not join this queue: the KV sender decides when each takes its blocks
(`hold`), because the decode worker must have blocks for it, too.

A sequence that ends while steps run it keeps its slot and blocks until the last of these steps is over.

If each rank has its own pool (`kvcache.rank_blocks`), a sequence has all its blocks in one of them, its owner's. Each
time it takes blocks, it goes to the rank with the fewest blocks reserved, less those that it finds cached there; a
sequence restored from host memory returns to its previous owner.

Where layers keep state, a cached prefix needs a checkpoint (`kvcache.state_checkpoints`): the first chunk begins with a
copy of it, and the sequence leaves checkpoints of its own at certain positions within its chunks.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from baton.core.block_hash import checkpoint_blocks
from baton.engine.sequence import Phase, Sequence
from baton.engine.step.plan import Chunk, Growth
from baton.kvcache.allocator import BlockAllocator, BlockTable
from baton.kvcache.state_checkpoints import StateCheckpoints


class Scheduler:
    """The scheduler of one engine.

    Args:
        allocator: of the pool; with a prefix index, sequences share the blocks registered there.
        num_slots: maximum number of sequences that run at once.
        overcommit: start sequences without all the blocks that they may need.
        others: allocators of the other ranks' pools, each with as many blocks; block numbers continue across them.

    Attributes:
        allocators: all of them, in rank order.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        num_slots: int,
        overcommit: bool = False,
        others: Items[BlockAllocator] = (),
    ) -> None:
        assert num_slots >= 1
        self.allocator = allocator
        self.allocators = (allocator, *others)
        assert len({item.num_blocks for item in self.allocators}) == 1
        assert not others or allocator.index.checkpoints is None
        self.num_slots = num_slots
        self.num_prefix_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_prefix_hits = 0
        self._overcommit = overcommit
        self._free_slots = deque(range(num_slots))
        self._sequences: dict[Sequence, None] = {}
        self._num_arrived = 0
        self._line: list[Sequence] = []  # WAITING, not pushed, in order
        self._ready: list[Sequence] = []  # READY, in order
        self._running: list[Sequence] = []  # RUNNING, in order
        self._decoding: list[Sequence] | None = None  # those of `_running` that are decode rows; None: to be rebuilt
        self._num_departing = 0  # slots no longer in `_running` that a step may still use
        self._num_departing_blocks = [0] * len(self.allocators)
        self._num_claimed = [0] * len(self.allocators)
        self._quarantined: dict[Sequence, BlockTable] = {}

    # Queries

    def sequences(self) -> tuple[Sequence, ...]:
        """All sequences that have not ended, in order of `add`. Any thread."""
        return tuple(self._sequences)

    def count(self, *phases: Phase) -> int:
        """Number of sequences in any of these phases. Any thread."""
        return sum(sequence.phase in phases for sequence in self.sequences())

    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have a slot, in order of arrival."""
        return tuple(self._running)

    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that wait in the queue for blocks."""
        return tuple(self._line)

    @property
    def num_slots_used(self) -> int:
        """Number of slots of running sequences, plus those that a step in flight still uses. Any thread."""
        return len(self._running) + self._num_departing

    def decoding(self) -> list[Sequence]:
        """Sequences of the next step's decode rows, in order of arrival; the returned list is never modified."""
        if self._decoding is None:
            self._decoding = [item for item in self._running if item.is_decoding and not item.is_leaving]
        return self._decoding

    def num_tokens_to_compute(self) -> int:
        """Number of tokens that chunks still have to compute for all running sequences. Any thread."""
        return sum(sequence.num_left for sequence in tuple(self._running))

    # The queue for blocks

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence; if it is WAITING and not pushed, it joins the end of the queue."""
        assert sequence not in self._sequences
        assert self.allocator.num_blocks_for(sequence.capacity_len) <= self.allocator.num_blocks
        self._sequences[sequence] = None
        if sequence.phase is Phase.WAITING and not sequence.is_pushed:
            self._stand(sequence)

    def expect_now(self, sequence: Sequence) -> None:
        """Queue an EXPECTED sequence, because its prefill worker now asks for blocks."""
        assert sequence.phase is Phase.EXPECTED
        sequence.phase = Phase.WAITING
        self._stand(sequence)

    def step_back(self, sequence: Sequence) -> None:
        """Return a sequence to EXPECTED, because its prefill worker no longer asks for blocks."""
        assert sequence.phase is Phase.WAITING and sequence.is_received
        self._line.remove(sequence)
        sequence.phase = Phase.EXPECTED

    def give_blocks(self) -> list[Sequence]:
        """Give blocks to the head of the queue while there are any; returns the sequences that became RECEIVING.

        A prompt computed here, or a sequence restored from host memory, takes its blocks only when a slot is free for
        it, and becomes READY. While it lacks only a slot, the sequences behind it leave it the blocks that it will
        need. A sequence that waits for the rank that has its saved KV does not hold up those that another rank can
        take.
        """
        granted: list[Sequence] = []
        closed: set[int] = set()  # ranks with too few blocks for a sequence ahead in the queue
        num_kept = 0
        for sequence in tuple(self._line):
            comes_by_transfer = sequence.is_received and not sequence.num_preemptions
            # READY sequences that arrived later do not count, or endless transfers would take every slot.
            num_ahead = bisect_left(self._ready, _order(sequence), key=_order)
            if not comes_by_transfer and num_ahead >= len(self._free_slots):
                num_kept += self.allocator.num_blocks_for(self._start_len(sequence))
                continue
            owners = [owner for owner in self._owners_for(sequence) if owner not in closed]
            if not self._take_blocks(sequence, owners, num_kept):
                closed.update(owners)
                if len(closed) == len(self.allocators):
                    break
                continue
            self._line.remove(sequence)
            if comes_by_transfer:
                sequence.phase = Phase.RECEIVING
                granted.append(sequence)
            else:
                self.make_ready(sequence)
        return granted

    def hold(self, sequence: Sequence, shared: tuple[int, ...]) -> None:
        """Reserve blocks for a pushed sequence, the first of them `shared` with other prompts.

        Raises:
            OutOfBlocks: too few blocks are free.
        """
        assert sequence.is_pushed and sequence.phase is Phase.WAITING
        assert len(self.allocators) == 1
        sequence.table = self.allocator.reserve(sequence.capacity_len, shared)
        self._found(sequence, shared)
        sequence.phase = Phase.RESERVING

    def make_ready(self, sequence: Sequence) -> None:
        """Let a sequence that has its blocks wait for a slot."""
        if sequence.order < 0:
            self._number(sequence)
        sequence.phase = Phase.READY
        insort(self._ready, sequence, key=_order)

    def give_slots(self) -> list[Sequence]:
        """Give free slots to READY sequences, which become RUNNING; returns them."""
        started: list[Sequence] = []
        while self._ready and self._free_slots:
            sequence = self._ready.pop(0)
            sequence.slot = self._free_slots.popleft()
            sequence.phase = Phase.RUNNING
            insort(self._running, sequence, key=_order)
            started.append(sequence)
        return started

    def match(self, sequence: Sequence, owner: int = 0) -> tuple[int, ...]:
        """Blocks of a rank's pool that already hold the beginning of the sequence's prompt. Any thread.

        At least one token is left to compute, because the next token is sampled from it, or because decoding starts
        from its state.
        """
        num_to_compute = sequence.num_tokens - bool(sequence.token_ids)
        most = (num_to_compute - 1) // self.allocator.block_size
        return self.allocators[owner].index.match(sequence.block_hashes[:most])

    def name_blocks(
        self,
        sequence: Sequence,
        table: BlockTable,
        start: int,
        end: int,
        checkpoints: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Register the blocks that positions start ... end complete, which are written in every layer, for sharing.

        Args:
            sequence: the sequence of these positions.
            table: the block table through which they were written; its blocks are not free.
            start: the first position.
            end: one past the last position.
            checkpoints: block ends among these positions, each with the state slot that holds the state there.
        """
        if sequence.is_unsound:
            for _, slot in checkpoints:
                self._checkpoints().give_up(slot)
            return
        full, allocator = slice(start // table.block_size, end // table.block_size), self._allocator_of(table)
        for block, name in zip(table.blocks[full], sequence.block_hashes[full], strict=False):
            allocator.name(name, block)
        for position, slot in checkpoints:
            assert start < position <= end and position % self.allocator.block_size == 0
            count = position // self.allocator.block_size
            name = sequence.block_hashes[count - 1]
            assert self.allocator.index.has(name), "a checkpoint goes with its block"
            self._checkpoints().keep(name, slot, is_branch=sequence.checkpoint_blocks[count])

    def unshare(self, sequence: Sequence) -> None:
        """Stop sharing the sequence's blocks, its own and those it found cached: its KV may hold NaN or infinities."""
        sequence.is_unsound = True
        if sequence.table is not None:
            self._allocator_of(sequence.table).forget(sequence.table)

    # The next step

    def chunks(self, budget_len: int) -> list[tuple[Sequence, Chunk]]:
        """Chunks of at most `budget_len` tokens in total, oldest sequence first; the caller must compute them."""
        chosen: list[tuple[Sequence, Chunk]] = []
        for sequence in self._running:
            if budget_len <= 0:
                break
            length = 0 if sequence.is_leaving else min(budget_len, sequence.num_left)
            if length <= 0:
                continue
            assert sequence.slot is not None
            asked = sequence.request.sampling.prompt_logprobs is not None and not sequence.token_ids
            chunk = Chunk(
                slot=sequence.slot,
                start=sequence.num_computed,
                length=length,
                report_from=1 + sequence.num_reported if asked else None,
                push=sequence.key if sequence.is_pushed else None,
                begin_with=self._leave_checkpoint(sequence),
                keep_in=self._take_checkpoints(sequence, sequence.num_computed + length),
            )
            chosen.append((sequence, chunk))
            budget_len -= length
        return chosen

    def _take_checkpoints(self, sequence: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """Checkpoints that a chunk up to `end` leaves, with their slots.

        Skips checkpoints that already exist, and stops when no slot is free.
        """
        block_size, names = self.allocator.block_size, sequence.block_hashes
        taken: list[tuple[int, int]] = []
        for count in sequence.checkpoint_blocks:
            position = count * block_size
            if sequence.num_computed < position <= end and names[count - 1] not in self._checkpoints():
                slot = self._checkpoints().take()
                if slot is None:
                    break
                taken.append((position, slot))
        return tuple(taken)

    def _leave_checkpoint(self, sequence: Sequence) -> int | None:
        """Release the checkpoint that the sequence was to begin with; returns its slot, which may now be reused."""
        name, sequence.checkpoint = sequence.checkpoint, None
        return None if name is None else self._checkpoints().leave(name)

    def _checkpoints(self) -> StateCheckpoints:
        assert self.allocator.index.checkpoints is not None
        return self.allocator.index.checkpoints

    def begin_decoding(self, sequence: Sequence) -> None:
        """Let a sequence take part as a decode row from the next step on."""
        assert sequence.phase is Phase.RUNNING and not sequence.is_pushed
        sequence.is_decoding = True
        self._decoding = None

    # Preemption; see `preemption`

    def num_coming(self, owner: int = 0) -> int:
        """Number of blocks of a rank's pool that become free when the steps in flight are over."""
        leaving = [item.table for item in self._of(owner, self._running) if item.is_leaving]
        return self._num_departing_blocks[owner] + sum(len(table.blocks) for table in leaving if table is not None)

    def claim_none(self) -> None:
        """Drop all claims: no decoding sequence waits for blocks."""
        self._num_claimed = [0] * len(self.allocators)

    def claim(self, num_blocks: int, owner: int = 0) -> None:
        """Set aside blocks of a rank's pool for decoding sequences that wait for some; no sequence starts with them."""
        self._num_claimed[owner] = num_blocks

    def candidates(self, owner: int = 0) -> list[Sequence]:
        """Sequences of a rank's pool that may be preempted, oldest first, including READY ones."""
        mine = self._of(owner, (*self._running, *self._ready))
        holders = [item for item in mine if not (item.is_leaving or item.is_pushed)]
        return sorted((item for item in holders if not item.is_protected), key=_order)

    def leave(self, sequence: Sequence) -> None:
        """Mark a sequence as leaving: no further step runs it, and it is preempted when no step in flight does."""
        sequence.is_leaving = True
        self._decoding = None

    def leaving(self) -> tuple[Sequence, ...]:
        """The running sequences that are leaving."""
        return tuple(item for item in self._running if item.is_leaving)

    def add_blocks(self, sequence: Sequence, num_blocks: int) -> Growth:
        """Add free blocks to the block table of a decoding sequence."""
        assert sequence.table is not None and sequence.slot is not None
        first = len(sequence.table.blocks)
        wanted_len = min((first + num_blocks) * self.allocator.block_size, sequence.capacity_len)
        sequence.table = self._allocator_of(sequence.table).grow(sequence.table, wanted_len)
        return Growth(sequence.slot, first, sequence.table.blocks[first:])

    def preempt(self, sequence: Sequence) -> Callable[[], None]:
        """Return a sequence to its old place in the queue; the returned function frees its blocks and slot."""
        free = self._detach(sequence)
        sequence.is_decoding = sequence.is_leaving = False
        if sequence.saved is None:
            sequence.resume = None  # its hidden state belongs to the KV that is lost
        sequence.num_computed = sequence.num_cached = 0
        sequence.phase = Phase.WAITING
        insort(self._line, sequence, key=_order)
        return free

    # Ends

    def send(self, sequence: Sequence) -> Callable[[], None]:
        """Mark a pushed sequence's prompt as computed: it keeps its blocks; the returned function frees its slot."""
        assert sequence.is_pushed and sequence.slot is not None
        self._running.remove(sequence)
        slot, sequence.slot = sequence.slot, None
        self._num_departing += 1
        sequence.phase = Phase.SENDING

        def free() -> None:
            self._num_departing -= 1
            self._free_slots.append(slot)

        return free

    def abort(self, sequence: Sequence) -> Callable[[], None]:
        """Give up a pushed sequence: it keeps its blocks until `remove`; the returned function frees its slot."""
        assert sequence.is_pushed
        slot, sequence.slot = sequence.slot, None
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
        elif sequence.phase is Phase.READY:
            self._ready.remove(sequence)
        sequence.phase = Phase.ABORTING
        self._num_departing += slot is not None

        def free() -> None:
            if slot is not None:
                self._num_departing -= 1
                self._free_slots.append(slot)

        return free

    def remove(self, sequence: Sequence) -> Callable[[], None]:
        """Remove a sequence; the returned function frees what it holds, and is to be called once no step uses it."""
        del self._sequences[sequence]
        if sequence.phase is Phase.WAITING and not sequence.is_pushed:
            self._line.remove(sequence)
        free = self._detach(sequence)
        sequence.phase = Phase.ENDED
        return free

    def quarantine(self, sequence: Sequence) -> None:
        """Remove a sequence that ends while it is RECEIVING: its blocks stay quarantined until `drained`."""
        assert sequence.phase is Phase.RECEIVING and sequence.table is not None
        self._allocator_of(sequence.table).quarantine(sequence.table)
        self._quarantined[sequence] = sequence.table
        sequence.table = None
        self.remove(sequence)()

    def drained(self, sequence: Sequence) -> None:
        """Free the blocks of a quarantined sequence, which nothing writes any more."""
        table = self._quarantined.pop(sequence)
        self._allocator_of(table).release_quarantined(table)

    def check_empty(self) -> None:
        """Check that every block and slot is free when no sequence is left; anything else is a leak."""
        if not self._sequences and not self._num_departing and not self._quarantined:
            assert all(allocator.num_free == allocator.num_blocks for allocator in self.allocators)
            assert len(self._free_slots) == self.num_slots
            assert not any(self._num_departing_blocks)
            assert self.allocator.state_slots.num_held == 0
            checkpoints = self.allocator.index.checkpoints
            assert checkpoints is None or not checkpoints.num_in_use

    def _stand(self, sequence: Sequence) -> None:
        self._number(sequence)
        self._line.append(sequence)

    def _number(self, sequence: Sequence) -> None:
        sequence.order = self._num_arrived
        self._num_arrived += 1

    def _start_len(self, sequence: Sequence) -> int:
        """Number of positions for which the sequence gets blocks when it starts."""
        return sequence.step_len if self._overcommit and not sequence.is_protected else sequence.capacity_len

    def _owners_for(self, sequence: Sequence) -> Iterable[int]:
        """Ranks whose pool may take the sequence: saved KV returns to the rank that saved it."""
        return range(len(self.allocators)) if sequence.saved is None else (sequence.owner,)

    def _take_blocks(self, sequence: Sequence, owners: Iterable[int], num_kept: int) -> bool:
        start_len = self._start_len(sequence)
        is_computed_here = sequence.saved is None and (not sequence.is_received or sequence.num_preemptions > 0)
        shared = {owner: self.match(sequence, owner) if is_computed_here else () for owner in owners}
        for owner in sorted(owners, key=lambda owner: self.allocators[owner].num_reserved - len(shared[owner])):
            allocator, num_left = self.allocators[owner], num_kept + self._num_claimed[owner]
            if self._overcommit and not sequence.is_protected:
                num_left += len(self._of(owner, (*self._running, *self._ready)))  # each of these may need a block soon
            if allocator.num_missing(start_len + num_left * allocator.block_size, shared[owner]):
                continue
            sequence.owner, sequence.table = owner, allocator.reserve(start_len, shared[owner])
            if is_computed_here:
                self._found(sequence, shared[owner])
            return True
        return False

    def _of(self, owner: int, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The given sequences that have their blocks in a rank's pool."""
        return [item for item in sequences if item.owner == owner]

    def _allocator_of(self, table: BlockTable) -> BlockAllocator:
        """The allocator of a table, found by its blocks: the sequence may by now have another table in another pool."""
        return self.allocators[table.blocks[0] // self.allocator.num_blocks]

    def _found(self, sequence: Sequence, shared: tuple[int, ...]) -> None:
        sequence.num_cached = sequence.num_computed = len(shared) * self.allocator.block_size
        index = self.allocator.index
        if sequence.block_hashes and index.checkpoints is not None:
            if shared:
                sequence.checkpoint = sequence.block_hashes[len(shared) - 1]
                index.checkpoints.use(sequence.checkpoint)
            sequence.checkpoint_blocks = checkpoint_blocks(
                sequence.request.prompt_len,
                self.allocator.block_size,
                num_cached=len(shared),
                num_shared=len(index.run(sequence.block_hashes)),
                interval=index.checkpoints.interval,
            )
        if sequence.block_hashes:
            self.num_prefix_tokens += sequence.num_tokens
            self.num_prefix_hit_tokens += sequence.num_cached
            self.num_prefix_hits += sequence.num_cached > 0

    def _detach(self, sequence: Sequence) -> Callable[[], None]:
        """Take slot and blocks from a sequence; the returned function frees them."""
        table, slot = sequence.table, sequence.slot
        self._leave_checkpoint(sequence)
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
            self._decoding = None
        elif sequence.phase is Phase.READY:
            self._ready.remove(sequence)
        sequence.table = sequence.slot = None
        num_blocks = 0 if table is None else len(table.blocks)
        self._num_departing += slot is not None
        owner = sequence.owner
        self._num_departing_blocks[owner] += num_blocks

        def free() -> None:
            self._num_departing -= slot is not None
            self._num_departing_blocks[owner] -= num_blocks
            if table is not None:
                self._allocator_of(table).release(table)
            if slot is not None:
                self._free_slots.append(slot)

        return free


def _order(sequence: Sequence) -> int:
    return sequence.order
