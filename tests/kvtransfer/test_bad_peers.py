"""Peers that are of another kind, of another time, or stopped: refused by name or fenced, and counted; never written.

Everything here goes over real sockets to an incoming transfer in a process of its own.
"""

import dataclasses
import inspect
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import HEADER_BYTES, decode_header, encode_header
from baton.kvtransfer.protocol.messages import layout_message
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.receiver_worker import Completed, Drained, IncomingFailed, ReceiverWorker, ReserveWanted
from baton.tests.kvtransfer.scripted_prefill import ScriptedPrefill

LEASE_S = 1.0


@pytest.fixture
def make_worker():
    workers = []

    def make(**options):
        workers.append(ReceiverWorker(**options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def make_prefill():
    made = []

    def make(worker, **options):
        made.append(ScriptedPrefill(worker.service.address, worker.layout, **options))
        return made[-1]

    yield make
    for prefill in made:
        prefill.close()


def memory(worker):
    return bytes(worker.region.pool(0))


def count(worker, name):
    return worker.service.inventory()[name]


def wait_for_count(worker, name, wanted):
    worker.wait_until(lambda: count(worker, name) == wanted, f"{name} of {wanted}, but {worker.service.inventory()}")


@pytest.fixture(scope="module")
def hello_worker():
    worker = ReceiverWorker(layout=make_layout(num_kv_heads=4))
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"version": 1}, "KVP version 1, here 2"),
        ({"model_hash": "another"}, "model_hash 'another' here 'model'"),
        ({"num_layers": 4}, "num_layers 4 here 3"),
        ({"num_kv_heads": 8}, "layer 0: num_heads 8 here 4"),
        ({"head_dim": 16}, "layer 0: row_len 16 here 8"),
        ({"dtype": "float64"}, "layer 0: dtype 'float64' here 'float32'"),
        ({"has_mtp": True}, "has_mtp True here False"),
        ({"tp_size": 3, "tp_rank": 0}, "tensor parallel size 3 does not go with the 4 heads"),
        ({"tp_size": 2, "tp_rank": 2}, "tensor parallel rank 2 of 2"),
        ({"tp_size": 2, "tp_rank": 1, "head_first": 0, "head_count": 2}, "rank 1 of 2 holds 2 of 4 heads from 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_of_another_kind_is_refused_by_name_at_its_hello(hello_worker, make_prefill, changes, name):
    worker = hello_worker
    prefill = make_prefill(worker, p_epoch=time.monotonic_ns())
    known = inspect.signature(KVLayout.of_attention).parameters
    layout = {key: value for key, value in changes.items() if key in known}
    changes = {key: value for key, value in changes.items() if key not in known}
    if layout:
        changes["layout"] = layout_message(make_layout(**({"num_kv_heads": 4} | layout)))
    reply = prefill.hello(poll=worker.poll, **changes)
    assert name in reply.refused
    assert not reply.offers
    prefill.reserve(AttemptKey(f"after {name}", 1), 5)
    deny = prefill.wait_for("deny", poll=worker.poll)
    assert (deny.reason, deny.detail) == (kv_pb2.Deny.NO_HELLO, "no HELLO was heard")
    assert not any(isinstance(event, ReserveWanted) for event in worker.events)


def test_ranks_that_disagree_about_their_number_are_refused(hello_worker, make_prefill):
    first = make_prefill(hello_worker, p_epoch=99, size=2, rank=0)
    assert first.hello(poll=hello_worker.poll).refused == ""
    second = make_prefill(hello_worker, p_epoch=99, size=4, rank=1)
    assert "rank 1 says there are 4 ranks, another said otherwise" in second.hello(poll=hello_worker.poll).refused


def granted(worker, prefill, name, prompt_len=9):
    key = AttemptKey(name, 1)
    prefill.hello(poll=worker.poll)
    prefill.reserve(key, prompt_len)
    return key, prefill.granted(key, poll=worker.poll)


def test_a_frame_for_the_incoming_of_another_is_refused_and_counted(make_worker, make_prefill):
    worker = make_worker()
    owner, other = make_prefill(worker, p_epoch=77), make_prefill(worker, p_epoch=78)
    key, grant = granted(worker, owner, "owned")
    granted(worker, other, "own")
    before = memory(worker)
    other.frame(grant, 0, 0, 9)
    wait_for_count(worker, "frames_corrupt", 1)
    assert memory(worker) == before
    owner.push(grant, 9)
    owner.commit(grant, 9)
    worker.wait_for(Completed, key)
    wait_for_count(worker, "frames_landed", worker.layout.num_layers)


class Wire:
    """Sends frames as it is told, in place of a transport."""

    def __init__(self, inner, change):
        self._inner = inner
        self._change = change

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send_frame(self, peer, header, payload, data_path):
        self._inner.send_frame(peer, *self._change(header, b"".join(payload)), data_path)


def with_header(header, **changes):
    return encode_header(dataclasses.replace(decode_header(header), **changes))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda header, data: (header, [memoryview(data[:-8])]), "frames_corrupt"),
        (lambda header, data: (header, []), "frames_corrupt"),
        (lambda header, data: (header[:-1], [memoryview(data)]), "transport_messages_refused"),
        (lambda header, data: (header + b"x", [memoryview(data)]), "transport_messages_refused"),
        (lambda header, data: (header + bytes(1 << 20), [memoryview(data)]), "transport_messages_refused"),
        (lambda header, data: (bytes(HEADER_BYTES), [memoryview(data)]), "frames_corrupt"),
        (lambda header, data: (with_header(header, payload_bytes=(1 << 32) - 1), [memoryview(data)]), "frames_corrupt"),
        (lambda header, data: (with_header(header, count=(1 << 32) - 1), [memoryview(data)]), "frames_corrupt"),
        (lambda header, data: (with_header(header, first=1 << 31), [memoryview(data)]), "frames_corrupt"),
        (lambda header, data: (with_header(header, layer=9), [memoryview(data)]), "frames_corrupt"),
        (lambda header, data: (with_header(header, is_written=True), []), "frames_corrupt"),
    ],
    ids=[
        "payload cut",
        "no payload",
        "header cut",
        "header too long",
        "header far too long",
        "no header",
        "payload far too large",
        "count far too large",
        "first beyond the prompt",
        "layer that is none",
        "written by nobody",
    ],
)
def test_frames_that_are_cut_or_too_large_are_refused_and_counted(sized_worker, make_prefill, change, name):
    worker, key_names = sized_worker
    prefill = make_prefill(worker, p_epoch=time.monotonic_ns())
    key, grant = granted(worker, prefill, next(key_names))
    before, num_before = memory(worker), count(worker, name)
    whole = prefill.transport
    prefill.transport = Wire(whole, change)
    prefill.frame(grant, 1, 0, 9)
    prefill.transport = whole
    wait_for_count(worker, name, num_before + 1)
    assert memory(worker) == before
    prefill.digests.clear()
    prefill.push(grant, 9)  # the same incoming transfer is none the worse for it
    prefill.commit(grant, 9)
    worker.wait_for(Completed, key)
    worker.release(key)


@pytest.fixture(scope="module")
def sized_worker():
    worker = ReceiverWorker()
    yield worker, (f"r{index}" for index in range(100))
    worker.close()


def test_a_replay_of_a_whole_recorded_exchange_changes_nothing(make_worker, make_prefill):
    worker = make_worker()
    prefill = make_prefill(worker)
    said = []  # every call on the wire
    wire = prefill.transport

    class Recorder(Wire):
        def send(self, *arguments):
            said.append(("send", arguments))
            self._inner.send(*arguments)

        def send_frame(self, peer, header, payload, data_path):
            kept = [memoryview(b"".join(payload))]
            said.append(("send_frame", (peer, header, kept, data_path)))
            self._inner.send_frame(peer, header, kept, data_path)

    prefill.transport = Recorder(wire, None)
    key, grant = granted(worker, prefill, "recorded")
    prefill.push(grant, 9)
    prefill.commit(grant, 9)
    worker.wait_for(Completed, key)
    num_frames = sum(name == "send_frame" for name, _ in said)

    def replay(num_late):
        for name, arguments in said:
            getattr(wire, name)(*arguments)
        wait_for_count(worker, "frames_late_dropped", num_late)
        time.sleep(0.05)
        worker.poll()
        assert memory(worker) == before
        assert sum(event.attempt == key for event in worker.events) == 2, "it is wanted once, and complete once"

    before = memory(worker)
    replay(num_frames)  # while its sequence runs
    worker.release(key)
    replay(2 * num_frames)  # when it has ended
    prefill.transport = wire
    reused, grant = granted(worker, prefill, "reused")  # its blocks are another's by now
    replay(3 * num_frames)
    prefill.push(grant, 9)
    prefill.commit(grant, 9)
    worker.wait_for(Completed, reused)
    worker.release(reused)
    assert count(worker, "frames_corrupt") == 0
    assert worker.blocks.num_free == worker.blocks.num_blocks


class StoppingPrefill:
    """See `stopping_prefill`."""

    def __init__(self, worker, transport):
        module = "baton.tests.kvtransfer.stopping_prefill"
        arguments = [worker.service.address, str(worker.service.epoch), transport, str(LEASE_S)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.heard = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self):
        for line in self._process.stdout:
            self.heard.append(line.strip())

    def signal(self, number):
        os.kill(self._process.pid, number)

    def has_heard(self, name):
        return any(line.startswith(name) for line in self.heard)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.mark.parametrize("transport", ["tcp", "shm", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_prefill_process_that_is_stopped_and_returns_after_its_lease_writes_nothing(make_worker, transport):
    """It was in the middle of pushing, and goes on where it was. Where it writes itself, its blocks wait for it."""
    control = "grpc" if transport == "grpc" else "zmq"
    bind = "grpc://127.0.0.1:0" if control == "grpc" else "tcp://127.0.0.1:0"
    data_paths = ("shm",) if transport == "shm" else ()
    worker = make_worker(control=control, bind=bind, data_paths=data_paths, lease_s=LEASE_S, heartbeat_s=0.1)
    prefill = StoppingPrefill(worker, transport)
    key = AttemptKey("r", 1)
    try:
        worker.wait_until(lambda: count(worker, "frames_landed") > 30, "frames", 30.0)
        prefill.signal(signal.SIGSTOP)
        assert "for 1.0 s" in worker.wait_for(IncomingFailed, key).reason
        if transport == "shm":
            end_s = time.monotonic() + 1.5 * LEASE_S
            while time.monotonic() < end_s:
                worker.poll()
                assert worker.find(Drained, key) is None, "it may still be writing"
                time.sleep(0.01)
            prefill.signal(signal.SIGCONT)
            worker.wait_for(Drained, key)
        else:
            worker.wait_for(Drained, key)
        region = worker.region.pool(0)
        region[:] = b"\xa5" * len(region)  # another's by now
        if transport != "shm":
            time.sleep(0.5 * LEASE_S)
            prefill.signal(signal.SIGCONT)
        worker.wait_until(lambda: prefill.has_heard("PushDrained"), "end of the push")
        assert prefill.has_heard("PushFailed")
        assert not prefill.has_heard("Acked")
        time.sleep(0.3)  # it still computes, and submits what it computes
        assert bytes(region) == b"\xa5" * len(region)
        assert worker.blocks.num_free == worker.blocks.num_blocks
    finally:
        prefill.close()
