"""Block tables as attention reads them: as 32-bit words, masked past a sequence's end, and checked for size.

Lengths on the device are not checked: only their owner can know whether they fit the tables.

Legend: B sequences, M entries of a block table, T tokens, A query heads, H KV heads, N blocks, S positions per block, D
head size.
"""

from collections.abc import Sequence

import torch

from baton.kernels.arguments import require


def in_words(block_tables_BM: torch.Tensor) -> torch.Tensor:
    """View the same memory as int32; an int64 entry becomes two words, the low word first."""
    if block_tables_BM.stride(1) != 1:  # a single column, whose stride is arbitrary in torch
        block_tables_BM = block_tables_BM.as_strided(block_tables_BM.shape, (block_tables_BM.stride(0), 1))
    return block_tables_BM.view(torch.int32)


def within(block_tables_BM: torch.Tensor, last_B: torch.Tensor, block_size: int) -> torch.Tensor:
    """Copy the tables with entries past each sequence's last position set to 0, since those may not be valid blocks."""
    first_M = torch.arange(block_tables_BM.shape[1], device=block_tables_BM.device) * block_size
    return block_tables_BM.masked_fill(first_M > last_B[:, None], 0)


def require_lens(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
) -> None:
    """Refuse host-side lengths that do not fit the queries, each other, or the tables.

    Raises:
        KernelArgumentInvalid: the lengths do not fit, or a tensor has the wrong number of dimensions.
    """
    for name, tensor, num_dims in (
        ("query_TAD", query_TAD, 3),
        ("key_NHSD", key_NHSD, 4),
        ("block_tables_BM", block_tables_BM, 2),
    ):
        require(tensor.dim() == num_dims, name, f"has shape {list(tensor.shape)}, not {num_dims} dimensions")
    require(len(query_lens) == len(context_lens), "context_lens", f"are {len(context_lens)}, not {len(query_lens)}")
    require(sum(query_lens) == query_TAD.shape[0], "query_lens", f"make {sum(query_lens)}, not {query_TAD.shape[0]}")
    read = [(rows, context) for rows, context in zip(query_lens, context_lens, strict=True) if rows]
    fits = all(0 <= rows <= context for rows, context in read)
    require(fits, "context_lens", "a sequence sees fewer keys than it has rows")
    room = block_tables_BM.shape[1] * key_NHSD.shape[2]
    longest = max((context for _, context in read), default=0)
    require(longest <= room, "context_lens", f"reach {longest} positions, and the tables {room}")


def require_columns(num_tokens: int, block_tables_BM: torch.Tensor) -> None:
    """Refuse tables without columns if there are rows to look up.

    Raises:
        KernelArgumentInvalid: there are rows, and the tables have no column.
    """
    is_read = num_tokens > 0 and block_tables_BM.shape[0] > 0
    require(not is_read or block_tables_BM.shape[1] > 0, "block_tables_BM", "has no column")
