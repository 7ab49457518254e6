"""Edits of logits as one launch makes them: a grammar's bitmask alone, or biases and penalties.

Whatever else requests ask of their logits (allowed tokens, bad words, min tokens) is done by torch, in a copy of those
sequences' rows (`engine.sampling.logit_edits`); so are edits of drafts' logits, for these stand behind tokens that the
tables have not counted, and bitmasks where other sequences have edits. The rest is read where the model left it.

Legend: B sequences, Q rows of each, K = Q - 1 drafts, R sequences with any edit, P of those with one kind of it,
G sequences with a grammar, W biased tokens, V vocabulary.
"""

import torch

from baton.engine.grammar.masks import WORD_BITS, GrammarMasks
from baton.engine.sampling.history import Lookahead
from baton.engine.sampling.logit_bias import LogitBias
from baton.engine.sampling.logit_edits import LogitEdits
from baton.engine.sampling.penalties import Penalties
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.choice import EditedRows, settled
from baton.kernels.sampling.logit_edits import Edits, edit_rows

_NO_PENALTY = (1.0, 0.0, 0.0)


def edit(
    logits_BQV: torch.Tensor,
    edits: LogitEdits | None,
    masks: GrammarMasks | None,
    drafts_BK: torch.Tensor,
    implementation: Implementation,
) -> tuple[torch.Tensor, EditedRows | None]:
    """Logits, and the rows that stand for some of theirs, None if there is none.

    Args:
        logits_BQV: raw, bfloat16 or float32.
        edits: of sequences.
        masks: of sequences with a grammar, which come first.
        drafts_BK: int64; row q stands after the first q of them.
        implementation: which form of the kernels.
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
    return logits_BQV, edited_by_torch(logits_BQV, edits, Lookahead.of_drafts(drafts_BK.clamp(min=0)))


def edited_by_torch(logits_BQV: torch.Tensor, edits: LogitEdits, ahead: Lookahead | None) -> EditedRows:
    """The rows of the sequences with any edit, whatever it is."""
    rows_RQV = edits.edited(logits_BQV[edits.index_R].float(), ahead)
    return EditedRows.of(rows_RQV, edits.index_R, len(logits_BQV))


def _as_kernels_read(edits: LogitEdits, drafts_BK: torch.Tensor) -> Edits | None:
    """None if they are more than biases and penalties; who lacks one of these gets one that changes nothing."""
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
    """Lines of all R sequences, [R, X]: those without one get `others`."""
    if len(place_P) == count:  # they are in order
        return settled(values_PX)
    lines_RX = values_PX.new_empty(count, values_PX.shape[1])
    for column, value in enumerate(others):
        lines_RX[:, column :: len(others)].fill_(value)
    return lines_RX.index_copy_(0, place_P, values_PX)
