"""Sums and parts of all ranks' tensors in one launch: each rank writes the others' memory and reads its own.

A decode step adds the few rows of each layer over the ranks twice; NCCL's gather and a launch that adds take more than
twice as long as this (`benchmarks/results/decode-tp2-h200.json`). Here a rank's programs store its values into a slot
at every rank, tell each rank so, wait for all of theirs, and add what lies in their own memory: one crossing of NVLink
and one launch. The one-shot form of TensorRT-LLM's and vLLM's custom all-reduce reads the others' memory instead.
No multicast.

What makes it safe without a second wait: a call's slots are those of one of two halves, in turn. A rank that writes a
half for call n + 2 has seen all others begin call n + 1, so they are done with call n, which had that half. So calls
are one after the other, on one stream or on streams that wait for each other, and the same at each rank.

Legend: R ranks, N values in whole units of 16 bytes.
"""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from baton.kernels import rank_exchange_triton
from baton.kernels.arguments import require
from baton.kernels.copies import host_buffer
from baton.kernels.gemm.inner_sum import tree_sum
from baton.kernels.tiles import wide_dtype

SLOT_BYTES: Final = rank_exchange_triton.SLOT_BYTES  # the largest tensor
UNIT_BYTES: Final = rank_exchange_triton.UNIT_BYTES
SIZES: Final = (2, 4, 8)  # of groups whose ranks can exchange
_RELEASED: Final = 2**62  # beyond every call


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One rank's end.

    Attributes:
        rank: of this end.
        memory: bytes that the others write, of `mailbox_bytes(size)`, zero at first.
        addresses_R: of every rank's memory, as this device reaches it, int64, on the device.
        released: what `release` copies over the flags, int64, pinned where there is a device.
    """

    rank: int
    memory: torch.Tensor
    addresses_R: torch.Tensor
    released: torch.Tensor

    @classmethod
    def of(cls, rank: int, memory: torch.Tensor, addresses_R: torch.Tensor) -> "Mailbox":
        """An end over this memory."""
        first, end = rank_exchange_triton.flags_at(len(addresses_R))
        released = host_buffer((end - first) // 8, torch.int64, memory.device)
        return cls(rank, memory, addresses_R, released.fill_(_RELEASED))

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.addresses_R)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a tensor goes through a slot."""
        return 0 < x.numel() * x.element_size() <= SLOT_BYTES

    def release(self) -> None:
        """End the waits of what is under way, or ever will be, whose results are void; called on another stream.

        By a copy: a kernel that was not launched before is loaded first, for which CUDA may wait for the device.
        """
        first, end = rank_exchange_triton.flags_at(self.size)
        self.memory[first:end].view(torch.int64).copy_(self.released)


@functools.cache
def mailbox_bytes(size: int) -> int:
    """Of the memory that each rank of a group of `size` shares.

    Raises:
        KernelArgumentInvalid: groups of that size do not exchange.
    """
    require(size in SIZES, "size", f"is {size}, and none of {SIZES}")
    return rank_exchange_triton.num_bytes(size)


def all_sum(x: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """The sum of every rank's `x`, added as a balanced tree in rank order: the same bits at each rank.

    Args:
        x: contiguous, of one shape and dtype at each rank, at most SLOT_BYTES.
        mailbox: this rank's.

    Raises:
        KernelArgumentInvalid: `x` does not fit.
    """
    x_N = _whole_units(x, mailbox)
    total_N = torch.empty_like(x_N)
    rank_exchange_triton.launch(x_N, total_N, mailbox.addresses_R, mailbox.rank, is_sum=True)
    return total_N[: x.numel()].view(x.shape)


def all_gather(x: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """Every rank's `x`, in rank order, [R, ...]; the same arguments and errors."""
    x_N = _whole_units(x, mailbox)
    parts_RN = x_N.new_empty((mailbox.size, len(x_N)))
    words, parts_words = x_N.view(torch.int64), parts_RN.view(torch.int64)
    rank_exchange_triton.launch(words, parts_words, mailbox.addresses_R, mailbox.rank, is_sum=False)
    return parts_RN[:, : x.numel()].reshape(mailbox.size, *x.shape)


def sum_parts(parts_R: torch.Tensor) -> torch.Tensor:
    """The sum of [R, ...] as `all_sum` adds it, in one launch: of what was gathered otherwise."""
    require(parts_R.is_contiguous(), "parts_R", "is not contiguous")
    total = parts_R.new_empty(parts_R.shape[1:])
    is_whole = total.numel() > 0 and total.numel() * total.element_size() % UNIT_BYTES == 0
    if parts_R.device.type != "cuda" or len(parts_R) not in SIZES or not is_whole:
        return sum_parts_reference(parts_R)
    rank_exchange_triton.launch_sum(parts_R, total)
    return total


def sum_parts_reference(parts_R: torch.Tensor) -> torch.Tensor:
    """The reference: widened, added as a tree, and rounded once."""
    wide = wide_dtype(parts_R.dtype)
    return tree_sum([part.to(wide) for part in parts_R.unbind()]).to(parts_R.dtype)


def _whole_units(x: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """Its values, and zeros up to a multiple of 16 bytes, at an address that is one: all that kernels are made for."""
    require(x.is_contiguous(), "x", "is not contiguous")
    require(mailbox.fits(x), "x", f"has {x.numel() * x.element_size()} bytes, and a slot {SLOT_BYTES}")
    if x.data_ptr() % UNIT_BYTES == 0 and x.numel() * x.element_size() % UNIT_BYTES == 0:
        return x.view(-1)
    values = UNIT_BYTES // x.element_size()
    padded_N = x.new_zeros(-(-x.numel() // values) * values)
    padded_N[: x.numel()].copy_(x.view(-1))
    return padded_N
