"""The decode worker against a KV receiver that the test plays: who starts when, what is held, and what is said."""

import threading

import pytest

from baton.core.errors import (
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
)
from baton.core.requests.sampling import SamplingParams
from baton.decode_worker.worker import MAX_ENDED
from baton.engine.sequence import MAX_PREEMPTIONS, Phase
from baton.engine.step.plan import Resume
from baton.proto import kv_pb2
from baton.tests.decode_worker.incoming_transfers import PREFILLERS, Decode, expected_tokens

pytestmark = pytest.mark.fast
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PHASES = [Phase.EXPECTED, Phase.WAITING, Phase.RECEIVING, Phase.READY, Phase.RUNNING]


def prompt_of(at):
    """Of 9 tokens."""
    return [*PROMPT[:7], at, at]


def bring(decode, phase, at=0):
    """A received request in a phase; where it waits it is because another has taken the last block, or slot."""
    request = decode.attend(prompt_of(at), max_tokens=20)
    decode.turn()
    if phase is Phase.EXPECTED:
        return request
    if phase is Phase.WAITING:
        held = decode.allocator.reserve(decode.allocator.num_free * 4)
        decode.incoming_transfers.ask(request)
        decode.turn()
        decode.allocator.release(held)
        assert decode.phase(request) is phase
        return request
    decode.incoming_transfers.ask(request)
    decode.turn()
    if phase is Phase.RECEIVING:
        return request
    decode.incoming_transfers.land(request)
    if phase is Phase.READY:
        taken, decode.scheduler._free_slots = decode.scheduler._free_slots, type(decode.scheduler._free_slots)()
        decode.turn()
        decode.scheduler._free_slots = taken
        assert decode.phase(request) is phase
        return request
    decode.turn()
    decode.turn()
    assert decode.phase(request) is phase
    return request


# Admission


def test_tokens_of_handed_over_and_own_prompts_are_a_plain_loops():
    decode = Decode(chunk_len=5)
    requests = []
    for at in range(8):
        sampled = {"temperature": 1.0, "seed": at, "ignore_eos": False} if at % 3 == 2 else {}
        requests.append(decode.attend(prompt_of(at), local=at % 2 == 1, k=at % 3, max_tokens=10, **sampled))
    for request in requests[::2]:
        decode.hand_over(request)
    decode.turns()
    for request in requests:
        decode.check_finished(request)
    held = decode.worker.inventory()
    assert (held.num_requests_finished, held.num_requests_failed) == (8, 0)
    assert (held.num_local_prefills, held.num_local_prefill_tokens) == (4, 36)
    assert sorted(decode.incoming_transfers.released) == [request.key for request in requests[::2]]
    decode.check_nothing_left()


def test_a_prompt_that_was_handed_over_is_not_computed_again(monkeypatch):
    decode = Decode()
    request = decode.attend(PROMPT)
    placed, steps = [], []
    execute, launch = decode.runner.execute, decode.runner.launch
    monkeypatch.setattr(decode.runner, "execute", lambda operation: [placed.append(operation), execute(operation)][1])
    monkeypatch.setattr(decode.runner, "launch", lambda step: [steps.append(step), launch(step)][1])
    decode.hand_over(request)
    decode.turns()
    decode.check_finished(request)
    _, state = decode.incoming_transfers.prefilled(request)
    assert placed[0].resume == Resume(state.draft_tokens[0], state.hidden)
    assert placed[0].token_ids == (*PROMPT, state.first_token)
    assert not any(step.chunks for step in steps)
    decode.check_nothing_left()


def test_a_reserve_without_a_stream_waits_and_lets_others_pass():
    decode = Decode()
    early, other = decode.attend(prompt_of(0)), decode.attend(prompt_of(1))
    commands = decode.worker._loop._commands
    late = commands.popleft()  # the stream of the first comes later than what its prefill worker asks
    decode.incoming_transfers.ask(early)
    decode.incoming_transfers.ask(other)
    decode.turn()
    assert not decode.incoming_transfers.is_granted(early.key)
    assert decode.incoming_transfers.is_granted(other.key)
    commands.append(late)
    decode.turn()
    assert decode.incoming_transfers.is_granted(early.key)
    for request in (other, early):
        decode.incoming_transfers.land(request)
    decode.turns()
    for request in (other, early):
        decode.check_finished(request)
    decode.check_nothing_left()


def test_a_reserve_that_waits_for_blocks_is_not_overtaken():
    decode = Decode(num_blocks=8)
    held = decode.allocator.reserve(12)
    long, short = decode.attend(prompt_of(0), max_tokens=20), decode.attend(PROMPT[:3], max_tokens=3)
    for request in (long, short):
        decode.incoming_transfers.ask(request)
    decode.turn()
    assert [decode.phase(request) for request in (long, short)] == [Phase.WAITING] * 2
    assert decode.waiting() == {"blocks": 2}
    decode.allocator.release(held)
    decode.turn()
    assert decode.phase(long) is Phase.RECEIVING
    assert decode.phase(short) is Phase.WAITING
    decode.incoming_transfers.land(long)
    decode.turns()
    assert decode.incoming_transfers.is_granted(short.key)
    decode.incoming_transfers.land(short)
    decode.turns()
    decode.check_finished(long)
    decode.check_finished(short)
    decode.check_nothing_left()


def test_a_prompt_of_its_own_and_a_reserve_wait_in_one_line():
    decode = Decode(num_blocks=5, max_num_seqs=4)  # each takes 5 blocks
    first, own, last = (decode.attend(prompt_of(at), local=at == 1, max_tokens=8) for at in range(3))
    decode.turn()
    assert decode.phase(own) is Phase.RUNNING, "none that came before it asks for blocks"
    decode.incoming_transfers.ask(first)
    decode.incoming_transfers.ask(last)
    decode.turn()
    assert decode.phase(first) is decode.phase(last) is Phase.WAITING
    decode.turns()
    decode.check_finished(own)
    assert (decode.phase(first), decode.phase(last)) == (Phase.RECEIVING, Phase.WAITING)
    next_own = decode.attend(prompt_of(3), local=True, max_tokens=8)
    decode.incoming_transfers.land(first)
    decode.turns()
    assert (decode.phase(last), decode.phase(next_own)) == (Phase.RECEIVING, Phase.WAITING), "which came before"
    decode.incoming_transfers.land(last)
    decode.turns()
    for request in (first, last, next_own):
        decode.check_finished(request)
    decode.check_nothing_left()


def test_slots_are_given_in_order_and_come_back():
    decode = Decode(max_num_seqs=2)
    requests = [decode.attend(prompt_of(at), max_tokens=6 + at) for at in range(4)]
    for request in requests:
        decode.incoming_transfers.ask(request)
    decode.turn()
    for request in requests:
        decode.incoming_transfers.land(request)
    decode.turn()
    assert [decode.phase(request) for request in requests] == [Phase.RUNNING] * 2 + [Phase.READY] * 2
    assert [decode.sequence(request).slot for request in requests[:2]] == [0, 1]
    held = decode.worker.inventory()
    assert decode.waiting() == {"slot": 2}
    assert (held.num_requests_waiting, held.num_slots_in_use, held.num_requests_running) == (2, 2, 2)
    ends = []
    while decode.turn():
        ends += [request for request in requests if decode.sinks[request.key].ended and request not in ends]
    assert ends == requests
    for request in requests:
        decode.check_finished(request)
    decode.check_nothing_left()


def test_a_prompt_of_its_own_takes_no_blocks_before_there_is_a_slot_for_it():
    decode = Decode(max_num_seqs=1)
    received = bring(decode, Phase.RUNNING)
    own = decode.attend(prompt_of(5), local=True)
    decode.turn()
    assert decode.phase(own) is Phase.WAITING
    assert decode.sequence(own).table is None
    assert decode.worker.inventory().num_prefill_tokens_queued == 9
    decode.turns()
    decode.check_finished(received)
    decode.check_finished(own)
    decode.check_nothing_left()


def test_late_and_ended_reserves_are_refused():
    decode = Decode(num_blocks=9)
    held = decode.allocator.reserve(36)
    request = decode.attend(prompt_of(0))
    decode.incoming_transfers.ask(request, deadline_s=1.0)
    decode.turn()
    assert decode.phase(request) is Phase.WAITING
    decode.clock.advance(2.0)
    decode.turn()
    assert decode.incoming_transfers.denied == [(request.key, kv_pb2.Deny.BUSY)]
    assert decode.phase(request) is Phase.EXPECTED, "another prefill worker may come"
    decode.allocator.release(held)
    decode.turn()
    assert decode.phase(request) is Phase.EXPECTED
    decode.incoming_transfers.ask(request)
    decode.turn()
    assert decode.phase(request) is Phase.RECEIVING
    decode.incoming_transfers.land(request)
    decode.turns()
    decode.check_finished(request)
    decode.incoming_transfers.ask(request)
    decode.turn()
    assert decode.incoming_transfers.denied[1:] == [(request.key, kv_pb2.Deny.STALE)]
    decode.check_nothing_left()


def test_a_reserve_whose_stream_never_comes_is_refused_in_time():
    decode = Decode()
    other = Decode()
    request = other.attend(prompt_of(0))
    decode.incoming_transfers.ask(request, deadline_s=1.0)
    decode.turn()
    assert decode.incoming_transfers.denied == []
    decode.clock.advance(1.0)
    decode.turn()
    assert decode.incoming_transfers.denied == [(request.key, kv_pb2.Deny.BUSY)]
    decode.check_nothing_left()


def test_the_memory_of_ended_attempts_is_bounded():
    decode = Decode()
    first = decode.attend(prompt_of(0), name="first")
    decode.worker.cancel(first.key)
    decode.turn()
    for number in range(MAX_ENDED - 1):
        decode.worker._ended[number] = None
    last = decode.attend(prompt_of(1), name="last")
    decode.worker.cancel(last.key)
    decode.turn()
    assert len(decode.worker._ended) == MAX_ENDED
    decode.incoming_transfers.ask(first, deadline_s=5.0)
    decode.incoming_transfers.ask(last)
    decode.turn()
    assert decode.incoming_transfers.denied == [(last.key, kv_pb2.Deny.STALE)], "the first is not known any more"
    decode.clock.advance(9.0)
    decode.check_nothing_left()


def test_a_reserve_for_a_prompt_of_its_own_is_refused_or_never_granted():
    decode = Decode()
    own = decode.attend(PROMPT, local=True)
    decode.turn()
    decode.incoming_transfers.ask(own)
    decode.turn()
    assert decode.incoming_transfers.denied == [(own.key, kv_pb2.Deny.STALE)]
    early = decode.attend(PROMPT, local=True)
    decode.incoming_transfers.ask(early, deadline_s=5.0)
    commands = decode.worker._loop._commands
    late = commands.popleft()
    decode.turn()  # its stream may be one that expects KV
    commands.append(late)
    decode.turns()
    assert decode.incoming_transfers.denied[1:] == [(early.key, kv_pb2.Deny.STALE)]
    decode.check_finished(own)
    decode.check_finished(early)
    decode.check_nothing_left()


def test_what_cannot_be_served_is_refused_before_it_is_let_in():
    decode = Decode(num_blocks=9, max_queue_len=1)
    for prompt, sampling, error in (
        ([0] * 90, {"max_tokens": 9}, PromptTooLong),
        ([0] * 20, {"max_tokens": 20}, PromptTooLong),  # the pool
        ([99], {}, InvalidRequest),
        (PROMPT, {"k": 3}, InvalidRequest),
    ):
        with pytest.raises(error):
            decode.attend(prompt, **sampling)
    request = decode.attend(PROMPT, name="a")
    with pytest.raises(Overloaded):
        decode.attend(PROMPT, name="b")
    decode.worker.cancel(request.key)
    decode.check_nothing_left()


def test_an_attempt_that_is_here_already_is_refused():
    decode = Decode()
    request = decode.attend(PROMPT, name="a")
    first = decode.sinks[request.key]
    decode.attend(PROMPT, name="a")
    decode.turn()
    assert isinstance(decode.sinks[request.key].error, RequestCancelled)
    decode.worker.cancel(request.key, decode.sinks[request.key])
    decode.turn()
    assert not first.ended, "it was another stream that was cancelled"
    decode.worker.cancel(request.key, first)
    decode.turn()
    assert isinstance(first.error, RequestCancelled)
    decode.check_nothing_left()


# What is held, and until when


def test_a_sequence_has_all_its_blocks_from_the_start():
    decode = Decode()
    request = bring(decode, Phase.RECEIVING)
    assert request.capacity_len == 9 + 20 + 2
    assert len(decode.sequence(request).table.blocks) == 8
    own = decode.attend(prompt_of(1), local=True, max_tokens=3, k=0)
    decode.turn()
    assert len(decode.sequence(own).table.blocks) == 3
    decode.incoming_transfers.land(request)
    decode.turns()
    decode.check_finished(request)
    decode.check_nothing_left()


@pytest.mark.long
def test_with_overcommit_it_has_those_of_its_prompt_and_a_step_and_leaves_some_to_those_that_run():
    decode = Decode(num_blocks=9, overcommit=True)
    requests = [decode.attend(prompt_of(at), max_tokens=20) for at in range(3)]
    decode.hand_over(requests[0])
    decode.turn()
    assert len(decode.sequence(requests[0]).table.blocks) >= 3
    for request in requests[1:]:
        decode.incoming_transfers.ask(request)
    decode.turn()
    assert decode.phase(requests[1]) is Phase.RECEIVING
    assert len(decode.sequence(requests[1]).table.blocks) == 3
    assert decode.allocator.num_free <= 3
    assert decode.phase(requests[2]) is Phase.WAITING, "the first may need a block soon"
    decode.incoming_transfers.land(requests[1])
    while not decode.sinks[requests[2].key].ended:
        if decode.incoming_transfers.is_granted(requests[2].key) and not decode.incoming_transfers.events:
            decode.incoming_transfers.land(requests[2])
        decode.turn()
    for request in requests:
        decode.check_finished(request)
    decode.check_nothing_left()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.long
def test_what_a_step_in_flight_has_stays_its_own_until_it_is_over(local):
    decode = Decode(num_blocks=8)
    if local:
        request = decode.attend(prompt_of(0), local=True, max_tokens=20)
    else:
        request = bring(decode, Phase.READY)
    go = threading.Event()
    decode.runner._executor.run(go.wait)
    decode.turn()  # launched; it waits
    assert decode.phase(request) is Phase.RUNNING
    sequence = decode.sequence(request)
    decode.engine.end(sequence, RequestCancelled("cancelled"))
    assert decode.sinks[request.key].ended
    assert sequence.phase is Phase.ENDED
    assert decode.scheduler.num_slots_used == 1
    assert decode.allocator.num_free == 0
    assert decode.incoming_transfers.released == ([] if local else [request.key])
    other = decode.attend(prompt_of(1), max_tokens=20)
    decode.incoming_transfers.ask(other)
    for _ in range(2):
        decode.worker._loop._commands and decode.worker._loop._commands.popleft()()
        decode.worker.receive()
        decode.worker.plan()
        decode.engine.settle()
        decode.engine._start()
    assert not decode.incoming_transfers.is_granted(other.key), "its blocks are not free yet"
    go.set()
    decode.turns()
    assert decode.incoming_transfers.is_granted(other.key)
    decode.incoming_transfers.land(other)
    decode.turns()
    decode.check_finished(other)
    decode.check_nothing_left()


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_request_leaves_nothing_wherever_it_is(phase):
    decode = Decode(num_blocks=8)
    request = bring(decode, phase)
    decode.worker.cancel(request.key)
    decode.turn()
    sink = decode.sinks[request.key]
    assert isinstance(sink.error, RequestCancelled)
    if phase is Phase.WAITING:
        assert decode.incoming_transfers.denied == [(request.key, kv_pb2.Deny.STALE)]
    if phase is Phase.RECEIVING:
        assert decode.incoming_transfers.open[request.key].reason == "cancelled"
        held = decode.worker.inventory()
        assert (held.num_blocks_quarantined, held.num_blocks_free, held.num_requests_held) == (8, 0, 0)
        other = decode.attend(prompt_of(1), max_tokens=20)
        decode.incoming_transfers.ask(other)
        decode.turns()
        assert not decode.incoming_transfers.is_granted(other.key), "a prefill worker may still write there"
        decode.incoming_transfers.drain(request.key)
        decode.turn()
        assert decode.incoming_transfers.is_granted(other.key)
        decode.incoming_transfers.land(other)
        decode.turns()
        decode.check_finished(other)
    if phase in (Phase.READY, Phase.RUNNING):
        assert decode.incoming_transfers.released == [request.key]
    decode.worker.cancel(request.key)
    assert decode.worker.inventory().num_requests_failed == 0, "nothing failed"
    decode.check_nothing_left()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_a_prompt_of_its_own_that_is_cancelled_leaves_nothing(num_turns):
    decode = Decode(chunk_len=2)
    request = decode.attend(PROMPT, local=True, max_tokens=20)
    for _ in range(num_turns):
        decode.turn()
    decode.worker.cancel(request.key)
    decode.turn()
    assert isinstance(decode.sinks[request.key].error, RequestCancelled)
    assert not decode.incoming_transfers.denied
    decode.check_nothing_left()


@pytest.mark.parametrize("phase", PHASES)
def test_a_deadline_ends_a_request_wherever_it_is(phase):
    decode = Decode()
    request = bring(decode, phase)
    decode.clock.advance(2e9)
    decode.turn()
    assert isinstance(decode.sinks[request.key].error, RequestDeadlineExceeded)
    assert decode.worker.inventory().num_requests_failed == 1
    if phase is Phase.RECEIVING:
        decode.incoming_transfers.drain(request.key)
    decode.check_nothing_left()


# Hand-overs that fail


@pytest.mark.parametrize("by_peer", [False, True])
def test_a_transfer_that_fails_ends_its_request_and_its_blocks_wait_until_it_has_drained(by_peer):
    decode = Decode(num_blocks=16)
    request, other = bring(decode, Phase.RECEIVING), bring(decode, Phase.RUNNING, 1)
    decode.incoming_transfers.fail(request.key, by_peer=by_peer)
    decode.turn()
    error = decode.sinks[request.key].error
    assert isinstance(error, TransferFailed)
    assert "the peer is gone" in error.message
    assert decode.worker.inventory().num_requests_failed == (not by_peer), "it is counted once, by whom it fails"
    assert decode.worker.inventory().num_blocks_quarantined == 8
    decode.incoming_transfers.drain(request.key)
    decode.turns()
    decode.check_finished(other)
    decode.check_nothing_left()


def test_a_transfer_that_fails_before_it_is_granted_ends_its_request():
    decode = Decode()
    requests = [bring(decode, phase, at) for at, phase in enumerate((Phase.EXPECTED, Phase.WAITING))]
    decode.incoming_transfers.ask(requests[0])
    for request in requests:
        decode.incoming_transfers.fail(request.key)
    decode.turn()
    for request in requests:
        assert isinstance(decode.sinks[request.key].error, TransferFailed)
    assert not decode.incoming_transfers.denied, "the prefill worker knows"
    decode.check_nothing_left()


def test_a_transfer_that_fails_and_drains_at_once_gives_its_blocks_back():
    decode = Decode()
    request = bring(decode, Phase.RECEIVING)
    decode.incoming_transfers.fail(request.key)
    decode.incoming_transfers.open[request.key].has_failed = True
    decode.incoming_transfers.drain(request.key)
    decode.check_nothing_left()
    assert isinstance(decode.sinks[request.key].error, TransferFailed)


def test_a_transfer_that_was_cancelled_and_then_completes_is_not_decoded():
    decode = Decode()
    request = bring(decode, Phase.RECEIVING)
    decode.incoming_transfers.land(request)
    decode.worker.cancel(request.key)
    decode.turn()
    assert isinstance(decode.sinks[request.key].error, RequestCancelled)
    assert decode.worker.inventory().num_blocks_quarantined == 8
    decode.incoming_transfers.drain(request.key)
    decode.check_nothing_left()


@pytest.mark.parametrize(
    "changes", [{"first_token": 99}, {"draft_tokens": [1]}, {"hidden": b"abc"}, {"ends": True}], ids=str
)
def test_a_commit_that_cannot_be_ends_its_request_and_gives_its_blocks_back(changes):
    decode = Decode()
    stop = {}
    if "ends" in changes:
        changes, stop = (
            {},
            {"stop_token_ids": (expected_tokens(tuple(PROMPT), SamplingParams(max_tokens=1, temperature=0.0))[0],)},
        )
    request = decode.attend(PROMPT, max_tokens=8, **stop)
    decode.incoming_transfers.ask(request)
    decode.turn()
    decode.incoming_transfers.land(request, **changes)
    decode.turn()
    error = decode.sinks[request.key].error
    assert isinstance(error, TransferFailed)
    assert "cannot be" in error.message
    assert decode.incoming_transfers.released == [request.key], "it is complete: nothing is written any more"
    decode.check_nothing_left()


@pytest.mark.parametrize("changes", [{"prompt_len": 8}, {"capacity_len": 18}], ids=str)
def test_a_reserve_that_says_other_lengths_ends_its_request(changes):
    decode = Decode()
    request = decode.attend(PROMPT)
    decode.incoming_transfers.ask(request, **changes)
    decode.turn()
    assert isinstance(decode.sinks[request.key].error, TransferFailed)
    assert decode.incoming_transfers.denied == [(request.key, kv_pb2.Deny.STALE)]
    decode.check_nothing_left()


# What is said


def test_what_is_said_of_a_request_that_was_handed_over():
    decode = Decode()
    decode.clock.advance(1.0)
    request = decode.attend(PROMPT, max_tokens=12, logprobs=2)
    decode.turn()
    decode.clock.advance(1.0)
    decode.incoming_transfers.ask(request)
    decode.turn()
    decode.clock.advance(1.0)
    decode.incoming_transfers.land(request, seconds=3.0)
    decode.clock.advance(0.25)
    decode.turns()
    events = [event.tokens for event in decode.sinks[request.key].events]
    start, stats = events[0].start, events[-1].stats
    assert (start.transfer_ms, start.admission_ms, start.landed_ns) == (0.0, 250.0, 3_000_000_000)
    assert not any(event.HasField("start") for event in events[1:])
    assert [event.finish_reason for event in events] == [""] * (len(events) - 1) + ["length"]
    assert not any(event.HasField("stats") for event in events[:-1])
    assert stats.num_emitted_tokens == 11
    assert stats.num_verify_steps == len(events)
    assert (stats.kv_bytes_landed, stats.kv_bytes_landed_before_prefill_end) == (1000, 600)
    assert stats.handoff_ms == 250.0
    assert [len(event.logprobs) for event in events] == [len(event.token_ids) for event in events]
    decode.check_finished(request)
    held = decode.worker.inventory()
    assert held.num_emitted_tokens == 11
    assert held.num_draft_tokens == stats.num_draft_tokens
    assert held.num_accepted_tokens == stats.num_accepted_tokens
    decode.check_nothing_left()


def test_what_is_said_of_a_prompt_that_is_computed_here():
    decode = Decode(chunk_len=4)
    decode.clock.advance(1.0)
    request = decode.attend(PROMPT, local=True, max_tokens=5, prompt_logprobs=1, logprobs=0)
    decode.clock.advance(0.5)
    decode.turns()
    kinds = [event.WhichOneof("event") for event in decode.sinks[request.key].events]
    num_reports = kinds.count("prompt_logprobs")
    assert num_reports >= 2, "as chunks end"
    assert kinds[:num_reports] == ["prompt_logprobs"] * num_reports
    assert kinds[num_reports] == "first_token"
    assert set(kinds[num_reports + 1 :]) == {"tokens"}
    events = decode.sinks[request.key].events
    assert sum(len(event.prompt_logprobs.tokens) for event in events[:num_reports]) == len(PROMPT) - 1
    first, last = events[num_reports].first_token, events[-1].tokens
    assert (first.queue_ms, first.received_ns, first.num_cached_tokens) == (500.0, 1_000_000_000, 0)
    assert last.stats.num_emitted_tokens == 4
    assert last.stats.kv_bytes_landed == 0
    decode.check_finished(request)
    decode.check_nothing_left()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_that_ends_at_its_first_token(reason):
    decode = Decode()
    probe = decode.attend(PROMPT, local=True, max_tokens=1)
    decode.turns()
    decode.check_finished(probe)
    (event,) = decode.sinks[probe.key].events
    assert event.first_token.finish_reason == "length"
    request = decode.attend(PROMPT, local=True, max_tokens=4, stop_token_ids=(event.first_token.token,))
    decode.turns()
    (event,) = decode.sinks[request.key].events
    assert event.first_token.finish_reason == "stop"
    decode.check_finished(request)
    assert decode.worker.inventory().num_requests_finished == 2
    decode.check_nothing_left()


def test_a_step_is_published_under_one_write_coalescer():
    decode = Decode()
    requests = [decode.attend(prompt_of(at), local=True, max_tokens=6) for at in range(3)]
    held, waken = [], []
    for request in requests:
        sink = decode.sinks[request.key]

        def emit(event, sink=sink, emit=sink.emit):
            held.append(decode.worker.write_coalescer._holder is not None)
            decode.worker.write_coalescer.call(lambda: waken.append(len(held)))
            emit(event)

        sink.emit = emit
    decode.turns()
    assert all(held)
    assert waken != list(range(1, len(held) + 1)), "several events a wake-up"
    decode.check_nothing_left()


def test_an_event_that_raises_ends_its_request_alone():
    decode = Decode()
    bad, good = decode.attend(PROMPT, local=True), decode.attend(PROMPT[::-1], local=True)

    def breaks(event):
        raise RuntimeError("no")

    decode.sinks[bad.key].emit = breaks
    decode.turns()
    assert "a token of a request" in decode.sinks[bad.key].error.message
    decode.check_finished(good)
    assert decode.worker.inventory().num_requests_failed == 1
    decode.check_nothing_left()


def test_closing_ends_what_is_here():
    decode = Decode()
    requests = [bring(decode, phase, at) for at, phase in enumerate((Phase.EXPECTED, Phase.RECEIVING, Phase.RUNNING))]
    decode.close()
    assert all(isinstance(decode.sinks[request.key].error, RequestCancelled) for request in requests)


# Migration


@pytest.mark.long
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("num_forced", [1, 3])
def test_an_answer_goes_on_where_another_worker_left_it(num_forced, local):
    decode = Decode(chunk_len=5)
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 4, "frequency_penalty": 0.0}
    probe = decode.attend(PROMPT, local=True, **params)
    decode.turns()
    whole = decode.tokens(probe)
    request = decode.attend([*PROMPT, *whole[:num_forced]], local=local, num_forced=num_forced, **params)
    if not local:
        decode.hand_over(request)
    decode.turns()
    assert decode.tokens(request) == whole
    decode.check_finished(request)
    decode.check_nothing_left()


# Preemption


def overcommitted(num_host_blocks=0, **options):
    return Decode(
        **{"num_blocks": 12, "overcommit": True, "num_host_blocks": num_host_blocks, "max_num_seqs": 3} | options
    )


@pytest.mark.long
@pytest.mark.parametrize("num_host_blocks", [0, 3, 40])
@pytest.mark.parametrize("scheduling", ["async", "sync"])
def test_blocks_that_run_out_cost_time_and_no_token(num_host_blocks, scheduling):
    decode = overcommitted(num_host_blocks, scheduling=scheduling)
    requests = [decode.attend(prompt_of(at), local=at % 2 == 1, max_tokens=24) for at in range(4)]
    for request in requests[::2]:
        decode.incoming_transfers.ask(request)
    for _ in range(500):
        for request in requests[::2]:
            if decode.incoming_transfers.is_granted(request.key):
                decode.incoming_transfers.land(request)
        decode.turn()
        if not decode.worker._requests:
            break
    for request in requests:
        decode.check_finished(request)
    held = decode.worker.inventory()
    assert held.num_preemptions > 0
    if num_host_blocks != 3:  # of so few it depends on which come
        assert (held.num_offloaded_blocks > 0) is (num_host_blocks > 0)
    assert held.num_restored_blocks == held.num_offloaded_blocks
    assert (held.num_recomputed_tokens > 0) is (num_host_blocks < 40)
    assert (held.num_host_full > 0) is (num_host_blocks == 3)
    assert len(decode.incoming_transfers.released) == 2, "once each"
    decode.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("after", [1, 4])
def test_a_preempted_sequence_comes_back_where_it_was(num_host_blocks, local, after):
    decode = Decode(preempt_at=(after,), num_host_blocks=num_host_blocks, chunk_len=5)
    requests = [decode.attend(prompt_of(at), local=local, max_tokens=12, k=at) for at in range(3)]
    for request in requests if not local else ():
        decode.hand_over(request)
    decode.turns()
    for request in requests:
        decode.check_finished(request)
    assert decode.worker.inventory().num_preemptions == 3
    decode.check_nothing_left()


def test_a_prompt_that_is_preempted_while_it_is_computed_has_one_first_token():
    decode = Decode(preempt_at=(0,), chunk_len=4)
    request = decode.attend(PROMPT, local=True, prompt_logprobs=0)
    decode.turns()
    decode.check_finished(request)
    events = decode.sinks[request.key].events
    reports = [report.token_id for event in events for report in event.prompt_logprobs.tokens]
    assert reports == PROMPT[1:], "each once, also of what was computed twice"
    held = decode.worker.inventory()
    assert held.num_preemptions == 1
    assert held.num_recomputed_tokens > 0
    assert held.num_local_prefills == 1
    decode.check_nothing_left()


def preempted(decode, at=0):
    """A received request that is preempted; no block is free for it."""
    request = bring(decode, Phase.RUNNING, at)
    decode.engine._preemption.request(decode.sequence(request))
    for _ in range(4):
        if decode.phase(request) is Phase.WAITING:
            break
        decode.engine.settle()
        decode.engine._read(has_launched=False)
        decode.engine._preempt()
    assert decode.phase(request) is Phase.WAITING
    decode.runner.drain()
    decode.engine.settle()
    held = decode.allocator.reserve(decode.allocator.num_free * 4)
    decode.turns()
    assert decode.phase(request) is Phase.WAITING
    return request, held


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_preempted_sequence_is_served_before_any_that_came_later(num_host_blocks):
    decode = overcommitted(num_host_blocks)
    request, held = preempted(decode)
    assert decode.incoming_transfers.released == [request.key]
    assert decode.waiting() == {"preempted": 1}
    other = decode.attend(PROMPT[:3], max_tokens=3)
    own = decode.attend(PROMPT[:4], local=True, max_tokens=3)
    decode.incoming_transfers.ask(other)
    decode.turns()
    assert [decode.phase(item) for item in (request, other, own)] == [Phase.WAITING] * 3
    decode.allocator.release(held)
    decode.turn()
    assert decode.phase(request) is Phase.RUNNING
    assert decode.scheduler.running()[0] is decode.sequence(request)
    decode.turns()
    decode.incoming_transfers.land(other)
    decode.turns()
    for item in (request, other, own):
        decode.check_finished(item)
    decode.check_nothing_left()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_one_that_ends_while_it_is_preempted_leaves_nothing(num_host_blocks, how):
    decode = overcommitted(num_host_blocks)
    request, held = preempted(decode)
    assert (decode.worker.inventory().num_host_blocks_used > 0) is (num_host_blocks > 0)
    decode.allocator.release(held)
    if how == "cancel":
        decode.worker.cancel(request.key)
    else:
        decode.clock.advance(2e9)
    decode.turn()
    assert decode.sinks[request.key].ended
    assert decode.incoming_transfers.released == [request.key], "only once"
    assert not decode.incoming_transfers.denied
    assert decode.worker.inventory().num_host_blocks_used == 0
    decode.check_nothing_left()


def test_a_reserve_for_one_that_is_preempted_does_not_move_it():
    """A prefill worker that asks for an attempt again, whose KV had landed already, is refused in time."""
    decode = overcommitted()
    request, held = preempted(decode)
    decode.incoming_transfers.ask(request, deadline_s=1.0)
    decode.turn()
    decode.clock.advance(2.0)
    decode.turn()
    assert decode.incoming_transfers.denied == [(request.key, kv_pb2.Deny.BUSY)]
    assert decode.phase(request) is Phase.WAITING
    decode.allocator.release(held)
    decode.turns()
    decode.check_finished(request)
    decode.check_nothing_left()


def test_the_protected_start_with_every_block_they_may_need():
    decode = overcommitted()
    request, held = preempted(decode)
    decode.sequence(request).num_preemptions = MAX_PREEMPTIONS
    decode.allocator.release(held)
    decode.turn()
    assert len(decode.sequence(request).table.blocks) == 8
    assert decode.scheduler.candidates() == []
    decode.turns()
    decode.check_finished(request)
    decode.check_nothing_left()


def test_what_others_computed_of_a_prompt_is_not_computed_again():
    decode = Decode(chunk_len=6)
    first = decode.attend(PROMPT, local=True)
    decode.turns()
    again = decode.attend(PROMPT, local=True)
    decode.turns()
    decode.check_finished(first)
    decode.check_finished(again)
    cached = [event.first_token.num_cached_tokens for event in decode.sinks[again.key].events[:1]]
    assert cached == [8]
    held = decode.worker.inventory()
    assert (held.num_prefix_tokens, held.num_prefix_hit_tokens, held.num_prefix_hits) == (18, 8, 1)
    assert held.num_blocks_cached == 2
    assert held.num_local_prefill_tokens == 10
    decode.check_nothing_left()


@pytest.mark.parametrize("scheduling", ["async", "sync"])
@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("prompt_len", [7, 8, 9])
@pytest.mark.long
def test_a_preempted_sequence_whose_whole_prompt_is_cached_goes_on(prompt_len, with_mtp, scheduling):
    k = 2 if with_mtp else 0
    decode = Decode(model=PREFILLERS[with_mtp].model, k=k, preempt_at=(1,), scheduling=scheduling)
    request = decode.attend(PROMPT[:prompt_len], local=True, k=k)
    for _ in range(40):
        decode.turn()
    decode.check_finished(request)
    assert decode.worker.inventory().num_prefix_hits == 1
    decode.check_nothing_left()


def cached_len(decode, request):
    """Of a prompt that was computed here: the tokens that were not."""
    return next(event.first_token for event in decode.sinks[request.key].events).num_cached_tokens


def test_a_tenants_prefix_is_never_anothers():
    decode = Decode()
    asked = []
    for tenant in ("a", "b", "", "a"):
        asked.append(decode.attend(PROMPT, local=True, tenant=tenant))
        decode.turns()
    assert [cached_len(decode, request) for request in asked] == [0, 0, 0, 8]
    decode.check_nothing_left()


@pytest.mark.parametrize("with_mtp", [False, True])
def test_what_was_received_of_a_prompt_is_not_computed_again_here(with_mtp):
    k = 2 if with_mtp else 0
    decode = Decode(model=PREFILLERS[with_mtp].model, k=k)
    received = decode.attend(PROMPT, k=k, tenant="a")
    decode.hand_over(received)
    assert not decode.worker.inventory().num_blocks_cached, "it is not complete before its transfer is complete"
    decode.turns()
    held = decode.worker.inventory()
    assert held.num_blocks_cached == len(decode.worker.names.of(received)) == 2
    turns = (((9, 7, 9), "a"), ((9, 7, 9), "b"), ((6, 5), "a"))
    asked = [decode.attend((*PROMPT[:8], *more), local=True, k=k, tenant=tenant) for more, tenant in turns]
    decode.turns()
    # With an MTP head the second block's last entry depends on the token behind it, which differs.
    shared_len = 4 if with_mtp else 8
    assert [cached_len(decode, request) for request in asked] == [shared_len, 0, shared_len]
    for request in (received, *asked):
        decode.check_finished(request)
    decode.check_nothing_left()


@pytest.mark.parametrize("complete", [True, False])
def test_of_a_transfer_that_fails_nothing_is_shared(complete):
    """It ends before it is complete, or its commit cannot be."""
    decode = Decode()
    received = decode.attend(PROMPT)
    decode.incoming_transfers.ask(received)
    decode.turn()
    if complete:
        decode.incoming_transfers.land(received, first_token=10**6)
    else:
        decode.incoming_transfers.fail(received.key)
    decode.turns()
    if not complete:
        decode.incoming_transfers.drain(received.key)
    assert isinstance(decode.sinks[received.key].error, TransferFailed)
    assert not decode.worker.inventory().num_blocks_cached
    request = decode.attend(PROMPT, local=True)
    decode.turns()
    assert cached_len(decode, request) == 0
    decode.check_finished(request)
    decode.check_nothing_left()


def test_a_prompt_that_was_received_and_gave_way_finds_its_own_blocks():
    decode = Decode(preempt_at=(2,))
    received = decode.attend(PROMPT, max_tokens=8)
    decode.hand_over(received)
    decode.turns()
    decode.check_finished(received)
    held = decode.worker.inventory()
    assert held.num_preemptions == 1
    assert held.num_prefix_hit_tokens == 8
    decode.check_nothing_left()


def test_what_waits_at_the_router_is_as_the_last_prompt_of_its_own_said():
    decode = Decode()
    decode.attend(prompt_of(0), local=True, num_queued_tokens=1000)
    decode.worker._loop._commands.popleft()()
    assert decode.engine.num_queued_tokens == 1000
    decode.attend(prompt_of(1))
    decode.worker._loop._commands.popleft()()
    assert decode.engine.num_queued_tokens == 1000, "a prompt of a prefill worker says nothing"
    decode.attend(prompt_of(2), local=True, num_queued_tokens=0)
    decode.worker._loop._commands.popleft()()
    assert decode.engine.num_queued_tokens == 0


def test_a_worker_that_computes_prompts_tells_the_router_how_many_tokens_a_second(monkeypatch):
    """Without it the router would accept requests that cannot have their first token in time."""
    decode = Decode()
    monkeypatch.setattr(decode.engine.runner.meter, "durations_s", lambda _: (0.01, 0.05))
    for at in range(6):
        decode.attend([at] * 9, local=True, max_tokens=1)
        decode.turns()
    assert decode.worker.inventory().full_prefill_tokens_per_s > 0
