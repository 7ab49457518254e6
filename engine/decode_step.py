"""The decode step: draft, verify, accept, and the MTP pass over what was accepted.

`decode_step` is a pure function of tensors (beside the KV it writes). Who runs, where blocks come from and when a
sequence ends is decided by others (`decode`). `step_through` is the same over any way to run the model's passes
(`passes`): launched one by one, or replayed from CUDA graphs (`graphed_step`).

A sequence t_0 ... t_{L-1} is decoded from: trunk KV of 0 ... L-2, MTP KV of entries 0 ... L-2, the last token t_{L-1},
and the draft for position L with the MTP output of entry L-2 that made it. KV of rejected drafts stays in the pool;
no row's positions reach it before the next step has overwritten it.

Legend: B sequences, K draft tokens of this step, Q = K + 1 rows, V vocabulary (of it the tokens of this rank,
`model.vocab`), D hidden size, S sampled sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.engine.batch import DecodeRows
from baton.engine.drafting import Drafted, DraftSource, stack_probs
from baton.engine.grammar_masks import GrammarMasks
from baton.engine.grammar_rows import GrammarRows
from baton.engine.history import Lookahead
from baton.engine.logprobs import step_logprobs
from baton.engine.passes import EagerPasses, Passes
from baton.engine.prepare import StepPreparer
from baton.engine.sampler import SamplingRows, looks_ahead
from baton.engine.slots import DecodeState
from baton.engine.verify import DraftIds, DraftLaw, DraftProbs, Verified, Verifier, VerifyInputs
from baton.kernels.choice import settled
from baton.kernels.implementation import Implementation
from baton.kernels.verify import Verdict, post_verify
from baton.kvcache.pool import KVPool
from baton.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """What the host decides about a step.

    Attributes:
        num_drafts: K; 0 is a plain step.
        keeps_mtp: run the MTP head over the emitted rows, so that a later step finds its KV without holes and a draft
            in hand. K > 0 needs it; a step whose sequences never draft leaves the head alone.
        max_context_len: bound of every row's position + 1.
        sampling: what sequences ask beyond the likeliest token, None if all are greedy and plain.
        grammar: the sequences that have a grammar, None if none has. It sees the drafts on the host and masks logits.
    """

    num_drafts: int
    keeps_mtp: bool
    max_context_len: int
    sampling: SamplingRows | None
    grammar: GrammarRows | None = None


def decode_step(
    state: DecodeState,
    rows: DecodeRows,
    plan: DecodePlan,
    model: Model,
    pool: KVPool,
    verifier: Verifier,
    preparer: StepPreparer | None = None,
) -> tuple[DecodeState, Verified]:
    """One step of every sequence: at least one token each, at most K + 1.

    With a `preparer`, what attention needs to verify is made by it while drafts are made here.
    """
    first_B, num_rows = state.length_B - 1, plan.num_drafts + 1
    passes = EagerPasses(model, pool, rows, plan.max_context_len, preparer, first_B, num_rows)
    return step_through(passes, state, rows, plan, model, verifier)


def step_through(
    passes: Passes, state: DecodeState, rows: DecodeRows, plan: DecodePlan, model: Model, verifier: Verifier
) -> tuple[DecodeState, Verified]:
    """`decode_step` by these passes. Of `model` only its heads are used here."""
    num_drafts, length_B = plan.num_drafts, settled(state.length_B)
    assert plan.keeps_mtp or num_drafts == 0
    first_B = length_B - 1
    source = DraftSource.of_step(
        verifier.draft_law, plan.sampling, length_B, num_drafts, model, drafts_next=plan.keeps_mtp
    )
    drafts, draft_probs = _draft(passes, state, plan, source, model)
    if plan.grammar is not None:
        plan.grammar.take(drafts.ids_BK)
    token_ids_BQ = torch.cat([state.last_token_B[:, None], drafts.ids_BK], dim=1)
    trunk_TD = passes.verify(token_ids_BQ, first_B)
    raw_BQV = model.logits(trunk_TD).reshape(*token_ids_BQ.shape, -1)
    logits_BQV, draft_cap_B, masks = raw_BQV, rows.draft_cap_B, None
    if plan.grammar is not None:
        masks = plan.grammar.masks()
        if model.choosing is None:
            logits_BQV = masks.apply(raw_BQV, model.vocab)
        if verifier.draft_law is not DraftLaw.SAMPLED:  # there a cap that depends on a draft would bias its law
            draft_cap_B = masks.cap(draft_cap_B)
    verified = verifier.verify(
        VerifyInputs(
            drafts=drafts,
            draft_probs=draft_probs,
            target_logits_BQV=logits_BQV,
            sampling=plan.sampling,
            noise_SQV=source.target_noise(num_drafts + 1),
            rows=source.rows,
            masks=masks,
            position_B=length_B,
            draft_cap_B=draft_cap_B,
            vocab=model.vocab,
        )
    )
    is_idle_B = None
    if masks is not None:
        verified, is_idle_B = _cut(verified, masks)
    if plan.sampling is not None and plan.sampling.logprobs is not None:
        logprobs_LQX = step_logprobs(
            raw_BQV, verified.token_ids_BQ, plan.sampling.logprobs, model.vocab, model.choosing
        )
        verified = replace(verified, logprobs_LQX=logprobs_LQX)
    before, accepted_len_B = state, verified.accepted_len_B
    if is_idle_B is not None:
        accepted_len_B = accepted_len_B.clamp(min=0)  # what comes of idle sequences is dropped below
    after = post_verify(
        Verdict(verified.token_ids_BQ, accepted_len_B),
        length_B,
        implementation=model.choosing or Implementation.REFERENCE,
    )
    state = replace(state, last_token_B=after.last_token_B, length_B=after.length_B)
    if not plan.keeps_mtp:
        return _idle(before, state, is_idle_B), verified
    # Entries L-1 ... L-1+K again, now from the trunk's own hidden; the row of the last emitted token makes the draft.
    mtp_TD = passes.draft_prefill(verified.token_ids_BQ, trunk_TD, first_B)
    hidden_BD = mtp_TD[after.last_row_B]
    state = replace(state, hidden_BD=hidden_BD)
    if source.law is not DraftLaw.SAMPLED:
        ahead = None
        if looks_ahead(plan.sampling):
            ahead = Lookahead(verified.token_ids_BQ, accepted_len_B[:, None] + 1)
        state = replace(state, draft_token_B=source.draft_next(model, hidden_BD, accepted_len_B, ahead))
    return _idle(before, state, is_idle_B), verified


def _cut(verified: Verified, masks: GrammarMasks) -> tuple[Verified, torch.Tensor]:
    """What may be emitted of what was verified, and which sequences emit nothing."""
    accepted_len_B = masks.cut(verified.accepted_len_B)
    row_Q = torch.arange(verified.token_ids_BQ.shape[1], device=accepted_len_B.device)
    token_ids_BQ = verified.token_ids_BQ.masked_fill(row_Q > accepted_len_B[:, None], 0)
    return replace(verified, token_ids_BQ=token_ids_BQ, accepted_len_B=accepted_len_B), accepted_len_B < 0


def _idle(before: DecodeState, after: DecodeState, is_idle_B: torch.Tensor | None) -> DecodeState:
    """Sequences that emit nothing stay as they were; what the step wrote of them the next one writes again."""
    if is_idle_B is None:
        return after
    return DecodeState(
        last_token_B=torch.where(is_idle_B, before.last_token_B, after.last_token_B),
        draft_token_B=torch.where(is_idle_B, before.draft_token_B, after.draft_token_B),
        hidden_BD=torch.where(is_idle_B[:, None], before.hidden_BD, after.hidden_BD),
        length_B=torch.where(is_idle_B, before.length_B, after.length_B),
    )


def _draft(
    passes: Passes, state: DecodeState, plan: DecodePlan, source: DraftSource, model: Model
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
        hidden_BD = passes.draft(drafted[-1].token_B, hidden_BD, state.length_B - 2 + step)
        ahead = None
        if looks_ahead(plan.sampling):
            ahead = Lookahead.after(torch.stack([item.token_B for item in drafted], dim=1))
        drafted.append(source.draft(model, hidden_BD, step, ahead))
    return DraftIds(torch.stack([item.token_B for item in drafted], dim=1)), stack_probs(drafted, model)


StepFunction = Callable[
    [DecodeState, DecodeRows, DecodePlan, Model, KVPool, Verifier, StepPreparer | None], tuple[DecodeState, Verified]
]
