"""Memory that two processes and their GPUs share: device memory by CUDA IPC, host memory by page-locking.

A peer's memory is opened *on the opener's own device*, with peer access as needed, so that this device's kernels write
it over NVLink; what `torch.multiprocessing` does, opening it on the owner's device, does not allow that. It refuses to
know what is in the memory. The opener closes it, and only when nothing posted uses it any more.
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
    """A call to CUDA failed; the message says which, and CUDA's reason."""


@dataclass(frozen=True, slots=True)
class IpcPlace:
    """Device memory as another process can open it.

    Attributes:
        handle: of the whole allocation.
        offset_bytes: of the memory in it.
    """

    handle: bytes
    offset_bytes: int


def export(address: int, device: torch.device) -> IpcPlace:
    """The place of device memory of this process, wherever in an allocation it begins.

    Raises:
        CudaFailed: it cannot be shared; memory of torch's expandable segments cannot.
    """
    with _on(device):
        base, _ = _call(driver.cuMemGetAddressRange, address)
        handle = _call(runtime.cudaIpcGetMemHandle, int(base))
    return IpcPlace(bytes(handle.reserved), address - int(base))


def device_uuid(device: torch.device) -> str:
    """Which GPU that is, whatever number a process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def can_reach(device: torch.device, uuid: str) -> bool:
    """Whether kernels on `device` may write the memory of the GPU `uuid`, which may be the same."""
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) == uuid:
            return index == device.index or torch.cuda.can_device_access_peer(device, index)
    return False


class PeerMemory:
    """Device memory of another process.

    Args:
        place: what the owner exported.
        device: whose kernels will use it.

    Raises:
        CudaFailed: it cannot be opened.
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
        """Whether the allocation reaches `num_bytes` beyond the address."""
        with _on(self._device):
            base, size = _call(driver.cuMemGetAddressRange, self._base)
        return self.address + num_bytes <= int(base) + int(size)

    def close(self) -> None:
        """Unmap it."""
        with _on(self._device):
            _call(runtime.cudaIpcCloseMemHandle, self._base)


class PinnedMemory:
    """Host memory of this process, usually shared with others, that its devices can read and write.

    Args:
        memory: whole pages; kept.

    Raises:
        CudaFailed: it cannot be page-locked.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self._address = memory.ctypes.data
        torch.cuda.init()
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        _call(runtime.cudaHostRegister, self._address, memory.nbytes, flags)
        # Memory that is unmapped while it is locked cannot be locked again at that address.
        self._unlock = weakref.finalize(self, _call, runtime.cudaHostUnregister, self._address)
        self._unlock.atexit = False  # then the device is gone before
        self.address = int(_call(runtime.cudaHostGetDevicePointer, self._address, 0))

    def close(self) -> None:
        """Unlock it; so does the end of this object."""
        self._unlock()


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make the device's primary context current for torch and for the bindings, which have a runtime of their own."""
    with torch.cuda.device(device):
        _call(runtime.cudaSetDevice, torch.cuda.current_device())
        yield


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """What a function of the bindings returns beside its status: nothing, a value, or a tuple."""
    status, *values = function(*arguments)
    if int(status) != 0:
        raise CudaFailed(f"{function.__name__} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
