"""Qwen3.5, its MoE, and Qwen3-Next: transformers' logits and MTP entries, however a text is cut, at 1 and 2 ranks."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.cluster.resolve import find_model
from baton.core.config import MAX_DRAFTS
from baton.core.errors import ModelTensorMisshapen, ModelTensorMissing, ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.delta_net.layer import MAX_DECODE_ROWS
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.model import delta_sizes
from baton.model.config import ModelConfig
from baton.model.delta_sizes import read_delta_layers
from baton.model.inputs import MixedBatch
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.fp8_checkpoints import LAYOUTS, write_float8
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.hybrid_checkpoints import HYBRIDS, MODEL_TYPES, HybridReference
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_config_keys import HARMLESS, IMPLEMENTED, REFUSED

LENGTH = 41
SHAPES = {
    "plain": {},
    "one value head, three layers": {
        "layers": 3, "tie": False,
        "overrides": {"linear_num_value_heads": 2, "layer_types": ["linear_attention"] * 2 + ["full_attention"]},
    },
    "four value heads": {"overrides": {"linear_num_value_heads": 8, "linear_key_head_dim": 16}, "seed": 1},
    "whole rotation, three taps": {
        "num_kv_heads": 4, "seed": 2,
        "overrides": {
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
        },
    },
    "attention first": {
        "layers": 3, "seed": 3, "overrides": {"layer_types": ["full_attention", *["linear_attention"] * 2]},
    },
    "all attend": {"seed": 4, "head_dim": 32, "overrides": {"layer_types": ["full_attention"] * 2}},
    "four key heads": {"seed": 5, "num_heads": 8, "overrides": {"linear_num_key_heads": 4, "rms_norm_eps": 1e-5}},
}  # fmt: skip
CASES = [
    pytest.param(kind, shape, marks=[] if shape in ("plain", "four key heads") else [pytest.mark.long])
    for kind in HYBRIDS
    for shape in SHAPES
]


def load(path, communicator=None, **options):
    options = {"dtype": torch.float64, "numerics": Numerics.DEFAULT, "with_mtp": True, **options}
    return load_model(path, device=torch.device("cpu"), communicator=communicator, **options)


def run(model, ids, cuts, group=None):
    """Logits of a text in parts: (length, is decoded) each."""
    paged, at, found = Paged(model, capacity_len=len(ids) + 16, group=group), 0, []
    for length, is_decoded in cuts:
        stop = at + length
        batch = paged.decode_batch([0], [at], length) if is_decoded else paged.prefill_batch([(0, at, stop)])
        found.append(paged.trunk(ids[at:stop], batch))
        at = stop
    return paged.logits(torch.cat(found))


def cuts_of(length, seed):
    rng, left, found = random.Random(seed), length, []
    while left:
        count = min(left, rng.choice([1, 2, 3, 5, 9, 16, 20]))
        found.append((count, bool(found) and count <= 5 and rng.random() < 0.5))
        left -= count
    return found


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_logits_are_transformers(kind, shape, tmp_path, check_logits):
    path = write_checkpoint(tmp_path / "model", kind=kind, **SHAPES[shape])
    ids = prompt(LENGTH)
    wanted = HybridReference(path, kind, torch.float64).logits(ids)
    assert wanted.std() > 0.3
    ways = [[(LENGTH, False)], [(1, at > 0) for at in range(LENGTH)], cuts_of(LENGTH, 1), cuts_of(LENGTH, 2)]
    for numerics in Numerics:
        model = load(path, numerics=numerics)
        for cuts in ways:
            check_logits(kind, run(model, ids, cuts), wanted)
    for logits in on_ranks(2, lambda group: run(load(path, group), ids, ways[2], group)):
        check_logits(kind, logits, wanted)
    narrow = HybridReference(path, kind, torch.float32).logits(ids)
    for cuts in ways[:1] + ways[2:3]:
        check_logits(kind, run(load(path, dtype=torch.float32), ids, cuts), narrow)


YARN = {  # as the README says to switch it on, for a shorter context
    "mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "yarn", "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_yarn_beside_the_sections_of_images_is_transformers_for_text(kind, tmp_path, check_logits):
    overrides = {"rope_parameters": YARN, "max_position_embeddings": 64}
    path = write_checkpoint(tmp_path / "model", kind=kind, head_dim=64, with_mtp=False, overrides=overrides)
    model = load(path, dtype=torch.float32, with_mtp=False)
    assert (model.config.max_model_len, model.config.rotary_dim) == (256, 16)
    ids = prompt(200)
    found = run(model, ids, cuts_of(200, 3))
    check_logits(f"{kind}, yarn", found, HybridReference(path, kind, torch.float32).logits(ids))
    plain = write_checkpoint(tmp_path / "plain", kind=kind, head_dim=64, with_mtp=False)
    assert (run(load(plain, dtype=torch.float32, with_mtp=False), ids, [(200, False)]) - found).abs().max() > 0.01


def test_the_sections_of_images_are_of_families_that_have_them_alone(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_next", overrides={"rope_parameters": YARN})
    with pytest.raises(ModelUnsupported, match="mrope"):
        ModelConfig.from_directory(path)


def test_yarn_of_a_multimodal_directory_is_in_its_text_config(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_5", overrides={"rope_parameters": YARN})
    text = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 64}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    (path / "tokenizer.json").write_text("{}")
    assert find_model(str(path)).max_model_len == ModelConfig.from_directory(path).max_model_len == 256


@pytest.mark.parametrize("kind", HYBRIDS)
def test_hidden_rows_have_the_same_bits_however_a_text_is_cut(kind, tmp_path):
    """In invariant numerics, in float32, alone and on two ranks."""
    path = write_checkpoint(tmp_path / "model", kind=kind, num_heads=8)
    ids, options = prompt(LENGTH), {"dtype": torch.float32, "numerics": Numerics.INVARIANT}
    model = load(path, **options)
    wanted = run(model, ids, [(LENGTH, False)])
    for seed in range(6):
        assert torch.equal(run(model, ids, cuts_of(LENGTH, seed)), wanted)
    for logits in on_ranks(2, lambda group: run(load(path, group, **options), ids, cuts_of(LENGTH, 9), group)):
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("num_runs", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_mixed_steps_and_drafts_that_are_wrong_change_no_bit(kind, num_runs, tmp_path):
    """Two texts whose prompts, decode rows and drafts share steps by chance; float32, invariant, one and two ranks."""
    path = write_checkpoint(tmp_path / "model", kind=kind, num_heads=8)
    texts, options = (
        [prompt(70, seed=seed) for seed in (1, 2)],
        {"dtype": torch.float32, "numerics": Numerics.INVARIANT},
    )
    model = load(path, **options)
    wanted = [run(model, text, [(70, False)]) for text in texts]
    for seed in range(num_runs):
        for found, logits in zip(stepped(model, texts, seed), wanted, strict=True):
            assert torch.equal(found, logits), seed
    for logits in on_ranks(2, lambda group: stepped(load(path, group, **options), texts, 1, group)):
        assert all(map(torch.equal, logits, wanted))


def stepped(model, texts, seed, group=None):
    """Logits of texts that are served together: chunks of what is a prompt, then decode rows with drafts."""
    rng, paged = random.Random(seed), Paged(model, num_sequences=2, capacity_len=96, group=group)
    ends, at, found = [rng.randint(1, 50) for _ in texts], [0, 0], [[], []]
    while min(at) < 70:
        chunks, decoding, num_rows = [], [], rng.randint(1, 5)
        for text in rng.sample(range(2), rng.randint(1, 2)):
            if at[text] < ends[text]:
                chunks.append((text, at[text], min(ends[text], at[text] + rng.choice([1, 5, 16, 23]))))
            elif at[text] < 70:
                decoding.append(text)
        goods = [min(rng.randint(1, num_rows), 70 - at[text]) for text in decoding]
        ids = [texts[text][start:stop] for text, start, stop in chunks]
        for text, good in zip(decoding, goods, strict=True):
            wrong = torch.randint(2, 96, (num_rows - good,), generator=torch.Generator().manual_seed(rng.randrange(99)))
            ids += [texts[text][at[text] : at[text] + good], wrong]
        parts = [paged.prefill_batch(chunks)] if chunks else []
        parts += [paged.decode_batch(decoding, [at[text] for text in decoding], num_rows)] if decoding else []
        if not parts:
            continue
        batch = MixedBatch(prompts=parts[0], decode=parts[1]) if len(parts) == 2 else parts[0]
        hidden, row = paged.trunk(torch.cat(ids), batch), 0
        for text, start, stop in chunks:
            found[text].append(hidden[row : row + stop - start])
            row, at[text] = row + stop - start, stop
        for text, good in zip(decoding, goods, strict=True):
            found[text].append(hidden[row : row + good])
            row, at[text] = row + num_rows, at[text] + good
    return [paged.logits(torch.cat(rows)) for rows in found]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_mtp_entries_are_transformers_to_the_fourth_draft(kind, dtype, tmp_path, check_logits):
    path = write_checkpoint(tmp_path / "model", kind=kind)
    model, truth, ids = load(path, dtype=dtype), HybridReference(path, kind, dtype), prompt(30)
    paged = Paged(model)
    hidden = paged.prefill(ids)[:-1]
    out = paged.mtp(ids[1:], hidden, paged.prefill_batch([(0, 0, 29)]))
    next_ids, true_hidden = ids[1:], truth.hidden(ids)[:-1]
    for draft in range(4):
        true_out = truth.mtp(next_ids, true_hidden)
        true_logits = truth.lm_head(true_out[-len(out) :])
        check_logits(f"{kind}, MTP head", paged.logits(out), true_logits)
        token = true_logits[-1:].argmax(dim=-1)
        next_ids, true_hidden = torch.cat([next_ids, token]), torch.cat([true_hidden, true_out[-1:]])
        out = paged.mtp(token, out[-1:], paged.decode_batch([0], [29 + draft], 1, bound=100))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize(("fused", "mtp_fused"), [(True, True), (False, False), (False, True)])
def test_experts_may_be_stacked_or_single_in_trunk_and_head(kind, fused, mtp_fused, tmp_path):
    path = write_checkpoint(tmp_path / "one", kind=kind)
    other = write_checkpoint(tmp_path / "other", kind=kind, fused=fused, mtp_fused=mtp_fused)
    models, ids = [load(path), load(other)], prompt(20)
    assert torch.equal(*(run(model, ids, [(20, False)]) for model in models))
    paged = [Paged(model) for model in models]
    entries = [
        one.mtp(ids[1:], torch.ones(19, 32, dtype=torch.float64), one.prefill_batch([(0, 0, 19)])) for one in paged
    ]
    assert torch.equal(*entries)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_multimodal_directory_is_served(kind, tmp_path):
    path = write_checkpoint(tmp_path / "text", kind=kind)
    values = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors["model.visual.patch_embed.weight"] = torch.zeros(3)
    other = tmp_path / "multimodal"
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    architecture = values.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    tie = values.pop("tie_word_embeddings")
    whole = {
        "architectures": [architecture], "model_type": kind, "tie_word_embeddings": tie, "vision_config": {"depth": 2},
        "text_config": values | {"tie_word_embeddings": not tie},
    }  # fmt: skip
    (other / "config.json").write_text(json.dumps(whole))
    found = ModelConfig.from_directory(other)
    assert (found.num_mtp_layers, found.tie_word_embeddings, len(found.delta_layers)) == (1, True, 1)
    ids = prompt(20)
    assert torch.equal(*(run(load(one), ids, [(20, False)]) for one in (path, other)))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_float8_in_blocks_as_published(kind, tmp_path):
    """Projections keep their blocks; where they cannot, they are values times scales; what is not float8 stays so."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
    forms = {} if kind == "qwen3_5" else {"fused": False}
    paths = write_float8(tmp_path, LAYOUTS["qwen3-fp8"], kind=kind, overrides=sizes, seed=5, **forms)
    ids = prompt(20)
    wide = [run(load(path), ids, [(20, False)]) for path in paths]
    assert torch.equal(*wide)
    for model in [
        load(paths[0], dtype=torch.float32),
        *on_ranks(2, lambda group: load(paths[0], group, dtype=torch.float32)),
    ]:
        net = model._decoder.layers[0].attention
        assert isinstance(net.mixed_XD, Fp8Weight) and isinstance(net.out_DX, Fp8Weight)
        assert isinstance(net.gates_XD, torch.Tensor)
        assert net.both_XD is None
    logits = run(load(paths[0], dtype=torch.float32), ids, [(9, False), (11, False)]).double()
    assert (logits - wide[0]).norm() < 0.3 * wide[0].norm()  # activations are rounded, too


@pytest.mark.fast
def test_gemms_that_read_the_same_rows_are_one_and_no_weight_is_there_twice(tmp_path):
    path = write_checkpoint(tmp_path / "plain", kind="qwen3_5_moe")
    for model in (load(path), *on_ranks(2, lambda group: load(path, group))):
        layer = model._decoder.layers[0]
        net, mlp = layer.attention, layer.mlp
        for both, parts in (
            (net.both_XD, (net.mixed_XD, net.gates_XD)),
            (mlp.both_ND, (mlp.shared.mlp.gate_up_JD, mlp.router_XD)),
        ):
            assert torch.equal(torch.cat(parts), both)
            assert {part.untyped_storage().data_ptr() for part in parts} == {both.untyped_storage().data_ptr()}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "qwen3-fp8"])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_every_other_layout_of_float8(kind, layout, tmp_path):
    """Values times scales."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 2}
    forms = {} if kind == "qwen3_5" else {"fused": False}
    paths = write_float8(tmp_path, LAYOUTS[layout], kind=kind, overrides=sizes, seed=5, **forms)
    found, wanted = (run(load(path), prompt(20), [(20, False)]) for path in paths)
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()  # the twin's weights are rounded to float32


@pytest.mark.fast
@pytest.mark.long
def test_a_scale_that_is_missing_is_named(tmp_path):
    path, _ = write_float8(
        tmp_path,
        LAYOUTS["qwen3-fp8"],
        kind="qwen3_5",
        overrides={"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    )
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelTensorMissing, match="in_proj_qkv"):
        load(path)


@pytest.mark.fast
def test_float32_tensors_stay_so_in_a_narrow_model(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_5", dtype=torch.bfloat16)
    model, stored = load(path, dtype=torch.bfloat16), load_file(path / "model.safetensors")
    net = model._decoder.layers[0].attention.weights
    for name, kept in (("A_log", net.a_log_HG), ("dt_bias", net.dt_bias_HG), ("norm.weight", net.norm_V)):
        assert torch.equal(kept.flatten(), stored[f"model.layers.0.linear_attn.{name}"]), name
        assert not torch.equal(kept, kept.bfloat16().float()), name
    assert run(model, prompt(20), [(17, False), (3, True)]).isfinite().all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 6}, "linear_key_head_dim"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_what_is_not_implemented_is_refused_by_name(overrides, option, tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_5")
    values = json.loads((path / "config.json").read_text()) | overrides
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelUnsupported) as refused:
        ModelConfig.from_directory(path)
    assert refused.value.fields["option"] == option


@pytest.mark.fast
@pytest.mark.parametrize("said", [{"layer_types": ["linear_attention"] * 3}, {}], ids=["named", "by the interval"])
def test_a_model_without_an_attention_layer_is_refused_by_name(said):
    with pytest.raises(ModelUnsupported, match="without a layer of full attention") as refused:
        read_delta_layers(said, 3)
    assert refused.value.fields["option"] == "layer_types"


@pytest.mark.fast
def test_more_ranks_than_key_heads_are_refused(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_5", num_heads=8)
    with pytest.raises(ModelUnsupported, match="linear_num_key_heads = 2 is no multiple"):
        on_ranks(4, lambda group: load(path, group))


KEYS = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 4,
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.long
def test_every_key_of_transformers_class_is_implemented_refused_or_harmless(kind, tmp_path):
    from transformers import AutoConfig

    path = write_checkpoint(tmp_path / "model", kind=kind, with_mtp=False)
    file = path / "config.json"
    values = json.loads(file.read_text())

    def config_with(**changes):
        file.write_text(json.dumps(values | changes))
        return dataclasses.replace(ModelConfig.from_directory(path, made_weights="none"), model_hash="")

    before = config_with()
    for key in [field.name for field in dataclasses.fields(type(AutoConfig.for_model(MODEL_TYPES[kind])))]:
        if key in HARMLESS or key in ("architectures", "norm_topk_prob", "rope_parameters"):
            continue
        if key in KEYS or key in IMPLEMENTED:
            also = {"layer_types": None} if key == "num_hidden_layers" else {}
            assert config_with(**{key: (IMPLEMENTED | KEYS)[key]}, **also) != before, key
        if key in REFUSED:
            with pytest.raises(ModelUnsupported) as refused:
                config_with(**{key: REFUSED[key]})
            assert refused.value.fields["option"] == key
        assert key in KEYS or key in IMPLEMENTED or key in REFUSED, key
    assert config_with(norm_topk_prob=False).renormalise_experts == (kind == "qwen3_5_moe")
    rope = values["rope_parameters"]
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_theta": 77.0}):
        assert config_with(rope_parameters=rope | changes) != before
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}  # of text, all turn by one position
    assert config_with(rope_parameters=rope | sections) == before
    del rope["partial_rotary_factor"]
    assert config_with() == before, "transformers' default"


@pytest.mark.fast
def test_layers_are_where_config_says_or_every_fourth_attends(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_5", layers=2)
    values = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 9}
    del values["layer_types"]
    (path / "config.json").write_text(json.dumps(values))
    found = ModelConfig.from_directory(path, made_weights="none")
    assert found.delta_layers == {0, 1, 2, 4, 5, 6, 8}
    assert [found.pool_layer(layer) for layer in (0, 1, 3, 4, 9)] == [0, 3, 9, 10, 23]


@pytest.mark.fast
def test_a_shared_tensor_without_its_rows_is_named(tmp_path):
    path = write_checkpoint(tmp_path / "model", kind="qwen3_5")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(ModelTensorMisshapen, match=r"in_proj_qkv\.weight has shape \[79, 32\]"):
        load(path)
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelTensorMissing, match="in_proj_qkv"):
        load(path)


@pytest.mark.fast
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.long
def test_rings_hold_as_many_drafts_as_a_step_may_have(kind, tmp_path):
    layout = load(write_checkpoint(tmp_path / "model", kind=kind)).kv_layout(16)
    limits = [layer.max_drafts for layer in layout.layers if layer.max_drafts is not None]
    assert len(limits) > 1
    assert min(limits) >= MAX_DRAFTS


@pytest.mark.fast
def test_a_ring_that_is_too_short_for_the_drafts_of_a_step_is_found_before_weights_are_read(tmp_path, monkeypatch):
    config = ModelConfig.from_directory(write_checkpoint(tmp_path / "model", kind="qwen3_5"))
    config.kv_layers(2, "float32", "float32")
    monkeypatch.setattr(delta_sizes, "CONV_RING", 8)  # 3 inputs that an output sees, a row, and 4 drafts
    with pytest.raises(AssertionError, match="too short"):
        config.kv_layers(2, "float32", "float32")


@pytest.mark.fast
def test_a_decode_step_of_triton_has_room_for_every_draft():
    assert MAX_DECODE_ROWS > MAX_DRAFTS
