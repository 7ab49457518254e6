"""`python -m baton.tests.e2e.deployment_process`: a deployment on a private Ray, in a process that may lose its head.

Ray ends a driver that misses its GCS for a minute. It says its address on stdout, and ends when stdin closes.
"""

import json
import sys

from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig

CONFIG = {
    "num_speculative_tokens": 2,
    "dtype": "float64",
    "grpc_port": 0,
    "kv_memory_mib": 64,
    "max_num_batched_tokens": 16,
}


def main():
    with Deployment(ServeConfig.from_mapping(CONFIG)) as deployment:
        pids = sorted(deployment.worker_pids().values())
        print(json.dumps({"address": deployment.address, "pids": pids}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
