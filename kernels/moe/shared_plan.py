"""Decides for which steps a shared expert is one more choice of every token, among the routed experts.

Pure functions. There it has no launches of its own, which is what few rows wait for. But grouped GEMMs read its weights
once for each block of rows, from the L2 cache at best, and a GEMM of its own reads them once; so it must have few
blocks, and the fewer the larger it is. For one token, each program goes through all choices one after the other, so one
choice more takes longer than launches if it is large. Measured on an H200 (`benchmarks/results/moe-shared-h200.json`).
"""

_BLOCK_LEN = 16  # rows of an expert that are computed together in decode steps
_MAX_REREAD_BYTES = 48_000_000  # some 6 us from the L2 cache, which is what three launches take
_MAX_BYTES_OF_ONE = 16_000_000  # of a shared expert for one token: as many as are read while three launches start
MAX_TOKENS = 256  # beyond it, blocks are longer, and a GEMM of its own fills the GPU


def steps(inner_size: int, hidden: int, *, is_fp8: bool) -> range:
    """Return the numbers of tokens in a step for which the shared expert is one more choice, up to a power of two.

    Args:
        inner_size: intermediate size of an expert at this rank.
        hidden: hidden size.
        is_fp8: whether weights are float8.
    """
    num_bytes = 3 * inner_size * hidden * (1 if is_fp8 else 2)
    num_blocks = 1 + _MAX_REREAD_BYTES // num_bytes
    first = 1 if num_bytes <= _MAX_BYTES_OF_ONE else 2
    return range(first, min(MAX_TOKENS, _BLOCK_LEN << (num_blocks.bit_length() - 1)) + 1)
