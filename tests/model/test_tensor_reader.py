"""Chunks of tensors, read by threads: whichever part, dtype and scale, it is what torch makes of the whole."""

import gc
import json
import os
import re
import shutil
import threading
import weakref
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ModelFileDamaged
from baton.core.numerics import Numerics
from baton.model.checkpoint import tensor_reader
from baton.model.checkpoint.tensor_reader import CHUNK_BYTES, NUM_READERS, TensorRead, TensorReader
from baton.model.checkpoint.weights import Cut, read_bytes, read_headers
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.parallel import ShardPlan
from baton.model.tensor_spec import tensor_spec
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.fp8_checkpoints import LAYOUTS, SIZES, write_float8
from baton.tests.model.test_float8_checkpoints import plain_of, weights_of

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
SHAPE = (37, 24)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
CUTS = [None, Cut(0, 11, 19), Cut(0, 36, 1), Cut(1, 8, 16), Cut(1, 23, 1)]
MIB = 1 << 20


class Rank:
    """A rank whose part is loaded, and not used."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_sum(self, x):
        raise AssertionError

    all_gather = all_sum


def stored(path, tensor, name="one"):
    """The tensor between two others of another size, so that its place in the file is no round number."""
    beside = {"a": torch.ones(3, dtype=torch.uint8), name: tensor, "z": torch.ones(5)}
    save_file(beside, path / "model.safetensors")
    return read_headers(path)[name]


def part_of(tensor, cut):
    return tensor if cut is None else tensor.narrow(cut.dim, cut.first, cut.count)


def drawn(dtype, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


@pytest.mark.long
@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 20], ids="{} bytes a chunk".format)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_in_chunks_of_any_size_is_that_of_the_whole(dtype, cut, chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", chunk_bytes)
    whole = drawn(dtype, *SHAPE)
    tensor = stored(tmp_path, whole)
    wanted = part_of(whole, cut)
    for target_dtype in (dtype, torch.float32):
        targets = torch.full((2, *wanted.shape), -9.0, dtype=torch.float32).to(target_dtype)
        with TensorReader(CPU) as reader:
            reader.fill([TensorRead(name="t", stored=tensor, target=targets[1], cut=cut)])
        assert torch.equal(targets[1].double(), wanted.to(target_dtype).double())
        assert (targets[0].double() == -9).all(), "what is before the target is not written to"


@pytest.mark.parametrize("cut", [None, Cut(0, 5, 3)], ids=str)
def test_vectors_and_scales_of_rows(cut, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 3)
    whole, factors = drawn(torch.float8_e4m3fn, 17), drawn(torch.float32, 17)
    wanted = part_of(whole.float() * factors, cut)
    target = torch.empty_like(wanted)
    part = TensorRead(
        name="t", stored=stored(tmp_path, whole), target=target, cut=cut, scale=lambda begin, end: factors[begin:end]
    )
    with TensorReader(CPU) as reader:
        reader.fill([part])
    assert torch.equal(target, wanted)


def test_a_target_whose_rows_are_apart_is_no_silent_copy(tmp_path):
    tensor = stored(tmp_path, drawn(torch.float32, *SHAPE))
    with TensorReader(CPU) as reader, pytest.raises(RuntimeError, match="view"):
        reader.fill([TensorRead(name="t", stored=tensor, target=torch.empty(24, 37).T)])


def test_chunks_are_read_at_the_same_time(tmp_path, monkeypatch):
    """Each read waits for all the other threads': one after the other they would never meet."""
    together = threading.Barrier(NUM_READERS, timeout=20)
    read_bytes = tensor_reader.read_bytes

    def meet(*arguments):
        together.wait()
        read_bytes(*arguments)

    monkeypatch.setattr(tensor_reader, "read_bytes", meet)
    whole = drawn(torch.float32, NUM_READERS, 6)
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 24)
    target = torch.empty(NUM_READERS, 6)
    with TensorReader(CPU) as reader:
        reader.fill([TensorRead(name="t", stored=stored(tmp_path, whole), target=target)])
    assert torch.equal(target, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_no_row_of_another_and_its_columns_once(rank, tiny_checkpoint, monkeypatch):
    path, read, num_bytes = tiny_checkpoint(tie=False, kind="qwen3"), tensor_reader.read_bytes, []

    def counted(descriptor, begin, data, file):
        num_bytes.append(len(data))
        read(descriptor, begin, data, file)

    monkeypatch.setattr(tensor_reader, "read_bytes", counted)
    model = load(path, communicator=Rank(rank, 2))
    plan, wanted = ShardPlan(model.config, Rank(rank, 2), Numerics.DEFAULT), 0
    for name, shape in tensor_spec(model.config, with_mtp=False).required.items():
        cut = plan.cut(name)
        wanted += 4 * prod((cut.count, *shape[1:]) if cut is not None and cut.dim == 0 else shape)
    assert sum(num_bytes) == wanted


def load(path, dtype=torch.float32, **options):
    return load_model(path, dtype=dtype, device=CPU, numerics=Numerics.DEFAULT, with_mtp=False, **options)


def test_a_file_that_is_no_more_the_one_whose_header_was_read_is_not_opened(tmp_path):
    tensor = stored(tmp_path, torch.zeros(*SHAPE))
    stored(tmp_path, torch.ones(*SHAPE))
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))  # both writes may be within one tick of the file system's clock
    with TensorReader(CPU) as reader, pytest.raises(ModelFileDamaged, match=r"model\.safetensors was changed while"):
        reader.fill([TensorRead(name="t", stored=tensor, target=torch.empty(*SHAPE))])
    with pytest.raises(ModelFileDamaged, match=r"model\.safetensors was changed while"):
        tensor.read()


def test_a_file_that_ends_too_soon_is_no_tensor_of_zeros(tmp_path):
    tensor = stored(tmp_path, torch.ones(*SHAPE))
    with tensor.file.open("rb") as file:
        os.truncate(tensor.file, tensor.end - 1)
        with pytest.raises(ModelFileDamaged, match=r"model\.safetensors shrank while it was read"):
            read_bytes(file.fileno(), tensor.start, memoryview(bytearray(tensor.end - tensor.start)), tensor.file)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("qwen3-fp8", torch.float64), ("compressed channel", torch.float32), ("deepseek", torch.float32)],
)
def test_chunks_change_no_bit_of_a_float8_checkpoint(layout, dtype, size, tmp_path, monkeypatch):
    """Chunks begin and end inside of blocks that share a scale."""
    path, _ = write_float8(tmp_path, LAYOUTS[layout], with_mtp=False)
    group = Rank(size - 1, size)
    wanted = [(place, plain_of(weight)) for place, weight in weights_of(load(path, dtype, communicator=group))]
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 37 * 8 * SIZES["hidden_size"])
    found = dict(weights_of(load(path, dtype, communicator=group)))
    for place, tensors in wanted:
        for one, other in zip(tensors, plain_of(found.pop(place)), strict=True):
            assert torch.equal(one, other), place
    assert not found


def write_hollow(path, shapes, dtype="F32", item_bytes=4):
    """Tensors of zeros that take no disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + item_bytes * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def resident(key):
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def host_bytes():
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.long
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_the_host_needs_a_chunk_for_each_thread_beside_the_tensors(size, dtype, tmp_path, monkeypatch):
    """By the kernel's own count of the process's memory. Whole tensors on their way would be 64 MiB and more."""
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", MIB)
    path = write_checkpoint(tmp_path, kind="llama", layers=1, with_mtp=False)
    values = json.loads((path / "config.json").read_text()) | {"hidden_size": 1024, "intermediate_size": 16384}
    (path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(path, made_weights="x")
    shapes = tensor_spec(config, with_mtp=False).required
    write_hollow(path, shapes)
    largest = 4 * max(prod(shape) for shape in shapes.values())
    assert largest == 64 * MIB
    group = {} if size == 1 else {"communicator": Rank(0, size)}
    gc.collect()
    held, before = host_bytes(), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    model = load(path, dtype, **group)
    beside = resident("VmHWM") - before - (host_bytes() - held)
    assert model.config.num_layers == 1
    assert beside <= NUM_READERS * MIB + 24 * MIB
    assert NUM_READERS * CHUNK_BYTES <= 256 * MIB, "that is the promise, whatever the largest tensor"


def test_numbers_that_are_widened_and_scaled_take_no_more_of_the_host(tmp_path, monkeypatch):
    """A number and its scale are float32 each, on the way to a tensor of any dtype."""
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 1024)
    read, tensor = [], stored(tmp_path, torch.zeros(*SHAPE).to(torch.float8_e4m3fn))

    def scale(begin, end):
        read.append((begin, end))
        return torch.ones(end - begin, SHAPE[1])

    with TensorReader(CPU) as reader:
        reader.fill(
            [TensorRead(name="t", stored=tensor, target=torch.empty(*SHAPE, dtype=torch.bfloat16), scale=scale)]
        )
    assert sum(end - begin for begin, end in read) == SHAPE[0]
    assert max(end - begin for begin, end in read) * SHAPE[1] * 2 * 4 <= 1024


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.long
def test_a_tensor_that_its_caller_drops_is_not_kept(target_dtype, tmp_path):
    """A weight that is quantized as it is read is wide only meanwhile: kept until the end, all would be."""
    tensor, target = stored(tmp_path, drawn(torch.float32, *SHAPE)), torch.empty(*SHAPE, dtype=target_dtype)
    with TensorReader(CPU) as reader:
        reader.fill([TensorRead(name="t", stored=tensor, target=target)])
        kept = weakref.ref(target)
        del target
        gc.collect()
        assert kept() is None
        reader.require_sound()


WRONG = [float("nan"), -float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.long
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype, tmp_path, monkeypatch):
    """In any chunk, as it is stored or converted or scaled; what a rank does not read is not its."""
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 200)
    for at, (row, column) in enumerate([(0, 0), (11, 8), (20, 23), (36, 0)]):
        for wrong in WRONG[: 2 if dtype is torch.float8_e4m3fn else 4]:
            whole = drawn(torch.float64, *SHAPE)
            whole[row, column] = wrong
            tensor = stored(tmp_path, whole.to(dtype), name="model.w")
            for cut in CUTS:
                for target_dtype in (dtype, torch.bfloat16):
                    part = part_of(whole, cut)
                    target = torch.empty(*part.shape, dtype=target_dtype)
                    scale = (lambda begin, end: torch.full((end - begin, 1), 2.0)) if at == 1 and cut is None else None
                    with TensorReader(CPU) as reader:
                        reader.fill([TensorRead(name="model.w", stored=tensor, target=target, cut=cut, scale=scale)])
                        if torch.isfinite(part).all():
                            reader.require_sound()
                            continue
                        with pytest.raises(ModelFileDamaged, match=r"model\.w holds a NaN or an infinity, in model\."):
                            reader.require_sound()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.input_layernorm.weight"])
def test_a_checkpoint_with_one_nan_is_not_served(name, tiny_checkpoint, tmp_path):
    """One row of a head makes one logit wrong and no hidden state: nothing behind it would notice."""
    path = shutil.copytree(tiny_checkpoint(tie=False, kind="qwen3"), tmp_path / "model")
    arguments = {"dtype": torch.float32, "device": CPU, "numerics": Numerics.DEFAULT, "with_mtp": False}
    load_model(path, **arguments)
    file = path / "model.safetensors"
    tensors = {**load_file(file)}
    tensors[name].view(-1)[5] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ModelFileDamaged, match=f"{re.escape(name)} holds a NaN or an infinity, in model.safetensors"):
        load_model(path, **arguments)
