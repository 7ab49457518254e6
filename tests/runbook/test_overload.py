"""The limit of requests is set and taken back: no deployment, only its messages."""

import argparse

import pytest

from baton.core.clock import MonotonicClock
from baton.proto import admin_pb2
from baton.runbook import overload
from baton.runbook.common.command import count
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Run

pytestmark = pytest.mark.fast


class Idle(Site):
    """A router without requests that was started with a limit, or 0 for none."""

    def __init__(self, started_with):
        super().__init__("nowhere", MonotonicClock(), 5.0)
        self.limit = self._default = started_with

    def status(self):
        return admin_pb2.StatusReply(max_queue_len=self.limit)

    def set_admission(self, address, limit):
        previous, self.limit = self.limit, limit or self._default
        return admin_pb2.SetAdmissionReply(max_queue_len=self.limit, previous=previous)


@pytest.fixture
def limit(monkeypatch):
    """Runs it, and returns its report."""

    def run(site, value, *arguments):
        monkeypatch.setattr(overload.operate, "set_admission", site.set_admission)
        monkeypatch.setattr(overload, "ask", lambda site, prompt: None)
        parser = argparse.ArgumentParser()
        overload.RUNBOOK.options(parser)
        steps = overload.RUNBOOK.steps(site, parser.parse_args(["--limit", str(value), *arguments]))
        return Run(MonotonicClock(), dry=False, found=site.found).carry_out(steps)

    return run


@pytest.mark.parametrize("none", ["none", None])
def test_there_is_a_way_back_to_no_limit(limit, none):
    site = Idle(0)
    report = limit(site, 3, "--force")
    assert (report.exit_code, site.limit) == (0, 3)
    report = limit(site, none or report.found["before"]["limit"])
    assert (report.exit_code, site.limit, report.is_changed) == (0, 0, True)
    assert not limit(site, "none").is_changed


def test_a_limit_that_the_router_was_started_with_cannot_be_taken_away(limit):
    site = Idle(256)
    assert limit(site, 300).exit_code == 0
    report = limit(site, "none")
    assert (report.exit_code, site.limit, report.is_changed) == (1, 300, False)
    assert "started with a limit of 256" in report.error.message


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_what_is_no_number_is_refused_in_plain_words(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole number of at least 1"):
        count(text)
