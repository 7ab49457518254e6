"""Flags: where words lie, and that a late word is never another launch's."""

import pytest

from baton.kvtransfer.flag_page import FlagPage

pytestmark = pytest.mark.fast
SLOT_WORDS = 8


def page(num_slots=4):
    buffer = bytearray(b"\xff" * FlagPage.num_bytes(num_slots, SLOT_WORDS))
    return FlagPage(buffer, SLOT_WORDS), buffer


def raise_flag(buffer, flag, *digests):
    FlagPage.raise_flag(buffer, SLOT_WORDS, flag.slot, flag.sequence, digests)


def test_a_flag_is_up_when_its_number_stands_there():
    flags, buffer = page()
    first, second = flags.claim(2)
    assert flags.num_claimed == 2
    assert not flags.is_up(first)
    assert not flags.is_up(second)
    raise_flag(buffer, second, 2**64 - 1, 7)
    assert (flags.is_up(first), flags.is_up(second)) == (False, True)
    assert flags.digests(second, 2) == [2**64 - 1, 7]
    at = flags.offset_bytes(second.slot)
    assert memoryview(buffer)[at : at + 16].cast("Q").tolist() == [second.sequence, 2**64 - 1]
    assert flags.offset_bytes(1) == SLOT_WORDS * 8
    assert flags.max_digests == 7


def test_there_are_as_many_as_fit_all_of_a_claim_or_none():
    flags, _ = page(num_slots=3)
    claimed = flags.claim(2)
    assert flags.claim(2) is None
    assert flags.claim(1) is not None
    assert flags.claim() is None
    flags.release(claimed[0])
    assert flags.claim() is not None


def test_what_stood_in_a_slot_is_never_taken_for_the_next_launch():
    flags, buffer = page(num_slots=1)
    seen = set()
    for _ in range(5):
        (flag,) = flags.claim()
        assert not flags.is_up(flag)
        assert flag.sequence not in seen
        seen.add(flag.sequence)
        raise_flag(buffer, flag, 1)
        assert flags.is_up(flag)
        flags.release(flag)


def test_a_new_owner_clears_the_words_of_the_last():
    flags, buffer = page()
    for flag in flags.claim(4):
        raise_flag(buffer, flag, 1)
    later = FlagPage(buffer, SLOT_WORDS)
    assert not any(later.is_up(flag) for flag in later.claim(4))
