"""Python's collector of cycles in a process that serves: it leaves out what was loaded, and its time is counted.

A full collection looks at every object while all threads stop. With torch and a model imported those are hundreds of
thousands, none of which will ever be garbage: a pause of some tenths of a second in the middle of every stream.
"""

import gc
import time
from typing import Final

THRESHOLD: Final = 20_000  # objects made and not freed between two collections; a stream is a few hundred


def begin_to_serve() -> None:
    """Leave out what there is now, and collect the rest less often. Once a process, when all is loaded."""
    if _watch not in gc.callbacks:
        gc.callbacks.append(_watch)
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, 10, 20)


def collected_s() -> float:
    """Time that collections took since `begin_to_serve`, its own among them; 0 before."""
    return _watch.total_s


class _Watch:
    """Told of each collection, by the thread that collects: it takes no lock and writes nothing."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.monotonic()
        else:
            self.total_s += time.monotonic() - self._began_s


_watch: Final = _Watch()
