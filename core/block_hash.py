"""Hashes of KV blocks' content: equal hashes mean equal KV, whichever worker computed it. Pure.

A block's hash covers everything its KV depends on: the model, every token up to the block's end, and, with an MTP head,
one token more, because MTP entry i joins position i with token i + 1. So a block whose last MTP entry would depend on a
token outside the prompt has no hash, and is never shared. Hashes of different tenants differ, so no tenant can find out
by timing what another has requested.

In models with recurrent state, blocks are useful only up to a *checkpoint*: the state at a block's end, whose name is
derived from the block's hash. This module decides where a prompt leaves checkpoints, so that router and worker agree.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """One change of the block hashes that a worker holds.

    Attributes:
        after: the version that this changes.
        version: the resulting version.
        part: index within a snapshot sent in parts, from 0; other changes have one part.
        cleared: whether all hashes are forgotten first.
        stored: hashes that the worker now holds.
        removed: hashes that it no longer holds; none is in both.
    """

    after: int
    version: int
    part: int = 0
    cleared: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


HASH_BYTES = 16
MIN_CHECKPOINT_LEN = 64  # tokens; shorter prefixes are recomputed within a step that would be needed anyway
TURN_LEN = 8  # tokens that a chat template appends to the last message and the next turn may replace
_TOKEN_BYTES = 4


def block_hashes(
    token_ids: Sequence[int], *, model: str, tenant: str, block_size: int, with_mtp: bool
) -> tuple[bytes, ...]:
    """Hashes of a prompt's full blocks, in order; each covers all blocks before it.

    Args:
        token_ids: the prompt's tokens.
        model: identity of config and weights.
        tenant: the tenant that may share the blocks; empty is a tenant like any other.
        block_size: positions per block.
        with_mtp: whether the last layer is an MTP head's, so that a block's KV depends on the token after it.
    """
    num_after = int(with_mtp)
    packed = memoryview(struct.pack(f"<{len(token_ids)}I", *token_ids))
    name = _digest(repr(("baton prefix 1", model, tenant, block_size, with_mtp)).encode())
    names = []
    start = 0
    for end in range(block_size + num_after, len(token_ids) + 1, block_size):
        name = _digest(name + packed[start * _TOKEN_BYTES : end * _TOKEN_BYTES])
        names.append(name)
        start = end
    return tuple(names)


def checkpoint_name(name: bytes) -> bytes:
    """Name of the state at the end of the block with this hash: equally unique, and cheap to derive for every block."""
    return bytes((name[0] ^ 0x80,)) + name[1:]


def checkpoint_blocks(
    prompt_len: int, block_size: int, *, num_cached: int, num_shared: int, interval: int = 0
) -> dict[int, bool]:
    """Decide after which of its blocks a prompt leaves checkpoints, in order, and whether it branches off there.

    The last checkpoint serves the same prompt again, and the next turn of a chat: it is the last one that leaves
    `TURN_LEN` tokens and one more to compute. Another is where the prompt branches off from earlier ones; the next
    prompt that branches there finds it. No checkpoint is before `MIN_CHECKPOINT_LEN`, and no branch is that close after
    the cached part: each turn of a chat has rows of a block or two after the end of the previous turn, and no other
    prompt begins with them.

    With an interval, the prompt leaves further checkpoints at its multiples, so that the second of several prompts with
    a common prefix already finds nearly all of it. They keep the same distance from the other checkpoints as those from
    the start.

    Args:
        prompt_len: tokens.
        block_size: positions per block.
        num_cached: number of leading blocks that are cached, up to a checkpoint.
        num_shared: number of leading blocks whose rows are cached, `num_cached` or more.
        interval: tokens, a multiple of `block_size`; 0: no further checkpoints.
    """
    last = max(0, prompt_len - 1 - TURN_LEN) // block_size
    branch = num_shared if num_shared < last and (num_shared - num_cached) * block_size >= MIN_CHECKPOINT_LEN else 0
    least = max(num_cached, (MIN_CHECKPOINT_LEN - 1) // block_size)
    ends = [count for count in (branch, last) if count > least]
    step = interval // block_size
    marks = range(step * (least // step + 1), last, step) if step else ()
    far = MIN_CHECKPOINT_LEN // block_size
    own = [mark for mark in marks if all(abs(mark - count) >= far for count in (num_cached, *ends))]
    return {count: count == branch for count in sorted(own + ends)}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
