"""The decode step: draft, verify, accept, and the MTP pass over what was accepted.

`decode_step` is a pure function of tensors (beside the KV it writes); `DecodeRunner` keeps those tensors by slot, sets
steps off and makes the one copy to the host. Who runs, where blocks come from and when a sequence ends is decided by
the caller.

A sequence t_0 ... t_{L-1} is decoded from: trunk KV of 0 ... L-2, MTP KV of entries 0 ... L-2, the last token t_{L-1},
and the draft for position L with the MTP output of entry L-2 that made it. KV of rejected drafts stays in the pool;
no row's positions reach it before the next step has overwritten it.

Legend: B sequences, K draft tokens of this step, Q = K + 1 rows, V vocabulary, D hidden size, S sampled sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.core.sampling import SamplingParams
from baton.engine.batch import DecodeRows, decode_batch
from baton.engine.host_future import ResultBuffers
from baton.engine.lane import lane_for
from baton.engine.length_bounds import Ints, LengthBounds
from baton.engine.plan import decide
from baton.engine.prefill import SequenceStart
from baton.engine.prepare import StepPreparer
from baton.engine.sampler import SamplingRows, choose, draw_noise
from baton.engine.slots import DecodeState, SlotTable
from baton.engine.step_ticket import DecodeOutput, StepTicket
from baton.engine.verify import DraftIds, Verified, verify_coupled
from baton.kernels.copies import to_device
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator

__all__ = ["DecodeOutput", "DecodePlan", "DecodeRunner", "StepTicket", "decode_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """What the host decides about a step.

    Attributes:
        num_drafts: K; 0 is a plain step that leaves the MTP head alone.
        max_context_len: bound of every row's position + 1.
        sampling: the sampled sequences, None if all are greedy.
    """

    num_drafts: int
    max_context_len: int
    sampling: SamplingRows | None


def decode_step(
    state: DecodeState,
    rows: DecodeRows,
    plan: DecodePlan,
    model: Model,
    pool: KVPool,
    preparer: StepPreparer | None = None,
) -> tuple[DecodeState, Verified]:
    """One step of every sequence: at least one token each, at most K + 1.

    With a `preparer`, what attention needs to verify is made by it while drafts are made here.
    """
    num_drafts = plan.num_drafts
    first_B, num_rows = state.length_B - 1, num_drafts + 1
    ticket = None if preparer is None else preparer.launch(first_B, num_rows, rows, plan.max_context_len)
    # One draw for every position this step may choose a token for: drafts, verification and the next draft share it.
    num_positions = num_drafts + 2 if num_drafts else 1
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    noise_SPV = draw_noise(plan.sampling, state.length_B, num_positions, model.config.vocab_size, dtype)
    drafts = _draft(state, rows, plan, noise_SPV, model, pool)
    if preparer is None or ticket is None:
        batch = decode_batch(first_B, num_rows, rows, plan.max_context_len, pool)
    else:
        batch = preparer.open(ticket.result())
    token_ids_BQ = torch.cat([state.last_token_B[:, None], drafts.ids_BK], dim=1)
    trunk_TD = model.trunk(token_ids_BQ.flatten(), batch, pool, _ignore_layer)
    logits_BQV = model.logits(trunk_TD).reshape(*token_ids_BQ.shape, -1)
    noise_SQV = None if noise_SPV is None else noise_SPV[:, : num_drafts + 1]
    verified = verify_coupled(drafts, logits_BQV, plan.sampling, noise_SQV, rows.draft_cap_B)
    accepted_B1 = verified.accepted_len_B[:, None]
    state = replace(
        state,
        last_token_B=verified.token_ids_BQ.gather(1, accepted_B1)[:, 0],
        length_B=state.length_B + verified.accepted_len_B + 1,
    )
    if num_drafts == 0:
        return state, verified
    # Entries L-1 ... L-1+K again, now from the trunk's own hidden; the row of the last emitted token makes the draft.
    mtp_TD = model.mtp(verified.token_ids_BQ.flatten(), trunk_TD, batch, pool, _ignore_layer)
    sequence_B = torch.arange(token_ids_BQ.shape[0], device=mtp_TD.device)
    hidden_BD = mtp_TD.reshape(*token_ids_BQ.shape, -1)[sequence_B, verified.accepted_len_B]
    noise_S1V = None
    if noise_SPV is not None and plan.sampling is not None:
        position_S = verified.accepted_len_B[plan.sampling.index_S] + 1
        noise_S1V = noise_SPV[torch.arange(len(position_S), device=mtp_TD.device), position_S][:, None]
    draft_token_B = choose(model.logits(hidden_BD)[:, None], plan.sampling, noise_S1V)[:, 0]
    return replace(state, draft_token_B=draft_token_B, hidden_BD=hidden_BD), verified


def _draft(
    state: DecodeState,
    rows: DecodeRows,
    plan: DecodePlan,
    noise_SPV: torch.Tensor | None,
    model: Model,
    pool: KVPool,
) -> DraftIds:
    """Extend the draft in hand to K tokens, the MTP head feeding on its own output."""
    if plan.num_drafts == 0:
        return DraftIds(state.last_token_B.new_empty(len(state.last_token_B), 0))
    token_ids = [state.draft_token_B]
    hidden_BD = state.hidden_BD
    for step in range(1, plan.num_drafts):
        batch = decode_batch(state.length_B - 2 + step, 1, rows, plan.max_context_len, pool)
        hidden_BD = model.mtp(token_ids[-1], hidden_BD, batch, pool, _ignore_layer)
        noise_S1V = None if noise_SPV is None else noise_SPV[:, step : step + 1]
        token_ids.append(choose(model.logits(hidden_BD)[:, None], plan.sampling, noise_S1V)[:, 0])
    return DraftIds(torch.stack(token_ids, dim=1))


def _ignore_layer(layer: int) -> None:
    """Nobody waits for a decode step's layers."""


StepFunction = Callable[
    [DecodeState, DecodeRows, DecodePlan, Model, KVPool, StepPreparer | None], tuple[DecodeState, Verified]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Which sequences a step runs: kept, on the host and on the device, while the next step runs the same."""

    slots: tuple[int, ...]
    slots_B: torch.Tensor
    host_slots_B: Ints
    sampling: tuple[SamplingParams, ...]
    draft_caps: tuple[int, ...]
    most_B: Ints  # tokens each may emit
    num_drafts: int


class DecodeRunner:
    """Runs decode steps of one model over one pool, for up to `max_num_sequences` sequences.

    Calls come from one thread; what they set off happens in their order, on the runner's lane (`engine.lane`).

    Args:
        model: its device is where steps run.
        pool: of the same device.
        max_num_sequences: slots.
        num_draft_tokens: drafts a step may make.
        communicator: if this is one rank of a group.
        step: what a step computes.
        prepare_ahead: make what attention needs to verify on a thread (and a stream) of its own, while drafting.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        max_num_sequences: int,
        num_draft_tokens: int,
        communicator: Communicator | None = None,
        *,
        step: StepFunction | None = None,
        prepare_ahead: bool = False,
    ) -> None:
        assert max_num_sequences >= 1
        assert num_draft_tokens == 0 or pool.layout.num_layers > model.config.num_layers, "drafts need an MTP layer"
        self.max_num_sequences = max_num_sequences
        self.hidden_size = model.config.hidden_size
        self.num_draft_tokens = num_draft_tokens
        self._communicator = communicator or Alone()
        self._model = model
        self._pool = pool
        self._step = step or decode_step
        self._sampling: dict[int, SamplingParams] = {}  # of occupied slots
        self._draft_caps: dict[int, int] = {}
        self._lengths = LengthBounds(max_num_sequences)
        self._batch: _Batch | None = None
        self._num_launched = 0
        self._last_step_N = np.zeros(max_num_sequences, dtype=np.int64)
        self._unread: dict[int, StepTicket] = {}
        self._lane = lane_for(pool.device)
        self._preparer = StepPreparer(pool) if prepare_ahead else None
        self._buffers = ResultBuffers(max_num_sequences * (num_draft_tokens + 3), pool.device)
        self._table = SlotTable(
            num_slots=max_num_sequences,
            max_blocks=-(-model.config.max_model_len // pool.layout.block_size),
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=pool.device,
        )

    def admit(
        self,
        slot: int,
        start: SequenceStart,
        prompt_len: int,
        sampling: SamplingParams,
        table: BlockTable,
        draft_cap: int,
    ) -> None:
        """Put a prefilled sequence into a free slot; it takes part in steps launched from now on."""
        assert 0 <= slot < self.max_num_sequences
        assert slot not in self._sampling
        assert self._running_step(slot) is None, "a step that is not over has the slot"
        assert start.prompt_len == prompt_len
        limit = min(table.capacity_len, self._model.config.max_model_len)
        assert prompt_len < limit
        draft_cap = min(draft_cap, self.num_draft_tokens)
        assert draft_cap == 0 or start.draft_token is not None
        slots, scratch_block = self._table, self._pool.num_blocks

        def place() -> None:
            slots.place(
                slot,
                last_token=start.first_token,
                draft_token=start.draft_token or 0,
                hidden_D=start.hidden_D,
                length=prompt_len + 1,
            )
            slots.configure(
                slot, table=table, limit=limit, scratch_block=scratch_block, draft_cap=draft_cap, sampling=sampling
            )

        self._lane.run(place)
        self._lengths.admit(slot, prompt_len + 1, limit=limit, end=prompt_len + sampling.max_tokens)
        self._sampling[slot] = sampling
        self._draft_caps[slot] = draft_cap
        self._batch = None

    def release(self, slot: int) -> StepTicket | None:
        """Forget a sequence: no later step runs it.

        Returns:
            The last step that has it, if that is not over: until it is, the slot is taken, and its blocks are read
            and written.
        """
        del self._sampling[slot], self._draft_caps[slot]
        self._batch = None
        return self._running_step(slot)

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

    def launch(self, slots: Sequence[int]) -> StepTicket:
        """Set off one step of every sequence in `slots`. Earlier steps need not be over, nor their results read.

        Raises:
            Exception: on CUDA, what setting it off raised; on a CPU the ticket does.
        """
        if not slots:
            return StepTicket((), (), None, None)
        batch = self._batch_of(slots)
        num_drafts = batch.num_drafts
        max_context_len = self._lengths.max_context_len(batch.host_slots_B, num_drafts)
        # The next draft goes along only to be compared.
        shape = (len(batch.slots), num_drafts + 3)
        buffer = self._buffers.take()
        target = buffer[: shape[0] * shape[1]].view(shape)
        future = self._lane.submit(lambda: self._run(batch, max_context_len), target)
        launched = self._lengths.launch(batch.host_slots_B, batch.most_B)
        self._num_launched += 1
        number = self._num_launched

        def on_read(accepted_lens: tuple[int, ...]) -> None:
            self._buffers.give_back(buffer)
            self._lengths.collect(launched, np.array(accepted_lens, dtype=np.int64) + 1)
            del self._unread[number]

        ticket = StepTicket(batch.slots, batch.draft_caps, future, on_read)
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

    def _run(self, batch: _Batch, max_context_len: int) -> torch.Tensor:
        """The step, in its turn on the lane."""
        plan = DecodePlan(
            num_drafts=batch.num_drafts,
            max_context_len=max_context_len,
            sampling=self._table.sampling_rows(batch.slots, batch.sampling),
        )
        num_blocks = -(-max_context_len // self._pool.layout.block_size)
        state, rows = self._table.gather(batch.slots_B, num_blocks)
        state, verified = self._step(state, rows, plan, self._model, self._pool, self._preparer)
        self._table.scatter(batch.slots_B, state)
        columns = [verified.accepted_len_B[:, None], verified.token_ids_BQ, state.draft_token_B[:, None]]
        return decide(self._communicator, torch.cat(columns, dim=1))

    def _batch_of(self, slots: Sequence[int]) -> _Batch:
        slots = tuple(slots)
        if self._batch is None or self._batch.slots != slots:
            assert len(set(slots)) == len(slots)
            draft_caps = tuple(self._draft_caps[slot] for slot in slots)
            self._batch = _Batch(
                slots=slots,
                slots_B=to_device(torch.tensor(slots, dtype=torch.int64), self._pool.device),
                host_slots_B=np.array(slots, dtype=np.int64),
                sampling=tuple(self._sampling[slot] for slot in slots),
                draft_caps=draft_caps,
                most_B=np.array(draft_caps, dtype=np.int64) + 1,
                num_drafts=max(draft_caps, default=0),
            )
        return self._batch

    def _running_step(self, slot: int) -> StepTicket | None:
        """The last step that has the slot; None if it is over."""
        ticket = self._unread.get(int(self._last_step_N[slot]))
        return None if ticket is None or ticket.is_done else ticket
