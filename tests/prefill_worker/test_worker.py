"""The prefill worker against a decode worker that the test plays: every request ends once, and leaves nothing."""

import functools
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.errors import (
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
)
from baton.core.requests.sampling import SamplingParams
from baton.engine.sequence import Phase
from baton.proto import kv_pb2
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyModel
from baton.tests.prefill_worker.pushes import Prefill
from baton.tests.worker.manual_executor import ManualExecutor

pytestmark = pytest.mark.fast
MODEL = ToyModel()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def at(phase, prefill, name="a"):
    """Bring a request to a phase."""
    key = prefill.submit(PROMPT, name=name)
    prefill.turn()
    if phase in (Phase.RUNNING, Phase.SENDING, Phase.ABORTING):
        prefill.grant_all()
        prefill.turn()
    if phase is Phase.SENDING:
        prefill.run()
    if phase is Phase.ABORTING:
        prefill.worker.cancel(key)
        prefill.turn()
    assert prefill.sequence(key).phase is phase
    return key


def first_token(sink):
    (event,) = [event.first_token for event in sink.events if event.HasField("first_token")]
    return event.token


@functools.cache
def first_of(prompt):
    """The answer's first token."""
    return reference.generate(MODEL, prompt, SamplingParams(max_tokens=1, temperature=0.0))[0]


def check_nothing_left(prefill):
    prefill.run()
    assert not prefill.pushes.open
    prefill.scheduler.check_empty()
    held = prefill.worker.inventory()
    assert (held.num_requests_held, held.num_blocks_free, held.num_blocks_reserved) == (0, 40, 0)
    assert prefill.worker._request_limit.num_inside == 0
    assert prefill.worker._line.num_waiting() == 0
    prefill.close()


def test_a_request_is_pushed_handed_off_and_ends_when_it_is_acknowledged():
    prefill = Prefill(MODEL)
    key = at(Phase.SENDING, prefill)
    sink, push = prefill.sinks[key], prefill.pushes.known[key]
    assert first_token(sink) == first_of(tuple(PROMPT))
    assert push.states[0].first_token == first_token(sink)
    assert not sink.ended
    assert prefill.scheduler.num_slots_used == 0, "its slot is free while its KV is on its way"
    assert prefill.scheduler.allocator.num_reserved == 3
    prefill.pushes.ack(key)
    prefill.turn()
    assert (sink.ended, sink.error) == (True, None)
    assert sink.events[-1].done.handed_off
    assert sink.events[-1].done.kv_bytes_pushed == 100
    held = prefill.worker.inventory()
    assert (held.num_requests_finished, held.num_requests_failed) == (1, 0)
    check_nothing_left(prefill)


@pytest.mark.parametrize("kind", ["eos", "one token"])
def test_an_answer_of_one_token_is_not_handed_off(kind):
    prefill = Prefill(MODEL)
    first = first_of(tuple(PROMPT))
    sampling = {"max_tokens": 1} if kind == "one token" else {"stop_token_ids": (first,)}
    key = prefill.submit(PROMPT, **sampling)
    prefill.run()
    push, sink = prefill.pushes.known[key], prefill.sinks[key]
    assert not push.states
    assert push.aborts == ["ended at its first token"]
    assert (sink.ended, sink.error, first_token(sink)) == (True, None, first)
    assert not sink.events[-1].done.handed_off
    assert prefill.scheduler.allocator.num_reserved == 3, "until the push has drained"
    prefill.pushes.drain(key)
    held = prefill.worker.inventory()
    assert (held.num_requests_finished, held.num_requests_failed) == (1, 0)
    check_nothing_left(prefill)


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.RESERVING, Phase.RUNNING, Phase.SENDING, Phase.ABORTING])
def test_a_cancelled_request_holds_its_blocks_until_no_push_reads_them(phase):
    prefill = Prefill(MODEL, chunk_len=2)
    if phase is Phase.WAITING:  # more tokens than are asked for ahead are to be computed
        others = [at(Phase.RUNNING, prefill, "x")]
    key = at(phase, prefill)
    sink = prefill.sinks[key]
    num_reserved = prefill.scheduler.allocator.num_reserved
    prefill.worker.cancel(key)
    prefill.turn()
    assert isinstance(sink.error, RequestCancelled)
    if phase is Phase.WAITING:
        assert key not in prefill.worker._requests
        for other in others:
            prefill.worker.cancel(other)
        prefill.turn()
        for other in others:
            prefill.pushes.drain(other)
    else:
        assert prefill.scheduler.allocator.num_reserved == num_reserved
        assert prefill.pushes.known[key].aborts == ["cancelled"]
        while prefill.turn():
            pass
        assert prefill.scheduler.num_slots_used == 0, "steps that ran it are over"
        prefill.worker.cancel(key)
        prefill.turn()
        assert len(prefill.pushes.known[key].aborts) == 1
        prefill.pushes.drain(key)
    assert prefill.worker.inventory().num_requests_failed == 0, "nothing failed"
    check_nothing_left(prefill)


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.RUNNING, Phase.SENDING])
def test_a_push_that_fails_ends_its_request(phase):
    prefill = Prefill(MODEL, chunk_len=2)
    key, other = at(phase, prefill), prefill.submit(PROMPT[::-1])
    prefill.pushes.fail(key)
    prefill.turn()
    assert isinstance(prefill.sinks[key].error, TransferFailed)
    assert prefill.sinks[key].error.fields["reason"] == "the peer is gone"
    assert prefill.sequence(key).phase is Phase.ABORTING
    prefill.pushes.drain(key)
    prefill.run()
    assert key not in prefill.worker._requests
    assert prefill.pushes.known[other].states, "no other is touched"
    prefill.pushes.ack(other)
    prefill.run()
    held = prefill.worker.inventory()
    assert (held.num_requests_finished, held.num_requests_failed) == (1, 1)
    check_nothing_left(prefill)


def test_a_push_of_a_cached_prompt_that_is_over_before_its_grant_is_read():
    prefill = Prefill(MODEL)
    first = prefill.submit(PROMPT)
    prefill.run()
    prefill.pushes.ack(first)
    key = prefill.submit(PROMPT)
    while key not in prefill.pushes.open:
        prefill.turn()
    prefill.pushes.grant(key)
    prefill.pushes.fail(key)
    prefill.pushes.drain(key)
    prefill.run()
    assert prefill.pushes.known[key].cached, "the push was asked for all the same"
    assert isinstance(prefill.sinks[key].error, TransferFailed)
    check_nothing_left(prefill)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (kv_pb2.Deny.BUSY, Overloaded),
        (kv_pb2.Deny.TOO_LONG, PromptTooLong),
        (kv_pb2.Deny.STALE, TransferFailed),
        (kv_pb2.Deny.DATA_PATH, TransferFailed),
        (kv_pb2.Deny.LAYOUT, TransferFailed),
    ],
)
def test_a_request_that_is_refused_ends_at_once(reason, error):
    prefill = Prefill(MODEL)
    key = at(Phase.RESERVING, prefill)
    prefill.pushes.deny(key, reason)
    prefill.turn()
    assert type(prefill.sinks[key].error) is error
    assert ("pair_refused" in prefill.sinks[key].error.fields) == (reason == kv_pb2.Deny.LAYOUT)
    check_nothing_left(prefill)


def test_a_grant_that_comes_too_late_changes_nothing():
    prefill = Prefill(MODEL)
    key = at(Phase.RESERVING, prefill)
    prefill.worker.cancel(key)
    prefill.pushes.grant(key)
    prefill.run()
    assert prefill.sequence(key).phase is Phase.ABORTING
    assert not prefill.pushes.known[key].pushed
    prefill.pushes.drain(key)
    check_nothing_left(prefill)


def test_an_acknowledgement_that_crosses_a_cancel_ends_it_once():
    prefill = Prefill(MODEL)
    key = at(Phase.SENDING, prefill)
    prefill.worker.cancel(key)
    prefill.turn()
    prefill.pushes.ack(key)
    prefill.turn()
    assert isinstance(prefill.sinks[key].error, RequestCancelled)
    assert prefill.worker.inventory().num_requests_finished == 0
    check_nothing_left(prefill)


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.RUNNING, Phase.SENDING])
def test_a_deadline_ends_a_request_wherever_it_is(phase):
    prefill = Prefill(MODEL, chunk_len=2)
    key = at(phase, prefill)
    prefill.clock.advance(2e9)
    prefill.turn()
    assert isinstance(prefill.sinks[key].error, RequestDeadlineExceeded)
    prefill.pushes.drain(key)
    check_nothing_left(prefill)


def test_a_refusal_behind_the_deadline_is_the_deadlines():
    prefill = Prefill(MODEL)
    key = at(Phase.RESERVING, prefill)
    prefill.clock.advance(2e9)
    prefill.pushes.deny(key)
    prefill.turn()
    assert isinstance(prefill.sinks[key].error, RequestDeadlineExceeded)
    check_nothing_left(prefill)


def test_what_cannot_be_served_is_refused_before_it_is_let_in():
    prefill = Prefill(MODEL, max_queue_len=1)
    for prompt, error in (([0] * 96, PromptTooLong), ([99], InvalidRequest)):
        with pytest.raises(error):
            prefill.submit(prompt)
    key = prefill.submit(PROMPT, name="a")
    with pytest.raises(Overloaded):
        prefill.submit(PROMPT, name="b")
    prefill.worker.cancel(key)
    check_nothing_left(prefill)


def test_an_attempt_that_is_here_already_is_refused():
    prefill = Prefill(MODEL)
    key = prefill.submit(PROMPT, name="a")
    first = prefill.sinks[key]
    prefill.submit(PROMPT, name="a")
    prefill.turn()
    assert isinstance(prefill.sinks[key].error, RequestCancelled)
    assert not first.ended
    prefill.worker.cancel(key, prefill.sinks[key])
    prefill.turn()
    assert not first.ended, "it was another stream that was cancelled"
    prefill.worker.cancel(key, first)
    prefill.turn()
    assert isinstance(first.error, RequestCancelled)
    prefill.pushes.drain(key)
    check_nothing_left(prefill)


def test_an_event_that_raises_ends_its_request_alone():
    prefill = Prefill(MODEL)
    keys = [prefill.submit([5, 6, name], name=str(name)) for name in range(2)]

    def breaks(event):
        raise RuntimeError("no")

    prefill.sinks[keys[0]].emit = breaks
    prefill.run()
    assert prefill.sinks[keys[0]].ended
    assert "a token" in prefill.sinks[keys[0]].error.message or "first token" in prefill.sinks[keys[0]].error.message
    assert prefill.pushes.known[keys[1]].states
    assert not prefill.pushes.known[keys[0]].states
    prefill.pushes.drain(keys[0])
    prefill.pushes.ack(keys[1])
    check_nothing_left(prefill)


def test_closing_ends_what_is_here():
    prefill = Prefill(MODEL)
    keys = [at(phase, prefill, phase.name) for phase in (Phase.SENDING, Phase.RESERVING)]
    prefill.close()
    assert all(isinstance(prefill.sinks[key].error, RequestCancelled) for key in keys)


def test_blocks_outlast_the_step_that_writes_them():
    executor = ManualExecutor()
    prefill = Prefill(MODEL, chunk_len=2, executor=executor)
    key = at(Phase.RUNNING, prefill)
    table = prefill.sequence(key).table
    prefill.worker.cancel(key)
    prefill.pushes.abort(key, "the connection broke")
    prefill.pushes.drain(key)
    prefill.turn()
    assert not prefill.worker._requests
    assert set(table.blocks) <= set(prefill.scheduler.allocator._num_tables), "a step that runs writes them"
    executor.drain()
    check_nothing_left(prefill)


class Turns(RuleBasedStateMachine):
    """Whatever the decode workers do, in whatever order, every request ends once and every block comes back."""

    @initialize(
        scheduling=st.sampled_from(["async", "sync"]), chunk_len=st.sampled_from([2, 5, 20]), slots=st.integers(1, 4)
    )
    def begin(self, scheduling, chunk_len, slots):
        self.executor = ManualExecutor()
        self.prefill = Prefill(
            MODEL, num_blocks=12, chunk_len=chunk_len, max_num_seqs=slots, scheduling=scheduling, executor=self.executor
        )
        self.names = itertools.count()
        self.prompts = {}
        self.steps = []  # that run, with the blocks that they write
        launch = self.prefill.worker._runner.launch

        def launched(step):
            ticket = launch(step)
            running = {item.slot: item.table.blocks for item in self.prefill.scheduler.running()}
            self.steps.append((ticket, {block for chunk in step.chunks for block in running[chunk.slot]}))
            return ticket

        self.prefill.worker._runner.launch = launched

    def of(self, *phases):
        return [s.key for s in self.prefill.scheduler.sequences() if s.phase in phases]

    @rule(cut=st.integers(1, 9), more=st.lists(st.integers(0, 22), max_size=4), last=st.booleans(), peer=st.booleans())
    def submit(self, cut, more, last, peer):
        prompt = [*PROMPT[:cut], *more]
        name, max_tokens = f"{next(self.names):04}", 1 if last else 4
        key = self.prefill.submit(prompt, name=name, peer=f"d{peer:d}", max_tokens=max_tokens)
        self.prompts[key] = tuple(prompt)

    @rule(num=st.integers(1, 3))
    def turn(self, num):
        for _ in range(num):
            self.prefill.turn()

    @rule(num=st.integers(1, 3))
    def work_off(self, num):
        self.executor.work_off(num)

    @rule()
    @precondition(lambda self: self.asking())
    def grant(self):
        self.prefill.pushes.grant(self.asking()[0])

    @rule()
    @precondition(lambda self: self.asking())
    def deny(self):
        self.prefill.pushes.deny(self.asking()[-1])

    def asking(self):
        return [key for key, push in self.prefill.pushes.open.items() if not push.is_granted and not push.has_failed]

    @rule(data=st.data())
    @precondition(lambda self: self.prefill.pushes.open)
    def fail(self, data):
        key = data.draw(st.sampled_from(list(self.prefill.pushes.open)))
        if not self.prefill.pushes.open[key].has_failed and not self.prefill.pushes.open[key].aborts:
            self.prefill.pushes.fail(key)

    @rule()
    def ack(self):
        for key, push in list(self.prefill.pushes.open.items()):
            if push.states and not push.aborts and not push.has_failed:
                self.prefill.pushes.ack(key)

    @rule()
    def drain(self):
        for key, push in list(self.prefill.pushes.open.items()):
            if push.aborts or push.has_failed:
                self.prefill.pushes.drain(key)

    @rule(data=st.data())
    @precondition(lambda self: self.prefill.sinks)
    def cancel(self, data):
        self.prefill.worker.cancel(data.draw(st.sampled_from(sorted(self.prefill.sinks))))

    @invariant()
    def what_may_be_read_is_held(self):
        """No block of a transfer that has not ended is free, or another's to write."""
        if not hasattr(self, "prefill"):
            return
        allocator = self.prefill.scheduler.allocator
        for push in self.prefill.pushes.open.values():
            assert set(push.table.blocks) <= set(allocator._num_tables)
        tables = [item.sequence.table for item in self.prefill.worker._requests.values()]
        held = [block for table in tables if table is not None for block in table.blocks]
        # What has left keeps its blocks until the last step that runs it is over.
        num_held = len(held) + sum(self.prefill.scheduler._num_departing_blocks)
        assert len(set(held)) <= allocator.num_reserved <= num_held
        self.steps = [(ticket, blocks) for ticket, blocks in self.steps if not ticket.is_done]
        for _, blocks in self.steps:
            assert blocks <= set(allocator._num_tables), "a step writes blocks that are free"

    def teardown(self):
        if not hasattr(self, "prefill"):
            return
        for _ in range(500):
            while self.prefill.turn():
                pass
            if not self.prefill.worker._requests:
                break
            self.drain()
            self.ack()
            for key in self.asking():
                self.prefill.pushes.grant(key)
        prefill = self.prefill
        assert not prefill.worker._requests, "everything ends"
        assert all(sink.ended for sink in prefill.sinks.values())
        for key, sink in prefill.sinks.items():
            firsts = [event.first_token.token for event in sink.events if event.HasField("first_token")]
            assert firsts in ([], [first_of(self.prompts[key])])
            if sink.error is None:
                assert firsts
                push = prefill.pushes.known[key]
                assert len(push.states) == sink.events[-1].done.handed_off
        prefill.scheduler.check_empty()
        assert prefill.scheduler.allocator.num_free == 12
        assert prefill.worker._request_limit.num_inside == 0
        held = prefill.worker.inventory()
        assert held.num_requests_finished == sum(sink.error is None for sink in prefill.sinks.values())
        prefill.close()


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_request_that_comes_between_two_counts_spoils_no_heartbeat(monkeypatch):
    """A heartbeat is put together while the loop goes on: what waits may be more than what was there before."""
    prefill = Prefill(MODEL)
    monkeypatch.setattr(prefill.worker._line, "num_waiting", lambda: 2)
    held = prefill.worker.inventory()
    assert (held.num_requests_held, held.num_requests_waiting, held.num_requests_running) == (0, 2, 0)
    monkeypatch.undo()
    check_nothing_left(prefill)


def test_a_worker_tells_the_router_how_many_prompt_tokens_a_second_it_computes(monkeypatch):
    prefill = Prefill(MODEL)
    monkeypatch.setattr(prefill.worker._runner.meter, "durations_s", lambda _: (0.01, 0.05))
    for at in range(6):
        prefill.submit([at] * 10)
        prefill.run()
    assert prefill.worker.inventory().full_prefill_tokens_per_s == 5 / 0.05
    prefill.worker.close()
