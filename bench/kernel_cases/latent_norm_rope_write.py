"""Rows of `baton bench kernels` for `latent_norm_rope_write`: DeepSeek-V3's layer between projections and attention."""

from functools import partial

import torch

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.case import KernelCase, Systems
from baton.kernels.implementation import Implementation
from baton.kernels.mla.norm_rope_write import latent_norm_rope_write
from baton.kernels.pointwise.rope import rope_angles, rope_inverse_frequencies

_ROWS = (1, 16, 64, 512, 4096)
_BLOCK_LEN = 16


def _prepare(
    num_tokens: int, num_heads: int, latent_dim: int, turned_dim: int, device: torch.device, num_sets: int
) -> Systems:
    angles = rope_angles(
        torch.arange(num_tokens, device=device), rope_inverse_frequencies(turned_dim, 1e4, torch.bfloat16, device)
    )
    slots_T = torch.randperm(-(-num_tokens // _BLOCK_LEN) * _BLOCK_LEN, device=device)[:num_tokens]
    ours, by_torch = [], []
    for _ in range(num_sets):

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        down_TX = draw(num_tokens, latent_dim + turned_dim)
        rows_NSX = torch.zeros(-(-num_tokens // _BLOCK_LEN), _BLOCK_LEN, latent_dim + turned_dim, device=device)
        arguments = (
            draw(num_tokens, num_heads, 2 * turned_dim + turned_dim),
            down_TX[:, :latent_dim],
            down_TX[:, latent_dim:],
            (draw(latent_dim), 1e-6),
            angles,
            slots_T,
            rows_NSX.bfloat16(),
        )
        call = partial(latent_norm_rope_write, *arguments, interleaved=True)
        ours.append(kept(call))
        by_torch.append(kept(partial(call, implementation=Implementation.REFERENCE)))
    return {"ours": ours, "torch": by_torch}


def cases() -> list[KernelCase]:
    """Decode steps and chunks; a tiny case for CPUs."""
    found = []
    shapes = [(num_tokens, 128, 512, 64, True) for num_tokens in _ROWS]
    for num_tokens, num_heads, latent_dim, turned_dim, only_gpu in (*shapes, (3, 2, 32, 16, False)):
        turned = num_tokens * turned_dim * (num_heads + 1)
        num_bytes = 4 * turned + num_tokens * (4 * latent_dim + 4 * turned_dim + 8)
        found.append(
            KernelCase(
                kernel="latent_norm_rope_write",
                shape=f"T={num_tokens} A={num_heads} C={latent_dim} R={turned_dim}",
                num_bytes=num_bytes,
                set_bytes=2 * num_tokens * (num_heads * 3 * turned_dim + 2 * (latent_dim + turned_dim)),
                prepare=partial(_prepare, num_tokens, num_heads, latent_dim, turned_dim),
                only_gpu=only_gpu,
            )
        )
    return found
