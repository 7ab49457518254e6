"""Values that a device writes into host memory: not to be looked at before they are there.

`HostFuture.get` is the only way to the tensor, so that no reader can forget the wait. Owns no memory: the buffers of
a runner's results are lent by `ResultBuffers` and come back once read.
"""

from typing import Protocol

import torch

from baton.kernels.copies import host_buffer


class Event(Protocol):
    """A point in the order of work; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it was reached."""
        ...

    def synchronize(self) -> None:
        """Wait for it; raises what kept it from being reached."""
        ...


class HostFuture:
    """A host tensor and the event after which it holds what it is for."""

    def __init__(self, tensor: torch.Tensor, event: Event) -> None:
        assert tensor.device.type == "cpu"
        self._tensor = tensor
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether `get` would not wait."""
        return self._event.query()

    def get(self) -> torch.Tensor:
        """The tensor, once it is written.

        Raises:
            Exception: what the work that should have written it raised.
        """
        self._event.synchronize()
        return self._tensor


class ResultBuffers:
    """Host memory for the results of steps in flight, each int64 [num_values] at least; pinned for a CUDA device.

    As many as were ever lent at a time, so two for one step ahead; all as large as the largest that was asked for.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        self._num_values = num_values
        self._device = device
        self._free: list[torch.Tensor] = []

    def take(self, num_values: int) -> torch.Tensor:
        """A buffer of so many values or more, for the caller alone; what it holds is left over."""
        if num_values > self._num_values:
            self._num_values = num_values
            self._free.clear()
        return self._free.pop() if self._free else host_buffer(self._num_values, torch.int64, self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """The buffer was read, and nothing writes it any more."""
        if len(buffer) == self._num_values:
            self._free.append(buffer)
