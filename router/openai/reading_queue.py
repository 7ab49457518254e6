"""Decides whose body is read next: tenants take turns by the time that their bodies have taken.

At most `num` processes read one tenant's bodies; one more is for a tenant that has none being read. So a small body
never waits for another tenant's large one that came first, and two tenants that send without pause get half of the time
each, however long their bodies take.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from baton.core.start_time_fair_queue import OwnerUsage, StartTimeFairQueue

NUM_SPARE: Final = 1


class ReadingQueue:
    """The processes' places, on one event loop.

    Args:
        num: maximum number of places for one tenant.
        now_s: clock that measures how long places are held.
    """

    def __init__(self, num: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._num = num
        self._now_s = now_s
        self._held: Counter[OwnerUsage] = Counter()
        self._shares: dict[str, OwnerUsage] = {}  # by tenant; bounded, because tenants come from keys
        self._turns: StartTimeFairQueue[_Waiting] = StartTimeFairQueue()

    @property
    def num_held(self) -> int:
        """Number of places in use."""
        return self._held.total()

    async def take(self, tenant: str) -> Callable[[], None]:
        """Wait for a place; return a function that gives it back and charges the tenant for the time since."""
        share = self._shares.setdefault(tenant, OwnerUsage())
        waiting = _Waiting(share)
        try:
            self._turns.add(share, waiting)
            self._give()
            await waiting.place
            start_s = self._now_s()
        except BaseException:
            if waiting.place.done() and not waiting.place.cancelled():  # it was granted a place just now
                self._free(share)
            waiting.place.cancel()  # else a place granted later would never be given back
            raise

        def give_back() -> None:
            share.charge(self._now_s() - start_s)
            self._free(share)

        return give_back

    def _free(self, share: OwnerUsage) -> None:
        self._held[share] -= 1
        if not self._held[share]:
            del self._held[share]
        self._give()

    def _give(self) -> None:
        while self.num_held < self._num + NUM_SPARE:
            most = self._num if self.num_held < self._num else 1
            waiting = self._turns.next(frozenset(share for share, num in self._held.items() if num >= most))
            if waiting is None:
                return
            if not waiting.place.done():  # else it was cancelled
                self._held[waiting.share] += 1
                waiting.place.set_result(None)


class _Waiting:
    """One waiting body."""

    def __init__(self, share: OwnerUsage) -> None:
        self.share = share
        self.place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
