"""The plan of a tensor-parallel gang: rank 0 says what is done next, the other ranks do the same in the same order.

A plan message is a line of JSON and, for bulk, bytes behind it. It is told before the work it is about, because that
work adds over ranks. What ranks compute must be what rank 0 computes: `decide` compares, so that a rank that diverges
ends the gang instead of decoding from KV that does not belong together. Owns order and form of messages; who sends
which is the business of the runners (`engine.gang`) and of the workers.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.core.errors import ProtocolError, WorkerLost
from baton.model.parallel import Communicator

VERSION = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One message.

    Attributes:
        kind: what to do.
        fields: JSON values.
        data: bytes.
    """

    kind: str
    fields: Mapping[str, Any]
    data: bytes


class PlanChannel:
    """One rank's end: rank 0 tells, the others hear. One thread of each rank uses it, the one that computes."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.is_computing = False
        self._count = 0

    def tell(self, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Rank 0: the next thing to do."""
        assert self.communicator.rank == 0
        self._count += 1
        head = json.dumps([VERSION, self._count, kind, fields]).encode()
        self.communicator.broadcast_bytes(head + b"\n" + data)

    def hear(self) -> Plan:
        """Another rank: wait for it, as long as rank 0 lives.

        Raises:
            ProtocolError: it is of another version, or a message is missing.
            WorkerLost: rank 0 is gone.
        """
        assert self.communicator.rank > 0
        self._count += 1
        head, _, data = self.communicator.broadcast_bytes(b"", is_patient=True).partition(b"\n")
        version, count, kind, fields = json.loads(head)
        if (version, count) != (VERSION, self._count):
            raise ProtocolError(f"plan {count} of version {version} where {self._count} of {VERSION} is next")
        return Plan(kind, fields, data)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """While the block runs, what layers set off happens at every rank by itself: nothing is told of it."""
        self.is_computing = True
        try:
            yield
        finally:
            self.is_computing = False


def decide(communicator: Communicator, tokens: torch.Tensor) -> torch.Tensor:
    """Rank 0's tokens (or counts), at every rank.

    Raises:
        WorkerLost: this rank computed others; it must not go on.
    """
    if communicator.size == 1:
        return tokens
    decided = communicator.broadcast(tokens)
    if not torch.equal(decided, tokens):
        rank = communicator.rank
        message = f"rank {rank} of {communicator.size} diverged: {tokens.tolist()} where rank 0 has {decided.tolist()}"
        raise WorkerLost(message, rank=rank, size=communicator.size)
    return decided
