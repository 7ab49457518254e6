"""Which prompt blocks each worker's incarnation holds, as far as the router has heard. Pure.

It is a hint: a name that is missing costs a recompute elsewhere, one that is stale a recompute there; the worker alone
decides what it shares. An incarnation is fed with changes in order of version (`core.block_change`); what was missed is
noticed and asked for again. Looking a prompt up takes a step for each of its blocks, however many workers there are.

Beside what was heard there is what is expected: names that a request now on its way will leave where it was sent. They
count until they are heard of, or for a time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.core.block_change import BlockChange
from baton.router.placement.members import Incarnation

MAX_NAMES: Final = 1 << 20  # of all incarnations; some 200 bytes each
MAX_EXPECTED: Final = 1 << 16


@dataclass(slots=True)
class _Held:
    """What one incarnation holds."""

    bit: int
    version: int = 0
    part: int = -1  # of a whole that is being taken, the last one; -1: of none
    names: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Names by incarnation and lives by name.

    Args:
        max_names: that are remembered, of all incarnations together; others are counted in `num_ignored`.
        max_expected: names that are expected; the oldest expectation gives way.
    """

    def __init__(self, max_names: int = MAX_NAMES, max_expected: int = MAX_EXPECTED) -> None:
        self._max_names = max_names
        self._max_expected = max_expected
        self._held: dict[Incarnation, _Held] = {}
        self._incarnations: dict[int, Incarnation] = {}  # by bit
        self._bits: dict[bytes, int] = {}  # of the lives that hold a name
        self._expected: OrderedDict[bytes, tuple[Incarnation, float]] = OrderedDict()
        self.num_names = 0
        self.num_ignored = 0
        self.num_gaps = 0

    def join(self, incarnation: Incarnation) -> None:
        """Begin to hear of an incarnation."""
        if incarnation not in self._held:
            free = ~sum(self._incarnations)  # bits are powers of two, so their sum is all of them
            bit = free & -free
            self._held[incarnation] = _Held(bit)
            self._incarnations[bit] = incarnation

    def drop(self, incarnation: Incarnation) -> None:
        """Forget an incarnation; an unknown one is fine."""
        held = self._held.get(incarnation)
        if held is not None:
            self._clear(held)
            del self._held[incarnation], self._incarnations[held.bit]

    def incarnations(self) -> tuple[Incarnation, ...]:
        """Those that were joined and not dropped."""
        return tuple(self._held)

    def version(self, incarnation: Incarnation) -> int:
        """What was heard of an incarnation so far; 0 is nothing."""
        held = self._held.get(incarnation)
        return 0 if held is None else held.version

    def apply(self, incarnation: Incarnation, change: BlockChange) -> bool:
        """Take a change of a joined incarnation. False, and nothing changes: something was missed, ask again."""
        held = self._held[incarnation]
        is_next = change.after == held.version and change.part in (0, held.part + 1 if held.part >= 0 else 0)
        if not (change.cleared or is_next):
            self.num_gaps += 1
            return False
        if change.cleared:
            self._clear(held)
        for name in change.removed:
            self._remove(held, name)
        for name in change.stored:
            self._add(incarnation, held, name)
        goes_on = change.version == 0 and (change.cleared or change.part > 0)
        held.version, held.part = change.version, change.part if goes_on else -1
        return True

    def names(self, incarnation: Incarnation) -> frozenset[bytes]:
        """What an incarnation is thought to hold."""
        held = self._held.get(incarnation)
        return frozenset() if held is None else frozenset(held.names)

    def num_names_of(self, incarnation: Incarnation) -> int:
        """How many those are."""
        held = self._held.get(incarnation)
        return 0 if held is None else len(held.names)

    def expect(self, incarnation: Incarnation, names: Iterable[bytes], until_s: float) -> None:
        """A request that was sent there will leave an incarnation these names, by `until_s` on the caller's clock."""
        if incarnation not in self._held:
            return
        for name in names:
            self._expected[name] = (incarnation, until_s)
            self._expected.move_to_end(name)
        while len(self._expected) > self._max_expected:
            self._expected.popitem(last=False)

    def match(self, names: Sequence[bytes], now_s: float) -> dict[Incarnation, int]:
        """For every incarnation, how many of a prompt's first names it holds or is about to."""
        found: dict[Incarnation, int] = {}
        left = sum(self._incarnations)
        for at, name in enumerate(names):
            here = left & (self._bits.get(name, 0) | self._expected_bit(name, now_s))
            self._note(left & ~here, at, found)
            left = here
            if not left:
                break
        self._note(left, len(names), found)
        return found

    def _note(self, bits: int, length: int, found: dict[Incarnation, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._incarnations[bit]] = length
            bits ^= bit

    def _expected_bit(self, name: bytes, now_s: float) -> int:
        expected = self._expected.get(name)
        if expected is None:
            return 0
        incarnation, until_s = expected
        held = self._held.get(incarnation)
        if held is None or until_s <= now_s:
            del self._expected[name]
            return 0
        return held.bit

    def _add(self, incarnation: Incarnation, held: _Held, name: bytes) -> None:
        if name in held.names:
            return
        if self.num_names >= self._max_names:
            self.num_ignored += 1
            return
        held.names.add(name)
        self.num_names += 1
        self._bits[name] = self._bits.get(name, 0) | held.bit
        expected = self._expected.get(name)
        if expected is not None and expected[0] == incarnation:
            del self._expected[name]

    def _remove(self, held: _Held, name: bytes) -> None:
        if name not in held.names:
            return
        held.names.remove(name)
        self.num_names -= 1
        bits = self._bits[name] & ~held.bit
        if bits:
            self._bits[name] = bits
        else:
            del self._bits[name]

    def _clear(self, held: _Held) -> None:
        for name in tuple(held.names):
            self._remove(held, name)
        held.version = 0
