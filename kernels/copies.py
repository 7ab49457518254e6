"""Copies between host and device that the host does not wait for: the one place that says `non_blocking`.

Such a copy reads or writes host memory after the call has returned. From pageable memory that is either a race (the
memory may be reused before it was read) or, as CUDA does it, a hidden wait; so pageable memory is pinned first where
that is harmless, and refused where it is not. On a CPU there is nothing to overlap, and everything is a plain copy.
"""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on `device`, ordered behind what the current stream was given; the host goes on at once.

    `values` may be changed afterwards: what crosses is a pinned copy of them, unless they are pinned already.
    """
    assert values.device.type == "cpu"
    if device.type != "cuda":
        return values.to(device)
    return (values if values.is_pinned() else values.pin_memory()).to(device, non_blocking=True)


def host_buffer(num_values: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that `device` may write behind the host's back: pinned, where that exists."""
    return torch.empty(num_values, dtype=dtype, pin_memory=device.type == "cuda")


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`, a host tensor of its shape; from a device, it is there once the stream got so far.

    Raises:
        AssertionError: `source` is on a device and `target` is not pinned.
    """
    assert target.device.type == "cpu"
    if source.device.type == "cpu":
        target.copy_(source)
        return
    if source.numel() == 0:
        return  # nothing to copy, and CUDA knows no memory of no bytes, so that it is never pinned
    assert target.is_pinned(), "a pageable target of an asynchronous copy"
    target.copy_(source, non_blocking=True)
