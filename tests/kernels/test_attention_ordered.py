"""Attention of one order of sums, in the interpreter: against softmax written out, and bit for bit against itself.

What the interpreter can prove is which keys a row sees, in which tiles and parts they come, and that nothing else takes
part: its sums within a tile are numpy's. That instructions keep the promise is for `tests/gpu/test_invariant_cuda.py`.
"""

import itertools

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention import ordered_triton as attention_ordered_triton
from baton.kernels.attention.ordered import (
    attention_ordered_decode,
    attention_ordered_prefill,
    attention_ordered_prefill_lens,
)
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import assert_deterministic, relative_error, same_bits, strided
from baton.tests.kernels.test_attention_prefill import MIXED, Sequences, naive

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE


class Context:
    """One sequence: its whole prompt's queries, and KV in blocks that lie scattered among NaN."""

    def __init__(self, length, heads=(2, 1), head_dim=16, block_size=16, dtype=torch.bfloat16):
        whole = Sequences([(length, 0)], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
        self.query, self.key, self.value, self.table = whole.query, whole.key, whole.value, whole.tables
        self.wanted = whole.wanted

    def prefill(self, start, end, implementation=TRITON):
        return attention_ordered_prefill_lens(
            self.query[start:end], self.key, self.value, self.table, [end - start], [end],
            implementation=implementation,
        )  # fmt: skip

    def decode(self, rows, bound, is_split, neighbours=0):
        """These rows as one sequence's, at their positions, beside others of other lengths."""
        positions = torch.tensor([list(rows)] + [[3] * len(rows)] * neighbours)
        query = self.query[positions]
        table = self.table.expand(1 + neighbours, -1)
        return attention_ordered_decode(
            query, self.key, self.value, table, positions, bound, is_split=is_split, implementation=TRITON
        )[0]  # fmt: skip


@pytest.mark.long
def test_chunks_are_softmax_written_out():
    sequences = Sequences(MIXED)
    found = attention_ordered_prefill_lens(
        sequences.query, sequences.key, sequences.value, sequences.tables, sequences.lens, sequences.contexts,
        implementation=TRITON,
    )  # fmt: skip
    assert relative_error(found, sequences.wanted()) < 4e-3


@pytest.mark.parametrize("heads", [(2, 1), (7, 1), (3, 3)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 8), (128, 64), (256, 16)])
def test_shapes(heads, head_dim, block_size):
    sequences = Sequences([(3, 60), (0, 5), (17, 0), (1, 66)], heads=heads, head_dim=head_dim, block_size=block_size)
    found = attention_ordered_prefill_lens(
        sequences.query, sequences.key, sequences.value, sequences.tables.int(), sequences.lens, sequences.contexts,
        implementation=TRITON,
    )  # fmt: skip
    assert relative_error(found, sequences.wanted()) < 4e-3


def test_parts_are_added_to_softmax_written_out():
    context = Context(attention_ordered_triton.PART_LEN + 70)
    wanted = context.wanted()
    assert relative_error(context.prefill(540, 582), wanted[540:582]) < 4e-3
    for is_split in (False, True):
        assert relative_error(context.decode((511, 512, 581), 600, is_split), wanted[[511, 512, 581]]) < 4e-3


def test_a_row_has_one_value_whatever_computes_it():
    """Chunks of several lengths; decode with one row and five, split and not, bounds near and far, neighbours."""
    length = attention_ordered_triton.PART_LEN + 70
    context = Context(length)
    wanted = context.prefill(500, length)

    def rows(start, end):
        return wanted[start - 500 : end - 500]

    for cuts in ((500, 501, 512, 513, length), (505, 575, 576, length)):
        for start, end in itertools.pairwise(cuts):
            assert same_bits(context.prefill(start, end), rows(start, end)), (start, end)
    for is_split in (False, True):
        for bound in (length, 2000):
            last = (length - 1,)
            assert same_bits(context.decode(last, bound, is_split), rows(length - 1, length)), (is_split, bound)
        several = range(509, 514)
        assert same_bits(context.decode(several, length, is_split, neighbours=2), rows(509, 514)), is_split
    assert same_bits(context.decode((500,), 512, None), rows(500, 501))


@pytest.mark.parametrize("at_once", [0, 1, 2, 5])
def test_what_parts_leave_is_kept_of_few_sequences_at_once(at_once, monkeypatch):
    """Five sequences in one turn and in several, the last of which is shorter: the same bits, and no more memory."""
    context = Context(attention_ordered_triton.PART_LEN + 6)
    positions = torch.tensor([[517, 516], [-1, 3], [511, 512], [2, 1], [513, 0]])
    query = context.query[positions.clamp(min=0)]
    row_bytes = 4 * (16 + 2) * 2 * 2 * 2  # two queries, two heads, two parts

    def run():
        taken = []
        empty = torch.empty

        def noted(*sizes, **options):
            made = empty(*sizes, **options)
            taken.append(made.nbytes * (made.dtype == torch.float32))
            return made

        with monkeypatch.context() as patched:
            patched.setattr(attention_ordered_triton.torch, "empty", noted)
            found = attention_ordered_decode(
                query, context.key, context.value, context.table.expand(5, -1), positions, 518,
                is_split=True, implementation=TRITON,
            )  # fmt: skip
        return found, sum(taken)

    wanted, most = run()
    assert most == 5 * row_bytes
    monkeypatch.setattr(attention_ordered_triton, "MAX_PARTS_BYTES", at_once * row_bytes + row_bytes // 2)
    found, taken = run()
    assert same_bits(found, wanted)
    assert taken == max(1, at_once) * row_bytes, "of a single sequence there is no less"


@pytest.mark.long
@pytest.mark.parametrize("is_split", [False, True])
def test_rows_that_see_nothing_are_zero(is_split):
    context = Context(40, dtype=torch.float16)
    positions = torch.tensor([[-1, 5], [-600, -1], [39, 38]], dtype=torch.int32)
    query = strided(torch.randn(3, 2, 2, 16).half(), dim=1)
    table = context.table.expand(3, -1)

    def run(implementation=TRITON):
        return attention_ordered_decode(
            query, context.key.nan_to_num(0.0), context.value.nan_to_num(0.0), table, positions, 600,
            is_split=is_split, implementation=implementation,
        )  # fmt: skip

    found = assert_deterministic(run, positions, table)
    assert not found[1].any()
    assert not found[0, 0].any()
    assert relative_error(found, run(REFERENCE)) < 2e-3


@pytest.mark.fast
def test_the_reference_is_the_invariant_one():
    sequences = Sequences(MIXED, dtype=torch.float64)
    found = attention_ordered_prefill_lens(
        sequences.query, sequences.key, sequences.value, sequences.tables, sequences.lens, sequences.contexts,
        implementation=REFERENCE,
    )  # fmt: skip
    assert relative_error(found, sequences.wanted()) < 1e-12


@pytest.mark.fast
def test_nothing_to_do():
    context = Context(20)
    none = attention_ordered_prefill_lens(
        context.query[:0], context.key, context.value, context.table[:0], [], [], implementation=TRITON
    )
    assert none.shape == (0, 2, 16)
    none = attention_ordered_decode(
        context.query[:0][:, None], context.key, context.value, context.table[:0], torch.zeros(0, 1).long(), 20,
        implementation=TRITON,
    )  # fmt: skip
    assert none.shape == (0, 1, 2, 16)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query_BQAD", {"query_BQAD": torch.zeros(1, 1, 3, 16)}),
        ("query_BQAD", {"query_BQAD": torch.zeros(1, 1, 3, 32).bfloat16()[..., ::2]}),
        ("key_NHSD", {"key_NHSD": torch.zeros(3, 1, 16, 32).bfloat16()}),
        ("value_NHSD", {"value_NHSD": torch.zeros(3, 1, 16, 16).bfloat16()}),
        ("block_tables_BM", {"block_tables_BM": torch.zeros(1, 2)}),
        ("block_tables_BM", {"block_tables_BM": torch.zeros(2, 2).long()}),
        ("positions_BQ", {"positions_BQ": torch.zeros(1, 2).long()}),
        ("max_context_len", {"max_context_len": 0}),
    ],
)
def test_arguments_that_do_not_fit_are_named(argument, changes):
    context = Context(20)
    arguments = {
        "query_BQAD": context.query[None, :1],
        "key_NHSD": context.key,
        "value_NHSD": context.value,
        "block_tables_BM": context.table,
        "positions_BQ": torch.zeros(1, 1).long(),
        "max_context_len": 20,
    }
    with pytest.raises(KernelArgumentInvalid) as refused:
        attention_ordered_decode(**arguments | changes, implementation=TRITON)
    assert refused.value.fields["argument"] == argument


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_no_entry_past_a_sequences_end_is_used_and_blocks_may_lie_apart(implementation):
    sequences = Sequences([(3, 14), (0, 0), (4, 60)])
    sequences.tables[0, 2:], sequences.tables[1] = -1, 1 << 40
    pool = torch.full((len(sequences.key), 2, 2, 16, 16), float("nan")).bfloat16()
    pool[:, 0], pool[:, 1] = sequences.key, sequences.value
    kv = pool[:, 0], pool[:, 1]
    found = attention_ordered_prefill_lens(
        sequences.query, *kv, sequences.tables, sequences.lens, sequences.contexts, implementation=implementation
    )
    wanted = sequences.wanted()
    assert relative_error(found, wanted) < 4e-3
    positions = torch.tensor([[15, 16], [-1, -1], [62, 63]])
    query = torch.stack([sequences.query[1:3], sequences.query[:2], sequences.query[5:7]])
    found = attention_ordered_decode(query, *kv, sequences.tables, positions, 64, implementation=implementation)
    assert relative_error(torch.cat([found[0], found[2]]), wanted[[1, 2, 5, 6]]) < 4e-3
    assert not found[1].any()
    none = attention_ordered_decode(
        query[:, :0], *kv, sequences.tables, positions[:, :0], 64, implementation=implementation
    )
    assert none.shape == (3, 0, 4, 16)


@pytest.mark.fast
def test_blocks_that_the_reference_cannot_step_over_are_refused():
    context = Context(20, block_size=48)
    with pytest.raises(KernelArgumentInvalid, match="key_NHSD"):
        context.prefill(0, 20, REFERENCE)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_contexts_beyond_the_tables_and_tables_without_columns_are_refused(implementation):
    context = Context(20)
    for table, end in ((context.table, 33), (context.table[:, :0], 20)):
        with pytest.raises(KernelArgumentInvalid, match="context_lens"):
            attention_ordered_prefill_lens(
                context.query, context.key, context.value, table, [20], [end], implementation=implementation
            )
    starts, contexts = torch.tensor([0, 20]), torch.tensor([20])
    with pytest.raises(KernelArgumentInvalid, match="block_tables_BM"):
        attention_ordered_prefill(
            context.query, context.key, context.value, context.table[:, :0], starts, contexts,
            implementation=implementation,
        )  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
@pytest.mark.long
def test_a_table_of_one_column_may_come_from_anywhere(implementation):
    sequences = Sequences([(3, 5), (2, 9)])
    table = sequences.tables.T.clone(memory_format=torch.contiguous_format).T  # its only column's stride says nothing
    assert table.stride() == (1, 2)
    found = attention_ordered_prefill_lens(
        sequences.query, sequences.key, sequences.value, table, sequences.lens, sequences.contexts,
        implementation=implementation,
    )  # fmt: skip
    assert relative_error(found, sequences.wanted()) < 4e-3
    positions = torch.tensor([[7], [10]])
    found = attention_ordered_decode(
        sequences.query[[2, 4]][:, None], sequences.key, sequences.value, table, positions, 16,
        implementation=implementation,
    )  # fmt: skip
    assert relative_error(found[:, 0], sequences.wanted()[[2, 4]]) < 4e-3


@pytest.mark.fast
def test_arguments_of_chunks_that_do_not_fit_are_named():
    context = Context(20)
    starts, contexts = torch.tensor([0, 20]), torch.tensor([20])
    for argument, numbers in (("query_starts_E", (contexts, contexts)), ("context_lens_B", (starts, starts))):
        with pytest.raises(KernelArgumentInvalid) as refused:
            attention_ordered_prefill(
                context.query, context.key, context.value, context.table, *numbers, implementation=TRITON
            )
        assert refused.value.fields["argument"] == argument
    with pytest.raises(KernelArgumentInvalid, match="query_lens"):
        attention_ordered_prefill_lens(
            context.query, context.key, context.value, context.table, [19], [20], implementation=TRITON
        )


def test_the_formulation_that_is_compared_with():
    """One row by hand: softmax of two scores."""
    query, keys = torch.tensor([[[2.0]]]), torch.tensor([[[1.0]], [[0.5]]])
    weights = torch.tensor([2.0, 1.0]).double().softmax(0)
    wanted = (weights * torch.tensor([3.0, 7.0])).sum()
    found = naive(query, keys, torch.tensor([[[3.0]], [[7.0]]]), 1, 1.0)
    assert abs(float(found) - float(wanted)) < 1e-12
