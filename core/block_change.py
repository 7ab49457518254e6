"""What became of the names that a worker's prefix cache holds, in numbered versions. Pure; workers tell, routers read.

A version counts the changes in one incarnation of one worker. A `BlockChange` makes one version from another; what was
stored
and removed again between the two is left out. A whole is a change from nothing (`cleared`, `after` 0), perhaps in
several parts, of which all but the last make version 0: a reader who loses the thread between two parts has version 0,
and asks for everything again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """See the module.

    Attributes:
        after: the version that this changes.
        version: the one that it makes.
        part: of a whole, counted from 0; other changes have one part.
        cleared: all names are forgotten first.
        stored: names that are there now.
        removed: names that are not; nothing is in both.
    """

    after: int
    version: int
    part: int = 0
    cleared: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
