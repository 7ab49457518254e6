"""A batch's metadata at the size of a graph: what pads it means nothing, and nothing of an earlier batch stays."""

from dataclasses import fields, replace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.pad_varlen import VarlenMetadata, pad_varlen
from baton.tests.kernels.harness import Guards, same_bits, strided

KINDS = [Implementation.TRITON, Implementation.REFERENCE]
NAMES = [field.name for field in fields(VarlenMetadata)]


def metadata(query_lens, prefix_lens, num_entries, dtype=torch.int64):
    query_lens, prefix_lens = torch.tensor(query_lens, dtype=dtype), torch.tensor(prefix_lens, dtype=dtype)
    num_tokens = int(query_lens.sum())
    zero = torch.zeros(1, dtype=dtype)
    return VarlenMetadata(
        cu_query=torch.cat([zero, query_lens.cumsum(0)]).to(dtype),
        cu_kv=torch.cat([zero, (query_lens + prefix_lens).cumsum(0)]).to(dtype),
        query_lens=query_lens,
        prefix_lens=prefix_lens,
        block_tables=torch.randint(1, 1000, (len(query_lens), num_entries), dtype=dtype),
        positions=torch.randint(0, 5000, (num_tokens,), dtype=dtype),
        slots=torch.randint(0, 5000, (num_tokens,), dtype=dtype),
    )


def room(guards, num_sequences, num_entries, num_tokens, dtype=torch.int64):
    """Poisoned: what an earlier batch left."""
    return VarlenMetadata(
        cu_query=guards.empty(num_sequences + 1, dtype=dtype),
        cu_kv=guards.empty(num_sequences + 1, dtype=dtype),
        query_lens=guards.empty(num_sequences, dtype=dtype),
        prefix_lens=guards.empty(num_sequences, dtype=dtype),
        block_tables=guards.empty(num_sequences, num_entries, dtype=dtype),
        positions=guards.empty(num_tokens, dtype=dtype),
        slots=guards.empty(num_tokens, dtype=dtype),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.int32, torch.int32), (torch.int64, torch.int32)])
@pytest.mark.parametrize(
    ("lens", "prefixes", "num_entries", "sizes"),
    [
        ([3, 0, 5], [10, 0, 7], 4, (8, 6, 16)),
        ([1, 1], [3, 900], 60, (2, 60, 2)),
        ([4] * 5, [1] * 5, 3, (9, 3, 600)),
        pytest.param([4] * 5, [1] * 5, 3, (513, 3, 40), marks=pytest.mark.slow),
        ([2], [0], 1, (3, 1030, 5)),
        ([], [], 0, (4, 2, 3)),
        ([], [], 0, (0, 0, 0)),
    ],
)
def test_rules(kind, dtypes, lens, prefixes, num_entries, sizes):
    guards = Guards()
    batch, graph = metadata(lens, prefixes, num_entries, dtypes[0]), room(guards, *sizes, dtype=dtypes[1])
    pad_varlen(batch, graph, null_block=77, implementation=kind)
    guards.check()
    n, t, B = len(lens), sum(lens), sizes[0]
    total, kv_total = sum(lens), sum(lens) + sum(prefixes)
    assert graph.cu_query.tolist() == batch.cu_query.tolist() + [total] * (B - n)
    assert graph.cu_kv.tolist() == batch.cu_kv.tolist() + [kv_total] * (B - n)
    assert graph.query_lens.tolist() == lens + [0] * (B - n)
    assert graph.prefix_lens.tolist() == prefixes + [0] * (B - n)
    wanted = torch.full((B, sizes[1]), 77, dtype=dtypes[1])
    wanted[:n, :num_entries] = batch.block_tables
    assert torch.equal(graph.block_tables, wanted)
    assert graph.positions.tolist() == batch.positions.tolist() + [0] * (sizes[2] - t)
    assert graph.slots.tolist() == batch.slots.tolist() + [-1] * (sizes[2] - t)


@pytest.mark.fast
def test_a_smaller_batch_after_a_larger_one_leaves_nothing_of_it():
    guards = Guards()
    graph, fresh = room(guards, 6, 9, 30), room(guards, 6, 9, 30)
    small = metadata([2, 3], [1, 1], 4)
    pad_varlen(metadata([5] * 6, [40] * 6, 9), graph, implementation=Implementation.TRITON)
    for target in (graph, fresh):
        pad_varlen(small, target, implementation=Implementation.TRITON)
    assert all(same_bits(getattr(graph, name), getattr(fresh, name)) for name in NAMES)


def test_table_rows_may_be_strided():
    batch, guards = metadata([2, 3], [1, 1], 4), Guards()
    graph, wanted = room(guards, 3, 5, 8), room(guards, 3, 5, 8)
    wide = torch.full((3, 9), -7)
    spread = replace(batch, block_tables=strided(batch.block_tables))
    pad_varlen(spread, replace(graph, block_tables=wide[:, 2:7]), implementation=Implementation.TRITON)
    pad_varlen(batch, wanted, implementation=Implementation.REFERENCE)
    assert torch.equal(wide[:, 2:7], wanted.block_tables)
    assert wide[:, :2].eq(-7).all()
    assert wide[:, 7:].eq(-7).all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("batch.cu_query", lambda batch, graph: (replace(batch, cu_query=batch.cu_query[1:]), graph)),
        ("batch.prefix_lens", lambda batch, graph: (replace(batch, prefix_lens=batch.prefix_lens.float()), graph)),
        ("graph.query_lens", lambda batch, graph: (batch, replace(graph, query_lens=graph.query_lens[:1]))),
        ("graph.block_tables", lambda batch, graph: (batch, replace(graph, block_tables=graph.block_tables[0]))),
        (
            "graph.block_tables",
            lambda batch, graph: (batch, replace(graph, block_tables=graph.block_tables.T.contiguous().T)),
        ),
        ("batch.block_tables", lambda batch, graph: (metadata([1] * 4, [0] * 4, 2), graph)),
        ("batch.block_tables", lambda batch, graph: (metadata([1], [0], 6), graph)),
        ("batch.slots", lambda batch, graph: (metadata([9, 9], [0, 0], 2), graph)),
        ("batch.positions", lambda batch, graph: (replace(batch, positions=batch.positions[1:]), graph)),
        ("batch.slots", lambda batch, graph: (replace(batch, slots=batch.slots[0]), graph)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument, change):
    batch, graph = change(metadata([2, 3], [1, 1], 4), room(Guards(), 3, 5, 8))
    with pytest.raises(KernelArgumentInvalid) as caught:
        pad_varlen(batch, graph)
    assert caught.value.fields["argument"] == argument
