"""The decode step: draft, verify, accept, and the MTP pass over what was accepted.

`decode_step` is a pure function of tensors (beside the KV it writes); `DecodeRunner` keeps those tensors by slot and
makes the one copy to the host. Who runs, where blocks come from and when a sequence ends is decided by the caller.

A sequence t_0 ... t_{L-1} is decoded from: trunk KV of 0 ... L-2, MTP KV of entries 0 ... L-2, the last token t_{L-1},
and the draft for position L with the MTP output of entry L-2 that made it. KV of rejected drafts stays in the pool;
no row's positions reach it before the next step has overwritten it.

Legend: B sequences, K draft tokens of this step, Q = K + 1 rows, V vocabulary, D hidden size, S sampled sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.core.logprobs import TokenLogprobs
from baton.core.sampling import SamplingParams
from baton.core.verification import VerificationConfig
from baton.engine.batch import DecodeRows, decode_batch
from baton.engine.drafting import Drafted, DraftSource, stack_probs
from baton.engine.history import Lookahead, SampledSequence
from baton.engine.logprobs import step_logprobs, unpack_step
from baton.engine.plan import decide
from baton.engine.prefill import SequenceStart
from baton.engine.sampler import SamplingRows, looks_ahead
from baton.engine.slots import DecodeState, SlotTable
from baton.engine.verifiers import make_verifier
from baton.engine.verify import DraftIds, DraftLaw, DraftProbs, Verified, Verifier, VerifyInputs
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
        sampling: what sequences ask beyond the likeliest token, None if all are greedy and plain.
    """

    num_drafts: int
    max_context_len: int
    sampling: SamplingRows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """The tokens of one step, on the host, in the order of the slots that were run.

    Attributes:
        token_ids: emitted tokens of each sequence, accepted_len + 1 of them.
        accepted_lens: drafts accepted.
        proposed_lens: drafts that could have been.
        logprobs: of each sequence's emitted tokens, None where it reports none; None if no sequence does.
    """

    token_ids: tuple[tuple[int, ...], ...]
    accepted_lens: tuple[int, ...]
    proposed_lens: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] | None = None


def decode_step(
    state: DecodeState, rows: DecodeRows, plan: DecodePlan, model: Model, pool: KVPool, verifier: Verifier
) -> tuple[DecodeState, Verified]:
    """One step of every sequence: at least one token each, at most K + 1."""
    num_drafts = plan.num_drafts
    source = DraftSource.of_step(verifier.draft_law, plan.sampling, state.length_B, num_drafts, model)
    drafts, draft_probs = _draft(state, rows, plan, source, model, pool)
    batch = decode_batch(state.length_B - 1, num_drafts + 1, rows, plan.max_context_len, pool)
    token_ids_BQ = torch.cat([state.last_token_B[:, None], drafts.ids_BK], dim=1)
    trunk_TD = model.trunk(token_ids_BQ.flatten(), batch, pool, _ignore_layer)
    logits_BQV = model.logits(trunk_TD).reshape(*token_ids_BQ.shape, -1)
    verified = verifier.verify(
        VerifyInputs(
            drafts=drafts,
            draft_probs=draft_probs,
            target_logits_BQV=logits_BQV,
            sampling=plan.sampling,
            noise_SQV=source.target_noise(num_drafts + 1),
            position_B=state.length_B,
            draft_cap_B=rows.draft_cap_B,
        )
    )
    if plan.sampling is not None and plan.sampling.logprobs is not None:
        logprobs_LQX = step_logprobs(logits_BQV, verified.token_ids_BQ, plan.sampling.logprobs)
        verified = replace(verified, logprobs_LQX=logprobs_LQX)
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
    state = replace(state, hidden_BD=hidden_BD)
    if source.law is not DraftLaw.SAMPLED:
        ahead = Lookahead(verified.token_ids_BQ, accepted_B1 + 1) if looks_ahead(plan.sampling) else None
        state = replace(state, draft_token_B=source.draft_next(model, hidden_BD, verified.accepted_len_B, ahead))
    return state, verified


def _draft(
    state: DecodeState,
    rows: DecodeRows,
    plan: DecodePlan,
    source: DraftSource,
    model: Model,
    pool: KVPool,
) -> tuple[DraftIds, DraftProbs | None]:
    """Extend the draft in hand to K tokens, the MTP head feeding on its own output.

    Drafts that are drawn from a distribution are all drawn here, the first from the hidden state that the one in hand
    was made from: so no distribution has to outlive its step, or cross from the prefill worker.
    """
    if plan.num_drafts == 0:
        return DraftIds(state.last_token_B.new_empty(len(state.last_token_B), 0)), None
    hidden_BD = state.hidden_BD
    if source.law is DraftLaw.SAMPLED:
        drafted = [source.draft(model, hidden_BD, 0)]
    else:
        drafted = [Drafted(state.draft_token_B, None)]
    for step in range(1, plan.num_drafts):
        batch = decode_batch(state.length_B - 2 + step, 1, rows, plan.max_context_len, pool)
        hidden_BD = model.mtp(drafted[-1].token_B, hidden_BD, batch, pool, _ignore_layer)
        ahead = None
        if looks_ahead(plan.sampling):
            ahead = Lookahead.after(torch.stack([item.token_B for item in drafted], dim=1))
        drafted.append(source.draft(model, hidden_BD, step, ahead))
    return DraftIds(torch.stack([item.token_B for item in drafted], dim=1)), stack_probs(drafted, model)


def _ignore_layer(layer: int) -> None:
    """Nobody waits for a decode step's layers."""


@dataclass(slots=True)
class _Running:
    """What the host knows about an occupied slot."""

    sampling: SamplingParams
    length: int
    limit: int
    draft_cap: int


class DecodeRunner:
    """Runs decode steps of one model over one pool, for up to `max_num_sequences` sequences.

    As one rank of a group if there is a `communicator`. `eos_token_ids` are what `min_tokens` holds back beside a
    request's own stop tokens. Drafts are verified as `verification` says (coupled if None).

    Raises:
        ConfigInvalid: the verification does not fit the number of drafts.
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
    ) -> None:
        assert max_num_sequences >= 1
        assert num_draft_tokens == 0 or pool.layout.num_layers > model.config.num_layers, "drafts need an MTP layer"
        self.max_num_sequences = max_num_sequences
        self.hidden_size = model.config.hidden_size
        self.num_draft_tokens = num_draft_tokens
        self._communicator = communicator or Alone()
        self._verifier = make_verifier(verification or VerificationConfig(), num_draft_tokens)
        if self._verifier.draft_law is DraftLaw.SAMPLED:
            model.t2d()  # made before the first step, not in it
        self._model = model
        self._pool = pool
        self._running: dict[int, _Running] = {}
        self._table = SlotTable(
            num_slots=max_num_sequences,
            max_blocks=-(-model.config.max_model_len // pool.layout.block_size),
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            eos_token_ids=eos_token_ids,
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
        *,
        prompt_token_ids: Sequence[int] = (),
        output_len: int = 0,
        choice: int = 0,
    ) -> None:
        """Put a prefilled sequence into a free slot; it takes part in steps from now on.

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
        self._table.configure(slot, table=table, limit=limit, scratch_block=scratch_block, draft_cap=draft_cap)
        num_prompt = len(prompt_token_ids) - output_len
        sequence = SampledSequence(
            params=sampling,
            choice=choice,
            prompt_token_ids=prompt_token_ids[:num_prompt],
            output_token_ids=(*prompt_token_ids[num_prompt:], start.first_token),
        )
        self._table.sampling.place(slot, sequence)
        self._running[slot] = _Running(sampling, prompt_len + 1, limit, draft_cap)

    def release(self, slot: int) -> None:
        """Forget a sequence; its blocks are the caller's to free."""
        del self._running[slot]
        self._table.sampling.release(slot)

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
            sampling=self._table.sampling.rows(slots, [item.sampling for item in running]),
        )
        slots_B = torch.tensor(slots, dtype=torch.int64).to(self._pool.device)
        num_blocks = -(-max_context_len // self._pool.layout.block_size)
        state, rows = self._table.gather(slots_B, num_blocks)
        state, verified = decode_step(state, rows, plan, self._model, self._pool, self._verifier)
        self._table.scatter(slots_B, state)
        self._table.sampling.advance(slots_B, verified)
        # The next draft goes along only to be compared.
        columns = [verified.accepted_len_B[:, None], verified.token_ids_BQ, state.draft_token_B[:, None]]
        packed = decide(self._communicator, torch.cat(columns, dim=1)).tolist()
        for item, (accepted_len, *_) in zip(running, packed, strict=True):
            item.length += accepted_len + 1
        logprobs = None
        if verified.logprobs_LQX is not None:
            num_tops = [item.sampling.logprobs for item in running]
            num_emitted = [accepted_len + 1 for accepted_len, *_ in packed]
            logprobs = unpack_step(verified.logprobs_LQX.tolist(), num_tops, num_emitted)
        return DecodeOutput(
            token_ids=tuple(tuple(token_ids[: accepted_len + 1]) for accepted_len, *token_ids in packed),
            accepted_lens=tuple(accepted_len for accepted_len, *_ in packed),
            proposed_lens=tuple(item.draft_cap for item in running),
            logprobs=logprobs,
        )
