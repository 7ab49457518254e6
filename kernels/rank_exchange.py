"""All-reduce and all-gather of small tensors in one launch: each rank writes the others' memory and reads its own.

A decode step sums the few rows of each layer over the ranks twice. NCCL's gather and a launch that adds take more than
twice as long as this (`benchmarks/results/decode-tp2-h200.json`). Here a rank's programs store its values into a slot
at every rank, signal each rank, wait for the signals of all ranks, and add what lies in their own memory: one crossing
of NVLink and one launch. The one-shot form of TensorRT-LLM's and vLLM's custom all-reduce reads the others' memory
instead. NVLink multicast is not used.

Why one wait is enough: calls alternate between two halves of the slots. A rank that writes a half for call n + 2 has
seen all other ranks begin call n + 1, so they are done with call n, which used that half. Therefore calls must be
issued one after the other, on one stream or on streams that wait for each other, and in the same order at each rank.

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

SLOT_BYTES: Final = rank_exchange_triton.SLOT_BYTES  # largest tensor
UNIT_BYTES: Final = rank_exchange_triton.UNIT_BYTES
SIZES: Final = (2, 4, 8)  # supported group sizes
_RELEASED: Final = 2**62  # beyond every call


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One rank's end of the exchange.

    Attributes:
        rank: number of this rank.
        memory: bytes that the other ranks write, `mailbox_bytes(size)` of them, zero at first.
        addresses_R: int64, on the device: every rank's memory, as this device addresses it.
        released: int64, pinned where there is a device: values that `release` copies over the flags.
    """

    rank: int
    memory: torch.Tensor
    addresses_R: torch.Tensor
    released: torch.Tensor

    @classmethod
    def of(cls, rank: int, memory: torch.Tensor, addresses_R: torch.Tensor) -> "Mailbox":
        """Make an end over this memory."""
        first, end = rank_exchange_triton.flags_at(len(addresses_R))
        released = host_buffer((end - first) // 8, torch.int64, memory.device)
        return cls(rank, memory, addresses_R, released.fill_(_RELEASED))

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.addresses_R)

    def fits(self, x: torch.Tensor) -> bool:
        """Return whether a tensor fits in a slot."""
        return 0 < x.numel() * x.element_size() <= SLOT_BYTES

    def release(self) -> None:
        """End the waits of all present and future calls, whose results are then void; call it on another stream.

        A copy does this, not a kernel: a kernel that was not launched before must be loaded first, for which CUDA may
        wait for the device.
        """
        first, end = rank_exchange_triton.flags_at(self.size)
        self.memory[first:end].view(torch.int64).copy_(self.released)


@functools.cache
def mailbox_bytes(size: int) -> int:
    """Size of the memory that each rank of a group of `size` shares.

    Raises:
        KernelArgumentInvalid: groups of that size are not supported.
    """
    require(size in SIZES, "size", f"is {size}, and none of {SIZES}")
    return rank_exchange_triton.num_bytes(size)


def all_sum(x: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """Sum every rank's `x`, as a balanced tree in rank order: the same bits at each rank.

    Args:
        x: contiguous, of the same shape and dtype at each rank, at most SLOT_BYTES.
        mailbox: this rank's end.

    Raises:
        KernelArgumentInvalid: `x` does not fit.
    """
    x_N = _whole_units(x, mailbox)
    total_N = torch.empty_like(x_N)
    rank_exchange_triton.launch(x_N, total_N, mailbox.addresses_R, mailbox.rank, is_sum=True)
    return total_N[: x.numel()].view(x.shape)


def all_gather(x: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """Gather every rank's `x` in rank order, [R, ...]; arguments and errors are those of `all_sum`."""
    x_N = _whole_units(x, mailbox)
    parts_RN = x_N.new_empty((mailbox.size, len(x_N)))
    words, parts_words = x_N.view(torch.int64), parts_RN.view(torch.int64)
    rank_exchange_triton.launch(words, parts_words, mailbox.addresses_R, mailbox.rank, is_sum=False)
    return parts_RN[:, : x.numel()].reshape(mailbox.size, *x.shape)


def sum_parts(parts_R: torch.Tensor) -> torch.Tensor:
    """Sum [R, ...] in one launch, in the order of `all_sum`, for parts that were gathered by other means."""
    require(parts_R.is_contiguous(), "parts_R", "is not contiguous")
    total = parts_R.new_empty(parts_R.shape[1:])
    is_whole = total.numel() > 0 and total.numel() * total.element_size() % UNIT_BYTES == 0
    if parts_R.device.type != "cuda" or len(parts_R) not in SIZES or not is_whole:
        return sum_parts_reference(parts_R)
    rank_exchange_triton.launch_sum(parts_R, total)
    return total


def sum_parts_reference(parts_R: torch.Tensor) -> torch.Tensor:
    """Compute `sum_parts` in torch: widen, add as a tree, round once."""
    wide = wide_dtype(parts_R.dtype)
    return tree_sum([part.to(wide) for part in parts_R.unbind()]).to(parts_R.dtype)


def _whole_units(x: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """Flatten `x`, padded with zeros to a multiple of 16 bytes at a 16-byte aligned address, as the kernels require."""
    require(x.is_contiguous(), "x", "is not contiguous")
    require(mailbox.fits(x), "x", f"has {x.numel() * x.element_size()} bytes, and a slot {SLOT_BYTES}")
    if x.data_ptr() % UNIT_BYTES == 0 and x.numel() * x.element_size() % UNIT_BYTES == 0:
        return x.view(-1)
    values = UNIT_BYTES // x.element_size()
    padded_N = x.new_zeros(-(-x.numel() // values) * values)
    padded_N[: x.numel()].copy_(x.view(-1))
    return padded_N
