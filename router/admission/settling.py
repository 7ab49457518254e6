"""A router that follows another one takes its first request once it knows what that one knew, or after a bound.

Workers are heard within about a second, and tell what prompts they have cached. A request that came before would go
wherever somebody was heard first, and compute again what another worker has.
"""

import asyncio
from collections.abc import Callable


class Settling:
    """One router's beginning.

    Args:
        until_s: of the clock that `look` is given; then it is over in any case.
        is_whole: whether everything is known.
    """

    def __init__(self, until_s: float, is_whole: Callable[[], bool]) -> None:
        self._until_s = until_s
        self._is_whole = is_whole
        self._over = asyncio.Event()

    def look(self, now_s: float) -> None:
        """Called several times a second."""
        if not self._over.is_set() and (now_s >= self._until_s or self._is_whole()):
            self._over.set()

    async def wait(self) -> None:
        """Until it is over."""
        await self._over.wait()
