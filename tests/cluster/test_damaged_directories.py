"""Faults drawn over a float8 checkpoint in shards, with an MTP and a draft head: the loader names each, with its file
or tensor, before a tensor is read where headers tell, and `baton check` says the same sentence.
"""

import json
import os
import random
import shutil
import stat
import struct
import tempfile
from pathlib import Path

import pytest
import torch

from baton.cluster.checkpoint import judge
from baton.core.config import ServeConfig
from baton.core.errors import (
    BatonError,
    ModelFileDamaged,
    ModelMissing,
    ModelTensorMisshapen,
    ModelTensorMissing,
    ModelTensorUnexpected,
    ModelUnsupported,
)
from baton.core.numerics import Numerics
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_tokenizer
from baton.tests.model.fp8_checkpoints import LAYOUTS, rewrite_config, write_float8

pytestmark = pytest.mark.fast
NUM_DRAWS = 3
NUM_SHARDS = 3
DRAFTED = (3, 5, 17, 41, 60, 95)
INDEX = "model.safetensors.index.json"
VOCAB_SIZE = 96


def read(file):
    """Dtype, shape and bytes of each tensor of a shard."""
    raw = file.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    spans = {name: [begin + at for at in entry["data_offsets"]] for name, entry in header.items()}
    return {name: [header[name]["dtype"], header[name]["shape"], raw[a:b]] for name, (a, b) in spans.items()}


def header_of(tensors):
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return header


def write(file, tensors, header=None):
    """A shard of these tensors; `header`: another than theirs, as a mapping or as text."""
    header = header_of(tensors) if header is None else header
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def write_index(path):
    files = sorted(path.glob("*.safetensors"))
    weight_map = {name: file.name for file in files for name in read(file)}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The checkpoint before anything happens to it."""
    path, _ = write_float8(
        tmp_path_factory.mktemp("sound"),
        LAYOUTS["qwen3-fp8"],
        hidden_size=128,
        num_heads=2,
        num_kv_heads=1,
        overrides={"intermediate_size": 256},
    )
    tensors = read(path / "model.safetensors")
    dtype, (_, width), head = tensors["lm_head.weight"]
    row_bytes = len(head) // VOCAB_SIZE
    rows = b"".join(head[token * row_bytes :][:row_bytes] for token in DRAFTED)
    tensors["mtp.lm_head.weight"] = [dtype, [len(DRAFTED), width], rows]
    tensors["mtp.d2t"] = ["I64", [len(DRAFTED)], struct.pack(f"<{len(DRAFTED)}q", *DRAFTED)]
    rewrite_config(path, draft_vocab_size=len(DRAFTED), d2t_form="absolute")
    names = sorted(tensors)
    for at in range(NUM_SHARDS):  # scales and weights of a layer lie apart
        file = path / f"model-{at + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        write(file, {name: tensors[name] for name in names[at::NUM_SHARDS]})
    (path / "model.safetensors").unlink()
    write_index(path)
    write_tokenizer(path, VOCAB_SIZE)
    load(path)
    assert not judged(path)
    return path


def load(path, **options):
    return load_model(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        with_mtp=True,
        **options,
    )


def judged(path):
    values = {"model": str(path), "device": "cpu", "dtype": "float32", "speculative_method": "mtp"}
    return judge(ServeConfig.from_mapping(values)).errors


class Draw:
    """A copy of the directory, and what is drawn of it."""

    def __init__(self, path, seed):
        self.path, self.rng = path, random.Random(seed)

    def file(self):
        return self.rng.choice(sorted(self.path.glob("*.safetensors")))

    def tensor(self, ends=".weight", dtype=None):
        """A shard, its tensors, and the name of one."""
        files = sorted(self.path.glob("*.safetensors"))
        found = [
            (file, tensors, name)
            for file, tensors in ((file, read(file)) for file in files)
            for name, (kind, _, _) in tensors.items()
            if name.endswith(ends) and dtype in (None, kind)
        ]
        return self.rng.choice(found)

    def config(self, **changes):
        rewrite_config(self.path, **changes)


def truncated_data(draw):
    file = draw.file()
    num_bytes = file.stat().st_size
    header_len = int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, draw.rng.randrange(8 + header_len, num_bytes))
    return ModelFileDamaged, [file.name, "truncated"]


def truncated_header(draw):
    file = draw.file()
    header_len = int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, draw.rng.randrange(0, 8 + header_len))
    return ModelFileDamaged, [file.name, "truncated"]


def longer(draw):
    file = draw.file()
    file.write_bytes(file.read_bytes() + bytes(draw.rng.randrange(1, 5000)))
    return ModelFileDamaged, [file.name, "longer than its header says"]


def absurd_header_len(draw):
    file = draw.file()
    raw = file.read_bytes()
    absurd = draw.rng.choice([len(raw) - 7, 1 << 40, (1 << 64) - 1, draw.rng.randrange(len(raw), 1 << 63)])
    file.write_bytes(struct.pack("<Q", absurd) + raw[8:])
    return ModelFileDamaged, [file.name, "cannot hold its header"]


def junk_in_header(draw):
    file = draw.file()
    raw = bytearray(file.read_bytes())
    header_len = int.from_bytes(raw[:8], "little")
    at = draw.rng.choice([at for at in range(8, 8 + header_len) if raw[at] in b'{}[]":,'])
    raw[at] = draw.rng.choice(b"\x00\xff")
    file.write_bytes(raw)
    return ModelFileDamaged, [file.name, "its header"]


def tensor_twice_in_a_header(draw):
    file, tensors, name = draw.tensor()
    header = header_of(tensors)
    again = json.dumps({name: header[name]})[1:]
    write(file, tensors, json.dumps(header)[:-1] + ", " + again)
    return ModelFileDamaged, [file.name, name, "is there twice"]


def negative_numbers(draw):
    file, tensors, name = draw.tensor(dtype="F8_E4M3")
    header = header_of(tensors)
    rows, columns = header[name]["shape"]
    begin, end = header[name]["data_offsets"]
    key, value = draw.rng.choice(
        [("shape", [-rows, -columns]), ("data_offsets", [begin - (1 << 40), end]), ("shape", [float(rows), columns])]
    )
    header[name][key] = value
    write(file, tensors, header)
    return ModelFileDamaged, [file.name, name]


def overlapping(draw):
    file, tensors, name = draw.tensor("_layernorm.weight")
    same = [other for other, value in tensors.items() if other != name and value[:2] == tensors[name][:2]]
    header, other = header_of(tensors), draw.rng.choice([other for other in same if other != list(tensors)[-1]])
    header[other]["data_offsets"] = header[name]["data_offsets"]
    write(file, tensors, header)
    return ModelFileDamaged, [file.name, "the tensor before it"]


def renamed_shard(draw):
    file = draw.file()
    file.rename(file.with_name("x" + file.name))
    return ModelMissing, [f"lacks {file.name}"]


def missing_shard(draw):
    file = draw.file()
    file.unlink()
    if draw.rng.random() < 0.5:
        file.mkdir()
    return ModelMissing, [f"lacks {file.name}"]


def exchanged_shards(draw):
    one, other = draw.rng.sample(sorted(draw.path.glob("*.safetensors")), 2)
    one.rename(draw.path / "between")
    other.rename(one)
    (draw.path / "between").rename(other)
    return ModelTensorMissing, ["their index names", one.name, other.name]


def index_of_a_tensor_that_is_not_there(draw):
    file, _, name = draw.tensor()
    name = name.replace("model.", "models.")
    index = json.loads((draw.path / INDEX).read_text())
    index["weight_map"][name] = file.name
    (draw.path / INDEX).write_text(json.dumps(index))
    return ModelTensorMissing, [name, file.name]


def index_that_names_another_shard(draw):
    file, _, name = draw.tensor()
    other = draw.rng.choice(sorted({one.name for one in draw.path.glob("*.safetensors")} - {file.name}))
    index = json.loads((draw.path / INDEX).read_text())
    index["weight_map"][name] = other
    (draw.path / INDEX).write_text(json.dumps(index))
    return ModelTensorMissing, [name, other]


def half_written_json(draw):
    file = draw.path / draw.rng.choice([INDEX, "config.json"])
    os.truncate(file, draw.rng.randrange(0, file.stat().st_size - 2))
    return ModelFileDamaged, [file.name]


def tensor_in_two_shards(draw, ends=".weight"):
    file, tensors, name = draw.tensor(ends)
    other = draw.rng.choice([one for one in sorted(draw.path.glob("*.safetensors")) if one != file])
    write(other, read(other) | {name: tensors[name]})
    return ModelTensorUnexpected, [file.name, other.name, name]


def scale_in_two_shards(draw):
    return tensor_in_two_shards(draw, "_scale_inv")


def _without(draw, ends, **options):
    file, tensors, name = draw.tensor(ends, **options)
    del tensors[name]
    write(file, tensors)
    write_index(draw.path)
    return name


def weight_that_is_missing(draw):
    return ModelTensorMissing, [_without(draw, "norm.weight")]


def head_without_a_tensor(draw):
    name = _without(draw, draw.rng.choice(["mtp.d2t", "mtp.lm_head.weight", "mtp.norm.weight"]))
    return ModelTensorMissing, [name, "--speculative-method none would serve"]


def scale_that_is_missing(draw):
    name = _without(draw, "_scale_inv")
    return ModelTensorMissing, [f"{name.removesuffix('_scale_inv')} is float8", f"lacks its scale {name}"]


def scale_without_its_weight(draw):
    name = _without(draw, ".weight", dtype="F8_E4M3")
    return ModelTensorMissing, [f"holds {name}_scale_inv, and lacks {name}"]


def scale_of_a_wide_weight(draw):
    file, tensors, name = draw.tensor(dtype="F8_E4M3")
    _, shape, data = tensors[name]
    tensors[name] = ["F32", shape, bytes(4 * len(data))]
    write(file, tensors)
    return ModelTensorUnexpected, [f"{name}_scale_inv is the scale of {name}"]


def scale_of_nothing(draw):
    file, tensors, name = draw.tensor("_scale_inv")
    name = name.replace("_proj.", "_projection.").replace("mtp.fc.", "mtp.fd.")
    write(file, tensors | {name: ["F32", [1], bytes(4)]})
    return ModelTensorUnexpected, [name]


def scale_of_another_shape(draw):
    file, tensors, name = draw.tensor("_scale_inv")
    dtype, shape, data = tensors[name]
    tensors[name] = [dtype, [*shape, 1], data]
    write(file, tensors)
    return ModelTensorMisshapen, [name]


def unknown_tensor(draw):
    file, tensors, name = draw.tensor()
    name = name.replace(".weight", draw.rng.choice([".bias2", ".lora_A.weight", ".qweight", ".qzeros"]))
    write(file, tensors | {name: ["F32", [4], bytes(16)]})
    return ModelTensorUnexpected, [name, "no place"]


def another_shape(draw):
    file, tensors, name = draw.tensor("norm.weight")
    dtype, (length,), data = tensors[name]
    tensors[name] = [dtype, draw.rng.choice([[2, length // 2], [length, 1], [1, length]]), data]
    write(file, tensors)
    return ModelTensorMisshapen, [name, f"implies [{length}]"]


def another_length(draw):
    file, tensors, name = draw.tensor("layernorm.weight")
    dtype, (length,), data = tensors[name]
    tensors[name] = [dtype, [length // 2], data[: len(data) // 2]]
    write(file, tensors)
    return ModelTensorMisshapen, [name, f"[{length // 2}]"]


def shape_that_the_bytes_are_not(draw):
    file, tensors, name = draw.tensor()
    header = header_of(tensors)
    header[name]["shape"][0] += draw.rng.choice([-1, 1, 1000])
    write(file, tensors, header)
    return ModelFileDamaged, [file.name, name]


def another_dtype(draw):
    file, tensors, name = draw.tensor("norm.weight", dtype="F32")
    tensors[name][0] = draw.rng.choice(["I32", "U32"])
    write(file, tensors)
    return ModelTensorMisshapen, [name, "weights must be"]


def table_of_floats(draw):
    file, tensors, name = draw.tensor("mtp.d2t")
    tensors[name][0] = draw.rng.choice(["F64", "U64"])
    write(file, tensors)
    return ModelTensorMisshapen, [name, "ids must be"]


def unknown_quantization_key(draw):
    config = dict(LAYOUTS["qwen3-fp8"].config)
    key, value = draw.rng.choice([("rotation", "hadamard"), ("zero_point", True), ("desc_act", 1), ("lm_head", "q")])
    draw.config(quantization_config=config | {key: value})
    return ModelUnsupported, [f"quantization_config.{key} = {value!r}"]


def config_value_of_the_wrong_kind(draw):
    key = draw.rng.choice(["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "num_attention_heads"])
    draw.config(**{key: draw.rng.choice(["many", [1], {"a": 1}])})
    return ModelFileDamaged, ["config.json holds a value of the wrong kind"]


SEEN_IN_HEADERS = [
    truncated_data, truncated_header, longer, absurd_header_len, junk_in_header, tensor_twice_in_a_header,
    negative_numbers, overlapping, renamed_shard, missing_shard, exchanged_shards, index_of_a_tensor_that_is_not_there,
    index_that_names_another_shard, half_written_json, tensor_in_two_shards, scale_in_two_shards,
    weight_that_is_missing, head_without_a_tensor, scale_that_is_missing, scale_without_its_weight,
    scale_of_a_wide_weight, scale_of_nothing, scale_of_another_shape, unknown_tensor, another_shape, another_length,
    shape_that_the_bytes_are_not, another_dtype, table_of_floats, unknown_quantization_key,
    config_value_of_the_wrong_kind,
]  # fmt: skip


def drawn(faults):
    return [pytest.param(fault, seed, id=f"{fault.__name__}-{seed}") for fault in faults for seed in range(NUM_DRAWS)]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "seed"), drawn(SEEN_IN_HEADERS))
def test_what_headers_tell_is_refused_before_a_tensor_is_read_and_checked_alike(fault, seed, sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "model")
    error, words = fault(Draw(path, f"{fault.__name__} {seed}"))
    with pytest.raises(BatonError) as caught:
        load(path, on_progress=lambda *_: pytest.fail("a tensor was read"))
    assert type(caught.value) is error
    assert [word for word in words if word not in caught.value.message] == []
    assert (type(judged(path)[0]), judged(path)[0].message) == (error, caught.value.message)


def no_scale(draw):
    file, tensors, name = draw.tensor("_scale_inv")
    dtype, shape, data = tensors[name]
    bad = draw.rng.choice([0x7FC0, 0xFFC0, 0x7F80, 0xBF80])  # bfloat16: NaN, -NaN, infinity, -1
    at = 2 * draw.rng.randrange(len(data) // 2)
    tensors[name] = [dtype, shape, data[:at] + struct.pack("<H", bad) + data[at + 2 :]]
    write(file, tensors)
    return ModelUnsupported, [name, "no scale"]


def table_of_other_tokens(draw):
    file, tensors, name = draw.tensor("mtp.d2t")
    ids = list(DRAFTED)
    ids[draw.rng.randrange(len(ids))] = draw.rng.choice([-1, VOCAB_SIZE, 1 << 40, DRAFTED[0] + 2])
    ids[0] = ids[1]
    tensors[name][2] = struct.pack(f"<{len(ids)}q", *ids)
    write(file, tensors)
    return ModelUnsupported, [name]


@pytest.mark.parametrize(("fault", "seed"), drawn([no_scale, table_of_other_tokens]))
def test_what_only_tensors_tell_ends_the_load(fault, seed, sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "model")
    error, words = fault(Draw(path, f"{fault.__name__} {seed}"))
    with pytest.raises(BatonError) as caught:
        load(path)
    assert type(caught.value) is error
    assert [word for word in words if word not in caught.value.message] == []
    assert judged(path) == []


def replaced(file, path):
    shutil.copyfile(file, path / "new")
    os.replace(path / "new", file)
    return ModelFileDamaged, "was changed while it was read"


def written_to(file, path):
    with file.open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\x01\x02")
    return ModelFileDamaged, "was changed while it was read"


def cut_short(file, path):
    os.truncate(file, file.stat().st_size // 2)
    return ModelFileDamaged, "while it was read"


def removed(file, path):
    file.unlink()
    return ModelMissing, "cannot read"


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
@pytest.mark.parametrize("change", [replaced, written_to, cut_short, removed])
@pytest.mark.long
def test_a_shard_that_changes_while_it_is_read_ends_the_load(change, seed, sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "model")
    draw = Draw(path, f"{change.__name__} {seed}")
    file, when, expected = draw.file(), draw.rng.randrange(1, 40), []

    def on_progress(done, total):
        assert total > 40
        if done == (when if seed else total):  # after the last one nothing is opened any more
            expected.append(change(file, path))

    with pytest.raises(BatonError) as caught:
        load(path, on_progress=on_progress)
    [(error, words)] = expected
    assert type(caught.value) is error
    assert file.name in caught.value.message
    assert words in caught.value.message


@pytest.fixture
def unprivileged():
    """A folder outside of those that are root's alone, and no right to read everything."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(before)
    for place in (folder, *folder.rglob("*")):
        place.chmod(place.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", INDEX, "config.json", ""])
def test_what_may_not_be_read_is_named(name, sound, unprivileged):
    euid = os.geteuid()
    os.seteuid(os.getuid())
    path = shutil.copytree(sound, unprivileged / "model")
    path.chmod(0o755)
    (path / name).chmod(0)
    os.seteuid(euid)
    with pytest.raises(ModelMissing, match=f"{name}.*: Permission denied") as caught:
        load(path)
    assert str(path / name) in caught.value.message
    [first, *_] = judged(path)
    assert (type(first), first.message) == (ModelMissing, caught.value.message)
