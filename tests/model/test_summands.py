"""Layers whose output the next norm adds up, in the interpreter: no bit differs, and no launch adds up in between."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import baton
import baton.tests.kernels.interpreter
from baton.core.numerics import Numerics, Quantization
from baton.kernels.implementation import Implementation
from baton.kernels.moe import gemm_triton, shared_plan, summands, vector_plan
from baton.kernels.moe.summands import Summands
from baton.kernels.pointwise import rms_norm_triton, sigmoid_gate_triton
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.kernels.harness import same_bits
from baton.tests.model.harness import Paged
from baton.tests.model.test_float8_rows import HYBRID, LATENT, SIZES

MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SHAPES = {
    "mixture": ("qwen3-30b-a3b", MIXTURE),
    "hybrid": ("qwen3.5-35b-a3b", HYBRID),
    "latent": ("deepseek-v3", LATENT | {"num_hidden_layers": 3}),
}
NUM_SPARSE = {"mixture": 2, "hybrid": 2, "latent": 2}
MOST_STACKED = 8
RESULTS = Path(baton.__file__).parent / "benchmarks/results"


@pytest.fixture(params=[(name, how) for name in SHAPES for how in Quantization], ids=str, scope="module")
def drawn(request, tmp_path_factory):
    name, quantization = request.param
    return name, load(name, tmp_path_factory.mktemp(name), quantization)


@pytest.fixture(autouse=True)
def grouped(monkeypatch):
    """Steps of a token or two are not computed row by row, which adds up by itself."""
    monkeypatch.setattr(vector_plan, "is_quicker", lambda *_, **__: False)


def load(name, path, quantization=Quantization.NONE, **options):
    published, sizes = SHAPES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_plan, "steps", lambda *_, **__: range(1, MOST_STACKED + 1))
        return load_model(
            write_shape(published, path, **(SIZES | sizes)),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            random_seed=3,
            implementation=Implementation.TRITON,
            quantization=quantization,
            **{"numerics": Numerics.DEFAULT, "with_mtp": name == "mixture", **options},
        )


def passes(model, length=MOST_STACKED + 3):
    """Of a prompt, in which a shared expert is by itself, of decode rows, in which it is a choice, and of an entry."""
    tokens = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(4))
    paged = Paged(model, num_sequences=1, capacity_len=64)
    found = [paged.trunk(tokens, paged.prefill_batch([(0, 0, length)]))]
    found.append(paged.trunk(tokens[:3], paged.decode_batch([0], [length], 3)))
    if model.with_mtp:
        found.append(paged.mtp(tokens[:5], found[0][:5, : model.config.hidden_size], paged.prefill_batch([(0, 0, 5)])))
    return found


def counted(monkeypatch):
    """Launches that add up, and norms that do."""
    made = Counter()

    def note(module, name, counts=lambda *_: 1):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: made.update({name: counts(*a)}) or launch(*a, **k))

    note(gemm_triton, "launch_sum")
    note(sigmoid_gate_triton, "launch_shared")
    note(rms_norm_triton, "launch", lambda x_TD, weight_D, eps, added, *_: isinstance(added, Summands))
    return made


def test_no_bit_differs_and_nothing_adds_up_in_between(drawn, monkeypatch):
    name, model = drawn
    made = counted(monkeypatch)
    found = passes(model)
    num_norms = 2 * NUM_SPARSE[name] + model.with_mtp
    assert +made == {"launch": num_norms}
    made.clear()
    monkeypatch.setattr(summands, "waits", lambda *_: False)
    wanted = passes(model)
    assert made["launch_sum"] == num_norms
    assert made["launch_shared"] == (0 if name == "mixture" else NUM_SPARSE[name])
    assert made["launch"] == 0
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert same_bits(one, other)


def test_inputs_of_layers_that_are_tapped_are_added_up(drawn, monkeypatch):
    _, model = drawn
    last = len(model._decoder.layers) - 1
    seen = []
    monkeypatch.setattr(model._decoder, "_aux_layers", [0, last])
    monkeypatch.setattr(model._decoder, "_join", lambda aux: seen.append(aux) or torch.cat(list(aux), dim=-1))
    model_passes = [passes(model)]
    monkeypatch.setattr(summands, "waits", lambda *_: False)
    model_passes.append(passes(model))
    assert len(seen) == 4
    for found, wanted in zip(seen[:2], seen[2:], strict=True):
        assert len(found) == 2
        for one, other in zip(found, wanted, strict=True):
            assert isinstance(one, torch.Tensor)
            assert same_bits(one, other)
    for one, other in zip(*model_passes, strict=True):
        assert same_bits(one, other)


def test_steps_of_many_tokens_and_invariant_ones_are_added_up_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(summands, "MAX_TOKENS", 3)
    model = load("mixture", tmp_path / "mixture", with_mtp=False)
    made = counted(monkeypatch)
    passes(model)
    assert (made["launch_sum"], made["launch"]) == (2, 2)  # of the prompt, and of the decode rows
    monkeypatch.setattr(summands, "MAX_TOKENS", 512)
    made.clear()
    model = load("mixture", tmp_path / "again", numerics=Numerics.INVARIANT, with_mtp=False)
    passes(model)
    assert (made["launch_sum"], made["launch"]) == (4, 0)


@pytest.mark.fast
def test_rows_that_no_program_holds_and_few_long_ones_are_added_up_at_once():
    assert summands.waits(512, 9, 7168) and not summands.waits(63, 9, 7168)
    assert summands.waits(1, 12, 2048)
    assert not summands.waits(513, 8, 2048)
    assert not summands.waits(1, 13, 2048)
    assert not summands.waits(1, 12, 8192)


@pytest.mark.fast
def test_sums_wait_where_that_was_measured_to_be_no_slower():
    """But for 0.5 %, on an H200."""
    measured = json.loads((RESULTS / "moe-summands-h200.json").read_text())["rows"]
    sizes = {"qwen3.5-35b-a3b": (9, 2048), "qwen3-30b-a3b": (8, 2048), "deepseek-v3": (8, 7168)}
    for row in measured:
        planned_us = row["norm_us" if summands.waits(row["T"], *sizes[row["shape"]]) else "apart_us"]
        assert planned_us < 1.005 * min(row["norm_us"], row["apart_us"]), row
    assert len(measured) == 24
