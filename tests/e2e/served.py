"""A whole deployment on one event loop: Baton's router over real gRPC, real workers, deaths on demand.

No Ray and no processes: a worker dies by losing its connections, its threads and its heartbeats at once, without a
word. `hold` keeps what workers say from the router, so that a death comes at a chosen token.
"""

import asyncio
import itertools
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio

from baton.client import AsyncBatonClient
from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.requests.request import TokenLogprobs
from baton.decode_worker.service import DecodeService, _Attends
from baton.prefill_worker.service import PrefillService, _Runs
from baton.proto import wire, worker_pb2, worker_pb2_grpc
from baton.proto.stream_mux_wire import End, decode_frame, prefill_frame
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer
from baton.tests.e2e.topology import DecodeSide, PrefillSide
from baton.worker.stream_mux import StreamMux, WriteCoalescer

MODEL = "tiny"
HEARTBEAT_S = 0.1
EPOCHS = itertools.count(5000)


class Hold:
    """What of workers' words reaches the router, for first attempts; open from the start.

    Attributes:
        num_tokens: of an answer, beyond which the decode worker is not heard; None: all are.
        first_token, done: whether the prefill worker's are.
        held: decode streams that have something to say and are not heard.
    """

    def __init__(self):
        self.held = set()
        self.open()

    def open(self):
        self.num_tokens = None
        self.first_token = self.done = True

    def passes(self, event):
        if isinstance(event, worker_pb2.DecodeEvent) and not event.HasField("first_token"):
            if self.num_tokens is None or not event.HasField("tokens"):
                return True
            return event.tokens.index + len(event.tokens.token_ids) <= self.num_tokens
        if event.HasField("first_token"):
            return self.first_token
        return not event.HasField("done") or self.done


class HeldStream:
    """A stream with the hold before it. What is held waits until the stream is cancelled."""

    def __init__(self, stream, hold):
        self.ended = False
        self._stream, self._hold = stream, hold
        self._loop, self._said = asyncio.get_running_loop(), asyncio.Queue()
        self._passing = asyncio.create_task(self._pass())

    def emit(self, event):
        self._put(event)

    def end(self, error=None):
        if not self.ended:
            self.ended = True
            self._put(End(error))

    def cancel(self):
        self._passing.cancel()

    def _put(self, said):
        with suppress(RuntimeError):  # a closed loop has no reader left
            self._loop.call_soon_threadsafe(self._said.put_nowait, said)

    async def _pass(self):
        try:
            while not isinstance(said := await self._said.get(), End):
                while not self._hold.passes(said):
                    if isinstance(said, worker_pb2.DecodeEvent):
                        self._hold.held.add(self)
                    await asyncio.sleep(0.002)
                self._hold.held.discard(self)
                self._stream.emit(said)
            self._stream.end(said.error)
        finally:
            self._hold.held.discard(self)


class HeldRole:
    """What a worker does with streams (`stream_mux.StreamRole`), with the hold before those of first attempts."""

    def __init__(self, role, hold):
        self.read, self.check = role.read, role.check
        self._role, self._hold, self._held = role, hold, {}

    def begin(self, message, attempt, stream):
        if attempt.key.attempt == 1:
            self._held[stream] = HeldStream(stream, self._hold)
        try:
            self._role.begin(message, attempt, self._held.get(stream, stream))
        except BaseException:  # the stream mux ends the stream itself
            if stream in self._held:
                self._held.pop(stream).cancel()
            raise

    def cancel(self, key, stream):
        held = self._held.pop(stream, stream)
        if held is not stream:
            held.cancel()
        if not held.ended:
            self._role.cancel(key, held)


class HeldDecode(DecodeService):
    hold = None

    async def AttendAll(self, request_iterator, context):
        role = HeldRole(_Attends(self._worker, self._clock), self.hold)
        await StreamMux(role, decode_frame, self._worker.write_coalescer, self._epoch).serve(context)


class HeldPrefill(PrefillService):
    hold = None

    async def RunAll(self, request_iterator, context):
        role = HeldRole(_Runs(self._worker, self._clock), self.hold)
        await StreamMux(role, prefill_frame, WriteCoalescer(), self._epoch).serve(context)


@dataclass
class Answer:
    """What a client was given of one answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str = ""
    stats: object = None


class Served:
    """A router and its workers; see `served`."""

    def __init__(self, router, model, tokenizer, num_drafts, transfer):
        self.router = router
        self.address = f"127.0.0.1:{router.port}"
        self.hold = Hold()
        self.sides = {}  # by worker id
        self.fatal = []
        self._servers = {}
        self._model, self._tokenizer, self._num_drafts = model, tokenizer, num_drafts
        self._transfer = transfer
        self._silent = set()
        self._beating = asyncio.create_task(self._beat())

    async def add(self, role, worker_id):
        common = {"num_blocks": 512, "block_size": 16, "transfer": self._transfer, "fatal": self.fatal.append}
        epoch, clock = next(EPOCHS), MonotonicClock()
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        if role == "prefill":
            side = PrefillSide(self._model, self._tokenizer, epoch=epoch, chunk_len=32, prefix_cache=True, **common)
            service = HeldPrefill(side.worker, clock, epoch)
            worker_pb2_grpc.add_PrefillServicer_to_server(service, server)
        else:
            side = DecodeSide(
                self._model, self._tokenizer, epoch=epoch, num_drafts=self._num_drafts, max_num_seqs=16, **common
            )
            service = HeldDecode(side.worker, epoch, clock)
            worker_pb2_grpc.add_DecodeServicer_to_server(service, server)
        service.hold = self.hold
        side.role, side.epoch, side.worker_id = role, epoch, worker_id
        side.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self.sides[worker_id], self._servers[worker_id] = side, server
        self.router.members.heartbeat(self._state(side))
        return side

    def _state(self, side):
        return worker_pb2.WorkerState(
            worker_id=side.worker_id,
            role=side.role,
            epoch=side.epoch,
            address=side.address,
            kv_address=side.incoming.address if side.role == "decode" else "",
            model=MODEL,
            max_model_len=512,
            num_draft_tokens=self._num_drafts,
            block_size=16,
            numerics="default",
            dtype="float64",
            inventory=side.worker.inventory(),
            can_prefill=side.role == "decode",
        )

    async def _beat(self):
        while True:
            for worker_id, side in tuple(self.sides.items()):
                if worker_id not in self._silent:
                    self.router.members.heartbeat(self._state(side))
            await asyncio.sleep(HEARTBEAT_S)

    async def kill(self, worker_id):
        """It is gone: threads, connections, heartbeats, leases."""
        side, server = self.sides.pop(worker_id), self._servers.pop(worker_id)
        await asyncio.to_thread(side.worker._loop.close)
        if side.role == "decode":
            await asyncio.to_thread(side.worker._runner.drain)
            await asyncio.to_thread(side.incoming.close)
        else:
            await asyncio.to_thread(side.push.close)
        await server.stop(None)

    def silence(self, worker_id):
        """It is not heard of, and does not answer, but lives."""
        self._silent.add(worker_id)

    async def ask(self, sampling, token_ids, answers=None):
        """One request to its end; one Answer for each of its answers, into `answers` as they grow."""
        answers = {} if answers is None else answers
        async with AsyncBatonClient(self.address, timeout_s=60.0) as client:
            async for chunk in client.generate(token_ids=token_ids, sampling=sampling):
                answer = answers.setdefault(chunk.choice, Answer())
                assert chunk.index == len(answer.token_ids) or not chunk.token_ids, "a gap, or a token twice"
                answer.token_ids += chunk.token_ids
                answer.text += chunk.text
                answer.logprobs += map(wire.logprobs_from_proto, chunk.logprobs)
                answer.prompt_logprobs += map(wire.logprobs_from_proto, chunk.prompt_logprobs)
                if chunk.HasField("finish"):
                    answer.reason, answer.stats = chunk.finish.reason, chunk.finish.stats
        return [answers[choice] for choice in sorted(answers)]

    async def wait_idle(self, timeout_s=8.0):
        """Until no worker that lives holds anything."""
        async with asyncio.timeout(timeout_s):
            while not all(_is_idle(side.worker.inventory()) for side in self.sides.values()):
                await asyncio.sleep(0.02)

    async def close(self):
        self.hold.open()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self.router.stop(0.0)
        for server in self._servers.values():
            await server.stop(None)
        for side in self.sides.values():
            await asyncio.to_thread(side.worker.close)
        assert not self.fatal, self.fatal


def _is_idle(inventory):
    return (
        inventory.num_blocks_free == inventory.num_blocks
        and inventory.num_requests_held == 0
        and inventory.num_kv_receives == 0
        and inventory.num_slots_in_use == 0
        and inventory.num_blocks_quarantined == 0
    )


@asynccontextmanager
async def served(model, tokenizer, num_prefill=2, num_decode=2, *, num_drafts=2, transfer=None, **config):
    """A running deployment: workers "prefill-0" ... and "decode-0" ...

    All share one process: where that is busy for long, none is lost, unless a test sets `alive_s`.
    """
    values = {"host": "127.0.0.1", "port": 0, "max_queue_len": 256, "request_timeout_s": 60.0, "alive_s": 30.0} | config
    router = RouterServer(RouterConfig(**values), ServedModel(MODEL, tokenizer, model.config.vocab_size))
    await router.start()
    running = Served(router, model, tokenizer, num_drafts, transfer or KVTransferConfig())
    try:
        for index in range(num_prefill):
            await running.add("prefill", f"prefill-{index}")
        for index in range(num_decode):
            await running.add("decode", f"decode-{index}")
        yield running
    finally:
        await running.close()
