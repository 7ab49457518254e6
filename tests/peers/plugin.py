"""Holds the outcome of vLLM's tests against accepted.json: {test: reason}, where a name may end in `*`."""

import fnmatch
import importlib
import json
import os
from pathlib import Path

import peers_stand_ins  # noqa: F401 # before any test module is imported
import pytest

from baton.bench.result import result

TOOL_CONFIG = "hermes"  # the one of vLLM's configurations of servers whose form of tool calls is ours

ACCEPTED = json.loads((Path(__file__).parent / "accepted.json").read_text())
_outcomes = {}


def pytest_configure(config):
    # Flags of tool_use/conftest.py, which pytest loads too late to read them from the command line.
    config.option.models, config.option.extended = [TOOL_CONFIG], False


def pytest_collection_modifyitems(config, items):
    """Leaves out what asks no server, but checks vLLM's own classes, and repetitions for servers of other forms."""
    kept, left = [], []
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        is_repeated = parameters.get("server_config", TOOL_CONFIG) != TOOL_CONFIG
        asks = any("server" in name or "client" in name for name in item.fixturenames)
        (kept if asks and not is_repeated else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Starts the server before the first test, since a test's timeout would count the start."""
    if session.items and not session.config.option.collectonly:
        importlib.import_module("tests.utils").url()


def pytest_runtest_logreport(report):
    name = report.nodeid.removeprefix("tests/")
    if report.failed:
        _outcomes[name] = "failed"
    elif report.when == "call" or report.skipped:
        _outcomes.setdefault(name, report.outcome)


def pytest_collectreport(report):
    if report.failed:
        _outcomes[report.nodeid.removeprefix("tests/")] = "failed"


def reason(name):
    """Why it may fail; None if it may not."""
    return next(
        (why for pattern, why in ACCEPTED.items() if fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))), None
    )


def pytest_sessionfinish(session, exitstatus):
    failed = {name for name, outcome in _outcomes.items() if outcome == "failed"}
    unexpected = sorted(name for name in failed if reason(name) is None)
    passed = {name for name, outcome in _outcomes.items() if outcome == "passed"}
    stale = sorted(name for name in passed if name in ACCEPTED)
    print(f"\npeers: {len(passed)} passed, {len(failed)} failed, {len(unexpected)} of them not accepted")
    for name in unexpected:
        print(f"not accepted: {name}")
    for name in stale:
        print(f"accepted, and passes: {name}")
    if "BATON_PEERS_OUT" in os.environ:
        about = {"num_passed": len(passed), "num_failed": len(failed), "num_not_accepted": len(unexpected)}
        rows = [
            {"test": name, "outcome": outcome} | ({"reason": reason(name)} if name in failed else {})
            for name, outcome in sorted(_outcomes.items())
        ]
        Path(os.environ["BATON_PEERS_OUT"]).write_text(json.dumps(result("peers", rows, **about), indent=1) + "\n")
    session.exitstatus = 1 if unexpected or stale else 0
