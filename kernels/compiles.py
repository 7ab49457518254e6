"""Counts kernels that this process has compiled or loaded from Triton's cache, before and after it began to serve.

A kernel that a serving step launches for the first time stalls all streams of its worker: for seconds if it is
compiled, for some milliseconds if it is only loaded. Therefore the warm-up launches everything once
(`engine.graphs.kernel_warm_up`), and a later compile is a bug: it is counted here, and logged once per kernel.
"""

import logging
import threading
from typing import Any

log = logging.getLogger(__name__)


class Compiles:
    """Counters of compiled kernels; usable from any thread.

    Attributes:
        num_starting: kernels compiled or loaded before serving.
        num_serving: kernels compiled or loaded since serving began.
    """

    def __init__(self) -> None:
        self.num_starting = 0
        self.num_serving = 0
        self._is_serving = False
        self._late: set[str] = set()
        self._lock = threading.Lock()

    @property
    def late(self) -> tuple[str, ...]:
        """Sorted names of kernels compiled or loaded since serving began."""
        with self._lock:
            return tuple(sorted(self._late))

    def listen(self) -> None:
        """Start counting; calling it again is harmless."""
        from triton import knobs  # the import takes half a second, and CPUs do not need it

        knobs.runtime.kernel_load_end_hook.add(self.loaded)

    def serve(self) -> None:
        """Mark the start of serving: from now on streams wait for each compile."""
        with self._lock:
            self._is_serving = True

    def loaded(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        """Count a binary; Triton calls this hook for each one that it loads onto a device."""
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
