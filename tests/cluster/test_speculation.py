"""`baton speculation`: what it asks of a deployment and what it shows."""

import json
from concurrent import futures

import grpc
import pytest
from typer.testing import CliRunner

from baton.cluster import cli
from baton.core.errors import InvalidRequest
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.proto.wire import ERROR_KEY

pytestmark = pytest.mark.fast


class Admin(admin_pb2_grpc.AdminServicer):
    """A router with two decode workers, of which one never answers."""

    def __init__(self):
        self.modes = []
        self.now = worker_pb2.Speculation(num_draft_tokens=2, limit=2)
        self.is_lost = False

    def Status(self, request, context):
        reply = admin_pb2.StatusReply(model="stub")
        for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")):
            state = worker_pb2.WorkerState(worker_id=name, role=role)
            if role == "decode":
                state.speculation.CopyFrom(self.now)
            reply.workers.append(admin_pb2.WorkerStatus(state=state, alive=name != "decode-1"))
        return reply

    def SetSpeculation(self, request, context):
        self.modes.append(request.mode)
        if request.mode.num_draft_tokens > 2:
            error = InvalidRequest("at most 2", field="num_draft_tokens")
            context.set_trailing_metadata(((ERROR_KEY, error.to_wire()),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        self.now.auto = request.mode.auto
        self.now.num_draft_tokens = request.mode.num_draft_tokens
        told = [admin_pb2.WorkerSpeculation(worker_id="decode-0", speculation=self.now)]
        if self.is_lost:
            told.append(admin_pb2.WorkerSpeculation(worker_id="decode-1", error="no answer"))
        return admin_pb2.SetSpeculationReply(workers=told)


@pytest.fixture
def admin():
    servicer = Admin()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


def speculation(admin, *arguments):
    result = CliRunner().invoke(cli.app, ["speculation", "--address", admin.address, *arguments], standalone_mode=False)
    return result.exit_code or result.return_value, result.output


def test_shows_what_live_decode_workers_do(admin):
    code, output = speculation(admin)
    assert code == 0
    assert [line.split() for line in output.strip().splitlines()] == [
        ["worker", "mode", "drafts", "by", "limit", "error"],
        ["decode-0", "fixed", "2", "2"],
    ]
    assert admin.modes == []


@pytest.mark.parametrize(
    ("mode", "wanted"), [("0", {"num_draft_tokens": 0}), ("1", {"num_draft_tokens": 1}), ("auto", {"auto": True})]
)
def test_asks_for_a_number_or_auto(mode, wanted, admin):
    code, output = speculation(admin, mode, "--json")
    assert code == 0
    assert admin.modes == [worker_pb2.SpeculationMode(**wanted)]
    assert admin.modes[0].WhichOneof("mode") == next(iter(wanted))
    [worker] = json.loads(output)["workers"]
    assert worker["speculation"]["auto"] == (mode == "auto")


def test_a_worker_that_was_not_reached_makes_it_partial(admin):
    admin.is_lost = True
    code, output = speculation(admin, "1")
    assert code == 4
    assert "no answer" in output


@pytest.mark.parametrize(("mode", "num_asked"), [("3", 1), ("many", 0), ("-1", 0), ("1.5", 0), ("", 0)])
@pytest.mark.long
def test_what_cannot_be_is_a_usage_error(mode, num_asked, admin):
    code, _ = speculation(admin, "--json", "--", mode)
    assert code == 2
    assert len(admin.modes) == num_asked
