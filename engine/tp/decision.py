"""The decision message: one packed int32 tensor per step, broadcast by rank 0 and compared by every rank.

It holds the decision's number, a digest of the state it was based on, and what was decided (accepted lengths, tokens,
the next draft). Every rank computes all of it itself. A rank whose result differs must not continue, because it would
decode from inconsistent KV. The digest covers state that ranks do not exchange: slots, lengths, last tokens, drafts,
block tables, and the maps of experts that may move. The message is sent by the communicator, so on a GPU nothing waits
for the host until the decision is read; there two kernels (`kernels.sampling.decision`) pack and compare it.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import torch

from baton.core.errors import WorkerLost
from baton.kernels.sampling.decision_reference import DIVERGED, HEAD_LEN, digest_weights, message_number, pack_reference
from baton.model.parallel import Communicator

_MAX_SHOWN: Final = 32


Ints = TypeVar("Ints", bound=Sequence[int])


class Decisions:
    """One rank's decisions, in order.

    Args:
        communicator: of the ranks.
        device: device of the decisions, whose kernels are compiled now instead of in the first step. None: in the first
            step.
    """

    def __init__(self, communicator: Communicator, device: torch.device | None = None) -> None:
        self._communicator = communicator
        self._num_made = 0
        self._weights_N: torch.Tensor | None = None  # digest weights, on a CPU
        if communicator.size > 1 and device is not None and device.type != "cpu":
            from baton.kernels.sampling.decision import (
                warm_up,  # Triton takes half a second to import, and CPUs do without
            )

            warm_up(device)

    def agree(self, values: torch.Tensor, state: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Check that all ranks decided on the same `values`, and return them.

        On a GPU nothing waits for the host: a rank that has decided something else gets `DIVERGED` in every place, and
        the reader of the values calls `check`.

        Args:
            values: int64 that fit in 31 bits, the same on every rank.
            state: integer tensors that must be the same on every rank, too.

        Raises:
            WorkerLost: on a CPU; this rank has decided something else.
        """
        if self._communicator.size == 1:
            return values
        self._num_made += 1
        number = message_number(self._num_made)
        if values.device.type != "cpu":
            return self._agree_on_gpu(values, state, number)
        own_N = pack_reference(values, state, number, self._weights(state, values.device))
        decided_N = self._communicator.broadcast(own_N.clone())
        if not torch.equal(decided_N, own_N):
            raise self._diverged(decided_N.tolist(), own_N.tolist())
        return values

    def check(self, values: Ints) -> Ints:
        """Check values, or those of the first column, on the host; returns them.

        Raises:
            WorkerLost: this rank has decided something else.
        """
        if DIVERGED in values:
            rank, size = self._communicator.rank, self._communicator.size
            raise WorkerLost(f"rank {rank} of {size} diverged", rank=rank, size=size, how="diverged")
        return values

    def _agree_on_gpu(self, values: torch.Tensor, state: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        from baton.kernels.sampling.decision import compare, pack

        own_N, decided_N = pack(values, state, number)
        return compare(own_N, self._communicator.broadcast(decided_N), values)

    def _weights(self, state: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Digest weights for the state; kept, with room for larger ones."""
        count = sum(tensor.numel() for tensor in state)
        if self._weights_N is None or len(self._weights_N) < count:
            self._weights_N = digest_weights(2 * count, device)
        return self._weights_N

    def _diverged(self, decided: list[int], own: list[int]) -> WorkerLost:
        rank, size = self._communicator.rank, self._communicator.size
        values, others = own[HEAD_LEN:], decided[HEAD_LEN:]
        what = "number" if decided[0] != own[0] else "state" if values == others else "values"
        message = f"rank {rank} of {size} diverged in the {what} of decision {decided[0]}"
        if what == "values":
            message += f": {values[:_MAX_SHOWN]} where rank 0 has {others[:_MAX_SHOWN]}"
        return WorkerLost(message, rank=rank, size=size, how="diverged", what=what)
