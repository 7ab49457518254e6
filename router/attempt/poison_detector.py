"""Finds out which requests kill workers, by which requests were present at several deaths. Pure.

A request is identified by a fingerprint of its prompt and parameters, so a client's retry counts as the same request.
It is blamed once it was present at the deaths of `num_deaths` different workers, came to each later worker after it had
lost the one before, and no other request has the same record. One death blames no request, however few were present. Of
requests that were present at the same deaths together, none is blamed until another death tells them apart. A blamed
request is refused for a while.
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
    """A request's time at a worker that died: until the death, or until the request's stream broke there.

    Attributes:
        fingerprint: the request's fingerprint.
        start_s: when one of its attempts arrived.
        end_s: when the stay ended.
    """

    fingerprint: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Blamed:
    """A request that is refused.

    Attributes:
        fingerprint: the request's fingerprint.
        workers: workers that died of it, in order.
        until_s: when it is accepted again.
    """

    fingerprint: str
    workers: tuple[str, ...]
    until_s: float


@dataclass(slots=True)
class _Record:
    workers: tuple[str, ...]
    start_s: float  # start of the first stay that counts
    end_s: float  # end of the last stay that counts
    seen_s: float
    suspects: frozenset[str]  # requests present at each of these deaths


class PoisonDetector:
    """The record of deaths and the requests that were present.

    Args:
        num_deaths: deaths of different workers before a request is blamed; 0 blames none.
        hold_s: how long a blamed request is refused, and how long a death is remembered.
    """

    def __init__(self, *, num_deaths: int = NUM_DEATHS, hold_s: float = HOLD_S) -> None:
        assert num_deaths == 0 or num_deaths >= 2, "one death says nothing"
        self._num_deaths = num_deaths
        self._hold_s = hold_s
        self._records: OrderedDict[str, _Record] = OrderedDict()  # ordered by each record's latest death
        self._blamed: OrderedDict[str, Blamed] = OrderedDict()

    def __len__(self) -> int:
        """Number of requests that were recently present at a death, plus those that are refused."""
        return len(self._records) + len(self._blamed)

    def died(self, worker_id: str, stays: Iterable[Stay], now_s: float) -> list[Blamed]:
        """Record a worker's death and the requests present; return the requests that are now blamed."""
        if not self._num_deaths:
            return []
        self._forget(now_s)
        by_name: dict[str, list[Stay]] = {}
        for stay in stays:
            by_name.setdefault(stay.fingerprint, []).append(stay)
        present = frozenset(by_name)
        shared: dict[int, frozenset[str]] = {}  # many records have the same suspects
        for name, own in by_name.items():
            record = self._records.get(name)
            if record is None:
                start_s, end_s = min(stay.start_s for stay in own), max(stay.end_s for stay in own)
                self._records[name] = _Record((worker_id,), start_s, end_s, now_s, present)
                continue
            # A death may become known only after a later one; then the earlier stay counts.
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
        """Retract a worker's death: forget what it said about these requests.

        It returns the requests that were refused because of it, and no longer are.
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
        """Clear a request that ended successfully: it kills no worker."""
        self._records.pop(fingerprint, None)

    def find(self, fingerprint: str, now_s: float) -> Blamed | None:
        """Return why a request is refused; None if it is not."""
        blamed = self._blamed.get(fingerprint)
        return blamed if blamed is not None and now_s < blamed.until_s else None

    def blamed(self, now_s: float) -> list[Blamed]:
        """All refused requests, the oldest first."""
        self._forget(now_s)
        return list(self._blamed.values())

    def resume(self, fingerprint: str, workers: tuple[str, ...], now_s: float) -> None:
        """Refuse a request that another router had blamed, for a full `hold_s` again."""
        if self._num_deaths and len(self._blamed) < MAX_BLAMED:
            self._blamed[fingerprint] = Blamed(fingerprint, workers, now_s + self._hold_s)

    def clear(self, fingerprint: str = "") -> int:
        """Stop refusing one request, or all of them; return how many were refused."""
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
