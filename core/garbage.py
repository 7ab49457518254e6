"""Python's cyclic garbage collector in a serving process: excludes what was loaded, and counts its time.

A full collection visits every object while all threads stop. With torch and a model loaded those are hundreds of
thousands, none of which will ever be garbage: a pause of some tenths of a second in every stream.
"""

import gc
import time
from typing import Final

THRESHOLD: Final = 20_000  # objects allocated and not freed between two collections; a stream has a few hundred


def begin_to_serve() -> None:
    """Exclude all current objects, and collect the rest less often; called once per process, after loading."""
    if _watch not in gc.callbacks:
        gc.callbacks.append(_watch)
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, 10, 20)


def collected_s() -> float:
    """Seconds of collection since `begin_to_serve`, including its own; 0 before."""
    return _watch.total_s


class _Watch:
    """Times each collection. It runs on the thread that collects, so it takes no lock and writes nothing."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.monotonic()
        else:
            self.total_s += time.monotonic() - self._began_s


_watch: Final = _Watch()
