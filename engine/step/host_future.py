"""Guards values that a device writes into host memory until they have arrived.

`HostFuture.get` is the only way to reach the tensor, so no reader can forget to wait. A future owns no memory:
`ResultBuffers` lends the buffers of a runner's results and takes them back once they are read.
"""

from typing import Protocol

import torch

from baton.kernels.copies import host_buffer


class Event(Protocol):
    """A point in the order of work; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until it is reached; raises the error that prevented it."""
        ...


class HostFuture:
    """A host tensor, and the event after which its content is valid."""

    def __init__(self, tensor: torch.Tensor, event: Event) -> None:
        assert tensor.device.type == "cpu"
        self._tensor = tensor
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether `get` would return without waiting."""
        return self._event.query()

    def get(self) -> torch.Tensor:
        """The tensor; waits until it is written.

        Raises:
            Exception: what the work that should have written it raised.
        """
        self._event.synchronize()
        return self._tensor


class ResultBuffers:
    """Host buffers for the results of steps in flight, at least int64 [num_values] each; pinned for a CUDA device.

    There are as many as were ever lent at once, so two with one step ahead. All have the size of the largest request so
    far.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        self._num_values = num_values
        self._device = device
        self._free: list[torch.Tensor] = []

    def take(self, num_values: int) -> torch.Tensor:
        """A buffer of at least `num_values` values, for the caller alone; its content is arbitrary."""
        if num_values > self._num_values:
            self._num_values = num_values
            self._free.clear()
        return self._free.pop() if self._free else host_buffer(self._num_values, torch.int64, self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that was read and that nothing writes any more."""
        if len(buffer) == self._num_values:
            self._free.append(buffer)
