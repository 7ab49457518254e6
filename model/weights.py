"""Reading safetensors: what a checkpoint holds, whether its files are whole, and its tensors one by one.

Knows files and names, not architectures. Everything that can be told from headers is told before a tensor is read.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.core.errors import ModelFileDamaged, ModelMissing, ModelTensorMissing

if TYPE_CHECKING:  # headers are judged without it; it takes seconds to import
    import torch

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_SAMPLE_BYTES = 64
_INDEX_DTYPES = {"I64": ("int64", 8), "I32": ("int32", 4)}  # torch's name, bytes of an element
_FLOAT8_DTYPES = {"F8_E4M3": ("float8_e4m3fn", 1)}
_STORED_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of one dimension of a tensor."""

    dim: int
    first: int
    count: int


class ReadBuffer:
    """Memory that one tensor after the other is read into: to touch new pages takes longer than to read the files."""

    def __init__(self) -> None:
        self._data = bytearray()

    def of(self, num_bytes: int) -> memoryview:
        """So many bytes, of which earlier views hold the same."""
        if len(self._data) < num_bytes:
            self._data = bytearray(num_bytes)
        return memoryview(self._data)[:num_bytes]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies; `dtype` is None for a kind no weight may have."""

    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_weight(self) -> bool:
        """Whether weights of this kind are supported."""
        return self.dtype_name in _STORED_DTYPES

    @property
    def is_float8(self) -> bool:
        """Whether it is a weight in float8, which has a scale beside it."""
        return self.dtype_name in _FLOAT8_DTYPES

    @property
    def is_index(self) -> bool:
        """Whether it is a table of ids."""
        return self.dtype_name in _INDEX_DTYPES

    @property
    def dtype(self) -> "torch.dtype | None":
        """The torch dtype, or None if weights of this kind are not supported."""
        return _torch_dtype((_STORED_DTYPES | _FLOAT8_DTYPES).get(self.dtype_name))

    @property
    def index_dtype(self) -> "torch.dtype | None":
        """The torch dtype of a table of ids, or None if it is no such table."""
        return _torch_dtype(_INDEX_DTYPES.get(self.dtype_name))

    def read_index(self) -> "torch.Tensor":
        """A table of ids, int64, on the CPU."""
        assert self.index_dtype is not None
        return self._read(self.index_dtype, self.start, self.end, self.shape).long()

    def read(self, cut: Cut | None = None, buffer: ReadBuffer | None = None) -> "torch.Tensor":
        """The tensor, or a part of it, on the CPU, as stored. Of a cut along the first dimension no more is read.

        With a `buffer` it may lie there, and is valid until the next tensor is read into that.
        """
        assert self.dtype is not None
        start, end, shape = self.start, self.end, self.shape
        if cut is not None and cut.dim == 0:
            row_bytes = (end - start) // shape[0]
            start += cut.first * row_bytes
            end, shape = start + cut.count * row_bytes, (cut.count, *shape[1:])
        tensor = self._read(self.dtype, start, end, shape, buffer)
        return tensor if cut is None or cut.dim == 0 else tensor.narrow(cut.dim, cut.first, cut.count).contiguous()

    def _read(
        self, dtype: "torch.dtype", start: int, end: int, shape: tuple[int, ...], buffer: ReadBuffer | None = None
    ) -> "torch.Tensor":
        import torch

        data = (buffer or ReadBuffer()).of(end - start)
        with self.file.open("rb") as stream:
            stream.seek(start)
            if stream.readinto(data) != len(data):
                raise ModelFileDamaged(f"{self.file} shrank while it was read", path=str(self.file))
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(shape)


def _torch_dtype(found: tuple[str, int] | None) -> "torch.dtype | None":
    import torch

    if found is None:
        return None
    dtype = getattr(torch, found[0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's checkpoint, by name.

    Raises:
        ModelMissing: no safetensors file, or a shard the index names is not there.
        ModelFileDamaged: a file is truncated or not a safetensors file.
        ModelTensorMissing: the index promises a tensor its shard does not hold.
    """
    if (path / _SINGLE_NAME).is_file():
        return _read_header(path / _SINGLE_NAME)
    if not (path / _INDEX_NAME).is_file():
        raise ModelMissing(f"{path} holds neither {_SINGLE_NAME} nor {_INDEX_NAME}", path=str(path))
    weight_map = _read_index(path / _INDEX_NAME)
    absent = sorted({name for name in weight_map.values() if not (path / name).is_file()})
    if absent:
        raise ModelMissing(f"{path} lacks {', '.join(absent)}", path=str(path), files=absent)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        tensors |= _read_header(path / name)
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        message = f"the shards of {path} lack tensors their index names: {', '.join(missing[:5])}"
        raise ModelTensorMissing(message, path=str(path), tensors=missing)
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except OSError as error:
        raise ModelMissing(f"cannot read {file}: {error.strerror}", path=str(file)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileDamaged(f"{file} is not an index of shards: {error!r}", path=str(file)) from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_len = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_len > min(size - 8, _MAX_HEADER_BYTES):
            message = f"{file} is truncated or no safetensors file: {size} bytes cannot hold its header"
            raise ModelFileDamaged(message, path=str(file), size_bytes=size)
        raw = stream.read(header_len)
    begin = 8 + header_len
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, begin, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileDamaged(f"{file}: its header is not that of a safetensors file", path=str(file)) from error
    promised = max((tensor.end for tensor in tensors.values()), default=begin)
    if promised != size:
        kind = "truncated" if size < promised else "longer than its header says"
        message = f"{file} is {kind}: {size} bytes where the header promises {promised}"
        raise ModelFileDamaged(message, path=str(file), size_bytes=size, promised_bytes=promised)
    return tensors


def _stored(file: Path, begin: int, entry: Mapping[str, Any]) -> StoredTensor:
    shape = tuple(int(length) for length in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    tensor = StoredTensor(file, str(entry["dtype"]), shape, begin + start, begin + end)
    num_elements = 1
    for length in shape:
        num_elements *= length
    _, item_bytes = (_STORED_DTYPES | _FLOAT8_DTYPES | _INDEX_DTYPES).get(tensor.dtype_name, ("", 0))
    if item_bytes and num_elements * item_bytes != end - start:
        raise ValueError(f"{end - start} bytes for shape {shape}")
    return tensor


def checkpoint_identity(path: Path, config: Mapping[str, Any]) -> str:
    """sha256 over config.json, every tensor's name, dtype and shape, and 64 bytes from the middle of each.

    Two checkpoints of one architecture have equal headers, so headers alone would not tell a fine-tune from its base.
    Where the tensors lie (one file or shards) does not matter.
    """
    digest = _config_digest(config)
    tensors = read_headers(path)
    streams = {file: file.open("rb") for file in sorted({tensor.file for tensor in tensors.values()})}
    try:
        for name in sorted(tensors):
            tensor = tensors[name]
            digest.update(repr((name, tensor.dtype_name, tensor.shape)).encode())
            middle = (tensor.start + tensor.end) // 2
            stream = streams[tensor.file]
            stream.seek(middle)
            digest.update(stream.read(min(_SAMPLE_BYTES, tensor.end - middle)))
    finally:
        for stream in streams.values():
            stream.close()
    return digest.hexdigest()


def shape_identity(config: Mapping[str, Any], weights: str) -> str:
    """sha256 over config.json and a sentence that says how weights without a checkpoint are made."""
    digest = _config_digest(config)
    digest.update(weights.encode())
    return digest.hexdigest()


def _config_digest(config: Mapping[str, Any]) -> "hashlib._Hash":
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
