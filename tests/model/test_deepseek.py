"""DeepSeek-V3 and GLM-4.5: transformers' logits and MTP entries, however a text is cut, at 1 and 2 ranks."""

import dataclasses
import json
import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from baton.core.errors import ModelTensorMisshapen, ModelTensorMissing, ModelTensorUnexpected, ModelUnsupported
from baton.core.numerics import KVDtype, Numerics
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.implementation import Implementation
from baton.model.checkpoint.mtp_fit import require_copies
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.model.tensor_spec import tensor_spec
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.deepseek_checkpoints import DEEPSEEKS, YARN, DeepseekReference
from baton.tests.model.fp8_checkpoints import LAYOUTS, write_float8
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_config_keys import HARMLESS, IMPLEMENTED, REFUSED
from baton.tests.model.test_hybrid import cuts_of, load, run, stepped

LENGTH = 41
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPES = {
    ("deepseek_v3", "plain"): {"layers": 3},
    ("deepseek_v3", "queries of hidden states, tied"): {
        "seed": 1, "tie": True, "overrides": {"q_lora_rank": None, "rope_parameters": PLAIN_ROPE},
    },
    ("deepseek_v3", "Kimi-K2: one group, all experts sparse"): {
        "seed": 2, "num_heads": 8,
        "overrides": {
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_routed_experts": 12,
            "rope_parameters": YARN | {"factor": 32.0, "beta_fast": 1.0, "original_max_position_embeddings": 8},
        },
    },
    ("deepseek_v3", "halves turned, YaRN without mscale, two shared experts"): {
        "seed": 3, "overrides": {
            "rope_interleave": False, "n_shared_experts": 2, "norm_topk_prob": False,
            "rope_parameters": {key: value for key, value in YARN.items() if "mscale" not in key},
        },
    },
    ("deepseek_v3", "wide values, other mscales"): {
        "seed": 4, "overrides": {
            "v_head_dim": 24, "qk_nope_head_dim": 8, "kv_lora_rank": 44, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-5,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        },
    },
    ("deepseek_v3", "no shared expert, one choice, all dense but one"): {
        "seed": 5, "layers": 3, "num_heads": 2,
        "overrides": {
            "first_k_dense_replace": 2, "num_experts_per_tok": 1, "n_shared_experts": 0, "routed_scaling_factor": 1.0,
        },
    },
    ("glm4_moe", "plain"): {"layers": 3},
    ("glm4_moe", "normalised heads, no biases"): {
        "seed": 1, "overrides": {"use_qk_norm": True, "attention_bias": False, "rms_norm_eps": 1e-5},
    },
    ("glm4_moe", "both, a quarter turned"): {
        "seed": 2, "num_kv_heads": 4, "head_dim": 32, "overrides": {
            "use_qk_norm": True, "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.25},
        },
    },
    ("glm4_moe", "groups, tied"): {
        "seed": 3, "tie": True, "overrides": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
    },
    ("glm4_moe", "no dense layer, whole heads turned"): {
        "seed": 4, "num_heads": 8, "overrides": {
            "first_k_dense_replace": 0, "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0},
        },
    },
    ("glm4_moe", "two shared experts, weights as they are"): {
        "seed": 5, "overrides": {"n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 2},
    },
}  # fmt: skip
CASES = [
    pytest.param(kind, shape, id=f"{kind}-{shape}", marks=[] if shape == "plain" else [pytest.mark.long])
    for kind, shape in SHAPES
]


def written(path, kind, shape="plain", **options):
    return write_checkpoint(path, kind=kind, **{"tie": False, **SHAPES[kind, shape], **options})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of no shared expert
@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_logits_are_transformers(kind, shape, tmp_path, check_logits):
    path = written(tmp_path / "model", kind, shape)
    ids = prompt(LENGTH)
    wanted = DeepseekReference(path, kind, torch.float64).logits(ids)
    assert wanted.std() > 0.3
    ways = [[(LENGTH, False)], [(1, at > 0) for at in range(LENGTH)], cuts_of(LENGTH, 1), cuts_of(LENGTH, 2)]
    for numerics in Numerics:
        model = load(path, numerics=numerics)
        for cuts in ways:
            check_logits(kind, run(model, ids, cuts), wanted)
    for logits in on_ranks(2, lambda group: run(load(path, group), ids, ways[2], group)):
        check_logits(kind, logits, wanted)
    narrow = DeepseekReference(path, kind, torch.float32).logits(ids)
    for cuts in ways[:1] + ways[2:3]:
        check_logits(kind, run(load(path, dtype=torch.float32), ids, cuts), narrow)


@torch.inference_mode()
def test_what_a_layer_attends_with_is_what_it_says_is_its_own(tmp_path):
    """A tape of one layer's launches (`kernels.launch_tape`) is replayed over another's, and over nothing else."""
    model = load(written(tmp_path / "model", "deepseek_v3"))
    paged = Paged(model)
    paged.prefill(prompt(LENGTH))
    first, second = (layer.attention for layer in model._decoder.layers[:2])
    generator = torch.Generator().manual_seed(1)
    num_heads, query_dim = model.config.num_heads, model.config.query_dim
    query_TAE = torch.randn(3, num_heads, query_dim, generator=generator, dtype=model.dtype)
    for batch in (paged.decode_batch([0], [LENGTH - 3], 3), paged.prefill_batch([(0, LENGTH - 3, LENGTH)])):
        (found,), (wanted,), (other,) = (
            one.attend(query_TAE, batch, own.stored(paged.pool), SplitKVPlans())
            for one, own in ((first, second), (second, second), (first, first))
        )
        assert torch.equal(found, wanted)
        assert not torch.equal(found, other)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", DEEPSEEKS)
def test_mtp_entries_are_transformers_to_the_fourth_draft(kind, dtype, tmp_path, check_logits):
    path = written(tmp_path / "model", kind)
    model, truth, ids = load(path, dtype=dtype), DeepseekReference(path, kind, dtype), prompt(30)
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


# As published, but for sizes: 136 rows of latents are no whole blocks, and lie behind those of the queries.
FLOAT8 = {
    "deepseek_v3": {
        "q_lora_rank": 128, "kv_lora_rank": 72, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    },
    "glm4_moe": {"use_qk_norm": True},
}  # fmt: skip
MARGIN = 5e-6  # of roundings of activations to float8, relative: beyond what two float32 computations differ by


def write_float8_of(path, kind, layout="deepseek", seed=5):
    overrides = FLOAT8[kind] | {"moe_intermediate_size": 256}
    ignored = ("lm_head", "model.layers.2.eh_proj")
    return write_float8(path, LAYOUTS[layout], kind=kind, overrides=overrides, ignored=ignored, seed=seed)


class Rounding:
    """`functional.linear` that rounds rows by the checkpoint's rule where the weight is of a float8 GEMM."""

    def __init__(self, reference, path):
        self.margin, self.num_rounded, self._linear = 1.0, 0, functional.linear
        self._ranges = []
        stored = load_file(path / "model.safetensors")
        names = {name.removesuffix(".weight_scale_inv") for name in stored if name.endswith("_scale_inv")}
        num_layers = len(reference.model.model.layers)
        parts = {f"model.layers.{index}": layer for index, layer in enumerate(reference.model.model.layers)}
        parts[f"model.layers.{num_layers}"] = reference._mtp.layers[0].mtp_block
        for prefix, layer in parts.items():
            for name, weight in layer.named_parameters():
                module = f"{prefix}.{name}".removesuffix(".weight")
                module = module.replace("experts.gate_up_proj", "experts.0.gate_proj")
                module = module.replace("experts.down_proj", "experts.0.down_proj") if weight.dim() == 3 else module
                # The absorbed form multiplies with this one from its other side, so no rows of it are rounded.
                if module in names and not module.endswith("kv_b_proj"):
                    first = weight.data_ptr()
                    self._ranges.append((first, first + weight.numel() * weight.element_size()))

    def __call__(self, x, weight, bias=None):
        if any(first <= weight.data_ptr() < stop for first, stop in self._ranges):
            x = self._rounded(x)
            self.num_rounded += 1
        return self._linear(x, weight, bias)

    def _rounded(self, x):
        groups = x.unflatten(-1, (-1, 128))
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / 448
        scale = scale.log2().ceil().exp2()  # as `scale_fmt` says
        scaled = groups / scale
        rounded = scaled.to(torch.float8_e4m3fn).float()
        step = torch.where(rounded.abs() < 2**-6, 2.0**-9, 2.0 ** (scaled.abs().clamp_min(2**-6).log2().floor() - 3))
        to_tie = ((scaled - rounded).abs() - step / 2).abs() / scaled.abs().clamp_min(2**-6)
        self.margin = min(self.margin, float(to_tie[scaled != 0].min()))
        return (rounded * scale).flatten(-2)


@pytest.mark.parametrize("kind", DEEPSEEKS)
def test_float8_by_the_checkpoints_rule(kind, tmp_path, monkeypatch):
    """Values times scales of blocks, rows rounded in groups of 128 before each float8 GEMM; at 1 and 2 ranks."""
    for seed in range(5, 60):
        path, plain = write_float8_of(tmp_path / str(seed), kind, seed=seed)
        ids, reference = prompt(4), DeepseekReference(plain, kind, torch.float32)
        rounding = Rounding(reference, path)
        monkeypatch.setattr(functional, "linear", rounding)
        hidden = reference.hidden(ids)
        wanted = reference.lm_head(torch.cat([hidden, reference.mtp(ids[1:], hidden[:-1])]))
        monkeypatch.undo()
        assert rounding.num_rounded > 20
        if rounding.margin > MARGIN:
            break
    assert rounding.margin > MARGIN, "no seed keeps all away from ties"

    def work(group):
        model = load(path, group, dtype=torch.float32)
        attention = model._decoder.layers[0].attention
        gemms = [attention.out_DQ]
        gemms += [attention.down_XD, attention.query_up_QX] if kind == "deepseek_v3" else [attention.qkv_QD]
        assert all(isinstance(gemm, Fp8Weight) for gemm in gemms)
        paged = Paged(model, group=group)
        found = paged.prefill(ids, chunk_len=3)
        entries = paged.mtp(ids[1:], found[:-1], paged.prefill_batch([(0, 0, 3)]))
        return paged.logits(torch.cat([found, entries]))

    for logits in on_ranks(1, work) + on_ranks(2, work):
        assert (logits - wanted).abs().max() <= 2e-4
    exact = DeepseekReference(plain, kind, torch.float32).logits(ids)
    assert (wanted[:4] - exact).abs().max() > 2e-3, "activations are rounded"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DEEPSEEKS)
def test_every_layout_of_float8(kind, layout, tmp_path):
    """Values times scales."""
    paths = write_float8_of(tmp_path, kind, layout)
    found, wanted = (run(load(path), prompt(20), [(20, False)]) for path in paths)
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()  # the twin's weights are rounded to float32


@pytest.mark.parametrize("kind", DEEPSEEKS)
def test_hidden_rows_have_the_same_bits_however_a_text_is_cut(kind, tmp_path):
    """In invariant numerics, in float32 and float64, alone and on two ranks."""
    path = written(tmp_path / "model", kind, num_heads=8)
    ids = prompt(LENGTH)
    for dtype in (torch.float32, torch.float64):
        options = {"dtype": dtype, "numerics": Numerics.INVARIANT}
        model = load(path, **options)
        wanted = run(model, ids, [(LENGTH, False)])
        for seed in range(6):
            assert torch.equal(run(model, ids, cuts_of(LENGTH, seed)), wanted)
        for logits in on_ranks(2, partial(cut_at_rank, path, ids, options)):
            assert torch.equal(logits, wanted)


def cut_at_rank(path, ids, options, group):
    return run(load(path, group, **options), ids, cuts_of(LENGTH, 9), group)


@pytest.mark.parametrize("kind", DEEPSEEKS)
@pytest.mark.parametrize("num_runs", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_mixed_steps_and_drafts_that_are_wrong_change_no_bit(kind, num_runs, tmp_path):
    """Two texts whose prompts, decode rows and drafts share steps by chance; float32, invariant, one and two ranks."""
    path, texts = written(tmp_path / "model", kind, num_heads=8), [prompt(70, seed=seed) for seed in (1, 2)]
    options = {"dtype": torch.float32, "numerics": Numerics.INVARIANT}
    model = load(path, **options)
    wanted = [run(model, text, [(70, False)]) for text in texts]
    for seed in range(num_runs):
        for found, logits in zip(stepped(model, texts, seed), wanted, strict=True):
            assert torch.equal(found, logits), seed
    for logits in on_ranks(2, lambda group: stepped(load(path, group, **options), texts, 1, group)):
        assert all(map(torch.equal, logits, wanted))


def rewritten(path, tensors=None, absent=(), **changes):
    """Other tensors (None: as they are), other keys of config.json, and some left out."""
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if key not in absent}))
    return path


@pytest.mark.fast
@pytest.mark.parametrize("kind", DEEPSEEKS)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.long
def test_a_head_may_store_embedding_and_lm_head_once_more_or_not(kind, tie, tmp_path):
    path = written(tmp_path / "one", kind, layers=2, tie=tie)
    other = written(tmp_path / "other", kind, layers=2, tie=tie, copies=False)
    models, ids = [load(path), load(other)], prompt(20)
    paged = [Paged(model) for model in models]
    entries = [
        one.mtp(ids[1:], torch.ones(19, 32, dtype=torch.float64), one.prefill_batch([(0, 0, 19)])) for one in paged
    ]
    assert torch.equal(*entries)
    assert models[0]._mtp._embedding_VD is models[0]._decoder.embedding_VD


@pytest.mark.fast
@pytest.mark.parametrize("part", ["embed_tokens", "shared_head.head"])
def test_a_head_with_its_own_embedding_or_lm_head_is_refused(part, tmp_path):
    path = written(tmp_path / "model", "deepseek_v3", layers=2)
    tensors, name = load_file(path / "model.safetensors"), f"model.layers.2.{part}.weight"
    rewritten(path, tensors | {name: tensors[name] + 1})
    with pytest.raises(ModelUnsupported, match="is not the trunk's") as refused:
        load(path)
    assert refused.value.fields["option"] == name
    load(path, with_mtp=False)
    rewritten(path, tensors | {name: tensors[name].double()})
    with pytest.raises(ModelUnsupported, match="is not the trunk's"):
        load(path)
    rewritten(path, tensors | {name: tensors[name][:-1].contiguous()})
    with pytest.raises(ModelTensorMisshapen, match=name):
        load(path)


@pytest.mark.fast
@pytest.mark.parametrize("layout", ["deepseek", "compressed channel"])
def test_a_float8_copy_of_the_trunks_lm_head_is_left_for_the_trunks_own(layout, tmp_path, caplog):
    """As GLM-4.5-FP8 stores it; bytes could not be compared, and what is drafted with it is verified."""
    path, _ = write_float8_of(tmp_path, "glm4_moe", layout)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.2.shared_head.head"
    with caplog.at_level(logging.INFO, "baton.model.loader"):
        wanted = mtp_entries(load(path))
    assert "shared_head" not in caplog.text
    scale = tensors[f"{name}.weight"].abs().amax(1, keepdim=True) / 448
    if layout == "deepseek":
        scale = scale.max().expand(-(-len(scale) // 128), 2).contiguous()
    wide = scale.max() if layout == "deepseek" else scale
    rounded = {f"{name}.weight": (tensors[f"{name}.weight"] / wide).to(torch.float8_e4m3fn)}
    rounded[f"{name}.{LAYOUTS[layout].suffix}"] = scale
    save_file(tensors | rounded, path / "model.safetensors")
    with caplog.at_level(logging.INFO, "baton.model.loader"):
        found = mtp_entries(load(path))
    assert torch.equal(found, wanted)
    said = f"{name}.weight is the trunk's in float8: the MTP head drafts with the trunk's own"
    assert caplog.text.count(said) == 1
    config = ModelConfig.from_directory(path)
    assert require_copies(tensor_spec(config, with_mtp=True), read_headers(path)) == said
    assert require_copies(tensor_spec(config, with_mtp=False), read_headers(path)) is None


def mtp_entries(model):
    paged = Paged(model)
    entries = paged.mtp(prompt(20)[1:], torch.ones(19, 256, dtype=model.dtype), paged.prefill_batch([(0, 0, 19)]))
    return paged.logits(entries)


@pytest.mark.fast
@pytest.mark.parametrize("kind", DEEPSEEKS)
@pytest.mark.long
def test_what_a_checkpoint_lacks_or_has_too_much_is_named_as_published(kind, tmp_path):
    path = written(tmp_path / "model", kind, layers=2)
    tensors = load_file(path / "model.safetensors")
    names = ("model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight")
    rewritten(path, {name: tensor for name, tensor in tensors.items() if name not in names})
    with pytest.raises(ModelTensorMissing, match=r"lacks model\.layers\.2\.eh_proj.*--speculative-method none"):
        load(path)
    load(path, with_mtp=False)
    for name in ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.0.self_attn.o_proj.weight"):
        rewritten(path, {one: tensor for one, tensor in tensors.items() if one != name})
        with pytest.raises(ModelTensorMissing, match=name.replace(".", r"\.")):
            load(path, with_mtp=False)
    rewritten(path, tensors, num_nextn_predict_layers=0)
    with pytest.raises(ModelTensorMissing, match="no MTP head"):
        load(path)
    rewritten(path, tensors | {"model.layers.3.enorm.weight": torch.ones(32)}, num_nextn_predict_layers=1)
    with pytest.raises(ModelTensorUnexpected, match=r"model\.layers\.3\.enorm"):
        load(path, with_mtp=False)
    rewritten(path, num_nextn_predict_layers=2)
    load(path, with_mtp=False)
    with pytest.raises(ModelUnsupported, match="2 MTP layers"):
        load(path)


@pytest.mark.fast
@pytest.mark.parametrize("kind", DEEPSEEKS)
def test_routers_are_exact_in_a_narrow_model(kind, tmp_path):
    """Their bias would be rounded away; DeepSeek computes their scores in float32. Narrow weights lose nothing."""
    path = written(tmp_path / "model", kind, dtype=torch.bfloat16)
    model, stored = load(path, dtype=torch.bfloat16), load_file(path / "model.safetensors")
    mlp, name = model._decoder.layers[1].mlp, "model.layers.1.mlp.gate"
    assert torch.equal(mlp.bias_E, stored[f"{name}.e_score_correction_bias"])
    assert not torch.equal(mlp.bias_E, mlp.bias_E.bfloat16().float())
    assert mlp.both_ND is None  # a GEMM is of one dtype
    assert mlp.router_ED.dtype == stored[f"{name}.weight"].dtype == torch.bfloat16
    weight_ED = torch.full(mlp.router_ED.shape, 1.001)
    save_file(stored | {f"{name}.weight": weight_ED}, path / "model.safetensors")
    wide = load(path, dtype=torch.bfloat16)._decoder.layers[1].mlp
    assert torch.equal(wide.router_ED, weight_ED)
    x_TD = torch.randn(3, weight_ED.shape[1]).bfloat16()
    for router_ED in (mlp.router_ED, wide.router_ED):
        logits_TE = mlp._ops.linear_wide(x_TD, router_ED)
        assert torch.allclose(logits_TE.double(), x_TD.double() @ router_ED.double().t(), rtol=1e-5, atol=1e-5)
    assert run(model, prompt(20), [(17, False), (3, True)]).isfinite().all()


# By key, another value than that of `write_checkpoint`; of the families' own keys.
KEYS = {
    "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 3, "routed_scaling_factor": 1.5, "norm_topk_prob": False, "first_k_dense_replace": 2,
    "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "rope_interleave": False, "use_qk_norm": True, "tie_word_embeddings": True, "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("kind", DEEPSEEKS)
@pytest.mark.long
def test_every_key_of_transformers_class_is_implemented_refused_or_harmless(kind, tmp_path):
    from transformers import AutoConfig

    path = written(tmp_path / "model", kind, with_mtp=False)
    values = json.loads((path / "config.json").read_text())
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}

    def config_with(**changes):
        (path / "config.json").write_text(json.dumps(values | changes))
        return dataclasses.replace(ModelConfig.from_directory(path, made_weights="none"), model_hash="")

    before, judged = config_with(), set()
    for key in [field.name for field in dataclasses.fields(type(AutoConfig.for_model(kind)))]:
        if key in HARMLESS or key == "architectures":
            continue
        if kind == "glm4_moe" and key == "attention_bias":
            assert config_with(attention_bias=False).has_qkv_bias != before.has_qkv_bias
        elif key == "num_mtp_layers":
            assert config_with(num_nextn_predict_layers=1).num_mtp_layers == 1
        elif (kind, key) == ("deepseek_v3", "num_key_value_heads"):
            with pytest.raises(ModelUnsupported, match="all read one latent"):
                config_with(num_key_value_heads=2)
        elif key in REFUSED:
            with pytest.raises(ModelUnsupported) as refused:
                config_with(**{key: REFUSED[key]})
            assert refused.value.fields["option"] == key
        else:
            also = {"num_key_value_heads": 8} if key == "num_attention_heads" else {}
            if (kind, key) == ("glm4_moe", "topk_group"):
                assert config_with(n_group=2).sigmoid_routing != config_with(n_group=2, topk_group=2).sigmoid_routing
            else:
                assert config_with(**{key: (IMPLEMENTED | KEYS)[key]}, **also) != before, key
        judged.add(key)
    assert {"n_group", "routed_scaling_factor", "first_k_dense_replace"} < judged
    left_out = {key for key in ("n_group", "topk_group", "norm_topk_prob", "first_k_dense_replace", "rms_norm_eps")}
    theirs = AutoConfig.for_model(kind)
    values["n_routed_experts"] = 32  # which go into as many groups as it has by default
    defaults = {key: getattr(theirs, key) for key in left_out}
    wanted = config_with(**defaults)
    values = {key: value for key, value in values.items() if key not in left_out}
    assert config_with() == wanted, "transformers' defaults"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "changes", "option"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk"),
        ("deepseek_v3", {"head_dim": 64}, "head_dim"),
        ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("deepseek_v3", {"kv_lora_rank": 18}, "kv_lora_rank"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"n_group": 8}, "n_group"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("glm4_moe", {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.2}}, "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(kind, changes, option, tmp_path):
    path = rewritten(written(tmp_path / "model", kind), **changes)
    with pytest.raises(ModelUnsupported) as refused:
        ModelConfig.from_directory(path)
    assert refused.value.fields["option"] == option


@pytest.mark.fast
def test_kernels_and_narrow_kv_are_refused_by_name(tmp_path):
    path = written(tmp_path / "model", "deepseek_v3")
    with pytest.raises(ModelUnsupported, match="not latents beside 8 turned columns"):
        load(path, dtype=torch.bfloat16, implementation=Implementation.TRITON)
    with pytest.raises(ModelUnsupported, match="fp8 is not implemented for attention over latents"):
        load(path, dtype=torch.bfloat16, kv_dtype=KVDtype.FP8)
    with pytest.raises(ModelUnsupported, match="num_attention_heads = 4 is no multiple"):
        on_ranks(8, lambda group: load(path, group))


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "attention_bias": False, "tie_word_embeddings": False, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "vocab_size": 151552, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5, "use_qk_norm": False,
    "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "DeepSeek-V3": (DEEPSEEK, 671_026_419_200),
    "Kimi-K2": (
        DEEPSEEK | {
            "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "vocab_size": 163840,
            "routed_scaling_factor": 2.827, "max_position_embeddings": 131072,
        },
        1_026_408_232_448,
    ),
    "GLM-4.5-Air": (GLM, 106_852_251_264),
    "GLM-4.5": (
        GLM | {
            "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
            "n_routed_experts": 160, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "use_qk_norm": True,
        },
        352_797_829_024,
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_as_many_weights_as_published_and_in_transformers(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    values, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(tmp_path, made_weights="none")
    shapes = tensor_spec(config, with_mtp=False).required
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == count
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    biases = len(config.sparse_layers) * config.num_experts  # buffers in transformers
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count - biases
    if config.latent is not None:
        assert theirs.model.layers[0].self_attn.scaling == pytest.approx(
            config.latent.query_dim**-0.5 * config.rope.score_factor
        )
        layer = config.kv_layer("bfloat16")
        assert (layer.head_bytes, layer.whole) == (1152, True)
