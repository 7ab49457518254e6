"""The link of a TP group over real sockets: order, strangers, backlog, ends."""

import os
import socket
import threading
import time

import pytest

from baton.core.errors import ModelTensorMissing, WorkerLost
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.plan import Place, Release, Resume, Step
from baton.engine.tp import join as tp_group_join
from baton.engine.tp.plan import plan_codec
from baton.engine.tp.plan_codec import Join, Ready, Stop

pytestmark = pytest.mark.fast
CODEC = plan_codec()


def linked(size):
    """Links of all ranks, in rank order."""
    listener = tp_group_join.RankListener(CODEC, size)
    others = []

    def come():
        for rank in range(1, size):
            others.append(tp_group_join.join(CODEC, rank, size, listener.address, listener.token))

    thread = threading.Thread(target=come)
    thread.start()
    lead = listener.accept(10.0)
    thread.join()
    return [lead, *others]


@pytest.fixture
def links():
    made = linked(3)
    yield made
    for link in made:
        link.close()


def hear(link, timeout_s=5.0):
    found = []
    thread = threading.Thread(target=lambda: found.append(link.hear()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert found, "nothing was heard"
    return found[0]


def until(holds, timeout_s=5.0):
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_all_hear_everything_in_order_and_rank_0_does_not_wait(links):
    lead, *others = links
    sampling, resume = SamplingParams(), Resume(2, os.urandom(1 << 20))
    big = Place(slot=0, token_ids=(1,), num_output=0, blocks=(1,), sampling=sampling, draft_cap=2, resume=resume)
    start_s = time.monotonic()
    for number in range(20):
        lead.tell(big)
        lead.tell(Step(slots=(number,), max_context_len=99, limit_s=2.0))
    assert time.monotonic() - start_s < 10.0  # 20 MiB that nobody has taken yet
    for link in others:
        for number in range(20):
            assert hear(link) == big
            assert hear(link) == Step(slots=(number,), max_context_len=99, limit_s=2.0)


def test_reports_come_with_their_rank_and_wake(links):
    lead, first, second = links
    woken = threading.Event()
    lead.on_report = woken.set
    second.tell(Release(7))
    assert woken.wait(5.0)
    assert lead.reports() == [(2, Release(7))]
    first.wake()
    assert hear(first) is None
    assert lead.reports() == []


def test_ready_is_waited_for(links):
    lead, first, second = links
    with pytest.raises(WorkerLost, match="rank 1 of 3 was not ready within 0 s"):
        lead.wait_ready(0.1)
    first.tell(Ready())
    second.tell(Ready())
    lead.wait_ready(5.0)


def test_an_error_of_a_rank_reaches_rank_0_by_name(links):
    lead, first, _ = links
    told = []
    lead.on_fail = told.append
    first.leave(ModelTensorMissing("no lm_head"))
    until(lambda: told)
    assert told[0].message == "rank 1 of 3 failed: ModelTensorMissing: no lm_head"
    assert lead.blame() is told[0]
    with pytest.raises(WorkerLost, match="rank 1 of 3 failed"):
        lead.tell(Stop())
    with pytest.raises(WorkerLost, match="rank 1 of 3 failed"):
        lead.reports()


@pytest.mark.long
def test_a_link_that_stops_beating_is_named_on_both_sides():
    lead, other = linked(2)
    for link in (lead, other):
        link.judge_silence(0.5)
        link._watch._pids = {}  # both ends are in this process, which runs
    with other._lock:  # its thread waits for this lock
        until(lambda: lead.failure, 3.0)
    assert lead.failure.fields == {"rank": 1, "size": 2, "how": "hangs"}
    until(lambda: other.failure, 3.0)
    assert other.failure.fields["how"] in ("died", "hangs")
    lead.close()
    other.close()


def test_damage_ends_the_tp_group_and_names_who_sent_it(links):
    lead, first, _ = links
    with first._lock:
        first._num_told += 1  # a message is missing
    until(lambda: lead.failure)
    assert lead.failure.fields["rank"] == 1
    assert "ProtocolError" in lead.failure.message
    assert "is next" in lead.failure.message


@pytest.mark.long
@pytest.mark.parametrize("stranger", ["silent", "garbage", "wrong token", "no such rank", "gone"])
def test_a_stranger_does_not_get_in_and_does_not_keep_others_out(stranger):
    listener = tp_group_join.RankListener(CODEC, 2)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + listener.address)
    match stranger:
        case "garbage":
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100))
        case "wrong token":
            connection.sendall(CODEC.encode(Join(1, "x"), 1))
        case "no such rank":
            connection.sendall(CODEC.encode(Join(2, listener.token), 1))
        case "gone":
            connection.close()
    found = []
    thread = threading.Thread(target=lambda: found.append(listener.accept(10.0)))
    thread.start()
    other = tp_group_join.join(CODEC, 1, 2, listener.address, listener.token)
    thread.join(10.0)
    connection.close()
    lead = found[0]
    lead.tell(Stop())
    assert hear(other) == Stop()
    for link in (lead, other):
        link.close()


@pytest.mark.long
def test_whoever_does_not_come_is_named():
    listener = tp_group_join.RankListener(CODEC, 3)
    with pytest.raises(WorkerLost, match="rank 1 of 3 did not join"):
        listener.accept(0.3)
    with pytest.raises(WorkerLost, match="rank 1 of 2 cannot reach rank 0"):
        tp_group_join.join(CODEC, 1, 2, listener.address, listener.token)


def test_an_end_that_was_announced_is_no_failure(links):
    lead, *others = links
    lead.expect_end()
    lead.tell(Stop())
    for link in others:
        assert hear(link) == Stop()
        link.close()
    lead.close()
    assert [link.failure for link in links] == [None] * 3


def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for link in linked(3):
        link.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
