"""Memory shared between processes and their GPUs: device memory by CUDA IPC, host memory by page-locking.

A process opens a peer's memory *on its own device*, with peer access where needed, so that kernels of that device write
the memory over NVLink. `torch.multiprocessing` opens it on the owner's device, which does not allow that. The opener
closes the memory, and only after all work that it enqueued on the memory has finished.

This module does not know what the memory contains.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver, runtime  # pyright: ignore[reportMissingImports]

HANDLE_BYTES = 64


class CudaFailed(Exception):
    """A CUDA call failed; the message names the call and CUDA's reason."""


@dataclass(frozen=True, slots=True)
class IpcPlace:
    """Device memory, described so that another process can open it.

    Attributes:
        handle: IPC handle of the whole allocation.
        offset_bytes: start of the memory within the allocation.
    """

    handle: bytes
    offset_bytes: int


def export(address: int, device: torch.device) -> IpcPlace:
    """Describe device memory of this process for other processes; it may begin anywhere in an allocation.

    Raises:
        CudaFailed: the memory cannot be shared; memory of torch's expandable segments cannot.
    """
    with _on(device):
        base, _ = _call(driver.cuMemGetAddressRange, address)
        handle = _call(runtime.cudaIpcGetMemHandle, int(base))
    return IpcPlace(bytes(handle.reserved), address - int(base))


def device_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which does not depend on how a process numbers its devices."""
    return str(torch.cuda.get_device_properties(device).uuid)


def can_reach(device: torch.device, uuid: str) -> bool:
    """Return whether kernels on `device` may write the memory of the GPU `uuid`, which may be the same GPU."""
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) == uuid:
            return index == device.index or torch.cuda.can_device_access_peer(device, index)
    return False


class PeerMemory:
    """Device memory of another process.

    Args:
        place: memory that its owner exported.
        device: device whose kernels will use it.

    Raises:
        CudaFailed: the memory cannot be opened.
    """

    def __init__(self, place: IpcPlace, device: torch.device) -> None:
        if len(place.handle) != HANDLE_BYTES:
            raise CudaFailed(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(place.handle)}")
        handle = runtime.cudaIpcMemHandle_t()
        handle.reserved = place.handle
        self._device = device
        with _on(device):
            flags = runtime.cudaIpcMemLazyEnablePeerAccess
            self._base = int(_call(runtime.cudaIpcOpenMemHandle, handle, flags))
        self.address = self._base + place.offset_bytes

    def check(self, num_bytes: int) -> bool:
        """Return whether the allocation extends at least `num_bytes` past the address."""
        with _on(self._device):
            base, size = _call(driver.cuMemGetAddressRange, self._base)
        return self.address + num_bytes <= int(base) + int(size)

    def close(self) -> None:
        """Unmap the memory."""
        with _on(self._device):
            _call(runtime.cudaIpcCloseMemHandle, self._base)


class PinnedMemory:
    """Host memory of this process, usually shared with others, that its devices can read and write.

    Args:
        memory: whole pages; this object keeps a reference.

    Raises:
        CudaFailed: the memory cannot be page-locked.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self._address = memory.ctypes.data
        torch.cuda.init()
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        _call(runtime.cudaHostRegister, self._address, memory.nbytes, flags)
        # Memory that is unmapped while locked cannot be locked again at that address.
        self._unlock = weakref.finalize(self, _call, runtime.cudaHostUnregister, self._address)
        self._unlock.atexit = False  # at exit the device is already gone
        self.address = int(_call(runtime.cudaHostGetDevicePointer, self._address, 0))

    def close(self) -> None:
        """Unlock the memory; garbage collection of this object does the same."""
        self._unlock()


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make the device's primary context current for torch and for the bindings, which have their own CUDA runtime."""
    with torch.cuda.device(device):
        _call(runtime.cudaSetDevice, torch.cuda.current_device())
        yield


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call a function of the bindings and return its results without the status: nothing, a value, or a tuple."""
    status, *values = function(*arguments)
    if int(status) != 0:
        raise CudaFailed(f"{function.__name__} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
