"""Finds and ends the processes that a deployment started, by process id only."""

import contextlib
import os
import select
import time
from collections.abc import Iterable

import psutil

POLL_S = 0.1


def started_with(marker: str) -> list[psutil.Process]:
    """Return this process's children whose command line mentions `marker`, and all their descendants.

    All processes of a private Ray name its directory; children that other code started are not touched.
    """
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        try:
            if any(marker in part for part in child.cmdline()):
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return _runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids: Iterable[int], timeout_s: float, wake: int | None = None) -> None:
    """Wait until one of the processes has ended, `wake` is readable, or the timeout is over."""
    files = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                files.append(os.pidfd_open(pid))
        poll = select.poll()
        for file in (*files, *(() if wake is None else (wake,))):
            poll.register(file, select.POLLIN)
        poll.poll(1e3 * timeout_s)
    finally:
        for file in files:
            os.close(file)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those of `processes` that still run; a zombie does not."""
    return [process for process in processes if _runs(process)]


def end_processes(processes: Iterable[psutil.Process], *, grace_s: float, kill_wait_s: float = 3.0) -> list[int]:
    """Wait for processes to end, then kill the others; return the ids of those that survived even that."""
    left = _wait(processes, grace_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in _wait(left, kill_wait_s)]


def _wait(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that still run after the timeout.

    A zombie counts as ended: it may remain for seconds if its parent is gone.
    """
    end_s = time.monotonic() + timeout_s
    left = alive(processes)
    while left and (left_s := end_s - time.monotonic()) > 0:
        psutil.wait_procs(left, timeout=min(POLL_S, left_s))
        left = alive(left)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
