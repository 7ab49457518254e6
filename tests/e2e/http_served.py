"""The tiny model behind a real router process with HTTP, and whole workers in this process; no Ray."""

import json
import subprocess
import sys
import time
import urllib.request

import openai

from baton.decode_worker.node import DecodeNode
from baton.prefill_worker.node import PrefillNode
from baton.tests.e2e.conftest import TINY
from baton.tests.worker.test_nodes import worker_config

READY_S = 20.0


class HttpServed:
    """Serving from construction to `close`."""

    def __init__(self, *flags, **config):
        command = [sys.executable, "-P", "-m", "baton.router", "--model-name", "tiny", "--model-path", str(TINY)]
        command += ["--port", "0", "--http-port", "0", "--exit-with-parent", *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ports = json.loads(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{ports['http_port']}"
        self.address = f"127.0.0.1:{ports['grpc_port']}"
        self.fatal = []
        config = {"router_address": self.address, "max_num_seqs": 4, "max_queue_len": 64} | config
        self.prefill = PrefillNode(worker_config("prefill-0", **config), self.fatal.append)
        self.decode = DecodeNode(worker_config("decode-0", **config), self.fatal.append)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)
        self.wait(self.is_ready, READY_S)

    def is_ready(self):
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as reply:
                return reply.status == 200
        except urllib.error.HTTPError:
            return False

    def wait(self, holds, timeout_s=5.0):
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def is_idle(self):
        """Whether no worker holds anything of any request."""
        for node in (self.prefill, self.decode):
            inventory = node.state().inventory
            if (
                inventory.num_blocks_free != inventory.num_blocks
                or inventory.num_requests_held
                or inventory.num_kv_receives
            ):
                return False
        return True

    def close(self):
        self.client.close()
        self.prefill.close()
        self.decode.close()
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(10) == 0
        assert self.fatal == []
