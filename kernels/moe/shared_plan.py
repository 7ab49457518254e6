"""Decides for which steps a shared expert is one more choice of every token, among the routed experts.

Pure functions. There it has no launches of its own, which is what few rows wait for. But grouped GEMMs read its weights
once for each block of rows, from the L2 cache at best, and a GEMM of its own reads them once; so it must have few
blocks, and the fewer the larger it is.
"""

_BLOCK_LEN = 16  # rows of an expert that are computed together in decode steps
_MAX_REREAD_BYTES = 48_000_000  # some 6 us from the L2 cache, which is what three launches take
MAX_TOKENS = 256  # beyond it, blocks are longer, and a GEMM of its own fills the GPU


def max_tokens(inner_size: int, hidden: int, *, is_fp8: bool) -> int:
    """Return the largest number of tokens in a step for which the shared expert is one more choice, a power of two.

    Args:
        inner_size: intermediate size of an expert at this rank.
        hidden: hidden size.
        is_fp8: whether weights are float8.
    """
    num_bytes = 3 * inner_size * hidden * (1 if is_fp8 else 2)
    num_blocks = 1 + _MAX_REREAD_BYTES // num_bytes
    return min(MAX_TOKENS, _BLOCK_LEN << (num_blocks.bit_length() - 1))
