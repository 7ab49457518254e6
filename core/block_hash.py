"""Names for the content of KV blocks: equal names mean equal KV, whichever worker computed it. Pure.

A block's name covers everything its KV depends on: the model, every token up to the block's end, and, with an MTP
head, one token more, because MTP entry i joins position i with token i + 1. So a block whose last MTP entry would
depend on a token that is not part of the prompt has no name, and is never shared. Names of different tenants differ:
no tenant can find out by timing what another has asked.

Where layers keep a recurrent state, blocks are of use only up to a *checkpoint*: the state at a block's end, which has
a name made of the block's. Where a prompt leaves checkpoints is said here, so that a router knows it as a worker does.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """See the module.

    Attributes:
        after: the version that this changes.
        version: the one that it makes.
        part: of a whole, counted from 0; other changes have one part.
        cleared: all names are forgotten first.
        stored: names that are there now.
        removed: names that are not; nothing is in both.
    """

    after: int
    version: int
    part: int = 0
    cleared: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


HASH_BYTES = 16
MIN_CHECKPOINT_LEN = 64  # tokens; less is computed in the step that a chunk of its own would take, and in no slot
TURN_LEN = 8  # tokens that a chat template puts behind the last message, which the next turn need not begin with
_TOKEN_BYTES = 4


def block_hashes(
    token_ids: Sequence[int], *, model: str, tenant: str, block_size: int, with_mtp: bool
) -> tuple[bytes, ...]:
    """Names of the full blocks of a prompt, in order; each covers all before it.

    Args:
        token_ids: of the prompt.
        model: identity of config and weights.
        tenant: who may share; empty is a tenant like any other.
        block_size: positions per block.
        with_mtp: the last layer is an MTP head's, so a block's KV depends on the token after it.
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
    """Name of the state at the end of a block of this name: as good a name, and cheap to make of one for each block."""
    return bytes((name[0] ^ 0x80,)) + name[1:]


def checkpoint_blocks(
    prompt_len: int, block_size: int, *, num_cached: int, num_shared: int, interval: int = 0
) -> dict[int, bool]:
    """Behind how many of its blocks a prompt leaves checkpoints, in order; and whether it parts from others there.

    One is for the prompt again and for the next turn of a chat: the last that leaves `TURN_LEN` tokens and one more to
    compute. The other is where the prompt parts from those before it: the next that parts there finds it. None is
    before `MIN_CHECKPOINT_LEN`, and no place to part is that close behind the cached part: each turn of a chat has rows
    of a block or two behind the end of the one before, and no other prompt begins with them.

    With an interval it leaves further ones at its multiples, so that already the second of several prompts that begin
    alike finds nearly all they share. They are as far from the others as a checkpoint from the start.

    Args:
        prompt_len: tokens.
        block_size: positions per block.
        num_cached: blocks that it begins with, at a checkpoint.
        num_shared: blocks whose rows are cached, `num_cached` or more.
        interval: tokens, a multiple of `block_size`; 0: none but those two.
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
