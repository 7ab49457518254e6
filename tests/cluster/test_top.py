"""`baton top`: what it says of two looks at a deployment, and how it ends."""

import io
import json
import signal
import threading
from concurrent import futures

import grpc
import pytest
from rich.console import Console

from baton.cluster.commands import top as module
from baton.cluster.commands.top import samples, text_of, top, top_data, view
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import StartupError
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2

pytestmark = pytest.mark.fast


def worker(name, role, *, epoch=1, alive=True, free=75, **inventory):
    held = worker_pb2.Inventory(num_blocks=100, num_blocks_free=free, **inventory)
    state = worker_pb2.WorkerState(worker_id=name, role=role, epoch=epoch, inventory=held)
    if role == "decode":
        state.kv_address = "tcp://d"
        state.speculation.num_draft_tokens = 2
    return admin_pb2.WorkerStatus(state=state, alive=alive, heartbeat_age_s=0.1 if alive else 7.0, num_epochs=epoch)


def reply(*workers, tokens=0, finished=0, **more):
    values = {"model": "tiny", "version": "1", "uptime_s": 5.0, "num_requests_running": 3} | more
    return admin_pb2.StatusReply(num_tokens_streamed=tokens, num_requests_finished=finished, workers=workers, **values)


def test_rates_are_of_what_happened_in_between():
    waiting = [worker_pb2.Waiting(reason="slot", num_requests=2), worker_pb2.Waiting(reason="blocks")]
    decoded = {"num_draft_tokens": 100, "num_accepted_tokens": 50, "num_emitted_tokens": 200}
    later = {"num_draft_tokens": 140, "num_accepted_tokens": 80, "num_emitted_tokens": 300, "waiting": waiting}
    before = reply(worker("d", "decode", **decoded), worker("p", "prefill", kv_bytes=0), tokens=1000, finished=3)
    now = reply(worker("d", "decode", **later), worker("p", "prefill", kv_bytes=4_000_000), tokens=1500, finished=7)
    data = top_data(before, now, 2.0)
    assert data["tokens_per_s"] == 250.0
    assert data["requests"]["finished_per_s"] == 2.0
    assert data["requests"]["waiting"] == 2
    decode, prefill = data["workers"]
    assert (decode["tokens_per_s"], prefill["tokens_per_s"]) == (50.0, None)
    assert decode["acceptance"] == pytest.approx(30 / 40)
    assert decode["waiting"] == {"slot": 2}
    assert decode["kv_use"] == pytest.approx(0.25)
    assert (decode["num_draft_tokens"], prefill["num_draft_tokens"]) == (2, None)
    assert prefill["kv_bytes_per_s"] == 2e6
    assert json.loads(json.dumps(data)) == data


def test_a_new_life_and_a_new_worker_have_no_rates_and_a_life_without_drafts_no_acceptance():
    before = reply(worker("d", "decode", num_emitted_tokens=500), tokens=9)
    now = reply(worker("d", "decode", epoch=2, num_emitted_tokens=10), worker("e", "decode"), tokens=4)
    data = top_data(before, now, 1.0)
    assert [each["tokens_per_s"] for each in data["workers"]] == [None, None]
    assert [each["acceptance"] for each in data["workers"]] == [None, None]
    assert data["tokens_per_s"] is None, "the router began anew"


def test_without_drafts_in_between_acceptance_is_of_the_whole_life():
    same = reply(worker("d", "decode", num_draft_tokens=10, num_accepted_tokens=4))
    assert top_data(same, same, 1.0)["workers"][0]["acceptance"] == pytest.approx(0.4)
    assert top_data(same, same, 0.0)["tokens_per_s"] is None


def drawn(data, width=150):
    stream = io.StringIO()
    Console(file=stream, width=width).print(view(data, width))
    return stream.getvalue()


def test_a_busy_deployment_fits_into_80_columns_and_what_is_nowhere_takes_none():
    done = {"num_draft_tokens": 90_000, "num_accepted_tokens": 81_000, "num_emitted_tokens": 20_000}
    many = {"num_requests_running": 256, "num_requests_finished": 200, "free": 1}
    waiting = [worker_pb2.Waiting(reason="blocks", num_requests=12)]
    workers = [
        worker("prefill-0", "prefill", kv_bytes=9_000_000_000, **many),
        worker("decode-0", "decode", **many, **done),
    ]
    workers[1].state.inventory.waiting.extend(waiting)
    before = reply(worker("prefill-0", "prefill"), worker("decode-0", "decode"))
    data = top_data(before, reply(*workers), 1.0) | {"address": "127.0.0.1:50051"}
    lines = drawn(data, width=80).splitlines()
    [header] = [line for line in lines if line.startswith("worker ")]
    shown = "worker role alive running waiting KV tok/s req/s KV MB/s accepted k"
    assert header.split() == shown.split()
    [row] = [line for line in lines if line.startswith("decode-0")]
    assert row.split() == "decode-0 decode yes 256 blocks:12 99% 20000.0 200.0 0.0 90% 2".split()
    [row] = [line for line in lines if line.startswith("prefill-0")]
    assert row.split() == "prefill-0 prefill yes 256 - 99% - 200.0 9000.0 - -".split()
    workers[0].state.inventory.num_blocks_quarantined = 3
    data = top_data(before, reply(*workers), 1.0) | {"address": "127.0.0.1:50051"}
    assert "quarantined" in drawn(data)


@pytest.mark.parametrize("width", [80, 60, 40, 20])
def test_a_narrow_terminal_gets_fewer_columns_and_every_name_whole(width):
    many = {"num_requests_running": 256, "num_requests_finished": 200, "kv_bytes": 9_000_000_000}
    workers = [worker(name, name[:-3], **many) for name in ("prefill-10", "decode-127")]
    data = top_data(reply(*workers), reply(*workers), 1.0) | {"address": "here:1"}
    text = drawn(data, width)
    assert {"prefill-10", "decode-127", "alive"} <= set(text.split())
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_both_views_show_every_worker_path_and_problem():
    path = worker_pb2.KvPath(kv_address="tcp://d", data_path="shm", gbps=3.25)
    transfer = worker_pb2.TransferCounts(paths=[path])
    refused = [admin_pb2.RefusedPair(prefill_worker="p", decode_worker="x", reason="layout")]
    now = reply(
        worker("p", "prefill", transfer=transfer),
        worker("d", "decode", num_blocks_quarantined=4),
        worker("gone", "decode", alive=False),
        worker("stuck", "decode"),
        refused_pairs=refused,
    )
    now.workers[3].unfit = True
    data = top_data(now, now, 1.0) | {"address": "here:1"}
    for text in (drawn(data), text_of(data)):
        assert "p to d: shm, 3.25 GB/s" in text
        assert "NO, 7 s" in text
        assert [line.split()[2] for line in text.splitlines() if line.startswith("stuck")] == ["unfit"]
        assert "25%" in text
        assert "tiny at here:1" in text
        assert "p and x are not paired: layout" in text
    assert "no answer: gone away" in drawn(data | {"problem": "gone away"})


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self):
        self.replies, self.asked = [], 0

    def Status(self, request, context):
        self.asked += 1
        return self.replies[min(self.asked, len(self.replies)) - 1]


@pytest.fixture
def admin():
    servicer = Admin()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


def test_once_prints_one_object_or_one_text(admin, capsys):
    admin.replies = [reply(worker("d", "decode"), tokens=0), reply(worker("d", "decode"), tokens=50)]
    assert top(admin.address, Output(True), interval_s=0.1) is ExitCode.OK
    data = json.loads(capsys.readouterr().out)
    assert 0 < data["tokens_per_s"] <= 500
    assert data["interval_s"] >= 0.1
    assert top(admin.address, Output(False), interval_s=0.1, once=True) is ExitCode.OK
    assert capsys.readouterr().out.startswith("tiny at")


def test_a_dumb_terminal_gets_one_text(admin, capsys, monkeypatch):
    admin.replies = [reply(worker("d", "decode"))]
    monkeypatch.setattr(Output, "is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")
    assert top(admin.address, Output(False), interval_s=0.1) is ExitCode.OK
    assert capsys.readouterr().out.startswith("tiny at")


def test_a_worker_that_is_lost_makes_it_partial(admin, capsys):
    admin.replies = [reply(worker("d", "decode", alive=False))]
    assert top(admin.address, Output(True), interval_s=0.1) is ExitCode.PARTIAL


def test_watching_goes_on_while_nobody_answers(monkeypatch):
    answers = iter([reply(tokens=10), StartupError("nobody there"), reply(tokens=40)])

    def fetch(address):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "fetch_status", fetch)
    found = samples("here:1", reply(), 0.01, threading.Event())
    first, second, third, fourth = (next(found) for _ in range(4))
    assert first["tokens_per_s"] is None
    assert second["tokens_per_s"] > 0
    assert (third["problem"], third["tokens_per_s"]) == ("nobody there", second["tokens_per_s"])
    assert "problem" not in fourth
    assert fourth["interval_s"] >= 0.02, "rates are of the time since the last answer"


def test_ctrl_c_ends_the_live_view_well(monkeypatch):
    shown = []

    def looks(address, before, interval_s, stop):
        yield top_data(before, before, 0.0) | {"address": address}
        shown.append(address)
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(10.0)

    monkeypatch.setattr(module, "samples", looks)
    monkeypatch.setattr(module, "fetch_status", lambda address: reply())
    monkeypatch.setattr(Output, "is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")
    assert top("here:1", Output(False)) is ExitCode.OK
    assert shown == ["here:1"]


def test_notes_are_lines_of_json_where_the_environment_asks_for_it(monkeypatch, capsys):
    monkeypatch.setenv("BATON_LOG_FORMAT", "json")
    output = Output(False)
    output.fail(StartupError("nobody there"))
    output.note("two\nlines")
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (first["level"], first["role"]) == ("ERROR", "cli")
    assert "nobody there" in first["message"]
    assert (second["level"], second["message"]) == ("INFO", "two\nlines")
