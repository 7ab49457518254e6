"""Computes one step over rows of sequences, as two pure functions of tensors: `sample`, then `extend`.

A row is a prefill chunk, or a decode row of K + 1 positions. The order of a step is:

    sample: drafts of the decode rows -> one trunk pass over all rows -> verify drafts, sample first tokens
    extend: one MTP pass over all rows, which makes the next drafts

Drafts come from a chain of MTP passes, or are looked up in the text so far, without an MTP pass.

Tokens are known after `sample`, so they are copied to the host while `extend` runs. `passes` decides how the model
runs: launched kernel by kernel, or replayed from CUDA graphs.

A sequence t_0 ... t_{L-1} decodes from: trunk KV of 0 ... L-2, MTP KV of entries 0 ... L-2, its newest token t_{L-1},
and the draft for position L with the MTP output of entry L-2 that made it. The end of a prompt leaves exactly this
behind, so the sequence decodes in the next step. KV of rejected drafts stays in the pool; the next step overwrites it
before any row reads it.

Legend: B decode sequences, K draft tokens of this step, Q = K + 1 rows, F chunks that end with their sequence's newest
token, T tokens of all chunks, V vocabulary (the tokens of this rank, `model.vocab`), D hidden size, S sampled
sequences.
"""

from dataclasses import dataclass, replace

import torch

from baton.engine.grammar.masks import GrammarMasks
from baton.engine.grammar.rows import GrammarRows
from baton.engine.sampling.history import HistoryLookahead
from baton.engine.sampling.kernel_sampler import next_token
from baton.engine.sampling.logprobs import step_logprobs
from baton.engine.sampling.sampler import SamplingRows, looks_ahead
from baton.engine.speculation.drafting import Drafted, DraftSource, over_vocabulary, stack_probs
from baton.engine.speculation.token_history import TokenHistory
from baton.engine.speculation.verify import (
    DraftIds,
    DraftLaw,
    DraftProbs,
    Verified,
    Verifier,
    VerifyInputs,
    usable_drafts,
)
from baton.engine.step.batch import DecodeRows, PrefillInputs
from baton.engine.step.passes import Passes
from baton.engine.step.slots import DecodeState
from baton.kernels.copies import to_device
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.ngram import NO_DRAFT
from baton.kernels.sampling.rows import settled
from baton.kernels.sampling.verify import Verdict, post_verify, told_lengths
from baton.model.model import Model

NOTHING = -1  # in place of an accepted length: the step emits nothing for this sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The decode rows of a step.

    Attributes:
        state: state of the sequences before the step.
        rows: what does not change about them.
        num_drafts: K; 0 is a step without drafts.
        keeps_mtp: run the MTP head over the emitted rows, so that later steps find its KV without holes, and a draft.
            Sequences that never draft do not need it.
        sampling: what sequences request beyond greedy sampling; None if all are greedy and plain.
        grammar: the sequences that have a grammar; None if none has. It sees the drafts on the host and masks logits.
        history: where drafts are looked up, and the sequences' slots in it; None: the head makes all drafts.
        is_looked_up_B: bool, sequences whose drafts are looked up; None: all of them, if there is a history.
        num_by_head: number of drafts that the head makes; None: K.
        redraws: the head makes the first draft again, because some sequence has none from the step before.
        drafts_next: the head samples the next step's first draft; else it leaves its hidden state, from which to draft.
    """

    state: DecodeState
    rows: DecodeRows
    num_drafts: int
    keeps_mtp: bool
    sampling: SamplingRows | None
    grammar: GrammarRows | None = None
    history: tuple[TokenHistory, torch.Tensor] | None = None
    is_looked_up_B: torch.Tensor | None = None
    num_by_head: int | None = None
    redraws: bool = False
    drafts_next: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInputs:
    """The chunks of a step.

    Attributes:
        rows: their tensors.
        sampling: sampling of the F sequences whose next token is sampled; None if all are greedy and plain.
        grammar: of those with a grammar; None if none has.
    """

    rows: PrefillInputs
    sampling: SamplingRows | None
    grammar: GrammarRows | None = None

    @property
    def num_sampled(self) -> int:
        """Number of sequences whose next token is sampled, F."""
        return len(self.rows.last_row_F)

    @property
    def next_position_F(self) -> torch.Tensor:
        """Positions of the tokens to be sampled, int64."""
        return self.rows.batch.positions_T[self.rows.last_row_F] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """Result of `sample` for the decode rows.

    Attributes:
        verified: tokens and accepted lengths; an accepted length of -1 emits nothing.
        state: state after the step, except the next draft and its hidden state.
        trunk_TD: hidden states of the verified rows, [B * Q, D].
        last_row_B: int64, row of the last emitted token of each sequence.
        accepted_len_B: int64, >= 0.
        is_idle_B: bool, sequences that emit nothing; None if all emit.
        source: random draws of the step, which the next draft shares.
    """

    verified: Verified
    state: DecodeState
    trunk_TD: torch.Tensor
    last_row_B: torch.Tensor
    accepted_len_B: torch.Tensor
    is_idle_B: torch.Tensor | None
    source: DraftSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSample:
    """Result of `sample` for the chunks.

    Attributes:
        verified: token_ids [F, 1]; an accepted length is 0, or -1 where nothing is emitted.
        trunk_TD: hidden states of the chunks' tokens.
    """

    verified: Verified
    trunk_TD: torch.Tensor


@dataclass(frozen=True, slots=True)
class Extended:
    """The drafts for the next step; `draft_token` is None if the verifier draws all drafts within its own step.

    Attributes:
        draft_token: int64, [B] or [F].
        hidden_D: [B, D] or [F, D], the MTP output that made it.
    """

    draft_token: torch.Tensor | None
    hidden_D: torch.Tensor


def sample(
    passes: Passes, decode: DecodeInputs | None, prompt: PromptInputs | None, model: Model, verifier: Verifier
) -> tuple[DecodeSample | None, PromptSample | None]:
    """Draft, run the trunk over all rows, and determine every row's tokens."""
    drafts, draft_probs, source = DraftIds(torch.empty(0, 0)), None, None
    ids_BQ = first_B = None
    if decode is not None:
        length_B = settled(decode.state.length_B)
        drafts_next = decode.keeps_mtp and decode.drafts_next
        source = DraftSource.of_step(
            verifier.draft_law, decode.sampling, length_B, decode.num_drafts, model, drafts_next=drafts_next
        )
        drafts, draft_probs = _draft(passes, decode, source, model)
        if decode.redraws:  # a sequence that emits nothing keeps this draft
            decode = replace(decode, state=replace(decode.state, draft_token_B=drafts.valid_ids()[:, 0]))
        if decode.grammar is not None:
            decode.grammar.take(drafts.ids_BK)
        ids_BQ = torch.cat([decode.state.last_token_B[:, None], drafts.valid_ids()], dim=1)
        first_B = length_B - 1
    if prompt is not None and prompt.grammar is not None:
        prompt.grammar.take(prompt.rows.last_row_F.new_empty(prompt.num_sampled, 0))
    prompt_TD, decode_TD = passes.trunk(ids_BQ, first_B)
    of_decode = of_prompt = None
    if decode is not None:
        assert source is not None and ids_BQ is not None and decode_TD is not None
        of_decode = _verify(decode, drafts, draft_probs, source, ids_BQ, decode_TD, model, verifier)
    if prompt is not None:
        assert prompt_TD is not None
        of_prompt = PromptSample(verified=_first_tokens(prompt, prompt_TD, model), trunk_TD=prompt_TD)
    return of_decode, of_prompt


def extend(
    passes: Passes,
    decode: DecodeInputs | None,
    of_decode: DecodeSample | None,
    prompt: PromptInputs | None,
    of_prompt: PromptSample | None,
    model: Model,
) -> tuple[Extended | None, Extended | None]:
    """Run the MTP head over all rows of a sampled step, and make the next draft of every sequence."""
    decode_pass = prompt_pass = None
    if decode is not None and decode.keeps_mtp:
        assert of_decode is not None
        first_B = settled(decode.state.length_B) - 1
        decode_pass = (of_decode.verified.token_ids_BQ, of_decode.trunk_TD, first_B)
    if prompt is not None:
        assert of_prompt is not None
        ids_T = prompt.rows.next_token_ids_T
        if prompt.num_sampled:
            ids_T = ids_T.index_copy(0, prompt.rows.last_row_F, of_prompt.verified.token_ids_BQ[:, 0])
        prompt_pass = (ids_T, of_prompt.trunk_TD)
    if decode_pass is None and prompt_pass is None:
        return None, None
    prompt_TD, decode_TD = passes.extend(prompt_pass, decode_pass)
    next_decode = next_prompt = None
    if decode_TD is not None:
        assert decode is not None and of_decode is not None
        next_decode = _next_draft(decode, of_decode, decode_TD, model)
    if prompt_TD is not None and prompt is not None and prompt.num_sampled:
        assert of_prompt is not None
        next_prompt = _first_draft(prompt, of_prompt, prompt_TD, model)
    return next_decode, next_prompt


def _verify(
    decode: DecodeInputs,
    drafts: DraftIds,
    draft_probs: DraftProbs | None,
    source: DraftSource,
    ids_BQ: torch.Tensor,
    trunk_TD: torch.Tensor,
    model: Model,
    verifier: Verifier,
) -> DecodeSample:
    before, length_B = decode.state, settled(decode.state.length_B)
    assert decode.keeps_mtp or decode.history is not None or decode.num_drafts == 0
    raw_BQV = model.logits(trunk_TD).reshape(*ids_BQ.shape, -1)
    logits_BQV, draft_cap_B, masks = raw_BQV, decode.rows.draft_cap_B, None
    if decode.grammar is not None:
        masks = decode.grammar.masks()
        if model.sampling_implementation is None:
            logits_BQV = masks.apply(raw_BQV, model.vocab)
        if verifier.draft_law is not DraftLaw.SAMPLED:  # there, a cap that depends on a draft would add bias
            draft_cap_B = masks.cap(draft_cap_B)
    verified = verifier.verify(
        VerifyInputs(
            drafts=drafts,
            draft_probs=draft_probs,
            target_logits_BQV=logits_BQV,
            sampling=decode.sampling,
            noise_SQV=source.target_noise(decode.num_drafts + 1),
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
    verified = _with_logprobs(verified, raw_BQV, decode.sampling, model)
    if decode.history is not None:
        verified = replace(verified, proposed_len_B=usable_drafts(drafts, decode.rows.draft_cap_B))
    accepted_len_B = verified.accepted_len_B
    if is_idle_B is not None:
        accepted_len_B = accepted_len_B.clamp(min=0)  # `_idle` drops the results of idle sequences
    after = post_verify(
        Verdict(verified.token_ids_BQ, accepted_len_B),
        length_B,
        raw_BQV,
        implementation=model.sampling_implementation or Implementation.REFERENCE,
    )
    told_len_B = after.told_len_B if is_idle_B is None else after.told_len_B.masked_fill(is_idle_B, NOTHING)
    verified = replace(verified, told_len_B=told_len_B)
    state = replace(before, last_token_B=after.last_token_B, length_B=after.length_B)
    return DecodeSample(
        verified=verified,
        state=state if is_idle_B is None else _idle(before, state, is_idle_B),
        trunk_TD=trunk_TD,
        last_row_B=after.last_row_B,
        accepted_len_B=accepted_len_B,
        is_idle_B=is_idle_B,
        source=source,
    )


def _first_tokens(prompt: PromptInputs, trunk_TD: torch.Tensor, model: Model) -> Verified:
    """The token after the newest of each of the F sequences."""
    last_row_F = prompt.rows.last_row_F
    if not prompt.num_sampled:
        return Verified(token_ids_BQ=last_row_F.new_empty(0, 1), accepted_len_B=last_row_F)
    raw_FV = model.logits(trunk_TD[last_row_F])
    logits_FV, masks = raw_FV, None
    if prompt.grammar is not None:
        masks = prompt.grammar.masks()
        logits_FV = masks.apply(raw_FV[:, None], model.vocab)[:, 0]
    token_F = next_token(model, logits_FV, prompt.sampling, prompt.next_position_F)
    if max(prompt.rows.known_F) >= 0:
        # A token sampled earlier stays, even if this pass rounds differently.
        known_F = to_device(torch.tensor(prompt.rows.known_F, dtype=torch.int64), token_F.device)
        token_F = torch.where(known_F < 0, token_F, known_F)
    verified = Verified(token_ids_BQ=token_F[:, None], accepted_len_B=torch.zeros_like(token_F))
    if masks is not None:
        verified, _ = _cut(verified, masks)
    verified = replace(verified, told_len_B=told_lengths(verified.accepted_len_B, raw_FV[:, None]))
    return _with_logprobs(verified, raw_FV[:, None], prompt.sampling, model)


def _with_logprobs(verified: Verified, raw_BQV: torch.Tensor, sampling: SamplingRows | None, model: Model) -> Verified:
    if sampling is None or sampling.logprobs is None:
        return verified
    packed_LQX = step_logprobs(
        raw_BQV, verified.token_ids_BQ, sampling.logprobs, model.vocab, model.sampling_implementation
    )
    return replace(verified, logprobs_LQX=packed_LQX)


def _next_draft(decode: DecodeInputs, of_decode: DecodeSample, mtp_TD: torch.Tensor, model: Model) -> Extended:
    """The first draft of each decode sequence's next step, from the row of its last emitted token."""
    hidden_BD, source = mtp_TD[of_decode.last_row_B], of_decode.source
    is_idle_B, before = of_decode.is_idle_B, decode.state
    draft_B: torch.Tensor | None = None
    if decode.drafts_next and source.law is not DraftLaw.SAMPLED:
        ahead = None
        if looks_ahead(decode.sampling):
            ahead = HistoryLookahead(of_decode.verified.token_ids_BQ, of_decode.accepted_len_B[:, None] + 1)
        draft_B = source.draft_next(model, hidden_BD, of_decode.accepted_len_B, ahead)
    if is_idle_B is not None:
        draft_B = None if draft_B is None else torch.where(is_idle_B, of_decode.state.draft_token_B, draft_B)
        hidden_BD = torch.where(is_idle_B[:, None], before.hidden_BD, hidden_BD)
    return Extended(draft_B, hidden_BD)


def _first_draft(prompt: PromptInputs, of_prompt: PromptSample, mtp_TD: torch.Tensor, model: Model) -> Extended:
    """The draft that follows each of the F sampled tokens."""
    hidden_FD = mtp_TD[prompt.rows.last_row_F]
    logits_FV = over_vocabulary(model.draft_logits(hidden_FD), model)
    ahead = HistoryLookahead.after(of_prompt.verified.token_ids_BQ) if looks_ahead(prompt.sampling) else None
    return Extended(next_token(model, logits_FV, prompt.sampling, prompt.next_position_F + 1, ahead), hidden_FD)


def _cut(verified: Verified, masks: GrammarMasks) -> tuple[Verified, torch.Tensor]:
    """The verified tokens that the grammars allow, and which sequences emit nothing."""
    accepted_len_B = masks.cut(verified.accepted_len_B)
    row_Q = torch.arange(verified.token_ids_BQ.shape[1], device=accepted_len_B.device)
    token_ids_BQ = verified.token_ids_BQ.masked_fill(row_Q > accepted_len_B[:, None], 0)
    return replace(verified, token_ids_BQ=token_ids_BQ, accepted_len_B=accepted_len_B), accepted_len_B < 0


def _idle(before: DecodeState, after: DecodeState, is_idle_B: torch.Tensor) -> DecodeState:
    """Keep the old state of sequences that emit nothing; the next step overwrites what this one wrote for them."""
    return replace(
        before,
        last_token_B=torch.where(is_idle_B, before.last_token_B, after.last_token_B),
        length_B=torch.where(is_idle_B, before.length_B, after.length_B),
    )


def _draft(
    passes: Passes, decode: DecodeInputs, source: DraftSource, model: Model
) -> tuple[DraftIds, DraftProbs | None]:
    """Make K drafts, by lookup, by the head, or each for some of the sequences."""
    num_drafts, num_by_head = decode.num_drafts, decode.num_by_head
    if num_drafts == 0:
        return DraftIds(decode.state.last_token_B.new_empty(len(decode.state.last_token_B), 0)), None
    looked_up = None
    if decode.history is not None:
        history, slot_B = decode.history
        looked_up = history.drafts(slot_B, decode.state.length_B, num_drafts)
        if decode.is_looked_up_B is None:
            return looked_up, None
    made, probs = _chain(passes, decode, source, model, num_drafts if num_by_head is None else num_by_head)
    if looked_up is None or decode.is_looked_up_B is None:
        return made, probs
    num_missing = num_drafts - made.ids_BK.shape[1]
    ids_BK = torch.nn.functional.pad(made.ids_BK, (0, num_missing), value=NO_DRAFT)
    if probs is not None:
        probs = replace(probs, probs_SKC=torch.nn.functional.pad(probs.probs_SKC, (0, 0, 0, num_missing)))
    return DraftIds(torch.where(decode.is_looked_up_B[:, None], looked_up.ids_BK, ids_BK)), probs


def _chain(
    passes: Passes, decode: DecodeInputs, source: DraftSource, model: Model, num_drafts: int
) -> tuple[DraftIds, DraftProbs | None]:
    """Extend the first draft by the head, which feeds on its own output.

    Drafts that are sampled from a distribution are all sampled here, the first one from the hidden state that made the
    existing draft. So no distribution has to outlive its step, or to be sent by the prefill worker.
    """
    state = decode.state
    hidden_BD = state.hidden_BD
    if source.law is DraftLaw.SAMPLED or decode.redraws:
        drafted = [source.draft(model, hidden_BD, 0)]
    else:
        drafted = [Drafted(state.draft_token_B, None)]
    for step in range(1, num_drafts):
        hidden_BD = passes.draft(drafted[-1].token_B, hidden_BD, state.length_B - 2 + step)
        ahead = None
        if looks_ahead(decode.sampling):
            ahead = HistoryLookahead.after(torch.stack([item.token_B for item in drafted], dim=1))
        drafted.append(source.draft(model, hidden_BD, step, ahead))
    return DraftIds(torch.stack([item.token_B for item in drafted], dim=1)), stack_probs(drafted, model)
