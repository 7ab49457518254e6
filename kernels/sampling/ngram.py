"""Drafts without a model: propose what followed an earlier occurrence of the newest tokens (prompt lookup).

Of all places where the newest tokens occurred before, the longest match wins, and among equals the most recent. What
followed it is proposed; if that reaches the end of the sequence, it continues from its own beginning, as if the text in
between repeated itself. There is one launch per step.

Source: Saxena, "Prompt Lookup Decoding" (2023).
Legend: N slots, L tokens of a slot's row, B sequences, K drafts.
"""

import torch

from baton.core.prompt_lookup import MAX_MATCH_LEN
from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.sampling import ngram_triton

NO_DRAFT = -1
_INTEGERS = (torch.int32, torch.int64)


def ngram_drafts(
    tokens_NL: torch.Tensor,
    slot_B: torch.Tensor,
    length_B: torch.Tensor,
    num_drafts: int,
    *,
    min_match_len: int,
    max_match_len: int,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Propose drafts for each sequence, int64 [B, K]; a row is all `NO_DRAFT` if nothing matches its last tokens.

    Args:
        tokens_NL: int32, tokens of each slot's sequence; tokens past its length are not read.
        slot_B: int64, slot of each sequence.
        length_B: int64, tokens of each sequence; more than L, as for a finished sequence, count as L. May be strided.
        num_drafts: K, at least 1.
        min_match_len: number of last tokens that must match, at least 1.
        max_match_len: number of last tokens that are compared, at most 16.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    require_tensor("tokens_NL", tokens_NL, [None, None], [torch.int32])
    require_rows("tokens_NL", tokens_NL)
    require_tensor("slot_B", slot_B, [None], _INTEGERS, tokens_NL.device)
    require_tensor("length_B", length_B, [len(slot_B)], _INTEGERS, tokens_NL.device)
    require(num_drafts > 0, "num_drafts", f"is {num_drafts}, not positive")
    require(min_match_len > 0, "min_match_len", f"is {min_match_len}, not positive")
    fits = min_match_len <= max_match_len <= MAX_MATCH_LEN
    require(fits, "max_match_len", f"is {max_match_len}, not in {min_match_len} ... {MAX_MATCH_LEN}")
    if not uses_triton(tokens_NL.device, implementation):
        return ngram_drafts_reference(tokens_NL, slot_B, length_B, num_drafts, min_match_len, max_match_len)
    drafts_BK = torch.empty(len(slot_B), num_drafts, dtype=torch.int64, device=tokens_NL.device)
    if len(slot_B):
        match_lens = min_match_len, max_match_len
        ngram_triton.launch(tokens_NL, slot_B, length_B, drafts_BK, *match_lens)
    return drafts_BK


def ngram_drafts_reference(
    tokens_NL: torch.Tensor,
    slot_B: torch.Tensor,
    length_B: torch.Tensor,
    num_drafts: int,
    min_match_len: int,
    max_match_len: int,
) -> torch.Tensor:
    """Compute it in torch, over whole rows."""
    tokens_BL, length_B1 = tokens_NL[slot_B], length_B[:, None].long().clamp(max=tokens_NL.shape[1])
    place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    agrees_BL = place_L < length_B1 - 1  # an earlier match ends before the last token
    match_len_BL = torch.zeros_like(tokens_BL, dtype=torch.int64)
    for back in range(max_match_len):
        last_B1 = tokens_BL.gather(1, (length_B1 - 1 - back).clamp(min=0))
        agrees_BL = agrees_BL & (place_L >= back) & (tokens_BL.roll(back, dims=1) == last_B1)
        match_len_BL += agrees_BL
    is_found_BL = match_len_BL >= min_match_len
    best_B = (match_len_BL * len(place_L) + place_L).masked_fill(~is_found_BL, -1).amax(dim=1)
    start_B1 = best_B[:, None] % len(place_L) + 1
    period_B1 = (length_B1 - start_B1).clamp(min=1)
    draft_K = torch.arange(num_drafts, device=tokens_BL.device)
    at_BK = (start_B1 + draft_K % period_B1).clamp(max=len(place_L) - 1)
    return tokens_BL.gather(1, at_BK).long().masked_fill(best_B[:, None] < 0, NO_DRAFT)
