"""What both services count of hand-overs: times that add up, paths that were measured, frames that went again."""

import time

import pytest

from baton.kvtransfer.receiver.service import Completed
from baton.kvtransfer.sender.service import Acked
from baton.worker.inventory import push_counts, receiver_counts

pytestmark = pytest.mark.fast


def counts_of(pair, num_bytes):
    """(prefill, decode) as heartbeats would say them; the transfer's are published with a delay, number by number."""
    end_s = time.monotonic() + 20
    while (landed := receiver_counts(pair.incoming.inventory(), 0)).transfers == 0 or landed.bytes < num_bytes:
        assert time.monotonic() < end_s
        pair.turn()
    while (
        pushed := push_counts(pair.push.inventory(), pair.push.paths(), pair.push.data_paths())
    ).bytes < num_bytes or (not pushed.paths or pushed.paths[0].bytes < num_bytes):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return pushed, landed


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zmq", "process"])
def test_a_hand_over_shows_on_both_sides(make_pair, kind):
    pair = make_pair(kind)
    start_s = time.monotonic()
    key = pair.hand_over(prompt_len=22, chunk_len=7)
    complete = pair.wait_for(Completed, key)
    pair.wait_for(Acked, key)
    end_s = time.monotonic()
    pushed, landed = counts_of(pair, complete.bytes_landed)
    assert start_s < complete.completed_s < end_s
    for side in (pushed, landed):
        assert side.transfers == sum(side.transfer_times.counts) == sum(side.exposed_times.counts) == 1
        assert side.bytes == complete.bytes_landed
        assert 0 <= side.exposed_seconds < 10  # the incoming transfer's is as good as its estimate of the other clock
        assert 0 < side.seconds <= end_s - start_s
        assert (side.resent, side.late_dropped, side.corrupt) == (0, 0, 0)
    assert pushed.frames == landed.frames > 0
    assert 0 < pushed.exposed_seconds <= end_s - start_s
    (path,) = pushed.paths
    assert path.kv_address == pair.incoming.address
    assert path.data_path in ("raw", "inline", "shm")
    assert (path.transfers, path.bytes) == (1, complete.bytes_landed)
    assert 0 < path.round_trip_ms < 5000
    assert path.gbps > 0
    pair.release(key)
    pair.assert_clean()
