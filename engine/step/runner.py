"""Runs plans: keeps sequences by slot on the device, computes steps, and copies results to the host.

Each rank of a worker has one `Runner`; all ranks get the same plans in the same order (`step.plan`). `step.step`
defines what a step computes. Rank 0's scheduler decides which sequences run, where blocks come from and when a sequence
ends.

The end of a prompt writes first token, draft, hidden state, length and sampling counts into the slot on the device, so
the sequence can decode in the next step before the host has read anything.

Legend: B decode sequences, K draft tokens of a step, F chunks that end with their sequence's newest token, C columns of
a decode row's result, D hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch

from baton.core.clock import Clock
from baton.core.draft_method import DraftMethod
from baton.core.errors import BatonError
from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import AttemptKey
from baton.core.requests.sampling import SamplingParams
from baton.core.start_phase import OnPhase, no_phase
from baton.core.verification import VerificationConfig
from baton.engine.grammar.grammar import GrammarCompiler, GrammarState
from baton.engine.grammar.rows import EmittedTokens, GrammarRows
from baton.engine.graphs.graphed_step import GraphedStep
from baton.engine.graphs.kernel_warm_up import Reach, warm_up_decode, warm_up_prefill
from baton.engine.kv_offload import KVOffload
from baton.engine.sampling.history import SampledSequence
from baton.engine.sampling.logprobs import LOGITS_ROWS, logprobs_of
from baton.engine.speculation.token_history import TokenHistory
from baton.engine.speculation.verifiers import MixedVerifier, verifier_for
from baton.engine.speculation.verify import DraftLaw, Verified, Verifier
from baton.engine.step.batch import ChunkRows, Ints, PrefillInputs, prefill_inputs
from baton.engine.step.batch_rows import StepBatch
from baton.engine.step.counters import mark_idle
from baton.engine.step.dealt_passes import DealtPasses, rank_blocks
from baton.engine.step.executor import Pending, executor_for
from baton.engine.step.host_future import ResultBuffers
from baton.engine.step.meter import StepMeter, StepTimes
from baton.engine.step.passes import EagerPasses, Passes
from baton.engine.step.plan import Chunk, Grow, Load, MoveExperts, Operation, Place, Release, Save, Step
from baton.engine.step.result import HandoffState, ResultLayout, StepTicket
from baton.engine.step.slots import SlotTable
from baton.engine.step.step import DecodeInputs, DecodeSample, Extended, PromptInputs, PromptSample, extend, sample
from baton.engine.tp.decision import Decisions
from baton.engine.tp.expert_exchange import ExpertExchange
from baton.kernels.compile_ahead import compile_ahead
from baton.kernels.copies import host_buffer, to_device
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator

_WORD_BYTES: Final = 8


class StepPush(Protocol):
    """The push of one step's KV to decode workers."""

    def submit(self, layer: int) -> None:
        """Announce that the KV of a pool layer is written, or will be when the current stream gets here."""
        ...

    def close(self) -> None:
        """Announce that no layer follows."""
        ...


OpenPush = Callable[[Sequence[tuple[AttemptKey, int, int]]], StepPush]
"""Opens the push of one step: (attempt, first position, number of positions) of each chunk that is pushed."""


@dataclass(slots=True, kw_only=True)
class _Resident:
    """What the host keeps about a sequence in a slot."""

    token_ids: Ints
    blocks: list[int]
    sampling: SamplingParams
    draft_cap: int
    method: DraftMethod | None
    knows_next: bool
    state_slot: int | None
    owner: int  # the rank that keeps its KV; 0 if all ranks do

    @property
    def next_sampling(self) -> SamplingParams:
        """How the token after its chunks is sampled; a known token is not reported again."""
        return replace(self.sampling, logprobs=None) if self.knows_next else self.sampling


@dataclass(slots=True, kw_only=True)
class _Work:
    """One step on the executor: its inputs, and its results so far."""

    step: Step
    times: StepTimes
    layout: ResultLayout
    batch: StepBatch | None
    redraws: bool
    chunks: tuple[ChunkRows, ...]
    owners: tuple[int, ...]  # of the decode sequences
    sampled_slots: tuple[int, ...]
    sampled_params: tuple[SamplingParams, ...]
    known: frozenset[int]
    push: StepPush | None
    begin_with: tuple[tuple[int, int], ...]  # state slots to copy before the trunk: source, target
    slots_F: torch.Tensor | None = None
    passes: Passes | None = None
    decode: DecodeInputs | None = None
    prompt: PromptInputs | None = None
    sampled: tuple[DecodeSample | None, PromptSample | None] = (None, None)
    extended: tuple[Extended | None, Extended | None] = (None, None)


class Runner:
    """Runs the plans of one worker on one rank, with one model and one pool.

    The caller uses one thread; the work is executed in call order on the runner's executor (`engine.step.executor`).

    Args:
        model: the model; steps run on its device.
        pool: the KV pool, on the same device.
        max_num_seqs: number of slots.
        num_draft_tokens: maximum number of drafts that a step may verify.
        communicator: of the worker's ranks; None with one rank.
        eos_token_ids: tokens that `min_tokens` suppresses besides a request's own stop tokens.
        verification: how drafts are verified; coupled if None.
        lookup: how drafts are looked up in the text so far; None: the model's head makes them. With a lookup and a
            head, each step says which makes its drafts.
        grammars: compiler; needed for sequences with a grammar.
        graphs: CUDA graphs of decode-only steps; None: every step is eager.
        host_kv_bytes: host memory for the KV of preempted sequences (`kv_offload`).
        open_push: needed if sequences are pushed to decode workers.
        clock: times steps on a CPU; None: the process's monotonic clock.

    Raises:
        ConfigInvalid: the verification does not fit the number of drafts.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        max_num_seqs: int,
        num_draft_tokens: int,
        communicator: Communicator | None = None,
        eos_token_ids: Sequence[int] = (),
        verification: VerificationConfig | None = None,
        lookup: PromptLookup | None = None,
        grammars: GrammarCompiler | None = None,
        graphs: GraphedStep | None = None,
        host_kv_bytes: int = 0,
        open_push: OpenPush | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert max_num_seqs >= 1
        self.has_mtp = pool.layout.has_mtp
        assert num_draft_tokens == 0 or self.has_mtp or lookup is not None, "drafts need an MTP layer, or are looked up"
        limits = [layer.max_drafts for layer in pool.layout.layers]
        assert all(most is None or num_draft_tokens <= most for most in limits), "rings are too short for the drafts"
        assert not (self.has_mtp and pool.layout.layers[-1].is_state), "checkpoints are taken before the head runs"
        self.has_lookup = lookup is not None and num_draft_tokens > 0
        self.max_num_seqs = max_num_seqs
        self.num_draft_tokens = num_draft_tokens
        self.hidden_size = model.config.hidden_size
        self.hidden_dtype = model.dtype
        self.max_model_len = model.config.max_model_len
        self.grammars = grammars
        self.graphs = graphs
        self._model = model
        self._pool = pool
        self._blocks = rank_blocks(model, pool)
        assert self._blocks.num_pools == 1 or open_push is None, "what is dealt is not pushed"
        self._communicator = communicator or Alone()
        self._decisions = Decisions(self._communicator, pool.device)
        verification = verification or VerificationConfig()
        of_lookup = verifier_for(model, verification.of_lookup(), num_draft_tokens)
        is_chosen = self.has_mtp and self.has_lookup
        self._verifier = of_lookup if lookup and not is_chosen else verifier_for(model, verification, num_draft_tokens)
        self._of_lookup = of_lookup if lookup else self._verifier
        if self._verifier.draft_law is DraftLaw.SAMPLED:
            model.t2d()  # build it before the first step, not during it
        self._open_push = open_push
        self._residents: dict[int, _Resident] = {}
        self._drafted: set[int] = set()  # slots that have a draft once the launched steps are over
        self._batch: StepBatch | None = None
        self._states: dict[int, GrammarState] = {}  # of slots with a grammar; belongs to the executor
        self._emitted: list[EmittedTokens] = []  # tokens that grammars have not taken yet; belongs to the executor
        self._executor = executor_for(pool.device)
        self.meter = StepMeter(num_draft_tokens, self._executor, pool.device, clock)
        self._buffers = ResultBuffers(max_num_seqs * (num_draft_tokens + 4), pool.device)
        self._table = SlotTable(
            num_slots=max_num_seqs,
            max_blocks=-(-model.config.max_model_len // pool.layout.block_size),
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            eos_token_ids=eos_token_ids,
            dtype=model.dtype,
            device=pool.device,
            vocab=model.vocab,
            history=_history(lookup, max_num_seqs, num_draft_tokens, model),
        )
        self._offload = KVOffload(
            pool, self._blocks, host_kv_bytes, self._executor, self._table, self._communicator, self.meter.interrupt
        )
        self.experts = ExpertExchange.of_model(model, self._communicator, self._executor, self.meter.interrupt)

    @property
    def methods(self) -> tuple[DraftMethod, ...]:
        """Draft methods that this runner has: at least one."""
        has_head = self.has_mtp or not self.has_lookup
        return (*((DraftMethod.HEAD,) if has_head else ()), *((DraftMethod.NGRAM,) if self.has_lookup else ()))

    @property
    def num_pools(self) -> int:
        """Number of KV pools: one per rank if each rank attends for its own sequences, else one (`RankBlocks`)."""
        return self._blocks.num_pools

    @property
    def balancer(self) -> None:
        """None: a single runner moves no experts (`engine.tp.rank_runners`)."""
        return None

    @property
    def num_host_blocks(self) -> int:
        """Number of KV blocks that fit in host memory."""
        return self._offload.num_blocks

    @property
    def num_state_images(self) -> int:
        """Number of state slots that fit in host memory."""
        return self._offload.num_state_images

    def compile_ahead(self, reach: Reach, *, decodes: bool = True, on_phase: OnPhase = no_phase) -> None:
        """Compile on all processors what `warm_up` launches, so that it only has to load the kernels.

        All ranks call this at the same time; graphs may be captured between the two calls. Does nothing on a CPU.
        """
        if self._pool.device.type == "cuda":
            compile_ahead(lambda: self.warm_up(reach, decodes=decodes), self._communicator.size, on_phase)

    def warm_up(self, reach: Reach, *, decodes: bool = True) -> None:
        """Compile every kernel that steps within `reach` launch; all ranks call this together, before the first step.

        `decodes=False`: there will be no decode rows.
        """
        warm_up_prefill(self._model, self._pool, reach)
        if decodes:
            verifiers: list[tuple[Verifier, TokenHistory | None]]
            verifiers = [(self._verifier, None)] if self.has_mtp or not self.has_lookup else []
            verifiers += [(self._of_lookup, self._table.history)] if self.has_lookup else []
            warm_up_decode(self._model, self._pool, reach, verifiers, self.num_draft_tokens)

    def execute(self, operation: Operation) -> Pending | None:
        """Execute an operation between the steps launched before and those launched after this call.

        Returns:
            What must be over before anything but a step writes the blocks that the operation names; None: nothing.
        """
        match operation:
            case Place():
                self._place(operation)
            case Release():
                self._release(operation.slot)
            case Grow():
                self._grow(operation)
            case Save():
                return self._offload.save(operation)
            case Load():
                return self._offload.load(operation)
            case MoveExperts():
                assert self.experts is not None
                return self.experts.move(operation)
        return None

    def launch(self, step: Step) -> StepTicket:
        """Launch one step. Earlier steps need not be over, nor their results read.

        Raises:
            Exception: on CUDA, what the launch raised; on a CPU the ticket raises it.
        """
        assert step.chunks or step.slots
        batch = self._batch_of(step.slots, step.num_drafts, step.method) if step.slots else None
        may_lack = self.has_lookup or self._verifier.draft_law is DraftLaw.LIKELIEST
        redraws = batch is not None and may_lack and batch.num_by_head > 0
        redraws = redraws and not self._drafted.issuperset(step.slots)
        residents = [self._residents[chunk.slot] for chunk in step.chunks]
        chunks = tuple(map(_rows_of, step.chunks, residents))
        sampled = [place for place, chunk in enumerate(chunks) if chunk.is_last]
        layout = self._layout(batch, step.chunks, chunks, residents)
        slots = (*step.slots, *(chunk.slot for chunk in step.chunks))
        same = batch is not None and not step.chunks
        times = self.meter.launch(batch.slots if same and batch else slots, decodes=batch is not None)
        pushed = [(chunk.push, chunk.start, chunk.length) for chunk in step.chunks if chunk.push is not None]
        push = None
        if pushed:
            assert self._open_push is not None
            push = self._open_push(pushed)
        work = _Work(
            step=step,
            times=times,
            layout=layout,
            batch=batch,
            redraws=redraws,
            chunks=chunks,
            owners=tuple(self._residents[slot].owner for slot in step.slots),
            sampled_slots=tuple(step.chunks[place].slot for place in sampled),
            sampled_params=tuple(residents[place].next_sampling for place in sampled),
            known=frozenset(at for at, place in enumerate(sampled) if residents[place].knows_next),
            push=push,
            begin_with=tuple(
                (chunk.begin_with, _state_slot(resident))
                for chunk, resident in zip(step.chunks, residents, strict=True)
                if chunk.begin_with is not None
            ),
        )
        if batch is not None:
            change = self._drafted.update if self._drafts_next(batch) else self._drafted.difference_update
            change(step.slots)
        self._drafted.update(slot for slot in work.sampled_slots if self._keeps_first(self._residents[slot].sampling))
        buffer = self._buffers.take(layout.num_values)
        future = self._executor.submit(lambda: self._sample(work), buffer[: layout.num_values])
        handed = [place for place, chunk in enumerate(sampled) if step.chunks[chunk].push is not None]
        handoffs = None
        if handed:
            target = host_buffer(len(handed) * self._handoff_words, torch.int64, self._pool.device)
            handoffs = self._executor.submit(lambda: self._hand_off(work, handed), target)
        end: Pending = handoffs or self._executor.run(lambda: self._finish(work))

        def on_read(values: torch.Tensor) -> None:
            self._buffers.give_back(buffer)
            if self._communicator.size > 1:
                self._decisions.check(values[: layout.num_ints].tolist())
            self.meter.read(times)

        return StepTicket(
            layout,
            future,
            end,
            errors=lambda: self._grammar_errors(slots),
            on_read=on_read,
            handoffs=handoffs,
            read_handoffs=self._read_handoffs,
            times=times,
        )

    def drain(self) -> None:
        """Wait until no work is running."""
        self._executor.drain()

    def close(self) -> None:
        """Wait for the launched work and end; must be the last call."""
        self._executor.close()

    # Operations

    def _place(self, place: Place) -> None:
        slot, resume = place.slot, place.resume
        assert 0 <= slot < self.max_num_seqs and slot not in self._residents
        assert (place.state_slot is not None) == self._pool.layout.has_state
        limit = self._limit(len(place.blocks))
        assert len(place.token_ids) <= limit
        draft_cap = min(place.draft_cap, self.num_draft_tokens)
        num_prompt = len(place.token_ids) - place.num_output
        output = place.token_ids[num_prompt:]
        sequence = SampledSequence(
            params=place.sampling,
            choice=place.choice,
            prompt_token_ids=place.token_ids[:num_prompt],
            output_token_ids=output[:-1] if place.knows_next else output,  # the step counts the next token
        )
        grammar = None
        if place.sampling.grammar is not None:
            assert self.grammars is not None
            grammar = self.grammars.begin(place.sampling.grammar, output)
        hidden_D = None
        if resume is not None and resume.hidden:
            hidden_D = torch.frombuffer(bytearray(resume.hidden), dtype=self.hidden_dtype)

        def work() -> None:
            self._table.place(
                slot,
                blocks=place.blocks,
                limit=limit,
                null_block=self._blocks.null_block,
                draft_cap=draft_cap,
                state_slot=place.state_slot or 0,
                last_token=place.token_ids[-1],
                length=len(place.token_ids),
                draft_token=0 if resume is None else resume.draft_token or 0,
                hidden_D=hidden_D,
                token_ids=place.token_ids,
            )
            self._table.sampling.place(slot, sequence)
            if grammar is not None:
                self._states[slot] = grammar

        self._executor.run(work)
        self._residents[slot] = _Resident(
            token_ids=np.asarray(place.token_ids, dtype=np.int64),
            blocks=list(place.blocks),
            sampling=place.sampling,
            draft_cap=draft_cap,
            method=place.method,
            knows_next=place.knows_next,
            state_slot=place.state_slot,
            owner=self._blocks.owner(place.blocks),
        )
        if resume is not None and resume.draft_token is not None and self._keeps_first(place.sampling):
            self._drafted.add(slot)
        self.meter.admit(slot)
        self._batch = None

    def _keeps_first(self, sampling: SamplingParams) -> bool:
        """Whether a sequence's first draft, made at its prompt's end, is the one that a decode step would make.

        At a prompt's end a sampled sequence's draft is drawn, not the likeliest.
        """
        return self._verifier.draft_law is not DraftLaw.LIKELIEST or sampling.greedy

    def _release(self, slot: int) -> None:
        del self._residents[slot]
        self._drafted.discard(slot)
        self._batch = None

        def work() -> None:
            self._table.sampling.release(slot)
            self._states.pop(slot, None)

        self._executor.run(work)

    def _grow(self, grow: Grow) -> None:
        for growth in grow.growths:
            blocks = self._residents[growth.slot].blocks
            assert len(blocks) == growth.first
            assert self._blocks.owner(growth.blocks) == self._residents[growth.slot].owner
            blocks += growth.blocks
        limits = [self._limit(growth.first + len(growth.blocks)) for growth in grow.growths]
        self._executor.run(lambda: self._table.grow(grow.growths, limits))

    def _limit(self, num_blocks: int) -> int:
        return min(num_blocks * self._pool.layout.block_size, self.max_model_len)

    # The step, on the executor

    def _sample(self, work: _Work) -> torch.Tensor:
        """Run the step's first part; int64 [layout.num_values], tokens and log-probabilities of every row."""
        self.meter.begin(work.times)
        step, batch = work.step, work.batch
        if batch is not None:
            before, rows = self._table.gather(batch.slots_B, -(-step.max_context_len // self._pool.layout.block_size))
            work.decode = DecodeInputs(
                state=before,
                rows=rows,
                num_drafts=batch.num_drafts,
                keeps_mtp=batch.keeps_mtp,
                sampling=self._table.sampling.rows(batch.slots, batch.sampling),
                grammar=self._grammar_rows(batch.slots, is_alone=not step.chunks),
                history=(self._table.history, batch.slots_B) if self._table.history and batch.num_looked_up else None,
                is_looked_up_B=batch.is_looked_up_B,
                num_by_head=batch.num_by_head if batch.is_looked_up_B is not None else None,
                redraws=work.redraws,
                drafts_next=self._drafts_next(batch),
            )
        if work.chunks:
            slots = work.sampled_slots
            work.slots_F = to_device(torch.tensor(slots, dtype=torch.int64), self._pool.device)
            work.prompt = PromptInputs(
                rows=prefill_inputs(work.chunks, self._pool, self._blocks.null_block),
                sampling=self._table.sampling.rows(slots, work.sampled_params) if slots else None,
                grammar=self._grammar_rows(
                    slots,
                    is_alone=batch is None,
                    known=work.known,
                    # A row whose mask is late is computed again. That is impossible if a recurrent state already
                    # includes the row, or if it is being pushed: the push may be reading the row, and has sent what the
                    # draft head computed from the wrong token.
                    is_patient=self._pool.layout.has_state or work.push is not None,
                ),
            )
        # One step may read and overwrite the same slot: copy all of them first.
        for source, target in work.begin_with:
            self._pool.copy_state(source, target)
        work.sampled = self._sampled(work)
        values = self._write_sample(work)
        self.meter.sampled(work.times)
        return values

    def _sampled(self, work: _Work) -> tuple[DecodeSample | None, PromptSample | None]:
        """Run the trunk and sample the tokens of every row."""
        work.passes = self._passes(work)
        return sample(work.passes, work.decode, work.prompt, self._model, self._verifier_of(work.batch))

    def _verifier_of(self, batch: StepBatch | None) -> Verifier:
        if batch is None or not batch.num_looked_up:
            return self._verifier
        if batch.is_looked_up_B is None or self._verifier.draft_law is not DraftLaw.SAMPLED:
            return self._of_lookup
        return MixedVerifier(self._verifier, self._of_lookup, batch.is_looked_up_B)

    def _drafts_next(self, batch: StepBatch) -> bool:
        """Whether a step leaves a draft for the next one: with a lookup, only if the step uses the head."""
        return not self.has_lookup or batch.num_by_head > 0

    def _extended(self, work: _Work) -> tuple[Extended | None, Extended | None]:
        """Run the MTP head and make the next drafts."""
        assert work.passes is not None
        return extend(work.passes, work.decode, work.sampled[0], work.prompt, work.sampled[1], self._model)

    def _passes(self, work: _Work) -> Passes:
        rows = None if work.decode is None else work.decode.rows
        prompt = None if work.prompt is None else work.prompt.rows
        step = work.step
        if self.graphs is not None and prompt is None:
            assert rows is not None and work.batch is not None
            replayed = self.graphs.passes(rows, work.batch.num_drafts, step.max_context_len, work.owners)
            if replayed is not None:
                return replayed
        if self._blocks.num_pools > 1:
            return DealtPasses(
                self._model, self._pool, self._blocks, rows, work.owners, step.max_context_len, prompt, work.chunks
            )
        on_layer = None if work.push is None else work.push.submit
        if self.graphs is not None and prompt is not None:
            return self.graphs.passes_with_chunks(rows, step.max_context_len, prompt, on_layer)
        return EagerPasses(self._model, self._pool, rows, step.max_context_len, prompt, on_layer)

    def _write_sample(self, work: _Work) -> torch.Tensor:
        """Update the slots, and pack what the host will read."""
        ints: list[torch.Tensor] = []
        bits: list[torch.Tensor] = []
        upon: list[torch.Tensor] = []
        (of_decode, of_prompt), batch = work.sampled, work.batch
        if batch is not None:
            assert of_decode is not None and work.decode is not None
            before, rows, verified = work.decode.state, work.decode.rows, of_decode.verified
            self._table.write_sample(batch.slots_B, of_decode.state.last_token_B, of_decode.state.length_B)
            result_BC = _packed(verified, has_idle=work.decode.grammar is not None)
            tells_proposed = work.layout.tells_proposed
            self.meter.counters.add(
                batch.slots_B, rows.draft_cap_B, batch.num_drafts, result_BC, tells_proposed=tells_proposed
            )
            if self._table.history is not None:
                self._table.history.write(batch.slots_B, before.length_B, verified.token_ids_BQ)
            ints.append(result_BC.flatten())
            bits += _bits(verified)
            upon += [batch.slots_B, before.last_token_B, before.draft_token_B, before.length_B, rows.block_tables_BM]
            if work.decode.grammar is not None:
                self._emitted.append(work.decode.grammar.emitted(verified))
        if work.prompt is not None:
            assert of_prompt is not None
            inputs, verified = work.prompt.rows, of_prompt.verified
            if work.prompt.num_sampled:
                slots_F = work.slots_F
                assert slots_F is not None
                self._table.write_sample(slots_F, verified.token_ids_BQ[:, 0], work.prompt.next_position_F + 1)
                if self._table.history is not None:
                    self._table.history.write(slots_F, work.prompt.next_position_F, verified.token_ids_BQ)
                ints.append(_packed(verified, has_idle=work.prompt.grammar is not None).flatten())
                bits += _bits(verified)
            if work.prompt.grammar is not None:
                self._emitted.append(work.prompt.grammar.emitted(verified))
            bits += self._prompt_logprobs(work, inputs, of_prompt.trunk_TD)
            places = inputs.batch
            upon += [inputs.token_ids_T, places.positions_T, places.slots_T, places.block_tables_BM]
        if self.experts is not None:
            upon.append(self.experts.map_digests_L)
        packed = torch.cat(ints) if ints else torch.zeros(0, dtype=torch.int64, device=self._pool.device)
        decided = self._decisions.agree(packed, upon)
        return torch.cat([decided, *bits]) if bits else decided

    def _finish(self, work: _Work) -> None:
        """Run the step's second part: the MTP head over all rows, which makes the next drafts."""
        of_decode, of_prompt = work.sampled
        if self.has_mtp:
            work.extended = self._extended(work)
        if work.push is not None:
            work.push.close()
        # The edits of drafts use the counts from before the step plus the step's own tokens, so count those after
        # drafting.
        if of_decode is not None and work.batch is not None:
            self._table.sampling.advance(work.batch.slots_B, of_decode.verified)
        if of_prompt is not None and work.prompt is not None and work.prompt.num_sampled:
            assert work.slots_F is not None
            self._table.sampling.advance(work.slots_F, of_prompt.verified)
        next_decode, next_prompt = work.extended
        if next_decode is not None:
            assert work.batch is not None
            self._table.write_draft(work.batch.slots_B, next_decode.draft_token, next_decode.hidden_D)
        if next_prompt is not None:
            assert work.slots_F is not None
            self._table.write_draft(work.slots_F, next_prompt.draft_token, next_prompt.hidden_D)
        self.meter.end(work.times)

    def _hand_off(self, work: _Work, handed: Sequence[int]) -> torch.Tensor:
        """Run the second part; int64, the hand-off state of those of the F sequences that are handed off."""
        self._finish(work)
        _, next_prompt = work.extended
        if next_prompt is None:
            return torch.zeros(len(handed), dtype=torch.int64, device=self._pool.device)
        assert next_prompt.draft_token is not None
        index_X = to_device(torch.tensor(handed, dtype=torch.int64), self._pool.device)
        hidden_XW = next_prompt.hidden_D[index_X].contiguous().view(torch.int64)
        return torch.cat([next_prompt.draft_token[index_X][:, None], hidden_XW], dim=1).flatten()

    @property
    def _handoff_words(self) -> int:
        num_bytes = self.hidden_size * self.hidden_dtype.itemsize if self.has_mtp else 0
        assert num_bytes % _WORD_BYTES == 0
        return 1 + num_bytes // _WORD_BYTES

    def _read_handoffs(self, values: torch.Tensor) -> tuple[HandoffState, ...]:
        rows = values.view(-1, self._handoff_words)
        if not self.has_mtp:
            return tuple(HandoffState(None, b"") for _ in rows)
        return tuple(HandoffState(int(row[0]), row[1:].numpy().tobytes()) for row in rows)

    def _prompt_logprobs(self, work: _Work, inputs: PrefillInputs, trunk_TD: torch.Tensor) -> list[torch.Tensor]:
        """Bits of the log-probabilities that chunks report, one tensor per chunk and up to LOGITS_ROWS rows."""
        found: list[torch.Tensor] = []
        row = 0
        for chunk, (count, num_top) in zip(work.chunks, work.layout.reports, strict=True):
            end = row + chunk.length - chunk.is_last
            for first in range(end - count, end, LOGITS_ROWS) if count else ():
                rows = slice(first, min(first + LOGITS_ROWS, end))
                logits_NV = self._model.logits(trunk_TD[rows])
                packed_NX = logprobs_of(
                    logits_NV,
                    inputs.next_token_ids_T[rows],
                    num_top,
                    self._model.vocab,
                    self._model.sampling_implementation,
                )
                found.append(packed_NX.contiguous().view(torch.int64).flatten())
            row += chunk.length
        return found

    def _grammar_rows(
        self,
        slots: Sequence[int],
        *,
        is_alone: bool,
        known: frozenset[int] = frozenset(),
        is_patient: bool = False,
    ) -> GrammarRows | None:
        """The grammars of the rows, without those whose next token is `known`, because they have already taken it."""
        rows = [(row, slot) for row, slot in enumerate(slots) if row not in known] if self._states else ()
        states = {row: self._states[slot] for row, slot in rows if slot in self._states}
        if not states:
            return None
        is_alone = is_alone and len(states) == len(slots)
        return GrammarRows(
            states, self._pool.device, self._emitted, self._communicator, is_alone=is_alone, is_patient=is_patient
        )

    def _grammar_errors(self, slots: Sequence[int]) -> dict[int, BatonError]:
        """Grammar errors that ended sequences of a sampled step, by their place among its rows."""
        found: dict[int, BatonError] = {}
        for place, slot in enumerate(slots) if self._states else ():
            state = self._states.get(slot)
            if state is not None and state.error is not None:
                found[place] = state.error
        return found

    def _batch_of(self, slots: tuple[int, ...], num_drafts: int, method: DraftMethod | None) -> StepBatch:
        if len(self.methods) == 1:
            [method] = self.methods
        assert method is not None or num_drafts == 0
        batch = self._batch
        is_other = batch is None or batch.slots != slots or batch.max_drafts != num_drafts or batch.method is not method
        if batch is None or is_other:
            residents = [self._residents[slot] for slot in slots]
            batch = self._batch = StepBatch.of(
                slots,
                sampling=tuple(item.sampling for item in residents),
                draft_caps=tuple(item.draft_cap for item in residents),
                methods=tuple(item.method for item in residents),
                num_drafts=num_drafts,
                method=method,
                has_mtp=self.has_mtp,
                vocab_size=self._model.config.vocab_size,
                device=self._pool.device,
            )
        return batch

    def _layout(
        self,
        batch: StepBatch | None,
        plans: Sequence[Chunk],
        chunks: Sequence[ChunkRows],
        residents: Sequence[_Resident],
    ) -> ResultLayout:
        vocab_size = self._model.config.vocab_size

        def capped(num_top: int | None) -> int | None:
            return None if num_top is None else min(num_top, vocab_size)

        return ResultLayout(
            num_drafts=0 if batch is None else batch.num_drafts,
            tells_proposed=batch is not None and batch.num_looked_up > 0,
            proposed_lens=() if batch is None else batch.proposed_lens,
            num_tops=() if batch is None else tuple(map(capped, batch.num_tops)),
            samples=tuple(chunk.is_last for chunk in chunks),
            chunk_tops=tuple(capped(item.next_sampling.logprobs) for item in residents),
            reports=tuple(
                (_num_reported(plan, chunk), capped(item.sampling.prompt_logprobs) or 0)
                for plan, chunk, item in zip(plans, chunks, residents, strict=True)
            ),
        )


def _history(lookup: PromptLookup | None, num_slots: int, num_draft_tokens: int, model: Model) -> TokenHistory | None:
    if lookup is None or num_draft_tokens == 0:
        return None
    form = model.sampling_implementation or Implementation.REFERENCE
    return TokenHistory(lookup, num_slots, model.config.max_model_len, model.device, form)


def _state_slot(resident: _Resident) -> int:
    assert resident.state_slot is not None
    return resident.state_slot


def _rows_of(plan: Chunk, resident: _Resident) -> ChunkRows:
    return ChunkRows(
        token_ids=resident.token_ids,
        start=plan.start,
        length=plan.length,
        blocks=resident.blocks,
        knows_next=resident.knows_next,
        state_slot=resident.state_slot,
        keep_in=plan.keep_in,
    )


def _num_reported(plan: Chunk, chunk: ChunkRows) -> int:
    """Number of prompt tokens whose log-probabilities a chunk reports: each row reports the token after it."""
    if plan.report_from is None:
        return 0
    return max(0, min(chunk.end, len(chunk.token_ids) - 1) - max(chunk.start, plan.report_from - 1))


def _packed(verified: Verified, *, has_idle: bool) -> torch.Tensor:
    """Accepted lengths, tokens, and optionally the number of proposed drafts, [B, C]."""
    told_len_B = verified.accepted_len_B if verified.told_len_B is None else verified.told_len_B
    told_len_B = mark_idle(told_len_B) if has_idle else told_len_B
    columns = [told_len_B[:, None], verified.token_ids_BQ]
    if verified.proposed_len_B is not None:
        columns.append(verified.proposed_len_B[:, None])
    return torch.cat(columns, dim=1)


def _bits(verified: Verified) -> list[torch.Tensor]:
    """Bits of the log-probabilities, if there are any."""
    packed = verified.logprobs_LQX
    return [] if packed is None else [packed.contiguous().view(torch.int64).flatten()]
