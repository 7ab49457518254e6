"""Rows of `baton bench kernels` for `pad_varlen`: a batch's metadata at the size of a captured graph."""

from functools import partial

import torch

from baton.bench.kernel_case import KernelCase, Systems
from baton.kernels.implementation import Implementation
from baton.kernels.pad_varlen import VarlenMetadata, pad_varlen

_TOKENS = 4  # of each sequence


def _metadata(num_sequences: int, num_entries: int, device: torch.device) -> VarlenMetadata:
    total_B = torch.arange(num_sequences + 1, device=device)
    return VarlenMetadata(
        cu_query=total_B * _TOKENS,
        cu_kv=total_B * 1000,
        query_lens=torch.full((num_sequences,), _TOKENS, device=device),
        prefix_lens=torch.full((num_sequences,), 1000 - _TOKENS, device=device),
        block_tables=torch.ones(num_sequences, num_entries, dtype=torch.int64, device=device),
        positions=torch.zeros(num_sequences * _TOKENS, dtype=torch.int64, device=device),
        slots=torch.zeros(num_sequences * _TOKENS, dtype=torch.int64, device=device),
    )


def _num_bytes(num_sequences: int, num_entries: int) -> int:
    """Written, and read for three quarters of the sequences."""
    return 8 * num_sequences * (num_entries + 4 + 2 * _TOKENS) * 7 // 4


def _prepare(num_sequences: int, num_entries: int, device: torch.device, num_sets: int) -> Systems:
    sets = [
        (_metadata(num_sequences * 3 // 4, num_entries, device), _metadata(num_sequences, num_entries, device))
        for _ in range(num_sets)
    ]
    reference = partial(pad_varlen, implementation=Implementation.REFERENCE)
    return {
        "ours": [partial(pad_varlen, batch, graph) for batch, graph in sets],
        "torch": [partial(reference, batch, graph) for batch, graph in sets],
    }


def cases() -> list[KernelCase]:
    """Batches of decode steps with short and long tables; one tiny one for CPUs."""
    shapes = [(16, 64, True), (64, 512, True), (256, 2560, True), (4, 8, False)]
    return [
        KernelCase(
            kernel="pad_varlen",
            shape=f"B={num_sequences} M={num_entries}",
            num_bytes=_num_bytes(num_sequences, num_entries),
            set_bytes=_num_bytes(num_sequences, num_entries),
            prepare=partial(_prepare, num_sequences, num_entries),
            only_gpu=only_gpu,
        )
        for num_sequences, num_entries, only_gpu in shapes
    ]
