"""Kernels that work will launch, compiled before by as many processes as there are processors, into Triton's cache.

Triton compiles on the thread that launches, and holds Python's lock for most of it; a worker needs hundreds of forms.
So the work is done dry first (`dry_run`), and what the cache lacks of it is compiled by a process that forks a child
for each form; it has no GPU, and none of them touches one. What it could not compile, and forms that a dry run does not
meet, are compiled as they are launched, and raise what they raise there. Each process begins with another form, and
leaves out what others have compiled meanwhile, so workers and ranks of a host share the work without a word.
"""

import ctypes
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from baton.kernels.dry_run import forms_of
from baton.kernels.kernel_form import KernelForm

MODULE: Final = "baton.kernels.compile_ahead"
MAX_PROCESSES: Final = 16  # each takes up to 300 MB
MIN_FORMS: Final = 8  # fewer are compiled before another process has imported what it needs
LIMIT_S: Final = 1200.0
FORM_LIMIT_S: Final = 120
_NICENESS: Final = 5  # what serves on this host comes first
_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger(__name__)


def compile_ahead(work: Callable[[], None], num_ranks: int = 1) -> None:
    """Compile what the work will launch, where there is more of that than one process would compile sooner.

    Args:
        work: done here without its kernels (`dry_run.forms_of`).
        num_ranks: that do the same on this host at the same time.

    Raises:
        Exception: whatever the work raises.
    """
    start_s = time.monotonic()
    forms = forms_of(work)
    missing = [form for form in forms if not form.is_cached()]
    found_s = time.monotonic() - start_s
    log.info("%d of %d kernels are not in Triton's cache (looked for %.1f s)", len(missing), len(forms), found_s)
    if len(missing) < MIN_FORMS:
        return
    num_processes = max(1, min(len(os.sched_getaffinity(0)) // num_ranks, MAX_PROCESSES))
    log.info("compiling %d kernels, %d at once", len(missing), num_processes)
    start_s = time.monotonic()
    compile_all(missing, num_processes)
    num_failed = sum(not form.is_cached() for form in missing)
    log.info("compiled %d kernels in %.1f s", len(missing) - num_failed, time.monotonic() - start_s)
    if num_failed:
        log.warning("%d kernels could not be compiled ahead, and are compiled as they are launched", num_failed)


def compile_all(forms: Sequence[KernelForm], num_processes: int) -> None:
    """Into Triton's cache, so many at once; what cannot be compiled is not there afterwards."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        subprocess.run(
            [sys.executable, "-P", "-m", MODULE, *map(str, (num_processes, FORM_LIMIT_S, os.getpid()))],
            input=pickle.dumps(list(forms)),
            stdout=subprocess.DEVNULL,
            process_group=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # it was ended, and its children with it
        log.warning("kernels were not compiled within %.0f s", LIMIT_S)


def main() -> None:
    """The process: a child for each form."""
    num_processes, form_limit_s, parent = map(int, sys.argv[1:])
    _end_with(parent)
    os.nice(_NICENESS)
    forms: list[KernelForm] = pickle.load(sys.stdin.buffer)
    random.Random(os.getpid()).shuffle(forms)
    num_running = 0
    for form in forms:
        if form.is_cached():  # asked here, so that children find what they import
            continue
        if num_running == num_processes:
            os.wait()
            num_running -= 1
        own = os.getpid()
        if os.fork() == 0:
            _compile(form, form_limit_s, own)
        num_running += 1
    for _ in range(num_running):
        os.wait()


def _compile(form: KernelForm, limit_s: int, parent: int) -> NoReturn:
    """The child: whatever happens to it, its form is in the cache, or is compiled again by who launches it."""
    try:
        signal.alarm(limit_s)
        _end_with(parent)
        form.compile()
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """The kernel ends this process with that one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)


if __name__ == "__main__":
    main()
