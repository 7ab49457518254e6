"""A whole decode worker of several ranks as the cluster makes it, but for Ray: each rank is a process.

`TPGroupDecode` is rank 0 (see `bench.actor.SpawnedRemote`); it starts the others by running this module.
"""

import os
import pickle
import subprocess
import sys
import threading

from baton.core.config import KVTransferConfig, WorkerConfig
from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import WorkerStartFailed
from baton.decode_worker.node import DecodeNode, DecodeRank
from baton.kvtransfer.sender.service import DecodePeer
from baton.tests.e2e.prompts import requests_for
from baton.tests.e2e.topology import QueueSink
from baton.tests.gpu.model_prefill import see_first
from baton.worker.rank import RankThread

MODULE = "baton.tests.gpu.decode_tp_group"
SIZE = 2
TOKENS_S = 60.0
EXIT_LOST = 70


def config_of(path, dtype, numerics, block_size, *, device="cuda", graph_sizes=(), host_kv_bytes=0, transport="auto"):
    """Of a worker with few blocks and little staging memory, which no router knows."""
    return WorkerConfig(
        worker_id="decode-0",
        model_path=str(path),
        model_name="model",
        num_draft_tokens=2,
        numerics=numerics,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        block_size=block_size,
        kv_memory_mib=64,
        gpu_memory_utilization=0.03,
        max_num_seqs=16,
        max_queue_len=1024,
        chunk_len=48,
        max_model_len=250,
        host="127.0.0.1",
        router_address="",
        num_threads=1 if device == "cpu" else 4,
        tp_size=SIZE,
        host_kv_bytes=host_kv_bytes,
        graphs=CudaGraphConfig(sizes=graph_sizes) if graph_sizes else CudaGraphConfig(mode="off"),
        transfer=KVTransferConfig(transport=transport, staging_mib=64),
    )


class ChildStarter:
    """A `RankStarter`: other ranks as children of this process."""

    def __init__(self, config):
        self._config = config
        self.children = []

    def start(self, rank_place):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        self.children.append(child)
        child.stdin.write(pickle.dumps((self._config, rank_place)))
        child.stdin.close()

    def check(self):
        for child in self.children:
            if child.poll() is not None:
                raise WorkerStartFailed(f"a rank ended with {child.returncode} before it came")


class TPGroupDecode:
    """Rank 0; `preempt_at`: every sequence gives way at these output lengths."""

    def __init__(self, config, preempt_at=()):
        if config.device == "cuda":
            see_first(0)
        self.fatal = []
        self._starter = ChildStarter(config)
        self._node = DecodeNode(config, lambda error: self.fatal.append(repr(error)), self._starter)
        self._node.worker.engine._preempt_at = sorted(preempt_at)
        self._sinks = {}

    def peer(self):
        return DecodePeer("decode", self._node._incoming.address, self._node._incoming.epoch)

    def attend(self, requests):
        for request in requests:
            self._sinks[request.key] = QueueSink()
            self._node.worker.attend(request, self._sinks[request.key])

    def tokens(self, keys, cancelled):
        """Of each request; an error as text. Those that ended with their first token are cancelled."""
        for key in cancelled:
            self._node.worker.cancel(key)
        found = []
        for key in keys:
            sink = self._sinks.pop(key)
            try:
                found.append([token for event in sink.events(TOKENS_S) for token in event.tokens.token_ids])
            except Exception as error:  # noqa: BLE001  the test shows it
                found.append(repr(error))
        return found

    def state(self):
        """What a heartbeat says, and what was fatal."""
        return self._node.state(), self.fatal

    def close(self):
        """Returns the exit codes of the other ranks."""
        self._node.close()
        return [child.wait(20.0) for child in self._starter.children]


def all_requests(prompts, tag, max_tokens):
    """Half of them greedy, half sampled."""
    half = len(prompts) // 2
    options = {"num_drafts": 2, "max_tokens": max_tokens}
    return [
        *requests_for(prompts[:half], sampled=False, tag=f"{tag}-greedy-", **options),
        *requests_for(prompts[half:], sampled=True, tag=f"{tag}-", **options),
    ]


def hand_over(prefill, decode, requests):
    """Tokens of every request, or what went wrong, and the data path they came by."""
    decode.call("attend", requests)
    firsts, fatal, data_paths = prefill.call("run", requests, decode.call("peer"))
    ended = [request.key for (_, reason, _), request in zip(firsts, requests, strict=True) if reason]
    going = [request.key for request in requests if request.key not in ended]
    rest = dict(zip(going, decode.call("tokens", going, ended), strict=True))
    got = []
    for (token, _, problem), request in zip(firsts, requests, strict=True):
        more = rest.get(request.key, [])
        got.append(problem or (more if isinstance(more, str) else [token, *more]))
    return got, fatal, sorted(data_paths.values())


def main():
    """Another rank, until rank 0 says stop or is gone."""
    config, rank_place = pickle.load(sys.stdin.buffer)
    if config.device == "cuda":
        see_first(rank_place.rank)
    rank = DecodeRank(config, rank_place)
    done = threading.Event()

    def run():
        rank.run()
        done.set()

    RankThread(run, rank.channel, lambda error: os._exit(EXIT_LOST)).start()
    done.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
