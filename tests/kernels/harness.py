"""What every kernel's tests stand on: guarded memory, poison, strided views, and runs that must agree bit for bit.

Triton's interpreter reads and writes real memory, so a kernel that leaves its tensors by an element passes unseen
unless what lies beside them is looked at.
"""

import math
from dataclasses import dataclass, field

import torch

GUARD_BYTES = 256
_CANARY = 0xA7


def poison(tensor):
    """Fill with what must never be read: NaN, the bits of NaN in float8, or the largest negative integer."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.dtype == torch.uint8:
        tensor.fill_(0x7F)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def strided(tensor, dim=0):
    """The same values, with other (poisoned) ones between the rows of `dim`."""
    shape = list(tensor.shape)
    shape.insert(dim + 1, 2)
    wide = poison(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))
    view = wide.select(dim + 1, 0)
    view.copy_(tensor)
    return view


@dataclass
class Guards:
    """Tensors that lie between canaries; `check` says whether anything beside them was written."""

    device: str = "cpu"
    _memories: list = field(default_factory=list)

    def empty(self, *shape, dtype=torch.bfloat16):
        """A poisoned tensor, for outputs."""
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        num_bytes = math.prod(shape) * item_bytes
        # The end is no multiple of anything: what is written past the tensor meets the canary at once.
        memory = torch.full((num_bytes + 2 * GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=self.device)
        self._memories.append((memory, num_bytes))
        return poison(memory[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).view(shape))

    def copy(self, tensor):
        """The same values, guarded, for inputs; contiguous."""
        guarded = self.empty(*tensor.shape, dtype=tensor.dtype)
        # By bytes: float8 and integers alike.
        guarded.view(-1).view(torch.uint8).copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return guarded

    def check(self):
        for memory, num_bytes in self._memories:
            assert memory[:GUARD_BYTES].eq(_CANARY).all(), "written before a tensor"
            assert memory[GUARD_BYTES + num_bytes :].eq(_CANARY).all(), "written past a tensor"


def bits(tensor):
    """Integers that are equal where the bits are; NaN equals itself."""
    tensor = tensor.contiguous()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def same_bits(left, right):
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def assert_deterministic(compute, *inputs):
    """Run twice: equal bits, and inputs as they were. `compute` makes its own outputs; returns them."""
    before = [tensor.clone() for tensor in inputs]
    first, second = compute(), compute()
    first_all = first if isinstance(first, tuple) else (first,)
    for one, other in zip(first_all, second if isinstance(second, tuple) else (second,), strict=True):
        assert same_bits(one, other), "two runs differ"
    for tensor, kept in zip(inputs, before, strict=True):
        assert same_bits(tensor, kept), "an input was written"
    return first


def relative_error(found, wanted):
    """Norm of the difference over the norm of what is wanted, in float64; NaN anywhere makes it NaN."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
