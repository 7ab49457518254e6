"""A shared expert that is stacked behind the routed ones: transformers' logits in either form, and which form it is."""

import pytest
import torch

from baton.core.numerics import Numerics, Quantization
from baton.kernels.gemm.fp8_weight import Fp8Weight, quantize_weight
from baton.kernels.moe import shared_plan
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.moe import ExpertWeights
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.deepseek_checkpoints import DeepseekReference
from baton.tests.model.fp8_checkpoints import IGNORED, LAYOUTS, write_float8
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.hybrid_checkpoints import HybridReference
from baton.tests.model.ranks import on_ranks

LENGTH = 23
REFERENCES = {"qwen3_5_moe": HybridReference, "qwen3_next": HybridReference, "deepseek_v3": DeepseekReference}
SIZES = {"qwen3_5_moe": {"shared_expert_intermediate_size": 24}, "qwen3_next": {"shared_expert_intermediate_size": 24}}


def written(path, kind, **overrides):
    return write_checkpoint(path, kind=kind, tie=False, overrides=SIZES.get(kind, {}) | overrides)


def load(path, communicator=None, **options):
    options = {"dtype": torch.float64, "numerics": Numerics.DEFAULT, "with_mtp": True, **options}
    return load_model(path, device=torch.device("cpu"), communicator=communicator, **options)


def logits_of(model, ids, group=None):
    """Of a prompt, of rows decoded after it one by one, and of five at once."""
    paged = Paged(model, capacity_len=len(ids) + 16, group=group)
    found, at = [], len(ids) - 8
    found.append(paged.trunk(ids[:at], paged.prefill_batch([(0, 0, at)])))
    for length in (1, 1, 1, 5):
        found.append(paged.trunk(ids[at : at + length], paged.decode_batch([0], [at], length)))
        at += length
    return paged.logits(torch.cat(found))


def mlps_of(model):
    assert model.sparse_layers
    return model.sparse_layers


@pytest.mark.parametrize("most", [0, 1, 4, 256])
@pytest.mark.parametrize("kind", REFERENCES)
def test_logits_are_transformers_in_either_form(kind, most, tmp_path, check_logits, monkeypatch):
    """At one rank and at two; some steps in one form and some in the other."""
    monkeypatch.setattr(shared_plan, "steps", lambda *_, **__: range(1, most + 1))
    path, ids = written(tmp_path / "model", kind), prompt(LENGTH)
    wanted = REFERENCES[kind](path, kind, torch.float64).logits(ids)
    model = load(path)
    assert all(mlp.stack is not None for mlp in mlps_of(model))
    check_logits(kind, logits_of(model, ids), wanted)
    for logits in on_ranks(2, lambda group: logits_of(load(path, group), ids, group)):
        check_logits(kind, logits, wanted)


@pytest.mark.fast
@pytest.mark.parametrize("kind", REFERENCES)
def test_steps_of_few_tokens_take_one_choice_more_and_no_launch_beside(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_plan, "steps", lambda *_, **__: range(1, 5))
    model = load(written(tmp_path / "model", kind))
    mlp, called = mlps_of(model)[0], []
    for name in ("experts", "add_shared", "linear", "linear_inner"):
        own = getattr(model.ops, name)
        monkeypatch.setattr(model.ops, name, lambda *a, n=name, o=own: called.append((n, a)) or o(*a))
    for num_tokens in (1, 4, 5):
        called.clear()
        mlp(torch.randn(num_tokens, 32).double(), may_wait=True)
        names = [name for name, _ in called]
        weight_TK, expert_TK = next(given[1:3] for name, given in called if name == "experts")
        is_few = num_tokens <= 4
        assert weight_TK.shape == expert_TK.shape == (num_tokens, 4 if is_few else 3)
        assert bool(expert_TK[:, -1].eq(8).all()) is is_few
        assert ("add_shared" in names) is ("linear_inner" in names) is not is_few
        assert (mlp.reader_of(num_tokens) is None) is is_few


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", REFERENCES)
def test_all_forms_read_the_same_memory(kind, size, tmp_path):
    path = written(tmp_path / "model", kind)
    for model in on_ranks(size, lambda group: load(path, group)):
        for mlp in mlps_of(model):
            gate_up, down = mlp.stack.gate_up_EJD, mlp.stack.down_EDI
            assert gate_up.shape == (9, 2 * 24 // size, 32)
            assert down.shape == (9, 32, 24 // size)
            views = {
                gate_up: [mlp.experts.gate_up_EJD, mlp.shared.mlp.gate_up_JD],
                down: [mlp.experts.down_EDI, mlp.shared.mlp.down_DI],
            }
            for stack, (routed, last) in views.items():
                assert torch.equal(stack, torch.cat([routed, last[None]]))
                assert {routed.untyped_storage().data_ptr(), last.untyped_storage().data_ptr()} == {
                    stack.untyped_storage().data_ptr()
                }
            if mlp._routing is None:
                router = mlp.router_XD
                assert router.untyped_storage().data_ptr() == gate_up.untyped_storage().data_ptr()
                assert gate_up.untyped_storage().nbytes() == 8 * (gate_up.numel() + router.numel())
                assert torch.equal(router[:8], mlp.router_ED)
                assert router[8].any() and not router[9:].any() and len(router) == 16
                assert torch.equal(mlp.both_ND, torch.cat([mlp.shared.mlp.gate_up_JD, router]))


@pytest.mark.fast
def test_where_it_keeps_a_form_of_its_own(tmp_path):
    path = written(tmp_path / "model", "qwen3_5_moe")
    assert all(mlp.stack is None for mlp in mlps_of(load(path, numerics=Numerics.INVARIANT)))
    held = on_ranks(2, lambda group: load(path, group, expert_parallel=True))
    assert all(mlp.stack is None for model in held for mlp in mlps_of(model))
    wider = written(tmp_path / "wider", "qwen3_5_moe", shared_expert_intermediate_size=40)
    assert all(mlp.stack is None and mlp.shared is not None for mlp in mlps_of(load(wider)))
    none = written(tmp_path / "none", "deepseek_v3", n_shared_experts=0)
    assert all(mlp.stack is None and mlp.shared is None for mlp in mlps_of(load(none)))
    two = written(tmp_path / "two", "deepseek_v3", n_shared_experts=2)
    assert all(mlp.stack is None and mlp.shared is not None for mlp in mlps_of(load(two)))


FLOAT8 = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
SHARED = [f"model.layers.0.mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]


@pytest.mark.parametrize("ignored", [[], SHARED, SHARED[2:], ["model.layers.0.mlp.experts.2.up_proj"]], ids=len)
def test_float8_is_stacked_with_float8_alone(ignored, tmp_path):
    """What is not converted keeps its form, and so does everything beside it."""
    path, twin = write_float8(
        tmp_path, LAYOUTS["qwen3-fp8"], kind="qwen3_5_moe", ignored=(*IGNORED, *ignored), overrides=FLOAT8, fused=False
    )
    mlps, twins = (mlps_of(load(one, dtype=torch.float32)) for one in (path, twin))
    first = mlps[0]
    assert (first.stack is None) is bool(ignored)
    assert isinstance(first.experts, ExpertWeights if ignored and "experts" in ignored[0] else Fp8ExpertWeights)
    assert isinstance(first.shared.mlp.down_DI, torch.Tensor if ignored[-1:] == SHARED[2:] else Fp8Weight)
    num_left = 1 if ignored else 0
    for mlp, plain in zip(mlps[num_left:], twins[num_left:], strict=True):
        assert isinstance(mlp.stack, Fp8ExpertWeights)
        assert mlp.both_ND is None
        assert mlp.stack.gate_up_EJD.data_ptr() == mlp.experts.gate_up_EJD.data_ptr()
        last = mlp.shared.mlp.gate_up_JD
        assert last.values_NK.data_ptr() == mlp.stack.gate_up_EJD[-1].data_ptr()
        assert torch.equal(last.dequantize(), plain.shared.mlp.gate_up_JD)
        assert torch.equal(mlp.router_XD[: len(mlp.router_ED)], plain.router_ED)
    if not ignored:
        rows_TD = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
        stacked_TD = first(rows_TD, may_wait=True)
        first._stacked_steps = range(0)
        apart_TD = first(rows_TD, may_wait=True)
        assert 0 < (stacked_TD - apart_TD).norm() < 1e-3 * apart_TD.norm()


def test_a_model_that_is_quantized_at_load_stacks_what_it_quantized(tmp_path):
    path, _ = write_float8(tmp_path, LAYOUTS["qwen3-fp8"], kind="qwen3_5_moe", overrides=FLOAT8, fused=False)
    of_plain = (mlps_of(load(path.with_name("plain"), dtype=torch.bfloat16, quantization=how)) for how in Quantization)
    for wide, mlp in zip(*of_plain, strict=True):
        assert isinstance(wide.stack, ExpertWeights)
        assert isinstance(mlp.stack, Fp8ExpertWeights)
        last = quantize_weight(wide.stack.gate_up_EJD[-1])
        assert torch.equal(last.values_NK.float(), mlp.stack.gate_up_EJD[-1].float())
        assert torch.equal(last.scales_BG, mlp.stack.gate_up_scale[-1])
        assert torch.equal(last.values_NK.float(), mlp.shared.mlp.gate_up_JD.values_NK.float())
