"""EAGLE-3 drafters: logits beside a reference without paging, both layouts, ranks; what does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import (
    ModelFileDamaged,
    ModelMissing,
    ModelTensorMisshapen,
    ModelTensorMissing,
    ModelTensorUnexpected,
    ModelUnsupported,
)
from baton.core.numerics import Numerics
from baton.model.config import ModelConfig
from baton.model.eagle_config import EagleConfig
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.eagle_checkpoints import EagleReference, write_drafter
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

pytestmark = pytest.mark.fast
SIZES = {"layers": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "with_mtp": False}
DRAWN = {
    "own layout": {},
    "speculators": {"layout": "speculators", "before": True, "embeds": True},
    "all columns": {"num_columns": 96},
    "named layers": {"layout": "speculators", "aux": (0, 1, 5)},
    "named outputs": {"overrides": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}},
    "more heads": {"num_heads": 8, "before": True},
    "one KV head": {"num_kv_heads": 1},
    "norms of heads": {"layout": "speculators", "kind": "qwen3", "aux": (1, 4, 6)},
    "heads of its own": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "layout": "speculators"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model", kind="llama", tie=False, **SIZES)


def load(path, drafter, group=None, dtype=torch.float64, numerics=Numerics.DEFAULT):
    return load_model(
        path,
        dtype=dtype,
        device=torch.device("cpu"),
        numerics=numerics,
        with_mtp=False,
        communicator=group,
        draft_path=drafter,
    )


def whole(model, hidden):
    """Draft logits over all tokens, -inf where the head has no column; of every rank's tokens."""
    with torch.inference_mode():
        logits = model.draft_logits(hidden)
        width = model.vocab.width(model.config.vocab_size)
        rows = logits.new_full((len(logits), width), -torch.inf).index_copy(1, model.draft_columns_C, logits)
        return model.vocab.gather(rows)


def drafted(model, ids, group=None, chunk_len=17):
    """Draft logits of all entries of a prompt in chunks, and of five chained drafts."""
    paged, length = Paged(model, group=group), len(ids) - 1
    hidden = paged.prefill(ids, chunk_len=chunk_len)[:-1]
    parts = [(0, start, min(start + 23, length)) for start in range(0, length, 23)]
    out = torch.cat([paged.mtp(ids[s + 1 : e + 1], hidden[s:e], paged.prefill_batch([(q, s, e)])) for q, s, e in parts])
    found = [whole(model, out)]
    last = out[-1:]
    for draft in range(5):
        token = found[-1][-1:].argmax(dim=-1)
        last = paged.mtp(token, last, paged.decode_batch([0], [length + draft], 1, bound=120))
        found.append(whole(model, last))
    assert set(paged.layers) == set(range(model.config.num_layers + 1))
    return torch.cat(found), paged.logits(hidden)


def expected(truth, ids):
    """The same without paging."""
    next_ids, hidden, tokens = ids[1:], truth.features(ids)[:-1], truth.tokens()

    def over_vocabulary(logits):
        rows = logits.new_full((len(logits), truth.truth.config.vocab_size), -torch.inf)
        return rows.index_copy(1, tokens, logits)

    out = truth.entries(next_ids, hidden)
    found = [over_vocabulary(truth.logits(out))]
    for _ in range(5):
        token = found[-1][-1:].argmax(dim=-1)
        next_ids, hidden = torch.cat([next_ids, token]), torch.cat([hidden, out[-1:]])
        out = truth.entries(next_ids, hidden)
        found.append(over_vocabulary(truth.logits(out[-1:])))
    return torch.cat(found)


def same(found, wanted, most):
    assert torch.equal(found.isinf(), wanted.isinf())
    assert float((found - wanted).nan_to_num(0.0).abs().max()) <= most


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", DRAWN)
def test_drafts_are_those_of_the_equations(kind, ranks, target, reference, tmp_path):
    drafter = write_drafter(tmp_path / "drafter", target, **DRAWN[kind])
    truth = reference(target, torch.float64)
    ids = prompt(61)
    wanted = expected(EagleReference(drafter, truth), ids)
    if ranks == 1:
        made = [drafted(load(target, drafter), ids)]
    else:
        made = on_ranks(ranks, lambda group: drafted(load(target, drafter, group), ids, group))
    for found, logits in made:
        same(found, wanted, 1e-9)
        same(logits, truth.logits(ids)[:-1], 1e-9)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.long
def test_drafts_in_float32(numerics, target, reference, tmp_path):
    drafter = write_drafter(tmp_path / "drafter", target, dtype=torch.float32)
    truth, ids = reference(target, torch.float64), prompt(40)
    wanted = expected(EagleReference(drafter, truth), ids)
    found, _ = drafted(load(target, drafter, dtype=torch.float32, numerics=numerics), ids)
    same(found.double(), wanted, 2e-4)


@pytest.mark.parametrize("form", ["offsets", "ids"])
def test_a_table_of_all_tokens_says_nothing_more(form, target, tmp_path):
    """A drafter over the whole vocabulary may store one all the same."""
    plain, ids = write_drafter(tmp_path / "plain", target, num_columns=96), prompt(30)
    path = write_drafter(tmp_path / form, target, num_columns=96)
    table = torch.zeros(96, dtype=torch.int64) if form == "offsets" else torch.arange(96)
    tensors = load_file(path / "model.safetensors") | {"d2t": table, "t2d": torch.ones(96, dtype=torch.bool)}
    save_file(tensors, path / "model.safetensors")
    same(drafted(load(target, path), ids)[0], drafted(load(target, plain), ids)[0], 0.0)
    save_file(tensors | {"d2t": torch.full((96,), 5)}, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="no table of tokens"):
        load(target, path)


def test_a_drafter_without_weights_is_made_up(target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target)
    (path / "model.safetensors").unlink()
    model = load_model(
        target, dtype=torch.float32, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=False,
        random_seed=1, draft_path=path,
    )  # fmt: skip
    found, _ = drafted(model, prompt(30))
    assert found.isfinite().sum(dim=1).eq(40).all()


def test_other_drafters_have_other_kv(target, tmp_path):
    hashes = {
        load(target, write_drafter(tmp_path / str(seed), target, seed=seed)).kv_layout(16).model_hash for seed in (1, 2)
    }
    hashes.add(load(target, None).kv_layout(16).model_hash)
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"vocab_size": 97}, "vocab_size"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"target_hidden_size": 64}, "target_hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"architectures": ["MedusaModel"]}, "draft_model"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({"eagle_config": {"norm_output": True}}, "norm_output"),
        ({"draft_vocab_size": 97}, "draft_vocab_size"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 12]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_what_does_not_fit_its_target_is_refused_by_name(overrides, option, target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target, overrides=overrides)
    with pytest.raises(ModelUnsupported) as refused:
        EagleConfig.from_directory(path, ModelConfig.from_directory(target))
    assert refused.value.fields["option"] == option
    assert str(path) in refused.value.message or option in refused.value.message


@pytest.mark.parametrize("algorithm", ["FP8", None])
def test_a_drafter_that_modelopt_quantized_is_refused(algorithm, target, tmp_path):
    """Its own file says so. One that quantized no weights may be there as well."""
    path = write_drafter(tmp_path / "drafter", target)
    values = {"quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, "quantized_layers": {}}}
    (path / "hf_quant_config.json").write_text(json.dumps(values))
    if algorithm is None:
        assert load(target, path)
        return
    with pytest.raises(ModelUnsupported, match=f"^the drafter: {path}: a quantized drafter is not implemented"):
        load(target, path)


def test_a_layer_of_another_family_is_refused_by_its_name(target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target, layout="speculators", kind="gemma3_text")
    sentence = r"transformer_layer_config\.model_type = 'gemma3_text' is not implemented; 'llama' or 'qwen3' is$"
    with pytest.raises(ModelUnsupported, match=sentence):
        load(target, path)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "mtp", "peagle"])
def test_other_drafters_of_speculators_are_refused_by_name(kind, target, tmp_path):
    """Those of 0.9.0."""
    names = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "mtp": "MTPDraftModel"}
    changes = {"speculators_model_type": kind, "architectures": [names.get(kind, "PEagleSpeculator")]}
    path = write_drafter(tmp_path / "drafter", target, layout="speculators", overrides=changes)
    with pytest.raises(ModelUnsupported, match=f"is no EAGLE-3 drafter: .*{kind}"):
        load(target, path)


@pytest.mark.parametrize(
    "overrides",
    [
        {"architectures": 5}, {"architectures": [["x"]]}, {"architectures": {"a": 1}}, {"eagle_config": 7},
        {"eagle_aux_hidden_state_layer_ids": "abc"}, {"eagle_aux_hidden_state_layer_ids": 4}, {"hidden_size": "wide"},
        {"transformer_layer_config": []}, {"draft_vocab_size": "many"}, {"num_hidden_layers": None}, {"rope_theta": {}},
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_named_errors(overrides, target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target, overrides=overrides)
    with pytest.raises((ModelFileDamaged, ModelUnsupported)):
        EagleConfig.from_directory(path, ModelConfig.from_directory(target))


@pytest.mark.parametrize(
    ("overrides", "aux_layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),  # SpecForge's own: the same
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, (1, 3, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [0, 1, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            },
            (0, 1, 5),
        ),
    ],
)
def test_layers_under_eagle_config_are_named_by_their_outputs(overrides, aux_layers, target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target, overrides=overrides)
    assert EagleConfig.from_directory(path, ModelConfig.from_directory(target)).aux_layers == aux_layers


def test_its_kv_is_a_layer_of_its_own_shape(target, tmp_path):
    drafter = write_drafter(tmp_path / "drafter", target, num_heads=8, num_kv_heads=8, head_dim=8)
    layout = load(target, drafter).kv_layout(16)
    assert [(layer.num_heads, layer.row_len) for layer in layout.layers] == [(2, 16)] * 8 + [(8, 8)]
    assert layout.has_mtp


def test_a_drafter_that_cannot_be_cut_is_refused_by_name(target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target, num_heads=6, num_kv_heads=3)
    with pytest.raises(ModelUnsupported, match=r"the drafter: tensor parallel size 2 .*num_key_value_heads = 3"):
        EagleConfig.from_directory(path, ModelConfig.from_directory(target)).require_cut(2, Numerics.DEFAULT)


def test_tensors_that_are_missing_or_have_no_place_are_named(target, tmp_path):
    with pytest.raises(ModelMissing, match=r"^the drafter: "):
        load(target, tmp_path / "nowhere")
    for name, change, error in (
        ("midlayer.hidden_norm.weight", None, ModelTensorMissing),
        ("d2t", None, ModelTensorMissing),
        ("fc.weight", torch.zeros(32, 32), ModelTensorMisshapen),
        ("d2t", torch.zeros(40), ModelTensorMisshapen),
        ("midlayer.self_attn.q_norm.weight", torch.zeros(16), ModelTensorUnexpected),
    ):
        path = write_drafter(tmp_path / f"{name}-{error.__name__}", target)
        tensors = load_file(path / "model.safetensors")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(error, match=f"^the drafter: .*{name.replace('midlayer', 'layers.0')}"):
            load(target, path)
    path = write_drafter(tmp_path / "unsound", target)
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"][0] = -1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"^the drafter: d2t, read as offset"):
        load(target, path)
    assert json.loads((path / "config.json").read_text())["draft_vocab_size"] == 40


def test_a_tensor_under_the_names_of_both_layouts_is_refused(target, tmp_path):
    """One of the two would be taken, and nobody would be told which."""
    path = write_drafter(tmp_path / "drafter", target)
    tensors = load_file(path / "model.safetensors")
    name = "midlayer.mlp.up_proj.weight"
    save_file(tensors | {name.replace("midlayer", "layers.0"): 2 * tensors[name]}, path / "model.safetensors")
    with pytest.raises(ModelTensorUnexpected, match=f"both {name} and layers.0.mlp.up_proj.weight"):
        load(target, path)


def test_values_that_are_not_finite_are_told_with_their_directory(target, tmp_path):
    """Both checkpoints have a model.safetensors, and in it a norm."""
    path = write_drafter(tmp_path / "drafter", target)
    tensors = load_file(path / "model.safetensors")
    tensors["norm.weight"][0] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ModelFileDamaged, match=f"norm.weight holds a NaN or an infinity, in model.safetensors of {path}"
    ):
        load(target, path)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"draft_vocab_size": None}, "is no EAGLE-3 drafter: config.json has no draft_vocab_size"),
        ({"architectures": ["GemmaForCausalLM"]}, r"is no EAGLE-3 drafter: architectures \['GemmaForCausalLM'\]"),
        ({"draft_vocab_size": -3}, r"^the drafter: config.json: draft_vocab_size = -3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"ids = \[1, 1, 2\] are not three of the target's 8 layers"),
    ],
)
def test_what_config_json_says_wrong_is_told(overrides, sentence, target, tmp_path):
    path = write_drafter(tmp_path / "drafter", target, overrides=overrides)
    with pytest.raises(ModelUnsupported, match=sentence):
        load(target, path)


def test_a_model_too_shallow_for_the_usual_layers_is_told_that_none_were_named(tmp_path):
    shallow = write_checkpoint(tmp_path / "model", kind="llama", tie=False, **(SIZES | {"layers": 5}))
    path = write_drafter(tmp_path / "drafter", shallow)
    config = json.loads((path / "config.json").read_text())
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match=r"no eagle_aux_hidden_state_layer_ids, and the usual \[2, 2, 2\] are"):
        load(shallow, path)
