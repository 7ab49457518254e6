"""What is collected when something is not there: no deployment."""

import argparse
import tarfile

import pytest

from baton.core.clock import MonotonicClock
from baton.runbook import collect_diagnostics
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Run

pytestmark = pytest.mark.fast


@pytest.fixture
def collect(monkeypatch):
    """Runs it without a router, and returns its report."""
    monkeypatch.setattr(collect_diagnostics.Collection, "_doctor", lambda self: {})

    def run(*arguments, dry=False):
        parser = argparse.ArgumentParser()
        collect_diagnostics.RUNBOOK.options(parser)
        site = Site("127.0.0.1:1", MonotonicClock(), 5.0)
        steps = collect_diagnostics.RUNBOOK.steps(site, parser.parse_args(["--offline", *arguments]))
        return Run(MonotonicClock(), dry=dry, found=site.found).carry_out(steps)

    return run


def test_a_directory_of_logs_that_is_not_there_is_missing_and_the_rest_is_collected(collect, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("all is well\n")
    report = collect("--into", str(tmp_path), "--logs", str(tmp_path / "nowhere"), "--logs", str(tmp_path / "logs"))
    assert report.exit_code == 4
    assert report.error.fields["missing"] == {"logs-0": f"{tmp_path / 'nowhere'} is no directory"}
    with tarfile.open(report.found["archive"]) as archive:
        assert "baton-diagnostics/logs-1/a.log" in archive.getnames()


@pytest.mark.parametrize("into", ["/proc", "/nonexistent", __file__])
def test_where_no_archive_can_be_written_is_told_before_anything_is_collected(collect, into):
    for dry in (True, False):
        report = collect("--into", into, dry=dry)
        assert report.exit_code == 3
        assert [taken.name for taken in report.taken] == ["the archive can be written"]
        assert report.next == "give another --into"


def test_to_look_whether_it_can_be_written_leaves_nothing(collect, tmp_path):
    assert collect("--into", str(tmp_path), dry=True).exit_code == 0
    assert not list(tmp_path.iterdir())
