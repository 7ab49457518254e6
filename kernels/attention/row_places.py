"""Positions and KV slots of a decode step's rows, computed on the device in one launch.

Row q of sequence b is at position first[b] + q and writes to the slot of that position in the sequence's blocks. Rows
past a sequence's limit (drafts beyond its last possible token) get its last position instead and write to the scratch
slot; their results are not used.

Legend: B sequences, Q rows of each, M entries of a block table.
"""

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.attention import row_places_triton
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature

_INTEGERS = (torch.int32, torch.int64)
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


def row_places(
    first_B: torch.Tensor,
    num_rows: int,
    limit_B: torch.Tensor,
    block_tables_BM: torch.Tensor,
    *,
    block_size: int,
    scratch_slot: int,
    implementation: Implementation = Implementation.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute positions and slots, int64 [B, Q]; the host reads nothing.

    Args:
        first_B: int32 or int64, position of each sequence's first row, below 2^31; may be strided, as may `limit_B`.
        num_rows: Q, at least 1.
        limit_B: int32 or int64, positions that each sequence may use, at least 1; the tables cover them.
        block_tables_BM: int32 or int64; rows may be strided.
        block_size: positions per block.
        scratch_slot: slot of rows past the limit.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = (
        signature(first_B), signature(limit_B), signature(block_tables_BM), num_rows, block_size, implementation,
    )  # fmt: skip
    uses = _FORMS.find(key)
    if uses is None:
        require_tensor("first_B", first_B, [None], _INTEGERS)
        require_tensor("limit_B", limit_B, [len(first_B)], _INTEGERS, first_B.device)
        require_tensor("block_tables_BM", block_tables_BM, [len(first_B), None], _INTEGERS, first_B.device)
        require_rows("block_tables_BM", block_tables_BM)
        require(len(first_B) == 0 or block_tables_BM.shape[1] > 0, "block_tables_BM", "has no column")
        require(num_rows > 0, "num_rows", f"is {num_rows}, not positive")
        require(block_size > 0, "block_size", f"is {block_size}, not positive")
        uses = _FORMS.keep(key, uses_triton(first_B.device, implementation))
    if uses:
        positions_BQ = torch.empty(len(first_B), num_rows, dtype=torch.int64, device=first_B.device)
        slots_BQ = torch.empty_like(positions_BQ)
        if len(first_B):
            places = first_B, limit_B, block_tables_BM, positions_BQ, slots_BQ
            row_places_triton.launch(*places, block_size=block_size, scratch_slot=scratch_slot)
        return positions_BQ, slots_BQ
    return row_places_reference(first_B, num_rows, limit_B, block_tables_BM, block_size, scratch_slot)


def row_places_reference(
    first_B: torch.Tensor,
    num_rows: int,
    limit_B: torch.Tensor,
    block_tables_BM: torch.Tensor,
    block_size: int,
    scratch_slot: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `row_places` in torch, in eleven operations."""
    offsets = torch.arange(num_rows, device=first_B.device)
    wanted_BQ = first_B[:, None] + offsets
    last_B1 = limit_B[:, None] - 1
    positions_BQ = torch.minimum(wanted_BQ, last_B1)
    blocks_BQ = block_tables_BM.gather(1, positions_BQ // block_size)
    slots_BQ = blocks_BQ * block_size + positions_BQ % block_size
    return positions_BQ.long(), slots_BQ.long().masked_fill(wanted_BQ > last_B1, scratch_slot)
