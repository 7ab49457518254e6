"""Rank 0's side of a TP group's hand-off, over pushes and a channel that the test plays."""

from types import SimpleNamespace

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.sender.service import DecodePeer, Granted, PushDrained
from baton.prefill_worker.tp_group import Abort, Adopt, TPGroupPush
from baton.tests.prefill_worker.pushes import Pushes

pytestmark = pytest.mark.fast
KEY = AttemptKey("a", 1)


class Channel:
    """To one other rank: what it was told, and what it has to say."""

    def __init__(self):
        self.told, self.said = [], []
        self.tell = self.told.append
        self.communicator = SimpleNamespace(size=2)
        self.link = SimpleNamespace(reports=self._reports)

    def _reports(self):
        said, self.said = self.said, []
        return said


def reserved():
    """A transfer that asks for room: the group's pushes, rank 0's own, and the channel."""
    own, channel = Pushes(), Channel()
    push = TPGroupPush(own, channel)
    table = SimpleNamespace(capacity_len=8)
    push.reserve(KEY, DecodePeer("d0", "d0:1", 1), table, prompt_len=5, capacity_len=8, wait_s=1.0)
    return push, own, channel


@pytest.mark.parametrize("crosses", [True, False], ids=["grant crosses the abort", "abort after the grant"])
def test_an_abort_comes_to_every_rank_that_was_told_of_the_grant(crosses):
    push, own, channel = reserved()
    own.grant(KEY)
    if crosses:
        push.abort(KEY, "cancelled")
        assert not channel.told, "no rank knows of it yet"
    assert push.poll() == [Granted(KEY, None)]
    if not crosses:
        push.abort(KEY, "cancelled")
    assert [type(plan) for plan in channel.told] == [Adopt, Abort]
    assert channel.told[-1] == Abort(KEY, "cancelled")
    own.drain(KEY)
    assert push.poll() == [], "another rank reads the blocks"
    channel.said.append((1, PushDrained(KEY)))
    assert push.poll() == [PushDrained(KEY)]


def test_an_abort_without_a_grant_is_rank_0s_alone():
    push, own, channel = reserved()
    push.abort(KEY, "cancelled")
    own.drain(KEY)
    assert push.poll() == [PushDrained(KEY)]
    assert not channel.told
