"""How many kernels this process has compiled, or loaded from Triton's cache, and which of them after it began to serve.

A kernel that is first launched by a serving step stops all streams of its worker, for seconds where it is compiled and
for some milliseconds where it is only loaded. So everything is launched once before (`engine.graphs.kernel_warm_up`),
and what comes after all is a fault: it is counted here, and logged once for each kernel.
"""

import logging
import threading
from typing import Any

log = logging.getLogger(__name__)


class Compiles:
    """Counts, from any thread.

    Attributes:
        num_starting: kernels before serving.
        num_serving: kernels since.
    """

    def __init__(self) -> None:
        self.num_starting = 0
        self.num_serving = 0
        self._is_serving = False
        self._late: set[str] = set()
        self._lock = threading.Lock()

    @property
    def late(self) -> tuple[str, ...]:
        """Names of those since, in order."""
        with self._lock:
            return tuple(sorted(self._late))

    def listen(self) -> None:
        """Count from now on; again is no harm."""
        from triton import knobs  # takes half a second, and CPUs do without

        knobs.runtime.kernel_load_end_hook.add(self.loaded)

    def serve(self) -> None:
        """From now on a stream waits for each."""
        with self._lock:
            self._is_serving = True

    def loaded(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        """As Triton tells of each binary that has come to a device."""
        with self._lock:
            if not self._is_serving:
                self.num_starting += 1
                return
            self.num_serving += 1
            is_new = name not in self._late
            self._late.add(name)
        if is_new:
            log.warning("the kernel %s was compiled while serving, and streams waited: please report it", name)


COMPILES = Compiles()
