"""A prefill rank without any rules: it sends what a test tells it to, over Baton's own transport."""

import sys
import time

import numpy as np

from baton.core.clock import MonotonicClock
from baton.core.requests.request import AttemptKey
from baton.kernels.kv.digest import MASK
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import VERSION, FrameHeader, KVRange, crc_of, encode_header
from baton.kvtransfer.protocol.messages import (
    DIGEST,
    control_of,
    encode_control,
    layout_message,
    parse_control,
    wire_attempt,
)
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.proto import kv_pb2
from baton.tests.kvtransfer.kept import geometry_of
from baton.tests.kvtransfer.proving import PROOFS, prove_challenge


class ScriptedPrefill:
    """One rank with a pool of random bytes whose blocks 0, 1, ... hold the prompt of every request.

    Args:
        address: of the incoming transfer.
        layout: of both sides.
        num_blocks: of the pool.
        p_epoch: its life.
        rank: in its group.
        size: of that group.
        data_paths: that it says it can send on.
        incarnation_file: named in its HELLO.
        host_id: named there, too.
    """

    def __init__(
        self,
        address,
        layout,
        *,
        num_blocks=64,
        p_epoch=77,
        rank=0,
        size=1,
        data_paths=(),
        incarnation_file="",
        host_id="",
    ):
        self.address, self.layout, self.p_epoch, self.rank, self.size = address, layout, p_epoch, rank, size
        self.data_paths, self.incarnation_file, self.host_id = list(data_paths), incarnation_file, host_id
        self.d_epoch = 0
        self.has_digest = True  # frames and COMMITs have digests
        self.transport = ZmqTransport()
        whole = geometry_of(layout, num_blocks)
        content = np.random.default_rng(7).integers(0, 256, whole.num_bytes, dtype=np.uint8)
        self.whole = PoolIO(content, whole)  # the same for every rank, so that a test can compare
        self.blocks = tuple(range(num_blocks))
        self.replies = []  # every control message that came, in order
        self.seq = 0
        self.digests = {}

    def close(self):
        self.transport.close()

    def send(self, message):
        self.transport.send(self.address, encode_control(control_of(message)))

    def receive(self, timeout_s=0.01):
        for delivery in self.transport.receive(timeout_s):
            self.replies.append(parse_control(delivery.control))

    def wait_for(self, kind, match=lambda message: True, timeout_s=10.0, poll=None):
        """The first message of a kind that matches, past ones included."""
        end_s = time.monotonic() + timeout_s
        while True:
            for control in self.replies:
                message = getattr(control, kind)
                if control.WhichOneof("message") == kind and match(message):
                    return message
            assert time.monotonic() < end_s, f"no {kind}: {self.replies[-5:]}"
            if poll is not None:
                poll()
            self.receive()

    def hello_message(self, **changes):
        """A HELLO without a proof, with other values in the fields named."""
        heads = self.layout.heads_of(0, self.rank, self.size)
        fields = {
            "version": VERSION,
            "epoch": self.p_epoch,
            "layout": layout_message(self.layout),
            "tp_size": self.size,
            "tp_rank": self.rank,
            "head_first": heads.first,
            "head_count": heads.count,
            "capabilities": [DIGEST],
            "data_paths": self.data_paths,
            "host_id": self.host_id,
            "incarnation_file": self.incarnation_file,
            "sent_ns": time.monotonic_ns(),
        }
        return kv_pb2.Hello(**{**fields, **changes})

    def hello(self, poll=None, **changes):
        """Say HELLO, with other values in the fields named, and then what it is asked to prove; returns the answer."""
        sent = self.hello_message(**changes)
        self.send(sent)
        reply = self.wait_for("hello_reply", lambda reply: reply.echo_sent_ns == sent.sent_ns, poll=poll)
        assert not reply.offers and not reply.proof, "nothing is said to a stranger"
        sent.sent_ns += 1
        self.send(prove_challenge(sent, reply.challenge))
        reply = self.wait_for("hello_reply", lambda reply: reply.echo_sent_ns == sent.sent_ns, poll=poll)
        assert PROOFS.is_proved(reply, sent.number)
        self.d_epoch = reply.epoch
        return reply

    def reserve(self, key, prompt_len, *, capacity_len=None, data_path="", wait_ms=10_000):
        self.send(
            kv_pb2.Reserve(
                attempt=wire_attempt(key),
                epoch=self.p_epoch,
                prompt_len=prompt_len,
                capacity_len=capacity_len or prompt_len,
                wait_ms=wait_ms,
                data_path=data_path,
                tp_size=self.size,
                peer_epoch=self.d_epoch,
            )
        )

    def granted(self, key, poll=None, timeout_s=10.0):
        return self.wait_for("grant", lambda grant: grant.attempt == wire_attempt(key), poll=poll, timeout_s=timeout_s)

    def frame(self, grant, layer, first, count, **options):
        """Push those of some positions that are this rank's, of its heads of a layer."""
        heads = self.layout.pushed_heads(layer, self.rank, self.size)
        for own in self.layout.pushed_positions(layer, first, count, self.rank, self.size) if heads.count else ():
            self.any_frame(grant, layer, own.first, own.count, heads, **options)

    def any_frame(self, grant, layer, first, count, heads, *, data_path="inline", damage=False, is_written=False):
        """Push positions, whether or not they are this rank's."""
        span = KVRange(layer, first, count, heads.first, heads.count)
        order = self.layout.rows_per_block(layer)
        payload = self.whole.read(self.blocks, span, order)
        digest = self.whole.digest(self.blocks, span)
        totals = self.digests.setdefault((grant.epoch, grant.incoming_id), [0] * self.layout.num_layers)
        totals[layer] = (totals[layer] + digest) & MASK
        header = FrameHeader(
            d_epoch=grant.epoch,
            incoming_id=grant.incoming_id,
            attempt=grant.attempt.attempt,
            seq=self.seq,
            layer=layer,
            head_first=heads.first,
            head_count=heads.count,
            order_block_size=order,
            first=first,
            count=count,
            payload_bytes=len(payload),
            is_written=is_written,
            payload_digest=None if not self.has_digest else digest ^ 1 if damage else digest,
            payload_crc=None if self.has_digest or is_written else crc_of([payload]),
        )
        self.seq += 1
        self.transport.send_frame(self.address, encode_header(header), [] if is_written else [payload], data_path)
        if is_written:
            self.receive(0)  # with it the header leaves

    def push(self, grant, prompt_len, *, chunk_len=None):
        """Push every layer."""
        for layer in range(self.layout.num_layers):
            kept = self.layout.layers[layer].span(prompt_len)
            step = chunk_len or max(kept.count, 1)
            for first in range(kept.first, kept.stop, step):
                self.frame(grant, layer, first, min(step, kept.stop - first))

    def _totals(self, grant):
        return self.digests.get((grant.epoch, grant.incoming_id), [0] * self.layout.num_layers)

    def commit(self, grant, prompt_len, *, round=0):
        state = kv_pb2.SequenceState(first_token=7) if self.rank == 0 else None
        self.send(
            kv_pb2.Commit(
                epoch=grant.epoch,
                incoming_id=grant.incoming_id,
                attempt=grant.attempt,
                prompt_len=prompt_len,
                num_layers=self.layout.num_layers,
                layer_digests=self._totals(grant) if self.has_digest else [],
                state=state,
                prefill_end_ns=int(MonotonicClock().now_s() * 1e9),
                round=round,
                tp_rank=self.rank,
                tp_size=self.size,
                next_seq=self.seq,
            )
        )


def key_of(name, attempt=0):
    return AttemptKey(name, attempt)


BULK = KVLayout.of_attention(
    model_hash="model", num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32"
)
BULK_LEN = 2048


def push_bulk(address, request_id):
    """Hand BULK_LEN positions over in small frames; says how long that took."""
    prefill = ScriptedPrefill(address, BULK, num_blocks=BULK_LEN // BULK.block_size, p_epoch=time.monotonic_ns())
    prefill.hello()
    key = AttemptKey(request_id, 0)
    prefill.reserve(key, BULK_LEN)
    grant = prefill.granted(key)
    start_s = time.monotonic()
    prefill.push(grant, BULK_LEN, chunk_len=128)
    prefill.commit(grant, BULK_LEN)
    prefill.wait_for("commit_ack")
    print(time.monotonic() - start_s)
    prefill.close()


if __name__ == "__main__":
    push_bulk(*sys.argv[1:])
