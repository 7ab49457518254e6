"""Pushing into a decode worker's own memory: written once, fenced by the gate, repaired, and by several ranks."""

import dataclasses
import os
import random
import secrets
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from baton.core.errors import ConfigInvalid, TransferFailed
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed
from baton.kvtransfer.sender import route
from baton.kvtransfer.sender.data_path import DataPathFailed
from baton.kvtransfer.sender.route import KeptBytes, WriteFence
from baton.kvtransfer.sender.service import Acked, Denied, Granted, PushDrained, PushFailed
from baton.kvtransfer.transports.shm import ShmOpener
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.push_bench import Decode, Prefill

LAYOUT = make_layout(block_size=16, num_layers=4)
TIMES = {"heartbeat_s": 0.1, "lease_s": 60.0}


class Hooked:
    """The shm data path with something in between: `on_write` calls `go`, or does not, and returns what it likes."""

    name = "shm"
    problem = ""

    def __init__(self, on_write):
        self.on_write = on_write
        self.num_writes = 0
        self.data_path = None

    def attach(self, prefill):
        self._real = ShmOpener(prefill.push._source._pool, prefill.push._identity(1, prefill.decode.config).host_id)
        return self

    def open(self, offer, epoch, host_id):
        self.data_path = self._real.open(offer, epoch, host_id)
        self.num_blocks, self.num_state_slots = self.data_path.num_blocks, self.data_path.num_state_slots
        self.block_size = self.data_path.block_size
        return self

    def write(self, blocks, target_blocks, span, *, with_digest):
        self.num_writes += 1
        return self.on_write(lambda: self.data_path.write(blocks, target_blocks, span, with_digest=with_digest), span)

    def outlived(self):
        self.data_path.outlived()

    def drain(self, timeout_s):
        return True

    def close(self):
        self.data_path.close()


@pytest.fixture(scope="module")
def decodes():
    made = {}

    def get(digest=True):
        if digest not in made:
            made[digest] = Decode(LAYOUT, digest=digest, **TIMES)
        return made[digest]

    yield get
    for decode in made.values():
        decode.incoming.close()


@pytest.fixture
def make_prefill(decodes, request):
    made = []

    def make(decode=None, on_write=None, **options):
        hook = Hooked(on_write) if on_write else None
        prefill = Prefill(decode or decodes(), openers=[hook] if hook else None, **{**TIMES, **options})
        made.append(prefill)
        if hook:
            prefill.hook = hook.attach(prefill)
        prefill.fill(5)
        return prefill

    yield make
    try:
        for prefill in made:
            for key in tuple(prefill.decode.tables):
                if prefill.find(Completed, key):
                    prefill.decode.release(key)
            prefill.assert_clean()
    finally:
        for prefill in made:
            prefill.close()


@pytest.mark.fast
@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("block_size", [16, 64, 4])
@pytest.mark.long
def test_all_lands_and_is_written_once(make_prefill, decodes, digest, block_size):
    layout = dataclasses.replace(LAYOUT, block_size=block_size)
    prefill = make_prefill(decodes(digest), layout=layout)
    key = prefill.reserve(f"all {digest} {block_size}", 75)
    blocks = prefill.tables[key].blocks
    prefill.wait_for(Granted, key)
    for first in range(0, 75, 30):
        prefill.compute(key, first=first, count=min(first + 30, 75))
    prefill.commit(key)
    complete, acked = prefill.wait_for(Completed, key), prefill.wait_for(Acked, key)
    assert complete.bytes_landed == acked.bytes_pushed == 75 * LAYOUT.bytes_per_position
    prefill.assert_landed(key, blocks)
    counts = prefill.push.inventory()
    assert (counts["frames_pushed"], counts["frames_rewritten"], counts["bytes_resent"]) == (12, 0, 0)
    assert prefill.push.data_path_of(prefill.decode.peer.kv_address).data_path == "shm"
    assert list(prefill.push.data_paths()) == [prefill.decode.peer.kv_address]


def damage(prefill, layer, key):
    block = prefill.decode.tables[key].blocks[0]
    prefill.decode.pool.blocks(layer)[block, 0, 0, 0, 0] += 1


@pytest.mark.fast
@pytest.mark.long
def test_what_was_damaged_on_its_way_is_written_again(make_prefill):
    damaged = []

    def on_write(go, span):
        written = go()
        if span.layer == 2 and not damaged:
            damaged.append(span)
            damage(prefill, 2, key)
        return written

    prefill = make_prefill(on_write=on_write)
    key = prefill.reserve("damaged", 40)
    blocks = prefill.tables[key].blocks
    prefill.wait_for(Granted, key)
    before = prefill.decode.incoming.inventory()["frames_corrupt"]
    prefill.compute(key)
    prefill.commit(key)
    prefill.wait_for(Completed, key)
    prefill.wait_for(Acked, key)
    prefill.assert_landed(key, blocks)
    assert prefill.push.inventory()["frames_rewritten"] >= 1
    assert prefill.decode.incoming.inventory()["frames_corrupt"] == before + 1


def test_what_is_damaged_twice_is_given_up(make_prefill):
    def on_write(go, span):
        written = go()
        if span.layer == 2:
            damage(prefill, 2, key)
        return written

    prefill = make_prefill(on_write=on_write)
    key = prefill.reserve("damaged twice", 40)
    prefill.wait_for(Granted, key)
    prefill.compute(key)
    prefill.commit(key)
    assert "corrupt twice" in prefill.wait_for(PushFailed, key).reason
    prefill.wait_for(PushDrained, key)
    prefill.wait_for(Drained, key)
    assert prefill.find(Completed, key) is None


@pytest.mark.fast
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.long
def test_nothing_drains_while_a_write_is_in_progress_and_nothing_is_written_after(make_prefill, side):
    go_on, inside = threading.Event(), threading.Event()

    def on_write(go, span):
        if span.layer == 1:
            inside.set()
            assert go_on.wait(10)
        return go()

    prefill = make_prefill(on_write=on_write)
    key = prefill.reserve(f"aborted by {side}", 40)
    target = prefill.wait_for(Granted, key).grant.blocks
    thread = prefill.compute_aside(key)
    assert inside.wait(5)
    if side == "prefill":
        prefill.push.abort(key, "the client went away")
        prefill.wait_for(IncomingFailed, key)
    else:
        prefill.decode.incoming.abort(key, "the client went away")
        assert "the client went away" in prefill.wait_for(PushFailed, key).reason
    prefill.stay_without(Drained, key)
    assert prefill.find(PushDrained, key) is None
    go_on.set()
    thread.join(5)
    prefill.wait_for(Drained, key)
    prefill.wait_for(PushDrained, key)
    assert prefill.hook.num_writes == 2, "layers 2 and 3 came after the abort"
    after = [prefill.decode.pool.blocks(layer)[list(target)].clone() for layer in range(4)]
    time.sleep(0.05)
    for layer in range(4):
        assert (prefill.decode.pool.blocks(layer)[list(target)] == after[layer]).all()


@pytest.mark.fast
@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataPathFailed("the mapping is gone"), "the mapping is gone"),
        # Nobody thought of it, but what is written where is one peer's doing, and these threads serve other peers.
        (ValueError("too short"), "the write failed: ValueError('too short')"),
    ],
)
def test_a_data_path_that_fails_fails_its_transfer_and_neither_the_step_nor_others(make_prefill, error, reason):
    broken = {}

    def on_write(go, span):
        if broken.get("layer") == span.layer:
            raise error
        return go()

    prefill = make_prefill(on_write=on_write)
    bad = prefill.reserve(f"bad data path {reason}", 20)
    prefill.wait_for(Granted, bad)
    broken["layer"] = 1
    prefill.compute(bad)
    assert prefill.wait_for(PushFailed, bad).reason == reason
    prefill.wait_for(PushDrained, bad)
    prefill.wait_for(Drained, bad)
    broken.clear()
    good = prefill.reserve(f"good data path {reason}", 20)
    prefill.wait_for(Granted, good)
    prefill.compute(good)
    prefill.commit(good)
    prefill.wait_for(Completed, good)


@pytest.mark.fast
def test_an_error_that_no_peer_can_cause_ends_step_and_worker_and_leaves_nobody_inside(make_prefill):
    def split(*args):
        raise ZeroDivisionError("a bug")

    prefill = make_prefill(on_write=lambda go, span: go())
    key = prefill.reserve("bug", 20)
    prefill.wait_for(Granted, key)
    prefill.push._source._shape = SimpleNamespace(split=split)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        prefill.compute(key)
    with pytest.raises(TransferFailed, match="a bug"):
        prefill.poll()
    prefill.push._broken = None  # the worker's loop would end here
    prefill.push.abort(key, "the step failed")
    prefill.wait_for(PushDrained, key)
    prefill.wait_for(Drained, key)


class Later:
    """A write that a device finishes some time."""

    def __init__(self, go, delay_s, fails=False):
        self.is_over = False
        self.fails = fails
        self.digest = None
        threading.Timer(delay_s, self._finish, [go]).start()

    def _finish(self, go):
        if not self.fails:
            self.digest = go().digest
        self.is_over = True

    @property
    def done(self):
        if self.is_over and self.fails:
            raise DataPathFailed("the device is lost")
        return self.is_over


@pytest.mark.fast
def test_writes_that_a_device_finishes_later_are_waited_for(make_prefill):
    prefill = make_prefill(on_write=lambda go, span: Later(go, 0.02 * (5 - span.layer)))
    key = prefill.reserve("later", 40)
    blocks = prefill.tables[key].blocks
    prefill.wait_for(Granted, key)
    prefill.compute(key)
    prefill.commit(key)  # long before the last write is over
    prefill.wait_for(Completed, key)
    prefill.assert_landed(key, blocks)
    prefill.wait_for(Acked, key)


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_waits_for_writes_that_a_device_has_not_finished(make_prefill, fails):
    prefill = make_prefill(on_write=lambda go, span: Later(go, 0.3, fails))
    key = prefill.reserve(f"later aborted {fails}", 40)
    prefill.wait_for(Granted, key)
    start_s = time.monotonic()
    prefill.compute(key)
    prefill.push.abort(key, "the client went away")
    prefill.wait_for(IncomingFailed, key)
    prefill.wait_for(Drained, key)
    assert time.monotonic() - start_s > 0.25
    prefill.wait_for(PushDrained, key)


@pytest.mark.fast
def test_a_device_that_fails_fails_the_transfer(make_prefill):
    prefill = make_prefill(on_write=lambda go, span: Later(go, 0.01, fails=span.layer == 3))
    key = prefill.reserve("device lost", 40)
    prefill.wait_for(Granted, key)
    prefill.compute(key)
    prefill.commit(key)
    assert prefill.wait_for(PushFailed, key).reason == "the device is lost"
    prefill.wait_for(PushDrained, key)


@pytest.mark.fast
@pytest.mark.parametrize("transport", ["shm", "tcp", "zmq"])
def test_cached_positions_are_pushed_beside_the_step_and_a_commit_waits_for_them(make_prefill, decodes, transport):
    prefill = make_prefill(transport=transport, max_frame_bytes=4096)
    key = prefill.reserve(f"cached {transport}", 75)
    blocks = prefill.tables[key].blocks
    prefill.wait_for(Granted, key)
    prefill.push.push_cached(key, 0, 48)
    prefill.compute(key, first=48)
    prefill.commit(key)
    prefill.wait_for(Completed, key)
    prefill.wait_for(Acked, key)
    prefill.assert_landed(key, blocks)


@pytest.mark.fast
def test_cached_positions_of_a_transfer_that_has_ended_are_nothing(make_prefill):
    slow = threading.Event()
    prefill = make_prefill(on_write=lambda go, span: (slow.wait(0.02), go())[1])
    key = prefill.reserve("cached ended", 75)
    prefill.wait_for(Granted, key)
    prefill.push.push_cached(key, 0, 48)
    prefill.push.abort(key, "the client went away")
    prefill.wait_for(PushDrained, key)
    prefill.push.push_cached(key, 0, 48)
    prefill.wait_for(Drained, key)


def test_cached_positions_that_cannot_be_pushed_fail_the_transfer(make_prefill):
    def on_write(go, span):
        raise ZeroDivisionError("a bug")

    prefill = make_prefill(on_write=on_write)
    key = prefill.reserve("cached bug", 75)
    prefill.wait_for(Granted, key)
    prefill.push.push_cached(key, 0, 48)
    assert "a bug" in prefill.wait_for(PushFailed, key).reason
    prefill.wait_for(PushDrained, key)


@pytest.mark.parametrize("transport", ["shm", "tcp", "zmq"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_push_their_heads_into_one_incoming(make_prefill, transport, size):
    epoch = secrets.randbits(64)
    ranks = [make_prefill(rank=rank, size=size, epoch=epoch, transport=transport) for rank in range(size)]
    key = ranks[0].reserve(f"ranks {transport} {size}", 75)
    sources = [ranks[0].tables[key].blocks]
    grant = ranks[0].wait_for(Granted, key).grant
    assert bool(grant.blocks) == (transport == "shm")
    for rank in ranks[1:]:
        rank.adopt(key, 75, grant)
        sources.append(rank.tables[key].blocks)
    for rank in ranks:
        rank.compute(key)
        assert rank.find(Completed, key) is None
        rank.commit(key)
    ranks[0].wait_for(Completed, key)
    for rank, blocks in zip(ranks, sources, strict=True):
        rank.wait_for(Acked, key)
        rank.assert_landed(key, blocks)


def test_a_rank_that_gives_up_fails_all_of_them_and_each_says_when_it_is_out(make_prefill):
    epoch = secrets.randbits(64)
    ranks = [make_prefill(rank=rank, size=2, epoch=epoch) for rank in range(2)]
    key = ranks[0].reserve("rank gives up", 75)
    grant = ranks[0].wait_for(Granted, key).grant
    ranks[1].adopt(key, 75, grant)
    ranks[0].compute(key)
    ranks[1].compute(key, layers=[0])
    ranks[1].push.abort(key, "this rank has failed")
    ranks[0].wait_for(PushFailed, key)
    for rank in ranks:
        rank.wait_for(PushDrained, key)
    ranks[0].wait_for(Drained, key)


def test_a_incoming_without_a_data_path_is_refused_by_name_and_then_at_once(make_prefill, monkeypatch):
    monkeypatch.setattr(route, "REOPEN_S", 60.0)
    decode = Decode(LAYOUT, data_paths=(), **TIMES)
    try:
        prefill = make_prefill(decode)
        first = prefill.reserve("no data path", 20)
        assert "shm: the decode worker does not serve it" in prefill.wait_for(PushFailed, first).reason
        prefill.wait_for(PushDrained, first)
        second = prefill.reserve("no data path either", 20)
        denied = prefill.wait_for(Denied, second, 0.5)
        assert denied.reason == kv_pb2.Deny.DATA_PATH
        assert "shm: the decode worker does not serve it" in denied.detail
    finally:
        decode.incoming.close()


@pytest.mark.fast
def test_a_worker_that_can_use_no_data_path_does_not_start(decodes):
    with pytest.raises(ConfigInvalid, match="nvlink: the pool is not in GPU memory"):
        Prefill(decodes(), transport="nvlink")


@pytest.mark.fast
def test_a_grant_beyond_the_pool_is_refused_before_anything_is_written(make_prefill):
    prefill = make_prefill(on_write=lambda go, span: go())
    real = prefill.hook.open

    def open_smaller(offer, epoch, host_id):
        data_path = real(offer, epoch, host_id)
        data_path.num_blocks = 1
        return data_path

    prefill.hook.open = open_smaller
    key = prefill.reserve("beyond", 75)
    assert "granted block" in prefill.wait_for(PushFailed, key).reason
    prefill.wait_for(PushDrained, key)
    prefill.wait_for(Drained, key)
    assert prefill.hook.num_writes == 0
    assert prefill.find(Granted, key) is None


def test_many_at_once_with_aborts_on_both_sides_leave_nothing_and_mix_nothing_up(make_prefill):
    rng = random.Random(3)
    prefill = make_prefill(on_write=lambda go, span: (time.sleep(rng.random() * 0.001), go())[1], num_writer_threads=2)
    open_keys, complete = {}, 0
    for number in range(60):
        key = prefill.reserve(f"many {number}", rng.randrange(1, 120))
        open_keys[key] = prefill.tables[key].blocks
        if rng.random() < 0.2:
            prefill.push.abort(key, "at once")
        while len(open_keys) >= 3 or (number == 59 and open_keys):
            key, blocks = next(iter(open_keys.items()))
            del open_keys[key]
            prefill.poll()
            ended = (Granted, Denied, PushFailed, PushDrained)
            while not any(prefill.find(kind, key) for kind in ended):
                prefill.poll()
                time.sleep(0.0005)
            if not prefill.find(Granted, key):
                continue
            thread = prefill.compute_aside(key)
            dice = rng.random()
            time.sleep(rng.random() * 0.004)
            if dice < 0.25:
                prefill.push.abort(key, "in the middle")
            elif dice < 0.5:
                prefill.decode.incoming.abort(key, "in the middle")
            thread.join(10)
            prefill.commit(key)
            if dice < 0.25:
                prefill.wait_for(PushDrained, key)
                continue
            while not prefill.find(Acked, key) and not prefill.find(PushFailed, key):
                prefill.poll()
                time.sleep(0.0005)
            if dice >= 0.5:
                complete += 1
                prefill.wait_for(Completed, key)
                prefill.assert_landed(key, blocks)
                prefill.decode.release(key)
    assert complete > 10
    prefill.assert_clean()


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_a_decode_worker_that_stopped_holds_up_nobody_else(make_prefill, decodes, transport):
    """Not the memory for payloads, not the writer's threads or queue, not the push thread."""
    bad = Decode(LAYOUT, data_paths=(), num_blocks=60, **TIMES)
    prefill = make_prefill(transport=transport, window_bytes=100_000, num_blocks=100, writer_queue_len=8)
    try:
        stuck = [prefill.reserve(f"stuck {transport} {number}", 120, peer=bad.peer) for number in range(7)]
        while not all(prefill.find(Granted, key) for key in stuck):
            bad.poll()
            prefill.poll()
        os.kill(bad.incoming._host.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        prefill.compute(*stuck)  # 10 times what the window lets go
        for key in stuck:
            prefill.commit(key)
        for number in range(10):
            key = prefill.reserve(f"free {transport} {number}", 75)
            prefill.wait_for(Granted, key)
            prefill.compute(key)
            prefill.commit(key)
            prefill.wait_for(Completed, key)
            prefill.wait_for(Acked, key)
            prefill.decode.release(key)
        assert time.monotonic() - start_s < TIMES["lease_s"], "nobody waited for a lease to end"
        for key in stuck:
            assert prefill.find(PushFailed, key) is None
            prefill.push.abort(key, "enough")
            prefill.wait_for(PushDrained, key)
    finally:
        bad.incoming.close()


def test_no_source_block_is_read_any_more_once_a_push_has_drained(make_prefill):
    """The raw data path sends from the pool itself: what the sockets did not take yet is taken back first."""
    layout = make_layout(block_size=16, num_layers=40, num_kv_heads=8, head_dim=128)
    bad = Decode(layout, data_paths=(), num_blocks=6, **TIMES)
    prefill = make_prefill(bad, layout=layout, transport="tcp", num_blocks=6)
    transport = prefill.push._transport
    try:
        key = prefill.reserve("pinned", 64)
        prefill.wait_for(Granted, key)
        while prefill.push.data_path_of(bad.peer.kv_address).data_path != "raw":
            prefill.poll()
        os.kill(bad.incoming._host.pid, signal.SIGSTOP)
        prefill.push._protocol.transfer(key).two_layers_bytes = 1 << 30
        prefill.compute(key)
        time.sleep(0.1)
        assert transport.num_pinned(bad.peer.kv_address) > 0, "20 MiB fit no socket"
        prefill.push.abort(key, "enough")
        prefill.wait_for(PushDrained, key, 1.0)
        assert transport.num_pinned(bad.peer.kv_address) == 0
        os.kill(bad.incoming._host.pid, signal.SIGCONT)
        prefill.wait_for(Drained, key)
        prefill.assert_clean()  # now: once it is closed, an incoming transfer counts no more
    finally:
        bad.incoming.close()


@pytest.mark.fast
def test_a_gate_lets_nobody_in_after_it_was_shut_or_its_time_is_over():
    fence = WriteFence()
    assert not fence.enter(0.0)
    fence.open_until(5.0)
    assert fence.enter(5.0)
    assert not fence.enter(5.1)
    fence.open_until(9.0)
    assert fence.enter(5.1)
    assert not fence.leave()
    assert not fence.shut()
    fence.open_until(99.0)
    assert not fence.enter(6.0)
    assert fence.leave(), "the last one out says so"
    assert fence.is_shut


@pytest.mark.long
def test_slow_decode_workers_never_take_all_the_memory_for_payloads():
    kept = KeptBytes(1 << 20)
    for slow in range(5):
        while kept.take(f"slow {slow}", 1024):
            pass
    assert kept.take("good", 16 * 1024), "a sixth is left for whoever gets on"
    kept.give("good", 16 * 1024)
    alone = KeptBytes(1 << 20)
    num_taken = 0
    while alone.take("only", 1024):
        num_taken += 1
    assert num_taken == 512
    for _ in range(num_taken):
        alone.give("only", 1024)
    assert alone.take("other", 1 << 19)
