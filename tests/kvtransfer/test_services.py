"""Both services together, over loopback and over real ZMQ, with real pools."""

import time

import pytest
import torch

from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed
from baton.kvtransfer.sender.async_writer import PushRange
from baton.kvtransfer.sender.service import Acked, Denied, Granted, PushDrained, PushFailed, PushService
from baton.kvtransfer.transports.loopback import LoopbackHub
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout, rows
from baton.tests.patience import STALLS_S

KINDS = ["loopback", "zmq", "process"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_content_arrives_and_is_verified(make_pair, kind, dtype):
    pair = make_pair(kind, make_layout(dtype=dtype))
    key = pair.hand_over(prompt_len=22, chunk_len=7)
    complete, acked = pair.wait_for(Completed, key), pair.wait_for(Acked, key)
    size = 22 * pair.layout.bytes_per_position
    assert complete.bytes_landed == acked.bytes_pushed == size
    assert 0 <= complete.bytes_landed_before_prefill_end <= size
    assert abs(complete.prefill_end_s - time.monotonic()) < 5
    assert complete.state.first_token == 7
    sent = rows(pair.source, range(6), 22)
    assert sent.unique().numel() > 200
    assert torch.equal(pair.rows(pair.target, pair.landed_tables[key], 22), sent)
    pair.release(key)
    pair.assert_clean()


def test_a_sender_whose_rows_fit_no_frame_does_not_start():
    layout, hub = make_layout(), LoopbackHub()
    row_bytes = layout.num_kv_heads * layout.layers[0].head_bytes
    config = KVTransferConfig(max_frame_bytes=row_bytes - 1)
    pool = KVPool(layout, 4, torch.device("cpu"))
    with pytest.raises(
        ConfigInvalid, match=rf"pushed: layer 0 keeps {row_bytes} bytes per row and rank, a frame holds"
    ) as caught:
        PushService(
            pool=pool, layout=layout, epoch=1, transport=hub.join("prefill"), config=config, clock=MonotonicClock()
        )
    assert caught.value.fields["keys"] == [], "no flag would help"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_abort_on_either_side_frees_both(make_pair, kind):
    pair = make_pair(kind)
    one, other = pair.reserve(9, "one"), pair.reserve(9, "other")
    pair.wait_for(Granted, one)
    pair.wait_for(Granted, other)
    pair.push.abort(one, "client went away")
    pair.incoming.abort(other, "client went away")
    pair.wait_for(PushDrained, one)
    assert pair.wait_for(IncomingFailed, one).reason.endswith("client went away")
    assert "client went away" in pair.wait_for(PushFailed, other).reason
    pair.wait_for(Drained, one)
    pair.wait_for(Drained, other)
    pair.wait_for(PushDrained, other)
    pair.assert_clean()


def test_dropped_pushes_fail_and_never_seal(make_pair, caplog):
    pair = make_pair("zmq", drop_pushes=True, heartbeat_s=0.05, lease_s=1.0, commit_timeout_s=1.0)
    key = pair.hand_over(9)
    failed = pair.wait_for(PushFailed, key)
    assert "incomplete after 2 resends" in failed.reason or "no credit after" in failed.reason
    pair.wait_for(PushDrained, key)
    pair.wait_for(IncomingFailed, key)
    pair.assert_clean()
    assert pair.find(Completed, key) is None
    assert sum("drop_pushes" in record.message for record in caplog.records) == 1


@pytest.mark.fast
def test_a_corrupt_frame_is_pushed_again(make_pair):
    pair = make_pair()
    damaged = []

    def damage_one(sender, receiver, parts):
        if len(parts) == 2 and not damaged:
            damaged.append(parts)
            return [[parts[0], bytes([parts[1][0] ^ 1]) + parts[1][1:]]]
        return [parts]

    pair.hub.on_message = damage_one
    key = pair.hand_over(22, chunk_len=8)
    pair.wait_for(Completed, key)
    assert pair.incoming.inventory()["frames_corrupt"] == 1
    assert torch.equal(
        pair.rows(pair.target, pair.landed_tables[key], 22),
        rows(pair.source, range(6), 22),
    )


def test_memory_that_changes_under_the_digest_is_never_sealed(make_pair):
    pair = make_pair(heartbeat_s=0.05, max_resends=1)
    key = pair.reserve(8)
    pair.wait_for(Granted, key)
    io = pair.incoming._host.driver._io
    real = io.digest

    def digest(blocks, span):
        pair.target.blocks(span.layer)[blocks[0], 0, 0, 0, 0] += 1
        return real(blocks, span)

    io.digest = digest
    pair.compute(key)
    pair.commit(key)
    assert "corrupt twice" in pair.wait_for(PushFailed, key).reason
    pair.wait_for(Drained, key)
    assert pair.find(Completed, key) is None


@pytest.mark.fast
@pytest.mark.parametrize("change", [{"model_hash": "other"}, {"head_dim": 16}, {"dtype": "float16"}])
def test_different_layouts_never_exchange_a_frame(make_pair, change):
    pair = make_pair()
    stranger = make_pair(layout=make_layout(**change))
    stranger.peer = pair.peer
    stranger.push._transport._hub = pair.hub  # the same network
    pair.hub._members["prefill"] = stranger.at_p
    key = stranger.reserve(5)
    denied = stranger.wait_for(Denied, key)
    assert denied.reason == kv_pb2.Deny.LAYOUT
    assert {"head_dim": "row_len"}.get(name := next(iter(change)), name) in denied.detail


def test_a_decode_worker_that_dies_fails_its_pushes_within_two_leases(make_pair):
    pair = make_pair("zmq", heartbeat_s=0.1, lease_s=0.6)
    key = pair.reserve(9)
    pair.wait_for(Granted, key)
    start_s = time.monotonic()
    pair.incoming.close()
    pair.incoming.poll = list
    pair.wait_for(PushFailed, key)
    assert time.monotonic() - start_s < 1.2 + STALLS_S
    pair.wait_for(PushDrained, key)


def test_a_prefill_worker_that_dies_frees_its_incoming_transfers_within_two_leases(make_pair):
    pair = make_pair("zmq", heartbeat_s=0.1, lease_s=0.6)
    granted, waiting = pair.reserve(9, "granted"), None
    pair.wait_for(Granted, granted)
    pair.is_granting = False
    waiting = pair.reserve(9, "waiting")
    time.sleep(0.2)
    pair.turn()
    start_s = time.monotonic()
    pair.push.close()
    pair.push.poll = list
    pair.wait_for(Drained, granted)
    pair.wait_for(IncomingFailed, waiting)
    assert time.monotonic() - start_s < 1.2 + STALLS_S
    assert pair.to_blocks.num_free == pair.to_blocks.num_blocks
    assert pair.incoming.inventory()["num_kv_receives"] == 0


def test_another_life_at_the_same_address_is_refused_at_once(make_pair):
    pair = make_pair("zmq", lease_s=30.0)
    pair.peer = type(pair.peer)("d0", pair.incoming.address, 12345)
    key = pair.reserve(9, wait_s=30.0)
    assert "restarted" in pair.wait_for(PushFailed, key, 10.0).reason
    pair.wait_for(PushDrained, key)


@pytest.mark.fast
def test_an_address_that_is_none_fails_and_hurts_nobody(make_pair):
    pair = make_pair("zmq", heartbeat_s=0.05)
    good = pair.peer
    pair.peer = type(good)("d9", "not an address", 5)
    bad = pair.reserve(9, "bad", wait_s=1.0)
    pair.peer = good
    key = pair.hand_over(9, request_id="good")
    pair.wait_for(Completed, key)
    pair.wait_for(PushFailed, bad)


@pytest.mark.fast
def test_a_denied_request_gets_its_reason(make_pair):
    pair = make_pair()
    pair.is_granting = False
    busy = pair.reserve(9, "busy")
    time.sleep(0.05)
    pair.turn()
    pair.incoming.deny(busy, kv_pb2.Deny.BUSY, "no blocks")
    denied = pair.wait_for(Denied, busy)
    assert (denied.reason, denied.detail) == (kv_pb2.Deny.BUSY, "no blocks")
    long = pair.reserve(9, "long", capacity_len=100_000)
    assert pair.wait_for(Denied, long).reason == kv_pb2.Deny.TOO_LONG
    pair.assert_clean()


@pytest.mark.fast
def test_a_commit_before_every_layer_was_pushed_fails(make_pair):
    pair = make_pair()
    key = pair.reserve(9)
    pair.wait_for(Granted, key)
    with pair.push.writer.step([PushRange(key, 0, 9)]) as step:
        step.submit(0)
    pair.commit(key)
    assert "layer 1 was not pushed" in pair.wait_for(PushFailed, key).reason
    pair.assert_clean()


def test_a_small_window_and_no_room_for_payloads_still_get_everything_across(make_pair):
    pair = make_pair("zmq", make_layout(num_layers=6), window_bytes=40_000, max_frame_bytes=512)
    key = pair.hand_over(120, chunk_len=50)
    pair.wait_for(Completed, key)
    pair.wait_for(Acked, key)
    assert torch.equal(
        pair.rows(pair.target, pair.landed_tables[key], 120),
        rows(pair.source, range(30), 120),
    )


def test_fifty_hand_overs_at_once(make_pair):
    pair = make_pair("zmq", num_blocks=256)
    start_s = time.monotonic()
    keys = [pair.reserve(1 + index % 12, f"r{index}") for index in range(50)]
    for key in keys:
        pair.wait_for(Granted, key)
    for first in range(0, 50, 10):
        batch = keys[first : first + 10]
        with pair.push.writer.step([PushRange(key, 0, pair.sizes[key]) for key in batch]) as step:
            for layer in range(pair.layout.num_layers):
                step.submit(layer)
        for key in batch:
            pair.commit(key)
    for key in keys:
        pair.wait_for(Completed, key)
        pair.wait_for(Acked, key)
        pair.release(key)
    print(f"50 hand-overs in {time.monotonic() - start_s:.3f} s")
    pair.assert_clean()


def test_sockets_are_given_back(make_pair):
    pair = make_pair("zmq")
    address = pair.incoming.address
    pair.close()
    again = ZmqTransport(address)
    assert again.address == address
    again.close()
