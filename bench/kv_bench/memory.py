"""The bytes that are moved: content of source blocks, poison in targets, and the check that every byte arrived.

Pools are uint8 arrays [L layers, N blocks, B bytes]. A block contains random words plus a stamp of its own, so a block
that arrives in the wrong place, in part, or from another layer differs everywhere; blocks that no request named must
still be poison.
"""

import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
POISON = 0xA5
_POISON_WORD = np.uint64(0xA5A5A5A5A5A5A5A5)
_STAMP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class WrongBytes(Exception):
    """A target has wrong content."""


def allocate(shape: tuple[int, int, int], *, shared: bool) -> Blocks:
    """Allocate zeroed memory in 4 KiB pages that stay in place."""
    layers, blocks, size = shape
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, layers * blocks * size, kind | mmap.MAP_ANONYMOUS)
    if not shared and hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8).reshape(shape)


def fill(pool_LNB: Blocks, seed: int) -> None:
    """Write every source block."""
    words_LNW = pool_LNB.view(np.uint64)
    base_W = _base_words(seed, words_LNW.shape[2])
    for layer in range(words_LNW.shape[0]):
        stamps_N = _stamps(layer, range(words_LNW.shape[1]), words_LNW.shape[1])
        np.add(base_W[None, :], stamps_N[:, None], out=words_LNW[layer])


def poison(pool_LNB: Blocks) -> None:
    """Fill the target with a byte that `check` never accepts."""
    pool_LNB.fill(POISON)


def check(pool_LNB: Blocks, seed: int, requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Compare a whole target pool with what (source blocks, target blocks) of `requests`, in order, must have left.

    Returns:
        Number of compared bytes in written blocks.

    Raises:
        WrongBytes: at least one differs.
    """
    words_LNW = pool_LNB.view(np.uint64)
    num_layers, num_blocks, num_words = words_LNW.shape
    source_of = dict[int, int]()
    for source, target in requests:
        source_of.update(zip(target, source, strict=True))
    written = sorted(source_of)
    untouched = [block for block in range(num_blocks) if block not in source_of]
    base_W = _base_words(seed, num_words)
    for layer in range(num_layers):
        stamps_N = _stamps(layer, [source_of[block] for block in written], num_blocks)
        for block, stamp in zip(written, stamps_N, strict=True):
            if not np.array_equal(words_LNW[layer, block], base_W + stamp):
                raise WrongBytes(f"layer {layer}, block {block}: not the bytes of source block {source_of[block]}")
        for block in untouched:
            if not (words_LNW[layer, block] == _POISON_WORD).all():
                raise WrongBytes(f"layer {layer}, block {block}: written, and no request names it")
    return int(len(written) * num_layers * num_words * 8)


def _base_words(seed: int, num_words: int) -> Words:
    return np.random.default_rng((seed, 7)).integers(0, 1 << 63, size=num_words, dtype=np.uint64)


def _stamps(layer: int, blocks: Iterable[int], num_blocks: int) -> Words:
    return np.array([(layer * num_blocks + block + 1) * _STAMP & _MASK for block in blocks], dtype=np.uint64)
