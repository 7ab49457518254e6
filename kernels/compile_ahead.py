"""Compiles the kernels that some work will launch, in parallel processes, into Triton's cache.

Triton compiles on the launching thread and holds the GIL for most of it, and a worker needs hundreds of
specializations. So the work is first done as a dry run (`dry_run`). What Triton's cache lacks of it is compiled by a
process that forks a child per specialization, up to one per processor; neither that process nor its children touch a
GPU. Specializations that fail here, or that the dry run does not meet, are compiled at their launch, and raise their
errors there.

Each process starts with a different specialization, and skips what others have compiled meanwhile, so workers and ranks
of a host share the work without communicating.
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

from baton.core.start_phase import FINDING_KERNELS, KERNELS, OnPhase, no_phase
from baton.kernels.dry_run import forms_of
from baton.kernels.kernel_form import KernelForm

MODULE: Final = "baton.kernels.compile_ahead"
MAX_PROCESSES: Final = 16  # each takes up to 300 MB
MIN_FORMS: Final = 8  # fewer compile faster here than another process needs for its imports
LIMIT_S: Final = 1200.0
FORM_LIMIT_S: Final = 120
_NICENESS: Final = 5  # serving processes on this host have priority
_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger(__name__)


def compile_ahead(work: Callable[[], None], num_ranks: int = 1, on_phase: OnPhase = no_phase) -> None:
    """Compile what the work will launch, if there is enough of it for a separate process to be faster.

    Args:
        work: done here as a dry run (`dry_run.forms_of`).
        num_ranks: number of ranks that do the same on this host at the same time.
        on_phase: called before the dry run, and with the number of kernels before they are compiled.

    Raises:
        Exception: whatever the work raises.
    """
    on_phase(FINDING_KERNELS, 0, 0)
    start_s = time.monotonic()
    forms = forms_of(work)
    missing = [form for form in forms if not form.is_cached()]
    found_s = time.monotonic() - start_s
    log.info("%d of %d kernels are not in Triton's cache (looked for %.1f s)", len(missing), len(forms), found_s)
    if len(missing) < MIN_FORMS:
        return
    num_processes = max(1, min(len(os.sched_getaffinity(0)) // num_ranks, MAX_PROCESSES))
    log.info("compiling %d kernels, %d at once", len(missing), num_processes)
    on_phase(KERNELS, 0, len(missing))
    start_s = time.monotonic()
    compile_all(missing, num_processes)
    num_failed = sum(not form.is_cached() for form in missing)
    log.info("compiled %d kernels in %.1f s", len(missing) - num_failed, time.monotonic() - start_s)
    if num_failed:
        log.warning("%d kernels could not be compiled ahead, and are compiled as they are launched", num_failed)


def compile_all(forms: Sequence[KernelForm], num_processes: int) -> None:
    """Compile into Triton's cache, `num_processes` at once; what cannot be compiled is missing there afterwards."""
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
    except subprocess.TimeoutExpired:  # the process was killed, and its children with it
        log.warning("kernels were not compiled within %.0f s", LIMIT_S)


def main() -> None:
    """Run the process that forks a child for each specialization."""
    num_processes, form_limit_s, parent = map(int, sys.argv[1:])
    _end_with(parent)
    os.nice(_NICENESS)
    forms: list[KernelForm] = pickle.load(sys.stdin.buffer)
    random.Random(os.getpid()).shuffle(forms)
    num_running = 0
    for form in forms:
        if form.is_cached():  # asked here, so that children inherit the imports
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
    """Compile in the child; whatever happens here, a specialization that stays uncached is compiled at its launch."""
    try:
        signal.alarm(limit_s)
        _end_with(parent)
        form.compile()
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """Have the operating system kill this process when that parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


if __name__ == "__main__":
    main()
