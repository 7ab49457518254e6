"""A transfer on a thread of the decode worker's process. Shares its interpreter lock, so it is for tests and tools."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.core.errors import TransferFailed
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.receiver.driver import ReceiverDriver
from baton.kvtransfer.receiver.setup import Legacy

log = logging.getLogger(__name__)

JOIN_S = 10.0


class ReceiverThread:
    """See `ReceiverHost`. It has one incarnation; what ends it is a bug.

    Args:
        epoch: of the incarnation.
        transport: the driver's.
        make_driver: called with what the driver shall call after it wrote events.
    """

    def __init__(
        self, epoch: int, transport: Transport, make_driver: Callable[[Callable[[], None]], ReceiverDriver]
    ) -> None:
        self.wakeup: Callable[[], None] = lambda: None
        self.address = transport.address
        self.epoch = epoch
        self._transport = transport
        self.driver = make_driver(lambda: self.wakeup())
        self._broken: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        if self._thread.ident is None:
            self._thread.start()

    def wake(self) -> None:
        """There are commands in the link."""
        self._transport.wake()

    def check(self) -> None:
        """Notice the end of the thread.

        Raises:
            TransferFailed: it ended on an error.
        """
        if self._broken is not None:
            raise TransferFailed(f"the incoming transfer thread ended: {self._broken!r}") from self._broken

    def death(self) -> str | None:
        """A thread does not die alone."""
        return None

    def revive(self, legacies: Sequence[Legacy]) -> None:
        """Never called."""
        raise AssertionError("a thread does not die alone")

    def condemn(self, reason: str) -> None:
        """A thread that says what cannot be is a bug."""
        raise AssertionError(reason)

    def close(self) -> None:
        """Stop, and close the transport."""
        self._is_closing = True
        self._transport.wake()
        if self._thread.ident is None:
            self.driver.close()
        else:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self.driver.turn()
        # The boundary of the thread: `check` raises what ended it, and the worker must not go on half-dead.
        except BaseException as error:
            log.exception("the incoming transfer thread failed")
            self._broken = error
            self.wakeup()
        finally:
            self.driver.close()


# Whatever runs a `ReceiverDriver` beside a decode worker: a thread of the same process, or a process of its own.


class ReceiverHost(Protocol):
    """Incarnations of a KV receiver, one after the other. All calls come from the worker's loop, or before it runs.

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
            legacies: what it had granted and is still needed.
        """
        ...

    def condemn(self, reason: str) -> None:
        """What this incarnation says cannot be: end it."""
        ...

    def close(self) -> None:
        """End it."""
        ...
