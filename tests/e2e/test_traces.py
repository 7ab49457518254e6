"""One request's spans, from a router process and whole workers that append to one file."""

import json
import time

import grpc
import pytest

from baton.core.telemetry.telemetry import TelemetryConfig
from baton.proto import inference_pb2, inference_pb2_grpc
from baton.tests.e2e.test_metrics import Running, prompt_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CHUNK_LEN = 16  # of worker_config


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "spans.jsonl"
    deployment = Running("--trace-file", str(path), telemetry=TelemetryConfig(trace_file=str(path)))
    deployment.path = path
    yield deployment
    deployment.close()


def ask(address, traceparent=None, prompt=None, max_tokens=8, leave_after=None):
    """Chunks of one request whose client sends this header; it may leave after so many tokens."""
    request = inference_pb2.GenerateRequest(request_id="asked")
    request.token_ids.ids.extend(prompt or prompt_of(10))
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = max_tokens, 0.0, True
    metadata = () if traceparent is None else (("traceparent", traceparent),)
    with grpc.insecure_channel(address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60.0, metadata=metadata)
        if leave_after is None:
            return list(stream)
        chunks = []
        while sum(len(chunk.token_ids) for chunk in chunks) < leave_after:
            chunks.append(next(stream))
        stream.cancel()
        return chunks


def spans_of(path):
    """(service, span) of every span so far."""
    found = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            about = {item["key"]: item["value"]["stringValue"] for item in resource["resource"]["attributes"]}
            for scope in resource["scopeSpans"]:
                found += [(about["service.name"], span) for span in scope["spans"]]
    return found


def wait_for(path, holds, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not holds(found := spans_of(path)):
        assert time.monotonic() < deadline_s, [(service, span["name"]) for service, span in found]
        time.sleep(0.1)
    return found


def of_trace(path, trace_id, num_services=3):
    """Spans of one trace by name, once as many services have told theirs."""

    def holds(found):
        return len({service for service, span in found if span["traceId"] == trace_id}) == num_services

    return [(service, span) for service, span in wait_for(path, holds) if span["traceId"] == trace_id]


def attributes(span):
    return {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}


def test_a_request_is_one_tree_over_router_prefill_incoming_and_decode(traced):
    prompt = tuple(range(700, 740))
    chunks = ask(traced.address, f"00-{TRACE}-{PARENT}-01", prompt)
    found = of_trace(traced.path, TRACE)
    by_name = {span["name"]: span for _, span in found}
    services = {span["name"]: service for service, span in found}
    names = ["request", "router.queue", "attempt", "first_token.publish"]
    assert [services[name] for name in names] == ["baton-router"] * 4
    names = ["prefill", "prefill.queue", "grant.wait", "prefill.chunk", "prefill.mtp", "push.exposed"]
    assert [services[name] for name in names] == ["baton-prefill"] * 6
    names = ["decode", "incoming", "transfer.verification", "decode.admission", "decode.first_step", "decode.steps"]
    assert [services[name] for name in names] == ["baton-decode"] * 6
    assert len(by_name) == 16
    request = by_name["request"]
    assert request["parentSpanId"] == PARENT, "the client's span is the parent"
    assert by_name["attempt"]["parentSpanId"] == request["spanId"]
    for name in ("prefill", "decode"):
        assert by_name[name]["parentSpanId"] == by_name["attempt"]["spanId"]
    ids = [span["spanId"] for _, span in found]
    assert len(set(ids)) == len(ids)
    assert all(span["parentSpanId"] in {*ids, PARENT} for _, span in found)
    for _, span in found:
        start_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert int(request["startTimeUnixNano"]) - 1e6 <= start_ns <= end_ns
        assert abs(start_ns / 1e9 - time.time()) < 120
        assert "status" not in span
    lens = [int(attributes(span)["num_tokens"]) for _, span in found if span["name"] == "prefill.chunk"]
    assert lens == [CHUNK_LEN, CHUNK_LEN, len(prompt) - 2 * CHUNK_LEN]
    stats = chunks[-1].finish.stats
    assert int(attributes(by_name["decode.steps"])["num_emitted_tokens"]) == stats.num_decode_tokens
    assert int(attributes(by_name["incoming"])["bytes_landed"]) == stats.kv_bytes_pushed

    def lasted_ms(name):
        span = by_name[name]
        return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e6

    assert lasted_ms("prefill.mtp") == pytest.approx(stats.second.draft_ms, abs=0.01)
    assert lasted_ms("transfer.verification") == pytest.approx(stats.second.verification_ms, abs=0.01)
    assert lasted_ms("decode.first_step") == pytest.approx(stats.second.step_ms, abs=0.01)
    assert lasted_ms("grant.wait") == pytest.approx(stats.grant_wait_ms, abs=0.01)
    assert lasted_ms("first_token.publish") == pytest.approx(stats.publish_ms, abs=0.01)


def test_without_a_header_a_trace_begins_here_and_a_bad_one_is_ignored(traced):
    before = {span["traceId"] for _, span in spans_of(traced.path)}
    for header in (None, "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"):
        ask(traced.address, header, max_tokens=2)

    def new_requests(found):
        return [span for _, span in found if span["name"] == "request" and span["traceId"] not in before]

    requests = new_requests(wait_for(traced.path, lambda found: len(new_requests(found)) == 4))
    assert [span["parentSpanId"] for span in requests] == [""] * 4
    assert len({span["traceId"] for span in requests}) == 4


def test_a_client_that_samples_nothing_has_no_spans(traced):
    trace = "1" * 32
    ask(traced.address, f"00-{trace}-{PARENT}-00", max_tokens=2)
    ask(traced.address, f"00-{'2' * 32}-{PARENT}-01", max_tokens=2)
    of_trace(traced.path, "2" * 32)
    assert trace not in {span["traceId"] for _, span in spans_of(traced.path)}


def test_a_cancelled_request_says_so_at_every_process(traced):
    trace = "3" * 32
    ask(traced.address, f"00-{trace}-{PARENT}-01", max_tokens=400, leave_after=3)
    found = of_trace(traced.path, trace)
    errors = {span["name"]: span["status"]["message"] for _, span in found if "status" in span}
    assert errors["request"].startswith("RequestCancelled")
    assert errors["decode"] == "cancelled"
