"""Forms of kernels that are files once they are compiled. Importable by the processes that compile."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileForm:
    """A form that is a file once it is compiled."""

    folder: Path
    name: str

    def is_cached(self):
        return (self.folder / self.name).exists()

    def compile(self):
        (self.folder / self.name).touch()


class RefusedForm(FileForm):
    def compile(self):
        raise ValueError("no compiler takes it")


class CrashingForm(FileForm):
    def compile(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class LoggedForm(FileForm):
    """Notes in a line each when it begins and ends."""

    def compile(self):
        with open(self.folder / "log", "a", buffering=1, encoding="ascii") as log:
            log.write("begins\n")
            for _ in range(1000):
                os.sched_yield()
            log.write("ends\n")
        super().compile()


class PairedForm(FileForm):
    """Goes on once another one is at the same place."""

    def compile(self):
        with open(self.folder / "fifo", "r" if self.name == "0" else "w", encoding="ascii"):
            super().compile()


class HangingForm(FileForm):
    """Says its process, and its parent's, and never ends."""

    def compile(self):
        with open(self.folder / "fifo", "w", encoding="ascii") as fifo:
            fifo.write(f"{os.getpid()} {os.getppid()}")
        signal.pause()
