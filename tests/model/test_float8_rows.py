"""Rows that norms, gates and heads' values leave in float8 for the GEMM that reads them, without another bit."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.numerics import Numerics, Quantization
from baton.kernels import ops
from baton.kernels.gemm import fp8, fp8_plan, quantize_fp8_triton
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.scaled_mm import Library
from baton.kernels.implementation import Implementation
from baton.kernels.memo import Memo
from baton.kernels.mla import absorb_triton
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.pointwise import rms_norm_triton, silu_mul_triton
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.kernels.harness import relative_error, same_bits
from baton.tests.model.harness import Paged

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256, "eos_token_id": 100, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
HYBRID = EXPERTS | {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 64, "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "first_k_dense_replace": 1,
}  # fmt: skip
SHAPES = {
    "llama": ("llama-3.1-8b", {}),
    "qwen3": ("qwen3-8b", {}),
    "hybrid": ("qwen3.5-35b-a3b", HYBRID),
    "latent": ("deepseek-v3", LATENT),
}
MODELS = [(name, Numerics.DEFAULT) for name in SHAPES]
MODELS += [(name, Numerics.INVARIANT) for name in SHAPES if name != "latent"]  # which is refused
NUM_ROWS = (1, 2, 3, 4, 5, 17, 64, 130)
FEW = {("chosen", 1), ("own", 3), ("library", 5), ("chosen", 17)}
# In invariant numerics there is one plan for any number of rows, of rows that are quantized.
CASES = [
    pytest.param(
        (name, numerics),
        plans,
        num_rows,
        marks=[] if (plans, num_rows) in FEW else [pytest.mark.slow],
        id=f"{name} {numerics.value}-{plans}-{num_rows}",
    )
    for name, numerics in MODELS
    for plans in (("chosen", "own", "library") if numerics is Numerics.DEFAULT else ("chosen",))
    for num_rows in NUM_ROWS
]


@pytest.fixture(params=MODELS, ids=lambda param: f"{param[0]} {param[1].value}", scope="module")
def model(request, tmp_path_factory):
    name, numerics = request.param
    published, sizes = SHAPES[name]
    return load_model(
        write_shape(published, tmp_path_factory.mktemp(name), **(SIZES | sizes)),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        random_seed=3,
        implementation=Implementation.TRITON,
        quantization=Quantization.FP8,
        numerics=numerics,
        with_mtp=name == "qwen3",
    )


def note(monkeypatch, made, module, name, makes_float8):
    """Count a kernel's launches that make float8."""
    launch = module.launch

    def noted(*given, **named):
        made[name] += makes_float8(*given)
        return launch(*given, **named)

    monkeypatch.setattr(module, "launch", noted)


def passes(model, num_rows):
    """Hidden states of a prompt of so many rows, of as many sequences' next rows, and of a draft's entries."""
    tokens = torch.randint(0, 256, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    paged = Paged(model, num_sequences=1, capacity_len=num_rows + 3)
    found = [paged.trunk(tokens, paged.prefill_batch([(0, 0, num_rows)]))]
    found.append(paged.trunk(tokens[:1].expand(3), paged.decode_batch([0], [num_rows], 3)))
    if model.with_mtp:
        found.append(paged.mtp(tokens, found[0], paged.prefill_batch([(0, 0, num_rows)])))
    return torch.cat(found)


def float8_of(part):
    """All GEMM weights in float8 that are reached from a part of a model."""
    if isinstance(part, (Fp8Weight, Fp8ExpertWeights)):
        yield part
    elif isinstance(part, list):
        for one in part:
            yield from float8_of(one)
    elif type(part).__module__.startswith("baton.model.") and hasattr(part, "__dict__"):
        for one in vars(part).values():
            yield from float8_of(one)


def as_library(monkeypatch):
    """As if the library were to compute all GEMMs, which refuses them here: their rows are padded."""
    monkeypatch.setattr(fp8, "_chosen", lambda *_: None)
    monkeypatch.setattr(fp8, "LIBRARY", Library())


def by_own_launch(monkeypatch):
    """As if every plan were one of rows that are quantized, as are most on a GPU."""
    chosen = fp8._chosen
    plan = fp8_plan.GemmPlan(swap=False, BM=64, BN=128, stages=4, warps=4)
    monkeypatch.setattr(fp8, "_chosen", lambda *given: replace(chosen(*given) or plan, fused=False, vector=False))


PLANS = {"chosen": lambda _: None, "library": as_library, "own": by_own_launch}


@pytest.fixture(autouse=True)
def memos(monkeypatch):
    """Plans are remembered, and these are no others'."""
    for name, value in list(vars(fp8).items()):
        if isinstance(value, Memo):
            monkeypatch.setattr(fp8, name, Memo())


@pytest.mark.parametrize(("model", "plans", "num_rows"), CASES, indirect=["model"])
def test_every_bit_is_as_if_float8_were_made_apart(model, plans, num_rows, monkeypatch):
    PLANS[plans](monkeypatch)
    found = passes(model, num_rows)
    assert found.isfinite().all()
    monkeypatch.setattr(ops, "num_quantized", lambda *_, **__: None)
    assert same_bits(found, passes(model, num_rows))


@pytest.mark.parametrize("model", [("hybrid", Numerics.DEFAULT)], indirect=True)
def test_state_gates_that_take_no_launch_are_those_of_a_launch(model, monkeypatch):
    """But for the order of their sums."""

    def hidden():
        paged = Paged(model, num_sequences=2, capacity_len=8)
        return torch.cat([paged.trunk([3 + at, 9 + at], paged.decode_batch([0, 1], [at, at], 1)) for at in range(3)])

    found = hidden()
    monkeypatch.setattr(model.ops, "leaves_gates", lambda _: False)
    wanted = hidden()
    assert wanted.isfinite().all()
    assert relative_error(found, wanted) < 2**-6


@pytest.mark.parametrize("model", [("qwen3", Numerics.DEFAULT), ("latent", Numerics.DEFAULT)], indirect=True)
def test_scales_are_powers_of_two_where_a_checkpoint_says_so(model, monkeypatch):
    by_own_launch(monkeypatch)
    plain = passes(model, 3)
    for weight in float8_of(model._decoder):
        object.__setattr__(weight, "ue8m0", True)
    try:
        found = passes(model, 3)
        monkeypatch.setattr(ops, "num_quantized", lambda *_, **__: None)
        assert same_bits(found, passes(model, 3))
        assert not same_bits(found, plain)
    finally:
        for weight in float8_of(model._decoder):
            object.__setattr__(weight, "ue8m0", False)


def test_only_what_attention_made_is_quantized_by_a_launch_of_its_own(model, monkeypatch):
    """Norms and gates do it themselves, also where a router or a state's gates read the rows, too."""
    by_own_launch(monkeypatch)
    for mlp in model.sparse_layers:  # as in steps of many rows
        monkeypatch.setattr(mlp, "_stacked_steps", range(0))
    made = Counter()
    note(monkeypatch, made, quantize_fp8_triton, "quantize", lambda *_: True)
    note(monkeypatch, made, rms_norm_triton, "norm", lambda *given: given[4] is not None)
    note(monkeypatch, made, silu_mul_triton, "gate", lambda *given: given[1] is not None)
    paged = Paged(model, capacity_len=16)
    paged.trunk(torch.arange(3), paged.prefill_batch([(0, 0, 3)]))
    assert made == {"quantize": 2, "norm": 4 if model.config.latent is None else 6, "gate": 2}  # of two layers
    if model.with_mtp:
        made.clear()
        paged.mtp(torch.arange(3), torch.zeros(3, 128).bfloat16(), paged.prefill_batch([(0, 0, 3)]))
        assert made == {"quantize": 1, "norm": 2, "gate": 1}


@pytest.mark.parametrize("model", [("hybrid", Numerics.DEFAULT), ("latent", Numerics.DEFAULT)], indirect=True)
def test_no_norm_quantizes_for_a_shared_expert_that_is_one_more_choice(model, monkeypatch):
    by_own_launch(monkeypatch)
    made = Counter()
    note(monkeypatch, made, rms_norm_triton, "norm", lambda *given: given[4] is not None)
    note(monkeypatch, made, silu_mul_triton, "gate", lambda *given: given[1] is not None)
    paged = Paged(model, capacity_len=16)
    paged.trunk(torch.arange(3), paged.prefill_batch([(0, 0, 3)]))
    num_sparse = len(model.sparse_layers)
    num_norms = 4 if model.config.latent is None else 6
    assert made == Counter(norm=num_norms - num_sparse, gate=2 - num_sparse)


@pytest.mark.parametrize("model", [("latent", Numerics.DEFAULT)], indirect=True)
def test_values_of_decode_rows_over_latents_are_quantized_as_they_are_made(model, monkeypatch):
    by_own_launch(monkeypatch)
    made = Counter()
    note(monkeypatch, made, quantize_fp8_triton, "quantize", lambda *_: True)
    launch = absorb_triton.launch_values

    def noted(mixed_TAC, value_AVC, num_padded, **options):
        made["values"] += num_padded is not None
        return launch(mixed_TAC, value_AVC, num_padded, **options)

    monkeypatch.setattr(absorb_triton, "launch_values", noted)
    paged = Paged(model, num_sequences=1, capacity_len=16)
    paged.trunk(torch.arange(3), paged.decode_batch([0], [0], 3))
    assert made == {"values": 2}  # of two layers


def test_rows_that_each_program_quantizes_are_left_to_it(model, monkeypatch):
    """One row's GEMMs here, in default numerics."""
    made = Counter()
    for module in (quantize_fp8_triton, rms_norm_triton, silu_mul_triton):
        which = {rms_norm_triton: 4, silu_mul_triton: 1}.get(module)
        note(monkeypatch, made, module, "any", lambda *given, at=which: at is None or given[at] is not None)
    paged = Paged(model, capacity_len=16)
    paged.trunk(torch.arange(1), paged.prefill_batch([(0, 0, 1)]))
    assert bool(made["any"]) is model.ops.is_invariant
