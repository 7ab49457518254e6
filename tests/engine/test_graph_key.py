"""Which graphs are captured, and which one a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import ConfigInvalid
from baton.engine.graphs.key import (
    EagerReason,
    GraphKey,
    GraphKind,
    GraphSizes,
    default_sizes,
    default_widths,
    max_invariant_entries,
)

pytestmark = pytest.mark.fast
counts = st.integers(1, 40)
ascending = st.sets(counts, min_size=1, max_size=5).map(lambda values: tuple(sorted(values)))
all_sizes = st.builds(
    GraphSizes,
    sizes=ascending,
    widths=ascending,
    num_draft_tokens=st.integers(0, 4),
    max_entries=st.integers(1, 900),
    has_mtp=st.booleans(),
    num_owners=st.sampled_from((1, 2, 4, 8)),
)


@pytest.mark.long
@given(all_sizes)
def test_every_graph_once_and_the_largest_first(sizes):
    keys = list(sizes.keys())
    assert len({str(key) for key in keys}) == len(set(keys)) == len(keys)
    entries = [key.num_sequences * key.width for key in keys]
    assert entries == sorted(entries, reverse=True)
    assert all(key.num_attended * key.width <= sizes.max_entries for key in keys)


@given(all_sizes, counts, counts, st.integers(0, 5), st.data())
@pytest.mark.long
def test_a_step_takes_the_next_size_and_all_its_graphs_are_captured(sizes, num_sequences, num_blocks, num_drafts, data):
    most_owned = 0
    if sizes.num_owners > 1:
        most_owned = data.draw(st.integers(-(-num_sequences // sizes.num_owners), num_sequences))
    shape = sizes.shape_for(num_sequences, num_blocks, most_owned)
    if isinstance(shape, EagerReason):
        fits = num_sequences <= sizes.sizes[-1]
        assert shape is (EagerReason.CONTEXT if fits else EagerReason.SEQUENCES)
        return
    size, width, num_each = shape
    assert (num_each > 0) == (sizes.num_owners > 1)
    assert most_owned <= num_each <= size
    assert size >= num_sequences
    assert not any(num_sequences <= other < size for other in sizes.sizes)
    assert width >= num_blocks
    assert not any(num_blocks <= other < width for other in sizes.widths)
    keys = sizes.step_keys(shape, num_drafts)
    if num_drafts > sizes.num_draft_tokens:
        assert keys is EagerReason.DRAFTS
        return
    assert set(keys) <= set(sizes.keys())
    kinds = 1 + sizes.has_mtp * ((sizes.num_draft_tokens >= 1) + (num_drafts >= 2))
    assert len({key.kind for key in keys}) == len(keys) == kinds


def test_a_kind_is_said_and_not_read_off_the_sizes():
    sizes = GraphSizes(sizes=(2,), widths=(4,), num_draft_tokens=2, max_entries=8)
    one_row = {key.kind for key in sizes.keys() if key.num_rows == 1}
    assert one_row == set(GraphKind)  # the MTP head sees every token, also in a step without drafts
    looked_up = GraphSizes(sizes=(2,), widths=(4,), num_draft_tokens=2, max_entries=8, has_mtp=False)
    assert [(key.kind, key.num_rows) for key in looked_up.keys()] == [(GraphKind.VERIFY, rows) for rows in (3, 2, 1)]
    assert str(GraphKey(GraphKind.DRAFT, 1, 2, 4)) == "draft of 2 x 1 rows over 4 blocks"


def test_ranks_have_room_for_a_deal_that_is_about_even_and_for_any():
    """A quarter more than their share, rounded up to a size; of few sequences there is one room for all deals."""

    def rooms(num_owners):
        sizes = GraphSizes(
            sizes=default_sizes(256), widths=(4,), num_draft_tokens=0, max_entries=1 << 20, num_owners=num_owners
        )
        found = {}
        for key in sizes.keys():
            found.setdefault(key.num_sequences, set()).add(key.num_each)
        return sizes, found

    _, alone = rooms(1)
    assert set(map(tuple, alone.values())) == {(0,)}
    _, two = rooms(2)
    assert [two[size] for size in (1, 2, 8, 24, 64)] == [{1}, {2}, {8}, {16, 24}, {48, 64}]
    sizes, eight = rooms(8)
    assert [eight[size] for size in (1, 2, 8, 64, 256)] == [{1}, {1, 2}, {2, 8}, {16, 64}, {48, 256}]
    assert [sizes.shape_for(250, 4, most_owned) for most_owned in (32, 48, 49, 250)] == [
        (256, 4, 48), (256, 4, 48), (256, 4, 256), (256, 4, 256),
    ]  # fmt: skip
    key = next(iter(sizes.keys()))
    assert str(key) == "verify of 256 x 1 rows over 4 blocks, 256 at each rank"
    assert key.num_attended == 256


def test_tables_are_of_the_sequences_that_a_rank_attends_for():
    """So contexts that have a graph where the deal is about even may have none where it is not."""
    sizes = GraphSizes(sizes=(4, 16), widths=(8, 32), num_draft_tokens=0, max_entries=128, num_owners=8)
    assert sizes.shape_for(16, 32, 4) == (16, 32, 4)
    assert sizes.shape_for(16, 32, 5) is EagerReason.CONTEXT
    assert sizes.shape_for(16, 8, 5) == (16, 8, 16)


def test_defaults():
    assert default_sizes(1) == (1,)
    assert default_sizes(5) == (1, 2, 4, 5)
    assert default_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert default_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert default_widths(3) == (3,)
    assert default_widths(16) == (16,)
    assert default_widths(100) == (16, 32, 64, 100)
    assert max_invariant_entries(36, 16) == 184
    assert max_invariant_entries(1000, 64) == 16


@pytest.mark.parametrize(
    ("mode", "sizes", "message"),
    [
        ("auto", "1,x", "not written like"),
        ("auto", "1,", "not written like"),
        ("auto", ",", "not written like"),
        ("auto", "0,1", "do not rise"),
        ("auto", "4,2", "do not rise"),
        ("auto", "2,2", "do not rise"),
        ("off", "1", "is off"),
    ],
)
def test_sizes_that_are_none_are_refused(mode, sizes, message):
    with pytest.raises(ConfigInvalid, match=message) as caught:
        CudaGraphConfig.parse(mode, sizes)
    assert caught.value.fields["keys"] == ["cuda_graph_sizes"]


def test_sizes_that_do_not_fit_a_worker_are_refused():
    config = CudaGraphConfig.parse("auto", "1, 4,16")
    assert config.sizes == (1, 4, 16)
    config.require_fits(device="cuda", max_num_seqs=16)
    with pytest.raises(ConfigInvalid, match="device is cpu"):
        config.require_fits(device="cpu", max_num_seqs=16)
    with pytest.raises(ConfigInvalid, match="16 exceeds max_num_seqs, 8"):
        config.require_fits(device="cuda", max_num_seqs=8)
    for mode in ("auto", "off"):
        CudaGraphConfig.parse(mode, "").require_fits(device="cpu", max_num_seqs=1)
