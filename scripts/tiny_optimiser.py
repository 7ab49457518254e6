"""The tiny model's optimiser: Muon for matrices, AdamW for the rest."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring every singular value near 1 by five quintic Newton-Schulz steps (Muon)."""
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.mT if tall else x
    return x.float()


class Muon:
    """Momentum with orthogonalised updates, for matrices; equal shapes go in one batch.

    Updates are scaled to the size AdamW's have, so both optimisers share a rate and a decay.
    """

    def __init__(self, weights: Sequence[nn.Parameter], decay: float) -> None:
        self._decay = decay
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for weight in weights:
            self._groups.setdefault(tuple(weight.shape[-2:]), []).append(weight)
        self._momentum: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step and drop the gradients."""
        for shape, weights in self._groups.items():
            parts = [weight.grad.reshape(-1, *shape) for weight in weights if weight.grad is not None]
            gradient = torch.cat(parts)
            momentum = self._momentum.setdefault(shape, torch.zeros_like(gradient))
            momentum.lerp_(gradient, 0.05)
            update = orthogonalise(gradient.lerp(momentum, 0.95))
            update *= 0.2 * math.sqrt(max(shape))
            for weight, change in zip(weights, update.split([len(part) for part in parts]), strict=True):
                weight.mul_(1 - rate * self._decay).sub_(change.view_as(weight), alpha=rate)
                weight.grad = None


class Optimiser:
    """Muon for matrices, AdamW for embeddings, routers, convolutions and norms; warm-up, then linear decay."""

    def __init__(self, model: nn.Module, rate: float, decay: float, steps: int) -> None:
        matrices, rest, plain = [], [], []
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                plain.append(weight)
            elif name.endswith(("embed_tokens.weight", "gate.weight", "conv1d.weight")):
                rest.append(weight)
            else:
                matrices.append(weight)
        self._muon = Muon(matrices, decay)
        groups = [{"params": rest, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        self._rate, self._steps, self._warm = rate, steps, max(1, min(100, steps // 10))

    def step(self, done: int, left: float | None = None) -> None:
        """Apply the gradients; `done` counts the steps before this one, `left` is the share left if time binds."""
        slope = min((done + 1) / self._warm, 1 - done / self._steps if left is None else left)
        self._muon.step(self._rate * slope)
        for group in self._adam.param_groups:
            group["lr"] = self._rate * slope
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
