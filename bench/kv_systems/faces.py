"""The interfaces of a system under test: a sender in one process, a receiver in another.

A request's clock starts at its first `submit` and stops when the receiver knows that all of it is in its pool. What
must happen before (`prepare`: block ids are agreed, handles reserved) is not counted, for any system.
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
    """A system under test failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCell:
    """What one pair of processes measures.

    Attributes:
        system: name of the system.
        workload: workload that it moves.
        seed: seed of block ids and contents.
        digest: end-to-end digest; None for systems without that choice.
        gil_load: "none", "inside" (a busy Python thread in the receiver's process) or "outside" (another process).
        faults: probability per frame, by kind.
        pace_s: pause between layers in the paced phase; 0 leaves that phase out.
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
        blocks: pool as [layers, blocks, bytes].
        counts: counters for the row; may be empty.
    """

    blocks: Blocks
    counts: dict[str, int]

    def address(self) -> Address:
        """What the sender needs to connect."""
        ...

    def turn(self, timeout_s: float) -> None:
        """Run one turn of the loop that a decode worker has anyway; waits at most `timeout_s`."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Sender(Protocol):
    """The prefill side.

    Attributes:
        blocks: pool as [layers, blocks, bytes].
        counts: counters for the row; may be empty.
        data_path: data path that the last request used; empty if there is no choice.
    """

    blocks: Blocks
    counts: dict[str, int]
    data_path: str

    def connect(self, address: Address) -> None:
        """Connect to the receiver."""
        ...

    def prepare(self, index: int) -> None:
        """Agree on a request; its clock does not run yet."""
        ...

    def submit(self, layer: int) -> None:
        """Begin to push a layer of the request, which is in the pool."""
        ...

    def finish(self) -> None:
        """Signal that every layer was submitted."""
        ...

    def wait(self) -> None:
        """Wait until the receiver has everything, as far as a sender can know."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
