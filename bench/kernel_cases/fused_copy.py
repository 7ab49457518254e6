"""Rows of `baton bench kernels` for `fused_copy`: a batch's inputs, spread over many tensors, in one launch."""

from functools import partial

import torch

from baton.bench.kernel_bench.case import Call, KernelCase, Systems
from baton.kernels import fused_copy_triton
from baton.kernels.fused_copy import Pair, fused_copy


def _pairs(num_copies: int, num_bytes: int, device: torch.device) -> list[Pair]:
    return [
        (
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
            torch.ones(num_bytes, dtype=torch.uint8, device=device),
        )
        for _ in range(num_copies)
    ]


def _ours(pairs: list[Pair], device: torch.device) -> Call:
    """On a GPU only the launch, with an existing table: the host packs the table, which cannot be captured."""
    running = fused_copy(pairs, device)
    if device.type != "cuda":
        return partial(fused_copy, pairs, device)
    max_bytes = max(target.numel() for target, _ in pairs)
    return partial(fused_copy_triton.launch, running.tables[1], max_bytes)


def _one_by_one(pairs: list[Pair]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _prepare(num_copies: int, num_bytes: int, device: torch.device, num_sets: int) -> Systems:
    sets = [_pairs(num_copies, num_bytes, device) for _ in range(num_sets)]
    targets = [[target for target, _ in pairs] for pairs in sets]
    sources = [[source for _, source in pairs] for pairs in sets]
    foreach = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    return {
        "ours": [_ours(pairs, device) for pairs in sets],
        "torch": [partial(_one_by_one, pairs) for pairs in sets],
        "foreach": [partial(foreach, *both) for both in zip(targets, sources, strict=True)],
    }


def cases() -> list[KernelCase]:
    """The dozen copies of a decode step, and larger ones; a tiny case for CPUs."""
    shapes = [(12, 512, True), (12, 4096, True), (64, 65_536, True), (256, 1_048_576, True), (3, 100, False)]
    return [
        KernelCase(
            kernel="fused_copy",
            shape=f"{num_copies} x {num_bytes} B",
            num_bytes=2 * num_copies * num_bytes,
            set_bytes=2 * num_copies * num_bytes,
            prepare=partial(_prepare, num_copies, num_bytes),
            only_gpu=only_gpu,
        )
        for num_copies, num_bytes, only_gpu in shapes
    ]
