"""The P x D matrix of `baton doctor --address`: which lane KV really takes between each two workers, and how fast.

Everything is measured by the prefill workers while they serve: the lane that was opened and the reasons against better
ones, the best rate at which pushed bytes were credited lately, the shortest round trip of control messages.
"""

from dataclasses import asdict, dataclass
from typing import Any

from baton.cluster.table import format_table
from baton.proto import admin_pb2, worker_pb2

NOT_MET = "not connected: nothing was pushed between the two lately"
NO_LANE = "no lane works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One pair of workers.

    Attributes:
        lane: in use; empty if none works, or the two have not met.
        has_met: they are connected; a prefill worker forgets a decode worker that it has not used for a few leases.
        why: there is no lane, or no better one.
        gbps: measured; None if it was not.
        round_trip_ms: measured; None if it was not.
    """

    prefill: str
    decode: str
    lane: str
    has_met: bool
    why: str
    gbps: float | None
    round_trip_ms: float | None
    transfers: int
    bytes: int

    @property
    def is_broken(self) -> bool:
        """The two have met, and nothing can be pushed."""
        return self.has_met and not self.lane

    def cell(self) -> str:
        """A cell of the table."""
        if not self.has_met:
            return "-"
        rate = "" if self.gbps is None else f" {self.gbps:.3g} GB/s"
        latency = "" if self.round_trip_ms is None else f" {self.round_trip_ms:.2f} ms"
        return (self.lane or "NONE") + rate + latency


def paths(status: admin_pb2.StatusReply) -> list[Path]:
    """Every pair of a live prefill worker and a live decode worker."""
    live = [worker.state for worker in status.workers if worker.alive]
    return [
        _path(prefill, decode)
        for prefill in live
        if prefill.role == "prefill"
        for decode in live
        if decode.role == "decode"
    ]


def _path(prefill: worker_pb2.WorkerState, decode: worker_pb2.WorkerState) -> Path:
    found = next((path for path in prefill.inventory.transfer.paths if path.kv_address == decode.kv_address), None)
    path = found or worker_pb2.KvPath()
    why = path.why if found is not None else NOT_MET
    return Path(
        prefill=prefill.worker_id,
        decode=decode.worker_id,
        lane=path.lane,
        has_met=found is not None,
        why=why or ("" if path.lane else NO_LANE),
        gbps=path.gbps or None,
        round_trip_ms=path.round_trip_ms or None,
        transfers=path.transfers,
        bytes=path.bytes,
    )


def paths_data(found: list[Path]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [asdict(path) for path in found]


def format_paths(found: list[Path]) -> str:
    """The matrix, a line for each prefill worker, and under it why pairs have no better lane."""
    if not found:
        return "no pair of a live prefill and a live decode worker"
    decodes = list(dict.fromkeys(path.decode for path in found))
    cells = {(path.prefill, path.decode): path.cell() for path in found}
    rows = [
        (prefill, *(cells[prefill, decode] for decode in decodes))
        for prefill in dict.fromkeys(path.prefill for path in found)
    ]
    lines = [format_table(("KV path", *decodes), rows)]
    lines += [f"{path.prefill} to {path.decode}: {path.why}" for path in found if path.why]
    return "\n".join(lines)
