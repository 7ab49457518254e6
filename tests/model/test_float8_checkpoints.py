"""Float8 checkpoints as they are published: what they compute, over ranks, what is dequantized, and what is refused."""

import json
import logging
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.errors import (
    ModelFileDamaged,
    ModelTensorMisshapen,
    ModelTensorMissing,
    ModelTensorUnexpected,
    ModelUnsupported,
)
from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.kernels import ops
from baton.kernels.gemm.fp8 import linear_fp8
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN
from baton.kernels.implementation import Implementation
from baton.kernels.moe.gemm import Fp8ExpertWeights, dequantize
from baton.kernels.moe.moe import ExpertWeights
from baton.model.checkpoint.fp8_fit import dequantized_weights
from baton.model.checkpoint.fp8_scheme import BLOCK_LEN, ScaleKind, read_scheme
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.tensor_spec import check_tensors, tensor_spec
from baton.model.tp_fit import require_cut_float8
from baton.tests.kernels.harness import relative_error
from baton.tests.model.fp8_checkpoints import (
    BLOCKS,
    FBGEMM,
    IGNORED,
    LAYOUTS,
    rewrite_config,
    write_float8,
)
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

CPU = torch.device("cpu")
TOLERANCE = 2e-4
NUM_TOKENS = 7
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def load(path, dtype=torch.float32, group=None, numerics=Numerics.DEFAULT, **options):
    options = {"with_mtp": True, "communicator": group, "numerics": numerics, **options}
    return load_model(path, dtype=dtype, device=CPU, **options)


@pytest.fixture(scope="session")
def float8(tmp_path_factory):
    """A factory of checkpoints and twins; they are not to be changed."""
    written = {}

    def make(layout, kind="qwen3", seed=5):
        key = (layout, kind, seed)
        if key not in written:
            path = tmp_path_factory.mktemp("float8")
            written[key] = write_float8(path, LAYOUTS[layout], kind=kind, seed=seed)
        return written[key]

    return make


@pytest.fixture
def copy(float8, tmp_path):
    """A good checkpoint in blocks that a test may spoil."""
    return shutil.copytree(float8("deepseek")[0], tmp_path / "model")


def rewrite_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def logits_of(model, group=None):
    """Of a prompt in two chunks, and of MTP entries."""
    ids = prompt(NUM_TOKENS)
    paged = Paged(model, group=group)
    hidden = paged.prefill(ids, chunk_len=4)
    drafts = paged.mtp(ids[1:], hidden[:-1], paged.prefill_batch([(0, 0, NUM_TOKENS - 1)]))
    return torch.cat([paged.logits(hidden), paged.logits(drafts)])


def weights_of(part, path=""):
    """Everything that a model multiplies with, by its place; what two are views of is left out."""
    if isinstance(part, (torch.Tensor, Fp8Weight, ExpertWeights, Fp8ExpertWeights)):
        yield path, part
    elif isinstance(part, list):
        for index, one in enumerate(part):
            yield from weights_of(one, f"{path}.{index}")
    elif type(part).__module__.startswith("baton.model.") and hasattr(part, "__dict__"):
        for name, one in vars(part).items():
            if name in ("both_ND", "both_XD", "router_XD", "stack"):
                continue
            yield from weights_of(one, f"{path}.{name}")


def plain_of(weight):
    """Its tensors, float8 as what values and scales stand for."""
    match weight:
        case Fp8Weight():
            return [weight.dequantize()]
        case Fp8ExpertWeights():
            return [
                dequantize(weight.gate_up_EJD, weight.gate_up_scale), dequantize(weight.down_EDI, weight.down_scale)
            ]  # fmt: skip
        case ExpertWeights():
            return [weight.gate_up_EJD, weight.down_EDI]
    return [weight]


def float8_of(model, twin):
    """Places of the weights that are float8; every weight is, bit for bit, that of the twin."""
    found, theirs = dict(weights_of(model)), dict(weights_of(twin))
    assert found.keys() == theirs.keys()
    for place, weight in found.items():
        for mine, plain in zip(plain_of(weight), plain_of(theirs[place]), strict=True):
            assert torch.equal(mine, plain), place
    return {place for place, weight in found.items() if isinstance(weight, (Fp8Weight, Fp8ExpertWeights))}


def is_linear(place):
    return place.endswith((".qkv_QD", ".out_DQ", ".gate_up_JD", ".down_DI", ".mlp.experts"))


FAST = {("qwen3-fp8", 1), ("autofp8", 2), ("compressed channel", 1)}
CASES = [
    pytest.param(layout, kind, size, marks=[pytest.mark.fast] if (layout, size) in FAST else [])
    for layout in LAYOUTS
    for kind in ("qwen3", "qwen3_moe", "qwen2_moe")
    for size in (1, 2)
]
# Others differ in what float8 does not touch: one layout of each kind of scale.
OTHERS = [("autofp8", "mixtral"), ("autofp8", "llama"), ("compressed channel", "llama"), ("qwen3-fp8", "mistral")]
OTHERS += [("compressed tensor", "mistral"), ("compressed block", "qwen2"), ("modelopt", "qwen2")]
CASES += [pytest.param(*other, size) for other in OTHERS for size in (1, 2)]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "kind", "size"), CASES)
def test_weights_are_values_times_scales_and_gemms_round_activations(layout, kind, size, float8):
    path, plain = float8(layout, kind)

    def work(group):
        model, twin = load(path, group=group), load(plain, group=group)
        places = [place for place, _ in weights_of(model)]
        return float8_of(model, twin), places, logits_of(model, group), logits_of(twin, group)

    for found, places, logits, wanted in on_ranks(size, work):
        difference = float((logits - wanted).abs().max())
        if LAYOUTS[layout].wide:
            assert (found, difference) == (set(), 0.0)
            continue
        gemms = {place for place in places if is_linear(place)}
        assert found == {place for place in gemms if not place.endswith("layers.1.attention.out_DQ")}
        assert 10 * TOLERANCE < difference, "activations are rounded, too"
        assert relative_error(logits, wanted) < 0.25  # it may choose other experts


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_moe"])
def test_weights_are_those_that_transformers_dequantizes(kind, float8, monkeypatch):
    """Its own reading of the same directory; it asks for a package that nothing here needs."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *_: True)
    path, _ = float8("qwen3-fp8", kind)
    asked = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=list(IGNORED))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=asked)
    ids, paged = prompt(NUM_TOKENS), Paged(load(path, torch.float64))
    with torch.no_grad():
        wanted = theirs(input_ids=ids[None]).logits[0]
    assert (paged.logits(paged.prefill(ids)) - wanted).abs().max() <= 1e-5


def rounded(x, is_power):
    """What float8 keeps of activations, 128 of which share a scale; it is a power of two if the checkpoint says so."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) * (1 / 448)
    scale = scale.double().log2().ceil().exp2().float() if is_power else scale
    return ((groups * (1 / scale)).to(torch.float8_e4m3fn).double() * scale.double()).flatten(-2)


@pytest.mark.parametrize("layout", ["qwen3-fp8", "deepseek", "compressed block", "autofp8", "modelopt"])
def test_activations_are_rounded_by_the_checkpoints_rule(layout, float8, monkeypatch):
    """Each GEMM's output is that of its own rounded input, in float64."""
    seen = []

    def linear(x_MK, weight, **named):
        out_MN = linear_fp8(x_MK, weight, **named)
        seen.append((x_MK.clone(), weight, out_MN.clone()))
        return out_MN

    monkeypatch.setattr(ops, "linear_fp8", linear)
    logits_of(load(float8(layout)[0]))
    assert len(seen) == 2 * (4 + 3) + 4  # of two chunks in two layers, one output projection left out; of MTP
    is_power = layout == "deepseek"
    for x_MK, weight, out_MN in seen:
        wanted, otherwise = (rounded(x_MK, it) @ weight.dequantize().double().T for it in (is_power, not is_power))
        assert relative_error(out_MN, wanted) < 1e-6
        assert relative_error(out_MN, otherwise) > 1e-3


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["qwen3-fp8", "deepseek"])
def test_every_float8_weight_knows_the_rule_for_activations(layout, kind, float8):
    model = load(float8(layout, kind)[0], torch.bfloat16)
    float8_weights = [one for _, one in weights_of(model) if isinstance(one, (Fp8Weight, Fp8ExpertWeights))]
    assert float8_weights
    assert {one.ue8m0 for one in float8_weights} == {layout == "deepseek"}


@pytest.mark.fast
def test_the_kernels_blocks_are_the_checkpoints():
    assert BLOCK_LEN == GROUP_LEN


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stored_values_and_scales_are_what_gemms_read(dtype, float8):
    path, _ = float8("qwen3-fp8")
    stored, attention = load_file(path / "model.safetensors"), load(path, dtype)._decoder.layers[0].attention
    modules = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert isinstance(attention.qkv_QD, Fp8Weight)
    values = torch.cat([stored[f"{module}.weight"] for module in modules])
    assert torch.equal(attention.qkv_QD.values_NK.view(torch.uint8), values.view(torch.uint8))
    scales = torch.cat([stored[f"{module}.weight_scale_inv"] for module in modules])
    assert torch.equal(attention.qkv_QD.scales_BG, scales.float())


def test_a_rank_reads_its_part_of_values_and_scales(float8):
    path, _ = float8("deepseek", "qwen3_moe")
    whole = load(path)._decoder.layers[0]
    parts = on_ranks(2, lambda group: load(path, group=group)._decoder.layers[0])
    assert isinstance(whole.mlp.experts, Fp8ExpertWeights)
    for name, dim in (("down_EDI", 2), ("down_scale", 2)):
        together = torch.cat([getattr(part.mlp.experts, name).float() for part in parts], dim)
        assert torch.equal(together, getattr(whole.mlp.experts, name).float())
    together = torch.cat([part.attention.out_DQ.scales_BG for part in parts], 1)
    assert torch.equal(together, whole.attention.out_DQ.scales_BG)


@pytest.mark.fast
@pytest.mark.long
def test_bfloat16_is_near(float8):
    path, _ = float8("deepseek")
    wide, narrow = logits_of(load(path)), logits_of(load(path, torch.bfloat16))
    assert (wide - narrow).norm() < 0.1 * wide.norm()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("layout", ["deepseek", "modelopt"])
def test_kernels_give_the_references_logits(layout, kind, float8):
    path, _ = float8(layout, kind)
    wanted = logits_of(load(path, torch.bfloat16, implementation=Implementation.REFERENCE))
    found = logits_of(load(path, torch.bfloat16, implementation=Implementation.TRITON))
    assert relative_error(found, wanted) < 0.1  # in bfloat16 more sums choose the other neighbour


def test_invariant_numerics_hold_with_kernels_on_one_rank(float8):
    path, _ = float8("deepseek")
    model, ids = (
        load(path, torch.bfloat16, numerics=Numerics.INVARIANT, implementation=Implementation.TRITON),
        prompt(9),
    )
    whole, parts = Paged(model), Paged(model)
    assert torch.equal(whole.prefill(ids), parts.prefill(ids, chunk_len=4))


@pytest.mark.fast
def test_float64_widens_exactly(float8, caplog):
    path, plain = float8("qwen3-fp8")  # whose GEMMs fit into float32
    with caplog.at_level(logging.WARNING):
        model = load(path, torch.float64)
    assert caplog.text.count("float8 weights are computed as float64") == 1
    assert "made for bfloat16 and float32" in caplog.text
    assert (logits_of(model) - logits_of(load(plain, torch.float64))).abs().max() < 1e-9


@pytest.mark.fast
@pytest.mark.parametrize(
    ("layout", "why", "count"),
    [
        ("compressed channel", "20 because kernels have no scale per channel, 1 because", "21 of 21 float8"),
        ("compressed weight-only", "20 because activations are not to be quantized", "21 of 21 float8"),
        ("deepseek", "1 because no float8 GEMM reads it", "1 of 21 float8"),
    ],
)
@pytest.mark.long
def test_what_is_dequantized_is_counted_in_one_line(layout, why, count, float8, caplog):
    path, _ = float8(layout)
    with caplog.at_level(logging.WARNING):
        load(path)
    lines = [record.getMessage() for record in caplog.records if "float8" in record.getMessage()]
    assert len(lines) == 1
    assert why in lines[0]
    assert lines[0].startswith(count)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("layout", ["qwen3-fp8", "modelopt", "compressed channel", "compressed weight-only"])
def test_headers_tell_what_the_loader_will_count(layout, kind, dtype, size, float8, caplog):
    path, _ = float8(layout, kind)
    config, headers = ModelConfig.from_directory(path), read_headers(path)
    spec = tensor_spec(config, with_mtp=True)
    stored, name = check_tensors(spec, headers, config.fp8), str(dtype).removeprefix("torch.")
    whys = dequantized_weights(config, stored, spec, name, size)
    if (layout, size) == ("qwen3-fp8", 4) and kind in (
        "qwen3_moe",
        "qwen2_moe",
    ):  # refused, as its parts are no whole blocks
        with pytest.raises(ModelUnsupported, match="no whole blocks"):
            require_cut_float8(spec, stored, size)
        return
    with caplog.at_level(logging.WARNING):
        load(path, dtype, Rank(0, size))
    for why, count in Counter(whys.values()).items():
        assert f"{count} because {why}" in caplog.text
    assert f"{len(whys)} of {len(stored.scales)} float8" in caplog.text


class Rank:
    """A rank whose part is loaded, and not used."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_sum(self, x):
        raise AssertionError

    all_gather = all_sum


@pytest.mark.fast
def test_a_stack_with_a_part_that_is_no_float8_is_dequantized(float8, tmp_path, caplog):
    ignored = (*IGNORED, "model.layers.0.self_attn.k_proj")
    path, plain = write_float8(tmp_path, LAYOUTS["deepseek"], ignored=ignored)
    with caplog.at_level(logging.WARNING):
        found = float8_of(load(path), load(plain))
    assert "2 because it is stacked with a weight that is not float8" in caplog.text
    assert not any(place.endswith("_decoder.layers.0.attention.qkv_QD") for place in found)
    assert any(place.endswith("_decoder.layers.1.attention.qkv_QD") for place in found)


@pytest.mark.fast
def test_rows_that_are_stacked_inside_a_block_are_dequantized(tmp_path, caplog):
    path, plain = write_float8(tmp_path, LAYOUTS["deepseek"], overrides={"intermediate_size": 320})
    with caplog.at_level(logging.WARNING):
        found = float8_of(load(path), load(plain))
    assert "rows that are stacked are no multiples of 128" in caplog.text
    assert "a rank's columns are no multiple of 128" in caplog.text
    assert found
    assert not any(".mlp." in place for place in found)


LAYERS = ("model.layers.0", "model.layers.1", "mtp.layers.0")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"overrides": {"intermediate_size": 384}}, "mlp.gate_proj.weight"),
        ({"head_dim": 64}, "self_attn.k_proj.weight"),
        ({"num_kv_heads": 1, "head_dim": 64}, "self_attn.o_proj.weight"),
    ],
)
def test_a_cut_inside_of_a_block_is_refused_by_name(options, name, tmp_path):
    if options.get("num_kv_heads"):
        options |= {"num_heads": 2}
    path, _ = write_float8(tmp_path, LAYOUTS["deepseek"], **options)
    with pytest.raises(ModelUnsupported, match="no whole blocks of 128") as refused:
        on_ranks(2, lambda group: load(path, group=group, on_progress=lambda *_: pytest.fail("weights were read")))
    assert refused.value.fields["option"] == "tp"
    assert load(path, with_mtp=False)  # one rank can


@pytest.mark.fast
@pytest.mark.long
def test_kv_scales_beside_projections_are_used(float8, tmp_path):
    path = shutil.copytree(float8("modelopt")[0], tmp_path / "model")
    own = {f"{layer}.self_attn.{part}_proj.{part}_scale": torch.tensor(0.03) for layer in LAYERS for part in "kv"}
    rewrite_tensors(path, lambda tensors: tensors.update(own))
    found = logits_of(load(path, kv_dtype=KVDtype.FP8))
    others = ("q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_output_scale")  # say nothing of KV
    unused = {f"{layer}.self_attn.{name}": torch.tensor(7.0) for layer in LAYERS for name in others}
    rewrite_tensors(path, lambda tensors: tensors.update(unused))
    assert torch.equal(logits_of(load(path, kv_dtype=KVDtype.FP8)), found)
    rewrite_tensors(path, lambda t: t.update({n.replace(f"{n[-7]}_scale", "output_scale"): t.pop(n) for n in own}))
    assert torch.equal(logits_of(load(path, kv_dtype=KVDtype.FP8)), found)
    load(path)
    rewrite_tensors(path, lambda t: t.update({n: t.pop(n.replace(f"{n[-7]}_scale", "output_scale")) for n in own}))
    rewrite_tensors(path, lambda t: t.update({n.replace("k_proj.", "").replace("v_proj.", ""): t.pop(n) for n in own}))
    assert torch.equal(logits_of(load(path, kv_dtype=KVDtype.FP8)), found)
    assert not torch.equal(logits_of(load(float8("modelopt")[0], kv_dtype=KVDtype.FP8)), found)
    rewrite_tensors(path, lambda tensors: [tensors.pop(name.replace(f"{name[-7]}_proj.", "")) for name in own])
    both = {f"{layer}.self_attn.kv_scale": torch.tensor([0.03]) for layer in LAYERS}
    rewrite_tensors(path, lambda tensors: tensors.update(both))
    assert torch.equal(logits_of(load(path, kv_dtype=KVDtype.FP8)), found)


@pytest.mark.fast
def test_float16_is_converted_and_said_once(tmp_path, caplog):
    path, _ = write_float8(tmp_path, LAYOUTS["deepseek"])
    rewrite_tensors(
        path, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items() if t.dtype is torch.float32})
    )
    with caplog.at_level(logging.WARNING):
        load(path, torch.bfloat16)
        load(path)
    assert caplog.text.count("float16 weights are rounded to bfloat16") == 1


@pytest.mark.fast
def test_quantization_at_load_changes_nothing(float8):
    path, _ = float8("deepseek")
    asked = load(path, torch.bfloat16, quantization=Quantization.FP8)
    plain = load(path, torch.bfloat16)
    assert asked.config == plain.config
    assert torch.equal(logits_of(asked), logits_of(plain))


@pytest.mark.fast
def test_random_weights_stand_in_for_float8(float8, tmp_path):
    path, _ = float8("deepseek")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert isinstance(load(tmp_path, torch.bfloat16, random_seed=1)._decoder.layers[0].attention.qkv_QD, Fp8Weight)
    assert isinstance(load(tmp_path, random_seed=1)._decoder.layers[0].attention.qkv_QD, torch.Tensor)


@pytest.mark.fast
def test_invariant_numerics_are_refused_where_nothing_computes_them(float8):
    with pytest.raises(ModelUnsupported, match="--batch-invariant"):
        load(float8("deepseek")[0], numerics=Numerics.INVARIANT)
    assert load(float8("compressed channel")[0], numerics=Numerics.INVARIANT)


SPOILED = {
    "a weight without its scale": (
        lambda t: t.pop(f"{Q}.weight_scale_inv"), ModelTensorMissing, rf"lacks its scale {Q}\.weight_scale_inv",
    ),
    "a scale without its weight": (
        lambda t: t.pop(f"{Q}.weight"), ModelTensorMissing, rf"holds {Q}\.weight_scale_inv, and lacks {Q}\.weight",
    ),
    "a scale of a weight that is wide": (
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}), ModelTensorUnexpected, "is no float8 but F32",
    ),
    "a scale of nothing": (
        lambda t: t.update({"model.layers.0.mlp.x_proj.weight_scale_inv": torch.ones(1)}),
        ModelTensorUnexpected, r"x_proj\.weight_scale_inv",
    ),
    "a transposed scale": (
        lambda t: t.update({f"{DOWN}.weight_scale_inv": t[f"{DOWN}.weight_scale_inv"].T.contiguous()}),
        ModelTensorMisshapen, r"\[4, 2\].*\[2, 4\]",
    ),
    "a scale per channel": (
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(512, 1)}), ModelTensorMisshapen, r"\[512, 1\]",
    ),
    "scales of integers": (
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(4, 2, dtype=torch.int32)}),
        ModelTensorMisshapen, "stored as I32",
    ),
    "two kinds of scale": (
        lambda t: t.update({f"{Q}.weight_scale": torch.ones(4, 2)}), ModelTensorUnexpected, r"q_proj\.weight_scale",
    ),
    "another float8": (
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float().to(torch.float8_e5m2)}),
        ModelTensorUnexpected, "F8_E5M2",
    ),
    "an input scale per channel": (
        lambda t: t.update({f"{Q}.input_scale": torch.ones(4)}), ModelTensorMisshapen, "input_scale",
    ),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", SPOILED)
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(name, copy):
    spoil, error, sentence = SPOILED[name]
    rewrite_tensors(copy, spoil)
    with pytest.raises(error, match=sentence):
        load(copy, on_progress=lambda *_: pytest.fail("weights were read"))


@pytest.mark.fast
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_numbers_that_are_no_scale(number, copy):
    rewrite_tensors(copy, lambda tensors: tensors[f"{Q}.weight_scale_inv"].fill_(number))
    with pytest.raises(ModelUnsupported, match=r"q_proj.*no scale"):
        load(copy)


@pytest.mark.fast
def test_float8_without_a_scheme_and_a_scheme_without_float8(copy, float8, tmp_path):
    plain = shutil.copytree(float8("deepseek")[1], tmp_path / "plain")
    rewrite_config(plain, quantization_config=BLOCKS)
    with pytest.raises(ModelUnsupported, match="no weight is float8"):
        load(plain)
    rewrite_config(copy, quantization_config=None)
    with pytest.raises(ModelTensorUnexpected, match="weight_scale_inv"):
        load(copy)
    rewrite_tensors(copy, lambda t: [t.pop(name) for name in list(t) if name.endswith("_scale_inv")])
    with pytest.raises(ModelTensorMisshapen, match=r"where config\.json has a quantization_config"):
        load(copy)


def compressed(layout="compressed tensor", *, top=(), **weights):
    """A compressed-tensors configuration with other values."""
    found = json.loads(json.dumps(LAYOUTS[layout].config)) | dict(top)
    found["config_groups"]["group_0"]["weights"] |= weights
    return found


def compressed_groups(**weights):
    return compressed("compressed block", **weights)["config_groups"]


# Two groups as compressed-tensors 0.20.1 writes them, and llm-compressor's scheme for KV with a scale for each head.
MIXED = compressed(top={"format": "mixed-precision"}.items())
MIXED["config_groups"]["group_1"] = {
    "format": "pack-quantized", "input_activations": None, "output_activations": None, "targets": ["re:.*mlp.*"],
    "weights": {"group_size": 128, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"},
}  # fmt: skip
KV_OF_HEADS = {"dynamic": False, "num_bits": 8, "strategy": "attn_head", "symmetric": True, "type": "float"}
UNSUPPORTED = {
    "awq": ({"quant_method": "awq", "bits": 4}, "holds INT4 weights, quantized by 'awq'; this version serves"),
    "gptq": ({"quant_method": "gptq", "bits": 8}, "INT8 weights, quantized by 'gptq'"),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "holds NF4 weights",
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, "quantized by 'mxfp4'"),
    "no method": ({"bits": 4}, "quantized by 'None'"),
    "a list": (["fp8"], "is no mapping"),
    "other blocks": (BLOCKS | {"weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\]"),
    "another float": (BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    "another activation": (BLOCKS | {"activation_scheme": "ternary"}, "activation_scheme = 'ternary'"),
    "experts in fp4": (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    "an unknown key of fbgemm": (FBGEMM | {"rotation": "hadamard"}, r"quantization_config\.rotation = 'hadamard'"),
    "an unknown key": (BLOCKS | {"rotation": "hadamard"}, r"quantization_config\.rotation = 'hadamard'"),
    "packed": (compressed(top={"format": "pack-quantized"}.items()), "INT4 or INT8 weights .*pack-quantized"),
    "int4 beside int8": (compressed(top={"format": "int-quantized"}.items()), "INT4 or INT8 weights .*int-quantized"),
    "compressed mxfp4": (compressed(top={"format": "mxfp4-pack-quantized"}.items()), "holds MXFP4 weights"),
    "compressed mxfp8": (compressed(top={"format": "mxfp8-quantized"}.items()), "holds MXFP8 weights"),
    "one group in int4": (MIXED, r"holds INT4 or INT8 weights \(compressed-tensors, pack-quantized\); this version"),
    "KV scales of heads": (
        compressed(top={"kv_cache_scheme": KV_OF_HEADS}.items()),
        r"kv_cache_scheme\.strategy = 'attn_head' is not implemented; 'tensor' is",
    ),
    "int8": (compressed(type="int"), r"weights\.type = 'int'"),
    "asymmetric": (compressed(symmetric=False), r"weights\.symmetric = False"),
    "groups": (compressed(strategy="group"), r"weights\.strategy = 'group'"),
    "rotated": (compressed(top={"transform_config": {"config_groups": {"u": 1}}}.items()), "transform_config"),
    "sparse": (compressed(top={"sparsity_config": {"format": "sparse-24-bitmask"}}.items()), "sparsity_config"),
    "sparse in no form": (compressed(top={"sparsity_config": {"format": None}}.items()), "sparsity_config"),
    "compressed blocks": (compressed("compressed block", block_structure=[64, 64]), "block_structure"),
    "other blocks in words": (compressed("compressed block", block_structure="64x64"), "block_structure = '64x64'"),
    "dense groups": (compressed(top={"format": "dense"}.items()), "format = 'dense'"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "names no group"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    "blocks of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
        r"quant_algo 'fp8_pb_wo' \(ModelOpt\); this version serves FP8 and FP8_PER_CHANNEL_PER_TOKEN$",
    ),
    "mixed": ({"quantization": {"quant_algo": "MIXED_PRECISION"}}, "MIXED_PRECISION"),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.long
def test_other_schemes_are_refused_in_one_sentence(name, copy):
    config, sentence = UNSUPPORTED[name]
    rewrite_config(copy, quantization_config=config)
    with pytest.raises(ModelUnsupported, match=sentence) as refused:
        load(copy)
    assert refused.value.fields["option"] == "quantization_config"
    assert "\n" not in str(refused.value)


DENSE = {
    "format": "dense", "global_sparsity": 0.14, "ignore": [], "registry_requires_subclass": False,
    "sparsity_structure": "unstructured", "targets": [],
}  # fmt: skip
SAYS_NO_MORE = {
    "a sparsity that is stored dense": ("compressed tensor", {"sparsity_config": DENSE}),
    "no sparsity": ("compressed tensor", {"sparsity_config": None}),
    "blocks in words": ("compressed block", {"config_groups": compressed_groups(block_structure="128x128")}),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", SAYS_NO_MORE)
def test_what_changes_nothing_is_read_over(name, tmp_path):
    layout, changes = SAYS_NO_MORE[name]
    values = LAYOUTS[layout].config
    wanted = read_scheme({"quantization_config": values}, tmp_path)
    assert read_scheme({"quantization_config": values | changes}, tmp_path) == wanted
    assert wanted is not None


@pytest.mark.fast
@pytest.mark.parametrize("groups", [{}, None])
def test_kv_alone_is_quantized_by_compressed_tensors(groups, tmp_path):
    scheme = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}
    values = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": groups, "ignore": []}
    assert read_scheme({"quantization_config": values | {"kv_cache_scheme": scheme}}, tmp_path) is None
    with pytest.raises(ModelUnsupported, match="rotation"):
        read_scheme({"quantization_config": values | {"rotation": "hadamard"}}, tmp_path)


@pytest.mark.fast
def test_modelopts_own_file(copy):
    file = copy / "hf_quant_config.json"
    rewrite_config(copy, quantization_config=None)
    file.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert ModelConfig.from_directory(copy).fp8 is None
    file.write_text('{"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}')
    assert ModelConfig.from_directory(copy).fp8.kinds == (ScaleKind.CHANNEL,)
    file.write_text("{")
    with pytest.raises(ModelFileDamaged, match="hf_quant_config"):
        ModelConfig.from_directory(copy)
