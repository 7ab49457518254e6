"""What is launched before a worker serves is all that serving launches, a variant, and compiled ahead; sizes."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.graphs.kernel_warm_up import (
    Reach,
    classes,
    decode_shapes,
    prefill_shapes,
    warm_up_decode_passes,
    warm_up_prefill_passes,
)
from baton.kernels.gemm.linear_ordered_triton import TOKENS, rule
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.harness import noting_layers

REACH = Reach(num_tokens=2048, num_sequences=12, context_len=8200)
LIMIT_S = 600  # 40 s of a CPU of its own, without a defect


def launches(num_rounds, *names):
    """What `kernel_launches` says, by model; Triton's interpreter, in which tests are, compiles nothing."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", "baton.tests.engine.kernel_launches", str(num_rounds), *names]
    text = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=4 * LIMIT_S
    ).stdout  # fmt: skip
    return {found["model"]: found for found in map(json.loads, text.splitlines())}


@pytest.mark.fast
def test_sizes_stand_for_all_up_to_the_most():
    assert classes(1) == (1,)
    assert classes(2) == (1, 2)
    assert classes(7) == (1, 2, 3, 4, 6, 7)
    for most in range(1, 100):
        found = classes(most)
        assert (found[0], found[-1]) == (1, most)
        assert all(above <= below * 2 for below, above in pairwise(found))


@pytest.mark.fast
def test_prefill_shapes_fit_their_steps_and_reach_every_limit():
    found = list(prefill_shapes(REACH, 16))
    assert len(found) == len(set(found))
    for lens, width in found:
        assert len(lens) <= REACH.num_sequences
        assert sum(lens) <= REACH.num_tokens
        assert width * 16 >= max(lens)
        assert width <= -(-REACH.context_len // 16)
    assert max(len(lens) for lens, _ in found) == 12
    assert max(sum(lens) for lens, _ in found) == 2048
    assert max(width for _, width in found) == 513
    assert {((1,), 1), ((1,) * 12, 513), ((16,), 64), ((2048,), 256), ((1536, *(1,) * 11), 513)} <= set(found)


@pytest.mark.fast
def test_a_chunk_is_never_longer_than_the_context():
    found = list(prefill_shapes(Reach(num_tokens=1 << 24, num_sequences=1, context_len=40), 16))
    assert max(max(lens) for lens, _ in found) == 40
    assert {len(lens) for lens, _ in found} == {1}
    found = list(prefill_shapes(Reach(num_tokens=1 << 24, num_sequences=1, context_len=1 << 20), 64))
    assert max(max(lens) for lens, _ in found) == 16_384, "nothing is another form beyond, and memory is short"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "context_len", "most"),
    [
        (8192, 64, 2048, 8192),
        (8192, 3, 2048, 6144),
        (4000, 64, 1500, 4000),
        (2048, 64, 1024, 2048),
        (41, 2, 40, 41),
        (1 << 20, 256, 4096, 16_384),
    ],
)
def test_chunks_have_together_as_many_tokens_as_a_step_where_contexts_are_short(
    num_tokens, num_sequences, context_len, most
):
    """Kernels are chosen by the rows of a step, of one sequence or of several."""
    reach = Reach(num_tokens=num_tokens, num_sequences=num_sequences, context_len=context_len)
    found = [lens for lens, _ in prefill_shapes(reach, 16)]
    assert all(max(lens) <= context_len and len(lens) <= num_sequences and sum(lens) <= num_tokens for lens in found)
    assert len([*prefill_shapes(reach, 16)]) == len({*prefill_shapes(reach, 16)})
    totals = sorted({sum(lens) for lens in found})
    assert totals[-1] == most
    assert all(above <= below * 2 for below, above in pairwise(totals))


@pytest.mark.fast
def test_decode_shapes_reach_every_limit():
    found = list(decode_shapes(REACH, 16))
    assert {count for count, _ in found} == {1, 2, 3, 4, 6, 8, 12}
    assert {width for _, width in found} == {16, 32, 64, 128, 256, 512, 513}


@pytest.mark.fast
@pytest.mark.parametrize("decodes", [False, True])
def test_passes_of_a_warm_up_compute_one_layer_of_each_kind(decodes, tmp_path, monkeypatch):
    """The others would launch the same kernels; all layers of a large model with delta nets took minutes."""
    model = load_model(
        write_checkpoint(tmp_path / "model", kind="llama", layers=5, with_mtp=False),
        dtype=torch.float32,
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        with_mtp=False,
    )
    found = noting_layers(model, monkeypatch)
    pool = KVPool(model.kv_layout(16), 4, model.device)
    reach = Reach(num_tokens=24, num_sequences=2, context_len=40)
    if decodes:
        warm_up_decode_passes(model, pool, reach, 0)
    else:
        warm_up_prefill_passes(model, pool, reach)
    assert {*found} == {0} and len(found) > 1
    assert not model._decoder._skipped_layers


def require_named(found):
    """What is launched has a variant, which is compiled ahead of time and held to its promises."""
    unnamed = [*found.values()][-1]["unnamed"]  # of all models so far
    assert len(unnamed["choices"]) >= 30
    assert not {kernel: choices for kernel, choices in unnamed["choices"].items() if choices}
    # Elsewhere variants stand for others; what ranks, float8 and many tokens change in an MoE layer is there whole.
    moe_forms = {kernel: forms for kernel, forms in unnamed["forms"].items() if kernel.startswith("moe.")}
    assert len(moe_forms) == 10
    assert not any(moe_forms.values()), moe_forms


def require_ahead(found):
    """A dry run, of one layer of each kind, asks for all that the warm-up compiles and for nothing else."""
    ahead = {name: its["ahead"] for name, its in found.items() if its["ahead"]}
    assert len(ahead) >= 2
    for name, forms in ahead.items():
        assert forms == found[name]["warm"], name


@pytest.mark.timeout(LIMIT_S)
def test_no_step_launches_what_the_warm_up_did_not():
    names = (
        "+dense",
        "moe",
        "moe short",
        "+hybrid",
        "latent",
        "latent float8",
        "latent rounded",
        "held float8",
        "ordered",
        "ordered pruned",
    )
    found = launches(2, *names, "latent short", "hybrid float8", "pairs", "bf16", "not warmed")
    require_named(found)
    require_ahead(found)
    for name in ("ordered", "ordered pruned"):
        assert not found[name]["late"], name
    assert found["held float8"]["warm"]["_align_kernel"] == found["moe"]["warm"]["_align_kernel"]
    assert not found["held float8"]["late"], "whose tokens torch chooses, as those of all ranks"
    for name in ("dense", "moe", "moe short", "hybrid", "hybrid float8", "latent", "latent float8", "latent rounded"):
        assert sum(found[name]["warm"].values()) > 80
        assert not found[name]["late"], name
    assert not found["latent short"]["late"]
    assert found["dense"]["warm"]["gemm_kernel"] >= 3, "GEMMs in the form for Hopper, which the stub says there is"
    for name, num_forms in {"pairs": 2, "bf16": 3}.items():
        assert not found[name]["late"]
        # Which one a step takes follows from times, so steps of few lengths need not meet all.
        assert found[name]["warm"]["prefill_kernel"] == num_forms, "all forms for Hopper; float8 KV is not divided"
    for name in ("moe", "moe short", "hybrid float8"):
        assert found[name]["warm"]["grouped_kernel"] == 2, "experts of chunks in the form for Hopper: both GEMMs"
    for name in ("latent", "latent short"):
        assert found[name]["warm"]["mla_prefill_hopper_kernel"] == 2, "of short walks and of long ones"
    assert found["latent float8"]["warm"]["_values_kernel"] == 2, "for a GEMM in float8, and beside chunks"
    assert not found["not warmed"]["warm"]
    assert len(found["not warmed"]["late"]) >= 15, "what the others are spared"


@pytest.mark.long
def test_gemms_in_order_have_no_form_between_the_sizes_that_are_warmed_up():
    """A worker of one sequence has passes of these sizes alone, and chunks of any."""
    met = classes(600)
    for num_outputs in range(64, 12_000, 64):
        for num_slices in (2, 8):
            forms = [tuple(rule(size, num_outputs, num_slices).items()) for size in met]
            few = {form for size, form in zip(met, forms, strict=True) if size <= TOKENS}
            many = {form for size, form in zip(met, forms, strict=True) if size > TOKENS}
            for size in range(1, 600):
                form = tuple(rule(size, num_outputs, num_slices).items())
                assert form in (few if size <= TOKENS else many), (size, num_outputs, num_slices)


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.slow
def test_no_step_of_any_kind_of_model_does():
    found = launches(8)
    late = {name: its["late"] for name, its in found.items() if name != "not warmed"}
    assert len(late) >= 24
    assert not any(late.values()), late
    require_named(found)
    require_ahead(found)
