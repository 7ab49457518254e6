"""Chooses the data path from a prefill rank to each decode worker, and records why better ones are not used.

It owns the open data paths, one per peer address and incarnation. A choice follows the policy and is proved: a data
path that cannot be opened is not chosen. It does not communicate with peers; the protocol passes it their offers.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.kv_transports import INLINE, RAW, data_path_order
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.sender.data_path import DataPathOpener, DataPathRefused, PushDataPath
from baton.proto import kv_pb2

MAX_REASON_LEN = 200
MAX_TOLD = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataPathChoice:
    """The data path to one incarnation of one decode worker.

    Attributes:
        epoch: the decode worker's incarnation.
        data_path: name of the data path; empty if none that the policy allows could be opened.
        opened: the opened data path to write with, if it is one-sided.
        refused: better data paths, each with the reason why it is not used.
    """

    epoch: int
    data_path: str
    opened: PushDataPath | None
    refused: tuple[tuple[str, str], ...]

    @property
    def why(self) -> str:
        """The reasons, joined into one sentence."""
        return "; ".join(f"{data_path}: {reason}" for data_path, reason in self.refused)


class DataPathChooser:
    """All data paths of one prefill rank. One thread drives it; any thread may call `data_paths`.

    Args:
        policy: value of the option `transport`.
        openers: an opener for every one-sided data path that the policy allows.
        transport: opens the two-sided data paths.
    """

    def __init__(self, policy: str, openers: Sequence[DataPathOpener], transport: Transport) -> None:
        self.num_fallbacks = 0
        self._order = data_path_order(policy)
        self._openers = {opener.name: opener for opener in openers}
        self._transport = transport
        self._choices: dict[str, DataPathChoice] = {}
        self._retired: list[tuple[str, int, PushDataPath]] = []  # address, incarnation, data path
        self._told: dict[str, str] = {}  # the last log text for each address

    @property
    def problem(self) -> str:
        """Why this rank can push to no decode worker at all; empty if it may be able to."""
        reasons = [f"{data_path}: {problem}" for data_path in self._order if (problem := self._own_problem(data_path))]
        return "; ".join(reasons) if len(reasons) == len(self._order) else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The data paths to name in HELLO, best first."""
        return tuple(data_path for data_path in self._order if not self._own_problem(data_path))

    def choose(self, address: str, epoch: int, host_id: str, offers: Sequence[kv_pb2.DataPathOffer]) -> DataPathChoice:
        """Open the best data path that works; the previous one for this address is retired."""
        by_data_path = {offer.data_path: offer for offer in offers}
        refused: list[tuple[str, str]] = []
        choice = None
        for data_path in self._order:
            reason, opened = self._open(data_path, address, epoch, host_id, by_data_path.get(data_path))
            if not reason:
                choice = DataPathChoice(epoch, data_path, opened, tuple(refused))
                break
            refused.append((data_path, reason[:MAX_REASON_LEN]))
        if choice is None:
            choice = DataPathChoice(epoch, "", None, tuple(refused))
        self.forget(address)
        for retired_address, retired_epoch, path in self._retired:
            if retired_address == address and retired_epoch != epoch:
                path.outlived()
        self.sweep()
        self._choices[address] = choice
        self._tell(address, choice)
        return choice

    def data_path_of(self, address: str) -> DataPathChoice | None:
        """Return the data path that was chosen for this address, if any."""
        return self._choices.get(address)

    def data_paths(self) -> dict[str, DataPathChoice]:
        """Return the data paths that payloads actually use now, by address. Any thread may call this."""
        return {address: self._in_use(address, choice) for address, choice in tuple(self._choices.items())}

    def forget(self, address: str) -> None:
        """Stop using a peer. Writes in progress go on; the data path is closed when they are over."""
        choice = self._choices.pop(address, None)
        if choice is not None and choice.opened is not None:
            self._retired.append((address, choice.epoch, choice.opened))
        self.sweep()

    def sweep(self) -> None:
        """Close retired data paths that have no write in progress."""
        for item in tuple(self._retired):
            if item[-1].drain(0.0):
                item[-1].close()
                self._retired.remove(item)

    def close(self, timeout_s: float) -> None:
        """Close everything, once no write is in progress or `timeout_s` has passed."""
        for address in tuple(self._choices):
            self.forget(address)
        for _, _, data_path in self._retired:
            if not data_path.drain(timeout_s):
                log.warning("writes over %s are still under way", data_path.name)
            data_path.close()
        self._retired.clear()

    def _in_use(self, address: str, choice: DataPathChoice) -> DataPathChoice:
        if choice.data_path != RAW or self._transport.data_path_of(address) == RAW:
            return choice
        refused = (*choice.refused, (RAW, "its connection is not open now"))
        return dataclasses.replace(choice, data_path=INLINE, refused=refused)

    def _own_problem(self, data_path: str) -> str:
        if data_path in (INLINE, RAW):
            return ""  # known only when the transport opens it
        return self._openers[data_path].problem

    def _open(
        self, data_path: str, address: str, epoch: int, host_id: str, offer: kv_pb2.DataPathOffer | None
    ) -> tuple[str, PushDataPath | None]:
        """Return (why it cannot be opened, or empty; the opened data path, if it is one-sided)."""
        if data_path == INLINE:
            return "", None
        problem = self._own_problem(data_path)
        if problem:
            return problem, None
        if offer is None:
            return "the decode worker does not serve it", None
        try:
            if data_path == RAW:
                return self._transport.open_data_path(address, offer), None
            return "", self._openers[data_path].open(offer, epoch, host_id)
        except DataPathRefused as refused:
            return str(refused) or "refused", None
        # The boundary of an offer: what one peer says, or has in its memory, must not end the pushes to all others.
        except Exception as error:
            log.exception("the data path %s to %s could not be opened", data_path, address)
            return f"opening it failed: {error!r}", None

    def _tell(self, address: str, choice: DataPathChoice) -> None:
        """Log once which data path an address uses, and count it if it is not the best; again only if that changes."""
        said = f"{choice.data_path or 'no data path'} ({choice.why})" if choice.refused else choice.data_path
        if self._told.get(address) == said:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told[address] = said
        # A peer on another host, or without a GPU, is normal. A peer without raw sockets is not.
        is_fallback = choice.data_path == INLINE and RAW in self._order
        self.num_fallbacks += is_fallback
        if is_fallback or not choice.data_path:
            log.warning("KV to %s goes over %s", address, said)
        else:
            log.info("KV to %s goes over %s", address, said)
