"""What heartbeats say of the hand-off: counts of real services after a hand-over, and of refused data paths."""

import pytest

from baton.kvtransfer.protocol.transfer_times import TIME_BOUNDS_S, TIME_NAMES, TransferTimes
from baton.kvtransfer.receiver.driver import COUNT_NAMES
from baton.kvtransfer.sender.data_path_choice import DataPathChoice
from baton.kvtransfer.sender.table import PathCounts, PushTotals
from baton.worker.inventory import push_counts, receiver_counts

pytestmark = pytest.mark.fast

NAMES = "num_acked bytes_pushed transfer_us exposed_us frames_pushed frames_resent data_path_fallbacks credit_stall_us"
COUNTS = dict.fromkeys((*NAMES.split(), *TIME_NAMES), 0)


def test_a_prefill_worker_names_each_path_and_why_no_better_one():
    paths = [PathCounts("tcp://a", 5, 99, 2, 3e9, 0.0004), PathCounts("tcp://new", 0, 0, 0, 0.0, 0.0)]
    data_paths = {"tcp://a": DataPathChoice(5, "raw", None, (("shm", "the peer is on another host"),))}
    found = push_counts(COUNTS | {"num_acked": 2, "exposed_us": 1500}, paths, data_paths)
    assert (found.transfers, found.exposed_seconds) == (2, 0.0015)
    (path,) = found.paths  # the other has not answered yet
    assert (path.data_path, path.why, path.gbps) == ("raw", "shm: the peer is on another host", 3.0)
    assert path.round_trip_ms == pytest.approx(0.4)
    assert (path.bytes, path.transfers, path.epoch) == (99, 2, 5)


def test_a_decode_worker_reports_what_its_receiver_counts():
    counts = dict.fromkeys(COUNT_NAMES, 0) | {"transfers_complete": 3, "transfer_us": 2_000_000, "frames_corrupt": 1}
    found = receiver_counts(counts, num_quarantined=7)
    assert (found.transfers, found.seconds, found.corrupt, found.quarantined_blocks) == (3, 2.0, 1, 7)


def test_times_come_as_histograms_of_both_sides():
    times = TransferTimes()
    for transfer_s, exposed_s in ((0.0004, 0.0), (0.3, 0.001), (99.0, 45.0)):
        times.observe(transfer_s, exposed_s)
    counts = times.as_counts() | {"transfer_us": 99_300_400, "exposed_us": 45_001_000}
    pushed = push_counts(COUNTS | counts, [], {})
    landed = receiver_counts(dict.fromkeys(COUNT_NAMES, 0) | counts, num_quarantined=0)
    for found in (pushed, landed):
        at = TIME_BOUNDS_S.index(0.5)
        assert list(found.transfer_times.bounds) == list(found.exposed_times.bounds) == list(TIME_BOUNDS_S)
        assert [(at, num) for at, num in enumerate(found.transfer_times.counts) if num] == [(0, 1), (at, 1), (14, 1)]
        assert [(at, num) for at, num in enumerate(found.exposed_times.counts) if num] == [(0, 2), (14, 1)]
        assert (found.transfer_times.total, found.exposed_times.total) == (found.seconds, found.exposed_seconds)


def test_waits_for_the_window_add_up():
    totals = PushTotals()
    totals.window("a", True, 10.0)
    totals.window("a", True, 10.5)
    totals.window("b", False, 10.6)
    totals.window("a", False, 11.0)
    totals.window("a", False, 12.0)
    assert totals.credit_stall_s == pytest.approx(1.0)
