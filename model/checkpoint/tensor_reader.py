"""Reads tensors of a checkpoint into their targets, with several threads that each read a chunk of rows at a time.

A chunk is read directly into the tensor if both have the same form. Otherwise it passes through staging memory of its
thread, pinned for a GPU, from which it is copied to the device, and there cut, scaled and converted; the copies of one
thread overlap the reads of the others. So the host needs memory for `NUM_READERS` chunks besides the model's tensors.
Files are opened once, must be those whose headers were read, and must not change. All values read must be finite: a NaN
in one row of an output head would be one wrong logit, which no later check would see (`require_sound`).
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from baton.core.errors import ModelFileDamaged
from baton.kernels.copies import to_device
from baton.model.checkpoint.weights import Cut, ReadBuffer, StoredTensor, open_unchanged, read_bytes

NUM_READERS = 4
CHUNK_BYTES = 16 << 20
_FLOAT8_NAN = 0x7F  # without the sign bit
_SCALED = 8  # bytes per float8 value during conversion: the widened value and its scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorRead:
    """One tensor to read, and its target.

    Attributes:
        stored: the tensor, of at least one dimension.
        name: name of the tensor, for errors.
        target: contiguous memory of the part, on the reader's device and of any dtype.
        cut: which part; None: all.
        scale: returns the factors of a range of rows, applied before rounding to the target's dtype; takes the numbers
            of the range's first row and of the one after its last, counted in the whole tensor.
    """

    stored: StoredTensor
    name: str
    target: torch.Tensor
    cut: Cut | None = None
    scale: Callable[[int, int], torch.Tensor] | None = None


class TensorReader:
    """Reader threads, their memory, and open files; a context manager."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tensor-reader")
        self._of_thread = threading.local()
        self._files: dict[Path, tuple[int, tuple[int, int]]] = {}
        # Per chunk, whether it is finite, on the device. Not the tensor, which may be freed once it is quantized.
        self._finite: list[tuple[str, Path, torch.Tensor]] = []

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()  # it still reads the threads' memory
        for descriptor, _ in self._files.values():
            os.close(descriptor)

    def fill(self, parts: Sequence[TensorRead]) -> None:
        """Read all parts. On a GPU, the copies are then in its stream, and need not be over.

        Raises:
            ModelFileDamaged: a file is not the one whose header was read, or became shorter.
            ModelMissing: a file cannot be read.
        """
        for stored in (part.stored for part in parts):
            if stored.file not in self._files:
                self._files[stored.file] = open_unchanged(stored.file, stored.stamp), stored.stamp
        chunks = [(part, first, stop) for part in parts for first, stop in _chunks(part)]
        for _ in self._pool.map(lambda chunk: self._read(*chunk), chunks):
            pass  # raises what a thread raised

    def require_sound(self) -> None:
        """Check that files are still those whose headers were read, and that all values read are finite.

        Raises:
            ModelFileDamaged: a file was replaced or written to, or holds a NaN or an infinity.
            ModelMissing: a file is gone.
        """
        for file, (_, stamp) in self._files.items():
            os.close(open_unchanged(file, stamp))
        if not self._finite:
            return
        found = torch.stack([is_finite for _, _, is_finite in self._finite]).tolist()  # a single wait for the device
        for (name, file, _), is_finite in zip(self._finite, found, strict=True):
            if not is_finite:
                message = f"{name} holds a NaN or an infinity, in {file.name} of {file.parent}"
                raise ModelFileDamaged(message, path=str(file), tensor=name)

    @torch.inference_mode()  # per thread, as is the current stream
    def _read(self, part: TensorRead, first: int, stop: int) -> None:
        """Read rows of a part."""
        stored, cut, target = part.stored, part.cut, part.target[first:stop]
        is_cut_inside = cut is not None and cut.dim > 0
        before = cut.first if cut is not None and cut.dim == 0 else 0
        descriptor, _ = self._files[stored.file]
        begin = stored.start + (before + first) * stored.row_bytes
        if target.device.type == "cpu" and target.dtype is stored.dtype and not is_cut_inside and part.scale is None:
            read_bytes(descriptor, begin, target.view(-1).view(torch.uint8).numpy().data, stored.file)
            self._finite.append((part.name, stored.file, _is_finite(target)))
            return
        assert stored.dtype is not None
        staging = self._staging()
        data = staging.of((stop - first) * stored.row_bytes)
        read_bytes(descriptor, begin, data, stored.file)
        with torch.cuda.stream(self._stream):
            rows = torch.frombuffer(data, dtype=stored.dtype).view(-1, *stored.shape[1:])
            rows = to_device(rows, self._device)
            staging.leave()
            if cut is not None and is_cut_inside:
                rows = rows.narrow(cut.dim, cut.first, cut.count)
            if part.scale is not None:
                scale = part.scale(before + first, before + stop)
                rows = rows.to(scale.dtype).mul_(scale)
            target.copy_(rows)
            self._finite.append((part.name, stored.file, _is_finite(target)))

    def _staging(self) -> "_Staging":
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = _Staging(self._stream)
        found: _Staging = self._of_thread.staging
        return found


class _Staging:
    """Staging memory of one thread, used by one chunk after the other."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._stream = stream
        self._buffer = ReadBuffer(bytearray if stream is None else _pinned)
        self._copied = None if stream is None else torch.cuda.Event(blocking=True)

    def of(self, num_bytes: int) -> memoryview:
        """`num_bytes` bytes, once the GPU has copied their previous content."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffer.of(num_bytes)

    def leave(self) -> None:
        """Make the next `of` wait for the copies that have begun."""
        if self._copied is not None:
            self._copied.record(self._stream)


def _is_finite(rows: torch.Tensor) -> torch.Tensor:
    """Whether all values are finite: bool [], on their device."""
    if rows.dtype is torch.float8_e4m3fn:  # it has no infinity
        return (rows.view(torch.uint8) & _FLOAT8_NAN).max() != _FLOAT8_NAN
    return torch.isfinite(torch.stack(torch.aminmax(rows))).all()  # both are NaN if any value is


def _chunks(part: TensorRead) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are read together; shorter for scaled rows, which grow to float32, as do their scales."""
    row_bytes = part.stored.row_bytes * (1 if part.scale is None else _SCALED)
    num_rows, at_once = len(part.target), max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, num_rows, at_once):
        yield first, min(num_rows, first + at_once)


def _pinned(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
