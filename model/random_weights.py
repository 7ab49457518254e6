"""Weights for a shape without a checkpoint: drawn on the device, tensor by tensor, the same for every worker.

Speed does not depend on what the numbers are, so benchmarks need no gigabytes on disk. The numbers are only as good as
that asks: activations stay finite however deep the model, no two tokens have equal logits, experts are used evenly.
A tensor depends on the seed and its name alone, not on the order of loading or on what other tensors there are.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from baton.model.draft_names import DRAFT_HEAD
from baton.model.weights import Cut, ReadBuffer

RANDOM_SEED = 0
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.5
_HEAD_NORM_MEAN = 1.5  # of queries and keys: attention that is neither uniform nor fixed on one token
_LOGIT_SPREAD = 3.0
_GAINS = {
    ".mlp.gate.weight": 2.0,  # routers that are neither undecided nor always of one mind
    # What layers add outweighs a token's own embedding, which a tied lm_head would repeat for ever.
    ".o_proj.weight": 3.0,
    ".down_proj.weight": 3.0,
}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """One tensor that is made when it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int

    def read(self, cut: Cut | None = None, buffer: ReadBuffer | None = None) -> torch.Tensor:
        """The tensor, or a part of it (of the same whole), on its device; a buffer is not needed."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        mean, spread = self._law()
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        tensor.normal_(mean, spread, generator=generator)
        return tensor if cut is None else tensor.narrow(cut.dim, cut.first, cut.count).contiguous()

    def _law(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        if self.name.endswith(".bias"):
            return 0.0, _BIAS_SPREAD
        if len(self.shape) == 1:
            return (_HEAD_NORM_MEAN if self.name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0), _NORM_SPREAD
        unit = self.shape[-1] ** -0.5  # keeps the size of what goes through
        if self.name in ("model.embed_tokens.weight", "lm_head.weight", DRAFT_HEAD):
            return 0.0, _LOGIT_SPREAD * unit
        return 0.0, unit * next((gain for name, gain in _GAINS.items() if self.name.endswith(name)), 1.0)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, RandomTensor]:
    """Tensors of these names and shapes; none is made yet."""
    return {name: RandomTensor(name, shape, dtype, device, seed) for name, shape in shapes.items()}


def random_identity(device: torch.device, seed: int) -> str:
    """What, beside names, shapes and dtype, decides the numbers: other kinds of device draw others."""
    is_cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    return f"random {seed} by torch {torch.__version__} on {device.type} {kind}"
