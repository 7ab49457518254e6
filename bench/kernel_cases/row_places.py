"""Rows of `baton bench kernels` for `row_places`: positions and slots of a decode step's rows."""

from functools import partial

import torch

from baton.bench.kernel_bench.case import KernelCase, Systems
from baton.kernels.attention.row_places import row_places
from baton.kernels.implementation import Implementation


def _prepare(num_sequences: int, num_rows: int, num_entries: int, device: torch.device, num_sets: int) -> Systems:
    ours, references = [], []
    for _ in range(num_sets):
        first_B = torch.full((num_sequences,), 16 * num_entries - 8, device=device)
        tables_BM = torch.ones(num_sequences, num_entries, dtype=torch.int64, device=device)
        call = partial(row_places, first_B, num_rows, first_B + num_rows, tables_BM, block_size=16, scratch_slot=0)
        ours.append(call)
        references.append(partial(call, implementation=Implementation.REFERENCE))
    return {"ours": ours, "torch": references}


def cases() -> list[KernelCase]:
    """Decode steps with and without drafts; a tiny case for CPUs."""
    shapes = [(1, 2, 64, True), (64, 2, 512, True), (256, 4, 512, True), (4, 2, 8, False)]
    return [
        KernelCase(
            kernel="row_places",
            shape=f"B={num_sequences} Q={num_rows} M={num_entries}",
            num_bytes=8 * num_sequences * (2 + 3 * num_rows),
            set_bytes=8 * num_sequences * (2 + 3 * num_rows + num_entries),
            prepare=partial(_prepare, num_sequences, num_rows, num_entries),
            only_gpu=only_gpu,
        )
        for num_sequences, num_rows, num_entries, only_gpu in shapes
    ]
