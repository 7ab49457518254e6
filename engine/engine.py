"""Runs the engine loop: every worker, whatever its role, computes all its tokens here.

The loop is receive -> start -> plan -> launch -> read -> publish. A step is a batch of prefill chunks and decode rows.
With asynchronous scheduling the engine plans and launches step n + 1 before it reads the results of step n. A step may
therefore run a sequence that has already ended: the engine drops the sequence's row, and frees its blocks only when the
last step that runs it is over.

A `Role` says what a worker does besides computing: `engine.local` returns tokens to its caller, a prefill worker pushes
KV and hands sequences off, a decode worker receives them. One thread drives an engine.
"""

import bisect
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.core.clock import Clock
from baton.core.config import SchedulingName
from baton.core.errors import BatonError, ModelOutputInvalid, RequestDeadlineExceeded, as_internal
from baton.core.pace import PrefillPace
from baton.core.rate import FullStepRate, RateMeter
from baton.core.requests.request import FinishReason, TokenLogprobs
from baton.core.telemetry.step_report import StepReport
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.preemption import Preemption, PreemptionCounts
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence
from baton.engine.speculation.speculation import Kept, PlannedStep, Speculation
from baton.engine.step.executor import Pending
from baton.engine.step.length_bounds import LaunchedLengths, LengthBounds
from baton.engine.step.meter import StepMeter
from baton.engine.step.plan import Chunk, Grow, Operation, Place, Release, Resume, Step
from baton.engine.step.result import ChunkOutput, HandoffState, StepOutput, StepTicket
from baton.engine.step.tally import Dropped, Fate, StepTally
from baton.engine.tp.expert_balancer import ExpertBalancer

Ints = npt.NDArray[np.int64]

IDLE_S: Final = 0.02  # between iterations without work, so that deadlines are noticed without a wake-up
SETTLE_S: Final = 0.0005  # between iterations that only wait for a step or a copy to end
_MAX_UNTIMED: Final = 64

log = logging.getLogger(__name__)


class Published(NamedTuple):
    """Tokens of one sequence that belong to its answer.

    Attributes:
        sequence: the sequence; `token_ids` are its newest tokens.
        token_ids: at least one, unless the answer ended before.
        logprobs: one per token; empty if not requested.
        reason: why the answer ended; None if it continues.
        is_first: True if a prefill chunk sampled the token, False if a decode step emitted them.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason | None
    is_first: bool


class Role(Protocol):
    """What a worker does besides computing. The engine calls it on its own thread."""

    def receive(self) -> bool:
        """Process what arrived from outside since the last call; returns whether anything did."""
        ...

    def granted(self, sequence: Sequence) -> None:
        """Handle that a RECEIVING sequence now has its blocks, so the prefill worker may push."""
        ...

    def plan(self) -> None:
        """Prepare for the next step, which the engine is about to plan."""
        ...

    def prompt_logprobs(self, sequence: Sequence, reports: tuple[TokenLogprobs, ...]) -> None:
        """Take log-probabilities of prompt tokens, in order."""
        ...

    def publish(self, published: Items[Published]) -> None:
        """Publish the tokens of one step. Sequences with a `reason` have ended when this returns."""
        ...

    def hand_off(self, sequence: Sequence, first_token: int, state: HandoffState) -> None:
        """Hand off a pushed sequence, whose prompt is computed and which is now SENDING."""
        ...

    def preempted(self, sequence: Sequence) -> None:
        """Handle that a sequence was preempted: it gave up its blocks and waits."""
        ...

    def ended(self, sequence: Sequence, error: BatonError | None) -> None:
        """Handle that the engine is about to stop working on a sequence, whose phase is still unchanged.

        A role that pushes the sequence's KV aborts the push, and calls `forget` once the push no longer reads the
        blocks. A role that receives it aborts the transfer, and calls `drained` once the transfer no longer writes the
        blocks.
        """
        ...


class Runs(Protocol):
    """The part of `Runner` that an engine uses."""

    @property
    def num_draft_tokens(self) -> int:
        """Maximum number of draft tokens that a step may verify."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Number of slots."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of positions of a sequence."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Number of KV blocks that fit in host memory."""
        ...

    @property
    def num_state_images(self) -> int:
        """Number of state slots that fit in host memory."""
        ...

    @property
    def meter(self) -> StepMeter:
        """Measures the times and counters of this runner's steps."""
        ...

    @property
    def balancer(self) -> ExpertBalancer | None:
        """Moves experts between the ranks; None if experts stay where they are."""
        ...

    def execute(self, operation: Operation) -> Pending | None:
        """Execute an operation."""
        ...

    def launch(self, step: Step) -> StepTicket:
        """Launch a step."""
        ...

    def drain(self) -> None:
        """Wait until no work is running."""
        ...


class _DecodeSet:
    """The sequences that decode in one step, and everything derived from them alone."""

    def __init__(self, sequences: Items[Sequence]) -> None:
        self.sequences = sequences
        self.slots = tuple(_slot(sequence) for sequence in sequences)
        self.slots_B: Ints = np.array(self.slots, dtype=np.int64)
        self.caps = tuple(sequence.draft_cap for sequence in sequences)
        kept = tuple(
            None if sequence.method is None else Kept(sequence.method, sequence.draft_cap) for sequence in sequences
        )
        self.kept: tuple[tuple[Kept | None, ...]] | tuple[()] = (kept,) if any(kept) else ()
        self._caps_B: Ints = np.array(self.caps, dtype=np.int64)
        self.room_B: Ints = self._caps_B + 1  # tokens that each may emit in a step with any k
        self._most: tuple[int, Ints] = (-1, self.room_B)

    def most_B(self, num_drafts: int) -> Ints:
        """Maximum number of tokens that each sequence may emit in a step with `num_drafts` drafts."""
        if self._most[0] != num_drafts:
            self._most = (num_drafts, np.minimum(self._caps_B, num_drafts) + 1)
        return self._most[1]

    def where(self, is_kept_B: npt.NDArray[np.bool_]) -> "_DecodeSet":
        """The subset of sequences selected by the mask."""
        if is_kept_B.all():
            return self
        return _DecodeSet([self.sequences[place] for place in np.flatnonzero(is_kept_B).tolist()])


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A launched step."""

    ticket: StepTicket
    step: Step
    decode: Items[Sequence]
    chunks: Items[tuple[Sequence, Chunk]]
    ends: Items[bool]  # per chunk, whether it yields a new token
    planned: PlannedStep | None
    launched: LaunchedLengths | None
    launched_s: float
    launch_s: float  # host time of the launch

    def runs(self, sequence: Sequence) -> bool:
        return any(item is sequence for item in self.decode) or any(item is sequence for item, _ in self.chunks)


class Engine:
    """Runs sequences until they end.

    Args:
        runner: this worker's runner; with several ranks, rank 0's.
        scheduler: schedules over the same pool, with as many slots.
        role: see `Role`.
        clock: for deadlines and times.
        max_num_batched_tokens: maximum number of tokens in a step.
        scheduling: `async` keeps one step in flight while the next is planned; `sync` keeps none.
        speculation: decides how many drafts each step verifies; if None, always `runner.num_draft_tokens`.
        preempt_at: preempts every sequence once at each of these output lengths, or as soon as a step has passed it; 0
            is within the prompt, if that takes several chunks. For tests.
    """

    def __init__(
        self,
        *,
        runner: Runs,
        scheduler: Scheduler,
        role: Role,
        clock: Clock,
        max_num_batched_tokens: int,
        scheduling: SchedulingName = "async",
        speculation: Speculation | None = None,
        preempt_at: Items[int] = (),
    ) -> None:
        assert scheduler.num_slots == runner.max_num_seqs
        self.runner = runner
        self.scheduler = scheduler
        self.pace = PrefillPace()
        self.rate = RateMeter()
        self._full_rate = FullStepRate()
        self.budget = ChunkBudget(max_num_batched_tokens)
        self.tally = StepTally(runner.num_draft_tokens)
        self.num_prompts = 0  # computed here completely
        self.num_not_finite = 0  # sequences that ended because the model returned NaN or an infinity
        self.num_prompt_tokens = 0  # computed by chunks; those that are computed again count once
        # Prompt tokens that wait elsewhere to come here, as was said last, less those computed since: no message says
        # that they went away.
        self.num_queued_tokens = 0
        self.speculation = speculation or Speculation(runner.num_draft_tokens, runner.num_draft_tokens, clock)
        self._role = role
        self._clock = clock
        self._max_tokens = max_num_batched_tokens
        self._num_ahead = 1 if scheduling == "async" else 0
        self._preempt_at = sorted(preempt_at)
        self._preemption = Preemption(scheduler, self, runner.num_host_blocks, runner.num_state_images)
        self._bounds = LengthBounds(runner.max_num_seqs)
        self._decode_set = _DecodeSet(())
        self._flights: deque[_Flight] = deque()  # not read yet
        self._open: deque[_Flight] = deque()  # not over yet
        self._untimed: deque[_Flight] = deque()  # read, but their times are not known yet
        self._later: deque[tuple[Pending | None, Callable[[], None]]] = deque()

    @property
    def preemptions(self) -> PreemptionCounts:
        """Cost of preemption so far. Any thread."""
        return self._preemption.counts

    @property
    def num_host_blocks_used(self) -> int:
        """Host blocks that hold a sequence's KV. Any thread."""
        return self._preemption.num_host_blocks_used

    @property
    def num_state_images_used(self) -> int:
        """Number of state slots stored in host memory."""
        return self._preemption.num_state_images_used

    @property
    def is_idle(self) -> bool:
        """Whether every step was read and no release is pending."""
        return not self._flights and not self._later

    def full_tokens_per_s(self) -> float:
        """Prompt tokens per second of recent full steps, decode rows' time included; 0: too few. Any thread."""
        return self._full_rate.per_s(self._clock.now_s())

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        request = sequence.request
        if request.keeps_drafts and request.sampling.temperature > 0 and not sequence.is_pushed:
            kept = self.speculation.keep(sequence.draft_cap)
            if kept is not None:
                sequence.method, sequence.draft_cap = kept
        self.scheduler.add(sequence)

    def step(self) -> float:
        """Run one iteration of the loop; returns for how many seconds the caller may sleep unless it is woken.

        Returns 0 while there is work, and IDLE_S when there is none. Returns SETTLE_S when the only thing left is to
        free what a step still uses: polling without a pause would keep the interpreter from the thread that computes
        the step.
        """
        has_worked = self._role.receive()
        self._expire()
        self.settle()
        self._preempt()
        self._start()
        self._role.plan()
        self._start()  # sequences that the role has just made ready
        has_launched = self._launch()
        self.runner.meter.copy_if_wanted()
        is_busy = has_worked or has_launched or bool(self._flights)
        self._read(has_launched=has_launched)
        if is_busy:
            return 0.0
        return SETTLE_S if self._later else IDLE_S

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        """End a sequence with an error."""
        self.end(sequence, error)

    def end(self, sequence: Sequence, error: BatonError | None = None) -> None:
        """Stop working on a sequence in any phase. What it holds is freed once nothing uses it any more."""
        phase, slot = sequence.phase, sequence.slot
        if phase in (Phase.ENDED, Phase.ABORTING):
            return
        self._role.ended(sequence, error)
        if isinstance(error, ModelOutputInvalid):
            self.num_not_finite += 1
            self.scheduler.unshare(sequence)
        if phase is Phase.RECEIVING:
            self.scheduler.quarantine(sequence)
            return
        filling = self._preemption.filled(sequence)  # always called, because it also drops its entry for the sequence
        last = self._last_step(sequence) or filling
        self._preemption.forget(sequence)
        if slot is not None:
            self.execute(Release(slot))
        is_read = sequence.is_pushed and phase is not Phase.WAITING  # a push may read its blocks
        self.after(last, self.scheduler.abort(sequence) if is_read else self.scheduler.remove(sequence))

    def forget(self, sequence: Sequence) -> None:
        """Free an ended or acknowledged pushed sequence, whose blocks no push reads any more."""
        self.after(self._last_step(sequence), self.scheduler.remove(sequence))

    def drain(self) -> None:
        """Read every launched step, and free everything that waits for one."""
        while self._flights:
            self._read(has_launched=False)
        if self._later:
            self.runner.drain()
            self.settle()
        self.speculation.pause()

    def report(self) -> StepReport:
        """Report on all decode steps so far; waits for any that is running.

        A step may be in flight, that is, computed but not read yet.
        """
        return self.tally.report(self.runner.meter, self.runner.meter.computed_now())

    # Called by preemption; see `preemption.Steps`

    def runs(self, sequence: Sequence) -> bool:
        """Whether a step that was not read yet runs this sequence."""
        return any(flight.runs(sequence) for flight in self._flights)

    def execute(self, operation: Operation) -> Pending | None:
        """Execute an operation after the steps launched so far."""
        if isinstance(operation, Grow):
            for growth in operation.growths:
                self._bounds.grow(growth.slot, self._limit(growth.first + len(growth.blocks)))
        ending = self.runner.execute(operation)
        if ending is not None:  # a copy: the time of the step in flight tells nothing about its k
            self.speculation.disturb()
        return ending

    def after(self, ending: Pending | None, act: Callable[[], None]) -> None:
        """Call `act` once `ending`, and everything queued here before it, is over."""
        self._later.append((ending, act))
        self.settle()

    def settle(self) -> None:
        """Run the queued actions whose `ending` is over."""
        while self._later and (self._later[0][0] is None or self._later[0][0].is_done):
            self._later.popleft()[1]()

    def last_step(self, sequence: Sequence) -> Pending | None:
        """The last step that runs a sequence; None if that step is over."""
        return self._last_step(sequence)

    def was_preempted(self, sequence: Sequence) -> None:
        """Tell the role that a sequence has given up its blocks."""
        self._role.preempted(sequence)

    # The parts of one iteration

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for sequence in self.scheduler.sequences():
            if now_s >= sequence.request.deadline_s:
                self.end(sequence, RequestDeadlineExceeded("the deadline passed", num_tokens=len(sequence.token_ids)))

    def _preempt(self) -> None:
        for sequence in self.scheduler.running() if self._preempt_at else ():
            num_due = bisect.bisect_right(self._preempt_at, len(sequence.token_ids))
            has_kv = sequence.num_computed > 0 or sequence.is_decoding
            if num_due > sequence.num_scripted and has_kv and not (sequence.is_leaving or sequence.is_pushed):
                sequence.num_scripted = num_due
                self._preemption.request(sequence)
        self._preemption.preempt_leaving()

    def _start(self) -> None:
        for sequence in self.scheduler.give_blocks():
            self._role.granted(sequence)
        for sequence in self.scheduler.give_slots():
            self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        is_saved = sequence.saved is not None
        resume = sequence.resume or (Resume() if is_saved else None)
        self.execute(
            Place(
                slot=_slot(sequence),
                token_ids=sequence.all_token_ids,
                num_output=sequence.num_output,
                blocks=sequence.table.blocks,
                state_slot=sequence.table.state_slot,
                sampling=sequence.request.sampling,
                draft_cap=sequence.draft_cap,
                method=sequence.method,
                choice=sequence.request.choice,
                resume=resume,
                knows_next=resume is None and bool(sequence.token_ids),
            )
        )
        if resume is None:
            self._preemption.started_again(sequence)
            return
        sequence.resume = None
        self._begin_decoding(sequence, sequence.num_tokens)
        if is_saved:
            self._preemption.load(sequence)

    def _begin_decoding(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a sequence decode from the next step on, by when it has `num_tokens` tokens."""
        assert sequence.table is not None
        request = sequence.request
        self._bounds.admit(
            _slot(sequence),
            num_tokens,
            limit=self._limit(len(sequence.table.blocks)),
            end=request.prompt_len - request.num_forced + request.sampling.max_tokens,
            reach=min(sequence.capacity_len, self.runner.max_model_len),
        )
        self.scheduler.begin_decoding(sequence)
        sequence.decoding_s = sequence.decoding_s or self._clock.now_s()

    def _limit(self, num_blocks: int) -> int:
        return min(num_blocks * self.scheduler.allocator.block_size, self.runner.max_model_len)

    def _launch(self) -> bool:
        self.scheduler.claim_none()
        decode = self._decode_rows()
        num_waiting = self.scheduler.num_tokens_to_compute()
        planned = None
        if decode.slots:
            planned = self.speculation.plan(decode.caps, *decode.kept, has_chunks=num_waiting > 0)
        num_drafts = 0 if planned is None else planned.num_drafts
        chosen: list[tuple[Sequence, Chunk]] = []
        if num_waiting:
            num_waiting += sum(item.num_left for item in self.scheduler.waiting() if not item.is_received)
            num_waiting += self.num_queued_tokens
            budget_len = self.budget.length(len(decode.slots) * (num_drafts + 1), num_waiting)
            chosen = self.scheduler.chunks(budget_len)
            num_computed = sum(chunk.length for _, chunk in chosen)
            self.num_queued_tokens = max(0, self.num_queued_tokens - num_computed)
        elif self.num_queued_tokens and all(item.is_received for item in self.scheduler.waiting()):
            self.num_queued_tokens = 0  # the queue went away, or to prefill workers: the next prompt tells
        if not decode.slots and not chosen:
            return False
        step = Step(
            chunks=tuple(chunk for _, chunk in chosen),
            slots=decode.slots,
            num_drafts=num_drafts,
            method=None if planned is None else planned.method,
            max_context_len=self._bounds.max_context_len(decode.slots_B, num_drafts) if decode.slots else 0,
        )
        begin_s = self._clock.now_s()
        ticket = self.runner.launch(step)
        launched = self._bounds.launch(decode.slots_B, decode.most_B(num_drafts)) if decode.slots else None
        ends = [self._computes(sequence, chunk) for sequence, chunk in chosen]
        flight = _Flight(
            ticket=ticket,
            step=step,
            decode=decode.sequences,
            chunks=chosen,
            ends=ends,
            planned=planned,
            launched=launched,
            launched_s=begin_s,
            launch_s=self._clock.now_s() - begin_s,
        )
        self._flights.append(flight)
        self._open.append(flight)
        for sequence, chunk in chosen:
            self._name_blocks_after(ticket, sequence, chunk)
        return True

    def _decode_rows(self) -> _DecodeSet:
        """The sequences of the next step's decode rows: those that have blocks for it."""
        sequences = self.scheduler.decoding()
        if self._decode_set.sequences is not sequences:
            self._decode_set = _DecodeSet(sequences)
        decode = self._decode_set
        if not decode.slots:
            return decode
        decode = decode.where(self._bounds.unfinished(decode.slots_B))
        short = self._bounds.short_of_room(decode.slots_B, decode.room_B) if decode.slots else []
        if short:
            missing = [(decode.sequences[place], wanted_len) for place, wanted_len in short]
            out = set(self._preemption.make_room(missing, len(decode.slots)))
            if out:
                decode = _DecodeSet([item for item in decode.sequences if item not in out])
        return decode

    def _computes(self, sequence: Sequence, chunk: Chunk) -> bool:
        """Record that a chunk was launched; returns whether a new token follows from it."""
        sequence.computing_s = sequence.computing_s or self._clock.now_s()
        sequence.num_computed = chunk.end
        is_last = not sequence.num_left
        if not is_last or sequence.is_pushed:
            return is_last
        if sequence.token_ids:  # the next token is already known
            self._begin_decoding(sequence, sequence.num_tokens)
            return False
        # A grammar must accept the first token before the sequence decodes, which is known only once the step is read.
        if sequence.request.sampling.grammar is None:
            self._begin_decoding(sequence, sequence.num_tokens + 1)
        return True

    def _name_blocks_after(self, ticket: StepTicket, sequence: Sequence, chunk: Chunk) -> None:
        """Register the blocks that a chunk completes for sharing, once every layer of them is written."""
        table = sequence.table
        if sequence.block_hashes and table is not None:
            name_blocks = self.scheduler.name_blocks
            self.after(ticket, lambda: name_blocks(sequence, table, chunk.start, chunk.end, chunk.keep_in))

    def _read(self, *, has_launched: bool) -> None:
        """Read the next due step: the oldest, once another step runs behind it or no step follows."""
        if len(self._flights) <= (self._num_ahead if has_launched else 0):
            if not has_launched and not self._flights:
                self.speculation.pause()
            return
        flight = self._flights.popleft()
        output = flight.ticket.result()
        now_s = self._clock.now_s()
        while self._open and self._open[0].ticket.is_done:
            self._open.popleft()
        self.settle()
        if flight.launched is not None:
            emitted_lens = np.array([len(row.token_ids) for row in output.decode], dtype=np.int64)
            self._bounds.collect(flight.launched, emitted_lens)
        self._learn(flight, output)
        published = self._take_decode(flight, output, now_s)
        published += self._take_chunks(flight, output, now_s)
        self._role.publish(published)
        for item in published:
            if item.reason is not None:
                self.end(item.sequence)
        self._hand_off(flight, output)

    def _take_decode(self, flight: _Flight, output: StepOutput, now_s: float) -> list[Published]:
        published: list[Published] = []
        proposed_lens: list[int] = []
        accepted_lens: list[int] = []
        dropped: list[Dropped] = []
        num_emitted = 0
        for sequence, emitted in zip(flight.decode, output.decode, strict=True):
            if emitted.is_idle and emitted.error is None:
                continue  # its grammar was late; the next step runs it again
            if sequence.phase is not Phase.RUNNING:
                dropped.append(Dropped(Fate.LATE, emitted))  # it ended after this step was launched
                continue
            if emitted.error is not None:
                dropped.append(Dropped(Fate.FAILED, emitted))
                self.end(sequence, emitted.error)
                continue
            item = self._accept(sequence, emitted.token_ids, emitted.logprobs or (), now_s, is_first=False)
            if item is None:
                dropped.append(Dropped(Fate.FAILED, emitted))
                continue
            num_kept = len(item.token_ids)
            num_accepted = min(emitted.accepted_len, num_kept)
            sequence.counts.add_step(num_proposed=emitted.proposed_len, num_accepted=num_accepted, num_emitted=num_kept)
            proposed_lens.append(emitted.proposed_len)
            accepted_lens.append(num_accepted)
            num_emitted += num_kept
            if num_kept < len(emitted.token_ids):
                dropped.append(Dropped(Fate.CUT, emitted, num_kept))
            published.append(item)
        if flight.planned is not None:
            self._count_drafts(flight.planned, published, proposed_lens, accepted_lens)
        if flight.decode:  # counted before it is published
            self.tally.add_step(proposed_lens, accepted_lens, num_emitted, dropped)
        return published

    def _count_drafts(
        self, planned: PlannedStep, published: Items[Published], proposed_lens: list[int], accepted_lens: list[int]
    ) -> None:
        """Count drafts under the method that made them: the step's, or the one that a sequence keeps."""
        if not planned.keeps:
            self.tally.add_drafts(planned.method, 1, sum(proposed_lens), sum(accepted_lens))
            return
        self.tally.add_drafts(planned.method, 1, 0, 0)
        for item, proposed, accepted in zip(published, proposed_lens, accepted_lens, strict=True):
            if proposed:
                self.tally.add_drafts(item.sequence.method or planned.method, 0, proposed, accepted)

    def _count_prompt_tokens(self, sequence: Sequence, chunk: Chunk) -> None:
        """Count a chunk's prompt tokens, less those that were counted before the sequence was preempted."""
        end = min(chunk.end, sequence.request.prompt_len)
        self.num_prompt_tokens += max(0, end - max(chunk.start, sequence.num_counted))
        sequence.num_counted = max(sequence.num_counted, end)

    def _take_chunks(self, flight: _Flight, output: StepOutput, now_s: float) -> list[Published]:
        published: list[Published] = []
        for (sequence, chunk), is_last, made in zip(flight.chunks, flight.ends, output.chunks, strict=True):
            if sequence.phase is not Phase.RUNNING:
                continue
            self._count_prompt_tokens(sequence, chunk)
            if sequence.request.trace is not None:
                sequence.chunks.append((flight.launched_s, now_s, chunk.start, chunk.length))
            if made.error is not None:
                self.end(sequence, made.error)
                continue
            if made.prompt_logprobs and not self._guarded(sequence, made):
                continue
            if not is_last:
                continue
            if made.token is None:  # its grammar was late: the last token is computed again
                assert sequence.table is not None and sequence.table.state_slot is None, "a state took it in already"
                assert not sequence.is_pushed, "a push has it already"
                sequence.num_computed -= 1
                continue
            self.num_prompts += not sequence.token_ids
            sequence.first_token_s = sequence.first_token_s or now_s
            logprobs = () if made.logprobs is None else (made.logprobs,)
            item = self._accept(sequence, (made.token,), logprobs, now_s, is_first=True)
            if item is None:
                continue
            sequence.counts.num_emitted_tokens += 1
            published.append(item)
            if item.reason is None and not (sequence.is_pushed or sequence.is_decoding):
                self._begin_decoding(sequence, sequence.num_tokens)
        return published

    def _guarded(self, sequence: Sequence, made: ChunkOutput) -> bool:
        """Report log-probabilities of the prompt; returns False if that ended the sequence."""
        try:
            self._role.prompt_logprobs(sequence, made.prompt_logprobs)
        except Exception as error:  # noqa: BLE001  what one request's events raise ends that request
            self.end(sequence, as_internal("log-probabilities of a prompt", error))
            return False
        sequence.num_reported += len(made.prompt_logprobs)
        return True

    def _accept(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        now_s: float,
        *,
        is_first: bool,
    ) -> Published | None:
        """Keep those of a step's tokens that belong to the answer; returns None if checking them ended the sequence."""
        try:
            kept, reason = sequence.checker.accept(token_ids)
        except Exception as error:  # noqa: BLE001  it ends only the request whose text was checked
            self.end(sequence, as_internal("a token of a request", error))
            return None
        if not sequence.is_pushed:
            sequence.token_ids += kept
        sequence.last_token_s = now_s
        sequence.finish_reason = reason
        return Published(sequence, tuple(kept), logprobs[: len(kept)], reason, is_first)

    def _hand_off(self, flight: _Flight, output: StepOutput) -> None:
        """Hand off pushed sequences whose prompts are complete; they leave their slots."""
        handed = [
            (sequence, made.token)
            for (sequence, _), is_last, made in zip(flight.chunks, flight.ends, output.chunks, strict=True)
            if is_last and sequence.is_pushed
        ]
        if not handed:
            return
        states = flight.ticket.handoffs()  # waits for the end of the step
        for (sequence, token), state in zip(handed, states, strict=True):
            if sequence.phase is not Phase.RUNNING or token is None:
                continue
            self.execute(Release(_slot(sequence)))
            self.after(None, self.scheduler.send(sequence))
            self._role.hand_off(sequence, token, state)

    def _learn(self, flight: _Flight, output: StepOutput) -> None:
        """Update speculation and the pace estimates with the step's times."""
        if flight.chunks:
            self.speculation.disturb()
        if flight.planned is not None:
            # A row for which the lookup found no draft costs as much: it counts as one whose drafts were rejected.
            num_drafts = flight.planned.num_drafts
            proposed_lens = [min(sequence.draft_cap, num_drafts) for sequence in flight.decode]
            self.speculation.read(flight.planned, proposed_lens, [row.accepted_len for row in output.decode])
        self._untimed.append(flight)
        while self._untimed:
            oldest = self._untimed[0]
            durations = self.runner.meter.durations_s(oldest.ticket.times)
            if durations is None and len(self._untimed) < _MAX_UNTIMED:
                return
            self._untimed.popleft()
            if durations is not None:
                self._timed(oldest, *durations)

    def _timed(self, flight: _Flight, sampled_s: float, total_s: float) -> None:
        num_tokens = sum(chunk.length for _, chunk in flight.chunks)
        if not num_tokens:
            self.budget.decoded(total_s)
            return
        if flight.decode:
            self.budget.mixed(num_tokens, total_s, flight.launch_s)
        full_len = self.budget.full_len(len(flight.decode) * (flight.step.num_drafts + 1))
        self._full_rate.add(num_tokens, total_s, self._clock.now_s(), full_len=full_len)
        # In a mixed step, the chunks' share is the time beyond that of a decode-only step.
        chunks_s = total_s - self.budget.decode_s if flight.decode else total_s
        if chunks_s <= 0:
            return
        self.pace.add(num_tokens, chunks_s, min(total_s - sampled_s, chunks_s))
        self.rate.add(num_tokens, chunks_s)

    def _last_step(self, sequence: Sequence) -> Pending | None:
        for flight in reversed(self._open):
            if flight.runs(sequence):
                return None if flight.ticket.is_done else flight.ticket
        return None


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
