"""What status shows of a worker's inventory: every field as JSON, and the table of decode steps."""

import json

import pytest

from baton.cluster.admin import as_data
from baton.cluster.commands.status import format_status
from baton.cluster.doctor.decode_report import decode_data, format_decode
from baton.proto import admin_pb2, worker_pb2
from baton.proto.wire import report_to_proto, waiting_to_proto
from baton.tests.router.test_worker_metrics import report

pytestmark = pytest.mark.fast


def reply_of(*, alive=True, **inventory):
    state = worker_pb2.WorkerState(worker_id="d0", role="decode", epoch=7, inventory=worker_pb2.Inventory(**inventory))
    return admin_pb2.StatusReply(model="m", workers=[admin_pb2.WorkerStatus(state=state, alive=alive)])


def test_every_field_of_an_inventory_is_json():
    graphs = worker_pb2.GraphCounts(num_captured=2, failed={"verify 4": "no memory"}, num_steps_eager={"grammar": 3})
    steps, waiting = report_to_proto(report()), waiting_to_proto({"slot": 2})
    data = json.loads(json.dumps(as_data(reply_of(graphs=graphs, steps=steps, waiting=waiting))))
    [worker] = data["workers"]
    held = worker["state"]["inventory"]
    assert held["graphs"]["num_steps_eager"] == {"grammar": 3}
    assert held["graphs"]["failed"] == {"verify 4": "no memory"}
    assert held["waiting"] == [{"reason": "slot", "num_requests": 2}]
    assert held["steps"]["kept"]["proposed_at"] == [8, 6]
    assert worker["state"]["epoch"] == "0000000000000007"


def test_decode_steps_are_shown_for_live_workers_only():
    steps = report_to_proto(report())
    [decode] = decode_data(reply_of(steps=steps))
    assert decode["acceptance_per_position"] == [0.75, 0.5]
    assert decode["tokens_per_step"] == 8.5
    assert decode["rows"]["late"] == {
        "num_rows": 2,
        "num_tokens": 3,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 1,
    }
    assert decode["step_ms"]["mean"] == pytest.approx(10.0)
    assert decode_data(reply_of(alive=False, steps=steps)) == []
    assert decode_data(reply_of()) == []


def test_the_table_has_a_line_for_each_worker_even_before_any_step():
    nothing = worker_pb2.StepCounts(
        **{
            name: worker_pb2.Distribution(bounds=[1.0], counts=[0, 0])
            for name in ("step_seconds", "host_gap_seconds", "step_tokens", "step_sequences")
        }
    )
    lines = format_decode(decode_data(reply_of(steps=nothing))).splitlines()
    assert lines[1].split() == ["d0", "0", "-", "-", "-", *("p50", "-", "p99", "-") * 2, "-"]
    line = format_decode(decode_data(reply_of(steps=report_to_proto(report())))).splitlines()[1]
    assert line.startswith("d0")
    assert "0.75 0.50" in line
    reply = reply_of(steps=report_to_proto(report()))
    data = as_data(reply) | {"address": "here", "decode": decode_data(reply)}
    assert line in format_status(data)
    assert "canary" not in format_status(data)
    reply.workers[0].alive = reply.workers[0].unfit = True
    reply.workers[0].unfit_reason = "late"
    text = format_status(as_data(reply) | {"address": "here", "decode": []})
    assert next(row.split()[2] for row in text.splitlines() if row.startswith("d0 ")) == "unfit"
    assert "d0 answers no canary, and is avoided while others do: late" in text


def test_status_says_that_prefill_workers_are_gone_only_where_there_were_some():
    reply = admin_pb2.StatusReply(model="m")
    reply.local_prefill.only_way = True
    reply.workers.add(alive=True).state.role = "decode"
    data = as_data(reply) | {"address": "here", "decode": []}
    assert "no prefill worker" not in format_status(data), "it was served with --prefill 0"
    reply.workers.add(alive=False).state.role = "prefill"
    assert "no prefill worker takes requests" in format_status(as_data(reply) | {"address": "here", "decode": []})
