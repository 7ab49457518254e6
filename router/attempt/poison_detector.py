"""Which requests kill workers: told apart from bystanders by who was there at several deaths. Pure.

A request is known by a fingerprint of its prompt and parameters, so that a client's retry is the same one. It is blamed
once it was at the deaths of `num_deaths` different workers, came to each later one after it had lost the one before,
and no other request shares that record. One death blames none, however few were there; and of requests that went
from death to death together none is blamed until another death tells them apart. Who is blamed is refused for a while.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

NUM_DEATHS: Final = 2
HOLD_S: Final = 600.0
MAX_RECORDS: Final = 4096
MAX_BLAMED: Final = 256


@dataclass(frozen=True, slots=True)
class Stay:
    """A request's time at a worker that died: until its death, or until its stream broke there.

    Attributes:
        fingerprint: of the request.
        start_s: when an attempt of it came.
        end_s: when that ended.
    """

    fingerprint: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Blamed:
    """A request that is refused.

    Attributes:
        fingerprint: its own.
        workers: that died of it, in order.
        until_s: when it is tried again.
    """

    fingerprint: str
    workers: tuple[str, ...]
    until_s: float


@dataclass(slots=True)
class _Record:
    workers: tuple[str, ...]
    start_s: float  # of the first stay that counted
    end_s: float  # of the last one
    seen_s: float
    suspects: frozenset[str]  # who was at each of these deaths


class PoisonDetector:
    """What deaths say about requests.

    Args:
        num_deaths: of different workers, before a request is blamed; 0 blames none.
        hold_s: how long it is refused, and how long a death is remembered.
    """

    def __init__(self, *, num_deaths: int = NUM_DEATHS, hold_s: float = HOLD_S) -> None:
        assert num_deaths == 0 or num_deaths >= 2, "one death says nothing"
        self._num_deaths = num_deaths
        self._hold_s = hold_s
        self._records: OrderedDict[str, _Record] = OrderedDict()  # the one that a death concerned last is the last
        self._blamed: OrderedDict[str, Blamed] = OrderedDict()

    def __len__(self) -> int:
        """Requests that were at a death lately, and those that are refused."""
        return len(self._records) + len(self._blamed)

    def died(self, worker_id: str, stays: Iterable[Stay], now_s: float) -> list[Blamed]:
        """A worker died, and these requests were there; returns those that are blamed by that."""
        if not self._num_deaths:
            return []
        self._forget(now_s)
        by_name: dict[str, list[Stay]] = {}
        for stay in stays:
            by_name.setdefault(stay.fingerprint, []).append(stay)
        present = frozenset(by_name)
        shared: dict[int, frozenset[str]] = {}  # many have the same suspects
        for name, own in by_name.items():
            record = self._records.get(name)
            if record is None:
                start_s, end_s = min(stay.start_s for stay in own), max(stay.end_s for stay in own)
                self._records[name] = _Record((worker_id,), start_s, end_s, now_s, present)
                continue
            # A death may be known only after a later one: then it is the earlier stay that counts.
            apart = [stay for stay in own if stay.start_s >= record.end_s or stay.end_s <= record.start_s]
            if worker_id in record.workers or not apart:
                continue
            record.workers += (worker_id,)
            record.start_s = min(record.start_s, *(stay.start_s for stay in apart))
            record.end_s = max(record.end_s, *(stay.end_s for stay in apart))
            record.seen_s = now_s
            if id(record.suspects) not in shared:
                shared[id(record.suspects)] = record.suspects & present
            record.suspects = shared[id(record.suspects)]
            self._records.move_to_end(name)
        while len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)
        return self._blame(by_name, now_s)

    def survived(self, worker_id: str, fingerprints: Iterable[str]) -> list[str]:
        """A worker has not died after all: what its death said of these requests is forgotten.

        Returns those that were refused for it, and are not any more.
        """
        pardoned = []
        for name in fingerprints:
            record, blamed = self._records.get(name), self._blamed.get(name)
            if record is not None and worker_id in record.workers:
                del self._records[name]
            if blamed is not None and worker_id in blamed.workers:
                del self._blamed[name]
                pardoned.append(name)
        return pardoned

    def finished(self, fingerprint: str) -> None:
        """A request ended well: it kills no worker."""
        self._records.pop(fingerprint, None)

    def find(self, fingerprint: str, now_s: float) -> Blamed | None:
        """Why a request is refused, if it is."""
        blamed = self._blamed.get(fingerprint)
        return blamed if blamed is not None and now_s < blamed.until_s else None

    def blamed(self, now_s: float) -> list[Blamed]:
        """All that are refused, the oldest first."""
        self._forget(now_s)
        return list(self._blamed.values())

    def resume(self, fingerprint: str, workers: tuple[str, ...], now_s: float) -> None:
        """Refuse what another router had blamed, for a whole hold again."""
        if self._num_deaths and len(self._blamed) < MAX_BLAMED:
            self._blamed[fingerprint] = Blamed(fingerprint, workers, now_s + self._hold_s)

    def clear(self, fingerprint: str = "") -> int:
        """Refuse one no more, or none at all; returns how many that were."""
        names = [name for name in self._blamed if fingerprint in ("", name)]
        for name in names:
            del self._blamed[name]
            self._records.pop(name, None)
        return len(names)

    def _blame(self, names: Iterable[str], now_s: float) -> list[Blamed]:
        found = []
        for name in names:
            record = self._records.get(name)
            if record is None or len(record.workers) < self._num_deaths or record.suspects != {name}:
                continue
            blamed = Blamed(name, record.workers, now_s + self._hold_s)
            self._blamed[name] = blamed
            self._blamed.move_to_end(name)
            del self._records[name]
            found.append(blamed)
        while len(self._blamed) > MAX_BLAMED:
            self._blamed.popitem(last=False)
        return found

    def _forget(self, now_s: float) -> None:
        for name, blamed in list(self._blamed.items()):
            if blamed.until_s <= now_s:
                del self._blamed[name]
        while self._records:
            name = next(iter(self._records))
            if self._records[name].seen_s + self._hold_s > now_s:
                break
            del self._records[name]
