"""Run tests whose processes are stopped at random moments, as on a machine that is busy elsewhere.

    python scripts/stall_tests.py [--stall-s S] [--every-s S] [--seed N] PYTEST_ARGUMENT ...

A test that fails here and not otherwise takes a stall for a defect: it waits too short, or a lease that it is not
about ends meanwhile. Tests about leases, deadlines and speed fail too, and may.
"""

import argparse
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_S = 3.0  # pytest imports torch first


def main() -> int:
    """Run pytest, with stalls; its exit status."""
    parser = argparse.ArgumentParser(
        prog="stall_tests.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stall-s", type=float, default=2.0, help="seconds that a process stays stopped")
    parser.add_argument("--every-s", type=float, default=3.0, help="mean seconds between two stalls")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the processes")
    args, pytest_arguments = parser.parse_known_args()
    rng = random.Random(args.seed)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *pytest_arguments]
    running = subprocess.Popen(command, cwd=ROOT)
    num_stalls = 0
    time.sleep(START_S)
    while running.poll() is None:
        time.sleep(rng.expovariate(1 / args.every_s))
        num_stalls += stall(running.pid, rng, args.stall_s)
    print(f"{num_stalls} stalls of {args.stall_s} s, seed {args.seed}")
    return running.returncode


def stall(pid: int, rng: random.Random, stall_s: float) -> bool:
    """Stop one process of pid's tree, or at times all of them; and let it go on."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        chosen = tree if rng.random() < 0.2 else [rng.choice(tree)]
        # One that a test itself has stopped stays as it is.
        stopped = [process for process in chosen if process.status() != psutil.STATUS_STOPPED]
        for process in stopped:
            signal_it(process, signal.SIGSTOP)
        time.sleep(stall_s)
        for process in stopped:
            signal_it(process, signal.SIGCONT)
        return bool(stopped)
    return False


def signal_it(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
