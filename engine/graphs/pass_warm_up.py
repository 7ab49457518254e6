"""Passes of a model over padding, in every size class that serving meets: what they launch is compiled then, not later.

Which form of a kernel is launched follows from shapes alone: rows of a step, rows of a sequence, width of the block
tables. Forms change at powers of two, or between them; so each class is represented by powers of two, by one and a half
times those, and by the limits themselves. Positions lie at the beginning of tables that name nothing but the scratch
block: a pass over wide tables reads as little as one over narrow ones, and no sequence's KV is touched.

Of prompts there is, for each length, also the step with all else that a step may have beside it: float8 KV is widened
or not by how much all tables together have room for.

Legend: B sequences, Q rows of each, T tokens, W entries of a block table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.engine.graphs.key import default_widths
from baton.engine.step.batch import ChunkRows, DecodeRows, prefill_inputs
from baton.engine.step.passes import EagerPasses, ignore_layer
from baton.kvcache.pool import KVPool
from baton.model.model import Model

_WIDTHS_LEN = (1024, 4096)  # positions from which on other forms of attention may pay
_MAX_TOKENS = 16_384  # of a pass: beyond, nothing is another form than there
_MAX_CHUNKS_TOKENS = 2048  # of several chunks together, which differ from one only in how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What steps there may be.

    Attributes:
        num_tokens: of one step at most: a chunk's, or of all chunks together.
        num_sequences: of one step at most.
        context_len: positions of a sequence at most.
    """

    num_tokens: int
    num_sequences: int
    context_len: int


def classes(most: int) -> tuple[int, ...]:
    """Sizes from 1 to `most` that stand for all of these."""
    found, power = {most}, 1
    while power < most:
        found |= {power, min(power * 3 // 2, most)}
        power *= 2
    return tuple(sorted(found))


def prefill_shapes(reach: Reach, block_size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(tokens of each chunk, entries of a table): one chunk, as many as fit, and one beside many of one token."""
    last = -(-reach.context_len // block_size)
    for length in classes(min(reach.num_tokens, reach.context_len, _MAX_TOKENS)):
        least = -(-length // block_size)
        widths = {least, last, *(-(-bound // block_size) for bound in _WIDTHS_LEN)}
        most = max(1, min(reach.num_tokens, _MAX_CHUNKS_TOKENS) // length)
        equal = {(length,), (length,) * min(reach.num_sequences, most)}
        for width in sorted(width for width in widths if least <= width <= last):
            for lens in sorted(equal):
                yield lens, width
        others = min(reach.num_sequences - 1, reach.num_tokens - length)
        if (mixed := (length,) + (1,) * others) not in equal:
            yield mixed, last


def decode_shapes(reach: Reach, block_size: int) -> Iterator[tuple[int, int]]:
    """(sequences, entries of a table)."""
    for width in default_widths(-(-reach.context_len // block_size)):
        for count in classes(reach.num_sequences):
            yield count, width


@torch.inference_mode()
def warm_up_prefill_passes(model: Model, pool: KVPool, reach: Reach) -> None:
    """Trunk and MTP head over chunks."""
    for lens, width in prefill_shapes(reach, pool.layout.block_size):
        inputs = prefill_inputs([_chunk(length, pool) for length in lens], pool)
        tables_BW = inputs.batch.block_tables_BM.new_full((len(lens), width), pool.num_blocks)
        batch = replace(inputs.batch, block_tables_BM=tables_BW)
        hidden_TD = model.trunk(inputs.token_ids_T, batch, pool, ignore_layer)
        if pool.layout.has_mtp:
            model.mtp(inputs.next_token_ids_T, hidden_TD, batch, pool, ignore_layer)


@torch.inference_mode()
def warm_up_decode_passes(model: Model, pool: KVPool, reach: Reach, num_draft_tokens: int) -> None:
    """Those of a step with each number of drafts."""
    for count, width in decode_shapes(reach, pool.layout.block_size):
        first_B = torch.zeros(count, dtype=torch.int64, device=pool.device)
        tables_BW = first_B.new_full((count, width), pool.num_blocks)
        rows = DecodeRows(block_tables_BM=tables_BW, limit_B=first_B + 1, draft_cap_B=first_B)
        bound = min(width * pool.layout.block_size, reach.context_len)
        for num_drafts in range(num_draft_tokens, -1, -1):
            passes = EagerPasses(model, pool, rows, bound)
            ids_BQ = first_B.new_zeros(count, num_drafts + 1)
            _, hidden_TD = passes.trunk(ids_BQ, first_B)
            if num_draft_tokens:
                assert hidden_TD is not None
                _, entries_TD = passes.extend(None, (ids_BQ, hidden_TD, first_B))
                assert entries_TD is not None
                passes.draft(first_B, entries_TD[:: num_drafts + 1], first_B)


def _chunk(length: int, pool: KVPool) -> ChunkRows:
    num_blocks = -(-length // pool.layout.block_size)
    ids = np.zeros(length, dtype=np.int64)
    return ChunkRows(token_ids=ids, start=0, length=length, blocks=(pool.num_blocks,) * num_blocks)
