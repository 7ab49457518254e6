"""Whatever runs a `LandingDriver` beside a decode worker: a thread of the same process, or a process of its own."""

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kvtransfer.landing_setup import Legacy


class LandingHost(Protocol):
    """Lives of a landing, one after the other. All calls come from the worker's loop, or before it runs.

    Attributes:
        address: where the present life listens, or the last one did.
        epoch: of that life.
        wakeup: called on another thread when there is something to poll.
    """

    address: str
    epoch: int
    wakeup: Callable[[], None]

    def start(self) -> None:
        """Begin to serve; nothing if that was done before.

        Raises:
            StartupError: it cannot serve.
        """
        ...

    def wake(self) -> None:
        """There are commands in the link."""
        ...

    def check(self) -> None:
        """Notice that nothing can land any more.

        Raises:
            TransferFailed: that is so, and no life will follow.
        """
        ...

    def death(self) -> str | None:
        """Why the last life ended, from its end to `revive`; nothing of it is written any more. None while it lives."""
        ...

    def revive(self, legacies: Sequence[Legacy]) -> None:
        """Everything a dead life left was read, and the link was reset: start the next one.

        Args:
            legacies: what it had granted and somebody still needs.
        """
        ...

    def condemn(self, reason: str) -> None:
        """What this life says cannot be: end it."""
        ...

    def close(self) -> None:
        """End it."""
        ...
