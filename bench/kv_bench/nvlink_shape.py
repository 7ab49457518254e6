"""Shapes, blocks of each push, and completion words of the hand-off benchmark between two GPUs."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout

NUM_LAYERS = 36
LAYOUT = KVLayout.of_attention(
    model_hash="bench", num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"
)
BLOCK_BYTES = 64 << 10
MANY_BLOCKS = NUM_LAYERS * 64  # 2304
SET_BLOCKS = 64
PUSH_BYTES = MANY_BLOCKS * BLOCK_BYTES
BATCH = 64
CONTEXT_LEN = 1024
DECODE_BLOCKS = BATCH * CONTEXT_LEN // 16
SLOT_WORDS = 64
NUM_SLOTS = 4096
NUM_SETS = 32  # incoming transfers in the ring of `slot_of`
VERIFIED_SLOT = 3000  # how many incoming transfers the decode side has verified, for a push that waits for credit
WINDOW = 6  # incoming transfers that may be pushed but not yet verified


@dataclass(frozen=True, slots=True)
class Pools:
    """The two pools' geometries; blocks below `DECODE_BLOCKS` of the decode pool belong to running sequences."""

    prefill: PoolGeometry
    decode: PoolGeometry


def pools() -> Pools:
    """Make both geometries."""
    return Pools(PoolGeometry(LAYOUT, MANY_BLOCKS + 8), PoolGeometry(LAYOUT, DECODE_BLOCKS + MANY_BLOCKS + 8))


def source_blocks(turn: int, count: int) -> npt.NDArray[np.int32]:
    """Blocks of the prefill pool for one push."""
    return np.random.default_rng((turn, 0)).permutation(MANY_BLOCKS)[:count].astype(np.int32)


def target_blocks(turn: int, count: int) -> npt.NDArray[np.int32]:
    """Blocks of the decode pool for one push."""
    drawn = np.random.default_rng((turn, 1)).permutation(MANY_BLOCKS)[:count]
    return (drawn + DECODE_BLOCKS).astype(np.int32)


def incoming_blocks(incoming: int) -> npt.NDArray[np.int32]:
    """Blocks of the decode pool for one of the consecutive incoming transfers."""
    first = incoming % NUM_SETS * SET_BLOCKS
    return (
        np.random.default_rng(7).permutation(MANY_BLOCKS)[first : first + SET_BLOCKS].astype(np.int32) + DECODE_BLOCKS
    )


def slot_of(incoming: int, layer: int) -> int:
    """Slot whose word says that a layer of an incoming transfer has arrived."""
    return 2 + incoming % NUM_SETS * NUM_LAYERS + layer


class Words:
    """Completion words in a file that both processes map.

    Args:
        path: path of the file, which one process creates.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        num_bytes = NUM_SLOTS * SLOT_WORDS * 8
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(file, 0, num_bytes)
            self._map = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        self.path = Path(path)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.view = memoryview(self._map).cast("Q")

    def word(self, slot: int) -> int:
        """Sequence number in a slot."""
        return self.view[slot * SLOT_WORDS]

    def set_word(self, slot: int, value: int) -> None:
        """Set a slot's word from the host."""
        self.view[slot * SLOT_WORDS] = value

    def digests(self, slot: int, count: int) -> list[int]:
        """Digests that follow the word."""
        start = slot * SLOT_WORDS + 1
        return self.view[start : start + count].tolist()

    @staticmethod
    def offset_bytes(slot: int) -> int:
        """Start of a slot."""
        return slot * SLOT_WORDS * 8
