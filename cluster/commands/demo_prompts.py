"""The demo's prompts: the beginnings of ordinary Python, which the bundled model was trained to continue."""

SHORT = '''def fibonacci(n):
    """Return the first n Fibonacci numbers as a list."""
    result = []
    a, b = 0, 1
'''

CLASS = '''import threading


class BoundedCounter:
    """A counter that several threads may use, and that never goes above its limit."""

    def __init__(self, limit):
        self.limit = limit
        self.value = 0
        self._lock = threading.Lock()

    def increment(self):
        """Add one; return False if the limit was reached."""
        with self._lock:
'''

LONG = '''"""A small inventory of parts: read from CSV, kept in memory, written back as JSON.

The inventory knows parts by their number. It refuses negative quantities, and it never writes a file half way:
a new file is written beside the old one and then renamed.
"""

import csv
import json
import logging
import os
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field


logger = logging.getLogger(__name__)


class InventoryError(Exception):
    """Base class of the errors in this module."""


class UnknownPart(InventoryError):
    """There is no part with this number."""

    def __init__(self, number):
        super().__init__("unknown part: %s" % number)
        self.number = number


class NotEnough(InventoryError):
    """Fewer pieces are in stock than were asked for."""

    def __init__(self, number, wanted, found):
        super().__init__("wanted %d of part %s, found %d" % (wanted, number, found))
        self.number = number
        self.wanted = wanted
        self.found = found


@dataclass
class Part:
    """One kind of part, and how many pieces of it are in stock."""

    number: str
    name: str
    quantity: int = 0
    price: float = 0.0
    tags: list = field(default_factory=list)

    def __post_init__(self):
        if self.quantity < 0:
            raise ValueError("quantity must not be negative")
        if self.price < 0:
            raise ValueError("price must not be negative")

    @property
    def value(self):
        """What all pieces in stock are worth."""
        return self.quantity * self.price

    def to_dict(self):
        """Return the part as a dictionary that json can write."""
        return {
            "number": self.number,
            "name": self.name,
            "quantity": self.quantity,
            "price": self.price,
            "tags": list(self.tags),
        }

    @classmethod
    def from_dict(cls, data):
        """Create a part from what to_dict returned."""
        return cls(
            number=data["number"],
            name=data["name"],
            quantity=int(data.get("quantity", 0)),
            price=float(data.get("price", 0.0)),
            tags=list(data.get("tags", [])),
        )


class Inventory:
    """All parts, by number."""

    def __init__(self, parts=()):
        self._parts = {}
        self._by_tag = defaultdict(set)
        for part in parts:
            self.add(part)

    def __len__(self):
        return len(self._parts)

    def __iter__(self):
        return iter(sorted(self._parts.values(), key=lambda part: part.number))

    def __contains__(self, number):
        return number in self._parts

    def add(self, part):
        """Add a part, or replace the one with the same number."""
        old = self._parts.get(part.number)
        if old is not None:
            for tag in old.tags:
                self._by_tag[tag].discard(part.number)
        self._parts[part.number] = part
        for tag in part.tags:
            self._by_tag[tag].add(part.number)

    def get(self, number):
        """Return the part with this number."""
        try:
            return self._parts[number]
        except KeyError:
            raise UnknownPart(number) from None

    def take(self, number, count):
        """Take pieces out of stock."""
        part = self.get(number)
        if part.quantity < count:
            raise NotEnough(number, count, part.quantity)
        part.quantity -= count
        logger.info("took %d of %s", count, number)
        return part.quantity

    def put(self, number, count):
        """Put pieces into stock."""
'''
