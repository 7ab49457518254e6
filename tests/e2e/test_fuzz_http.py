"""schemathesis over the whole HTTP API of a really served model: every reply is one that `/openapi.json` describes, no
5xx but a refusal for lack of room or workers, no process dies, nothing is held, and a good request has its tokens.

BATON_FUZZ_HTTP_S is how long it goes on; `make test-all` says 15 minutes.
"""

import collections
import json

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from baton.tests.e2e.fuzz_fleet import FuzzFleet, duration_s, rounds
from baton.tests.e2e.rpc_fuzz import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), QUIET]
SECONDS = duration_s("HTTP", 25.0)
NUM_EXAMPLES = 60  # in a round
CHECKS = [status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
LATE = (503, 504)  # what a server that is busy or alone may say
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 8, "temperature": 0},
    "/v1/completions": {"prompt": "def f(", "max_tokens": 8, "temperature": 0},
    "/tokenize": {"prompt": "def f("},
    "/detokenize": {"tokens": [300, 301]},
}
CHUNKS = {"/v1/chat/completions": "ChatCompletionChunk", "/v1/completions": "CompletionChunk"}
SEEN: collections.Counter[tuple[str, object]] = collections.Counter()


@pytest.fixture(scope="module")
def fleet():
    running = FuzzFleet(max_model_len=320)
    yield running
    running.close()
    for (path, status), num in sorted(SEEN.items(), key=str):
        print(f"{path}: {num} times {status}")


@st.composite
def cases(draw, operations):
    """A request that fits the document, or one that does not; or a good one with a few fields of either."""
    operation = draw(st.sampled_from(operations))
    mode = draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    if operation.body.is_empty if hasattr(operation.body, "is_empty") else not list(operation.body):
        mode = GenerationMode.POSITIVE  # there is nothing to be wrong
    case = draw(operation.as_strategy(generation_mode=mode))
    if operation.path in GOOD and isinstance(case.body, dict) and draw(st.integers(0, 3)):
        names = draw(st.lists(st.sampled_from(sorted(case.body)), max_size=3)) if case.body else []
        case.body = GOOD[operation.path] | {name: case.body[name] for name in names}
        if draw(st.booleans()) and operation.path in CHUNKS:
            case.body["stream"] = True
    return case, draw(st.sampled_from([0.02, 0.3, 10.0, 10.0, 10.0, 10.0]))


def check_events(document, path, text):
    """Server-sent events: each what the document says, and the last one the end."""
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]", text[-200:]
    schemas = {"components": document["components"]}
    for event in events[:-1]:
        data = json.loads(event.removeprefix("data: "))
        name = "Error" if "error" in data else CHUNKS[path]
        jsonschema.validate(data, schemas | {"$ref": f"#/components/schemas/{name}"})
        if name == "Error":
            SEEN[path, data["error"]["code"]] += 1
            assert data["error"]["code"] != "internal_error", data


def send(document, session, url, case, patience_s):
    path = case.operation.path
    try:
        # Not `case.call`, which reads only the beginning of a stream.
        response = session.request(**case.as_transport_kwargs(base_url=url), timeout=patience_s)
    except requests.RequestException as error:
        is_left = isinstance(error, requests.Timeout) or "Read timed out" in str(error)
        SEEN[path, "left" if is_left else type(error).__name__] += 1
        assert is_left or not isinstance(error, requests.ConnectionError), error  # others never left
        return
    status = response.status_code
    SEEN[path, status] += 1
    assert status < 500 or status in LATE, (case.as_curl_command(), response.text[:500])
    if response.headers["content-type"].startswith("text/event-stream"):
        check_events(document, path, response.text)
    else:
        case.validate_response(response, checks=CHECKS)


def test_every_path(fleet):
    load_all_checks()
    document = requests.get(f"{fleet.url}/openapi.json", timeout=30).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    busy = [one for one in operations if one.path in CHUNKS]
    with requests.Session() as session:
        for number in rounds(SECONDS, "http"):

            @seed(number)
            @settings(
                max_examples=NUM_EXAMPLES,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(cases(operations + 4 * busy))
            def each(drawn):
                send(document, session, fleet.url, *drawn)

            each()
            fleet.check()
