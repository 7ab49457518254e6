"""What children of the kernel bench are asked to do in its tests; a module of its own, so that they import no torch."""

import os
import time

from baton.bench.kernel_bench.processes import Broken


def work(task, step):
    step(f"first of {task}")
    if task == "die":
        step("dying")
        os._exit(7)
    if task == "hang":
        step("hanging")
        time.sleep(3600)
    if task == "break":
        raise Broken("kept")
    print("noise on stdout")
    return os.getpid(), task
