"""Block tables as attention reads them: in words, without what lies past a sequence's end, and with room for contexts.

It refuses to look at a device's lengths: whether those fit their tables only their owner can know.

Legend: B sequences, M entries of a block table, T tokens, A query heads, H KV heads, N blocks, S positions per block,
D head size.
"""

from collections.abc import Sequence

import torch

from baton.kernels.arguments import require


def in_words(block_tables_BM: torch.Tensor) -> torch.Tensor:
    """The same memory as int32, where an int64 is two, the lower first."""
    if block_tables_BM.stride(1) != 1:  # of a single column, whose stride torch lets be anything, but not here
        block_tables_BM = block_tables_BM.as_strided(block_tables_BM.shape, (block_tables_BM.stride(0), 1))
    return block_tables_BM.view(torch.int32)


def within(block_tables_BM: torch.Tensor, last_B: torch.Tensor, block_size: int) -> torch.Tensor:
    """A copy whose entries past each sequence's last position are 0: what stood there may have been no block."""
    first_M = torch.arange(block_tables_BM.shape[1], device=block_tables_BM.device) * block_size
    return block_tables_BM.masked_fill(first_M > last_B[:, None], 0)


def require_lens(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
) -> None:
    """Refuse lengths on the host that do not fit the queries, each other, or the tables.

    Raises:
        KernelArgumentInvalid: they do not; or a tensor has not the dimensions to tell.
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
    """Refuse tables in which rows find no block.

    Raises:
        KernelArgumentInvalid: there are rows, and tables of no column.
    """
    is_read = num_tokens > 0 and block_tables_BM.shape[0] > 0
    require(not is_read or block_tables_BM.shape[1] > 0, "block_tables_BM", "has no column")
