"""The text of an answer, and where it ends: as vLLM says, however tokens cut it, in the worker and the router alike."""

import gc
import time
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.requests.answer_text import AnswerText, StopMatcher
from baton.core.requests.request import FinishReason
from baton.core.requests.sampling import SamplingParams
from baton.engine.finish import FinishChecker
from baton.tests.core.byte_tokenizers import EOS, NUM_TOKENS, SECOND_EOS, SPECIAL, byte_tokenizer, fallback_tokenizer

pytestmark = pytest.mark.fast
TOKENIZER = byte_tokenizer()
RETURN = TOKENIZER._fast.token_to_id("return")
CHARACTERS = [chr(code).encode() for code in range(0x80, 0x110000, 64) if not 0xD800 <= code < 0xE000]
BEGUN = {data[:size] for data in CHARACTERS for size in range(1, len(data))}


@dataclass
class Answer:
    """What became of an answer's tokens."""

    num_tokens: int
    reason: FinishReason | None
    text: str
    stop_reason: int | str | None


def library_text(token_ids, sampling):
    return TOKENIZER._fast.decode(list(token_ids), skip_special_tokens=sampling.skip_special_tokens)


def certain_text(token_ids, sampling):
    """The text of tokens but for a character at the end that has only begun."""
    known = [TOKENIZER._decoded(token_id) for token_id in token_ids]
    if sampling.skip_special_tokens:
        known = [
            b"" if token_id in (EOS, SECOND_EOS, SPECIAL) else data
            for token_id, data in zip(token_ids, known, strict=True)
        ]
    data = b"".join(known)
    begun = next((size for size in (3, 2, 1) if data[-size:] in BEGUN and len(data) >= size), 0)
    return data[: len(data) - begun].decode("utf-8", "replace")


def vllm_says(token_ids, sampling):
    """The rule, read off vLLM: the whole text is looked at again after each token."""
    ends = set() if sampling.ignore_eos else {EOS, SECOND_EOS}
    border = 0  # characters in which no stop string may end
    for count, token_id in enumerate(token_ids, 1):
        stopped = token_id in ends or token_id in sampling.stop_token_ids
        shown = token_ids[: count - 1] if stopped and not sampling.include_stop_str_in_output else token_ids[:count]
        text = certain_text(shown, sampling)
        reason = None if token_id in ends else token_id
        if count <= sampling.min_tokens:
            border = len(text)
        best = None
        for stop in sampling.stop if shown == token_ids[:count] else ():
            at = text.find(stop, max(0, border - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), at, stop)
        if best is not None:
            cut = best[0] if sampling.include_stop_str_in_output else best[1]
            return Answer(count, FinishReason.STOP, text[:cut], best[2])
        if stopped:
            return Answer(count, FinishReason.STOP, library_text(shown, sampling), reason)
        if count == sampling.max_tokens:
            return Answer(count, FinishReason.LENGTH, library_text(shown, sampling), None)
    return Answer(len(token_ids), None, library_text(token_ids, sampling), None)


def baton_says(token_ids, sampling, steps):
    checker = FinishChecker(sampling, TOKENIZER.eos_token_ids, TOKENIZER)
    text, shown, num_kept, reason, rest = AnswerText(TOKENIZER, sampling), [], 0, None, list(token_ids)
    for size in [*steps, len(rest)]:
        step, rest = rest[:size], rest[size:]
        kept, reason = checker.accept(step)
        shown.append(text.push(kept))
        num_kept += len(kept)
        if reason is not None:
            break
    shown.append(text.finish())
    return Answer(num_kept, reason, "".join(shown), text.stop_reason), shown


LETTERS = st.sampled_from([*b"abet", 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x80, 0xED, 0xA0, 0xF0, EOS, SECOND_EOS, SPECIAL])
TOKENS = st.lists(st.one_of(LETTERS, LETTERS, st.integers(0, NUM_TOKENS - 1)), max_size=16)
STOPS = st.lists(st.text("abetr\u00e9\u20ac\ufffd<", min_size=1, max_size=3), max_size=3).map(tuple)


@pytest.mark.long
@settings(max_examples=400)
@given(
    TOKENS,
    STOPS,
    st.lists(st.sampled_from([ord("b"), SPECIAL, EOS, RETURN]), max_size=2).map(tuple),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=8),
)
@example([*b"def main\n"], (), (10,), 0, False, False, True, [])
@example([*b"abcd"], ("bc",), (), 2, False, False, True, [])
@example([RETURN], ("return", "et"), (), 0, False, False, True, [])
@example([*b"ab"], ("b", "ab"), (), 0, False, False, True, [])
@example([*b"aab"], ("ab",), (ord("b"),), 0, True, False, True, [])
@example([*b"a", 0xE2, 0x82], ("\ufffd",), (), 0, False, False, True, [])
@example([*b"a", SPECIAL, *b"b"], ("|>",), (), 0, False, False, False, [])
def test_an_answer_ends_where_vllm_ends_it(token_ids, stop, stop_ids, min_tokens, include, ignore_eos, skip, steps):
    sampling = SamplingParams(
        max_tokens=12,
        stop=stop,
        stop_token_ids=stop_ids,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    expected = vllm_says(token_ids, sampling)
    answer, shown = baton_says(token_ids, sampling, steps)
    assert answer == expected
    assert baton_says(token_ids, sampling, [1] * len(token_ids))[0] == expected, "the cuts of steps do not matter"
    assert all(expected.text.startswith("".join(shown[:at])) for at in range(len(shown))), "nothing is taken back"


@pytest.mark.long
@settings(max_examples=400)
@given(
    st.text("abx", max_size=14),
    st.lists(st.text("abx", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(0, 5), max_size=8),
    st.booleans(),
)
@example("xabc", ("abc",), [3], False)
@example("xxabcd", ("abcd",), [5], False)
@example("aabaab", ("abaa",), [4, 1], False)
def test_a_stop_string_is_found_however_its_text_is_cut(text, stop, sizes, include):
    """A piece may be longer than all stop strings, and end in the middle of one."""
    ends = [(at + len(one), -len(one), one) for one in stop if (at := text.find(one)) >= 0]
    first_end = min(ends, default=(0,))[0]
    matched = next((one for one in stop if any(end[0] == first_end and end[2] == one for end in ends)), None)
    expected = text if matched is None else text[: first_end - (0 if include else len(matched))]
    matcher, shown, rest = StopMatcher(stop, include=include), [], text
    for size in [*sizes, len(text)]:
        shown.append(matcher.push(rest[:size]))
        rest = rest[size:]
        assert expected.startswith("".join(shown)), "nothing is taken back"
    assert ("".join(shown) + matcher.flush(), matcher.matched) == (expected, matched)


@pytest.mark.long
@settings(max_examples=300)
@given(TOKENS, st.booleans())
def test_a_stream_is_the_librarys_text_whole_and_says_it_at_once(token_ids, skip):
    sampling = SamplingParams(skip_special_tokens=skip)
    stream, shown = TOKENIZER.stream(skip_special_tokens=skip), ""
    for count, token_id in enumerate(token_ids, 1):
        shown += stream.push(token_id)
        assert shown == certain_text(token_ids[:count], sampling)
    assert shown + stream.flush() == library_text(token_ids, sampling)


@given(st.text("ab\u00e9\u20ac ", max_size=12), st.integers(0, 5))
def test_another_tokenizers_stream_is_its_text_whole(text, num_special):
    tokenizer = fallback_tokenizer()
    ids = tokenizer.encode(text.replace(" ", "▁"))
    ids = [*ids[:3], *[1] * num_special, *ids[3:]]
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 264), max_size=120))
@example([2 + 0x41, 2 + 0x80, 260, 263])
@example([2 + 0x80] * 100)
def test_another_tokenizers_stream_takes_any_tokens_and_withholds_few(ids):
    stream, num_silent = fallback_tokenizer().stream(), 0
    for token_id in ids:
        num_silent = 0 if stream.push(token_id) or token_id <= 1 else num_silent + 1
        assert num_silent < 33
    stream.flush()


BROKEN = {
    "no character at all": [0x80],
    "a character that never ends": [0xF0, 0x90],
    "half of a surrogate": [0xED, 0xA0],
    "all kinds": [0xE2, 0x82, 0xF0, 0x90, 0x80, 0xC3, 0xFF, 0x41, 0xA9],
}


def cpu_s(token_ids, sampling):
    """CPU of the router and of the worker for one answer; the least of some runs, since others use the machine."""
    best = float("inf")
    gc.disable()
    try:
        for _ in range(3):
            text, checker = AnswerText(TOKENIZER, sampling), FinishChecker(sampling, (EOS,), TOKENIZER)
            begin_s = time.thread_time()
            for token_id in token_ids:
                checker.accept((token_id,))
                text.push((token_id,))
            text.finish()
            best = min(best, time.thread_time() - begin_s)
    finally:
        gc.enable()
    return best


@pytest.mark.long
@pytest.mark.parametrize("stop", [(), ("zzz", "yy")])
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_text_costs_what_plain_text_costs(kind, stop):
    num_tokens = 20_000 if stop else 100_000
    sampling = SamplingParams(max_tokens=num_tokens + 1, stop=stop, ignore_eos=True)
    some = BROKEN[kind]
    for _ in range(3):  # a look at the machine's clock may be unlucky, not three times
        plain_s = cpu_s([ord("a")] * num_tokens, sampling)
        broken_s = cpu_s((some * (num_tokens // len(some) + 1))[:num_tokens], sampling)
        if broken_s <= 1.5 * plain_s:
            return
    pytest.fail(f"{broken_s:.3f} s for broken text, {plain_s:.3f} s for plain")
