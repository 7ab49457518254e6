"""How fast a checkpoint is loaded, beside a plain read of the same files, and what the host needs meanwhile.

    python -m baton.bench.loading --json                     # 4 GiB on this machine's CPU, or its GPU
    python -m baton.bench.loading --json --against FOLDER    # and by another tree, whose namespace is FOLDER

It writes bfloat16 shards in the shape of Qwen3-8B, with a small vocabulary and as many layers as fill them. Every
measurement has a process of its own, in turns: a plain read of all files into a reused buffer of 16 MiB, this tree's
reader into reused memory (the rate at which it can feed a device, or a CPU whose pages have been touched), and the
loads of `LOADS`. Imports and GPU initialization are not timed. The page cache is warm, unless `--cold` evicts the files
before each measurement. `gb_per_s` counts the bytes of the files that the case needs, `of_plain` is its ratio to the
plain read of the same round, and `beside_mib` is the peak of resident memory above that before the load and the tensors
that remain.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from baton.bench.model_shapes import write_shape
from baton.bench.result import result, spread
from baton.core.numerics import Numerics
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.parallel import Communicator
from baton.model.tensor_spec import tensor_spec

SHAPE = "qwen3-8b"
VOCAB_SIZE = 32_768
SHARD_BYTES = 1 << 30
PLAIN_BYTES = 16 << 20
# Ranks of the group, of which rank 0 loads; dtype of the model.
LOADS = {"whole": (1, "bfloat16"), "whole, converted": (1, "float32"), "half": (2, "bfloat16")}
_MIB = 1 << 20
_LIMIT_S = 900


class _Rank:
    """Rank 0 of a group that computes nothing."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]


def write_shards(path: Path, num_bytes: int, *, shard_bytes: int = SHARD_BYTES, **changes: Any) -> int:
    """Write a checkpoint of about `num_bytes`; return the number of bytes written."""
    sizes = {"vocab_size": VOCAB_SIZE, **changes}
    outside, layer = (_num_bytes(path, num_hidden_layers=1, **sizes)[at] for at in (0, 1))
    write_shape(SHAPE, path, num_hidden_layers=max(1, round((num_bytes - outside) / layer)), **sizes)
    shapes = tensor_spec(ModelConfig.from_directory(path, made_weights="bench"), with_mtp=False).required
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    free = shard_bytes
    for name, shape in shapes.items():
        if free < 2 * prod(shape) and shards[-1]:
            shards, free = [*shards, {}], shard_bytes
        shards[-1][name] = shape
        free -= 2 * prod(shape)
    weight_map: dict[str, str] = {}
    for at, shard in enumerate(shards):
        file = path / f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        _write_shard(file, shard)
        weight_map |= dict.fromkeys(shard, file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(2 * prod(shape) for shape in shapes.values())


def _num_bytes(path: Path, **changes: Any) -> tuple[int, int]:
    """Bytes outside layers, and of one layer."""
    config = ModelConfig.from_directory(write_shape(SHAPE, path, **changes), made_weights="bench")
    sizes = {name: 2 * prod(shape) for name, shape in tensor_spec(config, with_mtp=False).required.items()}
    of_layer = sum(size for name, size in sizes.items() if ".layers." in name)
    return sum(sizes.values()) - of_layer, of_layer


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    block = bytes(byte & 0xBF for byte in os.urandom(_MIB))  # finite for any float with 8 exponent bits
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, end, _MIB):
            stream.write(block[: end - at])
        stream.flush()
        os.fsync(stream.fileno())  # pages that are not yet written would stay in the cache


def read_plain(files: Sequence[Path]) -> float:
    """Time to read all files into one piece of memory, in seconds."""
    buffer = bytearray(PLAIN_BYTES)
    begin_s = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - begin_s


def read_kept(path: Path) -> dict[str, float]:
    """Run the reader over all tensors, each into the same CPU memory, whose pages were touched before."""
    from baton.model.checkpoint.tensor_reader import (  # which a tree to compare with may not have
        TensorRead,
        TensorReader,
    )

    headers = read_headers(path)
    kept = torch.zeros(max(stored.end - stored.start for stored in headers.values()), dtype=torch.uint8)
    parts = []
    for name, stored in headers.items():
        assert stored.dtype is not None
        parts.append(
            TensorRead(
                stored=stored, name=name, target=kept[: stored.end - stored.start].view(stored.dtype).view(stored.shape)
            )
        )
    begin_s = time.perf_counter()
    with TensorReader(torch.device("cpu")) as reader:
        for part in parts:
            reader.fill([part])
        reader.require_sound()
    return {"seconds": time.perf_counter() - begin_s, "bytes": sum(part.target.nbytes for part in parts)}


def load(path: Path, case: str, device: torch.device) -> dict[str, float]:
    """Load a case once: seconds, bytes that it needs, and MiB of host memory beside tensors."""
    torch.set_num_threads(1)  # the workers' default
    size, dtype = LOADS[case]
    if device.type == "cuda":
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)
    held, before = _host_tensor_bytes(), _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin_s = time.perf_counter()
    model = load_model(
        path,
        dtype=getattr(torch, dtype),
        device=device,
        numerics=Numerics.DEFAULT,
        with_mtp=False,
        communicator=None if size == 1 else cast(Communicator, _Rank(size)),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin_s
    beside = _resident_bytes("VmHWM") - before - (_host_tensor_bytes() - held)
    num_elements = sum(prod(shape) for shape in _shapes(model.config, size).values())
    return {"seconds": seconds, "bytes": 2 * num_elements, "beside_mib": beside / _MIB}


def _shapes(config: ModelConfig, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of rank 0's parts."""
    from baton.model.parallel import ShardPlan

    plan = ShardPlan(config, cast(Communicator, _Rank(size)), Numerics.DEFAULT)
    shapes = tensor_spec(config, with_mtp=False).required
    for name, shape in shapes.items():
        cut = plan.cut(name)
        if cut is not None:
            shapes[name] = (*shape[: cut.dim], cut.count, *shape[cut.dim + 1 :])
    return shapes


def _host_tensor_bytes() -> int:
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    found = [item for item in tensors if item.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


def _resident_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])


def _once(path: Path, case: str, device: str) -> dict[str, float]:
    files = sorted(path.glob("*.safetensors"))
    if case == "plain":
        return {"seconds": read_plain(files), "bytes": sum(file.stat().st_size for file in files)}
    if case == "kept":
        return read_kept(path)
    return load(path, case, torch.device(device))


def _in_process(path: Path, case: str, device: str, folder: str | None, *, is_cold: bool) -> dict[str, float]:
    for file in path.glob("*.safetensors") if is_cold else ():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    environment = dict(os.environ) | ({} if folder is None else {"PYTHONPATH": folder})
    command = [sys.executable, "-P", __file__, "--once", case, "--directory", str(path), "--device", device]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def bench_loading(
    path: Path, device: str, *, against: str | None = None, num_rounds: int = 5, is_cold: bool = False
) -> dict[str, Any]:
    """Measure every case of a directory, by this tree and optionally by another; all take turns in each round."""
    trees = {"": None} if against is None else {"before": against, "after": None}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    plain: list[dict[str, float]] = []
    _in_process(path, "plain", device, None, is_cold=False)
    for _ in range(num_rounds):
        plain.append(_in_process(path, "plain", device, None, is_cold=is_cold))
        found.setdefault(("kept", ""), []).append(_in_process(path, "kept", device, None, is_cold=is_cold))
        for case in LOADS:
            for tree, folder in trees.items():
                one = _in_process(path, case, device, folder, is_cold=is_cold)
                found.setdefault((case, tree), []).append(one)
    rows = [{"case": "plain read", **spread("gb_per_s", [_rate(one) for one in plain])}]
    for (case, tree), rounds in found.items():
        rows.append(
            {
                "case": case,
                **({"tree": tree} if tree else {}),
                **spread("gb_per_s", [_rate(one) for one in rounds]),
                **spread("of_plain", [_rate(one) / _rate(read) for one, read in zip(rounds, plain, strict=True)]),
                **spread("beside_mib", [one.get("beside_mib") for one in rounds]),
            }
        )
    on = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    num_bytes = statistics.median(one["bytes"] for one in plain)
    return result("loading", rows, device=on, file_gb=round(num_bytes / 1e9, 3), is_cold=is_cold)


def _rate(one: dict[str, float]) -> float:
    return one["bytes"] / one["seconds"] / 1e9


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--gib", type=float, default=4.0, help="of the checkpoint that is written")
    parser.add_argument("--folder", type=Path, help="where it is written for the time  [the temporary folder]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="empty the page cache of the files before each measurement")
    parser.add_argument("--against", metavar="FOLDER", help="PYTHONPATH of another tree, to compare with")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(_once(options.directory, options.once, options.device)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder)
        write_shards(path, round(options.gib * (1 << 30)))
        limits = {"against": options.against, "num_rounds": options.rounds, "is_cold": options.cold}
        data = bench_loading(path, options.device, **limits)
    if options.json:
        print(json.dumps(data))
        return
    for row in data["rows"]:
        of_plain = f"{row['of_plain']:.2f} of plain" if "of_plain" in row else ""
        beside = f"{row['beside_mib']:7.0f} MiB beside" if "beside_mib" in row else ""
        print(f"{row['case']:18} {row.get('tree', ''):7} {row['gb_per_s']:6.2f} GB/s  {of_plain} {beside}")


if __name__ == "__main__":
    main()
