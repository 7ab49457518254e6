"""Expert parallelism: ranks that hold different experts compute the model of one process, and read no other expert."""

import json
import logging
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.moe import moe
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.moe import ExpertWeights
from baton.model.checkpoint import tensor_reader
from baton.model.checkpoint.fp8_fit import dequantized_weights
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.parallel import ShardPlan
from baton.model.tensor_spec import check_tensors, tensor_spec
from baton.model.tp_fit import require_cut, require_cut_float8
from baton.tests.kernels.harness import relative_error
from baton.tests.model.fp8_checkpoints import LAYOUTS, write_float8
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_parallel import DENSE, SHARED, SPARSE, Rank, load, run

KEYS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # for four ranks
FAMILIES = {
    "qwen3_moe": SPARSE,
    "some layers dense": SPARSE | {"layers": 4, "overrides": {"decoder_sparse_step": 2}},
    "an expert a rank": SPARSE | {"overrides": {"num_experts": 4}},
    "qwen2_moe": SHARED,
    "mixtral": {"kind": "mixtral", "num_kv_heads": 4},
    "qwen3_5_moe": {"kind": "qwen3_5_moe", "overrides": KEYS},
    "qwen3_5_moe, MTP fused": {"kind": "qwen3_5_moe", "mtp_fused": True, "overrides": KEYS},
    "qwen3_next": {"kind": "qwen3_next", "fused": False, "overrides": KEYS},
    "deepseek_v3": {"kind": "deepseek_v3", "layers": 3},
    "glm4_moe": {"kind": "glm4_moe", "layers": 3},
}
FAST = {("qwen3_moe", 2), ("deepseek_v3", 2)}
CELLS = [
    pytest.param(kind, size, id=f"{kind}, {size} ranks", marks=[pytest.mark.fast] if (kind, size) in FAST else [])
    for kind in FAMILIES
    for size in (2, 4)
]
EP = {"expert_parallel": True}


@pytest.fixture(autouse=True)
def both_forms(monkeypatch):
    """Prompts are sorted by expert and few rows are not, at ranks that hold a part of the experts, too."""
    monkeypatch.setattr(moe, "_MAX_DENSE_WORK", 60)


def experts_of(model):
    layers = [*model._decoder.layers, model._mtp.layer]
    return [layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize(("kind", "size"), CELLS)
@pytest.mark.long
def test_logits_are_those_of_one_process_and_of_cut_experts(kind, size, tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES[kind])
    wanted, _ = run(load(path))

    def work(group):
        held, cut = load(path, group, **EP), load(path, group)
        count = held.config.num_experts // size
        mine = tuple(range(group.rank * count, (group.rank + 1) * count))
        assert {experts.held.numbers for experts in experts_of(held)} == {mine}
        assert all(experts.held is None for experts in experts_of(cut))
        return run(held, group)[0], run(cut, group)[0]

    ranks = on_ranks(size, work)
    for held, cut in ranks:
        assert (held - wanted).abs().max() <= 1e-9
        assert (held - cut).abs().max() <= 1e-9
        assert torch.equal(held, ranks[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "size"), [("qwen3_moe", 2), ("qwen2_moe", 4), ("deepseek_v3", 2), ("an expert a rank", 4)]
)
def test_invariant_numerics_give_the_same_bits(kind, size, dtype, tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES[kind])
    options = {"dtype": dtype, "numerics": Numerics.INVARIANT}
    wanted, _ = run(load(path, **options))
    for logits, _ in on_ranks(size, lambda group: run(load(path, group, **options, **EP), group)):
        assert torch.equal(logits, wanted)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.long
def test_one_rank_is_the_same_model(kind, tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES[kind])
    model = load(path, **EP)
    assert {experts.held for experts in experts_of(model)} == {None}
    assert torch.equal(run(model)[0], run(load(path))[0])
    assert model.config.model_hash == load(path, Rank(1, 2), **EP).config.model_hash  # KV may be handed to any other


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen3_5_moe, MTP fused", "glm4_moe"])
def test_a_rank_reads_its_own_experts_and_none_of_another(kind, tiny_checkpoint, monkeypatch):
    path, read, num_bytes, size = tiny_checkpoint(**FAMILIES[kind]), tensor_reader.read_bytes, [], 4

    def counted(descriptor, begin, data, file):
        num_bytes.append(len(data))
        read(descriptor, begin, data, file)

    whole = experts_of(load(path))
    monkeypatch.setattr(tensor_reader, "read_bytes", counted)
    parts = []
    for rank in range(size):
        num_bytes.clear()
        counts, group = [], Rank(rank, size)
        model = load(path, group, **EP, dtype=torch.float32, on_progress=lambda *count: counts.append(count))  # noqa: B023
        plan = ShardPlan(model.config, group, Numerics.DEFAULT, expert_parallel=True)
        spec = tensor_spec(model.config, with_mtp=True, expert_parallel=True).weights
        held = {name: one for name, one in spec.items() if one.is_held(rank, size)}
        assert counts[-1] == (len(held), len(held))
        # Parts of columns are read as whole rows; the one narrower thing is what a family stores wider.
        rows = {
            name: prod(one.shape if cut is None or cut.dim else (cut.count, *one.shape[1:]))
            for name, one in held.items()
            for cut in [plan.cut(name)]
        }
        stored = {name: tensor.dtype.itemsize for name, tensor in read_headers(path).items()}
        assert sum(num_bytes) == sum(count * stored.get(name, 4) for name, count in rows.items())
        numbers = [one.expert[0] for one in spec.values() if one.expert is not None and one.is_held(rank, size)]
        assert {*numbers} == {*range(2 * rank, 2 * rank + 2)}
        parts.append(experts_of(model))
    for layer, experts in enumerate(whole):
        for name in ("gate_up_EJD", "down_EDI"):
            together = torch.cat([getattr(part[layer], name) for part in parts])
            assert torch.equal(together.double(), getattr(experts, name))


def test_weights_without_a_checkpoint_are_dealt_alike(tiny_checkpoint):
    options = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
    options |= {"random_seed": 3}
    path = tiny_checkpoint(**SPARSE)
    wanted, _ = run(load_model(path, **options))
    for logits, _ in on_ranks(2, lambda group: run(load_model(path, communicator=group, **options, **EP), group)):
        assert (logits - wanted).abs().max() <= 1e-9


NARROW = {"moe_intermediate_size": 384}  # half of it is no whole block
FLOAT8 = {"kind": "qwen3_moe", "overrides": NARROW, "num_kv_heads": 4}


def test_float8_experts_whose_parts_are_no_whole_blocks_are_served_whole(tmp_path, caplog):
    path, plain = write_float8(tmp_path, LAYOUTS["qwen3-fp8"], **FLOAT8)
    config, headers = ModelConfig.from_directory(path), read_headers(path)
    cut, held = (tensor_spec(config, with_mtp=True, expert_parallel=whole) for whole in (False, True))
    float8 = check_tensors(cut, headers, config.fp8)
    with pytest.raises(ModelUnsupported, match=r"no whole blocks of 128, .*; --enable-expert-parallel keeps"):
        require_cut_float8(cut, float8, 2)
    require_cut_float8(held, float8, 2)
    # By headers, all stay float8 but what is of no GEMM.
    assert set(dequantized_weights(config, float8, held, "float32", 2)) == {"mtp.fc.weight"}
    with pytest.raises(ModelUnsupported, match="--enable-expert-parallel"):
        load(path, Rank(0, 2), dtype=torch.float32)

    def work(group):
        model = load(path, group, dtype=torch.float32, **EP)
        assert all(isinstance(experts, Fp8ExpertWeights) for experts in experts_of(model))
        return run(model, group)[0]

    with caplog.at_level(logging.WARNING):
        ranks = on_ranks(2, work)
    assert "1 because no float8 GEMM reads it" in caplog.text
    alone, twin = run(load(path, dtype=torch.float32))[0], run(load(plain, dtype=torch.float32))[0]
    for logits in ranks:
        assert relative_error(logits, alone) < 0.25  # rounded activations may choose other experts
        assert relative_error(logits, twin) < 0.25


def test_float8_experts_of_a_rank_are_what_is_stored(tmp_path):
    path, _ = write_float8(tmp_path, LAYOUTS["deepseek"], **FLOAT8)
    stored = load_file(path / "model.safetensors")
    for rank in range(2):
        experts = load(path, Rank(rank, 2), dtype=torch.bfloat16, **EP)._decoder.layers[1].mlp.experts
        for place, expert in enumerate(experts.held.numbers):
            gate, up, down = (
                f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
            )
            values = torch.cat([stored[gate], stored[up]]).view(torch.uint8)
            assert torch.equal(experts.gate_up_EJD[place].view(torch.uint8), values)
            assert torch.equal(experts.down_EDI[place].view(torch.uint8), stored[down].view(torch.uint8))
            scales = torch.cat([stored[f"{gate}_scale_inv"], stored[f"{up}_scale_inv"]])
            assert torch.equal(experts.gate_up_scale[place], scales)
            assert torch.equal(experts.down_scale[place], stored[f"{down}_scale_inv"])


def test_one_expert_that_is_not_float8_makes_those_of_every_rank_wide(tmp_path):
    """As without expert parallelism, and as `baton check` says."""
    path, _ = write_float8(tmp_path, LAYOUTS["deepseek"], **FLOAT8)
    stored = load_file(path / "model.safetensors")
    for part in ("gate", "up", "down"):
        name = f"model.layers.1.mlp.experts.0.{part}_proj.weight"
        del stored[f"{name}_scale_inv"]
        stored[name] = stored[name].to(torch.bfloat16)
    save_file(stored, path / "model.safetensors")
    for rank in range(2):
        experts = [layer.mlp.experts for layer in load(path, Rank(rank, 2), dtype=torch.bfloat16, **EP)._decoder.layers]
        assert [type(one) for one in experts] == [Fp8ExpertWeights, ExpertWeights], "the first layer's are all float8"


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2])
def test_a_dense_model_is_refused(size, tiny_checkpoint):
    path = tiny_checkpoint(**DENSE)
    with pytest.raises(
        ModelUnsupported, match=r"^--enable-expert-parallel: the model is dense \(Qwen3ForCausalLM\)"
    ) as e:
        load(path, Rank(0, size), **EP)
    assert e.value.fields == {"option": "enable_expert_parallel", "value": size}


@pytest.mark.fast
def test_experts_that_cannot_be_dealt_evenly_are_refused(tiny_checkpoint):
    path = tiny_checkpoint(**SPARSE | {"overrides": {"num_experts": 6}})
    with pytest.raises(
        ModelUnsupported, match=r"^--enable-expert-parallel: 6 experts cannot be dealt evenly over 4 ranks"
    ):
        load(path, Rank(0, 4), **EP)
    assert len(experts_of(load(path, Rank(0, 2), **EP))[0].down_EDI) == 3


@pytest.mark.fast
def test_a_cut_inside_of_experts_that_does_not_fit_says_what_would(tiny_checkpoint):
    """And it fits: neither their size nor, in invariant numerics, its slices matter to experts that are whole."""
    overrides = {"num_experts": 16, "moe_intermediate_size": 12}
    config = ModelConfig.from_directory(tiny_checkpoint(**SPARSE | {"num_heads": 16, "overrides": overrides}))
    for numerics, size, why in (
        (Numerics.DEFAULT, 16, "moe_intermediate_size = 12 is no multiple of it; --enable-expert-parallel keeps"),
        (Numerics.INVARIANT, 8, "moe_intermediate_size = 12 is no multiple"),
    ):
        with pytest.raises(ModelUnsupported, match=why):
            require_cut(config, size, numerics)
        require_cut(config, size, numerics, **EP)
    few = ModelConfig.from_directory(tiny_checkpoint(**SPARSE | {"num_heads": 16}))  # 8 experts
    with pytest.raises(ModelUnsupported, match=r"moe_intermediate_size = 24 is no multiple of it$"):
        require_cut(few, 16, Numerics.DEFAULT)


@pytest.mark.fast
def test_shared_experts_and_dense_layers_are_cut_as_without(tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES["deepseek_v3"])
    config = ModelConfig.from_directory(path)
    names = json.loads((path / "config.json").read_text())
    assert names["first_k_dense_replace"] == 1
    specs = [tensor_spec(config, with_mtp=True, expert_parallel=held).weights for held in (False, True)]
    for name, one in specs[0].items():
        routed = ".experts." in name
        assert (specs[1][name] == one) == (not routed)
        if routed:
            assert specs[1][name].cut(1, 2) is None
            assert sum(specs[1][name].is_held(rank, 2) for rank in range(2)) == 1
        assert one.is_held(1, 2)
