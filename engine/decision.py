"""The decision message: one packed int32 tensor per step, from rank 0 to every rank, checked against their own.

It holds the number of the decision, a digest of what was decided upon, and what was decided (accepted lengths, tokens,
the next draft). Every rank computes all of it by itself; they must be the same, and a rank whose differ must not go on:
it would decode from KV that does not belong together. The digest covers what ranks know and do not exchange: slots,
lengths, last tokens, drafts and block tables. It crosses with the communicator, so on a GPU nothing waits for the host
until somebody reads the decision.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import torch

from baton.core.errors import WorkerLost
from baton.model.parallel import Communicator

_WEIGHT: Final = -7046029254386353131  # 2^64 / golden ratio, odd
DIVERGED: Final = -1  # neither a token nor a count
_HEAD_LEN: Final = 3  # number, digest in two words
_MAX_SHOWN: Final = 32


Ints = TypeVar("Ints", bound=Sequence[int])


class Decisions:
    """One rank's, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._num_made = 0
        self._weights_N: torch.Tensor | None = None  # of digests; on a GPU each operation costs a launch

    def agree(self, values: torch.Tensor, state: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Decide on `values`, and return them.

        On a GPU nothing waits for the host: there a rank that has decided something else gets `DIVERGED` in every
        place, and whoever reads the values calls `check`.

        Args:
            values: int64 that fit in 31 bits, the same at every rank.
            state: integer tensors that must be the same at every rank, too.

        Raises:
            WorkerLost: on a CPU; this rank has decided something else.
        """
        if self._communicator.size == 1:
            return values
        self._num_made += 1
        number_1 = torch.full((1,), self._num_made & 0x7FFFFFFF, dtype=torch.int32, device=values.device)
        digest_2 = digest(state, values.device, self._weights(state, values.device)).view(torch.int32)
        own_N = torch.cat([number_1, digest_2, values.flatten().to(torch.int32)])
        decided_N = self._communicator.broadcast(own_N)
        if values.device.type != "cpu":
            return torch.where((decided_N == own_N).all(), values, DIVERGED)
        if not torch.equal(decided_N, own_N):
            raise self._diverged(decided_N.tolist(), own_N.tolist())
        return values

    def check(self, values: Ints) -> Ints:
        """The same values, or those of the first column, on the host.

        Raises:
            WorkerLost: this rank has decided something else.
        """
        if DIVERGED in values:
            rank, size = self._communicator.rank, self._communicator.size
            raise WorkerLost(f"rank {rank} of {size} diverged", rank=rank, size=size, how="diverged")
        return values

    def _weights(self, state: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """For a digest of the state, and of larger ones."""
        count = sum(tensor.numel() for tensor in state)
        if self._weights_N is None or len(self._weights_N) < count:
            self._weights_N = digest_weights(2 * count, device)
        return self._weights_N

    def _diverged(self, decided: list[int], own: list[int]) -> WorkerLost:
        rank, size = self._communicator.rank, self._communicator.size
        values, others = own[_HEAD_LEN:], decided[_HEAD_LEN:]
        what = "number" if decided[0] != own[0] else "state" if values == others else "values"
        message = f"rank {rank} of {size} diverged in the {what} of decision {decided[0]}"
        if what == "values":
            message += f": {values[:_MAX_SHOWN]} where rank 0 has {others[:_MAX_SHOWN]}"
        return WorkerLost(message, rank=rank, size=size, how="diverged", what=what)


def digest(state: Sequence[torch.Tensor], device: torch.device, weights_N: torch.Tensor | None = None) -> torch.Tensor:
    """64 bits, int64 [1], that change with any element of any tensor, or when two change places.

    `weights_N` are those of `digest_weights`, if they are there already; more than needed do no harm.
    """
    if not state:
        return torch.zeros(1, dtype=torch.int64, device=device)
    words_N = torch.cat([tensor.flatten().to(torch.int64) for tensor in state])
    if weights_N is None:
        weights_N = digest_weights(len(words_N), device)
    return (words_N * weights_N[: len(words_N)]).sum(dim=0, keepdim=True)


def digest_weights(count: int, device: torch.device) -> torch.Tensor:
    """Of the places of so many words: odd, int64 [count]; each depends on its place alone."""
    weights_N = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _WEIGHT
    return (weights_N ^ (weights_N >> 31)) * _WEIGHT | 1
