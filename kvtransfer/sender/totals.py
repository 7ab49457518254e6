"""What the push side counts for metrics and the doctor: transfers, times, waits for the window, and each path.

Owned by `PushRules`, on the push thread. It refuses to decide anything.
"""

from dataclasses import dataclass

from baton.kvtransfer.protocol.transfer_times import TransferTimes
from baton.kvtransfer.sender.table import PushPeer, Transfer


@dataclass(frozen=True, slots=True)
class PathCounts:
    """How one decode worker is reached.

    Attributes:
        address: of its incoming transfer.
        epoch: of its incarnation; 0 if it is not known now.
        bytes_pushed: of transfers that were acknowledged.
        num_acked: transfers.
        bytes_per_s: the best rate at which pushed bytes were credited lately; 0 if none was measured.
        round_trip_s: of control messages, the shortest lately; 0 if none was measured.
    """

    address: str
    epoch: int
    bytes_pushed: int
    num_acked: int
    bytes_per_s: float
    round_trip_s: float


class PushTotals:
    """Totals since the start; they only grow."""

    def __init__(self) -> None:
        self.num_acked = 0
        self.transfer_s = 0.0  # from the first frame to the acknowledgement
        self.exposed_s = 0.0  # from the end of the prefill to the acknowledgement
        self.times = TransferTimes()
        self.credit_stall_s = 0.0
        self.frames_resent = 0
        self._blocked_since_s: dict[str, float] = {}
        self._acked: dict[str, tuple[int, int]] = {}  # by address: transfers, bytes

    def acked(self, transfer: Transfer, now_s: float) -> None:
        """A transfer was complete over there."""
        self.num_acked += 1
        transfer_s = now_s - (transfer.first_posted_s or now_s)
        exposed_s = max(0.0, now_s - transfer.prefill_end_s)
        self.transfer_s += transfer_s
        self.exposed_s += exposed_s
        self.times.observe(transfer_s, exposed_s)
        num_acked, num_bytes = self._acked.get(transfer.peer.kv_address, (0, 0))
        self._acked[transfer.peer.kv_address] = num_acked + 1, num_bytes + transfer.bytes_pushed

    def window(self, address: str, is_full: bool, now_s: float) -> None:
        """Whether frames for a decode worker wait for its credit now."""
        since_s = self._blocked_since_s.pop(address, None)
        if since_s is not None:
            self.credit_stall_s += now_s - since_s
        if is_full:
            self._blocked_since_s[address] = now_s

    def forget(self, address: str) -> None:
        """A decode worker is not used any more."""
        self._blocked_since_s.pop(address, None)
        self._acked.pop(address, None)

    def path(self, address: str, peer: PushPeer, now_s: float) -> PathCounts:
        """One decode worker."""
        num_acked, num_bytes = self._acked.get(address, (0, 0))
        return PathCounts(address, peer.epoch, num_bytes, num_acked, peer.window.rate(now_s), peer.round_trip_s)
