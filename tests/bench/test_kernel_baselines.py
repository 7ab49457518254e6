"""What other kernels are given, and that a case does without those that are not there."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from baton.bench.kernel_bench import baselines as kernel_baselines
from baton.bench.kernel_bench import baselines as kernel_baselines_attention
from baton.bench.kernel_bench import baselines as kernel_baselines_gemm
from baton.bench.kernel_bench.baselines import (
    BaselineExperts,
    BlockScaled,
    PagedAttention,
    PagedLatents,
    fa3,
    fa3_latents,
    flash_mla,
    sorted_by_expert,
    vllm_attention,
)

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def forgotten():
    kernel_baselines.imported.cache_clear()
    yield
    kernel_baselines.imported.cache_clear()


@pytest.fixture
def put(monkeypatch):
    """A module in the place of a baseline's."""

    def place(name, **content):
        module = ModuleType("fake_" + name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(kernel_baselines._MODULES, name, module.__name__)

    return place


def attention(dtype=torch.bfloat16):
    pool_NHPSD = torch.randn(9, 2, 2, 16, 8).to(dtype)
    return PagedAttention(
        query_THD=torch.randn(5, 4, 8).bfloat16(),
        key_NHSD=pool_NHPSD[:, :, 0],
        value_NHSD=pool_NHPSD[:, :, 1],
        block_table=torch.tensor([[3, 1], [5, 0]]),
        q_lens=[4, 1],
        kv_lens=[20, 16],
        scale=0.5,
    )


def latents():
    return PagedLatents(query_BQAX=torch.randn(2, 3, 4, 48).bfloat16(), latent_dim=32, kv_lens=[70, 20], scale=0.5)


def gemm_operands(*lead, num_rows=None):
    M, N, K = 5, 256, 384
    return BlockScaled(
        rows_MK=torch.randn(*lead, M, K).to(torch.float8_e4m3fn),
        row_scales=torch.rand(*lead, M, K // 128),
        weights_NK=torch.randn(*lead, N, K).to(torch.float8_e4m3fn),
        weight_scales=torch.rand(*lead, N // 128, K // 128),
        num_rows_E=num_rows,
    )


def experts():
    return BaselineExperts(
        rows_MK=torch.randn(5, 256).bfloat16(),
        gate_up_ENK=torch.zeros(4, 256, 256, dtype=torch.float8_e4m3fn),
        gate_up_scales=torch.ones(4, 2, 2),
        down_EKI=torch.zeros(4, 256, 128, dtype=torch.float8_e4m3fn),
        down_scales=torch.ones(4, 2, 1),
        weights=torch.rand(5, 2),
        experts=torch.tensor([[0, 3], [3, 1], [0, 1], [3, 0], [0, 1]], dtype=torch.int32),
    )


def test_what_is_absent_is_no_system(monkeypatch):
    for name in kernel_baselines._MODULES:
        monkeypatch.setitem(kernel_baselines._MODULES, name, "baton_has_no_such_module")
    assert fa3([attention()]) == vllm_attention([attention()]) == {}
    assert fa3_latents([latents()]) == flash_mla([latents()]) == {}
    assert kernel_baselines_gemm.deep_gemm([gemm_operands()]) == kernel_baselines_gemm.vllm_moe([experts()]) == {}
    assert kernel_baselines_gemm.deep_gemm_masked([gemm_operands(2)], 4) == {}
    assert all("ModuleNotFoundError" in why for why in kernel_baselines.availability().values())


def test_a_library_that_does_not_load_says_why(put):
    put("fa3", FA3_AVAILABLE=False, FA3_UNAVAILABLE_REASON="no libcuda")
    assert kernel_baselines.availability()["fa3"] == "no libcuda"
    assert fa3([attention()]) == {}


def test_latents_are_keys_and_values_of_others(put):
    asked = []
    put("fa3", FA3_AVAILABLE=True, flash_attn_varlen_func=lambda **given: asked.append(given))
    put(
        "flash_mla",
        is_flashmla_dense_supported=lambda: (True, None),
        get_mla_metadata=lambda lens, rows, heads: ((lens.tolist(), rows, heads), None),
        flash_mla_with_kvcache=lambda *given, **named: asked.append((given, named)),
    )
    one = latents()
    fa3_latents([one])["fa3"][0]()
    given = asked.pop()
    assert [given[name].shape[-1] for name in ("q", "q_v", "k", "v")] == [16, 32, 16, 32]
    assert torch.equal(torch.cat([given["q_v"], given["q"]], dim=-1), one.query_BQAX.flatten(0, 1))
    assert given["cu_seqlens_q"].tolist() == [0, 3, 6]
    assert given["block_table"].shape == (2, 5)
    flash_mla([one])["flash_mla"][0]()
    (query, rows, table, lens, latent_dim, plan, _), named = asked.pop()
    assert query is one.query_BQAX
    assert rows.shape == (4, 64, 1, 48)
    assert (table.shape, lens.tolist(), latent_dim) == ((2, 2), [70, 20], 32)
    assert plan == ([70, 20], 12, 1)
    assert named == {"softmax_scale": 0.5, "causal": True}


def test_flash_mla_that_is_not_built_says_why(put):
    put("flash_mla", is_flashmla_dense_supported=lambda: (False, "not compiled"))
    assert kernel_baselines.availability()["flash_mla"] == "not compiled"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention_gets_the_same_numbers_in_its_own_layout(put, dtype):
    asked = []
    put(
        "fa3",
        FA3_AVAILABLE=True,
        flash_attn_varlen_func=lambda **arguments: asked.append(arguments),
        get_scheduler_metadata=lambda **arguments: arguments,
    )
    one = attention(dtype)
    systems = fa3([one, one])
    assert {name: len(calls) for name, calls in systems.items()} == {"fa3": 2, "fa3_planned": 2}
    for calls in systems.values():
        calls[0]()
    plain, planned = asked
    assert torch.equal(plain["k"].float(), one.key_NHSD.transpose(1, 2).float())
    assert plain["k"].is_contiguous()
    assert plain["v"].shape == (9, 16, 2, 8)
    assert plain["cu_seqlens_q"].tolist() == [0, 4, 5]
    assert plain["seqused_k"].tolist() == [20, 16]
    assert (plain["max_seqlen_q"], plain["max_seqlen_k"], plain["causal"], plain["fa_version"]) == (4, 20, True, 3)
    assert plain["block_table"].dtype == torch.int32
    assert plain["q"].dtype == dtype
    assert ("k_descale" in plain) == (dtype == torch.float8_e4m3fn)
    assert planned["scheduler_metadata"]["num_heads_kv"] == 2
    assert planned["scheduler_metadata"]["page_size"] == 16


def test_vllm_splits_as_it_would(put):
    asked = []
    put("vllm_attention", unified_attention=lambda **arguments: asked.append(arguments))
    (call,) = vllm_attention([attention()])["vllm_triton"]
    assert call() is asked[0]["out"]
    assert asked[0]["softmax_segm_output"].shape == (64, 4, 16, 8)
    assert vllm_attention([attention(torch.float8_e4m3fn)]) == {}


def test_deep_gemm_is_given_scales_as_it_wants_them(put):
    asked = []

    def gemm(*arguments, disable_ue8m0_cast):
        assert disable_ue8m0_cast
        asked.append(arguments)

    put(
        "deep_gemm",
        get_mn_major_tma_aligned_tensor=lambda scales: scales.mT.contiguous().mT,
        fp8_gemm_nt=gemm,
        fp8_m_grouped_gemm_nt_masked=gemm,
    )
    one = gemm_operands()
    (call,) = kernel_baselines_gemm.deep_gemm([one])["deep_gemm"]
    assert call() is asked[0][2]
    assert asked[0][2].shape == (5, 256)
    assert asked[0][0][1].stride(0) == 1
    num_rows = torch.tensor([4, 2], dtype=torch.int32)
    (call,) = kernel_baselines_gemm.deep_gemm_masked([gemm_operands(2, num_rows=num_rows)], 3)["deep_gemm"]
    call()
    assert asked[1][2].shape == (2, 5, 256)
    assert asked[1][3] is num_rows
    assert asked[1][4] == 3


def test_torchs_block_scaling_gets_padded_rows_and_aligned_scales(monkeypatch):
    asked = []
    monkeypatch.setattr(
        kernel_baselines_gemm,
        "F",
        SimpleNamespace(
            scaled_mm=lambda *arguments, **more: asked.append(arguments),
            ScalingType=SimpleNamespace(BlockWise1x128="1x128", BlockWise128x128="128x128"),
        ),
    )
    one = gemm_operands()
    kernel_baselines_gemm.scaled_mm_blocks([one])["scaled_mm_blocks"][0]()
    rows, weights, row_scales, row_kind, weight_scales, weight_kind = asked[0]
    assert (rows.shape, weights.shape) == ((8, 384), (384, 256))
    assert (row_kind, weight_kind) == ("1x128", "128x128")
    assert row_scales.stride() == (1, 8)
    assert weight_scales.stride() == (1, 4)
    assert torch.equal(weight_scales.t(), one.weight_scales)
    assert torch.equal(row_scales[:5], one.row_scales)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize(("num_rows", "num_experts"), [(5, 4), (1, 8), (64, 3)])
def test_rows_are_sorted_so_that_no_block_has_two_experts(block, num_rows, num_experts):
    choices = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_rows)]).int()
    places, owners, end = sorted_by_expert(choices, num_experts, block)
    flat, num_pairs = choices.flatten(), choices.numel()
    assert int(end) % block == 0
    assert int(end) <= len(places)
    for index, place in enumerate(places[: int(end)].tolist()):
        assert place == num_pairs or int(flat[place]) == int(owners[index // block])
    assert sorted(place for place in places.tolist() if place < num_pairs) == list(range(num_pairs))


def test_an_moe_layer_is_two_gemms_between_what_is_fused(put, monkeypatch):
    calls = []

    def gemm(rows, weights, out, row_scales, weight_scales, chosen, *placed, mul_routed_weight, top_k, config, **more):
        assert rows.dtype == torch.float8_e4m3fn
        assert row_scales.shape == (rows.shape[0], rows.shape[1] // 128)
        calls.append((tuple(out.shape), mul_routed_weight, top_k, config["BLOCK_SIZE_M"], len(placed)))
        out.fill_(1.0)

    put(
        "vllm_moe",
        try_get_optimal_moe_config=lambda *shapes, block_shape: {"BLOCK_SIZE_M": 16},
        invoke_fused_moe_triton_kernel=gemm,
        tl=SimpleNamespace(bfloat16="bf16"),
    )
    monkeypatch.setattr(kernel_baselines_gemm, "compiled", lambda function: function)
    out = kernel_baselines_gemm.vllm_moe([experts()])["vllm_moe"][0]()
    assert calls == [((5, 2, 256), False, 2, 16, 3), ((5, 2, 256), True, 1, 16, 3)]
    assert torch.equal(out, torch.full((5, 256), 2.0, dtype=torch.bfloat16))


def test_an_moe_layer_in_bfloat16_has_no_scales(put, monkeypatch):
    asked = []
    put(
        "vllm_moe",
        try_get_optimal_moe_config=lambda *shapes, block_shape: {"BLOCK_SIZE_M": 16, "asked": (shapes[3], block_shape)},
        invoke_fused_moe_triton_kernel=lambda *arguments, **more: asked.append((arguments[3], arguments[4], more)),
        tl=SimpleNamespace(bfloat16="bf16"),
    )
    monkeypatch.setattr(kernel_baselines_gemm, "compiled", lambda function: function)
    one = experts()
    plain = dataclasses.replace(
        one,
        gate_up_ENK=one.gate_up_ENK.bfloat16(), down_EKI=one.down_EKI.bfloat16(), gate_up_scales=None, down_scales=None,
    )  # fmt: skip
    kernel_baselines_gemm.vllm_moe([plain])["vllm_moe"][0]()
    assert [scales[:2] for scales in asked] == [(None, None), (None, None)]
    assert all(more["use_fp8_w8a8"] is False and more["block_shape"] is None for _, _, more in asked)
    assert asked[0][2]["config"]["asked"] == (None, None)


def test_nothing_is_compiled_for_a_cpu():
    assert kernel_baselines.torch_compiled(torch.add, [(torch.ones(1), 1)]) == {}


def test_quantization_of_the_baseline_is_within_a_step_of_float8():
    rows = torch.randn(3, 256).bfloat16()
    codes, scales = kernel_baselines_gemm._quantized(rows)
    back = codes.float().unflatten(-1, (-1, 128)) * scales[..., None]
    assert torch.allclose(back.flatten(-2), rows.float(), rtol=2**-4, atol=float(scales.max()) * 2**-9)


def test_arguments_of_each_set_are_bound():
    calls = kernel_baselines.each(lambda x, y: x - y, [(3, 1), (5, 1)])
    assert [call() for call in calls] == [2, 4]
    assert kernel_baselines_attention.Baseline is kernel_baselines.Baseline
