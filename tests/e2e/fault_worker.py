"""`python -m baton.tests.e2e.fault_worker SETUP`: one worker, as a process that can be hit at a chosen state.

The node is Baton's own. Around it: its ports are chosen beforehand, so that its incarnations follow each other at
one
address and a proxy can stand on every way to it; each busy turn of its loop takes a little longer, so that states last;
and stdin takes orders, one JSON line each, that are answered on stdout. The worker ends when stdin closes, and on
SIGTERM as its actor does on shutdown. `... rank SETUP SEAT` is another rank of it.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

from baton.core.config import KVTransferConfig
from baton.core.telemetry.telemetry import TelemetryConfig
from baton.core.tls_files import TlsFiles
from baton.decode_worker import node as decode_node
from baton.engine.sequence import Phase
from baton.prefill_worker import node as prefill_node
from baton.tests.e2e.frame_faults import FrameFaults
from baton.tests.worker.test_nodes import worker_config
from baton.worker import host
from baton.worker.rank import RankPlace

EXIT_FATAL = 70
PREFILL_STATES = {
    Phase.WAITING: "admitted",
    Phase.RESERVING: "reserving",
    Phase.READY: "pushing",
    Phase.RUNNING: "pushing",
    Phase.SENDING: "committing",
    Phase.ABORTING: "aborting",
}
DECODE_STATES = {
    Phase.EXPECTED: "attending",
    Phase.WAITING: "attending",
    Phase.RECEIVING: "pushing",
    Phase.READY: "complete",
    Phase.RUNNING: "decoding",
}
FINISHING_LEN = 3  # tokens to the end: at most the step in flight and one more


def config_of(setup):
    """The worker's configuration."""
    values = dict(setup["config"])
    for name, kind in (("tls", TlsFiles), ("telemetry", TelemetryConfig)):
        if name in values:
            values[name] = kind(**values[name])
    values = {"max_num_seqs": 16, "max_queue_len": 128, "chunk_len": 16} | values
    transfer = KVTransferConfig(**setup["transfer"])
    return worker_config(setup["name"], setup["router"], transfer=transfer, **values)


def decode_state(sequence):
    """Where it is at a decode worker, in the words of the fault table."""
    if sequence.num_preemptions and not sequence.is_decoding:
        return "preempted"
    state = DECODE_STATES[sequence.phase]
    num_left = sequence.request.sampling.max_tokens - sequence.num_output
    return "finishing" if state == "decoding" and num_left <= FINISHING_LEN else state


class Ranks:
    """Starts the other ranks of a TP group as processes that end with this one."""

    def __init__(self, setup):
        self._setup = setup
        self.processes = []

    def start(self, rank_place):
        arguments = ["rank", json.dumps(self._setup), json.dumps(dataclasses.asdict(rank_place))]
        command = [sys.executable, "-P", "-m", "baton.tests.e2e.fault_worker", *arguments]
        self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))

    def check(self):
        assert all(process.poll() is None for process in self.processes), "a rank did not start"


class FaultWorker:
    """The node, its pace, and what is watched for."""

    def __init__(self, setup):
        self._setup = setup
        self._lock = threading.Lock()
        self._pace_s = setup["pace_s"]
        self._strike = None
        self._poison = tuple(setup.get("poison", ()))
        self.is_decode = setup["role"] == "decode"
        self.frames = None
        self._fix_addresses()
        self.ranks = Ranks(setup)
        config = config_of(setup)
        starter = self.ranks if config.tp_size > 1 else None
        make = decode_node.DecodeNode if self.is_decode else prefill_node.PrefillNode
        self.node = make(config, self._fatal, starter)
        self.loop = self.node.worker._loop
        self._turn = self.loop._step
        self.loop._step = self._paced_turn
        pids = [process.pid for process in self.ranks.processes]
        self.say("serving", epoch=self.node.epoch, rank_pids=pids)

    def _fix_addresses(self):
        """Bind to the ports of the setup, and tell others the address of the proxy before them."""
        setup = self._setup
        make_server = host.grpc.aio.server

        def server(*args, **kwargs):
            made = make_server(*args, **kwargs)
            for name in ("add_insecure_port", "add_secure_port"):
                add = getattr(made, name)
                setattr(made, name, lambda _, *more, add=add: add(f"127.0.0.1:{setup['port']}", *more))
            return made

        host.grpc.aio.server = server
        host.WorkerHost.address = property(lambda _: setup["shown"], lambda _, address: None)
        decode_node.bind_address = lambda kind, name: (
            f"{'grpc' if kind == 'grpc' else 'tcp'}://{name}:{setup['kv_port']}"
        )
        connect = prefill_node.connecting_transport

        def transport(config):
            self.frames = FrameFaults(connect(config), setup["ways"])
            return self.frames

        prefill_node.connecting_transport = transport

    def say(self, what, **fields):
        """One line."""
        line = json.dumps({"said": what, **fields})
        with self._lock:
            print(line, flush=True)

    def _fatal(self, error):
        self.say("fatal", error=repr(error))
        os._exit(EXIT_FATAL)

    def _paced_turn(self):
        has_worked = self._turn()
        if self._strike is not None or self._poison:
            self._look()
        if has_worked and self._pace_s:
            time.sleep(self._pace_s)
        return has_worked

    def _look(self):
        """On the loop's thread, between two turns: nothing moves while it looks."""
        states = self.states()
        if self._poison and any(self._is_poison(key) for key, state in states.items() if state == "decoding"):
            self.say("struck", states=states)
            os.kill(os.getpid(), signal.SIGKILL)
        strike = self._strike
        if strike is None or strike["state"] not in states.values():
            return
        self._strike = None
        self.say("struck", states=states)
        if strike["group"]:
            os.killpg(0, strike["signal"])
        else:
            os.kill(os.getpid(), strike["signal"])

    def _is_poison(self, name):
        for sequence in self.node.worker.engine.scheduler.sequences():
            if str(sequence.key) == name:
                return sequence.request.prompt_token_ids[: len(self._poison)] == self._poison
        return False

    def states(self):
        """Where each attempt here is."""
        sequences = self.node.worker.engine.scheduler.sequences()
        if not self.is_decode:
            return {str(sequence.key): PREFILL_STATES[sequence.phase] for sequence in sequences}
        return {str(sequence.key): decode_state(sequence) for sequence in sequences}

    def report(self):
        """Where its requests are, and what it holds."""
        held = self.node.worker.inventory()
        names = ("num_blocks", "num_blocks_free", "num_blocks_quarantined", "num_kv_receives", "num_slots_in_use")
        names += ("num_requests_held", "num_requests_waiting", "num_requests_running", "frames_late_dropped")
        names += ("frames_corrupt", "num_preemptions", "num_host_full", "num_requests_finished")
        return {
            "states": self.states(),
            "inventory": {name: getattr(held, name) for name in names},
            "resent": held.transfer.resent,
            "num_tasks": len(asyncio.all_tasks(self.node.host._loop)),
            "num_threads": len(os.listdir("/proc/self/task")),
            "num_fds": len(os.listdir("/proc/self/fd")),
            "fds": kinds_of_fds(),
            "frame_hits": 0 if self.frames is None else self.frames.num_hits,
        }

    def obey(self, order):
        """One order."""
        match order["do"]:
            case "report":
                self.say("report", id=order["id"], **self.report())
            case "strike":
                self._strike = order
            case "pace":
                self._pace_s = order["s"]
            case "poison":
                self._poison = tuple(order["token_ids"])
            case "frames":
                self.frames.set(**order["faults"])

    def close(self):
        """As its actor does."""
        self.node.close()


def kinds_of_fds():
    """How many descriptors of each kind, for whoever wants to know why there are so many."""
    found = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}").partition("[")[0].rpartition("/")[2]] += 1
    return found


def run_rank(setup, rank_place):
    """Another rank; ends with rank 0."""

    def end_with_parent():
        while os.read(0, 4096):
            pass
        os._exit(EXIT_FATAL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    decode_node.DecodeRank(config_of(setup), rank_place).run()
    os._exit(0)


def main():
    if sys.argv[1] == "rank":
        run_rank(json.loads(sys.argv[2]), RankPlace(**json.loads(sys.argv[3])))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    setup = json.loads(sys.argv[1])
    worker = FaultWorker(setup)
    try:
        for line in sys.stdin:
            worker.obey(json.loads(line))
    finally:
        worker.close()
        worker.say("closed")


if __name__ == "__main__":
    main()
