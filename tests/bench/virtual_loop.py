"""An event loop under virtual time: its clock jumps to the next timer as soon as nothing is ready to run."""

import asyncio
import selectors


class _Selector(selectors.SelectSelector):
    """Waits for nothing; what it was to wait is added to the time."""

    now_s = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and no timer is set"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a clock of `baton.core.clock`."""

    def __init__(self):
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.now_s

    now_s = time


def run_virtually(make):
    """Run `make(clock)` to its end; its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(make(runner.get_loop()))
