"""Connects the ranks of a TP group: a host socket from every rank to rank 0, separate from the collectives.

Rank 0 sends plans before the work they describe, without waiting. A thread on each other rank puts them into a queue,
so a rank may lag behind. Ranks send reports back. Each end sends a heartbeat ten times a second; the reading thread
also watches the peers (`tp.watch`), so that a death, a hang or a failure is detected within its deadline, whatever the
computing thread waits for. This module neither knows how the ends connected (`tp.join`) nor decides what to do about a
failure: it calls `on_fail` once.
"""

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from baton.core.errors import BatonError, ProtocolError, WorkerLost
from baton.engine.tp.plan_codec import FRAME_HEADER_BYTES, Beat, PlanCodec, RankFarewell, Ready, Stop, payload_len
from baton.engine.tp.watch import SILENCE_S, TPGroupWatch


class TPGroupPeer:
    """A connection to one rank.

    Attributes:
        rank: rank at the other end.
        connection: the socket.
        pid: its process id.
        unread: received bytes that do not form a whole frame yet.
        unsent: data that the socket has not accepted yet.
        num_unsent: bytes of `unsent`.
        num_heard: number of frames received.
        is_open: until either end closes it.
    """

    def __init__(self, rank: int, connection: socket.socket, pid: int) -> None:
        self.rank = rank
        self.connection = connection
        self.pid = pid
        self.pidfd = _open_pid(pid)
        self.unread = bytearray()
        self.unsent: deque[memoryview] = deque()
        self.num_unsent = 0
        self.num_heard = 0
        self.is_open = True

    def kill(self) -> None:
        """SIGKILL the process at the other end, unless it is this one."""
        if self.pidfd >= 0 and self.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        while self.unsent:
            try:
                sent = self.connection.send(self.unsent[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # the peer is gone; reading will report it, too
                self.unsent.clear()
                return
            self.num_unsent -= sent
            if sent == len(self.unsent[0]):
                self.unsent.popleft()
            else:
                self.unsent[0] = self.unsent[0][sent:]

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _open_pid(pid: int) -> int:
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:  # already gone, or in another namespace
        return -1


BEAT_S: Final = 0.1
START_SILENCE_S: Final = 60.0  # until every rank is loaded
BLAME_S: Final = 0.7  # by then the rank at fault is known, or stays unknown
FLUSH_S: Final = 2.0
MAX_UNSENT_BYTES: Final = 1 << 30
MAX_UNREAD: Final = 1 << 16
_READ_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class _Wake:
    """Queue item that is not a plan: tells `hear` to return."""


class TPGroupLink:
    """One rank's end of the link. `tp.join` creates it.

    Attributes:
        rank: this rank.
        size: size of the TP group.
        on_fail: called once, on the link's thread, with the rank at fault; nothing is sent or received afterwards.
        on_report: called on that thread when there are reports.
        operations: returns how many collectives this rank has begun.
    """

    def __init__(self, codec: PlanCodec, rank: int, size: int, peers: list[TPGroupPeer], num_told: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.on_fail: Callable[[WorkerLost], None] = _do_nothing
        self.on_report: Callable[[], None] = lambda: None
        self.operations: Callable[[], int] = lambda: 0
        self._codec = codec
        self._peers = {peer.rank: peer for peer in peers}
        self._watch = TPGroupWatch(
            rank,
            size,
            self._peers,
            time.monotonic(),
            START_SILENCE_S,
            pids={rank: os.getpid(), **{peer.rank: peer.pid for peer in peers}},
        )
        self._lock = threading.Lock()  # guards sending and the watch
        self._num_told = num_told
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reports: deque[tuple[int, Any]] = deque()
        self._ready: set[int] = set()
        self._progress = threading.Event()  # a rank became ready, or failed
        self._failure: WorkerLost | None = None
        self._failed = threading.Event()
        self._is_ending = False
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._nudge, selectors.EVENT_READ)
        for peer in peers:
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="tp-group-link", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> WorkerLost | None:
        """The rank at fault, once known."""
        return self._failure

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks at the other ends."""
        return {rank: peer.pid for rank, peer in self._peers.items()}

    def tell(self, message: object) -> None:
        """Send to every other end, in one order for all messages; returns at once.

        Raises:
            WorkerLost: the TP group has failed, or a rank no longer accepts data.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            self._send(message)
            unsent = {rank: peer.num_unsent for rank, peer in self._peers.items()}
        for rank, num_bytes in unsent.items():
            if num_bytes > MAX_UNSENT_BYTES:
                raise WorkerLost(f"rank {rank} of {self.size} takes no plans", rank=rank, size=self.size, how="hangs")

    def hear(self, timeout_s: float | None = None) -> Any:
        """On a rank other than 0: the next plan; waits for it. None after `wake`, or after `timeout_s`.

        Raises:
            WorkerLost: the TP group has failed.
        """
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, WorkerLost):
            self._inbox.put(item)
            raise item
        return None if isinstance(item, _Wake) else item

    def wake(self) -> None:
        """Make `hear` return. Any thread."""
        self._inbox.put(_Wake())

    def reports(self) -> list[tuple[int, Any]]:
        """On rank 0: reports of the other ranks since the last call, with their ranks.

        Raises:
            WorkerLost: the TP group has failed.
        """
        if self._failure is not None:
            raise self._failure
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def wait_ready(self, timeout_s: float) -> None:
        """On rank 0: wait until every other rank has sent `Ready`.

        Raises:
            WorkerLost: a rank failed, or was not ready in time.
        """
        end_s = time.monotonic() + timeout_s
        while len(self._ready) < len(self._peers):
            self._progress.clear()
            if self._failure is not None:
                raise self._failure
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                missing = sorted(self._peers.keys() - self._ready)
                raise WorkerLost(f"rank {missing[0]} of {self.size} was not ready within {timeout_s:.0f} s")
            if len(self._ready) < len(self._peers):
                self._progress.wait(min(left_s, 1.0))

    def judge_silence(self, silence_s: float = SILENCE_S) -> None:
        """Treat silence as a hang from now on, as every rank is loaded."""
        with self._lock:
            self._watch.silence_s = silence_s

    def begin(self, limit_s: float) -> int:
        """Record that a step begins, which must `end` within `limit_s`; returns its number.

        Any thread; steps may overlap.
        """
        with self._lock:
            return self._watch.begin(limit_s, time.monotonic())

    def end(self, step: int) -> None:
        """Record the end of a step; see `begin`."""
        with self._lock:
            self._watch.end(step)

    def blame(self) -> WorkerLost | None:
        """The rank at fault for a failed collective; waits briefly for it to be known. None if it stays unknown."""
        self._failed.wait(BLAME_S)
        return self._failure

    def kill_peers(self) -> None:
        """SIGKILL the other ends: a TP group lives or dies as one."""
        for peer in self._peers.values():
            peer.kill()

    def leave(self, error: BatonError | None = None) -> None:
        """Tell the others why this rank ends, and close. Safe to call twice."""
        lost = error.fields.get("lost_touch", False) if error is not None else False
        with self._lock, contextlib.suppress(OSError):
            if not self._is_closed:
                self._is_ending = True
                self._send(RankFarewell("" if error is None else error.to_wire(), bool(lost)))
        self.close()

    def expect_end(self) -> None:
        """On rank 0, before it tells the others to stop: their closing connections are no failure."""
        self._is_ending = True

    def close(self) -> None:
        """Close the link, after sending what is queued, if the peers accept it."""
        self._is_ending = True
        end_s = time.monotonic() + FLUSH_S
        while self._thread.is_alive() and time.monotonic() < end_s and not self._is_flushed():
            time.sleep(0.005)
        with self._lock:
            self._is_closed = True
            self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(FLUSH_S)

    def _is_flushed(self) -> bool:
        with self._lock:
            return not any(peer.unsent for peer in self._peers.values() if peer.is_open)

    # Sending; the lock is held.

    def _send(self, message: object) -> None:
        self._num_told += 1
        frame = self._codec.encode(message, self._num_told)
        for peer in self._peers.values():
            if peer.is_open:
                peer.unsent.append(memoryview(frame))
                peer.num_unsent += len(frame)
                if len(peer.unsent) == 1:
                    peer.flush()
        if any(peer.unsent for peer in self._peers.values()):
            self._poke()

    def _poke(self) -> None:
        if self._nudge >= 0:
            os.eventfd_write(self._nudge, 1)

    # The thread.

    def _run(self) -> None:
        beat_s = 0.0
        while not self._is_closed:
            self._turn()
            now_s = time.monotonic()
            with self._lock:
                if now_s - beat_s >= BEAT_S:
                    self._send(Beat(self.operations()))
                    beat_s = now_s
                failure = None if self._is_ending else self._watch.verdict(self.operations(), now_s)
            if failure is not None:
                self._fail(failure)
                break
        self._end_thread()

    def _turn(self) -> None:
        for peer in self._peers.values():
            if peer.is_open:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
                self._selector.modify(peer.connection, wanted, peer)
        for key, events in self._selector.select(BEAT_S / 2):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._nudge)
                continue
            peer = key.data
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    peer.flush()
            if events & selectors.EVENT_READ:
                self._read(peer)

    def _read(self, peer: TPGroupPeer) -> None:
        try:
            piece = peer.connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        now_s = time.monotonic()
        if not piece:
            self._selector.unregister(peer.connection)
            with self._lock:
                peer.close()
                self._watch.closed(peer.rank, now_s)
            return
        peer.unread += piece
        with self._lock:
            self._watch.heard(peer.rank, now_s)
        try:
            while (message := self._next(peer)) is not None:
                self._take(peer.rank, message, now_s)
        except ProtocolError as error:
            with self._lock:
                self._watch.farewell(peer.rank, error.to_wire(), False, now_s)

    def _next(self, peer: TPGroupPeer) -> Any:
        if len(peer.unread) < FRAME_HEADER_BYTES:
            return None
        num_bytes = FRAME_HEADER_BYTES + payload_len(peer.unread)
        if len(peer.unread) < num_bytes:
            return None
        peer.num_heard += 1
        frame = bytes(peer.unread[:num_bytes])
        del peer.unread[:num_bytes]
        return self._codec.decode(frame, peer.num_heard)

    def _take(self, rank: int, message: Any, now_s: float) -> None:
        match message:
            case Beat():
                with self._lock:
                    self._watch.beat(rank, message.num_operations)
            case RankFarewell():
                if message.error:
                    with self._lock:
                        self._watch.farewell(rank, message.error, message.is_victim, now_s)
            case Ready():
                if self.rank != 0:
                    self.judge_silence()
                self._ready.add(rank)
                self._progress.set()
            case _ if self.rank == 0:
                self._reports.append((rank, message))
                self.on_report()
            case _:
                if isinstance(message, Stop):
                    self._is_ending = True
                if self._inbox.qsize() > MAX_UNREAD:
                    raise ProtocolError(f"rank {self.rank} of {self.size} is {MAX_UNREAD} plans behind")
                self._inbox.put(message)

    def _fail(self, failure: WorkerLost) -> None:
        log.error("the TP group has failed: %s", failure.message)
        self._failure = failure
        self._failed.set()
        self._progress.set()
        self._inbox.put(failure)
        self.on_report()
        self.on_fail(failure)

    def _end_thread(self) -> None:
        with self._lock:
            self._is_closed = True
            for peer in self._peers.values():
                if peer.is_open:
                    peer.flush()
                    peer.close()
            os.close(self._nudge)
            self._nudge = -1
        self._selector.close()


def _do_nothing(error: WorkerLost) -> None:
    del error
