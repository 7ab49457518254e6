"""Pushing overlaps computing: while a layer computes, the layer two before it lands at the decode worker.

No clock decides. A layer is held at its beginning until the decode worker's own memory holds what the layer two before
it computed, in full. A deployment that pushes only after its forward never lets go of the third layer, whatever room
holds the pushes back: worker, model, writer, sender or transport.
"""

import threading
import time

import pytest

from baton.core.errors import TransferFailed
from baton.model.attention import Attention
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology
from baton.tests.patience import patient

LIMIT_S = 30.0  # how long a layer is held; only a deployment that does not overlap waits for it
AHEAD = 2  # layers


class Overlap:
    """Holds each layer of the prefill worker until an earlier one has landed; `late` says which never did."""

    def __init__(self, prefill_pool, decode_pool, limit_s=LIMIT_S):
        self._prefill_pool, self._decode_pool = prefill_pool, decode_pool
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._num_tokens = {}
        self.num_held = 0
        self.late = []

    def begin(self):
        """Forget what landed: every byte becomes a part of a NaN."""
        self._decode_pool.data_bytes.fill_(0xFF)
        self._num_tokens.clear()

    def before(self, layer, num_tokens, pool):
        """Called when a layer is about to compute."""
        if pool is not self._prefill_pool:
            return
        self._num_tokens[layer] = self._num_tokens.get(layer, 0) + num_tokens
        if layer < AHEAD or self.late:
            return
        self.num_held += 1
        awaited, deadline_s = layer - AHEAD, time.monotonic() + self._limit_s
        while self._num_landed(awaited) < self._num_tokens[awaited]:
            if time.monotonic() > deadline_s:
                self.late.append(TransferFailed(f"layer {layer} was reached, and layer {awaited} had not landed"))
                return
            time.sleep(0.001)

    def _num_landed(self, layer):
        """Positions of which every K and V of the layer is in the decode worker's pool."""
        blocks_NHPSD = self._decode_pool.blocks(layer)
        return int((~blocks_NHPSD.isnan()).all(-1).all(1).all(1).sum())


@pytest.fixture
def overlap_of(monkeypatch):
    """Watch a topology of one prefill and one decode worker."""

    def watch(topology, **options):
        overlap = Overlap(topology.prefill[0].pool, topology.decode[0].pool, **options)
        compute = Attention.project

        def held(self, x_TD, inputs):
            overlap.before(self.layer, len(x_TD), inputs.pool)
            return compute(self, x_TD, inputs)

        monkeypatch.setattr(Attention, "project", held)
        return overlap

    return watch


@pytest.mark.parametrize("chunk_len", [4096, 48])
@pytest.mark.parametrize(("data_path", "transport"), [("raw", "tcp"), ("inline", "zmq")])
def test_a_layer_lands_while_later_ones_compute(data_path, transport, chunk_len, load_tiny, tokenizer, overlap_of):
    model = load_tiny()
    prompts = [prompt for prompt in token_prompts(tokenizer, 12) if len(prompt) > 40][:3]
    requests = requests_for(prompts, sampled=False, num_drafts=2, max_tokens=4)
    num_layers, num_steps = model.config.num_layers + 1, sum(-(-len(prompt) // chunk_len) for prompt in prompts)
    transfer = patient(transport=transport)
    options = {"num_drafts": 2, "chunk_len": chunk_len, "prefix_cache": False, "transfer": transfer}
    with Topology(model, tokenizer, **options) as topology:
        overlap = overlap_of(topology)
        for request in requests:
            overlap.begin()
            (outcome,) = topology.generate([request])
            assert outcome.error is None
            assert outcome.prefill_done.kv_data_path == data_path
            topology.wait_idle()
    assert not overlap.late
    assert overlap.num_held == num_steps * (num_layers - AHEAD)


class LatePush:
    """The push of a step whose layers are all handed over when the last one is computed."""

    def __init__(self, push):
        self._push = push
        self._layers = []

    def submit(self, layer):
        self._layers.append(layer)

    def close(self):
        for layer in self._layers:
            self._push.submit(layer)
        self._push.close()


def test_pushes_behind_the_forward_are_seen(load_tiny, tokenizer, overlap_of, monkeypatch):
    """The gate itself: the fault that it is there for."""
    (request,) = requests_for([token_prompts(tokenizer, 8)[7]], sampled=False, num_drafts=2, max_tokens=4)
    with Topology(load_tiny(), tokenizer, num_drafts=2, chunk_len=4096) as topology:
        runner = topology.prefill[0].worker._runner
        open_push, opened = runner._open_push, []

        def open_late(parts):
            opened.append(parts)
            return LatePush(open_push(parts))

        monkeypatch.setattr(runner, "_open_push", open_late)
        overlap = overlap_of(topology, limit_s=0.2)
        overlap.begin()
        (outcome,) = topology.generate([request])
    assert outcome.error is None, "the answer is right; it is only slow"
    assert [(first, count) for ((_, first, count),) in opened] == [(0, request.prompt_len)]
    assert [error.message for error in overlap.late] == ["layer 2 was reached, and layer 0 had not landed"]
