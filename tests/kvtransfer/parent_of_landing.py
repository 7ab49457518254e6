"""A decode worker's process that a test kills: it says who its landing is, and waits."""

import sys
import time

from baton.tests.kvtransfer.landing_worker import LandingWorker

if __name__ == "__main__":
    worker = LandingWorker()
    print(worker.pid, worker.region.path, flush=True)
    time.sleep(float(sys.argv[1]))
