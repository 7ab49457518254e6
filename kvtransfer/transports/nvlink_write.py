"""One write of the `nvlink` data path that was posted to a device: whether it is over, and what it read.

The words that its kernels write report both. The device itself is queried only about a write that takes suspiciously
long: it may have failed, and then its word never comes.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from baton.kvtransfer.flag_page import Flag, FlagPage
from baton.kvtransfer.sender.data_path import DataPathFailed

MASK = (1 << 64) - 1
LOOK_AFTER_S = 0.5  # and repeated at this interval


class NvlinkWrite:
    """A write that was posted; see `sender.data_path.Written`.

    Args:
        flags: flag page where kernels report.
        launches: flag of each launch, and whether its digest counts.
        event: event behind the last launch.
        with_digest: whether the digest is requested.
        on_over: called once, when no launch is in progress any more.
    """

    def __init__(
        self,
        flags: FlagPage,
        launches: Sequence[tuple[Flag, bool]],
        event: torch.cuda.Event,
        with_digest: bool,
        on_over: Callable[["NvlinkWrite"], None],
    ) -> None:
        self._flags = flags
        self._with_digest = with_digest
        self._on_over = on_over
        self._launches = launches
        self._event: torch.cuda.Event | None = event
        self._look_s = time.monotonic() + LOOK_AFTER_S
        self._digest = 0
        self._problem = ""
        self._lock = threading.Lock()  # if two threads ask at once, only one records the end

    @property
    def done(self) -> bool:
        """Whether all words have been written."""
        with self._lock:
            if self._event is not None and self._is_over():
                self._event = None
                for flag, _ in self._launches:
                    self._flags.release(flag)
                self._on_over(self)
        if self._problem:
            raise DataPathFailed(self._problem)
        return self._event is None

    @property
    def digest(self) -> int | None:
        """Sum of the digests of the launches that count; None if not requested."""
        return self._digest if self._with_digest else None

    def _is_over(self) -> bool:
        if all(self._flags.is_up(flag) for flag, _ in self._launches):
            self._digest = sum(self._flags.digests(flag, 1)[0] for flag, counts in self._launches if counts) & MASK
            return True
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + LOOK_AFTER_S
        assert self._event is not None
        try:
            has_ended = self._event.query()
        except RuntimeError as error:  # a fault: the device runs nothing of this process any more
            self._problem = f"the device failed: {error}"
            return True
        if has_ended and not all(self._flags.is_up(flag) for flag, _ in self._launches):
            self._problem = "a launch ended without its word"
            return True
        return False
