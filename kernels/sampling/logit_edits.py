"""Applies grammar bitmasks, biases and penalties to logits in one launch; only edited rows are copied.

The order is that of `engine`: the bitmask, biases, then repetition, presence and frequency penalty over the prompt, the
output so far and the drafts before each row. The model's own logits stay as they are, because log-probabilities are
reported from them.

Legend: B sequences, K drafts, Q = K + 1 rows, V vocabulary, P sequences that are edited, E = P Q rows, W words or
biased tokens, N slots of a table, X >= V columns of it.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.sampling.rows import FLOATS, EditedRows, require_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Edits of some sequences' logits; kinds that no sequence uses are None.

    Attributes:
        sequence_P: int64, places in the batch.
        drafts_BK: int64, drafts of all sequences.
        bitmask_PQW: int32, bit t % 32 of word t // 32 for token t.
        bias_ids_PW: int64; unused places add 0 to any token.
        bias_values_PW: float64.
        penalties_P3: float64: repetition, presence and frequency; 1, 0, 0 means none.
        counts_NX: int32, how often each token was generated, by slot.
        in_prompt_NX: bool, by slot.
        slot_P: int64, each sequence's slot.
    """

    sequence_P: torch.Tensor
    drafts_BK: torch.Tensor
    bitmask_PQW: torch.Tensor | None = None
    bias_ids_PW: torch.Tensor | None = None
    bias_values_PW: torch.Tensor | None = None
    penalties_P3: torch.Tensor | None = None
    counts_NX: torch.Tensor | None = None
    in_prompt_NX: torch.Tensor | None = None
    slot_P: torch.Tensor | None = None

    def require_fits(self, num_sequences: int, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Refuse tensors with another shape, dtype or device, and kinds that are given only in part.

        Raises:
            KernelArgumentInvalid: a tensor does not fit; the message names it.
        """
        count = self.sequence_P.numel()
        wanted = (
            ("sequence_P", self.sequence_P, (count,), (torch.int64,)),
            ("drafts_BK", self.drafts_BK, (num_sequences, num_rows - 1), (torch.int64,)),
            ("bitmask_PQW", self.bitmask_PQW, (count, num_rows, None), (torch.int32,)),
            ("bias_ids_PW", self.bias_ids_PW, (count, None), (torch.int64,)),
            ("bias_values_PW", self.bias_values_PW, (count, None), FLOATS),
            ("penalties_P3", self.penalties_P3, (count, 3), FLOATS),
            ("counts_NX", self.counts_NX, (None, None), (torch.int32,)),
            ("in_prompt_NX", self.in_prompt_NX, (None, None), (torch.bool,)),
            ("slot_P", self.slot_P, (count,), (torch.int64,)),
        )
        for name, tensor, shape, dtypes in wanted:
            if tensor is not None:
                require_tensor(name, tensor, shape, dtypes, device)
                require(tensor.is_contiguous(), name, "must be contiguous")
        if self.bitmask_PQW is not None:
            require(self.bitmask_PQW.shape[2] * 32 >= vocab_size, "bitmask_PQW", "has too few words")
        require((self.bias_ids_PW is None) == (self.bias_values_PW is None), "bias_values_PW", "goes with bias_ids_PW")
        if self.bias_ids_PW is not None and self.bias_values_PW is not None:
            same = self.bias_ids_PW.shape == self.bias_values_PW.shape
            require(same, "bias_values_PW", "is not of bias_ids_PW' shape")
        for name, tensor in (("counts_NX", self.counts_NX), ("in_prompt_NX", self.in_prompt_NX)):
            require((tensor is None) == (self.penalties_P3 is None), name, "goes with penalties_P3")
            require(tensor is None or tensor.shape[1] >= vocab_size, name, "has too few columns")
        require((self.slot_P is None) == (self.penalties_P3 is None), "slot_P", "goes with penalties_P3")
        if self.counts_NX is not None and self.in_prompt_NX is not None:
            require(self.counts_NX.shape == self.in_prompt_NX.shape, "in_prompt_NX", "is not of counts_NX' shape")


def edit_rows(
    logits_BQV: torch.Tensor, edits: Edits, *, implementation: Implementation = Implementation.AUTO
) -> EditedRows:
    """Return the edited rows, float32, and their places.

    Args:
        logits_BQV: bfloat16 or float32.
        edits: edits of some sequences.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    require_logits(logits_BQV)
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    device = logits_BQV.device
    edits.require_fits(num_sequences, num_rows, vocab_size, device)
    if not uses_triton(device, implementation):
        return EditedRows.of(_edited_reference(logits_BQV, edits), edits.sequence_P, num_sequences)
    num_edited = len(edits.sequence_P) * num_rows
    place_R = torch.full((num_sequences * num_rows,), -1, dtype=torch.int32, device=device)
    logits_EV = torch.empty(num_edited, vocab_size, dtype=torch.float32, device=device)
    if num_edited:
        from baton.kernels.sampling.logit_edits_triton import launch

        launch(logits_BQV, edits, logits_EV, place_R)
    return EditedRows(logits_EV=logits_EV, place_R=place_R)


def _edited_reference(logits_BQV: torch.Tensor, edits: Edits) -> torch.Tensor:
    x_PQV = logits_BQV[edits.sequence_P].float()
    _, num_rows, vocab_size = x_PQV.shape
    token_V = torch.arange(vocab_size, device=x_PQV.device)
    if edits.bitmask_PQW is not None:
        bit_PQV = edits.bitmask_PQW[..., token_V // 32] >> (token_V % 32) & 1
        x_PQV = x_PQV.masked_fill(bit_PQV == 0, -torch.inf)
    if edits.bias_ids_PW is not None and edits.bias_values_PW is not None:
        values_PQW = edits.bias_values_PW.float()[:, None].expand(-1, num_rows, -1)
        x_PQV = x_PQV.scatter_add(2, edits.bias_ids_PW[:, None].expand(-1, num_rows, -1), values_PQW)
    if edits.penalties_P3 is None or edits.counts_NX is None or edits.in_prompt_NX is None:
        return x_PQV
    counts_PQV = edits.counts_NX[edits.slot_P, :vocab_size][:, None].expand(-1, num_rows, -1)
    drafts_PK = edits.drafts_BK[edits.sequence_P]
    is_draft_PKV = (drafts_PK[..., None] == token_V).to(torch.int32)
    before_PQV = torch.cat([torch.zeros_like(is_draft_PKV[:, :1]), is_draft_PKV], dim=1)[:, :num_rows].cumsum(dim=1)
    if not drafts_PK.shape[1]:
        before_PQV = torch.zeros_like(counts_PQV)
    counts_PQV = counts_PQV + before_PQV
    repetition, presence, frequency = (edits.penalties_P3.float()[:, kind, None, None] for kind in range(3))
    seen_PQV = (counts_PQV > 0) | edits.in_prompt_NX[edits.slot_P, :vocab_size][:, None]
    x_PQV = torch.where(seen_PQV, torch.where(x_PQV > 0, x_PQV / repetition, x_PQV * repetition), x_PQV)
    return x_PQV - frequency * counts_PQV - presence * (counts_PQV > 0)
