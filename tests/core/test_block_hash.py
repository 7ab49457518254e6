"""Names of blocks: equal exactly where the KV is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.block_hash import HASH_BYTES, block_hashes

pytestmark = pytest.mark.fast

COMMON = {"model": "m", "tenant": "", "block_size": 4, "with_mtp": False}


def names(token_ids, **changes):
    return block_hashes(token_ids, **{**COMMON, **changes})


def test_names_are_the_same_in_every_process():
    assert [name.hex() for name in names(range(8))] == [
        "27a61fabe84a87c3a2af10387981da80",
        "d56c34740ee9c45d731884aeada136d0",
    ]


@pytest.mark.parametrize(
    ("with_mtp", "prompt_lens"), [(False, {3: 0, 4: 1, 7: 1, 8: 2}), (True, {4: 0, 5: 1, 8: 1, 9: 2})]
)
def test_only_blocks_whose_kv_the_prompt_fixes_have_a_name(with_mtp, prompt_lens):
    for prompt_len, num_names in prompt_lens.items():
        made = names(range(prompt_len), with_mtp=with_mtp)
        assert len(made) == num_names
        assert all(len(name) == HASH_BYTES for name in made)


@pytest.mark.parametrize("change", [{"model": "n"}, {"tenant": "t"}, {"block_size": 8}, {"with_mtp": True}])
def test_nothing_is_shared_across(change):
    assert not set(names(range(40))) & set(names(range(40), **change))


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=2, max_size=6),
    block_size=st.integers(1, 4),
    with_mtp=st.booleans(),
)
@pytest.mark.long
def test_names_are_equal_exactly_where_all_tokens_before_are(prompts, block_size, with_mtp):
    covered = {}
    for prompt in prompts:
        for at, name in enumerate(names(prompt, block_size=block_size, with_mtp=with_mtp), 1):
            covers = tuple(prompt[: at * block_size + with_mtp])
            assert len(covers) == at * block_size + with_mtp
            assert covered.setdefault(name, covers) == covers
    assert len(set(covered.values())) == len(covered)
