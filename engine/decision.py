"""The decision message: one packed int32 tensor per step, from rank 0 to every rank, checked against their own.

It holds the number of the decision, a digest of what was decided upon, and what was decided (accepted lengths, tokens,
the next draft). Every rank computes all of it by itself; they must be the same, and a rank whose differ must not go on:
it would decode from KV that does not belong together. The digest covers what ranks know and do not exchange: slots,
lengths, last tokens, drafts and block tables. It crosses with the communicator, so on a GPU nothing waits for the host
until somebody reads the decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from baton.core.errors import WorkerLost
from baton.model.parallel import Communicator

_WEIGHT: Final = -7046029254386353131  # 2^64 / golden ratio, odd
_HEAD_LEN: Final = 3  # number, digest in two words


@dataclass(frozen=True, slots=True)
class Decision:
    """One message, at one rank.

    Attributes:
        packed_RN: int32; row 0 is rank 0's message, row 1, in a group, this rank's own.
        shape: of the values.
        rank: of this rank.
        size: of the group.
    """

    packed_RN: torch.Tensor
    shape: torch.Size
    rank: int
    size: int

    def values(self) -> torch.Tensor:
        """What was decided, int64 on the host; waits for it.

        Raises:
            WorkerLost: this rank has decided something else.
        """
        return self.read(self.packed_RN.cpu())

    def read(self, packed_RN: torch.Tensor) -> torch.Tensor:
        """The same from a copy of `packed_RN` that is on the host already."""
        decided_N = packed_RN[0]
        if self.size > 1 and not torch.equal(decided_N, packed_RN[1]):
            self._diverge(decided_N.tolist(), packed_RN[1].tolist())
        return decided_N[_HEAD_LEN:].to(torch.int64).view(self.shape)

    def _diverge(self, decided: list[int], own: list[int]) -> None:
        what = "number" if decided[0] != own[0] else "state" if decided[_HEAD_LEN:] == own[_HEAD_LEN:] else "values"
        shown, theirs = own[_HEAD_LEN:][:32], decided[_HEAD_LEN:][:32]
        message = f"rank {self.rank} of {self.size} diverged in the {what} of decision {decided[0]}"
        if what == "values":
            message += f": {shown} where rank 0 has {theirs}"
        raise WorkerLost(message, rank=self.rank, size=self.size, how="diverged", what=what)


class Decisions:
    """One rank's, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._num_made = 0

    def make(self, values: torch.Tensor, state: Sequence[torch.Tensor] = ()) -> Decision:
        """Decide on `values`.

        Args:
            values: int64 that fit in 32 bits, the same at every rank.
            state: integer tensors that must be the same at every rank, too.
        """
        communicator = self._communicator
        own_N = values.flatten().to(torch.int32)
        if communicator.size == 1:
            head_N = own_N.new_zeros(_HEAD_LEN)
            return Decision(torch.cat([head_N, own_N])[None], values.shape, 0, 1)
        self._num_made += 1
        number_1 = torch.full((1,), self._num_made & 0x7FFFFFFF, dtype=torch.int32, device=values.device)
        own_N = torch.cat([number_1, digest(state, values.device).view(torch.int32), own_N])
        decided_N = communicator.broadcast(own_N)
        return Decision(torch.stack([decided_N, own_N]), values.shape, communicator.rank, communicator.size)


def digest(state: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """64 bits, int64 [1], that change with any element of any tensor, or when two change places."""
    if not state:
        return torch.zeros(1, dtype=torch.int64, device=device)
    words_N = torch.cat([tensor.flatten().to(torch.int64) for tensor in state])
    weights_N = torch.arange(1, len(words_N) + 1, dtype=torch.int64, device=device) * _WEIGHT
    weights_N = (weights_N ^ (weights_N >> 31)) * _WEIGHT | 1
    return (words_N * weights_N).sum(dim=0, keepdim=True)
