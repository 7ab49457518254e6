"""Workers that are ended some seconds after their head has come back."""

import argparse
from types import SimpleNamespace

import pytest

from baton.core.errors import PreconditionUnmet, StepFailed
from baton.runbook import head_restart

pytestmark = pytest.mark.fast


class Site:
    """A deployment whose worker `prefill-0` begins another incarnation at a moment; its time is virtual.

    Args:
        silent: workers that the router does not hear.
    """

    def __init__(self, ended_s, silent=()):
        self.now_s, self.ended_s, self.silent, self.found = 0.0, ended_s, silent, {}

    def pause(self, seconds):
        self.now_s += seconds

    def status(self):
        epochs = {"prefill-0": 1 + (self.now_s >= self.ended_s), "decode-0": 1}
        return SimpleNamespace(
            workers=[
                SimpleNamespace(
                    alive=name not in self.silent,
                    state=SimpleNamespace(worker_id=name, epoch=epoch, role=name.partition("-")[0]),
                )
                for name, epoch in epochs.items()
            ]
        )


def run_of(site, *arguments):
    parser = argparse.ArgumentParser()
    head_restart._options(parser)
    run = head_restart._HeadRestart(site, parser.parse_args(["--command", "true", *arguments]))
    run._note_incarnations()
    return run


def test_a_worker_that_ends_within_the_minute_is_noticed_when_it_does():
    site = Site(ended_s=41.5)
    with pytest.raises(StepFailed, match="prefill-0 are in another incarnation"):
        run_of(site)._same_incarnations()
    assert site.now_s == 42


@pytest.mark.parametrize(("given", "watched_s"), [((), 60), (("--settle-s", "2.5"), 3), (("--settle-s", "0"), 0)])
def test_workers_are_watched_for_as_long_as_is_asked(given, watched_s):
    site = Site(ended_s=1e9)
    assert run_of(site, *given)._same_incarnations().startswith("all in the incarnations")
    assert site.now_s == watched_s


def test_a_head_that_took_the_only_prefill_worker_with_it_is_started_again():
    """Nothing but a head can start that worker again, so that its silence must not keep the head from being started."""
    site = Site(ended_s=0.0, silent={"prefill-0"})
    run = run_of(site, "--settle-s", "1")
    assert list(site.found["epochs"]) == ["decode-0"]
    site.silent = ()  # it comes back while the others are watched
    assert run._same_incarnations().startswith("all in the incarnations")


def test_without_a_decode_worker_there_is_nothing_to_keep():
    with pytest.raises(PreconditionUnmet, match="no decode worker"):
        run_of(Site(ended_s=1e9, silent={"decode-0"}))
