"""When experts move, and where to: rank 0 reads what each expert got, every so many steps, and chooses other maps.

It never waits: loads are read behind the steps that were launched, and a step is preceded by the choice of one layer's
map and one round of an exchange at most. Layers follow each other; one whose map stays costs its choice alone.
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
    """As `balanced_map`."""

    def __call__(self, loads: Sequence[int], current: ExpertMap, *, world_size: int) -> ExpertMap:
        """The map to replace `current`, or that one."""
        ...


class ExpertBalancer:
    """Rank 0's.

    Args:
        exchange: of this rank; the others are told the same.
        interval: steps from one reading of the loads to the next.
        choose: the map of a layer.

    Attributes:
        balance: of the steps between the last two readings: mean load of ranks by the largest, with the maps of then;
            None before there were two. Any thread may read it.
        num_moved: layers whose experts have moved, counted each time. Likewise.
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
        self._before: list[list[int]] | None = None  # loads by layer, as they were read last
        self._due: deque[tuple[int, list[int]]] = deque()  # layers whose maps are to be chosen, with their loads
        self._rounds: deque[MoveExperts] = deque()

    def before_step(self) -> MoveExperts | None:
        """What all ranks do ahead of the step that is about to be launched; None: nothing.

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
        if before is None:  # what was routed ahead of the first step is no request's
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
