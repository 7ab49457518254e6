"""Decides when experts move, and where to: rank 0 reads every expert's load at intervals and chooses new expert maps.

It never waits: loads are read after the steps launched so far, and before each step it chooses at most one layer's map
and starts at most one round of an exchange. Layers are handled one after the other; a layer whose map does not change
costs only the choice.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from baton.engine.step.host_future import HostFuture
from baton.engine.step.plan import MoveExperts
from baton.engine.tp.expert_exchange import ExpertExchange
from baton.kernels.moe.expert_map import ExpertMap, balance, balanced_map, rank_loads
from baton.kernels.moe.expert_moves import ExpertMoves

log = logging.getLogger(__name__)


class ChooseMap(Protocol):
    """Signature of `balanced_map`."""

    def __call__(self, loads: Sequence[int], current: ExpertMap, *, world_size: int) -> ExpertMap:
        """The map that replaces `current`, or `current` itself."""
        ...


class ExpertBalancer:
    """Balances experts; runs on rank 0.

    Args:
        exchange: this rank's; the other ranks get the same plans.
        interval: number of steps between two readings of the loads.
        choose: chooses the map of a layer.

    Attributes:
        balance: for the steps between the last two readings, with the maps of that time: mean load of the ranks divided
            by the largest; None before the second reading. Any thread may read it.
        num_moved: number of times that a layer's experts have moved. Any thread may read it.
    """

    def __init__(self, exchange: ExpertExchange, interval: int, choose: ChooseMap = balanced_map) -> None:
        assert interval >= 1
        self.balance: float | None = None
        self.num_moved = 0
        self._exchange = exchange
        self._interval = interval
        self._choose = choose
        self._num_steps = 0
        self._reading: HostFuture | None = None
        self._before: list[list[int]] | None = None  # loads by layer at the last reading
        self._due: deque[tuple[int, list[int]]] = deque()  # layers whose maps are still to be chosen, with their loads
        self._rounds: deque[MoveExperts] = deque()

    def before_step(self) -> MoveExperts | None:
        """The operation that all ranks must run before the next step; None: none.

        Raises:
            Exception: what a step raised; nothing can be computed any more.
        """
        if self._reading is not None and self._reading.is_done:
            self._take(self._reading.get().view(len(self._exchange.maps), -1).tolist())
            self._reading = None
        is_busy = self._reading is not None or bool(self._due or self._rounds)
        if self._num_steps % self._interval == 0 and not is_busy:
            self._reading = self._exchange.read_loads()
        self._num_steps += 1
        if not self._rounds and self._due:
            self._choose_map(*self._due.popleft())
        return self._rounds.popleft() if self._rounds else None

    def _take(self, loads: list[list[int]]) -> None:
        before, self._before = self._before, loads
        if before is None:  # tokens routed before the first step belong to no request
            return
        new = [[now - then for now, then in zip(*its, strict=True)] for its in zip(loads, before, strict=True)]
        size, maps = self._exchange.world_size, self._exchange.maps
        self.balance = balance(
            [rank_loads(its, experts, world_size=size) for its, experts in zip(new, maps, strict=True)]
        )
        self._due.extend(enumerate(new))

    def _choose_map(self, layer: int, loads: list[int]) -> None:
        current, size = self._exchange.maps[layer], self._exchange.world_size
        experts = self._choose(loads, current, world_size=size)
        if experts == current:
            return
        num_rounds = ExpertMoves.between(current, experts, world_size=size).num_operations
        self._rounds.extend(MoveExperts(layer, experts, at) for at in range(num_rounds))
        self.num_moved += 1
        log.debug("experts of layer %d move in %d rounds", layer, num_rounds)
