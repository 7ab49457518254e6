"""The end of a router, in order: nothing new is let in, what runs may finish, the rest is told why it ends.

It holds every call that generates. It knows no server: who owns the ports stops them when this is through.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from baton.core.errors import Draining

RETRY_AFTER_S: Final = 1.0


class Shutdown:
    """One router's."""

    def __init__(self) -> None:
        self.has_begun = False
        self._is_cut = False
        self._scopes: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Calls that are held."""
        return len(self._scopes)

    def require_open(self) -> None:
        """Let in what is new.

        Raises:
            Draining: nothing new is.
        """
        if self.has_begun:
            message = f"this deployment is shutting down; ask another one, or again in {RETRY_AFTER_S:g} s"
            raise Draining(message, retry_after_s=RETRY_AFTER_S)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold a call of the current task.

        Raises:
            Draining: it is not let in, or it was ended by `cut`.
        """
        self.require_open()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                self._empty.clear()
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
                    if not self._scopes:
                        self._empty.set()
        except TimeoutError:
            if not (self._is_cut and scope.expired()):
                raise
            message = "the deployment was shut down before the answer ended; ask another one, or again later"
            raise Draining(message, retry_after_s=RETRY_AFTER_S) from None

    def begin(self) -> None:
        """Let nothing new in."""
        self.has_begun = True

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no call is held; returns whether that came about in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> int:
        """End every call that is still held, each with `Draining`; returns how many."""
        self.begin()
        self._is_cut = True
        num_open, now_s = self.num_open, asyncio.get_running_loop().time()
        for scope in tuple(self._scopes):
            if not scope.expired():
                scope.reschedule(now_s)
        return num_open
