"""Reads safetensors: what a checkpoint holds, whether its files are complete, and its tensors one by one.

Knows files and names, not architectures. Every error that headers can show is raised before a tensor is read.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.core.errors import ModelFileDamaged, ModelMissing, ModelTensorMissing, ModelTensorUnexpected

if TYPE_CHECKING:  # headers are checked without torch, which takes seconds to import
    import torch

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_SAMPLE_BYTES = 64
_NUM_SAMPLES = 64  # of tensors that should be equal
_NUM_NAMED = 5  # tensors named in an error's message; its fields have all
_INDEX_DTYPES = {"I64": ("int64", 8), "I32": ("int32", 4)}  # torch's name, bytes of an element
_FLOAT8_DTYPES = {"F8_E4M3": ("float8_e4m3fn", 1)}
_STORED_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_DTYPES = _STORED_DTYPES | _FLOAT8_DTYPES | _INDEX_DTYPES

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of one dimension of a tensor."""

    dim: int
    first: int
    count: int


class ReadBuffer:
    """Memory that chunks are read into one after the other, because touching new pages takes longer than reading."""

    def __init__(self, allocate: "Callable[[int], bytearray | memoryview]" = bytearray) -> None:
        self._allocate = allocate
        self._data = allocate(0)

    def of(self, num_bytes: int) -> memoryview:
        """`num_bytes` bytes; shares its content with earlier views."""
        if len(self._data) < num_bytes:
            self._data = self._allocate(num_bytes)
        return memoryview(self._data)[:num_bytes]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor; `dtype` is None for a kind no weight may have.

    Attributes:
        stamp: of the file when its header was read.
    """

    file: Path
    stamp: Stamp
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
        """Whether it is a float8 weight, which has a scale beside it."""
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
        """The torch dtype of a table of ids, or None if it is not one."""
        return _torch_dtype(_INDEX_DTYPES.get(self.dtype_name))

    @property
    def row_bytes(self) -> int:
        """Bytes per index of its first dimension."""
        return (self.end - self.start) // self.shape[0]

    def read_index(self) -> "torch.Tensor":
        """Read a table of ids, int64, on the CPU."""
        assert self.index_dtype is not None
        return self._read(self.index_dtype).long()

    def read(self) -> "torch.Tensor":
        """Read the whole tensor, on the CPU, as stored; for small tensors. `tensor_reader` reads weights."""
        assert self.dtype is not None
        return self._read(self.dtype)

    def _read(self, dtype: "torch.dtype") -> "torch.Tensor":
        import torch

        data = bytearray(self.end - self.start)
        descriptor = open_unchanged(self.file, self.stamp)
        try:
            read_bytes(descriptor, self.start, memoryview(data), self.file)
        finally:
            os.close(descriptor)
        if not data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(self.shape)


def open_unchanged(file: Path, stamp: Stamp) -> int:
    """Open a file whose header was read; returns the descriptor.

    Raises:
        ModelFileDamaged: it is not the same any more.
        ModelMissing: it cannot be read.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(file, error) from error
    if _stamp(descriptor) != stamp:
        os.close(descriptor)
        raise ModelFileDamaged(f"{file} was changed while it was read", path=str(file))
    return descriptor


def read_bytes(descriptor: int, begin: int, data: memoryview, file: Path) -> None:
    """Fill `data` from a file, from byte `begin` on.

    Raises:
        ModelFileDamaged: the file ends before.
        ModelMissing: it cannot be read.
    """
    while data:
        try:
            num_read = os.preadv(descriptor, [data], begin)
        except OSError as error:
            raise _unreadable(file, error) from error
        if num_read == 0:
            raise ModelFileDamaged(f"{file} shrank while it was read", path=str(file))
        begin, data = begin + num_read, data[num_read:]


def _stamp(descriptor: int) -> Stamp:
    """What changes when a file is replaced or written to; not the inode, which some network file systems make up."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def _unreadable(file: Path, error: OSError) -> ModelMissing:
    return ModelMissing(f"cannot read {file}: {error.strerror}", path=str(file))


def _torch_dtype(found: tuple[str, int] | None) -> "torch.dtype | None":
    import torch

    if found is None:
        return None
    dtype = getattr(torch, found[0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def are_alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same shape, dtype and size, and the same bytes at samples spread over them."""
    if (one.shape, one.dtype_name) != (other.shape, other.dtype_name):
        return False
    return _samples(one) == _samples(other)


def _samples(tensor: StoredTensor) -> bytes:
    num_bytes = tensor.end - tensor.start
    length = min(_SAMPLE_BYTES, num_bytes)
    descriptor = open_unchanged(tensor.file, tensor.stamp)
    try:
        found = bytearray(length * _NUM_SAMPLES)
        for index in range(_NUM_SAMPLES):
            place = tensor.start + (num_bytes - length) * index // (_NUM_SAMPLES - 1)
            read_bytes(descriptor, place, memoryview(found)[length * index :][:length], tensor.file)
        return bytes(found)
    finally:
        os.close(descriptor)


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's checkpoint, by name: of model.safetensors if it exists, else of the shards.

    Raises:
        ModelMissing: there is no safetensors file, or a shard that the index names is missing, or a file cannot be
            read.
        ModelFileDamaged: a file is truncated or not a safetensors file, or an index beside model.safetensors names
            other tensors.
        ModelTensorMissing: the index names a tensor that its shard does not hold.
        ModelTensorUnexpected: two shards hold the same tensor.
    """
    has_single, has_index = ((path / name).is_file() for name in (_SINGLE_NAME, _INDEX_NAME))
    if not has_single and not has_index:
        others = sorted(file.name for file in path.glob("*.safetensors"))
        hint = f"; others are not read: {', '.join(others[:_NUM_NAMED])}" if others else ""
        raise ModelMissing(f"{path} holds neither {_SINGLE_NAME} nor {_INDEX_NAME}{hint}", path=str(path), files=others)
    weight_map = _read_index(path / _INDEX_NAME) if has_index else {}
    if has_single and _SINGLE_NAME not in weight_map.values():
        return _single(path, weight_map)
    absent = sorted(name for name in set(weight_map.values()) if not (path / name).is_file())
    if absent:
        raise ModelMissing(f"{path} lacks {', '.join(absent)}", path=str(path), files=absent)
    shards = {name: _read_header(path / name) for name in sorted(set(weight_map.values()))}
    missing = sorted(name for name, shard in weight_map.items() if name not in shards[shard])
    if missing:
        shown = ", ".join(f"{name} ({weight_map[name]})" for name in missing[:_NUM_NAMED])
        message = f"the shards of {path} lack tensors their index names: {shown}"
        raise ModelTensorMissing(message, path=str(path), tensors=missing)
    tensors: dict[str, StoredTensor] = {}
    for shard, held in shards.items():
        doubled = sorted(tensors.keys() & held.keys())
        if doubled:
            message = f"{path}: {tensors[doubled[0]].file.name} and {shard} both hold {', '.join(doubled[:_NUM_NAMED])}"
            raise ModelTensorUnexpected(message, path=str(path), tensors=doubled)
        tensors |= held
    return tensors


def _single(path: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Tensors of model.safetensors, which transformers prefers to shards and vLLM does not: both must match."""
    found = _read_header(path / _SINGLE_NAME)
    if weight_map and weight_map.keys() != found.keys():
        named = sorted(weight_map.keys() ^ found.keys())
        message = f"{path} holds {_SINGLE_NAME} and, of other tensors, {_INDEX_NAME}: {', '.join(named[:_NUM_NAMED])}"
        message += "; remove the one that is not the model"
        raise ModelFileDamaged(message, path=str(path), tensors=named)
    return found


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = _parsed(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileDamaged(f"{file} is not JSON: {error}", path=str(file)) from error
    try:
        return {str(name): str(shard) for name, shard in index["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileDamaged(f"{file} is not an index of shards: {error!r}", path=str(file)) from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            size, _ = stamp = _stamp(stream.fileno())
            header_len = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_len > min(size - 8, _MAX_HEADER_BYTES):
                message = f"{file} is truncated or no safetensors file: {size} bytes cannot hold its header"
                raise ModelFileDamaged(message, path=str(file), size_bytes=size)
            raw = stream.read(header_len)
    except OSError as error:
        raise _unreadable(file, error) from error
    begin = 8 + header_len
    try:
        header = _parsed(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, stamp, begin, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{file}: its header is not that of a safetensors file: {error!r}"
        raise ModelFileDamaged(message, path=str(file)) from error
    promised = max((tensor.end for tensor in tensors.values()), default=begin)
    if promised != size:
        kind = "truncated" if size < promised else "longer than its header says"
        message = f"{file} is {kind}: {size} bytes where the header promises {promised}"
        raise ModelFileDamaged(message, path=str(file), size_bytes=size, promised_bytes=promised)
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            kind = "overlaps" if tensor.start < end else "does not begin at the end of"
            message = f"{file}: {name} {kind} the tensor before it"
            raise ModelFileDamaged(message, path=str(file), tensor=name)
        end = tensor.end
    return tensors


def _parsed(raw: str | bytes) -> Any:
    """JSON whose keys are unique.

    Raises:
        ValueError: it is not.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name in found if [key for key, _ in pairs].count(name) > 1)
            raise ValueError(f"{twice} is there twice")
        return found

    return json.loads(raw, object_pairs_hook=unique)


def _stored(file: Path, stamp: Stamp, begin: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{name} has shape {list(shape)} and data_offsets {[start, end]}")
    tensor = StoredTensor(file, stamp, str(entry["dtype"]), shape, begin + start, begin + end)
    _, item_bytes = _DTYPES.get(tensor.dtype_name, ("", 0))
    if start > end or (item_bytes and prod(shape) * item_bytes != end - start):
        raise ValueError(f"{name} has {end - start} bytes for {tensor.dtype_name} of shape {list(shape)}")
    return tensor


def checkpoint_identity(path: Path, config: Mapping[str, Any]) -> str:
    """sha256 over config.json, every tensor's name, dtype and shape, and 64 bytes from the middle of each.

    Two checkpoints of one architecture have equal headers, so headers alone would not tell a fine-tune from its base.
    Which files hold the tensors (one file or shards) does not matter.
    """
    digest = _config_digest(config)
    tensors = read_headers(path)
    descriptors: dict[Path, int] = {}
    try:
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor.file not in descriptors:
                descriptors[tensor.file] = open_unchanged(tensor.file, tensor.stamp)
            digest.update(repr((name, tensor.dtype_name, tensor.shape)).encode())
            middle = (tensor.start + tensor.end) // 2
            sample = bytearray(min(_SAMPLE_BYTES, tensor.end - middle))
            read_bytes(descriptors[tensor.file], middle, memoryview(sample), tensor.file)
            digest.update(sample)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return digest.hexdigest()


def shape_identity(config: Mapping[str, Any], weights: str) -> str:
    """sha256 over config.json and a sentence about how weights without a checkpoint are generated."""
    digest = _config_digest(config)
    digest.update(weights.encode())
    return digest.hexdigest()


def _config_digest(config: Mapping[str, Any]) -> "hashlib._Hash":
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
