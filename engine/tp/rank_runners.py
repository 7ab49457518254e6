"""Runs the ranks of a tensor-parallel worker: rank 0 plans, and all ranks run the same plans.

`Rank0Runner` is rank 0's runner: it sends each plan to the other ranks, then runs it. `RankRunner` is the loop of
another rank. Neither knows what a worker does besides computing, nor what a plan means (`step.runner`).
"""

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from baton.core.draft_method import DraftMethod
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.graphs.graphed_step import GraphedStep
from baton.engine.step.executor import Pending
from baton.engine.step.meter import StepMeter
from baton.engine.step.plan import Grow, Load, MoveExperts, Operation, Place, Release, Save, Step
from baton.engine.step.result import StepTicket
from baton.engine.step.runner import Runner
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.engine.tp.plan import PlanChannel
from baton.engine.tp.plan_codec import Stop
from baton.engine.tp.step_limit import StepLimit

_LOOK_S = 0.02
_MAX_AHEAD = 2


class Rank0Runner:
    """Rank 0's `Runner`. Sends plans to the other ranks as they are made, ahead of what is being computed.

    Args:
        runner: this rank's runner.
        channel: to the other ranks.
        balancer: moves experts; None: they stay.
    """

    def __init__(self, runner: Runner, channel: PlanChannel, balancer: ExpertBalancer | None = None) -> None:
        self.balancer = balancer
        self._runner = runner
        self._channel = channel
        self._decode_limit = StepLimit()
        self._mixed_limit = StepLimit()

    @property
    def has_mtp(self) -> bool:
        """See `Runner`."""
        return self._runner.has_mtp

    @property
    def methods(self) -> tuple[DraftMethod, ...]:
        """See `Runner`."""
        return self._runner.methods

    @property
    def num_pools(self) -> int:
        """See `Runner`."""
        return self._runner.num_pools

    @property
    def max_num_seqs(self) -> int:
        """See `Runner`."""
        return self._runner.max_num_seqs

    @property
    def num_draft_tokens(self) -> int:
        """See `Runner`."""
        return self._runner.num_draft_tokens

    @property
    def max_model_len(self) -> int:
        """See `Runner`."""
        return self._runner.max_model_len

    @property
    def num_host_blocks(self) -> int:
        """See `Runner`."""
        return self._runner.num_host_blocks

    @property
    def num_state_images(self) -> int:
        """See `Runner`."""
        return self._runner.num_state_images

    @property
    def hidden_size(self) -> int:
        """See `Runner`."""
        return self._runner.hidden_size

    @property
    def hidden_dtype(self) -> torch.dtype:
        """See `Runner`."""
        return self._runner.hidden_dtype

    @property
    def grammars(self) -> GrammarCompiler | None:
        """See `Runner`."""
        return self._runner.grammars

    @property
    def graphs(self) -> GraphedStep | None:
        """See `Runner`."""
        return self._runner.graphs

    @property
    def meter(self) -> StepMeter:
        """See `Runner`; measures this rank only."""
        return self._runner.meter

    def execute(self, operation: Operation) -> Pending | None:
        """As `Runner.execute`, on every rank. What a copy returns is done when every rank has copied."""
        self._channel.tell(operation)
        return self._runner.execute(operation)

    def launch(self, step: Step) -> StepTicket:
        """As `Runner.launch`, on every rank; may be preceded by one round of an exchange of experts."""
        move = None if self.balancer is None else self.balancer.before_step()
        if move is not None:
            self.execute(move)
        limit = self._mixed_limit if step.chunks else self._decode_limit
        limit_s = limit.limit_s(step.num_rows)
        step = replace(step, limit_s=limit_s)
        self._channel.tell(step)
        end = self._channel.begin_step(limit, step.num_rows, limit_s)
        ticket = self._runner.launch(step)
        ticket.on_result = end
        return ticket

    def drain(self) -> None:
        """As `Runner.drain`, on this rank."""
        self._runner.drain()

    def close(self) -> None:
        """Stop the other ranks; must be the last call."""
        self._channel.link.expect_end()
        self._channel.tell(Stop())
        self._runner.close()


class RankRunner:
    """The loop of another rank, which runs what rank 0 plans.

    Args:
        runner: this rank's runner.
        channel: to rank 0.
    """

    def __init__(self, runner: Runner, channel: PlanChannel) -> None:
        self._runner = runner
        self._channel = channel
        self._launched: deque[StepTicket] = deque()

    @property
    def look_s(self) -> float | None:
        """When `look` should be called again; None: only when a plan has arrived."""
        # While a step runs, check its end soon, because it may show that this rank diverged.
        return _LOOK_S if self._launched else None

    def run(self) -> None:
        """Run rank 0's plans until it sends `Stop`.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
        """
        while not isinstance(plan := self._channel.hear(self.look_s), Stop):
            is_known = plan is None or self.take(plan)
            assert is_known, f"a rank does not know {plan!r}"
            self.look()
        self._runner.close()

    def take(self, plan: Any) -> bool:
        """Run a plan; returns False if it is of another kind."""
        match plan:
            case Step():
                self._channel.follow_step(plan.limit_s)
                self._launched.append(self._runner.launch(plan))
            case Place() | Release() | Grow() | Save() | Load() | MoveExperts():
                self._runner.execute(plan)
            case _:
                return False
        return True

    def look(self) -> None:
        """Read the steps that are over, and wait for those more than `_MAX_AHEAD` behind."""
        while self._launched and (len(self._launched) > _MAX_AHEAD or self._launched[0].is_sampled):
            self._launched.popleft().result()

    def close(self) -> None:
        """Close the runner; must be the last call."""
        self._runner.close()
