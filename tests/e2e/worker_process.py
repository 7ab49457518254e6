"""`python -m baton.tests.e2e.worker_process ROLE NAME ROUTER`: one worker as a process, which ends when stdin closes.

It says its epoch on stdout once it serves.
"""

import os
import sys

from baton.decode_worker.node import DecodeNode
from baton.prefill_worker.node import PrefillNode
from baton.tests.worker.test_nodes import worker_config


def main(role, name, router):
    node = (PrefillNode if role == "prefill" else DecodeNode)(
        worker_config(name, router, max_num_seqs=16, max_queue_len=128, chunk_len=64),
        lambda error: os._exit(1),
    )
    print(node.epoch, flush=True)
    sys.stdin.read()
    node.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
