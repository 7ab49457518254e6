"""Converts batches to the inputs of the sampling kernels, and samples one token per sequence with them.

If a model's logits are whole rows that kernels can read as they are (`Model.sampling_implementation`), kernels sample:
first tokens and drafts here, and what follows drafts in `engine.speculation.kernel_verifier`. Otherwise torch samples
(`engine.sampling.sampler` and its verifiers): on CPUs, in float64 and float32, in batch-invariant numerics, and if
ranks share the vocabulary. Both draw the same numbers by the same rules, so tokens do not depend on which of them
samples.

Kernels take one number per sequence of the batch; a temperature of 0 means greedy.

Legend: B sequences, S sampled sequences, V vocabulary.
"""

from dataclasses import replace

import torch

from baton.engine.grammar.masks import WORD_BITS, GrammarMasks
from baton.engine.sampling.history import HistoryLookahead
from baton.engine.sampling.logit_edits import LogitBias, LogitEdits, Penalties
from baton.engine.sampling.sampler import SamplingRows, sample
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.logit_edits import Edits, edit_rows
from baton.kernels.sampling.rows import DrawRows, EditedRows, settled
from baton.kernels.sampling.sample import sample as sample_by_kernels
from baton.model.model import Model

_NO_PENALTY = (1.0, 0.0, 0.0)


def edit(
    logits_BQV: torch.Tensor,
    edits: LogitEdits | None,
    masks: GrammarMasks | None,
    drafts_BK: torch.Tensor,
    implementation: Implementation,
) -> tuple[torch.Tensor, EditedRows | None]:
    """Logits, and the edited rows that replace some of theirs; None if there are none.

    Args:
        logits_BQV: raw, bfloat16 or float32.
        edits: logit edits of sequences.
        masks: of sequences with a grammar; applied first.
        drafts_BK: int64; row q comes after the first q of them.
        implementation: which implementation of the kernels.
    """
    if masks is not None:
        has_words = masks.bitmask_GQW.shape[2] * WORD_BITS >= logits_BQV.shape[2]
        if edits is None and has_words:
            asked = Edits(
                sequence_P=settled(masks.index_G),
                drafts_BK=settled(drafts_BK),
                bitmask_PQW=settled(masks.bitmask_GQW),
            )
            return logits_BQV, edit_rows(logits_BQV, asked, implementation=implementation)
        logits_BQV = masks.apply(logits_BQV)
    if edits is None:
        return logits_BQV, None
    asked_or_none = _as_kernels_read(edits, drafts_BK)
    if asked_or_none is not None:
        return logits_BQV, edit_rows(logits_BQV, asked_or_none, implementation=implementation)
    return logits_BQV, edited_by_torch(logits_BQV, edits, HistoryLookahead.of_drafts(drafts_BK.clamp(min=0)))


def edited_by_torch(logits_BQV: torch.Tensor, edits: LogitEdits, ahead: HistoryLookahead | None) -> EditedRows:
    """The rows of the sequences with any kind of edit."""
    rows_RQV = edits.edited(logits_BQV[edits.index_R].float(), ahead)
    return EditedRows.of(rows_RQV, edits.index_R, len(logits_BQV))


def _as_kernels_read(edits: LogitEdits, drafts_BK: torch.Tensor) -> Edits | None:
    """Kernel inputs of the edits; None if there are others than biases and penalties.

    A sequence with only one of these gets values for the other that change nothing.
    """
    kinds = [edit for _, edit in edits.parts]
    if not all(isinstance(edit, LogitBias | Penalties) for edit in kinds):
        return None
    num_edited = len(edits.index_R)
    asked: dict[str, torch.Tensor] = {}
    for place_P, edit in edits.parts:
        if isinstance(edit, LogitBias):
            asked["bias_ids_PW"] = _of_all(edit.ids_PW, place_P, num_edited, (0,))
            asked["bias_values_PW"] = _of_all(edit.values_PW, place_P, num_edited, (0.0,))
        elif isinstance(edit, Penalties):
            asked["penalties_P3"] = _of_all(edit.values_P3, place_P, num_edited, _NO_PENALTY)
            asked["slot_P"] = _of_all(edit.slots_P[:, None], place_P, num_edited, (0,)).flatten()
            asked["counts_NX"], asked["in_prompt_NX"] = edit.counts_NX, edit.in_prompt_NX
    return Edits(sequence_P=settled(edits.index_R), drafts_BK=settled(drafts_BK), **asked)


def _of_all(values_PX: torch.Tensor, place_P: torch.Tensor, count: int, others: tuple[float, ...]) -> torch.Tensor:
    """Values for all R sequences, [R, X]: those without values get `others`."""
    if len(place_P) == count:  # they are in order
        return settled(values_PX)
    lines_RX = values_PX.new_empty(count, values_PX.shape[1])
    for column, value in enumerate(others):
        lines_RX[:, column :: len(others)].fill_(value)
    return lines_RX.index_copy_(0, place_P, values_PX)


def draw_rows(sampling: SamplingRows | None, position_B: torch.Tensor) -> DrawRows:
    """How each sequence of a batch draws its tokens.

    Args:
        sampling: the sampled sequences; None if all are greedy.
        position_B: int64, position of the first token.
    """
    num_sequences, position_B = len(position_B), settled(position_B)
    if sampling is None or sampling.num_sampled == 0:
        nothing_B = torch.zeros_like(position_B)
        greedy_B = torch.zeros(num_sequences, dtype=torch.float64, device=position_B.device)
        return DrawRows(temperature_B=greedy_B, seed_B=nothing_B, choice_B=nothing_B, position_B=position_B)
    index_S = sampling.index_S

    def of_all(number_S: torch.Tensor, of_greedy: float) -> torch.Tensor:
        if len(index_S) == num_sequences:  # they are in order
            return settled(number_S)
        return number_S.new_full((num_sequences,), of_greedy).index_copy_(0, index_S, number_S)

    has_cut, has_min_p = sampling.truncated_U is not None, sampling.min_p_S is not None
    return DrawRows(
        temperature_B=of_all(sampling.temperature_S, 0.0),
        seed_B=of_all(sampling.seed_S, 0),
        choice_B=of_all(sampling.choice_S, 0),
        position_B=position_B,
        # Every cut includes top-k, which costs nothing if it is 0, and min-p includes top-p: so fewer kernels are
        # compiled.
        top_k_B=of_all(sampling.top_k_S, 0) if has_cut or has_min_p else None,
        top_p_B=of_all(sampling.top_p_S, 1.0) if has_min_p or (has_cut and sampling.limits.has_top_p) else None,
        min_p_B=None if sampling.min_p_S is None else of_all(sampling.min_p_S, 0.0),
    )


def later(rows: DrawRows, by: int | torch.Tensor) -> DrawRows:
    """The same sequences, `by` positions later."""
    return rows if isinstance(by, int) and by == 0 else replace(rows, position_B=rows.position_B + by)


def likeliest(rows: DrawRows) -> DrawRows:
    """The same sequences as if they were greedy."""
    return DrawRows(
        temperature_B=torch.zeros_like(rows.temperature_B),
        seed_B=rows.seed_B,
        choice_B=rows.choice_B,
        position_B=rows.position_B,
    )


def with_every_cut(rows: DrawRows) -> DrawRows:
    """The same draws with every cut enabled, so that the rare edited rows need only one compiled kernel variant."""
    zero_B, one_B = torch.zeros_like(rows.temperature_B), torch.ones_like(rows.temperature_B)
    return replace(
        rows,
        top_k_B=torch.zeros_like(rows.seed_B) if rows.top_k_B is None else rows.top_k_B,
        top_p_B=one_B if rows.top_p_B is None else rows.top_p_B,
        min_p_B=zero_B if rows.min_p_B is None else rows.min_p_B,
    )


def draw(
    logits_BV: torch.Tensor,
    rows: DrawRows,
    sampling: SamplingRows | None,
    ahead: HistoryLookahead | None,
    implementation: Implementation,
) -> torch.Tensor:
    """Sample one token per sequence, int64 [B].

    Args:
        logits_BV: raw, bfloat16 or float32.
        rows: how each sequence draws its token.
        sampling: provides the edits, which are applied first.
        ahead: as in `sampler.sample`.
        implementation: which implementation of the kernels.
    """
    edits = None if sampling is None else sampling.edits
    if edits is None:
        edited = None
    elif ahead is None:
        _, edited = edit(logits_BV[:, None], edits, None, rows.position_B.new_empty(len(logits_BV), 0), implementation)
    else:
        edited = edited_by_torch(logits_BV[:, None], edits, ahead)
    if edited is not None:
        rows = with_every_cut(rows)
    return sample_by_kernels(logits_BV, rows, edited=edited, implementation=implementation)


def next_token(
    model: Model,
    logits_BV: torch.Tensor,
    sampling: SamplingRows | None,
    position_B: torch.Tensor,
    ahead: HistoryLookahead | None = None,
) -> torch.Tensor:
    """Same as `sampler.sample`, by kernels or torch, as the model requires."""
    if model.sampling_implementation is None:
        return sample(logits_BV, sampling, position_B, ahead, model.vocab)
    return draw(logits_BV, draw_rows(sampling, position_B), sampling, ahead, model.sampling_implementation)
