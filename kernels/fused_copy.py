"""Many small copies in one launch: a batch's inputs, spread over a dozen tensors, cost one launch instead of a dozen.

The addresses and sizes of a call are packed into one pinned tensor that is sent in one copy. The returned value belongs
to that call alone; it keeps the tensors and the table alive until the device is done with them. Copies are bytewise, of
any size and at any address; copies whose result would depend on their order are refused.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kernels import fused_copy_triton
from baton.kernels.arguments import require
from baton.kernels.copies import to_device
from baton.kernels.implementation import Implementation, uses_triton

Pair = tuple[torch.Tensor, torch.Tensor]

MAX_COPIES = 4096
_POLL_S = 1e-4


@dataclass(frozen=True, slots=True)
class RunningCopies:
    """Copies that may still be running; keep this value until they are done, or as long as a graph that contains them.

    Attributes:
        pairs: targets and sources.
        tables: addresses and sizes, pinned and on the device.
        event: recorded after the launch; None on a CPU, and in a graph that is being captured.
    """

    pairs: tuple[Pair, ...]
    tables: tuple[torch.Tensor, ...]
    event: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        """Whether sources may be changed and this value dropped; never waits."""
        return self.event is None or self.event.query()

    def wait(self, limit_s: float) -> None:
        """Wait until the copies are done.

        Raises:
            TimeoutError: they were not done within `limit_s`.
        """
        end_s = time.monotonic() + limit_s
        while not self.is_done:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{len(self.pairs)} copies were not done within {limit_s:g} s")
            time.sleep(_POLL_S)


def fused_copy(
    pairs: Sequence[Pair], device: torch.device, *, implementation: Implementation = Implementation.AUTO
) -> RunningCopies:
    """Copy each source to its target, in one launch on the current stream.

    Args:
        pairs: at most 4096 (target, source) pairs with equal dtype and number of values, contiguous, on `device` or,
            for a GPU, in pinned memory. Empty tensors and copies of memory to itself are left out.
        device: device of the launch.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit, or a target overlaps another target or a source.
    """
    require(len(pairs) <= MAX_COPIES, "pairs", f"are {len(pairs)}, more than {MAX_COPIES}")
    for index, (target, source) in enumerate(pairs):
        _check(f"pairs[{index}]", target, source, device)
    moved = tuple(pair for pair in pairs if pair[0].numel() > 0 and pair[0].data_ptr() != pair[1].data_ptr())
    _check_overlaps(moved)
    if not moved or not uses_triton(device, implementation):
        for target, source in moved:
            target.view(-1).copy_(source.view(-1))
        return RunningCopies((), (), None)
    sizes = [_num_bytes(target) for target, _ in moved]
    rows = [[target.data_ptr(), source.data_ptr(), size] for (target, source), size in zip(moved, sizes, strict=True)]
    packed_N3 = torch.tensor(rows, dtype=torch.int64)
    packed_N3 = packed_N3.pin_memory() if device.type == "cuda" else packed_N3
    table_N3 = to_device(packed_N3, device)
    fused_copy_triton.launch(table_N3, max(sizes))
    event = None
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    return RunningCopies(moved, (packed_N3, table_N3), event)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check(name: str, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
    require(target.dtype == source.dtype, name, f"{source.dtype} is to be copied to {target.dtype}")
    require(target.numel() == source.numel(), name, f"{source.numel()} values are to be copied to {target.numel()}")
    for role, tensor in (("target", target), ("source", source)):
        require(tensor.is_contiguous(), name, f"the {role} is not contiguous")
        is_near = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        is_near = is_near or (device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned())
        require(is_near, name, f"the {role} is on {tensor.device}, and neither on {device} nor pinned for it")


def _check_overlaps(pairs: Sequence[Pair]) -> None:
    """Refuse targets that overlap anything, by one sweep over all ranges in order of their addresses."""
    ranges = []
    for index, pair in enumerate(pairs):
        for is_source, tensor in enumerate(pair):
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + _num_bytes(tensor), is_source == 0, index))
    any_end, any_index, target_end, target_index = 0, 0, 0, 0
    for start, end, is_target, index in sorted(ranges):
        if start < target_end or (is_target and start < any_end):
            other = target_index if start < target_end else any_index
            require(False, f"pairs[{index}]", f"overlaps with the copy {other}, and one of the two is a target")
        if end > any_end:
            any_end, any_index = end, index
        if is_target and end > target_end:
            target_end, target_index = end, index
