"""Runners of a tensor-parallel gang: rank 0's tell the plan and compute, the others' compute what they hear.

To a worker's loop, `LeadPrefill` and `LeadDecode` are the runners they wrap; the loop exists at rank 0 alone. The other
ranks hold the same slots and block tables, because they were told the same, and their own KV heads. Refuses to know
what a worker does beside computing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from baton.core.sampling import SamplingParams
from baton.engine.decode import DecodeOutput, DecodeRunner
from baton.engine.host_future import HostFuture
from baton.engine.kv_offload import KVOffload
from baton.engine.plan import PlanChannel
from baton.engine.plan_messages import Admit, Draft, Forward, Grow, Load, Release, Save, SetDrafts, Step, Stop
from baton.engine.prefill import PrefillChunk, PrefillForward, PrefillRunner, SequenceStart
from baton.engine.slots import Growth
from baton.engine.step_limit import StepLimit
from baton.engine.step_ticket import StepTicket
from baton.kvcache.allocator import BlockTable

_LOOK_S = 0.02
_MAX_AHEAD = 2


class LeadPrefill:
    """Rank 0's `PrefillRunner`."""

    def __init__(self, runner: PrefillRunner, channel: PlanChannel) -> None:
        self.has_mtp = runner.has_mtp
        self.grammars = runner.grammars
        self._runner = runner
        self._channel = channel
        self._forward_limit = StepLimit()
        self._draft_limit = StepLimit()

    def forward(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None]) -> PrefillForward:
        """As `PrefillRunner.forward`, at every rank."""
        num_rows, limit = _num_rows(chunks), self._forward_limit
        limit_s = limit.limit_s(num_rows)
        self._channel.tell(Forward(tuple(chunks), limit_s))
        with self._channel.lead_step(limit, num_rows, limit_s), self._channel.computing():
            return self._runner.forward(chunks, on_layer)

    def draft(self, forward: PrefillForward, on_layer: Callable[[int], None]) -> tuple[SequenceStart | None, ...]:
        """As `PrefillRunner.draft`, at every rank."""
        num_rows, limit = _num_rows(forward.chunks), self._draft_limit
        limit_s = limit.limit_s(num_rows)
        self._channel.tell(Draft(limit_s))
        with self._channel.lead_step(limit, num_rows, limit_s), self._channel.computing():
            return self._runner.draft(forward, on_layer)


class FollowPrefill:
    """Another rank's."""

    def __init__(self, runner: PrefillRunner, channel: PlanChannel) -> None:
        self._runner = runner
        self._channel = channel
        self._forward: PrefillForward | None = None

    def take(self, plan: Any, on_layer: Callable[[int], None]) -> bool:
        """Do what the plan says; False if it is about something else."""
        match plan:
            case Forward():
                self._channel.follow_step(plan.limit_s)
                self._forward = self._runner.forward(plan.chunks, on_layer)
            case Draft():
                assert self._forward is not None
                self._channel.follow_step(plan.limit_s)
                self._runner.draft(self._forward, on_layer)
                self._forward = None
            case _:
                return False
        return True


class LedTicket(StepTicket):
    """A step at every rank; it has ended for the watch once it was read."""

    def __init__(self, ticket: StepTicket, on_end: Callable[[], None]) -> None:
        super().__init__(ticket.slots, (), None, None)
        self._ticket = ticket
        self._on_end: Callable[[], None] | None = on_end

    @property
    def is_done(self) -> bool:
        """As `StepTicket.is_done`, at this rank."""
        return self._ticket.is_done

    @property
    def is_read(self) -> bool:
        """As `StepTicket.is_read`."""
        return self._ticket.is_read

    def result(self) -> DecodeOutput:
        """As `StepTicket.result`."""
        output = self._ticket.result()
        if self._on_end is not None:
            self._on_end()
            self._on_end = None
        return output


class LeadOffload:
    """Rank 0's `KVOffload`."""

    def __init__(self, own: KVOffload, channel: PlanChannel) -> None:
        self.num_blocks = own.num_blocks
        self._own = own
        self._channel = channel

    def save(self, blocks: Sequence[int], first: int, slot: int | None) -> HostFuture:
        """As `KVOffload.save`, at every rank."""
        self._channel.tell(Save(tuple(blocks), first, slot))
        return self._own.save(blocks, first, slot)

    def load(self, blocks: Sequence[int], first: int, slot: int) -> HostFuture:
        """As `KVOffload.load`, at every rank."""
        self._channel.tell(Load(tuple(blocks), first, slot))
        return self._own.load(blocks, first, slot)


class LeadDecode:
    """Rank 0's `DecodeRunner`. Plans go to the other ranks when they are made, ahead of what is being computed."""

    def __init__(self, runner: DecodeRunner, channel: PlanChannel) -> None:
        self._runner = runner
        self._channel = channel
        self._limit = StepLimit()
        self.max_num_sequences = runner.max_num_sequences
        self.hidden_size = runner.hidden_size
        self.hidden_dtype = runner.hidden_dtype
        self.num_draft_tokens = runner.num_draft_tokens
        self.grammars = runner.grammars
        self.kv_offload = LeadOffload(runner.kv_offload, channel)
        self.meter = runner.meter
        self.graphs = runner.graphs
        self._num_drafts = runner.num_draft_tokens

    def admit(
        self,
        slot: int,
        start: SequenceStart,
        prompt_len: int,
        sampling: SamplingParams,
        table: BlockTable,
        draft_cap: int,
        *,
        prompt_token_ids: Sequence[int] = (),
        output_len: int = 0,
        choice: int = 0,
    ) -> None:
        """As `DecodeRunner.admit`, at every rank."""
        if not output_len and sampling.repetition_penalty == 1.0:
            prompt_token_ids = ()  # nothing depends on it
        others = (tuple(prompt_token_ids), output_len, choice)
        self._channel.tell(Admit.of(slot, start, prompt_len, sampling, table, draft_cap, *others))
        self._runner.admit(
            slot,
            start,
            prompt_len,
            sampling,
            table,
            draft_cap,
            prompt_token_ids=prompt_token_ids,
            output_len=output_len,
            choice=choice,
        )

    def release(self, slot: int) -> StepTicket | None:
        """As `DecodeRunner.release`, at every rank."""
        self._channel.tell(Release(slot))
        return self._runner.release(slot)

    def short_of_room(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """As `DecodeRunner.short_of_room`."""
        return self._runner.short_of_room(slots)

    def grow(self, growths: Sequence[Growth]) -> None:
        """As `DecodeRunner.grow`, at every rank."""
        self._channel.tell(Grow(tuple(growths)))
        self._runner.grow(growths)

    def set_num_drafts(self, num_drafts: int) -> None:
        """As `DecodeRunner.set_num_drafts`, at every rank, from the next step that is told."""
        if num_drafts != self._num_drafts:
            self._channel.tell(SetDrafts(num_drafts))
            self._num_drafts = num_drafts
            self._runner.set_num_drafts(num_drafts)

    def draft_caps(self, slots: Sequence[int]) -> tuple[int, ...]:
        """As `DecodeRunner.draft_caps`."""
        return self._runner.draft_caps(slots)

    def unfinished(self, slots: Sequence[int]) -> tuple[int, ...]:
        """As `DecodeRunner.unfinished`."""
        return self._runner.unfinished(slots)

    def step(self, slots: Sequence[int]) -> DecodeOutput:
        """As `DecodeRunner.step`, at every rank."""
        return self.launch(slots).result()

    def launch(self, slots: Sequence[int]) -> StepTicket:
        """As `DecodeRunner.launch`, at every rank."""
        if not slots:
            return self._runner.launch(slots)
        num_rows = len(slots) * (self._num_drafts + 1)
        limit_s = self._limit.limit_s(num_rows)
        max_context_len = self._runner.max_context_len(slots)
        self._channel.tell(Step(tuple(slots), max_context_len, limit_s))
        end = self._channel.begin_step(self._limit, num_rows, limit_s)
        return LedTicket(self._runner.launch(slots, max_context_len), end)

    def drain(self) -> None:
        """As `DecodeRunner.drain`, at this rank."""
        self._runner.drain()

    def close(self) -> None:
        """Let the other ranks go; the last call."""
        self._channel.link.expect_end()
        self._channel.tell(Stop())
        self._runner.close()


class FollowDecode:
    """Another rank's; `prefill`, over the same pool, computes again what was dropped."""

    def __init__(self, runner: DecodeRunner, channel: PlanChannel, prefill: PrefillRunner | None = None) -> None:
        self._runner = runner
        self._prefill = None if prefill is None else FollowPrefill(prefill, channel)
        self._channel = channel
        self._launched: deque[StepTicket] = deque()
        self._leaving: dict[int, StepTicket] = {}  # by slot: the last step that has it

    def run(self) -> None:
        """Do what rank 0 says until it says stop.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
        """
        # While a step runs its end is looked at soon, for it may say that this rank diverged.
        while not isinstance(plan := self._channel.hear(_LOOK_S if self._launched else None), Stop):
            is_known = plan is None or self.take(plan)
            assert is_known, f"a decode rank does not know {plan!r}"
            self.look()
        self._runner.close()

    def take(self, plan: Any) -> bool:
        """Do what the plan says; False if it is about something else."""
        match plan:
            case Admit():
                leaving = self._leaving.pop(plan.slot, None)
                if leaving is not None:
                    leaving.result()
                self._runner.admit(
                    plan.slot,
                    plan.start,
                    plan.prompt_len,
                    plan.sampling,
                    plan.table,
                    plan.draft_cap,
                    prompt_token_ids=plan.prompt_token_ids,
                    output_len=plan.output_len,
                    choice=plan.choice,
                )
            case Release():
                last = self._runner.release(plan.slot)
                if last is not None:
                    self._leaving[plan.slot] = last
            case SetDrafts():
                self._runner.set_num_drafts(plan.num_drafts)
            case Step():
                self._channel.follow_step(plan.limit_s)
                self._launched.append(self._runner.launch(plan.slots, plan.max_context_len))
            case Grow():
                self._runner.grow(plan.growths)
            case Save():
                self._runner.kv_offload.save(plan.blocks, plan.first, plan.slot)
            case Load():
                self._runner.kv_offload.load(plan.blocks, plan.first, plan.slot)
            case _ if self._prefill is not None:
                self._runner.drain()  # what adds over ranks does so in one order
                return self._prefill.take(plan, _ignore_layer)
            case _:
                return False
        return True

    def look(self) -> None:
        """Read what is over, and what is more than `_MAX_AHEAD` steps behind."""
        while self._launched and (len(self._launched) > _MAX_AHEAD or self._launched[0].is_done):
            self._launched.popleft().result()


def _num_rows(chunks: Sequence[PrefillChunk]) -> int:
    return sum(chunk.length for chunk in chunks)


def _ignore_layer(layer: int) -> None:
    """Nothing to push."""
