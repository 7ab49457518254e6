"""When a worker may be replaced, and what others see of it meanwhile: no deployment, only its messages."""

import argparse

import pytest

from baton.core.clock import MonotonicClock
from baton.proto import admin_pb2, worker_pb2
from baton.runbook import rolling_upgrade
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.replace import add_options, replace_steps
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Run

pytestmark = pytest.mark.fast


class Few(Site):
    """A deployment of idle workers that are drained and ended as asked.

    Attributes:
        ended: whose process was ended.
        local_prefill: whether decode workers compute prompts.
        on_drain: called when a worker has been taken out of routing.
    """

    def __init__(self, *names):
        super().__init__("nowhere", MonotonicClock(), 5.0)
        self.ended = []
        self.on_drain = lambda: None
        self.local_prefill = "never"
        self._workers = {name: self._begin(name) for name in names}

    def _begin(self, name, epoch=1, build="old"):
        role = name.partition("-")[0]
        state = worker_pb2.WorkerState(
            worker_id=name, role=role, epoch=epoch, build=build, can_prefill=role == "decode"
        )
        return admin_pb2.WorkerStatus(state=state, alive=True)

    def status(self):
        mode = admin_pb2.LocalPrefill(mode=self.local_prefill)
        return admin_pb2.StatusReply(workers=self._workers.values(), local_prefill=mode)

    def inventory(self):
        return self._workers

    def drain(self, worker_id, *, grace_s=None, undo=False):
        self._workers[worker_id].draining = not undo
        if not undo:
            self.on_drain()
        return "as asked"

    def end(self, address, worker_id, epoch):
        self.ended.append(worker_id)
        self._workers[worker_id] = self._begin(worker_id, epoch + 1, "new")
        return admin_pb2.RestartReply(ending=True)

    @property
    def away(self):
        return {name for name, worker in self._workers.items() if worker.draining}


@pytest.fixture
def site_of(monkeypatch):
    """A site of these workers, whose canaries are answered."""
    monkeypatch.setattr(CanaryRuns, "round", lambda self: [None])
    monkeypatch.setattr(CanaryRuns, "reach", lambda self, names: "as expected")

    def make(*names):
        site = Few(*names)
        monkeypatch.setattr(workers.operate, "restart", site.end)
        return site

    return make


def replace(site, *arguments, role="decode"):
    parser = argparse.ArgumentParser()
    add_options(parser)
    steps = replace_steps(site, parser.parse_args(["--worker", f"{role}-0", *arguments]), role)
    return Run(MonotonicClock(), dry=False).carry_out(steps)


def upgrade(site, *arguments):
    parser = argparse.ArgumentParser()
    rolling_upgrade.RUNBOOK.options(parser)
    steps = rolling_upgrade.RUNBOOK.steps(site, parser.parse_args(["--build", "new", *arguments]))
    return Run(MonotonicClock(), dry=False).carry_out(steps)


def test_a_worker_is_replaced_while_another_serves(site_of):
    site = site_of("decode-0", "decode-1")
    assert replace(site).exit_code == 0
    assert (site.ended, site.away) == (["decode-0"], set())


def test_the_later_of_two_that_take_out_the_last_two_is_undone(site_of):
    site = site_of("decode-0", "decode-1")
    site.on_drain = lambda: setattr(site.inventory()["decode-1"], "draining", True)
    report = replace(site)
    assert (report.exit_code, report.is_changed) == (3, False)
    assert "no other decode worker takes requests" in report.error.message
    assert (site.ended, site.away) == ([], {"decode-1"}), "the other runbook's"
    assert "run this again" in report.next


def test_by_force_the_last_one_is_replaced(site_of):
    site = site_of("decode-0")
    assert replace(site).exit_code == 3
    assert not site.ended
    assert replace(site, "--force").exit_code == 0
    assert (site.ended, site.away) == (["decode-0"], set())


def test_the_only_prefill_worker_is_upgraded_where_decode_workers_compute_prompts_meanwhile(site_of):
    site = site_of("prefill-0", "decode-0", "decode-1")
    report = upgrade(site)
    assert (report.exit_code, site.ended) == (3, []), "no decode worker does"
    site.local_prefill = "auto"
    report = upgrade(site)
    assert report.exit_code == 0
    assert sorted(site.ended) == ["decode-0", "decode-1", "prefill-0"]
    assert "prefill: none; decode-0, decode-1 compute the prompts" in [taken.detail for taken in report.taken]


@pytest.mark.parametrize(
    ("role", "meanwhile"),
    [
        ("decode", "requests are refused meanwhile"),
        ("prefill", "decode workers compute the prompts meanwhile (refused only with `--local-prefill never`)"),
    ],
)
def test_an_operator_is_told_what_force_costs(site_of, role, meanwhile):
    site = site_of("prefill-0", "decode-0")
    report = replace(site, role=role)
    assert (report.exit_code, site.ended) == (3, [])
    assert report.next == f"undrain another worker of the role, or give --force: {meanwhile}"


def test_what_an_upgrade_advises_helps(site_of):
    site = site_of("prefill-0", "decode-0")
    report = upgrade(site)
    assert (report.exit_code, site.ended) == (3, [])
    assert "--force" in report.next
    assert upgrade(site, "--force").exit_code == 0
    assert sorted(site.ended) == ["decode-0", "prefill-0"]


def test_an_upgrade_looks_again_too(site_of):
    site = site_of("prefill-0", "prefill-1", "decode-0", "decode-1")
    site.on_drain = lambda: setattr(site.inventory()["decode-1"], "draining", True)
    report = upgrade(site)
    assert (report.exit_code, site.ended, site.away) == (4, [], {"decode-1"})
    assert "no other decode worker takes requests" in report.error.message


def test_an_upgrade_that_is_interrupted_puts_its_worker_back_and_says_which(site_of):
    site = site_of("prefill-0", "prefill-1", "decode-0", "decode-1")

    def interrupt():
        raise KeyboardInterrupt

    site.on_drain = interrupt
    report = upgrade(site)
    assert (report.exit_code, site.ended, site.away) == (4, [], set())
    assert report.error.message == "decode-0: take decode-0 out of routing: interrupted"
