"""What `baton check` does for a directory of many tensors: work in proportion to them, counted in lines."""

import json
import sys
from math import prod
from pathlib import Path

import pytest

from baton.cluster.checkpoint import judge
from baton.cluster.resolve import read_config
from baton.model.config import ModelConfig
from baton.model.tensor_spec import tensor_spec

TINY = Path(__file__).parents[2] / "assets" / "tiny"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
NUM_SHARDS = 4


def directory(path, num_experts):
    """Experts in float8 by blocks, several shards, and an index: only headers are written, the rest is a hole."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_experts": num_experts}))
    (path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    sizes, tensors = ModelConfig.from_directory(path, made_weights="test"), {}
    for name, shape in tensor_spec(sizes, with_mtp=False).required.items():
        is_float8 = ".experts." in name
        tensors[name] = ("F8_E4M3" if is_float8 else "BF16", shape)
        if is_float8:
            tensors[f"{name}_scale_inv"] = ("BF16", tuple(-(-length // 128) for length in shape))
    index = {}
    for shard in range(NUM_SHARDS):
        file, header, end = f"model-{shard}.safetensors", {}, 0
        for name in list(tensors)[shard::NUM_SHARDS]:
            dtype, shape = tensors[name]
            begin, end = end, end + prod(shape) * (1 if dtype == "F8_E4M3" else 2)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            index[name] = file
        raw = json.dumps(header).encode()
        with (path / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + end)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return len(tensors)


def lines_of(work):
    """Lines of Python that it runs; each turn of a comprehension is one."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work(), count
    finally:
        sys.settrace(before)


@pytest.mark.fast
@pytest.mark.long
def test_twice_the_tensors_are_twice_the_work(tmp_path, monkeypatch):
    looked_up, is_file = [], Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: looked_up.append(self) or is_file(self))
    found = {}
    for num_experts in (8, 64, 128):  # the first imports what is needed
        path = tmp_path / str(num_experts)
        num_tensors = directory(path, num_experts)
        looked_up.clear()
        judged, num_lines = lines_of(lambda path=path: judge(read_config(None, {"model": str(path), "device": "cpu"})))
        assert judged.errors == []
        assert len(looked_up) < 10 * NUM_SHARDS, "files are looked for once, not once for each of their tensors"
        found[num_experts] = num_tensors, num_lines
    (few, work), (many, more_work) = found[64], found[128]
    assert many > 1.9 * few
    assert more_work <= 1.1 * work * many / few
