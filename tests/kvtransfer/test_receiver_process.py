"""The incoming transfer in a process of its own: its deaths, its parent's death, and who may write what in between."""

import itertools
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.errors import PortInUse, TransferFailed
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout, Range
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile, host_id
from baton.kvtransfer.protocol.messages import wire_attempt
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed, ReserveWanted
from baton.kvtransfer.sender.service import Acked, DecodePeer, Granted, PushFailed
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout, rows
from baton.tests.kvtransfer.kept import latent, state, tail
from baton.tests.kvtransfer.receiver_worker import D_EPOCH, ReceiverWorker
from baton.tests.kvtransfer.scripted_prefill import BULK, ScriptedPrefill
from baton.tests.shared_memory import owned_by

SHORT = {"heartbeat_s": 0.05, "lease_s": 0.6}


@pytest.fixture
def make_worker():
    workers = []

    def make(*args, **options):
        workers.append(ReceiverWorker(*args, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
        assert not worker.region.path.exists()


@pytest.fixture
def make_prefill():
    ranks = []

    def make(worker, **options):
        ranks.append(ScriptedPrefill(worker.service.address, worker.layout, **options))
        ranks[-1].hello(poll=worker.poll)
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def test_a_state_of_another_boundary_is_refused(make_worker, make_prefill):
    """A prompt of 10 positions leaves the state after 2 tiles of 4; that of 1 or 3 is none of it."""
    worker = make_worker(make_layout(more=(state(2, 20, length=4), tail(2, 8, length=4, ring=8))))
    prefill, of_state, of_tail = make_prefill(worker), 3, 4

    def begin(number):
        key = AttemptKey(f"r{number}", 0)
        prefill.reserve(key, 10)
        return key, prefill.granted(key, worker.poll)

    key, grant = begin(1)
    for layer, first, count in ((of_state, 1, 1), (of_state, 3, 1), (of_tail, 4, 4), (of_tail, 7, 2), (of_tail, 9, 2)):
        prefill.frame(grant, layer, first, count)
    worker.wait_until(lambda: worker.service.inventory()["frames_corrupt"] == 5, "each is refused")
    prefill.digests.clear()
    prefill.push(grant, 10)
    prefill.commit(grant, 10)
    worker.wait_for(Completed, key)

    key, grant = begin(2)
    prefill.push(grant, 10)
    heads = KVRange(of_state, 3, 1, 0, 2)  # the same row, as if it were of the third tile
    prefill.digests[grant.epoch, grant.incoming_id][of_state] = prefill.whole.digest((0, 0, 2, 2), heads)
    prefill.commit(grant, 10)
    nack = prefill.wait_for("commit_nack", poll=worker.poll)
    assert list(nack.corrupt_layers) == [of_state]


def two_ranks(worker, make_prefill):
    """Of one prefill worker, which push a prompt of 200 positions."""
    ranks, key = [make_prefill(worker, rank=rank, size=2) for rank in range(2)], AttemptKey("r", 1)
    ranks[0].reserve(key, 200)
    grant = ranks[0].granted(key, worker.poll)
    for rank in ranks:
        rank.push(grant, 200, chunk_len=70)
    return ranks, key, grant


def test_positions_that_another_rank_pushes_are_refused(make_worker, make_prefill):
    worker = make_worker(KVLayout(model_hash="m", layers=(latent(16), latent(8)), block_size=4))
    ranks, key, grant = two_ranks(worker, make_prefill)
    for first, count in ((64, 4), (0, 65), (60, 8), (127, 2)):
        ranks[0].any_frame(grant, 0, first, count, Range(0, 1))
    ranks[1].any_frame(grant, 1, 128, 8, Range(0, 1))
    worker.wait_until(lambda: worker.service.inventory()["frames_corrupt"] == 5, "each is refused")
    ranks[0].digests.clear(), ranks[1].digests.clear()
    for rank in ranks:
        rank.push(grant, 200)  # all of it once more, which changes nothing but the totals
        rank.commit(grant, 200)
    worker.wait_for(Completed, key)


def test_what_one_rank_pushed_wrong_is_asked_of_that_rank_alone(make_worker, make_prefill):
    worker = make_worker(KVLayout(model_hash="m", layers=(latent(16), latent(8)), block_size=4))
    ranks, key, grant = two_ranks(worker, make_prefill)
    ranks[1].digests[grant.epoch, grant.incoming_id][0] ^= 5
    for rank in ranks:
        rank.commit(grant, 200)
    nack = ranks[1].wait_for("commit_nack", poll=worker.poll)
    assert list(nack.corrupt_layers) == [0]
    found = {position for gap in nack.missing for position in range(gap.first, gap.first + gap.count)}
    assert {gap.layer for gap in nack.missing} == {0}
    assert found == {position for position in range(200) if position // 64 % 2 == 1}
    ranks[1].frame(grant, 0, 0, 200)  # nothing else is missing, so the same COMMIT is judged again
    worker.wait_until(lambda: worker.find(IncomingFailed, key), "failure")
    assert worker.find(IncomingFailed, key).reason == "layer 0 arrived corrupt twice"
    ranks[0].receive(0.1)
    assert not any(reply.WhichOneof("message") == "commit_nack" for reply in ranks[0].replies)


def content(io, blocks, layout, prompt_len):
    """The bytes of a prompt, by layer."""
    spans = [KVRange(layer, 0, prompt_len, 0, layout.layers[layer].num_heads) for layer in range(layout.num_layers)]
    return [bytes(np.concatenate([np.frombuffer(p, np.uint8) for p in io.pieces(blocks, s, 64)])) for s in spans]


def state_of(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "X"


def is_running(pid):
    return state_of(pid) not in "ZX"


def wait_until(condition, what, timeout_s=10.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


def test_the_process_imports_no_torch():
    code = "import sys, baton.kvtransfer.receiver.process; print(sorted({'torch', 'triton', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_lands_restarts_after_a_kill_and_leaves_nothing(make_worker, make_prefill):
    worker = make_worker()
    prefill = make_prefill(worker)
    one, other = AttemptKey("one", 0), AttemptKey("other", 0)
    for key in (one, other):
        prefill.reserve(key, 22)
    grants = [prefill.granted(key, worker.poll) for key in (one, other)]
    prefill.push(grants[0], 22, chunk_len=7)
    prefill.commit(grants[0], 22)
    complete = worker.wait_for(Completed, one)
    prefill.frame(grants[1], 0, 0, 22)
    worker.wait_until(lambda: worker.service.inventory()["bytes_landed"] > complete.bytes_landed, "frame")
    before = worker.service.inventory()

    worker.kill(signal.SIGKILL)

    assert "ended (status -9)" in worker.find(IncomingFailed, other).reason
    assert worker.find(Drained, other), "the dead process wrote alone, and it is reaped"
    assert worker.find(IncomingFailed, one) is None
    assert complete.state.first_token == 7
    assert content(worker.io, worker.tables[one].blocks, worker.layout, 22) == content(
        prefill.whole, prefill.blocks, worker.layout, 22
    )
    assert worker.service.epoch not in (0, D_EPOCH)
    assert worker.service.address == prefill.address, "the port was free again"
    worker.wait_until(lambda: worker.service.inventory()["bytes_landed"] == before["bytes_landed"], "totals")
    worker.release(one)

    prefill.replies.clear()
    assert prefill.hello().epoch == worker.service.epoch
    third = AttemptKey("third", 1)
    prefill.reserve(third, 9)
    grant = prefill.granted(third, worker.poll)
    prefill.push(grant, 9)
    prefill.commit(grant, 9)
    worker.wait_for(Completed, third)
    worker.release(third)
    assert worker.blocks.num_free == worker.blocks.num_blocks


@pytest.mark.parametrize(("is_busy", "listens"), [(False, True), (True, True), (False, False)])
def test_its_next_life_serves_a_prefill_worker_that_did_not_notice(make_pair, is_busy, listens):
    """The router hears of it first. What it reserves there must not fail for what the prefill worker does not know."""
    pair = make_pair("process", heartbeat_s=1.0, lease_s=60.0)  # HELLOs are rare
    before = pair.hand_over(9, request_id="before")
    pair.wait_for(Completed, before)
    pair.wait_for(Acked, before)
    if is_busy:
        pair.wait_for(Granted, pair.reserve(9, "busy"))
    host = pair.incoming._host
    os.kill(host.pid, signal.SIGKILL)
    is_there = (lambda: host.num_incarnations == 2) if listens else (lambda: host.epoch != D_EPOCH)
    wait_until(lambda: (pair.turn(), is_there())[1], "no other incarnation", 60.0)
    pair.peer = DecodePeer("d0", pair.incoming.address, pair.incoming.epoch)
    after = pair.reserve(22, "after", wait_s=60.0)
    wait_until(lambda: (pair.turn(), pair.find((Granted, PushFailed), after))[1], "no answer", 60.0)
    assert pair.find(Granted, after), pair.find(PushFailed, after).reason
    pair.compute(after)
    pair.commit(after)
    pair.wait_for(Acked, after)
    pair.wait_for(Completed, after)
    assert torch.equal(pair.rows(pair.target, pair.landed_tables[after], 22), sent(pair, after))
    assert [event.attempt.request_id for _, event in pair.events if isinstance(event, PushFailed)] == ["busy"] * is_busy


def test_nothing_is_lost_silently_when_it_is_killed_at_any_moment(make_pair):
    pair = make_pair("process", num_blocks=256, heartbeat_s=0.05, lease_s=0.6, max_receiver_deaths=100)
    rng = random.Random(5)
    stop = threading.Event()
    kills = []

    def killer():
        while not stop.wait(rng.uniform(0.02, 0.25)):
            pid = pair.incoming._host.pid
            if pid not in kills and pair.incoming._host.death() is None:
                kills.append(pid)
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    num_complete = num_failed = 0
    try:
        # Attempts may fail fast while lives end, so it is time that is limited, not their number.
        deadline_s = time.monotonic() + 120.0
        for index in itertools.count():
            if (len(kills) >= 6 and num_complete >= 5) or time.monotonic() > deadline_s:
                break
            pair.peer = DecodePeer("d0", pair.incoming.address, pair.incoming.epoch)
            key = pair.reserve(1 + rng.randrange(40), f"r{index}", wait_s=2.0)
            pair.wait_for((Granted, PushFailed), key)
            if pair.find(Granted, key):
                pair.compute(key, chunk_len=9)
                pair.commit(key)
            wait_for_the_end(pair, key)
            if pair.find(Completed, key):
                num_complete += 1
                table = pair.landed_tables[key]
                assert torch.equal(pair.rows(pair.target, table, pair.sizes[key]), sent(pair, key))
                pair.release(key)
            else:
                num_failed += 1
                stop.wait(0.01)
    finally:
        stop.set()
        thread.join()
    print(f"{len(kills)} kills: {num_complete} sealed, {num_failed} failed")
    assert len(kills) >= 6
    assert num_complete
    pair.assert_clean()


def sent(pair, key):
    return rows(pair.source, pair.all_tables[key].blocks, pair.sizes[key])


def wait_for_the_end(pair, key):
    """Each side has said what became of an attempt, and holds nothing of it."""

    def is_over():
        pair.turn()
        at_d = pair.find(Completed, key) or key not in pair.landed_tables
        return at_d and key not in pair.tables

    wait_until(is_over, f"an end of {key}: {pair.events[-8:]}")


def test_a_stopped_process_is_replaced_within_its_lease(make_worker, make_prefill):
    worker = make_worker(lease_s=1.0)
    prefill = make_prefill(worker)
    key = AttemptKey("r", 0)
    prefill.reserve(key, 9)
    prefill.granted(key, worker.poll)
    start_s = time.monotonic()
    worker.kill(signal.SIGSTOP)
    assert 0.9 <= time.monotonic() - start_s < 10.0  # its last sign of life may be a little older than the signal
    assert "did nothing for 1.0 s" in worker.find(IncomingFailed, key).reason
    worker.wait_for(Drained, key)
    assert worker.blocks.num_free == worker.blocks.num_blocks


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_ends_with_its_parent_and_takes_the_memory_away(is_stopped):
    command = [sys.executable, "-m", "baton.tests.kvtransfer.parent_of_incoming", "60"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        pid, path = parent.stdout.readline().split()
        assert Path(path).exists()
        if is_stopped:
            os.kill(int(pid), signal.SIGSTOP)
            wait_until(lambda: state_of(int(pid)) == "T", "it is not stopped")
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not is_running(int(pid)), "the child lives on")
    assert not Path(path).exists()


def test_garbage_in_a_ring_ends_the_process_and_no_more(make_worker, make_prefill):
    worker = make_worker()
    prefill = make_prefill(worker)
    key = AttemptKey("r", 0)
    prefill.reserve(key, 9)
    prefill.granted(key, worker.poll)
    pid = worker.pid
    worker.service._link.events.push(b"\xff" * 40)
    worker.wait_until(lambda: worker.pid != pid, "new incarnation")
    assert "a record that is none" in worker.wait_for(IncomingFailed, key).reason
    worker.wait_for(Drained, key)


def test_too_many_deaths_give_the_worker_up(make_worker):
    worker = make_worker(max_receiver_deaths=2)
    worker.kill(signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(TransferFailed, match="2 of its incarnations ended"):
        worker.wait_until(lambda: False, "end", 5.0)


def test_a_port_that_was_taken_meanwhile_is_replaced(make_worker):
    worker = make_worker()
    address, pid = worker.service.address, worker.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: worker.service._host.death() is not None, "death")
    taker = ZmqTransport(address)
    worker.wait_until(lambda: worker.pid != pid, "new incarnation")
    assert worker.service.address != address
    taker.close()


def test_a_port_that_is_taken_is_a_typed_error_and_leaves_nothing():
    taker = ZmqTransport("tcp://127.0.0.1:0")
    before = owned_by({os.getpid()})
    with pytest.raises(PortInUse):
        ReceiverWorker(bind=taker.address)
    assert owned_by({os.getpid()}) <= before
    taker.close()


@pytest.mark.parametrize(("num_kv_heads", "d_size", "p_size"), [(4, 2, 1), (4, 2, 2), (2, 1, 2), (1, 2, 2), (2, 4, 1)])
def test_ranks_of_either_side_share_one_incoming(make_worker, make_prefill, num_kv_heads, d_size, p_size):
    layout = make_layout(num_kv_heads=num_kv_heads)
    worker = make_worker(layout, tp_size=d_size)
    ranks = [make_prefill(worker, rank=rank, size=p_size) for rank in range(p_size)]
    key = AttemptKey("r", 0)
    ranks[0].reserve(key, 22)
    grant = ranks[0].granted(key, worker.poll)
    for rank in ranks:
        assert worker.find(Completed, key) is None, "all ranks or none"
        rank.push(grant, 22, chunk_len=6)
        rank.commit(grant, 22)
        time.sleep(0.02)
        worker.poll()
    worker.wait_for(Completed, key)
    blocks = worker.tables[key].blocks
    for pool in worker.io.ranks:
        for layer in range(layout.num_layers):
            heads = pool.geometry.layer(layer).heads
            span = KVRange(layer, 0, 22, heads.first, heads.count)
            assert pool.digest(blocks, span) == ranks[0].whole.digest(ranks[0].blocks, span)
    worker.release(key)


class TestOneSided:
    """Prefill ranks may still write the blocks of an incoming transfer whose process died: only evidence frees them."""

    @pytest.fixture
    def setting(self, make_worker, make_prefill):
        worker = make_worker(data_paths=("shm",), **SHORT)
        p_epoch = secrets.randbits(64)  # its file's name must be nobody else's
        incarnation = IncarnationFile(p_epoch)
        prefill = make_prefill(
            worker, p_epoch=p_epoch, data_paths=["shm"], incarnation_file=str(incarnation.path), host_id=host_id()
        )
        key = AttemptKey("r", 0)
        prefill.reserve(key, 9, data_path="shm")
        grant = prefill.granted(key, worker.poll)
        assert tuple(grant.blocks) == worker.tables[key].blocks
        yield worker, prefill, incarnation, key, grant
        incarnation.close()

    def test_the_offer_leads_to_the_pool(self, setting):
        worker, prefill, _, _, _ = setting
        reply = prefill.wait_for("hello_reply", lambda reply: reply.proof)
        (offer,) = [offer for offer in reply.offers if offer.data_path == "shm"]
        data = Path(offer.shm.path).read_bytes()
        at = offer.shm.nonce_offset_bytes
        assert data[at : at + len(offer.shm.nonce)] == offer.shm.nonce
        assert [place.num_bytes for place in offer.shm.pools] == [g.num_bytes for g in worker.setup.geometries]

    def test_blocks_wait_for_the_word_of_the_prefill_worker(self, setting):
        worker, prefill, _, key, grant = setting
        worker.kill(signal.SIGKILL)
        worker.wait_for(IncomingFailed, key)
        prefill.replies.clear()
        prefill.hello(poll=worker.poll)
        abort = prefill.wait_for("abort", lambda abort: abort.attempt == wire_attempt(key), poll=worker.poll)
        assert (abort.epoch, abort.peer_epoch) == (grant.epoch, prefill.p_epoch)
        assert worker.find(Drained, key) is None
        prefill.send(
            kv_pb2.AbortAck(
                epoch=abort.epoch,
                incoming_id=abort.incoming_id,
                attempt=abort.attempt,
                drained=True,
                peer_epoch=prefill.p_epoch,
            )
        )
        worker.wait_for(Drained, key)

    def test_blocks_wait_for_the_death_of_the_prefill_worker(self, setting):
        worker, _, incarnation, key, _ = setting
        worker.kill(signal.SIGKILL)
        worker.kill(signal.SIGKILL)  # the next incarnation inherits what the last one had inherited
        end_s = time.monotonic() + 3 * worker.config.lease_s
        while time.monotonic() < end_s:
            worker.poll()
            time.sleep(0.01)
        assert worker.find(Drained, key) is None, "no timer frees what may be written"
        incarnation.close()
        worker.wait_for(Drained, key)
        assert [type(event) for event in worker.events] == [ReserveWanted, IncomingFailed, Drained]


def test_a_busy_interpreter_beside_it_does_not_slow_it_down(make_worker, make_prefill):
    """Coarse: a thread of the same process would be slowed down by one or two orders of magnitude."""
    worker = make_worker(BULK, num_blocks=256)
    command = [sys.executable, "-m", "baton.tests.kvtransfer.scripted_prefill", worker.service.address]
    stop = threading.Event()
    seconds = {}
    for is_busy in (False, True, False, True):
        thread = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
        if is_busy:
            thread.start()
        key = AttemptKey(f"r{len(worker.events)}", 0)
        pusher = subprocess.Popen([*command, key.request_id], stdout=subprocess.PIPE)
        worker.wait_for(Completed, key, 30.0)
        seconds.setdefault(is_busy, []).append(float(pusher.communicate()[0]))
        stop.set()
        if is_busy:
            thread.join()
        stop.clear()
        worker.release(key)
    print(f"idle {seconds[False]}, busy {seconds[True]}")
    assert min(seconds[True]) < 4 * min(seconds[False]) + 0.05
