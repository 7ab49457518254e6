"""What the tests of the MoE kernels share: drawn inputs, weights in both dtypes, and guarded memory."""

import math
from dataclasses import replace

import pytest
import torch

from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.moe import ExpertWeights
from baton.tests.kernels.harness import Guards


class Draw:
    """Seeded."""

    def __init__(self, seed, device="cpu"):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def choice(self, *values):
        return values[int(self.integers(0, len(values), 1)[0])]

    def experts(self, num_tokens, num_experts, num_chosen, dtype=torch.int64):
        """Distinct for a token."""
        order = torch.rand(num_tokens, num_experts, generator=self.generator, device=self.device).argsort(dim=1)
        return order[:, :num_chosen].to(dtype)

    def weights(self, num_experts, inner_size, hidden, kind):
        gate_up_EJD = self.normal(num_experts, 2 * inner_size, hidden) / math.sqrt(hidden)
        down_EDI = self.normal(num_experts, hidden, inner_size) / math.sqrt(inner_size)
        if kind in ("fp8", "ue8m0"):
            tensors = *quantize_blocks(gate_up_EJD), *quantize_blocks(down_EDI)
            return Fp8ExpertWeights(*tensors, ue8m0=kind == "ue8m0")
        return ExpertWeights(gate_up_EJD.bfloat16(), down_EDI.bfloat16())


def some_experts(weights, numbers, held=None):
    """The same of some experts, or in another order."""
    others = "held", "ue8m0", "has_shared"
    tensors = {name: getattr(weights, name) for name in weights.__slots__ if name not in others}
    return replace(weights, **{name: tensor[numbers].contiguous() for name, tensor in tensors.items()}, held=held)


def quantize_blocks(weight):
    """[E, N, K] -> float8 and a scale for each 128 x 128, the last ones shorter in N."""
    num_outputs = weight.shape[1]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_outputs % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scale = blocks.abs().amax(dim=(2, 4)).clamp(min=1e-10) / 448
    values = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)
    return values[:, :num_outputs].to(torch.float8_e4m3fn).contiguous(), scale


def wide_blocks(values, scale):
    """The weights that float8 values and scales stand for, float64."""
    out = values.double()
    for row in range(scale.shape[1]):
        for column in range(scale.shape[2]):
            part = (slice(None), slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            out[part] *= scale[:, row, column, None, None].double()
    return out


def wide_rows(x, ue8m0=False):
    """What float8 with a scale for each 128 columns keeps of x, float64; with `ue8m0` scales are powers of two."""
    out = x.double().clone()
    for column in range(0, x.shape[-1], 128):
        part = x[..., column : column + 128].float()
        scale = part.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448
        scale = scale.double().log2().ceil().exp2().float() if ue8m0 else scale
        out[..., column : column + 128] = (part / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return out


@pytest.fixture
def guarded_empty(monkeypatch):
    """Every `torch.empty` gives poisoned memory between canaries, which are looked at in the end."""
    guards, plain = Guards(), torch.empty

    def empty(*shape, dtype=None, device=None):
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(sizes) == 0:
            return plain(sizes, dtype=dtype, device=device)
        monkeypatch.setattr(torch, "empty", plain)
        made = guards.empty(*sizes, dtype=dtype or torch.float32)
        monkeypatch.setattr(torch, "empty", empty)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    yield guards
    guards.check()
