"""From spans to a file or a collector: what arrives, what is lost, what is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import ConfigInvalid
from baton.core.telemetry import telemetry as telemetry_module
from baton.core.telemetry.span import SERVER, SpanBatch, new_trace
from baton.core.telemetry.telemetry import SpanQueue, Telemetry, TelemetryConfig

pytestmark = pytest.mark.fast


class Kept:
    """A writer that keeps, or refuses."""

    def __init__(self, takes=True):
        self.takes, self.spans, self.closed = takes, [], False

    def write(self, spans):
        self.spans += spans
        return self.takes

    def close(self):
        self.closed = True


def send(tracer, num=1, **attributes):
    root = new_trace()

    def make(batch):
        batch.add(root, "request", 1.0, 3.5, kind=SERVER, attributes=attributes)
        batch.child(root, "part", 1.0, 2.0)
        batch.child(root, "never", 0.0, 2.0)
        batch.child(root, "never", 1.0, 0.0)

    for _ in range(num):
        tracer.put(make)
    return root


def test_spans_are_written_with_the_systems_time_and_closing_writes_the_rest():
    writer = Kept()
    queue = SpanQueue(writer, VirtualClock(10.0), unix_ns=lambda: 110 * 10**9)
    root = send(queue, at=1)
    queue.close()
    queue.close()
    request, part = writer.spans
    assert (request.name, request.start_ns, request.end_ns) == ("request", 101 * 10**9, 103_500_000_000)
    assert (part.context.parent_id, part.context.trace_id) == (root.span_id, root.trace_id)
    assert part.context.span_id != root.span_id
    assert writer.closed
    assert queue.num_dropped == 0


def test_an_end_before_the_begin_is_none():
    batch = SpanBatch(0)
    batch.add(new_trace(), "request", 2.0, 1.0)
    assert batch.spans[0].start_ns == batch.spans[0].end_ns


def test_a_full_queue_and_a_writer_that_refuses_lose_traces_and_say_so(monkeypatch, caplog):
    monkeypatch.setattr(telemetry_module, "MAX_REQUESTS", 10)
    writer = Kept(takes=False)
    queue = SpanQueue(writer, VirtualClock())
    send(queue, 14)
    assert queue.num_dropped == 4
    queue.close()
    assert queue.num_dropped == 14
    assert [record.message for record in caplog.records] == ["spans are lost: the queue is full"]


def test_without_a_destination_there_is_no_thread_and_no_tracer():
    num = threading.active_count()
    telemetry = Telemetry(TelemetryConfig(), "router", VirtualClock())
    assert telemetry.tracer is None
    assert threading.active_count() == num
    telemetry.close()


def test_a_file_holds_otlp_as_lines_of_json(tmp_path):
    path = tmp_path / "spans.jsonl"
    for worker in ("a", "b"):
        telemetry = Telemetry(
            TelemetryConfig(trace_file=str(path)), "prefill", VirtualClock(5.0), {"worker_id": worker}
        )
        send(telemetry.tracer, flag=True, number=7, share=0.5, text='a "b"\n')
        telemetry.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    [resource] = lines[1]["resourceSpans"]
    about = {item["key"]: item["value"] for item in resource["resource"]["attributes"]}
    assert about["service.name"] == {"stringValue": "baton-prefill"}
    assert about["worker_id"] == {"stringValue": "b"}
    request, part = resource["scopeSpans"][0]["spans"]
    assert {item["key"]: item["value"] for item in request["attributes"]} == {
        "flag": {"boolValue": True},
        "number": {"intValue": "7"},
        "share": {"doubleValue": 0.5},
        "text": {"stringValue": 'a "b"\n'},
    }
    assert int(request["endTimeUnixNano"]) - int(request["startTimeUnixNano"]) == 2_500_000_000
    assert part["parentSpanId"] == request["spanId"]


class Collector(HTTPServer):
    """Takes what is posted."""

    def __init__(self, status=200):
        self.posted, self.status = [], status
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Content-Type"], body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.long
def test_a_collector_gets_the_same_over_http(monkeypatch):
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    collector = Collector()
    config = TelemetryConfig(trace_endpoint=f"http://127.0.0.1:{collector.server_port}")
    telemetry = Telemetry(config, "decode", VirtualClock(5.0), {"worker_id": "decode-0"})
    root = send(telemetry.tracer, number=7)
    telemetry.close()
    collector.shutdown()
    collector.server_close()
    [(path, kind, body)] = collector.posted
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    request = service.ExportTraceServiceRequest.FromString(body)
    about = {item.key: item.value.string_value for item in request.resource_spans[0].resource.attributes}
    assert (about["service.name"], about["worker_id"]) == ("baton-decode", "decode-0")
    first, part = request.resource_spans[0].scope_spans[0].spans
    assert (first.name, first.trace_id.hex(), first.span_id.hex()) == ("request", root.trace_id, root.span_id)
    assert part.parent_span_id == first.span_id
    assert first.attributes[0].value.int_value == 7
    assert telemetry.num_dropped == 0


@pytest.mark.long
def test_a_collector_that_refuses_costs_spans_and_nothing_else():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector(status=400)
    config = TelemetryConfig(trace_endpoint=f"http://127.0.0.1:{collector.server_port}/other")
    telemetry = Telemetry(config, "decode", VirtualClock(5.0))
    send(telemetry.tracer)
    telemetry.close()
    collector.shutdown()
    collector.server_close()
    assert collector.posted[0][0] == "/other"
    assert telemetry.num_dropped == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"trace_file": "/proc/none/x"}, "cannot write"),
        ({"trace_endpoint": "localhost:4318"}, "no http://"),
        ({"trace_endpoint": "http://x", "trace_file": "y"}, "one place"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_at_the_start(config, words):
    with pytest.raises(ConfigInvalid, match=words):
        Telemetry(TelemetryConfig(**config), "router", VirtualClock())
