"""Baselines of Baton's kernels. None is a dependency: each is imported when a case asks for it.

A function here returns a system or none: `{"fa3": [...]}`, or `{}` if the package cannot be imported, so that a case
adds a baseline with one line, `**fa3(sets)`. Baselines get memory of their own if their layout differs from Baton's,
and what vLLM prepares once for all layers of a step is prepared outside the calls. The result's `baselines` says which
are available, and why others are not.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from baton.bench.kernel_bench.case import ERRORS, Call

TORCH_COMPILE = "torch_compile"  # name of the system made by `torch.compile`
_MAX_SHAPES = 4096  # compiled shapes of one function, in a process that measures many rows

Baseline = dict[str, list[Call]]

_MODULES = {
    "fa3": "vllm.vllm_flash_attn.flash_attn_interface",
    "deep_gemm": "vllm.third_party.deep_gemm",
    "vllm_attention": "vllm.v1.attention.ops.triton_unified_attention",
    "flash_mla": "vllm.v1.attention.ops.flashmla",
    "vllm_moe": "vllm.model_executor.layers.fused_moe.fused_moe",
}


@functools.cache
def imported(name: str) -> tuple[Any, str]:
    """Import the module of a baseline; or None and the reason."""
    try:
        module = importlib.import_module(_MODULES[name])
    except ERRORS as error:
        return None, f"{type(error).__name__}: {error}"[:300]
    if name == "fa3" and not module.FA3_AVAILABLE:
        return None, str(module.FA3_UNAVAILABLE_REASON)[:300]
    if name == "flash_mla":
        supported, reason = module.is_flashmla_dense_supported()
        if not supported:
            return None, str(reason)[:300]
    return module, ""


def availability() -> dict[str, str]:
    """For each baseline that is not torch's own: "available", or the reason why not."""
    return {name: imported(name)[1] or "available" for name in _MODULES}


def each(function: Callable[..., object], sets: Sequence[Sequence[Any]]) -> list[Call]:
    """Make a call for each set of buffers: `function` with its arguments."""
    return [functools.partial(function, *arguments) for arguments in sets]


def torch_compiled(
    function: Callable[..., object], sets: Sequence[Sequence[Any]], name: str = TORCH_COMPILE
) -> Baseline:
    """`torch.compile` of a reference, for these shapes only; nothing on a CPU, where it would take minutes."""
    if not any(getattr(argument, "is_cuda", False) for argument in sets[0]):
        return {}
    return {name: each(compiled(function), sets)}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with `torch.compile`, with one compile thread and no limit that many rows would reach."""
    import torch
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = _MAX_SHAPES
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, dynamic=False, fullgraph=True)


_NUM_SEGMENTS = 16  # segments that vLLM splits the key positions into
_FULL_GRID = 128  # programs that need no split, as vLLM has it


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """One set of buffers, in Baton's layout.

    Attributes:
        query_THD: all queries, sequence after sequence.
        key_NHSD: view of the pool, bfloat16 or float8_e4m3fn.
        value_NHSD: view of the pool.
        block_table: [B, blocks of a sequence].
        q_lens: queries of each sequence.
        kv_lens: positions of each sequence, including its queries'.
        scale: factor of scores.
    """

    query_THD: torch.Tensor
    key_NHSD: torch.Tensor
    value_NHSD: torch.Tensor
    block_table: torch.Tensor
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    scale: float

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values are float8."""
        return self.key_NHSD.dtype == torch.float8_e4m3fn

    @functools.cached_property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values into the layout of the baselines."""
        return self.key_NHSD.transpose(1, 2).contiguous(), self.value_NHSD.transpose(1, 2).contiguous()


def fa3(sets: Sequence[PagedAttention]) -> Baseline:
    """FlashAttention-3: `fa3` decides in each call how to split, `fa3_planned` gets one plan for all layers.

    With fp8 keys and values it needs fp8 queries, too; the scales are 1.
    """
    module, _ = imported("fa3")
    if module is None:
        return {}
    made = [_fa3_arguments(one) for one in sets]
    planned = [
        arguments | {"scheduler_metadata": _fa3_plan(module, one)} for arguments, one in zip(made, sets, strict=True)
    ]
    call = module.flash_attn_varlen_func
    return {
        "fa3": [functools.partial(call, **arguments) for arguments in made],
        "fa3_planned": [functools.partial(call, **arguments) for arguments in planned],
    }


def vllm_attention(sets: Sequence[PagedAttention]) -> Baseline:
    """Triton kernel of vLLM, which splits the keys as vLLM would."""
    module, _ = imported("vllm_attention")
    if module is None or any(one.is_fp8 for one in sets):
        return {}
    return {"vllm_triton": [functools.partial(_unified, module, _vllm_arguments(one)) for one in sets]}


def _starts(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)


def _fa3_arguments(one: PagedAttention) -> dict[str, Any]:
    device = one.query_THD.device
    arguments: dict[str, Any] = {
        "q": one.query_THD.contiguous(),
        "k": one.pages[0],
        "v": one.pages[1],
        "max_seqlen_q": max(one.q_lens),
        "cu_seqlens_q": _starts(one.q_lens, device),
        "max_seqlen_k": max(one.kv_lens),
        "seqused_k": torch.tensor(one.kv_lens, dtype=torch.int32, device=device),
        "softmax_scale": one.scale,
        "causal": True,
        "block_table": one.block_table.int().contiguous(),
        "fa_version": 3,
    }
    if one.is_fp8:
        ones = torch.ones(len(one.q_lens), one.key_NHSD.shape[1], device=device)
        arguments |= {"q": arguments["q"].to(torch.float8_e4m3fn)}
        arguments |= {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        arguments |= {"out": torch.empty_like(one.query_THD, memory_format=torch.contiguous_format)}
    return arguments


def _fa3_plan(module: Any, one: PagedAttention) -> torch.Tensor:
    device = one.query_THD.device
    plan: torch.Tensor = module.get_scheduler_metadata(
        batch_size=len(one.q_lens),
        max_seqlen_q=max(one.q_lens),
        max_seqlen_k=max(one.kv_lens),
        num_heads_q=one.query_THD.shape[1],
        num_heads_kv=one.key_NHSD.shape[1],
        headdim=one.query_THD.shape[2],
        cache_seqlens=torch.tensor(one.kv_lens, dtype=torch.int32, device=device),
        qkv_dtype=torch.float8_e4m3fn if one.is_fp8 else one.query_THD.dtype,
        cu_seqlens_q=_starts(one.q_lens, device),
        page_size=one.key_NHSD.shape[2],
        causal=True,
    )
    return plan


def _vllm_arguments(one: PagedAttention) -> dict[str, Any]:
    device, (_, num_heads, num_dims) = one.query_THD.device, one.query_THD.shape
    num_kv_heads = one.key_NHSD.shape[1]
    max_split = _FULL_GRID // num_kv_heads  # sequences
    shape = (max_split, num_heads, _NUM_SEGMENTS)
    ones = torch.ones(1, device=device).expand(len(one.q_lens), num_kv_heads)
    return {
        "q": one.query_THD.contiguous(),
        "k": one.pages[0],
        "v": one.pages[1],
        "out": torch.empty_like(one.query_THD, memory_format=torch.contiguous_format),
        "cu_seqlens_q": _starts(one.q_lens, device),
        "max_seqlen_q": max(one.q_lens),
        "seqused_k": torch.tensor(one.kv_lens, dtype=torch.int32, device=device),
        "max_seqlen_k": max(one.kv_lens),
        "softmax_scale": one.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": one.block_table.int().contiguous(),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": ones,
        "v_descale": ones,
        "seq_threshold_3D": max_split,
        "num_par_softmax_segments": _NUM_SEGMENTS,
        "softmax_segm_output": torch.empty(*shape, 1 << (num_dims - 1).bit_length(), device=device),
        "softmax_segm_max": torch.empty(shape, device=device),
        "softmax_segm_expsum": torch.empty(shape, device=device),
    }


def _unified(module: Any, arguments: dict[str, Any]) -> torch.Tensor:
    module.unified_attention(**arguments)
    out: torch.Tensor = arguments["out"]
    return out


@dataclass(frozen=True, kw_only=True)
class PagedLatents:
    """One set of buffers of attention over latents; the latent rows are random, so they are made anew.

    Attributes:
        query_BQAX: absorbed queries, bfloat16.
        latent_dim: columns of a row that are values.
        kv_lens: positions of each sequence, including its queries'.
        scale: factor of scores.
    """

    query_BQAX: torch.Tensor
    latent_dim: int
    kv_lens: Sequence[int]
    scale: float

    def pages(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows in scattered blocks [N, S, 1, X], the blocks of each sequence, int32 [B, M], and their lengths [B]."""
        device, num_sequences = self.query_BQAX.device, len(self.kv_lens)
        num_blocks = -(-max(self.kv_lens) // block_size)
        total = num_sequences * num_blocks
        shape = (total, block_size, 1, self.query_BQAX.shape[3])
        rows = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        table = torch.randperm(total, device=device).view(num_sequences, num_blocks).int()
        return rows, table, torch.tensor(self.kv_lens, dtype=torch.int32, device=device)


def flash_mla(sets: Sequence[PagedLatents]) -> Baseline:
    """FlashMLA, in blocks of 64; the first call makes its plan, before any is timed."""
    module, _ = imported("flash_mla")
    if module is None:
        return {}
    return {"flash_mla": [_flash_mla(module, one) for one in sets]}


def fa3_latents(sets: Sequence[PagedLatents]) -> Baseline:
    """FlashAttention-3 over latents: RoPE columns are its queries and keys, latents its values and second queries."""
    module, _ = imported("fa3")
    if module is None:
        return {}
    return {"fa3": [functools.partial(module.flash_attn_varlen_func, **_fa3_latents(one)) for one in sets]}


def _flash_mla(module: Any, one: PagedLatents) -> Call:
    rows, table, lens = one.pages(64)
    made = module.get_mla_metadata(lens, one.query_BQAX.shape[1] * one.query_BQAX.shape[2], 1)
    call = functools.partial(
        module.flash_mla_with_kvcache, one.query_BQAX, rows, table, lens, one.latent_dim, *made,
        softmax_scale=one.scale, causal=True,
    )  # fmt: skip
    call()
    return call


def _fa3_latents(one: PagedLatents) -> dict[str, Any]:
    rows, table, lens = one.pages(16)
    num_sequences, num_queries = one.query_BQAX.shape[:2]
    latent, turned = one.query_BQAX.flatten(0, 1).split(
        [one.latent_dim, one.query_BQAX.shape[3] - one.latent_dim], dim=-1
    )
    return {
        "q": turned.contiguous(),
        "k": rows[..., one.latent_dim :],
        "v": rows[..., : one.latent_dim],
        "q_v": latent.contiguous(),
        "max_seqlen_q": num_queries,
        "cu_seqlens_q": _starts([num_queries] * num_sequences, one.query_BQAX.device),
        "max_seqlen_k": max(one.kv_lens),
        "seqused_k": lens,
        "softmax_scale": one.scale,
        "causal": True,
        "block_table": table,
        "fa_version": 3,
    }


GROUP = 128
_FP8 = torch.float8_e4m3fn
_MAX_FP8 = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaled:
    """One set of buffers of a GEMM: [M, K] x [N, K]^T, or of each expert, with masked rows.

    Attributes:
        rows_MK: float8_e4m3fn; [E, M, K] if masked.
        row_scales: float32 [M, K / 128]; [E, M, K / 128] if masked.
        weights_NK: float8_e4m3fn; [E, N, K] if masked.
        weight_scales: float32 [N / 128, K / 128]; [E, ...] if masked.
        num_rows_E: int32, number of valid rows per expert; None unless masked.
    """

    rows_MK: torch.Tensor
    row_scales: torch.Tensor
    weights_NK: torch.Tensor
    weight_scales: torch.Tensor
    num_rows_E: torch.Tensor | None = None


def deep_gemm(sets: Sequence[BlockScaled]) -> Baseline:
    """DeepGEMM; scales are already in its layout."""
    module, _ = imported("deep_gemm")
    if module is None:
        return {}
    return {"deep_gemm": [functools.partial(_deep_gemm, module, *_deep_gemm_arguments(module, one)) for one in sets]}


def deep_gemm_masked(sets: Sequence[BlockScaled], expected_m: int) -> Baseline:
    """DeepGEMM's masked grouped GEMM; it is given the mean number of rows per expert."""
    module, _ = imported("deep_gemm")
    if module is None:
        return {}
    return {
        "deep_gemm": [
            functools.partial(_deep_gemm_masked, module, *_deep_gemm_arguments(module, one), one.num_rows_E, expected_m)
            for one in sets
        ]
    }


def scaled_mm(sets: Sequence[BlockScaled]) -> Baseline:
    """`torch._scaled_mm`: the same values with one scale for a whole tensor, which is less work with other results."""
    one = torch.ones((), device=sets[0].rows_MK.device)
    return {
        "scaled_mm": [
            functools.partial(
                torch._scaled_mm,  # pyright: ignore[reportPrivateImportUsage]
                a.rows_MK.contiguous(),
                a.weights_NK.t(),
                one,
                one,
                out_dtype=torch.bfloat16,
            )
            for a in sets
        ]
    }


def scaled_mm_blocks(sets: Sequence[BlockScaled]) -> Baseline:
    """`F.scaled_mm` with the same block scales; rows are padded to a multiple of four, outside the calls."""
    return {"scaled_mm_blocks": [_scaled_mm_blocks(one) for one in sets]}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineExperts:
    """One set of buffers of an MoE layer.

    Attributes:
        rows_MK: bfloat16.
        gate_up_ENK: float8_e4m3fn, or bfloat16 without scales; N = 2 I.
        gate_up_scales: float32 [E, N / 128, K / 128].
        down_EKI: same dtype.
        down_scales: float32 [E, K / 128, I / 128].
        weights: float32 [M, experts of a row].
        experts: int32 [M, experts of a row].
    """

    rows_MK: torch.Tensor
    gate_up_ENK: torch.Tensor
    gate_up_scales: torch.Tensor | None
    down_EKI: torch.Tensor
    down_scales: torch.Tensor | None
    weights: torch.Tensor
    experts: torch.Tensor

    @property
    def is_fp8(self) -> bool:
        """Whether weights are float8."""
        return self.gate_up_ENK.dtype == _FP8


def vllm_moe(sets: Sequence[BaselineExperts]) -> Baseline:
    """Triton kernels of vLLM with its tuned configurations, and `torch.compile` for the rest of the layer.

    To its advantage, rows are sorted by expert outside the calls, and SiLU is fused with the quantization.
    """
    module, _ = imported("vllm_moe")
    if module is None:
        return {}
    return {"vllm_moe": [_vllm_moe(module, one) for one in sets]}


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    num_rows = -(-tensor.shape[0] // multiple) * multiple
    padded = torch.zeros(num_rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    padded[: tensor.shape[0]].copy_(tensor)
    return padded


def _deep_gemm_arguments(module: Any, one: BlockScaled) -> tuple[Any, Any, torch.Tensor]:
    scales = module.get_mn_major_tma_aligned_tensor(one.row_scales.contiguous())
    shape = (*one.rows_MK.shape[:-1], one.weights_NK.shape[-2])
    out = torch.empty(shape, dtype=torch.bfloat16, device=one.rows_MK.device)
    return (one.rows_MK.contiguous(), scales), (one.weights_NK.contiguous(), one.weight_scales.contiguous()), out


def _deep_gemm(module: Any, rows: Any, weights: Any, out: torch.Tensor) -> torch.Tensor:
    module.fp8_gemm_nt(rows, weights, out, disable_ue8m0_cast=True)
    return out


def _deep_gemm_masked(
    module: Any, rows: Any, weights: Any, out: torch.Tensor, num_rows_E: torch.Tensor | None, expected_m: int
) -> None:
    # Nothing is returned, because rows beyond the mask are arbitrary.
    module.fp8_m_grouped_gemm_nt_masked(rows, weights, out, num_rows_E, expected_m, disable_ue8m0_cast=True)


def _scaled_mm_blocks(one: BlockScaled) -> functools.partial[torch.Tensor]:
    rows = _padded(one.rows_MK, 4)
    row_scales = _padded(one.row_scales, 4).t().contiguous().t()  # a column's scales lie together
    num_groups = one.weight_scales.shape[1]
    memory = torch.zeros(one.weight_scales.shape[0], -(-num_groups // 4) * 4, device=rows.device)
    weight_scales = memory[:, :num_groups].copy_(one.weight_scales)
    kinds: Any = F.ScalingType
    function: Any = F.scaled_mm
    return functools.partial(
        function,
        rows,
        one.weights_NK.t(),
        row_scales,
        kinds.BlockWise1x128,
        weight_scales.t(),
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def _quantized(rows_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = rows_MK.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / _MAX_FP8
    codes = (groups / scales[..., None]).clamp(-_MAX_FP8, _MAX_FP8).to(_FP8)
    return codes.flatten(-2), scales


def _silu_multiplied(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).bfloat16()


def _silu_quantized(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantized(_silu_multiplied(gate_up))


def _summed(parts_MkK: torch.Tensor) -> torch.Tensor:
    return parts_MkK.sum(1)


def sorted_by_expert(experts: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, ...]:
    """Sort all (row, choice) pairs by expert into blocks of one expert: places, expert per block, and the end.

    The format is that of vLLM's `moe_align_block_size`.
    """
    flat = experts.flatten().long()
    num_pairs = flat.numel()
    max_places = num_pairs + num_experts * (block - 1)
    max_places = -(-max_places // block) * block
    if num_pairs < num_experts:
        max_places = min(num_pairs * block, max_places)
    places = torch.full((max_places,), num_pairs, dtype=torch.int32)
    owners = torch.zeros(-(-max_places // block), dtype=torch.int32)
    counts = torch.bincount(flat.cpu(), minlength=num_experts).tolist()
    order, begin, taken = torch.argsort(flat.cpu(), stable=True).int(), 0, 0
    for expert, count in enumerate(counts):
        num_blocks = math.ceil(count / block)
        places[begin : begin + count] = order[taken : taken + count]
        owners[begin // block : begin // block + num_blocks] = expert
        begin, taken = begin + num_blocks * block, taken + count
    return places.to(flat.device), owners.to(flat.device), torch.tensor([begin], dtype=torch.int32, device=flat.device)


def _vllm_moe(module: Any, one: BaselineExperts) -> functools.partial[torch.Tensor]:
    num_rows, num_choices = one.experts.shape
    num_experts, num_outputs, _ = one.gate_up_ENK.shape
    blocks, kind = ([GROUP, GROUP], "fp8_w8a8") if one.is_fp8 else (None, None)
    config = module.try_get_optimal_moe_config(
        one.gate_up_ENK.shape, one.down_EKI.shape, num_choices, kind, num_rows, block_shape=blocks
    )
    if num_rows * num_choices * 4 <= num_experts:  # vLLM does not sort so few
        placed: tuple[Any, ...] = (
            None,
            one.experts.flatten().int(),
            torch.tensor([one.experts.numel() * config["BLOCK_SIZE_M"]], dtype=torch.int32, device=one.rows_MK.device),
        )
    else:
        placed = sorted_by_expert(one.experts, num_experts, config["BLOCK_SIZE_M"])
    middle = one.rows_MK.new_empty(num_rows, num_choices, num_outputs)
    parts = one.rows_MK.new_empty(num_rows, num_choices, one.rows_MK.shape[1])
    gemm = functools.partial(
        module.invoke_fused_moe_triton_kernel,
        config=config,
        compute_type=module.tl.bfloat16,
        use_fp8_w8a8=one.is_fp8,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
        block_shape=blocks,
    )
    functions = (_quantized, _silu_quantized, _summed) if one.is_fp8 else (_plain, _silu_plain, _summed)
    fused = tuple(compiled(function) if function is not _plain else function for function in functions)
    return functools.partial(_run_vllm_moe, gemm, fused, one, placed, middle, parts)


def _plain(rows_MK: torch.Tensor) -> tuple[torch.Tensor, None]:
    return rows_MK, None


def _silu_plain(gate_up: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _silu_multiplied(gate_up), None


def _run_vllm_moe(
    gemm: Any, fused: tuple[Any, ...], one: BaselineExperts, placed: Any, middle: torch.Tensor, parts: torch.Tensor
) -> torch.Tensor:
    quantized, silu_quantized, summed = fused
    num_choices = one.experts.shape[1]
    codes, scales = quantized(one.rows_MK)
    gemm(
        codes, one.gate_up_ENK, middle, scales, one.gate_up_scales, one.weights, *placed,
        mul_routed_weight=False, top_k=num_choices,
    )  # fmt: skip
    codes, scales = silu_quantized(middle.flatten(0, 1))
    gemm(
        codes, one.down_EKI, parts, scales, one.down_scales, one.weights, *placed, mul_routed_weight=True, top_k=1
    )  # fmt: skip
    out: torch.Tensor = summed(parts)
    return out
