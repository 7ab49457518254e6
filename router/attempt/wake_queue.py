"""Wakes the readers of streams in turns, so that a router that lags behind its workers merges tokens.

A decode worker sends one frame per step, with tokens of hundreds of streams. gRPC hands over one frame per call, which
takes two passes of the event loop. If all readers woke in one pass, each would send its token before the next frame was
read, however many frames had arrived. A router that takes longer for a frame than its worker for a step would then lag
further with every step. Few readers per pass leave the others asleep while the next frames are read, and what these
hold is merged into the tokens that wait (`RequestRun`).
"""

import asyncio
from collections import deque
from typing import Final

MAX_WOKEN: Final = 64  # in one pass of the event loop, which then takes some milliseconds


class WakeQueue:
    """The readers of one event loop that are to wake, in order.

    Args:
        most: number of readers that wake in one pass.
    """

    def __init__(self, most: int = MAX_WOKEN) -> None:
        self._most = most
        self._readers: deque[asyncio.Future[None]] = deque()
        self._is_waking = False

    def wake(self, reader: "asyncio.Future[None]") -> None:
        """Wake a reader after those before it; a cancelled one is passed over and takes no turn."""
        self._readers.append(reader)
        if not self._is_waking:
            self._is_waking = True
            reader.get_loop().call_soon(self._wake_some)

    async def turn(self) -> None:
        """Wait until the caller's turn comes."""
        reader = asyncio.get_running_loop().create_future()
        self.wake(reader)
        await reader

    def _wake_some(self) -> None:
        num_woken = 0
        while self._readers and num_woken < self._most:
            reader = self._readers.popleft()
            if not reader.done():
                reader.set_result(None)
                num_woken += 1
        if self._readers:
            self._readers[0].get_loop().call_soon(self._wake_some)
        else:
            self._is_waking = False
