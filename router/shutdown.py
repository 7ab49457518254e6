"""Shuts a router down in order: it refuses new calls, lets running ones finish, then ends the rest with an error.

`Shutdown` tracks every call that generates. It knows no server: the owner of the ports stops them afterwards.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from baton.core.errors import Draining

RETRY_AFTER_S: Final = 1.0


class Shutdown:
    """The shutdown state of one router."""

    def __init__(self) -> None:
        self.has_begun = False
        self._is_cut = False
        self._scopes: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Number of calls in progress."""
        return len(self._scopes)

    def require_open(self) -> None:
        """Check that new calls are still accepted.

        Raises:
            Draining: the router is shutting down.
        """
        if self.has_begun:
            message = f"this deployment is shutting down; ask another one, or again in {RETRY_AFTER_S:g} s"
            raise Draining(message, retry_after_s=RETRY_AFTER_S)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Track a call of the current task while it runs.

        Raises:
            Draining: the router is shutting down, or `cut` ended the call.
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
        """Refuse new calls from now on."""
        self.has_begun = True

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no call is in progress; return whether that happened in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> int:
        """End every call in progress, each with `Draining`; return how many there were."""
        self.begin()
        self._is_cut = True
        num_open, now_s = self.num_open, asyncio.get_running_loop().time()
        for scope in tuple(self._scopes):
            if not scope.expired():
                scope.reschedule(now_s)
        return num_open
