"""Generates weights for a shape without a checkpoint: drawn on the device, tensor by tensor, the same in every worker.

Speed does not depend on the values, so benchmarks need no gigabytes on disk. The values are just good enough for that:
activations stay finite in models of any depth, no two tokens have equal logits, experts are used evenly. A tensor
depends only on the seed and its name, not on the order of loading or on other tensors.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from baton.model.checkpoint.weights import Cut, ReadBuffer
from baton.model.tensor_spec import WeightSpec

RANDOM_SEED = 0


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """One tensor that is generated when it is read."""

    name: str
    spec: WeightSpec
    dtype: torch.dtype
    device: torch.device
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.spec.shape

    def read(self, cut: Cut | None = None, buffer: ReadBuffer | None = None) -> torch.Tensor:
        """The tensor, or a part cut out of the whole, on its device; `buffer` is not used."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        tensor.normal_(self.spec.mean, self.spec.spread, generator=generator)
        return tensor if cut is None else tensor.narrow(cut.dim, cut.first, cut.count).contiguous()


def random_tensors(
    weights: Mapping[str, WeightSpec], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, RandomTensor]:
    """Tensors for these specs; none is generated yet."""
    return {name: RandomTensor(name, spec, dtype, device, seed) for name, spec in weights.items()}


def random_identity(device: torch.device, seed: int) -> str:
    """What, besides names, shapes and dtype, determines the values: other kinds of device draw others."""
    is_cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    return f"random {seed} by torch {torch.__version__} on {device.type} {kind}"
