"""The names of data lanes, and what the protocol has to know about each: who writes the pool.

On a two-sided lane the decode worker writes what arrives, so it knows when nothing is written any more. On a one-sided
lane the prefill worker writes into the decode worker's pool, and only it knows.
"""

INLINE, RAW, SHM, NVLINK, NIXL = "inline", "raw", "shm", "nvlink", "nixl"
ONE_SIDED = frozenset((SHM, NVLINK, NIXL))
SAME_HOST = frozenset((SHM, NVLINK))
LANES = (NVLINK, SHM, NIXL, RAW, INLINE)  # best first


def is_one_sided(lane: str) -> bool:
    """Whether the sender itself writes the receiver's pool."""
    return lane in ONE_SIDED
