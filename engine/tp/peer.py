"""One connection between two ranks of a TP group: its socket, what is on its way, and the process at the other end."""

import contextlib
import os
import signal
import socket
from collections import deque


class TPGroupPeer:
    """One connection.

    Attributes:
        rank: at the other end.
        connection: to it.
        pid: of its process.
        unread: bytes that are no whole frame yet.
        unsent: what the connection has not taken yet.
        num_unsent: bytes of that.
        num_heard: frames that came.
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
        """Send what the connection takes."""
        while self.unsent:
            try:
                sent = self.connection.send(self.unsent[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # it is gone; reading says so too
                self.unsent.clear()
                return
            self.num_unsent -= sent
            if sent == len(self.unsent[0]):
                self.unsent.popleft()
            else:
                self.unsent[0] = self.unsent[0][sent:]

    def close(self) -> None:
        """Let go of it."""
        self.is_open = False
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _open_pid(pid: int) -> int:
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:  # gone already, or of another namespace
        return -1
