"""A terminal for tests: a command runs in a pty, and an emulator tells what a person would see."""

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

ROWS, COLUMNS = 60, 132
DEADLINE_S = 120.0


class Terminal:
    """One command, and the screen it writes to."""

    def __init__(self, *command, rows=ROWS, columns=COLUMNS):
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.raw = ""
        self._fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self._process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
        )
        os.close(child)

    def lines(self):
        """What is on the screen and what scrolled off it, without the empty end of each line."""
        width = self.screen.columns
        above = ["".join(row[at].data for at in range(width)).rstrip() for row in self.screen.history.top]
        return [*above, *(line.rstrip() for line in self.screen.display)]

    def read_until(self, wanted):
        """Take output until `wanted(self)`, or the command's end."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not wanted(self):
            assert time.monotonic() < deadline_s, self.lines()
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:  # nobody has the other end any more
                    data = b""
                if not data:
                    return self
                text = self._decode(data)
                self.raw += text
                self._stream.feed(text)
        return self

    def signal(self, number):
        """Send one to the command."""
        self._process.send_signal(number)

    def wait(self):
        """Everything up to its end, and its exit code."""
        self.read_until(lambda terminal: False)
        return self._process.wait(DEADLINE_S)

    def close(self):
        """End it, if it has not."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._fd)


def python(source):
    """The command that runs a program."""
    return sys.executable, "-P", "-c", source
