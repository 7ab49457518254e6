"""What a system under test looks like to the harness: a sender in one process, a receiver in another.

The clock of a request starts at its first `submit` and stops when the receiver knows that all of it is in its pool.
What must happen before (`prepare`: block ids are agreed, handles reserved) is outside, for every system.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from baton.bench.kv_bench.memory import Blocks
from baton.bench.kv_bench.workloads import KVWorkload

OnDone = Callable[[int, float], None]
Address = Mapping[str, Any]
REQUEST_LIMIT_S = 60.0  # a request that takes longer fails its cell


class SystemFailed(Exception):
    """A system under test did not do what it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCell:
    """What one pair of processes measures.

    Attributes:
        system: name of the system.
        workload: what it moves.
        seed: of block ids and contents.
        digest: end-to-end digest; None for systems that have no such choice.
        gil_load: "none", "inside" (a busy Python thread in the receiver's process) or "outside" (another process).
        faults: probability per frame, by kind.
        pace_s: between layers in the paced phase; 0 leaves it out.
    """

    system: str
    workload: KVWorkload
    seed: int
    digest: bool | None = None
    gil_load: str = "none"
    faults: Mapping[str, float] | None = None
    pace_s: float = 0.004


class Receiver(Protocol):
    """The decode side.

    Attributes:
        blocks: its pool as [layers, blocks, bytes].
        counts: what it counted, for the row; may be empty.
    """

    blocks: Blocks
    counts: dict[str, int]

    def address(self) -> Address:
        """What the sender needs to connect."""
        ...

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop that a decode worker has anyway; waits at most so long."""
        ...

    def close(self) -> None:
        """End."""
        ...


class Sender(Protocol):
    """The prefill side.

    Attributes:
        blocks: its pool as [layers, blocks, bytes].
        counts: what it counted, for the row; may be empty.
        data_path: what the last request really took; empty where there is no choice.
    """

    blocks: Blocks
    counts: dict[str, int]
    data_path: str

    def connect(self, address: Address) -> None:
        """Reach the receiver."""
        ...

    def prepare(self, index: int) -> None:
        """Agree on a request; its clock does not run yet."""
        ...

    def submit(self, layer: int) -> None:
        """A layer of the request is in the pool: begin to push it."""
        ...

    def finish(self) -> None:
        """Every layer was submitted."""
        ...

    def wait(self) -> None:
        """Until the receiver has everything, as far as a sender can know."""
        ...

    def close(self) -> None:
        """End."""
        ...
