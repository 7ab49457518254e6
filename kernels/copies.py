"""Copies between host and device that the host does not wait for; the only module that uses `non_blocking`.

Such a copy reads or writes host memory after the call has returned. With pageable memory that is either a race (the
memory may be reused before it was read) or, as CUDA implements it, a hidden wait. So pageable memory is pinned first
where that is harmless, and refused where it is not. On a CPU there is nothing to overlap, and everything is a plain
copy.
"""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy host values to `device`, ordered on the current stream; the host does not wait.

    The caller may change `values` afterwards, because a pinned copy of them is sent, unless they are pinned already.
    """
    assert values.device.type == "cpu"
    if device.type != "cuda":
        return values.to(device)
    return (values if values.is_pinned() else values.pin_memory()).to(device, non_blocking=True)


def host_buffer(num_values: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory that `device` may write asynchronously: pinned, where that exists."""
    return torch.empty(num_values, dtype=dtype, pin_memory=device.type == "cuda")


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to the host tensor `target`; from a device, it is complete once the stream has reached the copy.

    Raises:
        AssertionError: `source` is on a device and `target` is not pinned.
    """
    assert target.device.type == "cpu"
    if source.device.type == "cpu":
        target.copy_(source)
        return
    if source.numel() == 0:
        return  # nothing to copy, and CUDA never reports an empty allocation as pinned
    assert target.is_pinned(), "a pageable target of an asynchronous copy"
    target.copy_(source, non_blocking=True)
