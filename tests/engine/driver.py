"""Drives a `Runner` by plans, as an engine would, and without one: a test says what each step is made of."""

from baton.core.requests.sampling import SamplingParams
from baton.engine.step.plan import Chunk, Place, Release, Resume, Step
from baton.kvcache.allocator import BlockAllocator


class Driver:
    """Sequences in the slots of a runner, with blocks from the runner's own pool.

    Args:
        runner: a `Runner`, or what leads several.
        pool: of that runner.
    """

    def __init__(self, runner, pool):
        self.runner = runner
        sizes, num_pools = (pool.num_blocks, pool.layout.block_size), getattr(runner, "num_pools", 1)
        self.allocators = [BlockAllocator(*sizes, first=rank * pool.num_blocks) for rank in range(num_pools)]
        self.allocator = self.allocators[0]
        self.tables = {}
        self._ends = {}  # by slot: tokens that chunks compute
        self._starts = {}  # by slot: of them, those that were
        self._most = {}  # by slot: tokens that a sequence may have by now

    def place(
        self,
        slot,
        prompt,
        sampling=None,
        *,
        draft_cap=None,
        num_output=0,
        choice=0,
        resume=None,
        knows_next=False,
        table=None,
        capacity_len=None,
        owner=0,
    ):
        """A sequence takes a slot; its blocks are enough for all that it may emit, or for `capacity_len`.

        They are in the pool of rank `owner`, counted round, where each rank attends for its own sequences.
        """
        sampling = sampling or SamplingParams()
        cap = self.runner.num_draft_tokens if draft_cap is None else draft_cap
        length = capacity_len or len(prompt) - num_output + sampling.max_tokens + cap
        self.tables[slot] = table or self.allocators[owner % len(self.allocators)].reserve(length)
        self._ends[slot] = len(prompt) - knows_next
        self._starts[slot] = 0 if resume is None else self._ends[slot]
        self._most[slot] = len(prompt)
        self.runner.execute(
            Place(
                slot=slot,
                token_ids=tuple(prompt),
                num_output=num_output,
                blocks=self.tables[slot].blocks,
                sampling=sampling,
                draft_cap=cap,
                choice=choice,
                resume=resume,
                knows_next=knows_next,
                state_slot=self.tables[slot].state_slot,
            )
        )

    def resume(self, slot, tokens, sampling=None, *, draft_token=None, hidden=b"", **options):
        """A sequence that decodes from the next step on: its KV is taken to be in its blocks."""
        self.place(slot, tokens, sampling, resume=Resume(draft_token, hidden), **options)

    def release(self, slot):
        """Its sequence takes part in no later step; its blocks are free."""
        self.runner.execute(Release(slot))
        table = self.tables.pop(slot)
        self.allocators[table.blocks[0] // self.allocator.num_blocks].release(table)

    def chunk(self, slot, length=None, **options):
        """The next so many tokens of a prompt, all that are left if None."""
        start = self._starts[slot]
        length = self._ends[slot] - start if length is None else length
        self._starts[slot] = start + length
        if self._starts[slot] == self._ends[slot]:
            self._most[slot] = self._ends[slot] + 1
        return Chunk(slot=slot, start=start, length=length, **options)

    def launch(self, slots=(), *, chunks=(), num_drafts=None):
        """A step of decode rows and chunks; all drafts that there are if None."""
        slots = tuple(slots)
        num_drafts = self.runner.num_draft_tokens if num_drafts is None else num_drafts
        num_drafts = num_drafts if slots else 0
        context_len = max((min(self._most[slot] + num_drafts, self.limit(slot)) for slot in slots), default=0)
        for slot in slots:
            self._most[slot] += num_drafts + 1
        return self.runner.launch(
            Step(chunks=tuple(chunks), slots=slots, num_drafts=num_drafts, max_context_len=context_len)
        )

    def step(self, slots=(), **options):
        """The same, and what came of it."""
        return self.launch(slots, **options).result()

    def decode(self, slots, **options):
        """Emitted tokens of each decode row of one step."""
        return [row.token_ids for row in self.step(slots, **options).decode]

    def compute(self, slot, *, chunk_len=None):
        """A whole prompt, in steps of its own; the token that follows."""
        while True:
            left = self._ends[slot] - self._starts[slot]
            output = self.step(chunks=[self.chunk(slot, min(left, chunk_len or left))])
            if self._starts[slot] == self._ends[slot]:
                return output.chunks[0].token

    def start(self, slot, prompt, sampling=None, **options):
        """`place` and `compute`."""
        self.place(slot, prompt, sampling, **options)
        return self.compute(slot)

    def limit(self, slot):
        """Positions that a sequence has room for."""
        table = self.tables[slot]
        return min(len(table.blocks) * self.allocator.block_size, self.runner.max_model_len)
