"""`baton drain` and `baton quarantine`: what they ask of a deployment, what they show, how they exit."""

import json
from concurrent import futures

import grpc
import pytest
from typer.testing import CliRunner

from baton.cluster import cli
from baton.cluster.commands import drain
from baton.cluster.router_process import router_command
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid, InvalidRequest
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.proto.wire import ERROR_KEY
from baton.router import __main__ as router_main

pytestmark = pytest.mark.fast


class Admin(admin_pb2_grpc.AdminServicer):
    """A router with a worker that has two streams, one fewer at each look."""

    def __init__(self):
        self.asked = []
        self.num_streams = 2
        self.draining = False
        self.epoch = 1
        self.meanwhile = lambda: None  # what happens between two looks
        self.refused = ["aaaa", "bbbb"]

    def Drain(self, request, context):
        if request.worker_id != "decode-0":
            error = InvalidRequest("no worker of that name is alive", field="worker_id")
            context.set_trailing_metadata(((ERROR_KEY, error.to_wire()),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        self.asked.append(request)
        self.draining = not request.undo
        return admin_pb2.DrainReply(draining=self.draining, num_streams=self.num_streams)

    def ClearQuarantine(self, request, context):
        kept = [name for name in self.refused if request.fingerprint not in ("", name)]
        num_cleared, self.refused = len(self.refused) - len(kept), kept
        return admin_pb2.ClearQuarantineReply(num_cleared=num_cleared)

    def Status(self, request, context):
        if self.asked:
            self.num_streams -= 1
            self.meanwhile()
        state = worker_pb2.WorkerState(worker_id="decode-0", role="decode", epoch=self.epoch)
        worker = admin_pb2.WorkerStatus(
            state=state, alive=True, draining=self.draining, num_streams=max(0, self.num_streams)
        )
        refused = [admin_pb2.Quarantined(fingerprint=name, workers=["d0", "d1"], left_s=9) for name in self.refused]
        return admin_pb2.StatusReply(model="stub", workers=[worker], quarantined=refused, num_migrations=4)


@pytest.fixture
def admin(monkeypatch):
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    servicer = Admin()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


def run(admin, *arguments):
    result = CliRunner().invoke(cli.app, [*arguments, "--address", admin.address], standalone_mode=False)
    return result.exit_code or result.return_value, result.stdout.strip()


def test_it_waits_until_the_worker_is_empty(admin):
    assert run(admin, "drain", "decode-0", "--grace", "1.5") == (0, "decode-0 is empty and can be stopped")
    (asked,) = admin.asked
    assert asked.grace_ms == 1500, "the grace counts once"


def test_it_only_asks_and_undoes(admin):
    code, text = run(admin, "drain", "decode-0", "--wait", "0", "--json")
    assert (code, json.loads(text)["num_streams"]) == (4, 2)
    assert not admin.asked[0].HasField("grace_ms")
    assert run(admin, "drain", "decode-0", "--undo") == (0, "decode-0 serves")


def test_a_drain_after_which_requests_are_refused_says_so(admin, monkeypatch):
    assert json.loads(run(admin, "drain", "decode-0", "--undo", "--json")[1])["warning"] == ""
    result = CliRunner().invoke(cli.app, ["drain", "decode-0", "--json", "--address", admin.address])
    refused = "new requests are refused: no decode worker takes them"
    assert json.loads(result.stdout)["warning"] == refused
    assert f"{refused}; `baton drain decode-0 --undo`" in result.stderr
    status = admin_pb2.StatusReply()
    status.workers.add(alive=True).state.role = "decode"
    status.workers.add(alive=True, draining=True).state.role = "prefill"
    assert "decode workers compute no prompts" in drain._unserved(status), "--local-prefill never"
    status.local_prefill.only_way = True
    assert not drain._unserved(status)
    status.local_prefill.only_way = False
    status.workers[1].draining = False
    assert not drain._unserved(status)


def test_waiting_drains_neither_what_another_put_back_nor_the_next_incarnation(admin):
    admin.num_streams = 10
    admin.meanwhile = lambda: setattr(admin, "draining", False)
    text = "decode-0 serves again: another call has put it back"
    assert run(admin, "drain", "decode-0") == (4, text)
    assert (len(admin.asked), admin.draining) == (1, False)
    admin.num_streams, admin.meanwhile = 10, lambda: vars(admin).update(draining=False, epoch=3)
    admin.epoch, admin.asked = 2, []
    code, text = run(admin, "drain", "decode-0", "--json")
    assert (code, json.loads(text)["message"]) == (
        4,
        "decode-0 has ended meanwhile; its next incarnation is not drained",
    )
    assert (len(admin.asked), admin.draining) == (1, False)


def test_who_names_no_worker_is_told_the_names(admin):
    for more in ((), ("--undo",)):
        code, text = run(admin, "drain", "decode-9", "--json", *more)
        assert (code, json.loads(text)["message"]) == (2, "no worker 'decode-9' is known; known are decode-0")
    assert not admin.asked


@pytest.mark.parametrize(
    "arguments",
    [("nobody",), ("decode-0", "--grace", "-1"), ("decode-0", "--wait", "nan"), ("decode-0", "--undo", "--grace", "1")],
)
def test_bad_input_is_usage(admin, arguments):
    assert run(admin, "drain", *arguments)[0] == 2


def test_the_status_shows_drains_moves_and_who_is_refused(admin):
    admin.draining, admin.num_streams = True, 3
    _, text = run(admin, "status")
    assert "draining, 3 streams" in text
    assert "4 streams moved" in text
    assert "request aaaa is refused for 9 s: d0, d1 died of it" in text


def test_requests_are_shown_and_pardoned(admin):
    shown = json.loads(run(admin, "quarantine", "--json")[1])
    assert [one["fingerprint"] for one in shown["quarantined"]] == ["aaaa", "bbbb"]
    assert run(admin, "quarantine", "--clear", "cccc")[0] == 1
    code, text = run(admin, "quarantine", "--clear", "cccc", "--json")
    assert (code, json.loads(text)["message"]) == (1, "no refused request is named 'cccc'")
    code, text = run(admin, "quarantine", "--clear", "aaaa")
    assert code == 0
    assert "aaaa" not in text
    assert "bbbb" in text
    assert run(admin, "quarantine", "--clear", "all") == (0, "no request is refused")


def test_the_router_is_started_with_what_was_asked(tmp_path):
    class Model:
        name, path = "m", tmp_path

    def options(**values):
        command = router_command(ServeConfig.from_mapping(values), Model)
        return router_main.parse(command[4:])

    assert options().max_migrations == 2
    assert (options().migration, options(migration=False).migration) == (True, False)
    given = options(max_migrations=1, migration_wait_s=3, drain_grace_s=0, quarantine_deaths=0, quarantine_s=5)
    assert (given.max_migrations, given.migration_wait_s, given.drain_grace_s) == (1, 3.0, 0.0)
    assert (given.quarantine_deaths, given.quarantine_s) == (0, 5.0)
    assert (options().canary_idle_s, options(canary_idle_s=0).canary_idle_s) == (30.0, 0.0)
    for bad in (
        {"canary_idle_s": -1},
        {"quarantine_deaths": 1},
        {"max_migrations": 0},
        {"drain_grace_s": -1},
        {"migration_wait_s": "x"},
    ):
        with pytest.raises(ConfigInvalid):
            ServeConfig.from_mapping(bad)
    for flags in (
        ["--canary-idle-s", "-1"],
        ["--quarantine-deaths", "1"],
        ["--max-migrations", "-1"],
        ["--drain-grace-s", "inf"],
    ):
        with pytest.raises(SystemExit):
            router_main.parse(["--model-name", "m", "--model-path", str(tmp_path), *flags])
