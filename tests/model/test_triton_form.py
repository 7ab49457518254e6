"""A model computed by Triton kernels, in the interpreter, beside the same by its torch reference; in float8, too.

In invariant numerics its rows must not know how they came; what the interpreter can show of that is which values take
part and in which order tiles are added, not how instructions round (`tests/gpu/test_invariant_cuda.py`).
"""

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.errors import ModelUnsupported
from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.kernels import ops
from baton.kernels.attention import decode as attention_decode
from baton.kernels.attention import decode_plan as attention_split_kv
from baton.kernels.attention import short_chunks as attention_short_chunks
from baton.kernels.attention.decode_plan import PlanOptions
from baton.kernels.dispatch_mode import DispatchMode
from baton.kernels.gemm import linear_split_triton, vector_plan
from baton.kernels.implementation import Implementation
from baton.kernels.memo import Memo
from baton.model import loader
from baton.model.loader import load_model
from baton.model.parallel import Alone
from baton.scripts.model_shape import write_shape
from baton.tests.kernels.harness import relative_error, same_bits
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.harness import Paged

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 500}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


# All experts are chosen: which ones is no matter of rounding.
SHARED = {"shared_expert_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 4}
STACKED = {"shared_expert_intermediate_size": EXPERTS["moe_intermediate_size"]}
HYBRID = SHARED | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 64}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


@pytest.fixture(params=["dense", "moe", "shared", "stacked", "hybrid"], scope="module")
def shape(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "moe":
        return write_shape("qwen3-30b-a3b", path, **(SIZES | EXPERTS))
    if request.param == "shared":
        return write_shape("qwen1.5-moe-a2.7b", path, **(SIZES | EXPERTS | SHARED))
    if request.param == "stacked":
        return write_shape("qwen1.5-moe-a2.7b", path, **(SIZES | EXPERTS | SHARED | STACKED))
    if request.param == "hybrid":
        return write_shape("qwen3.5-35b-a3b", path, **(SIZES | EXPERTS | HYBRID))
    return write_shape("qwen3-8b", path, **SIZES)


def load(path, implementation, quantization=Quantization.NONE, dtype=torch.bfloat16, **options):
    options = {"numerics": Numerics.DEFAULT, "with_mtp": True, **options}
    return load_model(
        path,
        dtype=dtype,
        device=CPU,
        random_seed=3,
        implementation=implementation,
        quantization=quantization,
        **options,
    )


def logits_of(model):
    """Of two prompts in chunks, of decode steps of three rows beside each other, and of an MTP entry."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 512, (2, 37), generator=generator)
    paged = Paged(model, num_sequences=2, capacity_len=64)
    found = []
    for parts in ([(0, 0, 18), (1, 0, 34)], [(0, 18, 34)]):
        tokens = torch.cat([prompts[sequence, start:end] for sequence, start, end in parts])
        found.append(paged.trunk(tokens, paged.prefill_batch(parts)))
    batch = paged.decode_batch([0, None, 1], [34, 0, 34], 3, bound=64)
    tokens = torch.stack([prompts[0, 34:], torch.zeros(3, dtype=torch.int64), prompts[1, 34:]])
    decoded = paged.trunk(tokens, batch).view(3, 3, -1)[[0, 2]].flatten(0, 1)
    found += [decoded, paged.mtp(prompts[0, :5], decoded[:5], paged.prefill_batch([(0, 0, 5)]))]
    return paged.logits(torch.cat(found))


@pytest.mark.parametrize("quantization", Quantization)
def test_kernels_give_the_references_logits(shape, quantization):
    wanted = logits_of(load(shape, Implementation.REFERENCE, quantization))
    model = load(shape, Implementation.TRITON, quantization)
    assert model.implementation is Implementation.TRITON
    found = logits_of(model)
    assert found.isfinite().all()
    # Both round to bfloat16 after each operation, and add in other orders; float8 rounds some numbers to a neighbour.
    assert relative_error(found, wanted) < (0.03 if quantization is Quantization.NONE else 0.06)


# All experts are chosen: which ones is no matter of rounding.
GLM = {"head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}


@pytest.mark.parametrize(
    ("quantization", "has_norms"),
    [(Quantization.NONE, False), pytest.param(Quantization.FP8, True, marks=pytest.mark.slow)],
)
def test_kernels_give_glms_logits(quantization, has_norms, tmp_path):
    """Biases, half of a head turned, and experts weighted by their sigmoids, beside one that takes every token."""
    changes = SIZES | GLM | {"first_k_dense_replace": 0, "use_qk_norm": has_norms, "routed_scaling_factor": 1.5}
    path = write_shape("glm-4.5-air", tmp_path, **changes)
    wanted = logits_of(load(path, Implementation.REFERENCE, quantization))
    found = logits_of(load(path, Implementation.TRITON, quantization))
    assert relative_error(found, wanted) < (0.03 if quantization is Quantization.NONE else 0.06)
    with pytest.raises(ModelUnsupported, match="sigmoids in invariant numerics"):
        load(path, Implementation.TRITON, numerics=Numerics.INVARIANT)


DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "head_dim": 16, "first_k_dense_replace": 0,
}  # fmt: skip


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.slow)])
def test_kernels_give_deepseeks_logits(window, tmp_path, monkeypatch):
    """Prompts expanded, also in windows of a few positions, decode rows absorbed; scores by YaRN's factor."""
    path = write_shape("deepseek-v3", tmp_path, **(SIZES | DEEPSEEK))
    wanted = logits_of(load(path, Implementation.REFERENCE))
    model, made = load(path, Implementation.TRITON), []
    assert model.implementation is Implementation.TRITON
    for name in ("mla_prefill", "mla_decode"):
        kernel = getattr(ops, name)
        given = {"max_expanded_bytes": window * 4 * 64 * 2} if window and name == "mla_prefill" else {}
        monkeypatch.setattr(
            ops, name, lambda *a, _kernel=kernel, _given=given, **k: made.append(_kernel) or _kernel(*a, **k, **_given)
        )
    assert relative_error(logits_of(model), wanted) < 0.03
    assert len(set(made)) == 2


def test_latents_that_no_kernel_is_made_for_are_refused_by_name(tmp_path):
    for changes, what in (
        ({"kv_lora_rank": 48}, "latents of 48"),
        ({"qk_rope_head_dim": 8, "head_dim": 8}, "latents beside 8 turned columns"),
        ({"v_head_dim": 24}, "heads of 24 over latents"),
    ):
        path = write_shape("deepseek-v3", tmp_path / what, **(SIZES | DEEPSEEK | changes))
        with pytest.raises(ModelUnsupported, match=f"not {what}"):
            load(path, Implementation.TRITON)
    path = write_shape("deepseek-v3", tmp_path, **(SIZES | DEEPSEEK))
    with pytest.raises(ModelUnsupported, match="attention over latents in invariant numerics"):
        load(path, Implementation.TRITON, numerics=Numerics.INVARIANT)


def few_logits_of(model):
    """Of a short prompt and of a decode step."""
    tokens, paged = torch.arange(1, 19), Paged(model, capacity_len=32)
    found = [paged.trunk(tokens[:17], paged.prefill_batch([(0, 0, 17)]))]
    found.append(paged.trunk(tokens[17:], paged.decode_batch([0], [17], 1, bound=32)))
    return paged.logits(torch.cat(found))


def check_float8_kv(path, made):
    wanted = made(load(path, Implementation.REFERENCE, kv_dtype=KVDtype.FP8))
    found = made(load(path, Implementation.TRITON, kv_dtype=KVDtype.FP8))
    assert found.isfinite().all()
    assert relative_error(found, wanted) < 0.06  # what is next to a border of float8 may round to either side


def test_kernels_write_and_read_float8_kv_as_the_reference(tmp_path):
    check_float8_kv(write_shape("qwen3-8b", tmp_path, **SIZES), few_logits_of)


@pytest.mark.slow
def test_kernels_write_and_read_float8_kv_in_chunks_and_beside_each_other(shape):
    check_float8_kv(shape, logits_of)


@pytest.mark.parametrize("quantization", [Quantization.NONE, pytest.param(Quantization.FP8, marks=pytest.mark.slow)])
def test_invariant_logits_are_near_the_references_and_do_not_know_how_they_came(shape, quantization):
    options = {"numerics": Numerics.INVARIANT, "with_mtp": False}
    model = load(shape, Implementation.TRITON, quantization, **options)
    assert model.implementation is Implementation.TRITON
    ids = torch.randint(0, 512, (21,), generator=torch.Generator().manual_seed(1))
    paged = Paged(model, capacity_len=64)
    whole = paged.logits(paged.prefill(ids))
    reference = load(shape, Implementation.REFERENCE, quantization, with_mtp=False)
    paged = Paged(reference, capacity_len=64)
    most = 0.03 if quantization is Quantization.NONE else 0.06
    assert relative_error(whole, paged.logits(paged.prefill(ids))) < most
    paged = Paged(model, num_sequences=2, capacity_len=64)
    hidden = [paged.trunk(ids[:9], paged.prefill_batch([(0, 0, 9)]))]
    parts = [(1, 0, 6), (0, 9, 18)]  # beside another prompt
    hidden.append(paged.trunk(torch.cat([ids[3:9], ids[9:18]]), paged.prefill_batch(parts))[6:])
    batch = paged.decode_batch([None, 0], [0, 18], 3, bound=64)
    hidden.append(paged.trunk(torch.cat([ids[:3], ids[18:]]), batch)[3:])
    assert same_bits(paged.logits(torch.cat(hidden)), whole)


def test_layers_of_a_pass_divide_attention_once(tmp_path, monkeypatch):
    path = write_shape("qwen3-8b", tmp_path, **(SIZES | {"num_hidden_layers": 2, "vocab_size": 128, "eos_token_id": 9}))
    made = []
    make = attention_split_kv.make_plan
    monkeypatch.setattr(attention_split_kv, "make_plan", lambda *arguments: made.append(arguments) or make(*arguments))
    shares = PlanOptions(tile=16, rows=16, swap=False, stages=2, warps=4, slots=8, shares=True)
    monkeypatch.setattr(attention_decode, "_FORMS", Memo())
    monkeypatch.setattr(attention_decode, "_options", lambda *arguments: shares)
    monkeypatch.setattr(attention_short_chunks, "_MIN_CONTEXT_LEN", 1)
    tokens, found = torch.arange(24), []
    on_device = torch.tensor([0, 20, 24]), torch.tensor([20, 4])
    for implementation in (Implementation.REFERENCE, Implementation.TRITON):
        paged = Paged(load(path, implementation, with_mtp=False), num_sequences=2, capacity_len=32)
        chunks = replace(paged.prefill_batch([(0, 0, 20), (1, 0, 4)]), lens_on_device=on_device)
        prompts = paged.trunk(tokens, chunks)
        found.append(torch.cat([prompts, paged.trunk(tokens[:2], paged.decode_batch([0, 1], [20, 4], 1, bound=32))]))
    assert len(made) == 2  # a pass over chunks and a decode step, of two layers each
    assert relative_error(found[1], found[0]) < 0.03


def test_float8_is_near_the_weights_it_was_made_of(shape):
    wanted = logits_of(load(shape, Implementation.REFERENCE, dtype=torch.float32))
    plain = relative_error(logits_of(load(shape, Implementation.REFERENCE)), wanted)
    quantized = load(shape, Implementation.REFERENCE, Quantization.FP8)
    error = relative_error(logits_of(quantized), wanted)
    # A router chooses other experts where two are near each other, which moves such a token far.
    assert plain < error < (0.6 if quantized.config.num_experts else 0.2)


@pytest.mark.fast
def test_left_open_a_cpu_computes_the_reference(shape):
    assert load(shape, Implementation.AUTO).implementation is Implementation.REFERENCE


@pytest.mark.fast
def test_kv_of_quantized_weights_is_another_models(shape):
    layouts = {load(shape, Implementation.AUTO, kind).kv_layout(16).model_hash for kind in Quantization}
    assert len(layouts) == 2


@pytest.mark.fast
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": Quantization.FP8, "dtype": torch.float32},
        {"quantization": Quantization.FP8, "numerics": Numerics.INVARIANT},
        {"implementation": Implementation.TRITON, "numerics": Numerics.INVARIANT, "dtype": torch.float32},
        {"implementation": Implementation.TRITON, "dtype": torch.float64},
    ],
)
def test_what_does_not_go_together_is_refused_by_name(shape, options):
    with pytest.raises(ModelUnsupported) as refused:
        load(shape, **{"implementation": Implementation.AUTO, **options})
    assert refused.value.fields["option"] in ("quantization", "kernels")


class TwoRanks(Alone):
    size = 2


@pytest.mark.fast
def test_experts_over_ranks_are_not_summed_by_slices_and_refused(shape, monkeypatch):
    """Dense models are: their inner products keep the promise for any number of ranks."""
    options = {"numerics": Numerics.INVARIANT, "communicator": TwoRanks(), "with_mtp": False}
    with pytest.raises(ModelUnsupported, match="on one rank"):
        load(shape, Implementation.REFERENCE, Quantization.FP8, **options)
    if load(shape, Implementation.REFERENCE, **options).config.num_experts:
        with pytest.raises(ModelUnsupported, match="experts over 2 ranks") as refused:
            load(shape, Implementation.TRITON, **options)
        assert refused.value.fields["option"] == "kernels"
        monkeypatch.setattr(loader, "has_triton_form", lambda *where: True)
        assert load(shape, Implementation.AUTO, **options).implementation is Implementation.REFERENCE
        alone = options | {"communicator": None}
        assert load(shape, Implementation.AUTO, **alone).implementation is Implementation.REFERENCE
        assert load(shape, Implementation.TRITON, **alone).implementation is Implementation.TRITON
    else:
        assert load(shape, Implementation.TRITON, **options).implementation is Implementation.TRITON


@pytest.mark.fast
def test_sizes_that_no_group_fits_are_refused(tmp_path):
    path = write_shape("qwen3-8b", tmp_path, **(SIZES | {"intermediate_size": 192}))
    with pytest.raises(ModelUnsupported, match="192"):
        load(path, Implementation.AUTO, Quantization.FP8)


COMPUTE = {
    "linear",
    "mm",
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "cat",
    "stack",
    "mean",
    "rsqrt",
    "silu",
    "sigmoid",
    "where",
}
COMPUTE |= {"index_put", "index_copy", "scatter"}


class _Noted(DispatchMode):
    """Counts torch's operations that compute or write; the interpreter's own are of other kinds."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.strip("_")
        self.found[name] += name in COMPUTE
        return function(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_a_layer_of_every_family_is_as_few_operations_of_torch_as_qwen3s(kind, tmp_path, monkeypatch):
    """A part of a layer that falls back to torch made steps a seventh longer, and nothing said so."""
    for module in (linear_split_triton, vector_plan):  # so that every GEMM is one of torch
        monkeypatch.setattr(module, "MAX_TOKENS", 0)
    found = {}
    for family in ("qwen3", kind):
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "hidden_size": 128}
        path = write_checkpoint(tmp_path / family, kind=family, with_mtp=False, **sizes)
        paged = Paged(load(path, Implementation.TRITON, with_mtp=False), capacity_len=32)
        with _Noted() as noted:
            paged.trunk(torch.arange(2), paged.decode_batch([0], [0], 2, bound=32))
        found[family] = +noted.found
    assert found["qwen3"]["linear"] == 8
    assert found[kind] == found["qwen3"]


# By family: its sizes, and what torch may launch in each of its layers. `linear` is of a row too short to be split.
LAYERS = {
    "qwen3-8b": ({}, {}),
    "qwen3-30b-a3b": (EXPERTS, {}),
    "glm-4.5-air": (GLM | {"first_k_dense_replace": 0}, {}),
    "deepseek-v3": (DEEPSEEK, {"bmm": 2, "copy": 1, "linear": 1}),
}
_MAKE_VIEWS = ("empty", "new_empty", "split", "tensor_split", "unbind")


class _Launched(DispatchMode):
    """Counts torch's operations that launch something on a GPU; kernels' own, in the interpreter, are left out."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        frame, is_kernel = sys._getframe(1), False
        while frame is not None and not is_kernel:
            is_kernel = frame.f_code.co_filename.endswith("_triton.py")
            frame = frame.f_back
        name = function.overloadpacket.__name__.strip("_")
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        is_view = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in given and name != "copy"
        is_written = name in COMPUTE or function._schema.is_mutable
        if not is_kernel and (is_written or not (is_view or name.startswith(_MAKE_VIEWS))):
            self.found[name] += 1
        return result


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_leaves_little_to_torch(family, tmp_path):
    """A part of a layer that falls back to torch takes a launch for each of its operations, and nothing says so.

    The rotations and writes of DeepSeek-V3's layers were 25 launches.
    """
    changes, allowed = LAYERS[family]
    found = []
    for num_layers in (1, 2):
        sizes = SIZES | changes | {"num_hidden_layers": num_layers}
        path = write_shape(family, tmp_path / str(num_layers), **sizes)
        paged = Paged(load(path, Implementation.TRITON, with_mtp=False), capacity_len=32)
        batch = paged.decode_batch([0], [0], 2, bound=32)
        for _ in range(2):  # the first makes what is kept
            with _Launched() as launched:
                paged.trunk(torch.arange(2), batch)
        found.append(launched.found)
    assert found[1] - found[0] == Counter(allowed)
    assert not found[0] - found[1]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("published", "sizes", "unfit"),
    [
        ("qwen3-8b", {"head_dim": 48}, "heads of 48"),
        ("qwen3-30b-a3b", EXPERTS | {"num_experts": 1025, "moe_intermediate_size": 8}, "2 of 1025 experts"),
        ("qwen3-30b-a3b", EXPERTS | {"num_experts": 34, "num_experts_per_tok": 33}, "33 of 34 experts"),
    ],
)
def test_sizes_that_no_kernel_is_made_for_are_refused_or_computed_by_torch(
    published, sizes, unfit, tmp_path, monkeypatch, caplog
):
    path = write_shape(published, tmp_path, **(SIZES | sizes))
    with pytest.raises(ModelUnsupported, match=unfit):
        load(path, Implementation.TRITON)
    monkeypatch.setattr(loader, "has_triton_form", lambda *where: True)
    model = load(path, Implementation.AUTO, with_mtp=False)
    assert model.implementation is Implementation.REFERENCE
    assert model.why_no_triton == f"no kernel is made for {unfit}"
    assert unfit in caplog.text


@pytest.mark.fast
@pytest.mark.parametrize(
    ("asked", "device", "dtype", "why"),
    [
        (Implementation.REFERENCE, "cuda", torch.bfloat16, "asked for by --kernels"),
        (Implementation.AUTO, "cpu", torch.bfloat16, "device cpu"),
        (Implementation.AUTO, "cuda", torch.float32, "dtype float32"),
        (Implementation.AUTO, "cpu", torch.float64, "device cpu, dtype float64"),
        (Implementation.AUTO, "cuda", torch.bfloat16, ""),
        (Implementation.TRITON, "cpu", torch.bfloat16, ""),
    ],
)
def test_a_model_says_why_no_kernels_compute_it(asked, device, dtype, why):
    found = loader._form(asked, "", torch.device(device), dtype)
    assert found == (Implementation.REFERENCE if why else Implementation.TRITON, why)
