"""What one step says to many streams leaves together: wake-ups wait until it is released."""

import contextlib
import threading
from collections.abc import Callable, Iterator


class WriteCoalescer:
    """Held by one thread at a time; other threads' wake-ups pass."""

    def __init__(self) -> None:
        self._holder: int | None = None
        self._held: dict[Callable[[], None], None] = {}

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Until the end of the block; not to be nested."""
        assert self._holder is None
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            held, self._held = self._held, {}
            with contextlib.ExitStack() as stack:  # each, whatever another raises
                for wake in reversed(held):
                    stack.callback(wake)

    def call(self, wake: Callable[[], None]) -> None:
        """Call `wake` now, or once at the release of a write coalescer that this thread holds."""
        if self._holder == threading.get_ident():
            self._held[wake] = None
        else:
            wake()
