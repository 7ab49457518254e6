"""The KV receiver process, `python -m baton.kvtransfer.receiver.process`, which only `supervisor` starts.

It reads its setup from standard input, reports on standard output where it listens, and then receives until it is told
to stop. It does not import torch. It never outlives the decode worker: the kernel signals it when the thread that
started it ends, and its standard input ends. In either case it unlinks the shared memory, since no other process may be
left to do so.
"""

import ctypes
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Final

import numpy as np

from baton.core import garbage
from baton.core.clock import MonotonicClock
from baton.core.errors import BatonError, PortInUse
from baton.core.telemetry.logs import configure_inherited
from baton.kvtransfer.pool_io import OwnerPoolIO, PoolIO, RankedPoolIO
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.receiver.data_path import ReceiverSide, ServedDataPath, receiver_data_paths
from baton.kvtransfer.receiver.device_jobs import FLAGS_POOL, DeviceJobs, flag_page
from baton.kvtransfer.receiver.driver import ReceiverDriver
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.setup import ReceiverSetup
from baton.kvtransfer.transports.registry import listening_transport

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
KEPT_BYTES: Final = 1 << 30
TOP_PAD_BYTES: Final = 64 << 20
MAX_MMAP_THRESHOLD_BYTES: Final = 32 << 20  # the largest value that older versions of glibc accept

log = logging.getLogger(__name__)


def tune_malloc() -> bool:
    """Tune malloc for large messages; False, and a log message, where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.warning("no mallopt in this C library; large messages cost more here")
        return False
    is_tuned = bool(mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES))
    for option, value in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_TOP_PAD, TOP_PAD_BYTES), (M_ARENA_MAX, 1)):
        is_tuned = bool(mallopt(option, value)) and is_tuned
    if not is_tuned:
        log.warning("mallopt refused a setting; large messages cost more here")
    return is_tuned


PR_SET_PDEATHSIG: Final = 1
EXIT_ORPHANED: Final = 3
DEATH_TIMEOUT_S: Final = 2.0


def main() -> int:
    """Run one incarnation; return the exit status."""
    configure_inherited("incoming")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the worker decides when to stop
    tune_malloc()  # before any thread starts: this process does little else than receive large messages
    setup, more = ReceiverSetup.from_json(sys.stdin.buffer.readline())
    incarnation = _Incarnation(setup, more["parent"], notify=more["notify"], nudge=more["nudge"])
    try:
        incarnation.begin()
    except BatonError as error:
        _say({"error": error.to_wire()})
        return 1
    garbage.begin_to_serve()
    _say({"address": incarnation.address})
    incarnation.run()
    return 0


class _Incarnation:
    """One incarnation, from the greeting to the end."""

    def __init__(self, setup: ReceiverSetup, parent: int, *, notify: int, nudge: int) -> None:
        self.address = ""
        self._setup = setup
        self._parent = parent
        self._notify = notify
        self._nudge = nudge
        self._stopping = False
        self._data_paths: list[ServedDataPath] = []

    def begin(self) -> None:
        """Acquire the memory and the port.

        Raises:
            BatonError: one of them is not available.
        """
        setup = self._setup
        self._region = setup.open_region()
        self._leave_with_parent()
        self._transport = _listen(setup)
        self.address = self._transport.address
        link = ReceiverLink(self._region.link, setup.config.ring_slots, setup.num_blocks)
        pools = [
            PoolIO(np.frombuffer(self._region.pool(rank), dtype=np.uint8), geometry)
            for rank, geometry in enumerate(setup.host_geometries)
        ]
        jobs, has_owners = None, setup.num_pools > 1
        if setup.device is not None:
            flags = flag_page(self._region.pool(FLAGS_POOL))
            jobs = DeviceJobs(setup.host_geometries[0], flags, setup.tp_size, has_owners=has_owners)
        self._data_paths = receiver_data_paths(ReceiverSide(setup, self._region))
        self._driver = ReceiverDriver(
            setup=setup,
            io=OwnerPoolIO(pools, setup.blocks) if has_owners and jobs is None else RankedPoolIO(pools),
            transport=self._transport,
            clock=MonotonicClock(),
            link=link,
            notify=lambda: os.eventfd_write(self._notify, 1),
            offers=[data_path.offer for data_path in self._data_paths],
            jobs=jobs,
        )
        threading.Thread(target=self._listen_to_parent, name="kv-parent", daemon=True).start()

    def run(self) -> None:
        """Receive until told to stop."""
        try:
            while not self._stopping:
                self._driver.turn()
        finally:
            self._driver.close()
            for data_path in self._data_paths:
                data_path.close()

    def _leave_with_parent(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_death)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != self._parent:  # the parent had ended before the call
            self._leave()

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _on_death(self, _number: int, _frame: FrameType | None) -> None:
        self._leave()

    def _listen_to_parent(self) -> None:
        poll = select.poll()
        poll.register(self._nudge, select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN)
        while True:
            for file, _ in poll.poll():
                if file == self._nudge:
                    os.eventfd_read(self._nudge)
                    self._transport.wake()
                else:
                    self._leave()

    def _leave(self) -> None:
        # One thread of the parent is dead, or one of its files closed. The whole parent is about to end, unless this is
        # an error.
        end_s = time.monotonic() + DEATH_TIMEOUT_S
        while os.getppid() == self._parent and time.monotonic() < end_s:
            time.sleep(0.001)
        if os.getppid() != self._parent:
            self._region.unlink()
        os._exit(EXIT_ORPHANED)


def _listen(setup: ReceiverSetup) -> Transport:
    if setup.last_address:
        try:
            return _transport(setup, setup.last_address)
        except PortInUse:
            log.warning("%s is taken meanwhile; prefill workers hear of another", setup.last_address)
    return _transport(setup, setup.listen.bind)


def _transport(setup: ReceiverSetup, bind: str) -> Transport:
    return listening_transport(setup.listen.transport, bind, setup.config)


def _say(greeting: dict[str, str]) -> None:
    print(json.dumps(greeting), flush=True)


if __name__ == "__main__":
    sys.exit(main())
