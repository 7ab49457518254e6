"""A served tiny model for fuzzing: how long, with which seeds, and what must hold between and after."""

import os
import random
import time
import urllib.request

import grpc
import psutil

from baton.client import BatonClient
from baton.core.errors import BatonError, Retry, ServingError
from baton.core.requests.sampling import SamplingParams
from baton.proto import admin_pb2, admin_pb2_grpc, wire
from baton.tests.e2e.http_served import HttpServed

SEED = int(os.environ.get("BATON_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
PROMPT = "def main(argv=None):"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
IDLE_S = 60.0
MAX_ROUTER_GROWTH_BYTES = 160 << 20
MAX_OWN_GROWTH_BYTES = 1 << 30  # this process: both workers, and what Hypothesis keeps
MAX_MORE_FDS = 40
MAX_MORE_THREADS = 40


def duration_s(name, default_s):
    """Seconds that BATON_FUZZ_<name>_S says, or these."""
    return float(os.environ.get(f"BATON_FUZZ_{name}_S", default_s))


def rounds(seconds, what):
    """Seeds until the time is over, at least one. What fails can be run again with BATON_FUZZ_SEED."""
    end_s, at = time.monotonic() + seconds, 0
    while at == 0 or time.monotonic() < end_s:
        print(f"{what}: BATON_FUZZ_SEED={SEED + at}", flush=True)
        yield SEED + at
        at += 1


def patiently(call):
    """What a call gives, once there is room and both workers are heard of: on a busy machine heartbeats come late."""
    end_s = time.monotonic() + IDLE_S
    while True:
        try:
            return call()
        except (ServingError, grpc.RpcError) as error:
            typed = error if isinstance(error, BatonError) else wire.error_from_rpc(error)
            assert typed.retry is not Retry.NEVER and time.monotonic() < end_s, typed
            time.sleep(0.1)


class FuzzFleet(HttpServed):
    """See `HttpServed`; it also knows what a good answer is, and how much everything has grown."""

    def __init__(self, *flags, **config):
        super().__init__(*flags, **config)
        self.nodes = (self.prefill, self.decode)
        self.good = self.answer()
        self.before = None

    def answer(self):
        """The tokens of a good request."""
        with BatonClient(self.address, timeout_s=IDLE_S) as client:
            chunks = patiently(lambda: list(client.generate(PROMPT, sampling=GREEDY)))
        return [token for chunk in chunks for token in chunk.token_ids]

    def grown(self):
        """What could leak, now."""
        router, own = psutil.Process(self.process.pid), psutil.Process()
        return {
            "router bytes": (router.memory_info().rss, MAX_ROUTER_GROWTH_BYTES),
            "router files": (router.num_fds(), MAX_MORE_FDS),
            "router threads": (router.num_threads(), MAX_MORE_THREADS),
            "own bytes": (own.memory_info().rss, MAX_OWN_GROWTH_BYTES),
            "own files": (own.num_fds(), MAX_MORE_FDS),
            "own threads": (own.num_threads(), MAX_MORE_THREADS),
        }

    def check(self):
        """Nothing has died, nothing is held, nothing grows without end, and a good request has its tokens."""
        assert self.process.poll() is None, "the router ended"
        assert self.fatal == []
        self.wait(self.is_idle, IDLE_S)
        self.wait(lambda: self.metric("baton_num_streams_open") == 0.0, IDLE_S)
        assert self.answer() == self.good
        self.wait(self.is_idle, IDLE_S)
        with BatonClient(self.address) as client:
            self.wait(lambda: client.status().num_requests_running == 0, IDLE_S)
        if self.before is None:  # after the first round everything that is made once is there
            self.before = self.grown()
        self.wait(lambda: not self.leaks(), IDLE_S)

    def leaks(self):
        now = self.grown()
        return {name: (old, now[name][0]) for name, (old, room) in self.before.items() if now[name][0] > old + room}

    def metric(self, name):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def restore(self, channel):
        """Undo what operators' calls have changed."""
        admin = admin_pb2_grpc.AdminStub(channel)
        drains = [admin_pb2.DrainRequest(worker_id=node.config.worker_id, undo=True) for node in self.nodes]
        undo = [(admin.SetAdmission, admin_pb2.SetAdmissionRequest(max_queue_len=256))]
        undo += [(admin.SetSpeculation, admin_pb2.SetSpeculationRequest(mode={"num_draft_tokens": 2}))]
        undo += [(admin.Drain, drain) for drain in drains]
        undo += [(admin.ClearQuarantine, admin_pb2.ClearQuarantineRequest())]
        for call, message in undo:
            patiently(lambda call=call, message=message: call(message, timeout=30))
