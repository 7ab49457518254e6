"""A starting worker's reports: what the router gets, and that a start never waits for it."""

import contextlib
import queue
import socket
import threading
from concurrent import futures

import grpc
import pytest

from baton.core.errors import ConfigInvalid, Unauthenticated
from baton.core.inside import ROUTER, incarnation_name
from baton.core.start_phase import WEIGHTS
from baton.core.tls_files import TlsFiles
from baton.proto import wire, worker_pb2, worker_pb2_grpc
from baton.proto.inside import HEADER
from baton.tests.worker.test_nodes import worker_config
from baton.worker import start_report as module
from baton.worker.start_report import StartReport

pytestmark = pytest.mark.fast
WAIT_S = 60.0
CALLEE = incarnation_name(ROUTER, 7)


class Router(worker_pb2_grpc.MembershipServicer):
    """Refuses calls that are not for its incarnation; `holds` keeps the others waiting."""

    def __init__(self):
        self.reports = queue.SimpleQueue()
        self.num_refused = 0
        self.holds = threading.Event()
        self.may_answer = threading.Event()

    def Starting(self, request, context):
        header = dict(context.invocation_metadata())[HEADER]
        if CALLEE not in header.split(" "):
            self.num_refused += 1
            error = Unauthenticated("another incarnation", reason="callee", callee=CALLEE)
            context.set_trailing_metadata(((wire.ERROR_KEY, error.to_wire()),))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        self.reports.put(request)
        if self.holds.is_set():
            self.may_answer.wait(WAIT_S)
        return worker_pb2.StartingReply()


@contextlib.contextmanager
def serving(servicer):
    server = grpc.server(futures.ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    worker_pb2_grpc.add_MembershipServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def next_of(router, phase):
    """The first report of a phase that comes from now on."""
    while (found := router.reports.get(timeout=WAIT_S)).phase != phase:
        pass
    return found


def test_the_router_gets_the_latest_phase_until_the_start_is_over(monkeypatch):
    monkeypatch.setattr(module, "REPORT_S", 0.001)
    router = Router()
    with serving(router) as address:
        report = StartReport(worker_config("decode-0", address), "decode", 5)
        with report as on_phase:
            assert next_of(router, "starting") == worker_pb2.StartingWorker(
                worker_id="decode-0", role="decode", epoch=5, phase="starting"
            )
            on_phase(WEIGHTS, 45, 100)
            found = next_of(router, WEIGHTS)
            assert (found.num_done, found.num_total) == (45, 100)
        report._thread.join(WAIT_S)
        assert not report._thread.is_alive()
    assert router.num_refused == 1, "it met the router once"


def test_a_start_does_not_wait_for_a_router_that_does_not_answer():
    router = Router()
    router.holds.set()
    with serving(router) as address:
        try:
            report = StartReport(worker_config("decode-0", address), "decode", 5)
            with report as on_phase:
                next_of(router, "starting")
                on_phase(WEIGHTS, 1, 2)
            assert report._thread.is_alive(), "its call is still held"
        finally:
            router.may_answer.set()
        report._thread.join(WAIT_S)


def test_a_start_goes_on_without_a_router():
    with socket.socket() as bound:  # nothing listens there
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ZeroDivisionError):
            with StartReport(worker_config("w", f"127.0.0.1:{bound.getsockname()[1]}"), "decode", 5) as on_phase:
                on_phase(WEIGHTS, 1, 2)
                raise ZeroDivisionError
    report = StartReport(worker_config("w"), "decode", 5)
    with report as on_phase:
        on_phase(WEIGHTS, 1, 2)
    assert report._thread.ident is None, "there is no router to tell"


def test_a_router_of_an_earlier_version_is_asked_once(monkeypatch):
    class Earlier(worker_pb2_grpc.MembershipServicer):
        def Starting(self, request, context):
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    with serving(Earlier()) as address:
        report = StartReport(worker_config("w", address), "decode", 5)
        with report:
            report._thread.join(WAIT_S)
            assert not report._thread.is_alive()


def test_certificates_that_cannot_be_used_do_not_end_the_start_here(tmp_path):
    tls = TlsFiles(ca_file=str(tmp_path / "missing.pem"))
    report = StartReport(worker_config("w", "127.0.0.1:1", tls=tls), "decode", 5)
    with pytest.raises(ConfigInvalid):
        module.SecureChannels(tls)
    with report:
        report._thread.join(WAIT_S)
        assert not report._thread.is_alive()
