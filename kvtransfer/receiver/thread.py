"""A KV receiver on a thread of the decode worker's process. It shares the interpreter lock: for tests and tools."""

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
    """A `ReceiverHost` with one incarnation. Only a bug can end it.

    Args:
        epoch: the incarnation.
        transport: the driver's transport.
        make_driver: makes the driver; its argument is the callback that the driver calls after it wrote events.
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
        """Signal that there are commands in the link."""
        self._transport.wake()

    def check(self) -> None:
        """Raise if the thread has ended.

        Raises:
            TransferFailed: the thread ended on an error.
        """
        if self._broken is not None:
            raise TransferFailed(f"the incoming transfer thread ended: {self._broken!r}") from self._broken

    def death(self) -> str | None:
        """Return None: a thread does not die alone."""
        return None

    def revive(self, legacies: Sequence[Legacy]) -> None:
        """Fail: never called."""
        raise AssertionError("a thread does not die alone")

    def condemn(self, reason: str) -> None:
        """Fail: a thread that reports something impossible is a bug."""
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
        # The boundary of the thread: `check` raises what ended it, and the worker must not go on without a receiver.
        except BaseException as error:
            log.exception("the incoming transfer thread failed")
            self._broken = error
            self.wakeup()
        finally:
            self.driver.close()


# What runs a `ReceiverDriver` beside a decode worker: a thread of the same process, or a separate process.


class ReceiverHost(Protocol):
    """Runs successive incarnations of a KV receiver. All calls come from the worker's loop, or before it runs.

    Attributes:
        address: where the present incarnation listens, or the last one did.
        epoch: that incarnation.
        wakeup: called on another thread when there is something to poll.
    """

    address: str
    epoch: int
    wakeup: Callable[[], None]

    def start(self) -> None:
        """Begin to serve; does nothing if it already does.

        Raises:
            StartupError: it cannot serve.
        """
        ...

    def wake(self) -> None:
        """Signal that there are commands in the link."""
        ...

    def check(self) -> None:
        """Raise if no transfer can arrive any more.

        Raises:
            TransferFailed: the receiver is gone, and no incarnation will follow.
        """
        ...

    def death(self) -> str | None:
        """Return why the last incarnation ended, until `revive`; it writes nothing any more. None while one runs."""
        ...

    def revive(self, legacies: Sequence[Legacy]) -> None:
        """Start the next incarnation, once everything that the dead one left was read and the link was reset.

        Args:
            legacies: what the dead incarnation had granted and is still needed.
        """
        ...

    def condemn(self, reason: str) -> None:
        """End this incarnation, because it reported something impossible."""
        ...

    def close(self) -> None:
        """End the receiver."""
        ...
