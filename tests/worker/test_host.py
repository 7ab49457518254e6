"""The gRPC host: whoever cannot be reached any more must not live on unnoticed."""

import queue
import time
from concurrent import futures
from functools import partial

import grpc
import grpc.aio
import pytest

from baton.core.errors import InternalError, InvalidText, MalformedMessage, Overloaded
from baton.core.inside import WorkerIdentity
from baton.proto import admin_pb2, admin_pb2_grpc, wire, worker_pb2, worker_pb2_grpc
from baton.proto.unreadable import read_of
from baton.tests.inside import worker_channel
from baton.tests.worker.streams import ATTEND_ALL, RUN_ALL, opening, raw_end
from baton.worker import host as host_module
from baton.worker.host import WorkerHost
from baton.worker.loop import RequestLimit

pytestmark = pytest.mark.fast


def wait_for(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.long
def test_a_host_that_cannot_start_says_so():
    def register(server):
        raise KeyError("broken")

    host = WorkerHost("127.0.0.1", register, worker_pb2.WorkerState, "", pytest.fail)
    with pytest.raises(KeyError, match="broken"):
        host.start()
    host.close()


def test_heartbeats_that_break_end_the_worker(monkeypatch):
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.005)
    fatal = []

    def state():
        raise ZeroDivisionError

    identity = WorkerIdentity(role="prefill", worker_id="p", epoch=1)
    host = WorkerHost("127.0.0.1", lambda server: None, state, "127.0.0.1:1", fatal.append, identity=identity)
    host.start()
    wait_for(lambda: fatal)
    assert isinstance(fatal[0], ZeroDivisionError)
    host.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_inventory_that_cannot_be_taken_is_a_typed_error(role):
    def state():
        raise ZeroDivisionError

    identity = WorkerIdentity(role=role, worker_id="w", epoch=7)
    host = WorkerHost("127.0.0.1", lambda server: None, state, "", pytest.fail, identity=identity)
    host.start()
    try:
        with grpc.insecure_channel(host.address) as channel:
            admin = admin_pb2_grpc.AdminStub(worker_channel(channel, role, "w", 7))
            with pytest.raises(grpc.RpcError) as caught:
                admin.Inventory(admin_pb2.InventoryRequest(), timeout=60.0)
        error = wire.error_from_rpc(caught.value)
        assert (type(error), error.fields["cause_type"]) == (InternalError, "ZeroDivisionError")
    finally:
        host.close()


@pytest.mark.long
def test_heartbeats_go_on_after_one_that_broke(monkeypatch):
    """Of eight in a row that break, the last ends the worker; one that passes in between starts the count anew."""
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.001)
    fatal, reports, heard = [], [], []

    class Membership(worker_pb2_grpc.MembershipServicer):
        def Heartbeat(self, request, context):
            heard.append(request.epoch)
            return worker_pb2.HeartbeatReply()

    def state():
        reports.append(None)
        if len(reports) % host_module.MAX_BROKEN_HEARTBEATS:
            raise ZeroDivisionError
        return worker_pb2.WorkerState(worker_id="w", role="decode", epoch=7)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    worker_pb2_grpc.add_MembershipServicer_to_server(Membership(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    identity = WorkerIdentity(role="decode", worker_id="w", epoch=7)
    host = WorkerHost("127.0.0.1", lambda server: None, state, f"127.0.0.1:{port}", fatal.append, identity=identity)
    host.start()
    try:
        wait_for(lambda: len(heard) >= 3 or fatal, timeout_s=60.0)
        assert not fatal
    finally:
        host.close()
        server.stop(None)


class BusyRouter(worker_pb2_grpc.MembershipServicer):
    """It has a report, and answers it when it may."""

    def __init__(self, port):
        self.came = queue.SimpleQueue()  # of each report, for how long it waits
        self.answers = queue.SimpleQueue()
        self.server = grpc.server(futures.ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_MembershipServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    def Heartbeat(self, request, context):
        self.came.put(context.time_remaining())
        return self.answers.get(timeout=60.0)

    def die(self):
        self.server.stop(None)
        self.answers.put(None)


@pytest.mark.parametrize("silent_s", [0.0, 1e6])
def test_a_report_waits_for_a_busy_router_and_ends_with_a_dead_one(silent_s, monkeypatch, caplog):
    """Which is told when it has been silent for so long."""
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(host_module, "SILENT_S", silent_s)
    identity = WorkerIdentity(role="decode", worker_id="w", epoch=7)
    state = partial(worker_pb2.WorkerState, worker_id="w", role="decode", epoch=7)
    router = BusyRouter(0)
    place = f"127.0.0.1:{router.port}"
    host = WorkerHost("127.0.0.1", lambda server: None, state, place, pytest.fail, identity=identity)
    host.start()
    try:
        assert router.came.get(timeout=60.0) > 30.0, "a router may be busy for long"
        router.answers.put(worker_pb2.HeartbeatReply())
        assert router.came.get(timeout=60.0) > 30.0, "another report, after the first was answered"
        assert "does not answer" not in caplog.text
        router.die()
        router = BusyRouter(router.port)
        assert router.came.get(timeout=60.0) > 30.0, "what waited for the dead one waits no longer"
        assert ("does not answer" in caplog.text) == (silent_s == 0.0)
    finally:
        router.die()
        host.close()


@pytest.mark.long
def test_a_router_that_is_away_is_no_failure():
    fatal = []
    host = WorkerHost("127.0.0.1", lambda server: None, worker_pb2.WorkerState, "127.0.0.1:1", fatal.append)
    host.start()
    time.sleep(0.6)
    host.close()
    assert fatal == []


class Reading(worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer):
    """Workers that read their streams as the real ones do."""

    async def RunAll(self, request_iterator, context):
        while await read_of(context) is not grpc.aio.EOF:
            pass

    AttendAll = RunAll


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 50, b"\x0a\x50abc", opening(b"\xff" * 50), opening(b"\x0a\x03\x0a\x01\xff")],
    ids=["garbage", "short", "garbage in a request", "text"],
)
@pytest.mark.parametrize("method", [RUN_ALL, ATTEND_ALL])
def test_bytes_that_are_no_message_get_a_typed_refusal(data, method):
    def register(server):
        worker_pb2_grpc.add_PrefillServicer_to_server(Reading(), server)
        worker_pb2_grpc.add_DecodeServicer_to_server(Reading(), server)

    host = WorkerHost("127.0.0.1", register, worker_pb2.WorkerState, "", pytest.fail)
    host.start()
    with grpc.insecure_channel(host.address) as plain:
        refused, _ = raw_end(worker_channel(plain, "", "", 0), method, data, 2.0)
    error = wire.error_from_rpc(refused)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert wire.ERROR_KEY in dict(refused.trailing_metadata())
    if data.endswith(b"\x0a\x01\xff"):
        assert (type(error), error.fields["field"]) == (InvalidText, "open.request.attempt.request_id")
    else:
        assert type(error) is MalformedMessage
    host.close()


def test_a_gate_counts_at_the_door():
    request_limit = RequestLimit("full", 2)
    request_limit.enter()
    request_limit.enter()
    with pytest.raises(Overloaded, match="full"):
        request_limit.enter()
    request_limit.leave()
    request_limit.enter()
    assert request_limit.num_inside == 2
