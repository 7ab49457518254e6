"""Attention by others over paged keys and values: FlashAttention-3 as vLLM ships it, and vLLM's own Triton kernel.

They want [pages, positions, heads, dims]; Baton's pool has heads before positions. The same numbers are copied over.

Shapes: T queries of all sequences, H heads, D dims, N blocks, S positions of a block, B sequences.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.bench.kernel_bench.baselines import Baseline, imported

_NUM_SEGMENTS = 16  # of the key positions, as vLLM splits them
_FULL_GRID = 128  # programs that need no split, as vLLM has it


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """One set of buffers, as Baton has it.

    Attributes:
        query_THD: all queries, sequence after sequence.
        key_NHSD: view of the pool, bfloat16 or float8_e4m3fn.
        value_NHSD: view of the pool.
        block_table: [B, blocks of a sequence].
        q_lens: queries of each sequence.
        kv_lens: positions of each, its queries' included.
        scale: of scores.
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
        """Whether keys and values are."""
        return self.key_NHSD.dtype == torch.float8_e4m3fn

    @functools.cached_property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, copied into the layout of the others."""
        return self.key_NHSD.transpose(1, 2).contiguous(), self.value_NHSD.transpose(1, 2).contiguous()


def fa3(sets: Sequence[PagedAttention]) -> Baseline:
    """FlashAttention-3: `fa3` decides within each call how to split, `fa3_planned` is told, once for all layers.

    With fp8 keys and values it wants fp8 queries, too; the scales are 1.
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
    """The Triton kernel of vLLM, with its split of the keys where it would use one."""
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
