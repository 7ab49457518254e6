"""The flagship test on a GPU, with prefill in a process of its own: the same tokens over NVLink and over sockets."""

import secrets

import pytest
import torch

from baton.bench.actor import SpawnedRemote
from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.decode_worker.worker import DecodeWorker
from baton.engine.step.runner import Runner
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import ReceiverService
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.service import DecodePeer
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import MAX_TOKENS, WHOLE, local_tokens
from baton.tests.e2e.topology import QueueSink
from baton.tests.gpu.model_prefill import ModelPrefill
from baton.worker.loading import request_limits

pytestmark = pytest.mark.gpu
NUM_BLOCKS, BLOCK_SIZE = 1024, 16
PREFILL_DEVICE = 1 if torch.cuda.device_count() > 1 else 0


class DecodeHost:
    """A decode worker of this process."""

    def __init__(self, model, tokenizer, transport):
        self.fatal = []
        self.pool = KVPool(model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, model.device)
        config = KVTransferConfig(transport=transport)
        setup = ReceiverSetup(
            epoch=secrets.randbits(63) | 1,
            layout=self.pool.layout,
            num_blocks=NUM_BLOCKS,
            tp_size=1,
            listen=Listen("zmq", "tcp://127.0.0.1:0", ("nvlink",) if transport == "nvlink" else ()),
            config=config,
        )
        self.incoming = ReceiverService.over_device(self.pool, setup)
        self.worker = DecodeWorker(
            runner=Runner(model, self.pool, max_num_seqs=16, num_draft_tokens=2),
            pool=self.pool,
            tokenizer=tokenizer,
            limits=request_limits(model, max_model_len=1 << 20, num_draft_tokens=2),
            incoming=self.incoming,
            max_num_batched_tokens=256,
            max_queue_len=1024,
            clock=MonotonicClock(),
            on_fatal=self.fatal.append,
        )
        self.worker.start()

    @property
    def peer(self):
        return DecodePeer("decode", self.incoming.address, self.incoming.epoch)

    def tokens(self, sink):
        found = []
        for event in sink.events(120.0):
            found.extend(event.tokens.token_ids)
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", ["nvlink", "tcp"])
def test_tokens_do_not_depend_on_the_way(dtype, transport):
    torch.cuda.set_device(0)
    tokenizer = Tokenizer.from_directory(TINY)
    requests = requests_for(token_prompts(tokenizer, 12), sampled=True, num_drafts=2, max_tokens=MAX_TOKENS)
    model = load_model(TINY, dtype=dtype, device=torch.device("cuda", 0), numerics=Numerics.INVARIANT, with_mtp=True)
    want = local_tokens(model, tokenizer, requests, num_drafts=0, chunk_len=WHOLE)
    prefill = SpawnedRemote(ModelPrefill, PREFILL_DEVICE, dtype, transport, NUM_BLOCKS, BLOCK_SIZE, 48)
    decode = DecodeHost(model, tokenizer, transport)
    try:
        sinks = [QueueSink() for _ in requests]
        for request, sink in zip(requests, sinks, strict=True):
            decode.worker.attend(request, sink)
        firsts, fatal, data_paths = prefill.call("run", requests, decode.peer)
        assert not fatal
        # Where torch computes an invariant model, its GEMMs have a launch for each few rows.
        assert (prefill.call("num_steps_piecewise") > 0) == (model.implementation is Implementation.TRITON)
        assert [problem for _, _, problem in firsts] == [""] * len(requests)
        got = []
        for (token, reason, _), request, sink in zip(firsts, requests, sinks, strict=True):
            if reason:
                decode.worker.cancel(request.key)
            got.append([token] if reason else [token, *decode.tokens(sink)])
        assert got == want
        assert not decode.fatal
        expected = {"nvlink"} if transport == "nvlink" else {"raw", "inline"}
        assert set(data_paths.values()) <= expected
        assert data_paths
    finally:
        prefill.end()
        decode.worker.close()
