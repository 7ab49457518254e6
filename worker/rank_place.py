"""What a rank is given to find its TP group. Without torch: whoever starts ranks has no need of it."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What another rank needs to know to take its place.

    Attributes:
        rank: its own.
        size: of the TP group.
        epoch: of the worker, the same for all ranks.
        store_port: of rank 0's store, on this host.
        link_address: of rank 0's link.
        link_token: for it.
    """

    rank: int
    size: int
    epoch: int
    store_port: int
    link_address: str
    link_token: str = field(repr=False)


class RankStarter(Protocol):
    """Starts the processes of the other ranks, on rank 0's host."""

    def start(self, rank_place: RankPlace) -> None:
        """Have a process take this seat; returns at once."""
        ...

    def check(self) -> None:
        """Look whether they could be started.

        Raises:
            BatonError: one of them could not.
        """
        ...
