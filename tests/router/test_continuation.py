"""Which tokens an attempt starts from, and whether another follows, for any schedule of tokens and losses."""

import dataclasses
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import (
    BatonError,
    InvalidRequest,
    ModelOutputInvalid,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestDeadlineExceeded,
    TransferFailed,
    WorkerLost,
    WorkersIncompatible,
)
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.router.attempt.continuation import MAX_RETRIES, Cause, Continuation, MigrationLimits, cause_of

pytestmark = pytest.mark.fast
PROMPT = (90, 91, 92)
ANSWER = tuple(range(100, 112))
AMPLE = 10_000
LOST = WorkerLost("gone", cause="death", role="decode")


def request_of(deadline_s=1e9, **values):
    return GenerationRequest(
        key=AttemptKey("r", 1),
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=len(ANSWER), seed=5, **values),
        deadline_s=deadline_s,
        num_draft_tokens=2,
    )


def answer_of(max_migrations=2, wait_s=30.0, uniform=lambda: 0.5, **values):
    return Continuation(request_of(**values), MigrationLimits(max_migrations=max_migrations, wait_s=wait_s), uniform)


def lose(answer, error=LOST, now_s=0.0):
    return answer.failed(error, prefill="p", decode="d", now_s=now_s)


def test_the_next_attempt_begins_behind_what_the_client_has():
    answer = answer_of(prompt_logprobs=3, n=2)
    first = answer.begin(AMPLE)
    assert first == answer.request
    assert answer.take(1, 0, ANSWER[:4]) == list(ANSWER[:4])
    assert lose(answer).cause is Cause.DEATH
    second = answer.begin(AMPLE)
    assert second.key == AttemptKey("r", 2)
    assert second.prompt_token_ids == (*PROMPT, *ANSWER[:4])
    assert (second.num_forced, second.forced_token_ids) == (4, ANSWER[:4])
    assert second.capacity_len == first.capacity_len, "the same positions in the end"
    assert second.sampling == dataclasses.replace(first.sampling, prompt_logprobs=None)
    assert (second.deadline_s, second.num_draft_tokens) == (first.deadline_s, first.num_draft_tokens)
    assert answer.take(1, 4, ANSWER[4:6]) == [], "a late word of the first attempt"
    assert answer.take(2, 4, ANSWER[4:]) == list(ANSWER[4:])
    answer.finish()
    assert answer.take(2, 12, [7]) == []
    assert list(answer.token_ids) == list(ANSWER)


def test_an_attempt_that_gave_nothing_is_followed_by_the_same_request():
    answer = answer_of(prompt_logprobs=3)
    answer.begin(AMPLE)
    lose(answer)
    again = answer.begin(AMPLE)
    assert dataclasses.replace(again, key=answer.request.key) == answer.request


@pytest.mark.parametrize(("room_len", "num_forced"), [(AMPLE, 6), (9, 6), (8, 5), (4, 1), (3, 0), (2, 0)])
def test_what_a_prefill_worker_cannot_hold_is_computed_again_and_compared(room_len, num_forced):
    answer = answer_of()
    answer.begin(AMPLE)
    answer.take(1, 0, ANSWER[:6])
    lose(answer)
    assert answer.begin(room_len).num_forced == num_forced
    assert answer.take(2, num_forced, ANSWER[num_forced:8]) == list(ANSWER[6:8])
    with pytest.raises(TransferFailed) as caught:
        answer.take(2, num_forced, [*ANSWER[num_forced:7], 1])
    assert caught.value.fields == {"diverged": True}
    with pytest.raises(TransferFailed):
        lose(answer, caught.value)


def test_an_answer_that_is_whole_but_for_the_word_of_its_end_is_asked_for_its_last_token():
    answer = answer_of()
    answer.begin(AMPLE)
    answer.take(1, 0, ANSWER)
    lose(answer, ProtocolError("cut off", cause="stream"))
    assert answer.begin(AMPLE).num_forced == len(ANSWER) - 1
    assert answer.take(2, len(ANSWER) - 1, ANSWER[-1:]) == []


def test_without_migration_everything_is_computed_again_and_a_loss_ends():
    answer = answer_of(max_migrations=0)
    answer.begin(AMPLE)
    answer.take(1, 0, ANSWER[:3])
    assert lose(answer, TransferFailed("t")).cause is None
    again = answer.begin(AMPLE)
    assert (again.prompt_token_ids, again.num_forced) == (PROMPT, 0)
    assert answer.take(2, 0, ANSWER[:4]) == [ANSWER[3]]
    with pytest.raises(WorkerLost, match="gone; tried p and d: TransferFailed; p and d: death"):
        lose(answer)
    with pytest.raises(NoWorker):
        answer.no_pair(NoWorker("nobody"), 0.0)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (WorkerLost("x"), Cause.DEATH),
        (WorkerLost("x", cause="fence"), Cause.FENCE),
        (WorkerLost("x", cause="nonsense"), Cause.DEATH),
        (ProtocolError("x", cause="stream"), Cause.STREAM),
        (ProtocolError("x"), None),
        (BatonError("x", cause="stream"), Cause.STREAM),
        (BatonError("x"), None),
        (TransferFailed("x", cause="death"), None),
        (InvalidRequest("x", cause="death"), None),
        (Overloaded("x"), None),
        (RequestDeadlineExceeded("x"), None),
    ],
)
def test_only_a_lost_stream_moves(error, cause):
    assert cause_of(error) is cause
    answer = answer_of()
    answer.begin(AMPLE)
    if cause is not None:
        assert lose(answer, error).cause is cause
    elif not isinstance(error, TransferFailed):
        with pytest.raises(type(error)) as caught:
            lose(answer, error)
        assert caught.value is error, "nothing else was tried"


@pytest.mark.parametrize("kind", [TransferFailed, ModelOutputInvalid])
def test_migrations_and_retries_are_counted_apart_and_both_end(kind):
    answer = answer_of(max_migrations=2)
    for number in range(2 + MAX_RETRIES):
        answer.begin(AMPLE)
        lose(answer, LOST if number % 2 else kind("t"))
    assert (answer.num_migrations, answer.num_retries) == (2, MAX_RETRIES)
    assert not answer.migrates
    answer.begin(AMPLE)
    with pytest.raises(WorkerLost) as caught:
        lose(answer)
    assert len(caught.value.fields["tried"]) == 3 + MAX_RETRIES
    answer = answer_of()
    for _ in range(MAX_RETRIES):
        answer.begin(AMPLE)
        lose(answer, kind("t"))
    answer.begin(AMPLE)
    with pytest.raises(kind, match="tried p and d"):
        lose(answer, kind("t"))
    answer = answer_of()
    answer.begin(AMPLE)
    with pytest.raises(WorkerLost):
        lose(answer, now_s=1e9)


def test_the_first_pause_is_none_and_the_next_grow_and_scatter():
    draws = iter([0.0, 0.99, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    answer = answer_of(max_migrations=8, uniform=lambda: next(draws))
    delays_s = []
    for _ in range(8):
        answer.begin(AMPLE)
        delays_s.append(lose(answer).delay_s)
    assert delays_s == pytest.approx([0.0, 0.025, 0.149, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_who_has_begun_waits_within_bounds_and_who_has_not_does_not():
    nobody = NoWorker("nobody")
    answer = answer_of(wait_s=2.0)
    with pytest.raises(NoWorker):
        answer.no_pair(nobody, 0.0)
    answer.begin(AMPLE)
    with pytest.raises(Overloaded):
        lose(answer, Overloaded("full"))
    answer = answer_of(wait_s=2.0)
    answer.begin(AMPLE)
    lose(answer, now_s=10.0)
    now_s, num_looks = 10.0, 0
    with pytest.raises(NoWorker, match="tried p and d: death"):
        while True:
            delay_s = answer.no_pair(nobody, now_s)
            assert delay_s > 0
            now_s, num_looks = now_s + delay_s, num_looks + 1
    assert 12.0 <= now_s < 12.01
    assert num_looks < 20
    answer.begin(AMPLE)
    answer.take(2, 0, ANSWER[:1])
    assert lose(answer, Overloaded("full"), now_s=50.0).cause is None, "tokens came, so it waits anew"
    with pytest.raises(WorkersIncompatible):
        answer.no_pair(WorkersIncompatible("none"), 52.0)


def test_the_deadline_ends_a_wait():
    answer = answer_of(deadline_s=1.0)
    answer.begin(AMPLE)
    lose(answer, now_s=0.9)
    assert answer.no_pair(NoWorker("nobody"), 0.96) <= 0.04 + 1e-9
    with pytest.raises(RequestDeadlineExceeded) as caught:
        answer.no_pair(NoWorker("nobody"), 1.0)
    assert caught.value.fields == {"num_tokens": 0, "tried": ["p and d: death"]}


class Worker:
    """The stream of one attempt: every token in order, in events of any size, some said again."""

    def __init__(self, request):
        self.attempt = request.key.attempt
        assert request.prompt_token_ids == (*PROMPT, *ANSWER[: request.num_forced])
        self.at = request.num_forced

    def say(self, size, overlap):
        index = max(self.at - overlap, 0)
        tokens = ANSWER[index : self.at + size]
        self.at = min(self.at + size, len(ANSWER))
        return index, tokens


STEPS = st.one_of(
    st.tuples(st.just("say"), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("late"), st.integers(1, 4), st.integers(0, 3)),
    st.tuples(st.just("lose"), st.sampled_from(list(Cause)), st.just(0)),
    st.tuples(st.just("transfer"), st.just(0), st.just(0)),
    st.tuples(st.just("overloaded"), st.just(0), st.just(0)),
)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=40),
    max_migrations=st.integers(0, 3),
    rooms=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_any_schedule_gives_each_token_once_in_order(steps, max_migrations, rooms):
    answer = answer_of(max_migrations=max_migrations)
    room_of = partial(_cycled, rooms)
    workers = [Worker(answer.begin(room_of(0)))]
    got, num_lost, now_s = [], 0, 0.0
    for kind, value, other in steps:
        if kind == "say":
            index, tokens = workers[-1].say(value, other)
            new = answer.take(workers[-1].attempt, index, tokens)
            got += new
            if workers[-1].at == len(ANSWER):
                answer.finish()
                break
        elif kind == "late":
            late = workers[other % len(workers)]
            if late is not workers[-1]:
                index, tokens = late.say(value, 0)
                assert answer.take(late.attempt, index, tokens) == []
        else:
            error = {
                "lose": WorkerLost("x", cause=value.value if kind == "lose" else ""),
                "transfer": TransferFailed("x"),
                "overloaded": Overloaded("x"),
            }[kind]
            now_s += 0.01
            try:
                again = lose(answer, error, now_s)
            except type(error):
                break
            num_lost += again.cause is not None
            assert again.delay_s < 2.0
            workers.append(Worker(answer.begin(room_of(len(workers)))))
        assert tuple(got) == ANSWER[: len(got)]
        assert list(answer.token_ids) == got
    assert tuple(got) == ANSWER[: len(got)]
    assert num_lost == answer.num_migrations <= max_migrations
    assert answer.num_retries <= MAX_RETRIES
    assert [worker.attempt for worker in workers] == list(range(1, len(workers) + 1))


def _cycled(rooms, index):
    return rooms[index % len(rooms)]


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5), wrong_at=st.integers(0, 11), room=st.integers(0, 20))
@pytest.mark.long
def test_a_token_that_differs_is_never_passed_on_where_one_is_known(cuts, wrong_at, room):
    """Whatever an attempt says again of what the client has, it is the same or an error."""
    answer = answer_of(max_migrations=8)
    attempt, have = 1, 0
    answer.begin(AMPLE)
    for size in cuts:
        have = min(have + size, len(ANSWER) - 1)
        answer.take(attempt, answer.num_forced if attempt > 1 else 0, ANSWER[answer.num_forced : have])
        lose(answer)
        request = answer.begin(room)
        attempt += 1
        told = list(ANSWER[request.num_forced :])
        if request.num_forced <= wrong_at < have:
            told[wrong_at - request.num_forced] = 0
            with pytest.raises(TransferFailed):
                answer.take(attempt, request.num_forced, told)
        assert tuple(answer.token_ids) == ANSWER[:have]
