"""Rows of `baton bench kernels` for sigmoid gates: attention outputs and shared experts of Qwen3.5-35B-A3B."""

from functools import partial

import torch

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.case import KernelCase, Systems
from baton.kernels.pointwise.sigmoid_gate import add_shared, add_shared_reference, gate_output, gate_output_reference

_ROWS = (1, 64, 1024, 4096)


def _prepare_shared(num_rows: int, length: int, device: torch.device, num_sets: int) -> Systems:
    def draw(columns: int) -> torch.Tensor:
        return torch.randn(num_rows, columns, device=device).bfloat16()

    sets = [(draw(length), draw(length), draw(264)[:, 256:257]) for _ in range(num_sets)]
    return {
        "ours": [kept(partial(add_shared, *one)) for one in sets],
        "torch": [kept(partial(add_shared_reference, *one)) for one in sets],
    }


def _prepare_output(num_rows: int, num_heads: int, device: torch.device, num_sets: int) -> Systems:
    sets = []
    for _ in range(num_sets):
        pairs_TA2E = torch.randn(num_rows, num_heads, 2, 256, device=device).bfloat16()
        sets.append((torch.randn(num_rows, num_heads * 256, device=device).bfloat16(), pairs_TA2E[:, :, 1]))
    return {
        "ours": [kept(partial(gate_output, *one)) for one in sets],
        "torch": [kept(partial(gate_output_reference, *one)) for one in sets],
    }


def cases() -> list[KernelCase]:
    """Decode steps and chunks; a tiny case of each for CPUs."""
    found = []
    for num_rows, length, only_gpu in (*((num_rows, 2048, True) for num_rows in _ROWS), (3, 128, False)):
        found.append(
            KernelCase(
                kernel="add_shared",
                shape=f"T={num_rows} D={length}",
                num_bytes=6 * num_rows * length,
                set_bytes=6 * num_rows * length,
                prepare=partial(_prepare_shared, num_rows, length),
                only_gpu=only_gpu,
            )
        )
    for num_rows, num_heads, only_gpu in (*((num_rows, 16, True) for num_rows in _ROWS), (3, 1, False)):
        found.append(
            KernelCase(
                kernel="gate_output",
                shape=f"T={num_rows} A={num_heads} E=256",
                num_bytes=6 * num_rows * num_heads * 256,
                set_bytes=8 * num_rows * num_heads * 256,
                prepare=partial(_prepare_output, num_rows, num_heads),
                only_gpu=only_gpu,
            )
        )
    return found
