"""Turns by what was spent: of those that wait, the one that was served least comes next. Pure, not thread-safe.

Virtual time, as in start-time fair queueing (Goyal, Vin and Cheng, 1996): an owner that was away comes back with what
it had spent, but at least with what the one had spent that was served last. So no owner saves turns up by waiting, none
gets rid of a debt by leaving, and a new one does not push aside those before it for as long as they took.
"""

import itertools
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class OwnerUsage:
    """What one owner has spent, in any unit; virtual, for who comes late starts from where the others are."""

    __slots__ = ("spent",)

    def __init__(self) -> None:
        self.spent = 0.0

    def charge(self, cost: float) -> None:
        """It was served."""
        self.spent += cost


class StartTimeFairQueue(Generic[Item]):
    """Items that wait, by owner."""

    def __init__(self) -> None:
        self._waiting: dict[OwnerUsage, deque[tuple[int, Item]]] = {}
        self._numbers = itertools.count()
        self._floor = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, share: OwnerUsage, item: Item) -> None:
        """Behind the others of its owner."""
        if share not in self._waiting:
            self._waiting[share] = deque()
            share.spent = max(share.spent, self._floor)
        self._waiting[share].append((next(self._numbers), item))

    def next(self, passed: frozenset[OwnerUsage] = frozenset()) -> Item | None:
        """Whose turn it is, taken out; of owners that spent the same the one that came first.

        Args:
            passed: owners that are passed over now.
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
