"""Which data path is chosen, what is said about the others, and that unused data paths are closed."""

import pytest

from baton.core.kv_transports import is_one_sided
from baton.kvtransfer.sender.data_path import DataPathRefused, NoDataPath
from baton.kvtransfer.sender.data_path_choice import DataPathChooser
from baton.proto import kv_pb2

pytestmark = pytest.mark.fast


class FakeDataPath:
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
        assert offer.data_path == self.name
        if self.refusal:
            raise DataPathRefused(self.refusal)
        self.opened.append((FakeDataPath(self.name), epoch, host_id))
        return self.opened[-1][0]


class FakeTransport:
    def __init__(self, raw_problem=""):
        self.raw_problem = raw_problem
        self.num_opened = 0
        self.data_path = "raw"

    def data_path_of(self, peer):
        return self.data_path

    def open_data_path(self, peer, offer):
        assert offer.data_path == "raw"
        self.num_opened += not self.raw_problem
        return self.raw_problem


def offers(*names):
    return [kv_pb2.DataPathOffer(data_path=name) for name in names]


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
    chooser = DataPathChooser(policy, openers, FakeTransport())
    choice = chooser.choose("a", 5, "here", ALL)
    assert (choice.data_path, choice.epoch, choice.refused) == (wanted, 5, ())
    assert (choice.opened is not None) == is_one_sided(wanted)
    assert chooser.data_path_of("a") is choice
    assert chooser.data_paths() == {"a": choice}
    assert (chooser.problem, chooser.num_fallbacks) == ("", 0)


def test_auto_goes_down_the_list_and_says_why(openers):
    shm, nvlink, _ = openers
    nvlink.problem = "there is no GPU"
    shm.refusal = "the peer is on another host"
    chooser = DataPathChooser("auto", openers, FakeTransport())
    assert chooser.names == ("shm", "raw", "inline")
    choice = chooser.choose("a", 5, "there", ALL)
    assert choice.data_path == "raw"
    assert choice.refused == (("nvlink", "there is no GPU"), ("shm", "the peer is on another host"))
    assert choice.why == "nvlink: there is no GPU; shm: the peer is on another host"
    assert chooser.num_fallbacks == 0


def test_a_peer_without_raw_sockets_is_served_inline_which_is_said_once_and_counted(openers, caplog):
    chooser = DataPathChooser("tcp", openers, FakeTransport())
    for _ in range(3):
        choice = chooser.choose("a", 5, "there", offers("inline"))
        assert choice.data_path == "inline"
    assert [record.message for record in caplog.records] == [
        "KV to a goes over inline (raw: the decode worker does not serve it)"
    ]
    assert chooser.num_fallbacks == 1
    refusing = DataPathChooser("tcp", openers, FakeTransport("it is not encrypted"))
    assert refusing.choose("a", 5, "there", ALL).refused == (("raw", "it is not encrypted"),)


def test_an_offer_that_breaks_its_opener_is_refused_as_others_are(openers, caplog):
    """The thread that opens it pushes to every other decode worker, too."""
    shm, nvlink, _ = openers
    nvlink.problem = "there is no GPU"

    def fail(offer, epoch, host_id):
        raise AssertionError(f"no one foresaw {offer.data_path}")

    shm.open = fail
    choice = DataPathChooser("auto", openers, FakeTransport()).choose("a", 5, "here", ALL)
    assert choice.data_path == "raw"
    assert "no one foresaw shm" in dict(choice.refused)["shm"]
    assert "no one foresaw shm" in caplog.text


@pytest.mark.parametrize("policy", ["shm", "nvlink", "nixl"])
def test_a_data_path_that_was_asked_for_by_name_is_never_replaced(openers, policy, caplog):
    chooser = DataPathChooser(policy, openers, FakeTransport())
    assert chooser.names == (policy,)
    choice = chooser.choose("a", 5, "here", offers("inline", "raw"))
    assert (choice.data_path, choice.opened) == ("", None)
    assert choice.why == f"{policy}: the decode worker does not serve it"
    assert "no data path" in caplog.text
    without = DataPathChooser(policy, [NoDataPath(policy, "the pool is elsewhere")], FakeTransport())
    assert without.problem == f"{policy}: the pool is elsewhere"
    assert without.names == ()


def test_a_data_path_is_opened_anew_for_each_life_and_the_old_one_closed_when_it_is_quiet(openers):
    shm = openers[0]
    chooser = DataPathChooser("shm", openers, FakeTransport())
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
    assert chooser.data_path_of("b") is None
    chooser.close(0.0)
    assert second.opened.is_closed
    assert chooser.data_paths() == {}


def test_a_raw_data_path_that_broke_is_not_reported_as_in_use(openers):
    transport = FakeTransport()
    chooser = DataPathChooser("tcp", openers, transport)
    choice = chooser.choose("a", 5, "there", ALL)
    assert chooser.data_paths() == {"a": choice}
    transport.data_path = "inline"
    assert chooser.data_paths()["a"].data_path == "inline"
    assert chooser.data_paths()["a"].why == "raw: its connection is not open now"
    assert chooser.data_path_of("a") is choice, "it is made again by itself"


def test_a_long_reason_is_cut(openers):
    openers[0].refusal = "x" * 10_000
    choice = DataPathChooser("shm", openers, FakeTransport()).choose("a", 5, "here", ALL)
    assert len(choice.why) < 300
