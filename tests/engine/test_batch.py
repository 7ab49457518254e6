import numpy as np
import pytest
import torch

from baton.engine.step.batch import ChunkRows, DecodeRows, decode_batch, prefill_inputs
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.tests.engine.toy import ToyModel

pytestmark = pytest.mark.fast
BLOCK_SIZE, NUM_BLOCKS = 4, 10


def pool_of():
    return KVPool(ToyModel().kv_layout(BLOCK_SIZE), NUM_BLOCKS, torch.device("cpu"))


def chunk_of(tokens, start, length, blocks, **options):
    return ChunkRows(
        token_ids=np.array(tokens, dtype=np.int64), start=start, length=length, blocks=list(blocks), **options
    )


def test_prefill_lays_chunks_out_one_after_the_other():
    chunks = [
        chunk_of([10, 11, 12, 13, 14, 15], 3, 3, [7, 2, 9]),  # ends its prompt
        chunk_of([20, 21, 22, 23, 24, 25, 26, 27, 28], 0, 5, [1, 0, 4]),  # goes on
        chunk_of([5], 0, 1, [3]),  # a whole prompt of one token
    ]
    pool = pool_of()
    inputs = prefill_inputs(chunks, pool)
    assert inputs.token_ids_T.tolist() == [13, 14, 15, 20, 21, 22, 23, 24, 5]
    assert inputs.next_token_ids_T.tolist() == [14, 15, 0, 21, 22, 23, 24, 25, 0]
    assert inputs.last_row_F.tolist() == [2, 8]
    assert inputs.known_F == (-1, -1)
    assert inputs.batch.positions_T.tolist() == [3, 4, 5, 0, 1, 2, 3, 4, 0]
    tables = [BlockTable(tuple(chunk.blocks), BLOCK_SIZE) for chunk in chunks]
    expected = [
        table.slot(at) for chunk, table in zip(chunks, tables, strict=True) for at in range(chunk.start, chunk.end)
    ]
    assert inputs.batch.slots_T.tolist() == expected
    scratch = pool.num_blocks
    assert inputs.batch.block_tables_BM.tolist() == [[7, 2], [1, 0], [3, scratch]]
    assert inputs.batch.query_lens == (3, 5, 1)
    assert inputs.batch.context_lens == (6, 5, 1)


def test_prefill_with_no_prompt_that_ends():
    inputs = prefill_inputs([chunk_of([1, 2, 3], 0, 2, [0])], pool_of())
    assert inputs.last_row_F.shape == (0,)
    assert inputs.next_token_ids_T.tolist() == [2, 3]


def test_the_newest_token_of_a_sequence_that_is_computed_again_is_known_and_not_computed():
    chunks = [
        chunk_of([4, 5, 6, 7, 8, 9], 2, 3, [0, 1], knows_next=True),  # ends with 8, and 9 follows
        chunk_of([1, 2, 3], 0, 3, [2]),  # its next is sampled
        chunk_of([4, 5, 6, 7], 0, 2, [3], knows_next=True),  # goes on
    ]
    inputs = prefill_inputs(chunks, pool_of())
    assert [chunk.is_last for chunk in chunks] == [True, True, False]
    assert inputs.token_ids_T.tolist() == [6, 7, 8, 1, 2, 3, 4, 5]
    assert inputs.next_token_ids_T.tolist() == [7, 8, 9, 2, 3, 0, 5, 6]
    assert inputs.last_row_F.tolist() == [2, 5]
    assert inputs.known_F == (9, -1)
    assert inputs.batch.context_lens == (5, 3, 2)


def test_a_chunk_past_its_table_or_prompt_is_a_bug():
    for chunk in [chunk_of(range(9), 0, 5, [0]), chunk_of([1, 2], 1, 2, [0]), chunk_of([1], 0, 0, [0])]:
        with pytest.raises(AssertionError):
            prefill_inputs([chunk], pool_of())


def test_decode_rows_past_the_room_write_to_the_scratch_slot():
    pool = pool_of()
    rows = DecodeRows(
        block_tables_BM=torch.tensor([[8, 5, 6], [2, pool.num_blocks, pool.num_blocks]]),
        limit_B=torch.tensor([11, 4]),  # the first ends inside its last block (the model's length)
        draft_cap_B=torch.tensor([3, 3]),
    )
    batch = decode_batch(torch.tensor([8, 2]), 4, rows, 11, pool)
    assert batch.positions_BQ.tolist() == [[8, 9, 10, 10], [2, 3, 3, 3]]
    scratch = pool.scratch_slot
    assert batch.slots_BQ.tolist() == [[24, 25, 26, scratch], [10, 11, scratch, scratch]]
    assert batch.max_context_len == 11
