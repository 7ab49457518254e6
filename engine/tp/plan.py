"""The plan of a tensor-parallel TP group: rank 0 says what is done next, the other ranks do the same in the same order.

A plan is told before the work it is about, because that work adds over ranks; it goes over a socket of the host
(`tp_group_link`), so rank 0 never waits until it is taken. `PlanChannel` is one rank's way to tell or hear plans, and
puts the deadline of a step on the collectives in it. Owns neither form (`plan_codec`) nor meaning (`tp_group`) of a
message.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from baton.core.errors import BatonError
from baton.engine.step.plan import PLAN_KINDS
from baton.engine.tp.link import TPGroupLink
from baton.engine.tp.plan_codec import CONTROL_KINDS, PlanCodec, Ready
from baton.engine.tp.step_limit import StepLimit
from baton.engine.tp.watch import STARVED_S
from baton.model.parallel import Communicator

SLACK_S = STARVED_S + 1.0  # a collective gives up after the watch, which knows whom to name


def plan_codec(more: Mapping[int, type] | None = None) -> PlanCodec:
    """The codec of a TP group; `more` kinds of messages belong to the role."""
    return PlanCodec({**CONTROL_KINDS, **PLAN_KINDS, **(more or {})})


class PlanChannel:
    """One rank's end: rank 0 tells, the others hear."""

    def __init__(self, link: TPGroupLink, communicator: Communicator) -> None:
        assert (link.rank, link.size) == (communicator.rank, communicator.size)
        self.link = link
        self.communicator = communicator
        link.operations = lambda: communicator.num_operations
        communicator.blame = link.blame

    def tell(self, message: object) -> None:
        """Rank 0: the next thing to do.

        Raises:
            WorkerLost: the TP group has failed.
        """
        self.link.tell(message)

    def hear(self, timeout_s: float | None = None) -> Any:
        """Another rank: wait for it, as long as rank 0 lives; None after `link.wake`, or after so long.

        Raises:
            WorkerLost: rank 0 is gone.
        """
        return self.link.hear(timeout_s)

    def begin_step(self, limit: StepLimit, num_rows: int, limit_s: float) -> Callable[[], None]:
        """Rank 0 has told a step, which must end within `limit_s`: the function that says it has.

        `limit` learns what it took. A step that raised need not be ended: the TP group is over then.
        """
        self.communicator.limit_s = limit_s + SLACK_S
        start_s = time.monotonic()
        step = self.link.begin(limit_s)

        def end() -> None:
            self.link.end(step)
            limit.note(num_rows, time.monotonic() - start_s)

        return end

    def follow_step(self, limit_s: float) -> None:
        """Another rank: collectives from here on give up later than rank 0 judges."""
        self.communicator.limit_s = limit_s + SLACK_S

    def start(self, timeout_s: float) -> None:
        """Rank 0: wait until all others follow; from then on the silence of any rank is a hang.

        Raises:
            WorkerLost: one of them failed.
        """
        self.link.wait_ready(timeout_s)
        self.link.judge_silence()
        self.link.tell(Ready())

    def follow(self) -> None:
        """Another rank: it is loaded, and hears plans from here on."""
        self.link.tell(Ready())

    def close(self, error: BatonError | None = None) -> None:
        """Leave the TP group."""
        self.link.leave(error)
