"""Which lane is chosen, what is said about the others, and that lanes that are not used any more are closed."""

import pytest

from baton.core.kv_transports import is_one_sided
from baton.kvtransfer.sender.lane import LaneRefused, NoLane
from baton.kvtransfer.sender.lane_choice import LaneChooser
from baton.proto import kv_pb2

pytestmark = pytest.mark.fast


class FakeLane:
    num_blocks = 1

    def __init__(self, name):
        self.name = name
        self.is_quiet = True
        self.is_closed = False
        self.is_outlived = False

    def outlived(self):
        self.is_outlived = True

    def drain(self, timeout_s):
        return self.is_quiet

    def close(self):
        self.is_closed = True


class FakeOpener:
    def __init__(self, name, problem="", refusal=""):
        self.name = name
        self.problem = problem
        self.refusal = refusal
        self.opened = []

    def open(self, offer, epoch, host_id):
        assert offer.lane == self.name
        if self.refusal:
            raise LaneRefused(self.refusal)
        self.opened.append((FakeLane(self.name), epoch, host_id))
        return self.opened[-1][0]


class FakeTransport:
    def __init__(self, raw_problem=""):
        self.raw_problem = raw_problem
        self.num_opened = 0
        self.lane = "raw"

    def lane_of(self, peer):
        return self.lane

    def open_lane(self, peer, offer):
        assert offer.lane == "raw"
        self.num_opened += not self.raw_problem
        return self.raw_problem


def offers(*names):
    return [kv_pb2.LaneOffer(lane=name) for name in names]


ALL = offers("inline", "nixl", "shm", "raw", "nvlink", "tin-cans")


@pytest.fixture
def openers():
    return [FakeOpener("shm"), FakeOpener("nvlink"), FakeOpener("nixl")]


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("auto", "nvlink"),
        ("tcp", "raw"),
        ("zmq", "inline"),
        ("grpc", "inline"),
        ("shm", "shm"),
        ("nvlink", "nvlink"),
        ("nixl", "nixl"),
    ],
)
def test_each_policy_takes_its_best(openers, policy, wanted):
    chooser = LaneChooser(policy, openers, FakeTransport())
    choice = chooser.choose("a", 5, "here", ALL)
    assert (choice.lane, choice.epoch, choice.refused) == (wanted, 5, ())
    assert (choice.opened is not None) == is_one_sided(wanted)
    assert chooser.lane_of("a") is choice
    assert chooser.lanes() == {"a": choice}
    assert (chooser.problem, chooser.num_fallbacks) == ("", 0)


def test_auto_goes_down_the_list_and_says_why(openers):
    shm, nvlink, _ = openers
    nvlink.problem = "there is no GPU"
    shm.refusal = "the peer is on another host"
    chooser = LaneChooser("auto", openers, FakeTransport())
    assert chooser.names == ("shm", "raw", "inline")
    choice = chooser.choose("a", 5, "there", ALL)
    assert choice.lane == "raw"
    assert choice.refused == (("nvlink", "there is no GPU"), ("shm", "the peer is on another host"))
    assert choice.why == "nvlink: there is no GPU; shm: the peer is on another host"
    assert chooser.num_fallbacks == 0


def test_a_peer_without_raw_sockets_is_served_inline_which_is_said_once_and_counted(openers, caplog):
    chooser = LaneChooser("tcp", openers, FakeTransport())
    for _ in range(3):
        choice = chooser.choose("a", 5, "there", offers("inline"))
        assert choice.lane == "inline"
    assert [record.message for record in caplog.records] == [
        "KV to a goes over inline (raw: the decode worker does not serve it)"
    ]
    assert chooser.num_fallbacks == 1
    refusing = LaneChooser("tcp", openers, FakeTransport("it is not encrypted"))
    assert refusing.choose("a", 5, "there", ALL).refused == (("raw", "it is not encrypted"),)


@pytest.mark.parametrize("policy", ["shm", "nvlink", "nixl"])
def test_a_lane_that_was_asked_for_by_name_is_never_replaced(openers, policy, caplog):
    chooser = LaneChooser(policy, openers, FakeTransport())
    assert chooser.names == (policy,)
    choice = chooser.choose("a", 5, "here", offers("inline", "raw"))
    assert (choice.lane, choice.opened) == ("", None)
    assert choice.why == f"{policy}: the decode worker does not serve it"
    assert "no lane" in caplog.text
    without = LaneChooser(policy, [NoLane(policy, "the pool is elsewhere")], FakeTransport())
    assert without.problem == f"{policy}: the pool is elsewhere"
    assert without.names == ()


def test_a_lane_is_opened_anew_for_each_life_and_the_old_one_closed_when_it_is_quiet(openers):
    shm = openers[0]
    chooser = LaneChooser("shm", openers, FakeTransport())
    first = chooser.choose("a", 5, "here", ALL).opened
    other = chooser.choose("b", 9, "here", ALL).opened
    first.is_quiet = False
    second = chooser.choose("a", 6, "here", ALL)
    assert second.opened is not first
    assert [epoch for _, epoch, _ in shm.opened] == [5, 9, 6]
    chooser.sweep()
    assert not first.is_closed, "a write is under way"
    assert (first.is_outlived, other.is_outlived) == (True, False)
    first.is_quiet = True
    chooser.sweep()
    assert first.is_closed
    assert not second.opened.is_closed
    chooser.forget("b")
    chooser.forget("nobody")
    assert other.is_closed
    assert chooser.lane_of("b") is None
    chooser.close(0.0)
    assert second.opened.is_closed
    assert chooser.lanes() == {}


def test_a_raw_lane_that_broke_is_not_reported_as_in_use(openers):
    transport = FakeTransport()
    chooser = LaneChooser("tcp", openers, transport)
    choice = chooser.choose("a", 5, "there", ALL)
    assert chooser.lanes() == {"a": choice}
    transport.lane = "inline"
    assert chooser.lanes()["a"].lane == "inline"
    assert chooser.lanes()["a"].why == "raw: its connection is not open now"
    assert chooser.lane_of("a") is choice, "it is made again by itself"


def test_a_long_reason_is_cut(openers):
    openers[0].refusal = "x" * 10_000
    choice = LaneChooser("shm", openers, FakeTransport()).choose("a", 5, "here", ALL)
    assert len(choice.why) < 300
