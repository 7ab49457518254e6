"""Sends the plans of a TP group: rank 0 decides what is done next, the other ranks do the same in the same order.

A plan is sent before the work it describes, because that work uses collectives. It goes over a host socket (`tp.link`),
so rank 0 never waits for a receiver. `PlanChannel` is one rank's end for sending or receiving plans, and sets the
deadline of a step on its collectives. It knows neither the encoding of a message (`plan_codec`) nor its meaning
(`step.plan`).
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

SLACK_S = STARVED_S + 1.0  # collectives time out after the watch, which knows the rank at fault


def plan_codec(more: Mapping[int, type] | None = None) -> PlanCodec:
    """The codec of a TP group; `more` adds the message kinds of the role."""
    return PlanCodec({**CONTROL_KINDS, **PLAN_KINDS, **(more or {})})


class PlanChannel:
    """One rank's end: rank 0 sends plans, the others receive them."""

    def __init__(self, link: TPGroupLink, communicator: Communicator) -> None:
        assert (link.rank, link.size) == (communicator.rank, communicator.size)
        self.link = link
        self.communicator = communicator
        link.operations = lambda: communicator.num_operations
        communicator.blame = link.blame

    def tell(self, message: object) -> None:
        """On rank 0: send the next plan.

        Raises:
            WorkerLost: the TP group has failed.
        """
        self.link.tell(message)

    def hear(self, timeout_s: float | None = None) -> Any:
        """On another rank: wait for the next plan, for as long as rank 0 lives; None after `link.wake`, or `timeout_s`.

        Raises:
            WorkerLost: rank 0 is gone.
        """
        return self.link.hear(timeout_s)

    def begin_step(self, limit: StepLimit, num_rows: int, limit_s: float) -> Callable[[], None]:
        """On rank 0, after sending a step that must end within `limit_s`; returns the function to call at its end.

        `limit` learns the step's duration. A step that raised need not be ended, because the TP group is over then.
        """
        self.communicator.limit_s = limit_s + SLACK_S
        start_s = time.monotonic()
        step = self.link.begin(limit_s)

        def end() -> None:
            self.link.end(step)
            limit.note(num_rows, time.monotonic() - start_s)

        return end

    def follow_step(self, limit_s: float) -> None:
        """On another rank: let collectives from here on time out later than rank 0's judgement."""
        self.communicator.limit_s = limit_s + SLACK_S

    def start(self, timeout_s: float) -> None:
        """On rank 0: wait until all others follow; from then on the silence of any rank counts as a hang.

        Raises:
            WorkerLost: one of them failed.
        """
        self.link.wait_ready(timeout_s)
        self.link.judge_silence()
        self.link.tell(Ready())

    def follow(self) -> None:
        """On another rank: report that it is loaded and receives plans from here on."""
        self.link.tell(Ready())

    def close(self, error: BatonError | None = None) -> None:
        """Leave the TP group."""
        self.link.leave(error)
