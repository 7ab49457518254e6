"""The line that counts what was refused or failed."""

import logging

import pytest

from baton.router.admission.admission import ShedReport
from baton.router.inference import log_request
from baton.router.metrics import RouterMetrics

pytestmark = pytest.mark.fast


def test_what_is_new_is_counted_by_kind_and_clients_mistakes_are_not():
    metrics = RouterMetrics()
    report = ShedReport(metrics)
    assert report.line() == ""
    metrics.requests_failed.labels("Overloaded").inc(88)
    metrics.requests_failed.labels("WorkerLost").inc()
    for kind in ("InvalidRequest", "PromptTooLong", "InvalidGrammar", "RequestCancelled", "Unauthenticated"):
        metrics.requests_failed.labels(kind).inc(5)
    assert report.line() == "89 requests were refused or failed in the last 10 s: Overloaded 88, WorkerLost 1"
    assert report.line() == ""
    metrics.requests_failed.labels("Overloaded").inc(2)
    assert report.line() == "2 requests were refused or failed in the last 10 s: Overloaded 2"


def test_a_request_is_one_line_whatever_its_id_holds(caplog):
    caplog.set_level(logging.INFO)
    log_request("a\nb\x1b[2J", "team", "3 prompt tokens, 4 output tokens, 5.0 ms", None)
    log_request("c", "", "3 prompt tokens, 0 output tokens, 5.0 ms", ValueError("secret"))
    assert [record.getMessage() for record in caplog.records] == [
        r"request 'a\nb\x1b[2J' of 'team': ok, 3 prompt tokens, 4 output tokens, 5.0 ms",
        "request 'c': ValueError, 3 prompt tokens, 0 output tokens, 5.0 ms",
    ]


def test_what_clients_do_wrong_is_not_counted_as_failed():
    metrics = RouterMetrics()
    kinds = {
        "PromptTooLong": 3,
        "Unauthenticated": 2,
        "RequestCancelled": 4,
        "Overloaded": 5,
        "WorkerLost": 1,
        "InternalError": 6,
    }
    for kind, num in kinds.items():
        metrics.requests_failed.labels(kind).inc(num)
    assert metrics.ended_with_errors() == (5 + 1 + 6, 3 + 2 + 4)
