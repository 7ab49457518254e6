"""Whatever runs a `ReceiverDriver` beside a decode worker: a thread of the same process, or a process of its own."""

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kvtransfer.receiver.setup import Legacy


class ReceiverHost(Protocol):
    """Lives of an incoming transfer, one after the other. All calls come from the worker's loop, or before it runs.

    Attributes:
        address: where the present incarnation listens, or the last one did.
        epoch: of that incarnation.
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
            TransferFailed: that is so, and no incarnation will follow.
        """
        ...

    def death(self) -> str | None:
        """Why the last incarnation ended, from its end to `revive`; it writes nothing any more. None while it runs."""
        ...

    def revive(self, legacies: Sequence[Legacy]) -> None:
        """Everything a dead incarnation left was read, and the link was reset: start the next one.

        Args:
            legacies: what it had granted and somebody still needs.
        """
        ...

    def condemn(self, reason: str) -> None:
        """What this incarnation says cannot be: end it."""
        ...

    def close(self) -> None:
        """End it."""
        ...
