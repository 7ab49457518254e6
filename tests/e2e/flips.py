"""What became of every damaged frame: each was refused by name, or was never looked at, and why is known."""

import threading
from collections import Counter
from dataclasses import dataclass

from baton.tests.e2e.fates import Fate

# Fates by which a damaged frame did no harm.
SEEN = frozenset((Fate.CORRUPT, Fate.HEADER))
NOT_LOOKED_AT = frozenset((Fate.LATE, Fate.DUPLICATE, Fate.FENCED, Fate.CUT))


@dataclass
class Flip:
    """One damaged frame, as it was sent."""

    what: str  # payload, pool or header
    p_epoch: int
    peer: str
    d_epoch: int
    attempt: object
    unsent: bool = False  # its sender took it back, or closed the connection, before or after it left


class FlipBook:
    """All of a run; any thread. A frame is known by its header, which no two frames share."""

    def __init__(self):
        self.num_frames = 0
        self.num_controls_refused = 0
        self.controls_believed = []
        self._flips = {}
        self._lock = threading.Lock()

    def __len__(self):
        return len(self._flips)

    def add(self, header, what, p_epoch, peer, d_epoch, attempt):
        """A frame is about to be sent with a bit changed."""
        with self._lock:
            self._flips[bytes(header)] = Flip(what, p_epoch, peer, d_epoch, attempt)

    def unsent(self, p_epoch, peer, match):
        """Frames of a connection were taken back, as far as they had not left."""
        with self._lock:
            for header, flip in self._flips.items():
                if flip.p_epoch == p_epoch and flip.what != "header" and (peer is None or flip.peer == peer):
                    flip.unsent |= bool(match(header))

    def account(self, fates, d_epochs_dead):
        """(counts by what became of them, those that were believed or are not accounted for).

        Args:
            fates: of headers, by those who received them.
            d_epochs_dead: lives that ended in the middle, and may have taken frames unread.
        """
        counts, wrong = Counter(), []
        for header, flip in self._flips.items():
            found = fates.get(header, frozenset())
            if found & SEEN:
                counts[f"{flip.what}: {min(fate.name.lower() for fate in found & SEEN)}"] += 1
            elif Fate.LANDED in found:
                wrong.append((flip, found))
            elif found & NOT_LOOKED_AT:
                counts[f"{flip.what}: {min(fate.name.lower() for fate in found & NOT_LOOKED_AT)}"] += 1
            elif flip.unsent:
                counts[f"{flip.what}: unsent"] += 1
            elif flip.d_epoch in d_epochs_dead:
                counts[f"{flip.what}: its KV receiver process died"] += 1
            else:
                wrong.append((flip, found))
        return counts, wrong
