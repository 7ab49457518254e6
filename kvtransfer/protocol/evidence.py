"""What proves that a prefill rank which may write into this worker's memory is dead. See `incarnation_file`."""

import functools
from collections.abc import Iterable
from pathlib import Path

from baton.core.kv_transports import is_same_host
from baton.kvtransfer.protocol.incarnation_file import DIRECTORY, incarnation_path, is_over
from baton.kvtransfer.receiver.peers import PeerIncarnation
from baton.kvtransfer.receiver.setup import Legacy

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """The same for two processes of one machine and one boot that see the same /dev/shm; empty if that is not known.

    Containers of one machine may have a /dev/shm each: there a file that is missing would prove nothing.
    """
    try:
        return f"{BOOT_ID.read_text().strip()}-{DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


class Evidence:
    """Looks for proof that lives are over.

    Args:
        legacies: what former lives of this transfer left: their prefill workers may never say HELLO to this one.
    """

    def __init__(self, legacies: Iterable[Legacy]) -> None:
        self._of_this_host = {legacy.p_epoch for legacy in legacies if is_same_host(legacy.lane)}

    def is_over(self, incarnation: PeerIncarnation) -> bool:
        """Whether this rank is proven dead. False also if nothing can prove it here."""
        path = incarnation_path(incarnation.p_epoch, incarnation.rank)
        if (
            incarnation.incarnation_file
        ):  # a peer's word, and only believed where it names the one file that can be its own
            return incarnation.host_id == host_id() and incarnation.incarnation_file == str(path) and is_over(path)
        return incarnation.p_epoch in self._of_this_host and is_over(path)
