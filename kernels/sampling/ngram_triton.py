# mypy: ignore-errors
"""`ngram_drafts` in Triton: a program for each sequence, which goes through its tokens from the first to the last.

Shapes: E places of a turn, K drafts, filled up to a power of two.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.launcher import Launcher
from baton.kernels.variant import Variant

_PLACES = 1024
_NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["slots", "lengths", "slot_stride", "length_stride", "row_stride", "row_len", "num_drafts"]
)
def _ngram_kernel(
    tokens, slots, lengths, drafts,
    row_stride: tl.int64, slot_stride: tl.int64, length_stride: tl.int64, row_len: tl.int32, num_drafts: tl.int32,
    MIN_LEN: tl.constexpr, MAX_LEN: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
) -> None:  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + sequence * length_stride), row_len).to(tl.int32)
    row = tokens + tl.load(slots + sequence * slot_stride).to(tl.int64) * row_stride
    best_E = tl.full([E], -1, tl.int64)
    for first in range(0, length - 1, E):
        place_E = first + tl.arange(0, E)
        agrees_E = place_E < length - 1
        match_len_E = tl.zeros([E], tl.int64)
        for back in tl.static_range(MAX_LEN):
            last = tl.load(row + length - 1 - back, mask=length > back, other=-1)
            agrees_E = agrees_E & (place_E >= back)
            agrees_E = agrees_E & (tl.load(row + place_E - back, mask=agrees_E, other=-2) == last)
            match_len_E += agrees_E.to(tl.int64)
        found_E = (match_len_E << 32) | place_E.to(tl.int64)
        best_E = tl.where(match_len_E >= MIN_LEN, tl.maximum(best_E, found_E), best_E)
    best = tl.max(best_E, axis=0)
    start = ((best & 0xFFFFFFFF) + 1).to(tl.int32)
    period = tl.maximum(length - start, 1)
    draft_K = tl.arange(0, K)
    is_draft_K = draft_K < num_drafts
    token_K = tl.load(row + start + draft_K % period, mask=is_draft_K & (best >= 0), other=-1)
    tl.store(drafts + sequence * num_drafts + draft_K, token_K.to(tl.int64), mask=is_draft_K)


def launch(
    tokens_NL: torch.Tensor,
    slot_B: torch.Tensor,
    length_B: torch.Tensor,
    drafts_BK: torch.Tensor,
    min_match_len: int,
    max_match_len: int,
) -> None:
    """Write the drafts; see `ngram_drafts`, which has checked the arguments."""
    num_sequences, num_drafts = drafts_BK.shape
    arguments = (
        tokens_NL, slot_B, length_B, drafts_BK,
        tokens_NL.stride(0), slot_B.stride(0), length_B.stride(0), tokens_NL.shape[1], num_drafts,
    )  # fmt: skip
    constants = {"MIN_LEN": min_match_len, "MAX_LEN": max_match_len, "E": _PLACES}
    constants |= {"K": triton.next_power_of_2(num_drafts), "num_warps": _NUM_WARPS}
    _launch_ngram((num_sequences,), arguments, constants)


_launch_ngram = Launcher(_ngram_kernel)


def variants() -> list[Variant]:
    """Of the engine's int64."""
    types = {"tokens": "*i32", "slots": "*i64", "lengths": "*i64", "drafts": "*i64"}
    types |= dict.fromkeys(("row_stride", "slot_stride", "length_stride"), "i64")
    types |= dict.fromkeys(("row_len", "num_drafts"), "i32")
    return [
        Variant(
            name="ngram_drafts",
            kernel=_ngram_kernel,
            types=types,
            constants={"MIN_LEN": 2, "MAX_LEN": 4, "E": _PLACES, "K": 4},
            num_warps=_NUM_WARPS,
            max_registers=128,
            max_shared_bytes=8192,
            on_amd=True,
        )
    ]
