"""A decode worker's process that a test kills: it says who its incoming transfer is, and waits."""

import sys
import time

from baton.tests.kvtransfer.receiver_worker import ReceiverWorker

if __name__ == "__main__":
    worker = ReceiverWorker()
    print(worker.pid, worker.region.path, flush=True)
    time.sleep(float(sys.argv[1]))
