"""The decode step: draft, verify, accept, and the MTP pass over what was accepted.

`decode_step` is a pure function of tensors (beside the KV it writes); `DecodeRunner` keeps those tensors by slot and
makes the one copy to the host. Who runs, where blocks come from and when a sequence ends is decided by the caller.

A sequence t_0 ... t_{L-1} is decoded from: trunk KV of 0 ... L-2, MTP KV of entries 0 ... L-2, the last token t_{L-1},
and the draft for position L with the MTP output of entry L-2 that made it. KV of rejected drafts stays in the pool;
no row's positions reach it before the next step has overwritten it.

Legend: B sequences, K draft tokens of this step, Q = K + 1 rows, V vocabulary, D hidden size, S sampled sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from baton.core.errors import BatonError
from baton.core.sampling import SamplingParams
from baton.engine.batch import DecodeRows, decode_batch
from baton.engine.grammar import GrammarCompiler, GrammarState
from baton.engine.grammar_rows import GrammarRows
from baton.engine.plan import decide
from baton.engine.prefill import SequenceStart
from baton.engine.sampler import SamplingRows, choose, draw_noise
from baton.engine.slots import DecodeState, SlotTable
from baton.engine.verify import DraftIds, Verified, verify_coupled
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """What the host decides about a step.

    Attributes:
        num_drafts: K; 0 is a plain step that leaves the MTP head alone.
        max_context_len: bound of every row's position + 1.
        sampling: the sampled sequences, None if all are greedy.
        grammar: the sequences that have a grammar, None if none has. It sees the drafts on the host and masks logits.
    """

    num_drafts: int
    max_context_len: int
    sampling: SamplingRows | None
    grammar: GrammarRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """The tokens of one step, on the host, in the order of the slots that were run.

    Attributes:
        token_ids: emitted tokens of each sequence, accepted_len + 1 of them.
        accepted_lens: drafts accepted.
        proposed_lens: drafts that could have been.
        errors: what ended a sequence, by its place; its tokens of this step are none.
    """

    token_ids: tuple[tuple[int, ...], ...]
    accepted_lens: tuple[int, ...]
    proposed_lens: tuple[int, ...]
    errors: Mapping[int, BatonError] = field(default_factory=dict[int, BatonError])


def decode_step(
    state: DecodeState, rows: DecodeRows, plan: DecodePlan, model: Model, pool: KVPool
) -> tuple[DecodeState, Verified]:
    """One step of every sequence: at least one token each, at most K + 1."""
    num_drafts = plan.num_drafts
    # One draw for every position this step may choose a token for: drafts, verification and the next draft share it.
    num_positions = num_drafts + 2 if num_drafts else 1
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    noise_SPV = draw_noise(plan.sampling, state.length_B, num_positions, model.config.vocab_size, dtype)
    drafts = _draft(state, rows, plan, noise_SPV, model, pool)
    if plan.grammar is not None:
        plan.grammar.take(drafts.ids_BK)
    batch = decode_batch(state.length_B - 1, num_drafts + 1, rows, plan.max_context_len, pool)
    token_ids_BQ = torch.cat([state.last_token_B[:, None], drafts.ids_BK], dim=1)
    trunk_TD = model.trunk(token_ids_BQ.flatten(), batch, pool, _ignore_layer)
    logits_BQV = model.logits(trunk_TD).reshape(*token_ids_BQ.shape, -1)
    draft_cap_B = rows.draft_cap_B
    if plan.grammar is not None:
        masks = plan.grammar.masks()
        logits_BQV, draft_cap_B = masks.apply(logits_BQV), masks.cap(draft_cap_B)
    noise_SQV = None if noise_SPV is None else noise_SPV[:, : num_drafts + 1]
    verified = verify_coupled(drafts, logits_BQV, plan.sampling, noise_SQV, draft_cap_B)
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


@dataclass(slots=True)
class _Running:
    """What the host knows about an occupied slot."""

    sampling: SamplingParams
    length: int
    limit: int
    draft_cap: int
    grammar: GrammarState | None


class DecodeRunner:
    """Runs decode steps of one model over one pool, for up to `max_num_sequences` sequences.

    As one rank of a group if there is a `communicator`; sequences with a grammar need `grammars`.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        max_num_sequences: int,
        num_draft_tokens: int,
        communicator: Communicator | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        assert max_num_sequences >= 1
        assert num_draft_tokens == 0 or pool.layout.num_layers > model.config.num_layers, "drafts need an MTP layer"
        self.max_num_sequences = max_num_sequences
        self.hidden_size = model.config.hidden_size
        self.num_draft_tokens = num_draft_tokens
        self._communicator = communicator or Alone()
        self.grammars = grammars
        self._model = model
        self._pool = pool
        self._running: dict[int, _Running] = {}
        self._table = SlotTable(
            num_slots=max_num_sequences,
            max_blocks=-(-model.config.max_model_len // pool.layout.block_size),
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=pool.device,
        )

    @torch.inference_mode()
    def admit(
        self,
        slot: int,
        start: SequenceStart,
        prompt_len: int,
        sampling: SamplingParams,
        table: BlockTable,
        draft_cap: int,
    ) -> None:
        """Put a prefilled sequence into a free slot; it takes part in steps from now on."""
        assert 0 <= slot < self.max_num_sequences
        assert slot not in self._running
        assert start.prompt_len == prompt_len
        limit = min(table.capacity_len, self._model.config.max_model_len)
        assert prompt_len < limit
        draft_cap = min(draft_cap, self.num_draft_tokens)
        assert draft_cap == 0 or start.draft_token is not None
        self._table.place(
            slot,
            last_token=start.first_token,
            draft_token=start.draft_token or 0,
            hidden_D=start.hidden_D,
            length=prompt_len + 1,
        )
        scratch_block = self._pool.num_blocks
        self._table.configure(
            slot, table=table, limit=limit, scratch_block=scratch_block, draft_cap=draft_cap, sampling=sampling
        )
        grammar = None
        if sampling.grammar is not None:
            assert self.grammars is not None
            grammar = self.grammars.start(sampling.grammar, [start.first_token])
        self._running[slot] = _Running(sampling, prompt_len + 1, limit, draft_cap, grammar)

    def release(self, slot: int) -> None:
        """Forget a sequence; its blocks are the caller's to free."""
        del self._running[slot]

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> DecodeOutput:
        """Decode every sequence in `slots` by one step."""
        assert len(set(slots)) == len(slots)
        if not slots:
            return DecodeOutput(token_ids=(), accepted_lens=(), proposed_lens=())
        running = [self._running[slot] for slot in slots]
        # Past its room a sequence would write to the scratch block and read back nothing: never a wrong token instead.
        assert all(item.length <= item.limit for item in running)
        num_drafts = max(item.draft_cap for item in running)
        max_context_len = max(min(item.length + num_drafts, item.limit) for item in running)
        plan = DecodePlan(
            num_drafts=num_drafts,
            max_context_len=max_context_len,
            sampling=self._table.sampling_rows(slots, [item.sampling for item in running]),
            grammar=self._grammar_rows(running),
        )
        slots_B = torch.tensor(slots, dtype=torch.int64).to(self._pool.device)
        num_blocks = -(-max_context_len // self._pool.layout.block_size)
        state, rows = self._table.gather(slots_B, num_blocks)
        state, verified = decode_step(state, rows, plan, self._model, self._pool)
        self._table.scatter(slots_B, state)
        # The next draft goes along only to be compared.
        columns = [verified.accepted_len_B[:, None], verified.token_ids_BQ, state.draft_token_B[:, None]]
        packed = decide(self._communicator, torch.cat(columns, dim=1)).tolist()
        errors: dict[int, BatonError] = {}
        for row, (item, (accepted_len, *token_ids)) in enumerate(zip(running, packed, strict=True)):
            item.length += accepted_len + 1
            if item.grammar is not None:
                item.grammar.accept(token_ids[: accepted_len + 1])
                if item.grammar.error is not None:
                    errors[row] = item.grammar.error
        return DecodeOutput(
            token_ids=tuple(tuple(token_ids[: accepted_len + 1]) for accepted_len, *token_ids in packed),
            accepted_lens=tuple(accepted_len for accepted_len, *_ in packed),
            proposed_lens=tuple(item.draft_cap for item in running),
            errors=errors,
        )

    def _grammar_rows(self, running: Sequence[_Running]) -> GrammarRows | None:
        states = {row: item.grammar for row, item in enumerate(running) if item.grammar is not None}
        return GrammarRows(states, self._pool.device) if states else None
