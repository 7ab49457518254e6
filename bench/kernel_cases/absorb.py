"""Rows of `baton bench kernels` for `absorb_queries` and `absorb_values`: of all 128 heads, and of a rank's 16.

"torch" is its batched GEMM: of queries with the copy that joins them, of float8 values with the launch that quantizes.
"""

from collections.abc import Callable
from functools import partial

import torch

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.case import KernelCase, Systems
from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.kernels.mla.absorb import absorb_queries, absorb_values
from baton.kernels.mla.latent_rows import absorbed_queries, absorbed_values

_NOPE_DIM, _TURNED_DIM, _LATENT_DIM, _VALUE_DIM = 128, 64, 512, 128
_HEADS = (128, 16)
_ROWS = (1, 4, 16, 64, 128, 256)


def _torch_queries(query_TAE: torch.Tensor, key_ANC: torch.Tensor) -> torch.Tensor:
    nope_TAN, turned_TAP = query_TAE.tensor_split([_NOPE_DIM], dim=2)
    return absorbed_queries(nope_TAN, turned_TAP, key_ANC, invariant=False)


def _torch_values(mixed_TAC: torch.Tensor, value_AVC: torch.Tensor, is_fp8: bool) -> object:
    rows_TQ = absorbed_values(mixed_TAC, value_AVC, invariant=False).flatten(1)
    return quantize_fp8(rows_TQ) if is_fp8 else rows_TQ


def _values(mixed_TAC: torch.Tensor, value_AVC: torch.Tensor, is_fp8: bool) -> object:
    return absorb_values(mixed_TAC, value_AVC, num_padded=len(mixed_TAC) if is_fp8 else None)


def _draw(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def _query_sets(num_rows: int, num_heads: int, device: torch.device, num_sets: int) -> Systems:
    sets = [
        (
            _draw(device, num_rows, num_heads, _NOPE_DIM + _TURNED_DIM),
            _draw(device, num_heads, _NOPE_DIM + _VALUE_DIM, _LATENT_DIM)[:, :_NOPE_DIM],
        )
        for _ in range(num_sets)
    ]
    return {
        "ours": [kept(partial(absorb_queries, *one)) for one in sets],
        "torch": [kept(partial(_torch_queries, *one)) for one in sets],
    }


def _value_sets(num_rows: int, num_heads: int, device: torch.device, num_sets: int, *, is_fp8: bool) -> Systems:
    sets = [
        (
            _draw(device, num_rows, num_heads, _LATENT_DIM),
            _draw(device, num_heads, _NOPE_DIM + _VALUE_DIM, _LATENT_DIM)[:, _NOPE_DIM:],
        )
        for _ in range(num_sets)
    ]
    return {
        "ours": [kept(partial(_values, *one, is_fp8)) for one in sets],
        "torch": [kept(partial(_torch_values, *one, is_fp8)) for one in sets],
    }


def _case(
    kernel: str, size: tuple[int, int, bool], mark: str, bytes_of_head: int, prepare: Callable[..., Systems]
) -> KernelCase:
    """Of a number of rows, of heads, and whether it is for GPUs only; `bytes_of_head` are of one row, read and written.

    A set of buffers has both halves of a head's weight.
    """
    num_rows, num_heads, only_gpu = size
    weight_bytes = 2 * num_heads * _NOPE_DIM * _LATENT_DIM
    return KernelCase(
        kernel=kernel,
        shape=f"T={num_rows} {num_heads} heads{mark}",
        num_bytes=weight_bytes + num_rows * num_heads * bytes_of_head,
        num_flops=num_rows * weight_bytes,
        is_read=True,
        set_bytes=2 * weight_bytes,
        prepare=partial(prepare, num_rows, num_heads),
        only_gpu=only_gpu,
    )


def cases() -> list[KernelCase]:
    """Rows of decode steps; a tiny case for CPUs."""
    query_bytes = 2 * (_NOPE_DIM + _TURNED_DIM + _LATENT_DIM + _TURNED_DIM)
    found = []
    for size in [*((num_rows, num_heads, True) for num_heads in _HEADS for num_rows in _ROWS), (3, 1, False)]:
        found.append(_case("absorb_queries", size, "", query_bytes, _query_sets))
        value_bytes = 2 * (_LATENT_DIM + _VALUE_DIM)
        found.append(_case("absorb_values", size, "", value_bytes, partial(_value_sets, is_fp8=False)))
        value_bytes = 2 * _LATENT_DIM + _VALUE_DIM + 4
        found.append(_case("absorb_values", size, " fp8", value_bytes, partial(_value_sets, is_fp8=True)))
    return found
