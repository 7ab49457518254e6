"""A whole prefill worker, model and all, in a process of its own."""

import os
import queue
import secrets

import torch

from baton.core.clock import MonotonicClock
from baton.core.config import MAX_DRAFTS, KVTransferConfig
from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.graphs.graphed_step import graphed_step
from baton.engine.step.runner import Runner
from baton.kvcache.pool import KVPool
from baton.kvtransfer.sender.service import PushService
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.model.loader import load_model
from baton.prefill_worker.worker import PrefillWorker
from baton.tests.e2e.conftest import TINY
from baton.worker.loading import request_limits


def see_first(device_index):
    """Make a GPU this process's first, as the cluster does for its workers. Before CUDA is used."""
    assert not torch.cuda.is_initialized()
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    own = told[device_index]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([own, *(gpu for gpu in told if gpu != own)])


class Sink:
    """Keeps what a worker says of one request."""

    def __init__(self):
        self.queue = queue.Queue()

    def emit(self, event):
        self.queue.put(event)

    def end(self, error=None):
        if not self.ended:
            self.ended = True
            self.queue.put(error)

    ended = False


class ModelPrefill:
    """See `bench.actor.SpawnedRemote`."""

    def __init__(
        self,
        device_index,
        dtype,
        transport,
        num_blocks,
        block_size,
        chunk_len,
        path=TINY,
        numerics=Numerics.INVARIANT,
        device_type="cuda",
    ):
        device = torch.device(device_type)
        if device_type == "cuda":
            see_first(device_index)
        tokenizer = Tokenizer.from_directory(path)
        model = load_model(path, dtype=dtype, device=device, numerics=numerics, with_mtp=True)
        pool = KVPool(model.kv_layout(block_size), num_blocks, device)
        config = KVTransferConfig(transport=transport)
        self.fatal = []
        self.push = PushService(
            pool=pool,
            layout=pool.layout,
            epoch=secrets.randbits(63) | 1,
            transport=ZmqTransport(config=config),
            config=config,
            clock=MonotonicClock(),
        )
        self._graphs = graphed_step(  # on a GPU, as of every prefill worker
            model,
            pool,
            CudaGraphConfig(),
            max_num_sequences=16,
            num_draft_tokens=0,
            max_model_len=model.config.max_model_len,
            max_num_tokens=chunk_len,
            decodes=False,
        )
        runner = Runner(
            model, pool, max_num_seqs=16, num_draft_tokens=0, open_push=self.push.open_step, graphs=self._graphs
        )
        self.worker = PrefillWorker(
            runner=runner,
            pool=pool,
            tokenizer=tokenizer,
            limits=request_limits(model, max_model_len=1 << 20, num_draft_tokens=MAX_DRAFTS),
            push=self.push,
            max_num_batched_tokens=chunk_len,
            max_queue_len=1024,
            clock=MonotonicClock(),
            on_fatal=lambda error: self.fatal.append(repr(error)),
        )
        self.worker.start()

    def num_steps_piecewise(self):
        """Steps whose trunk was replayed in pieces."""
        return 0 if self._graphs is None else self._graphs.counts.num_steps_piecewise

    def run(self, requests, peer):
        """Hand all of them over; (first token, finish reason, error) of each."""
        sinks = [Sink() for _ in requests]
        for request, sink in zip(requests, sinks, strict=True):
            self.worker.submit(request, peer, sink)
        found = []
        for sink in sinks:
            token, reason, problem = None, "", ""
            while (event := sink.queue.get(timeout=120)) is not None:
                if isinstance(event, Exception):
                    problem = repr(event)
                    break
                if event.HasField("first_token"):
                    token, reason = event.first_token.token, event.first_token.finish_reason
            found.append((token, reason, problem))
        return found, self.fatal, {address: choice.data_path for address, choice in self.push.data_paths().items()}
