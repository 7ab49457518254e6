"""DeepSeek-V3 and GLM-4.5: transformers' logits and MTP entries, however a text is cut, at 1 and 2 ranks."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from baton.core.numerics import Numerics
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.deepseek_checkpoints import DEEPSEEKS, YARN, DeepseekReference
from baton.tests.model.fp8_checkpoints import LAYOUTS, write_float8
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_hybrid import cuts_of, load, run

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


@pytest.mark.fast
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
    """`functional.linear` that rounds rows by the checkpoint's rule where the weight is of a float8 product."""

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
        scaled = groups / scale
        rounded = scaled.to(torch.float8_e4m3fn).float()
        step = torch.where(rounded.abs() < 2**-6, 2.0**-9, 2.0 ** (scaled.abs().clamp_min(2**-6).log2().floor() - 3))
        to_tie = ((scaled - rounded).abs() - step / 2).abs() / scaled.abs().clamp_min(2**-6)
        self.margin = min(self.margin, float(to_tie[scaled != 0].min()))
        return (rounded * scale).flatten(-2)


@pytest.mark.parametrize("kind", DEEPSEEKS)
def test_float8_by_the_checkpoints_rule(kind, tmp_path, monkeypatch):
    """Values times scales of blocks, rows rounded in groups of 128 before each float8 product; at 1 and 2 ranks."""
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
        products = [attention.out_DQ]
        products += [attention.down_XD, attention.query_up_QX] if kind == "deepseek_v3" else [attention.qkv_QD]
        assert all(isinstance(product, Fp8Weight) for product in products)
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
