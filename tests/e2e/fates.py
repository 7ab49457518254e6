"""An incoming transfer that writes down what became of every frame that reached it, in a file that survives its death.

`python -m baton.tests.e2e.fates` is a KV receiver that does; `watch` makes the transfers of this process do it. It
also damages headers where they come off the wire, which a sender cannot do on data paths that look at their own queues.
"""

import os
import random
import struct
import sys
import threading
from collections import defaultdict
from enum import Enum

from baton.kvtransfer.protocol.frame import HEADER_BYTES, decode_header
from baton.kvtransfer.receiver import driver as receiver_driver
from baton.kvtransfer.transports import over_grpc_stream, raw_receiver

PATH_VARIABLE, FLIP_VARIABLE = "BATON_TEST_FATES", "BATON_TEST_HEADER_FLIPS"
COUNTED = ("frames_landed", "frames_late_dropped", "frames_duplicate", "frames_corrupt", "frames_fenced")
READS_HEADERS = (raw_receiver, over_grpc_stream)
_RECORD = struct.Struct(f"<cQ{HEADER_BYTES}s")


class Fate(Enum):
    """What became of a frame, as its incoming transfer saw it."""

    LANDED = b"L"
    LATE = b"T"  # its incoming transfer had ended
    DUPLICATE = b"D"
    CORRUPT = b"C"
    FENCED = b"F"  # its incoming transfer ended before its payload was there
    CUT = b"X"  # its connection ended in its payload
    HEADER = b"H"  # its header was damaged on arrival, and refused by the data path
    DAMAGED = b"h"  # its header was damaged here


OF_COUNT = dict(zip(COUNTED, (Fate.LANDED, Fate.LATE, Fate.DUPLICATE, Fate.CORRUPT, Fate.FENCED), strict=True))


class Log:
    """The file; every record is one write, so nothing is lost with the process.

    Args:
        path: of it.
        flip_rate: of headers, where data paths read them.
    """

    def __init__(self, path, flip_rate):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._flip_rate = flip_rate
        self._random = random.Random(f"{path} {os.getpid()}")
        self._lock = threading.Lock()

    def note(self, fate, epoch, header):
        os.write(self._file, _RECORD.pack(fate.value, epoch, bytes(header)))

    def decode(self, data):
        """`decode_header`, of what may be damaged now."""
        data = bytes(data)
        with self._lock:
            is_flipped = self._random.random() < self._flip_rate
            bit = self._random.randrange(8 * HEADER_BYTES)
        if is_flipped:
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            data = bytes(damaged)
            self.note(Fate.DAMAGED, 0, data)
        try:
            return decode_header(data)
        except Exception:
            self.note(Fate.HEADER, 0, data)
            raise

    def close(self):
        os.close(self._file)


def read(path):
    """(fates by header, number of each by (epoch, fate))."""
    fates, totals = defaultdict(set), defaultdict(int)
    if not os.path.exists(path):
        return fates, totals
    with open(path, "rb") as file:
        data = file.read()
    for fate, epoch, header in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
        fates[header].add(Fate(fate))
        totals[epoch, Fate(fate)] += 1
    return fates, totals


class WatchedDriver(receiver_driver.ReceiverDriver):
    """Notes one fate for each frame that came."""

    log = None

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self._epoch = arguments["setup"].epoch
        self._heads = {}  # by id of a payload on its way

    def _deliver(self, delivery):
        if delivery.header is None:
            super()._deliver(delivery)
            return
        head = bytes(delivery.header)
        before = self._counted()
        super()._deliver(delivery)
        if delivery.payload is not None and id(delivery.payload) in self._reading:
            self._heads[id(delivery.payload)] = head
        else:
            self._note(head, before)

    def _finish(self, done):
        head = self._heads.pop(id(done.payload), None)
        before = self._counted()
        super()._finish(done)
        if head is not None and not done.ok:
            self.log.note(Fate.CUT, self._epoch, head)
        elif head is not None:
            self._note(head, before)

    def _discard(self, incoming_id):
        fenced = [key for key, (_, header) in self._reading.items() if header.incoming_id == incoming_id]
        super()._discard(incoming_id)
        for key in fenced:
            self.log.note(Fate.FENCED, self._epoch, self._heads.pop(key))

    def _counted(self):
        counts = self._protocol.counts
        return [getattr(counts, name) for name in COUNTED]

    def _note(self, head, before):
        """Exactly one count went up, unless the discarding of others counted as fenced, too."""
        risen = [name for name, old, new in zip(COUNTED, before, self._counted(), strict=True) if new > old]
        assert risen, "a frame without a fate"
        self.log.note(OF_COUNT[risen[0]], self._epoch, head)


def watch(path, flip_rate):
    """Have the incoming transfers of this process write into `path`, until what this returns is called."""
    log = WatchedDriver.log = Log(path, flip_rate)
    for module in READS_HEADERS:
        assert module.decode_header is decode_header, f"{module} reads headers in another way"
        module.decode_header = log.decode

    def end():
        for module in READS_HEADERS:
            module.decode_header = decode_header
        log.close()

    return end


def main():
    from baton.kvtransfer.receiver import process as receiver_process

    watch(os.environ[PATH_VARIABLE], float(os.environ[FLIP_VARIABLE]))
    receiver_process.ReceiverDriver = WatchedDriver
    return receiver_process.main()


if __name__ == "__main__":
    sys.exit(main())
