"""A batch's metadata at the size of a captured graph, in one launch: live values first, then what means nothing.

Captured work reads tensors of one size, whatever batch there is. Rows beyond the batch are empty sequences: running
totals stay at their last value, the KV total's at its own and not at the queries', lengths and positions are 0, block
table rows name the null block, slots are -1. Rows of the batch are written whole, so that no block of an earlier batch
stays behind its shorter table row.

Legend: n sequences of the batch, B of the graph, m and M entries of a block table row, t and T tokens.
"""

from dataclasses import dataclass, fields

import torch

from baton.kernels import pad_varlen_triton
from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton

NO_SLOT = -1
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenMetadata:
    """What attention must know of sequences of several lengths; int32 or int64.

    Attributes:
        cu_query: [n + 1], tokens before each sequence, and all of them.
        cu_kv: [n + 1], the same of keys.
        query_lens: [n].
        prefix_lens: [n], keys before the first token.
        block_tables: [n, m], rows may be strided.
        positions: [t].
        slots: [t].
    """

    cu_query: torch.Tensor
    cu_kv: torch.Tensor
    query_lens: torch.Tensor
    prefix_lens: torch.Tensor
    block_tables: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def pad_varlen(
    batch: VarlenMetadata,
    graph: VarlenMetadata,
    *,
    null_block: int = 0,
    implementation: Implementation = Implementation.AUTO,
) -> None:
    """Write the batch, and what pads it, to the tensors that a graph reads.

    Args:
        batch: of n sequences and t tokens.
        graph: of B >= n sequences, M >= m entries and T >= t tokens; every value of it is written.
        null_block: that table entries beyond a row's are.
        implementation: see there.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    _check(batch, graph)
    if uses_triton(graph.slots.device, implementation):
        pad_varlen_triton.launch(
            [getattr(batch, field.name) for field in fields(VarlenMetadata)],
            [getattr(graph, field.name) for field in fields(VarlenMetadata)],
            null_block,
        )
        return
    num_sequences, num_entries = batch.block_tables.shape
    for live, padded in ((batch.cu_query, graph.cu_query), (batch.cu_kv, graph.cu_kv)):
        padded[: len(live)] = live
        padded[len(live) :] = live[-1]
    pairs = [
        (batch.query_lens, graph.query_lens, 0),
        (batch.prefix_lens, graph.prefix_lens, 0),
        (batch.positions, graph.positions, 0),
        (batch.slots, graph.slots, NO_SLOT),
    ]
    for live, padded, filler in pairs:
        padded.fill_(filler)[: len(live)] = live
    graph.block_tables.fill_(null_block)[:num_sequences, :num_entries] = batch.block_tables


def _check(batch: VarlenMetadata, graph: VarlenMetadata) -> None:
    device = graph.slots.device
    for role, metadata in (("batch", batch), ("graph", graph)):
        require(metadata.block_tables.dim() == 2, f"{role}.block_tables", "has not 2 dimensions")
        require(metadata.slots.dim() == 1, f"{role}.slots", "has not 1 dimension")
        num_sequences, num_tokens = len(metadata.block_tables), len(metadata.slots)
        shapes: dict[str, list[int | None]] = {
            "cu_query": [num_sequences + 1],
            "cu_kv": [num_sequences + 1],
            "query_lens": [num_sequences],
            "prefix_lens": [num_sequences],
            "block_tables": [num_sequences, None],
            "positions": [num_tokens],
            "slots": [num_tokens],
        }
        for name, shape in shapes.items():
            tensor = getattr(metadata, name)
            require_tensor(f"{role}.{name}", tensor, shape, _INTEGERS, device)
            require_rows(f"{role}.{name}", tensor)
    for name in ("block_tables", "slots"):
        live, padded = getattr(batch, name), getattr(graph, name)
        fits = all(length <= limit for length, limit in zip(live.shape, padded.shape, strict=True))
        require(fits, f"batch.{name}", f"{list(live.shape)} do not fit into {list(padded.shape)}")
