"""The prefill ranks that a decode worker has met, by connection, and by incarnation and rank.

Bookkeeping only. The transport names connections; a rank that reconnects keeps its incarnation.
"""

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

MAX_PEERS = 4096
MAX_RETIRED_EPOCHS = 16  # per connection; a HELLO of an earlier incarnation would have to be delayed very long
PEER_FORGOTTEN_S = 60.0


@dataclass(slots=True)
class ReceiverPeer:
    """One rank of a prefill worker, as its last HELLO described it."""

    epoch: int
    rank: int
    size: int
    has_digest: bool
    host_id: str
    incarnation_file: str
    heard_s: float
    hello_ns: int  # when that HELLO was sent, by its rank's clock
    retired: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RETIRED_EPOCHS))  # its former incarnations


@dataclass(frozen=True, slots=True)
class PeerIncarnation:
    """The process of one rank, alive or not: what could prove its death."""

    p_epoch: int
    rank: int
    host_id: str
    incarnation_file: str


class ReceiverPeers:
    """All prefill ranks that were met."""

    def __init__(self) -> None:
        self._by_name: dict[str, ReceiverPeer] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._incarnations: dict[tuple[int, int], PeerIncarnation] = {}

    def get(self, name: str) -> ReceiverPeer | None:
        """Return the peer at the other end of a connection."""
        return self._by_name.get(name)

    def name_of(self, p_epoch: int, rank: int) -> str:
        """Return the name of the connection to a rank of an incarnation; empty if there is none."""
        name = self._names.get((p_epoch, rank), "")
        peer = self._by_name.get(name)
        return name if peer is not None and (peer.epoch, peer.rank) == (p_epoch, rank) else ""

    def size_of(self, p_epoch: int) -> int:
        """Return how many ranks an incarnation said it has; 0 if none of them is known."""
        return next((peer.size for peer in self._by_name.values() if peer.epoch == p_epoch), 0)

    def incarnation(self, p_epoch: int, rank: int) -> PeerIncarnation:
        """Return what is known of a rank's process."""
        return self._incarnations.get((p_epoch, rank), PeerIncarnation(p_epoch, rank, "", ""))

    @property
    def is_full(self) -> bool:
        """Whether no more peers can be added."""
        return len(self._by_name) >= MAX_PEERS

    def meet(self, name: str, peer: ReceiverPeer) -> None:
        """Record a HELLO. If the same rank was known by another connection, it has reconnected: forget that one."""
        before = self.name_of(peer.epoch, peer.rank)
        if before not in ("", name):
            self._by_name.pop(before, None)
        known = self._by_name.get(name)
        if known is not None:
            peer.retired = known.retired
            if known.epoch != peer.epoch:
                if peer.epoch in peer.retired:
                    peer.retired.remove(peer.epoch)
                peer.retired.append(known.epoch)
        self._by_name[name] = peer
        self._names[peer.epoch, peer.rank] = name
        self._incarnations[peer.epoch, peer.rank] = PeerIncarnation(
            peer.epoch, peer.rank, peer.host_id, peer.incarnation_file
        )

    def leave(self, name: str) -> None:
        """Forget a connection."""
        self._by_name.pop(name, None)

    def prune(self, wanted_epochs: Set[int], now_s: float) -> None:
        """Forget peers that were silent for long, unless incoming transfers of their incarnations still exist."""
        for name, peer in tuple(self._by_name.items()):
            if peer.epoch not in wanted_epochs and now_s - peer.heard_s > PEER_FORGOTTEN_S:
                del self._by_name[name]
        current = {(peer.epoch, peer.rank) for peer in self._by_name.values()}
        for key in tuple(self._incarnations):
            if key not in current and key[0] not in wanted_epochs:
                del self._incarnations[key]
                self._names.pop(key, None)
