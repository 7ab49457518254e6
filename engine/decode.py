"""Runs decode steps: keeps their tensors by slot, sets them off, and makes the one copy to the host.

What a step computes is `decode_step`'s. Who runs, where blocks come from and when a sequence ends is decided by the
caller.

Legend: B sequences, K draft tokens of a step, Q = K + 1 rows.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton.core.clock import Clock
from baton.core.errors import BatonError, ConfigInvalid
from baton.core.sampling import SamplingParams
from baton.core.verification import VerificationConfig
from baton.engine.decision import Decisions
from baton.engine.decode_step import DecodePlan, StepFunction, decode_step
from baton.engine.grammar import GrammarCompiler, GrammarState
from baton.engine.grammar_rows import EmittedTokens, GrammarRows
from baton.engine.graphed_step import GraphedStep
from baton.engine.history import SampledSequence
from baton.engine.host_future import ResultBuffers
from baton.engine.kernel_warm_up import Reach, warm_up_decode
from baton.engine.kv_offload import KVOffload
from baton.engine.lane import lane_for
from baton.engine.length_bounds import LengthBounds
from baton.engine.logprobs import num_packed
from baton.engine.prefill import SequenceStart
from baton.engine.prepare import StepPreparer
from baton.engine.slots import Growth, Room, SlotTable
from baton.engine.step_batch import StepBatch
from baton.engine.step_counters import emitted_lens, mark_idle
from baton.engine.step_meter import StepMeter
from baton.engine.step_ticket import DecodeOutput, StepTicket
from baton.engine.verifiers import verifier_for
from baton.engine.verify import DraftLaw
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator

__all__ = ["DecodeOutput", "DecodePlan", "DecodeRunner", "StepTicket", "decode_step"]


class DecodeRunner:
    """Runs decode steps of one model over one pool, for up to `max_num_sequences` sequences.

    Calls come from one thread; what they set off happens in their order, on the runner's lane (`engine.lane`).

    Args:
        model: its device is where steps run.
        pool: of the same device.
        max_num_sequences: slots.
        num_draft_tokens: drafts a step may ever make; it makes so many until `set_num_drafts` says otherwise.
        communicator: if this is one rank of a group.
        eos_token_ids: what `min_tokens` holds back beside a request's own stop tokens.
        verification: of drafts; coupled if None.
        grammars: sequences with a grammar need it.
        step: what a step computes; `graphs` is the same, if it replays CUDA graphs.
        host_kv_bytes: host memory for the KV of sequences that give way (`kv_offload`).
        prepare_ahead: make what attention needs to verify on a thread (and a stream) of its own, while drafting.
        clock: times steps on a CPU; the process's real one if None.

    Raises:
        ConfigInvalid: the verification does not fit the number of drafts, or graphs are to be prepared ahead.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        max_num_sequences: int,
        num_draft_tokens: int,
        communicator: Communicator | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        verification: VerificationConfig | None = None,
        grammars: GrammarCompiler | None = None,
        step: StepFunction | None = None,
        host_kv_bytes: int = 0,
        prepare_ahead: bool = False,
        clock: Clock | None = None,
    ) -> None:
        assert max_num_sequences >= 1
        assert num_draft_tokens == 0 or pool.layout.num_layers > model.config.num_layers, "drafts need an MTP layer"
        self.max_num_sequences = max_num_sequences
        self.hidden_size = model.config.hidden_size
        self.hidden_dtype = model.dtype
        self.num_draft_tokens = num_draft_tokens
        self._num_drafts = num_draft_tokens
        self.grammars = grammars
        self._states: dict[int, GrammarState] = {}  # of slots with a grammar; belongs to the lane
        self._emitted: EmittedTokens | None = None  # by the step before, where a grammar has not taken it yet
        self._communicator = communicator or Alone()
        self._decisions = Decisions(self._communicator, pool.device)
        self._verifier = verifier_for(model, verification or VerificationConfig(), num_draft_tokens)
        if self._verifier.draft_law is DraftLaw.SAMPLED:
            model.t2d()  # made before the first step, not in it
        self._model = model
        self._pool = pool
        self._step = step or decode_step
        self.graphs = step if isinstance(step, GraphedStep) else None
        if self.graphs is not None and prepare_ahead:
            raise ConfigInvalid("prepare_ahead: with CUDA graphs nothing is left to prepare", keys=["prepare_ahead"])
        self._sampling: dict[int, SamplingParams] = {}  # of occupied slots
        self._draft_caps: dict[int, int] = {}
        self._lengths = LengthBounds(max_num_sequences)
        self._batch: StepBatch | None = None
        self._num_launched = 0
        self._last_step_N = np.zeros(max_num_sequences, dtype=np.int64)
        self._unread: dict[int, StepTicket] = {}
        self._lane = lane_for(pool.device)
        self.meter = StepMeter(num_draft_tokens, self._lane, pool.device, clock)
        self._preparer = StepPreparer(pool, model.around) if prepare_ahead else None
        self._buffers = ResultBuffers(max_num_sequences * (num_draft_tokens + 3), pool.device)
        self._table = SlotTable(
            num_slots=max_num_sequences,
            max_blocks=-(-model.config.max_model_len // pool.layout.block_size),
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            eos_token_ids=eos_token_ids,
            dtype=model.dtype,
            device=pool.device,
            vocab=model.vocab,
        )
        self.kv_offload = KVOffload(
            pool, host_kv_bytes, self._lane, self._table, communicator or Alone(), self.meter.interrupt
        )

    def warm_up(self, reach: Reach) -> None:
        """Compile whatever steps within this reach launch; all ranks at the same time, before the first step."""
        warm_up_decode(self._model, self._pool, reach, self._verifier, self.num_draft_tokens)

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
        """Put a prefilled sequence into a free slot; it takes part in steps launched from now on.

        Args:
            slot: nobody's.
            start: what prefill made.
            prompt_len: positions prefilled.
            sampling: the request's.
            table: its blocks.
            draft_cap: drafts it may use.
            prompt_token_ids: what was prefilled; only a repetition penalty or `output_len` needs it.
            output_len: of those the last that were generated before (a sequence that is computed again).
            choice: which of its request's answers this is.
        """
        assert 0 <= slot < self.max_num_sequences
        assert slot not in self._sampling
        assert self._running_step(slot) is None, "a step that is not over has the slot"
        assert start.prompt_len == prompt_len
        limit = min(table.capacity_len, self._model.config.max_model_len)
        assert prompt_len < limit
        draft_cap = min(draft_cap, self.num_draft_tokens)
        assert draft_cap == 0 or start.draft_token is not None
        slots = self._table
        room = Room(table=table, limit=limit, scratch_block=self._pool.num_blocks, draft_cap=draft_cap)
        num_prompt = len(prompt_token_ids) - output_len
        sequence = SampledSequence(
            params=sampling,
            choice=choice,
            prompt_token_ids=prompt_token_ids[:num_prompt],
            output_token_ids=(*prompt_token_ids[num_prompt:], start.first_token),
        )

        grammar = None
        if sampling.grammar is not None:
            assert self.grammars is not None
            grammar = self.grammars.start(sampling.grammar, sequence.output_token_ids)

        def place() -> None:
            slots.place(
                slot,
                last_token=start.first_token,
                draft_token=start.draft_token or 0,
                hidden_D=start.hidden_D,
                length=prompt_len + 1,
                room=room,
            )
            slots.sampling.place(slot, sequence)
            if grammar is not None:
                self._states[slot] = grammar

        self._lane.run(place)
        end, max_len = prompt_len - output_len + sampling.max_tokens, self._model.config.max_model_len
        self._lengths.admit(slot, prompt_len + 1, limit=limit, end=end, max_len=max_len)
        self._sampling[slot] = sampling
        self._draft_caps[slot] = draft_cap
        self.meter.admit(slot)
        self._batch = None

    def release(self, slot: int) -> StepTicket | None:
        """Forget a sequence: no later step runs it.

        Returns:
            The last step that has it, if that is not over: until it is, the slot is taken, and its blocks are read
            and written.
        """
        del self._sampling[slot], self._draft_caps[slot]
        self._batch = None

        def leave() -> None:
            self._table.sampling.release(slot)
            self._states.pop(slot, None)

        self._lane.run(leave)
        return self._running_step(slot)

    def short_of_room(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(slot, positions) of those whose block tables must `grow` to so many before they are launched again.

        It is enough for any number of drafts that they may use: k may rise before the launch.
        """
        batch = self._batch_of(slots)
        short = self._lengths.short_of_room(batch.host_slots_B, batch.room_B)
        return [(batch.slots[place], wanted_len) for place, wanted_len in short]

    def grow(self, growths: Sequence[Growth]) -> None:
        """Give running sequences more blocks; steps launched from now on have them."""
        block_size, max_model_len = self._pool.layout.block_size, self._model.config.max_model_len
        limits = [min((item.first + len(item.blocks)) * block_size, max_model_len) for item in growths]
        for growth, limit in zip(growths, limits, strict=True):
            self._lengths.grow(growth.slot, limit)
        self._lane.run(lambda: self._table.grow(growths, limits))

    def set_num_drafts(self, num_drafts: int) -> None:
        """Steps launched from now on make at most this many drafts, 0 to `num_draft_tokens`.

        With 0 a step of sequences that may draft still runs the MTP head over what it emits, so that later drafts are
        as good as if there had been some all the time.
        """
        assert 0 <= num_drafts <= self.num_draft_tokens
        if num_drafts != self._num_drafts:
            self._num_drafts = num_drafts
            self._batch = None  # what it says of drafts is another now

    def draft_caps(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Drafts that each of these sequences may use, however many are made now."""
        return self._batch_of(slots).draft_caps

    def unfinished(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Those of `slots` that may need another step, as far as can be said before all results are read.

        The others are at their `max_tokens`, or their room, even if every step in flight emits one token.
        """
        if not slots:
            return ()
        batch = self._batch_of(slots)
        may_go_on_B = self._lengths.unfinished(batch.host_slots_B)
        if may_go_on_B.all():
            return batch.slots
        return tuple(slot for slot, may_go_on in zip(batch.slots, may_go_on_B.tolist(), strict=True) if may_go_on)

    def step(self, slots: Sequence[int]) -> DecodeOutput:
        """Decode every sequence in `slots` by one step, and wait for what it made."""
        return self.launch(slots).result()

    def max_context_len(self, slots: Sequence[int]) -> int:
        """What `launch` would bound the positions of these slots by now; it depends on which results were read."""
        batch = self._batch_of(slots)
        return self._lengths.max_context_len(batch.host_slots_B, batch.num_drafts)

    def launch(self, slots: Sequence[int], max_context_len: int | None = None) -> StepTicket:
        """Set off one step of every sequence in `slots`. Earlier steps need not be over, nor their results read.

        Args:
            slots: that take part.
            max_context_len: another rank's, so that all ranks compute the same shapes; its own if None.

        Raises:
            Exception: on CUDA, what setting it off raised; on a CPU the ticket does.
        """
        if not slots:
            return StepTicket((), (), None, None)
        batch = self._batch_of(slots)
        num_drafts = batch.num_drafts
        if max_context_len is None:
            max_context_len = self._lengths.max_context_len(batch.host_slots_B, num_drafts)
        bound = max_context_len
        # The next draft goes along only to be compared.
        num_columns = num_drafts + 3
        num_values = len(batch.slots) * num_columns + batch.num_reporting * (num_drafts + 1) * num_packed(batch.num_top)
        buffer = self._buffers.take(num_values)
        times = self.meter.launch(batch.slots)
        future = self._lane.submit(lambda: self.meter.run(times, self._run, batch, bound), buffer[:num_values])
        launched = self._lengths.launch(batch.host_slots_B, batch.most_B)
        self._num_launched += 1
        number = self._num_launched

        def on_read(accepted_lens: tuple[int, ...]) -> None:
            self._buffers.give_back(buffer)
            self._decisions.check(accepted_lens)
            self.meter.read(times)
            self._lengths.collect(launched, emitted_lens(accepted_lens))
            del self._unread[number]

        ticket = StepTicket(
            batch.slots,
            batch.proposed_lens,
            future,
            on_read,
            num_columns,
            batch.num_tops,
            lambda: self._grammar_errors(batch),
        )
        self._last_step_N[batch.host_slots_B] = number
        self._unread[number] = ticket
        return ticket

    def in_order(self, work: Callable[[], None]) -> None:
        """Have `work` done between the steps launched before and those launched after this call."""
        self._lane.run(work)

    def drain(self) -> None:
        """Wait until no step is running."""
        self._lane.drain()

    def close(self) -> None:
        """Wait for what was launched, and end; the last call."""
        self._lane.close()
        if self._preparer is not None:
            self._preparer.close()

    def _run(self, batch: StepBatch, max_context_len: int) -> torch.Tensor:
        """The step, in its turn on the lane; int64 [B * (K + 3)], and behind it the bits of log-probabilities."""
        grammar = self._grammar_rows(batch)
        plan = DecodePlan(
            num_drafts=batch.num_drafts,
            keeps_mtp=batch.keeps_mtp,
            max_context_len=max_context_len,
            sampling=self._table.sampling.rows(batch.slots, batch.sampling),
            grammar=grammar,
        )
        num_blocks = -(-max_context_len // self._pool.layout.block_size)
        before, rows = self._table.gather(batch.slots_B, num_blocks)
        state, verified = self._step(before, rows, plan, self._model, self._pool, self._verifier, self._preparer)
        self._table.scatter(batch.slots_B, state)
        self._table.sampling.advance(batch.slots_B, verified)
        accepted_len_B = verified.accepted_len_B if grammar is None else mark_idle(verified.accepted_len_B)
        columns = [accepted_len_B[:, None], verified.token_ids_BQ, state.draft_token_B[:, None]]
        result_BC = torch.cat(columns, dim=1)
        self.meter.counters.add(batch.slots_B, rows.draft_cap_B, batch.num_drafts, result_BC)
        if grammar is not None:
            self._emitted = grammar.emitted(verified)
        upon = [batch.slots_B, before.last_token_B, before.draft_token_B, before.length_B, rows.block_tables_BM]
        decided = self._decisions.agree(result_BC, upon).flatten()
        if verified.logprobs_LQX is None:
            return decided
        return torch.cat([decided, verified.logprobs_LQX.contiguous().view(torch.int64).flatten()])

    def _grammar_rows(self, batch: StepBatch) -> GrammarRows | None:
        rows = enumerate(batch.slots) if self._states else ()
        states = {row: self._states[slot] for row, slot in rows if slot in self._states}
        if not states:
            return None
        emitted, self._emitted = self._emitted, None
        alone = len(states) == len(batch.slots)
        return GrammarRows(states, self._pool.device, emitted, self._communicator, is_alone=alone)

    def _grammar_errors(self, batch: StepBatch) -> dict[int, BatonError]:
        """What ended sequences of a step that is over, by their place in it."""
        found: dict[int, BatonError] = {}
        for row, slot in enumerate(batch.slots) if self._states else ():
            state = self._states.get(slot)
            if state is not None and state.error is not None:
                found[row] = state.error
        return found

    def _batch_of(self, slots: Sequence[int]) -> StepBatch:
        slots = tuple(slots)
        if self._batch is None or self._batch.slots != slots:
            self._batch = StepBatch.of(
                slots,
                sampling=tuple(self._sampling[slot] for slot in slots),
                draft_caps=tuple(self._draft_caps[slot] for slot in slots),
                num_drafts=self._num_drafts,
                vocab_size=self._model.config.vocab_size,
                device=self._pool.device,
            )
        return self._batch

    def _running_step(self, slot: int) -> StepTicket | None:
        """The last step that has the slot; None if it is over."""
        ticket = self._unread.get(int(self._last_step_N[slot]))
        return None if ticket is None or ticket.is_done else ticket
