"""Rank 0 begins to watch its TP group."""

from types import SimpleNamespace

import pytest

from baton.core.errors import WorkerLost
from baton.worker.tp_group import watch_tp_group

pytestmark = pytest.mark.fast


class Channel:
    """Rank 0's channel; the other rank dies as soon as it has said that it is ready, if `dies`."""

    def __init__(self, *, dies):
        self.link = SimpleNamespace(failure=None, on_fail=None)
        self._dies = dies

    def start(self, timeout_s):
        assert timeout_s > 0
        if self._dies:
            self.link.failure = WorkerLost("rank 1 of 2 has died")  # the link tells this once, and to nobody


def test_a_rank_that_dies_before_anybody_is_told_of_deaths_is_lost_all_the_same():
    """Else an idle worker would report that it serves, until a request came."""
    with pytest.raises(WorkerLost, match="rank 1 of 2 has died"):
        watch_tp_group(Channel(dies=True), pytest.fail)


def test_a_rank_that_dies_later_ends_the_worker():
    channel, told = Channel(dies=False), []
    watch_tp_group(channel, told.append)
    channel.link.on_fail(WorkerLost("rank 1 of 2 has died"))
    assert [error.message for error in told] == ["rank 1 of 2 has died"]
    watch_tp_group(None, pytest.fail)
