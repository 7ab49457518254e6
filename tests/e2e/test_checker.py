"""The checker of faults finds what it is for: each invariant, broken on purpose."""

import pytest

from baton.core.errors import BatonError, Overloaded, ProtocolError, WorkerLost
from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.checker import DEADLINE_S, LATE_S, Ask, Checker, Delivery

pytestmark = pytest.mark.fast
WANT = [5, 6, 7, 8]
ASK = Ask((1, 2, 3), SamplingParams(max_tokens=4))


class KnownReplay:
    def learn(self, asks):
        assert set(asks) <= {ASK}

    def tokens(self, ask):
        return WANT


class Stats:
    output_len = 4


def delivery(*events, reason="length", error=None, **changes):
    events = [(float(at), index, tuple(token_ids)) for at, (index, token_ids) in enumerate(events)]
    stats = Stats() if reason else None
    values = {"events": events, "reason": reason, "error": error, "stats": stats, "started_s": 1.0, "ended_s": 9.0}
    return Delivery("r", ASK, **(values | changes))


WHOLE = ((0, [5]), (1, [6, 7]), (3, [8]))


def check(one):
    Checker(KnownReplay()).check([one])


def test_what_is_right_passes():
    check(delivery(*WHOLE))
    check(delivery(*WHOLE[:2], reason="", error=WorkerLost("gone"), allowed=(WorkerLost,)))
    check(delivery(reason="", error=Overloaded("full"), allowed=(Overloaded, WorkerLost), must_fail=True))


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("I1", delivery((0, [5]), (1, [6, 9]), (3, [8]))),
        ("I1", delivery((0, [5]), (1, [6]))),
        ("I1", delivery((0, [5]), (1, [9]), reason="", error=WorkerLost("gone"), allowed=(WorkerLost,))),
        ("I2", delivery((0, [5]), (2, [7, 8]))),
        ("I2", delivery((0, [5]), (0, [5]), (1, [6, 7, 8]))),
        ("I4", delivery(*WHOLE, ended_s=0.0)),
        ("I4", delivery(*WHOLE, ended_s=2.0 + DEADLINE_S + LATE_S)),
        ("I6", delivery(*WHOLE[:2], reason="", error=WorkerLost("gone"))),
        ("I6", delivery(*WHOLE[:2], reason="", error=WorkerLost("gone"), allowed=(Overloaded,))),
        ("I6", delivery(*WHOLE[:2], reason="", error=BatonError("?"), allowed=(BatonError,))),
        ("I6", delivery(*WHOLE[:2], reason="", error=ProtocolError("?"), allowed=(BatonError,))),
        ("I6", delivery(*WHOLE[:2], reason="", error=OSError("?"), allowed=(BatonError,))),
        ("I6", delivery(*WHOLE[:2], reason="")),
        ("I6", delivery(*WHOLE, allowed=(Overloaded,), must_fail=True)),
    ],
)
def test_what_is_wrong_is_found(what, wrong):
    with pytest.raises(AssertionError, match=what):
        check(wrong)
