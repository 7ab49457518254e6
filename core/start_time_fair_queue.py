"""Takes turns by cost: among waiting owners, the one that was served least comes next. Pure, not thread-safe.

It uses virtual time, as in start-time fair queueing (Goyal, Vin and Cheng, 1996). An owner that returns starts from
what it had spent, but at least from what the owner served last had spent. So no owner saves up turns by waiting or
loses a debt by leaving, and a new owner does not push aside earlier ones for as long as they were served.
"""

import itertools
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class OwnerUsage:
    """An owner's usage, in any unit. It is virtual: a late owner starts from where the others are."""

    __slots__ = ("spent",)

    def __init__(self) -> None:
        self.spent = 0.0

    def charge(self, cost: float) -> None:
        """Charge the owner for being served."""
        self.spent += cost


class StartTimeFairQueue(Generic[Item]):
    """Waiting items, by owner."""

    def __init__(self) -> None:
        self._waiting: dict[OwnerUsage, deque[tuple[int, Item]]] = {}
        self._numbers = itertools.count()
        self._floor = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, share: OwnerUsage, item: Item) -> None:
        """Append an item behind the others of its owner."""
        if share not in self._waiting:
            self._waiting[share] = deque()
            share.spent = max(share.spent, self._floor)
        self._waiting[share].append((next(self._numbers), item))

    def next(self, passed: frozenset[OwnerUsage] = frozenset()) -> Item | None:
        """Remove and return the next item; ties between owners go to the item that was added first.

        Args:
            passed: owners to skip now.
        """
        able = [share for share in self._waiting if share not in passed]
        if not able:
            return None
        share = min(able, key=lambda each: (each.spent, self._waiting[each][0][0]))
        self._floor = max(self._floor, share.spent)
        _, item = self._waiting[share].popleft()
        if not self._waiting[share]:
            del self._waiting[share]
        return item
