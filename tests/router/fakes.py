"""Workers that follow a script, in this process over real gRPC, and a router in front of them."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.core.clock import MonotonicClock
from baton.core.errors import TransferFailed
from baton.core.requests.tokenizer import Tokenizer
from baton.core.tls_files import TlsWatch
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, wire, worker_pb2, worker_pb2_grpc
from baton.proto.secure_channel import SecureChannels, server_credentials
from baton.proto.stream_mux_wire import decode_frame, prefill_frame
from baton.router.attempt.migration import MigrationConfig
from baton.router.attempt.request_run import LINGER_S
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer
from baton.tests.inside import router_channel
from baton.tests.router.fake_stream_muxes import serve_mux

MODEL = "toy"
OFF = MigrationConfig(max_migrations=0)
EPOCHS = itertools.count(1000)


def toy_tokenizer():
    """One token per byte, and an end-of-sequence token, 256."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    return Tokenizer(fast, (256,))


TOKENIZER = toy_tokenizer()


@dataclass
class Script:
    """What the workers do with a request. The answer is `answer`'s bytes, `step` tokens per decode event."""

    answer: str = "hello world"
    step: int = 2
    first_delay_s: float = 0.0
    done_delay_s: float = 0.0
    token_delay_s: float = 0.0
    finish_at_first: str = ""
    prefill_error: BaseException | None = None
    prefill_error_after_first: BaseException | None = None
    prefill_fails_when: asyncio.Event | None = None  # then; absent: a moment after its first token
    decode_error: BaseException | None = None
    decode_error_after: int = 0  # tokens
    decode_ends_when: asyncio.Event | None = None  # after some tokens; gRPC drops what was not read by then
    prefill_hangs: bool = False
    decode_hangs_after: int | None = None
    handed_off: bool = True
    decode_before_first: bool = False
    events: list[worker_pb2.DecodeTokens] | None = None  # DecodeTokens, sent as they are
    events_end: bool = False  # then the stream ends well; otherwise it waits to be cancelled
    attending_epoch: int | None = None
    no_done: bool = False
    no_finish: int = 0  # attempts, the first ones
    attempt_errors: dict[int, BaseException] = field(default_factory=dict)  # at prefill, by attempt
    errors_after_first: bool = False
    attempt_answers: dict[int, str] = field(default_factory=dict)
    refused_pairs: dict[tuple[str, str], str] = field(default_factory=dict)  # (prefill, decode) to the reason
    logprobs: Callable[[int], inference_pb2.TokenLogprobs] | None = None  # of a token, for requests that ask
    forgets_forced: bool = False  # as a worker of an older build would
    hung: set[str] = field(default_factory=set)  # workers that report and answer nothing
    tokenizer: Tokenizer = TOKENIZER  # by which an answer is tokens


@dataclass
class Seen:
    """What a worker saw of one request."""

    request: object
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    hang: asyncio.Event = field(default_factory=asyncio.Event)


class Bench:
    """Both roles share the script and what they know of each attempt."""

    def __init__(self):
        self.script = Script()
        self.first_sent = {}

    def sent(self, request):
        key = (request.attempt.request_id, request.attempt.attempt)
        return self.first_sent.setdefault(key, asyncio.Event())


class FakeWorker:
    """Either role: a gRPC server, heartbeats on demand, and a record of what was asked."""

    def __init__(self, bench, role, worker_id, tls=None, **state):
        self.bench = bench
        self.role = role
        self.worker_id = worker_id
        self.epoch = next(EPOCHS)
        self.seen = []
        self.restarts = []
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_PrefillServicer_to_server(Prefill(self), self.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(Decode(self), self.server)
        admin_pb2_grpc.add_AdminServicer_to_server(Admin(self), self.server)
        place = "127.0.0.1:0"
        is_secure = tls is not None and tls.is_on
        self.port = (
            self.server.add_secure_port(place, server_credentials(TlsWatch(tls)))
            if is_secure
            else self.server.add_insecure_port(place)
        )
        self.overrides = state
        self.inventory = {}  # more of it
        self.naming = None  # a PrefixNaming, if it keeps prefixes
        self.watch = None  # then what serves WatchPrefixes
        self.num_cached_tokens = 0  # what it says of a prompt that it computes as a decode worker

    @property
    def script(self):
        return self.bench.script

    def state(self):
        state = worker_pb2.WorkerState(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            address=f"127.0.0.1:{self.port}",
            kv_address="tcp://127.0.0.1:1" if self.role == "decode" else "",
            model=MODEL,
            max_model_len=200,
            num_draft_tokens=2,
            block_size=16,
            numerics="default",
            dtype="float32",
            inventory=worker_pb2.Inventory(num_blocks=10, num_blocks_free=10, num_requests_held=len(self.running())),
        )
        for name, value in self.overrides.items():
            setattr(state, name, value)
        for name, value in self.inventory.items():
            setattr(state.inventory, name, value)
        if self.naming is not None:
            state.prefix_naming.CopyFrom(self.naming)
        return state

    def running(self):
        return [seen for seen in self.seen if not seen.ended.is_set()]

    @asynccontextmanager
    async def record(self, request, context):
        seen = Seen(request)
        self.seen.append(seen)
        try:
            yield seen
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        finally:
            seen.ended.set()


async def watched(role, worker, request, context):
    if worker.role != role or worker.watch is None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no prefixes here")
    await worker.watch(request, context)


class Prefill(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker):
        self.worker = worker

    async def WatchPrefixes(self, request, context):
        await watched("prefill", self.worker, request, context)

    async def RunAll(self, request_iterator, context):
        await serve_mux(self.run, prefill_frame, self.worker.epoch, context)

    async def run(self, request, context):
        script = self.worker.script
        received_ns = now_ns()
        hangs = script.prefill_hangs  # whatever a test that sees this request changes before it gets there
        async with self.worker.record(request, context) as seen:
            await asyncio.sleep(script.first_delay_s)
            if script.prefill_error is not None:
                await wire.abort_with(context, script.prefill_error)
            attempt_error = script.attempt_errors.get(request.attempt.attempt)
            refused = script.refused_pairs.get((self.worker.worker_id, request.decode.worker_id))
            if refused:
                attempt_error = TransferFailed("the incoming transfer was refused", pair_refused=refused)
            if attempt_error is not None and not script.errors_after_first:
                await wire.abort_with(context, attempt_error)
            if hangs or script.prefill_hangs or self.worker.worker_id in script.hung:
                await seen.hang.wait()
            answer = script.attempt_answers.get(request.attempt.attempt, script.answer)
            token_ids = script.tokenizer.encode(answer)
            token = token_ids[request.num_forced_tokens]
            is_last = 0 < request.num_forced_tokens == len(token_ids[: request.sampling.max_tokens]) - 1
            sent_ns = now_ns()
            sixth_ms = (sent_ns - received_ns) / 6e6
            first = worker_pb2.FirstToken(
                token=token,
                index=0 if script.forgets_forced else request.num_forced_tokens,
                finish_reason="length" if is_last else script.finish_at_first,
                queue_ms=sixth_ms,
                grant_wait_ms=2 * sixth_ms,
                prefill_ms=3 * sixth_ms,
                sent_ns=sent_ns,
                received_ns=received_ns,
                num_cached_tokens=max(0, len(request.prompt_token_ids) - 2),
            )
            if script.logprobs is not None and request.sampling.HasField("logprobs"):
                first.logprobs.CopyFrom(script.logprobs(token))
            if script.logprobs is not None and request.sampling.HasField("prompt_logprobs"):
                reports = [script.logprobs(token) for token in request.prompt_token_ids[1:]]
                event = worker_pb2.PrefillEvent(prompt_logprobs=worker_pb2.PromptLogprobs(tokens=reports))
                await context.write(event)
            if script.decode_before_first:
                self.worker.bench.sent(request).set()
                await asyncio.sleep(0.1)
            await context.write(worker_pb2.PrefillEvent(first_token=first))
            self.worker.bench.sent(request).set()
            if attempt_error is not None:
                await wire.abort_with(context, attempt_error)
            if script.prefill_error_after_first is not None:
                await (asyncio.sleep(0.05) if script.prefill_fails_when is None else script.prefill_fails_when.wait())
                await wire.abort_with(context, script.prefill_error_after_first)
            await asyncio.sleep(script.done_delay_s)
            if not script.no_done:
                handed_off = script.handed_off and not first.finish_reason
                done = worker_pb2.PrefillDone(kv_bytes_pushed=4096, handed_off=handed_off)
                await context.write(worker_pb2.PrefillEvent(done=done))


class Decode(worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker):
        self.worker = worker

    async def WatchPrefixes(self, request, context):
        await watched("decode", self.worker, request, context)

    async def AttendAll(self, request_iterator, context):
        said = self.worker.script.attending_epoch
        await serve_mux(self.attend, decode_frame, self.worker.epoch if said is None else said, context)

    async def attend(self, request, context):
        script = self.worker.script
        # Whatever a test that sees this request, or its tokens, changes for the next one before it gets there.
        hangs, hangs_after = script.prefill_hangs, script.decode_hangs_after
        async with self.worker.record(request, context) as seen:
            if script.decode_error is not None and script.decode_error_after == 0:
                await wire.abort_with(context, script.decode_error)
            if self.worker.worker_id in script.hung:
                await seen.hang.wait()
            if request.prefill_here:
                await self.first_token(request, context, seen, hangs)
                if script.finish_at_first:
                    return
            else:
                await self.worker.bench.sent(request).wait()
            if request.attempt.attempt in script.attempt_errors:
                await seen.hang.wait()
            if script.events is not None:
                for tokens in script.events:
                    await context.write(worker_pb2.DecodeEvent(tokens=tokens))
                if not script.events_end:
                    await seen.hang.wait()
                return
            await self.answer(request, context, seen, hangs_after)

    async def first_token(self, request, context, seen, hangs):
        """What a prefill worker would have said."""
        script, received_ns = self.worker.script, now_ns()
        await asyncio.sleep(script.first_delay_s)
        if script.prefill_error is not None:
            await wire.abort_with(context, script.prefill_error)
        if hangs or script.prefill_hangs:
            await seen.hang.wait()
        token = script.tokenizer.encode(script.answer)[request.num_forced_tokens]
        first = worker_pb2.FirstToken(
            token=token,
            index=request.num_forced_tokens,
            finish_reason=script.finish_at_first,
            received_ns=received_ns,
            sent_ns=now_ns(),
            num_cached_tokens=self.worker.num_cached_tokens,
        )
        first.prefill_ms = (first.sent_ns - received_ns) / 1e6
        if script.logprobs is not None and request.sampling.HasField("logprobs"):
            first.logprobs.CopyFrom(script.logprobs(token))
        if script.logprobs is not None and request.sampling.HasField("prompt_logprobs"):
            reports = [script.logprobs(token) for token in request.prompt_token_ids[1:]]
            event = worker_pb2.DecodeEvent(prompt_logprobs=worker_pb2.PromptLogprobs(tokens=reports))
            await context.write(event)
        await context.write(worker_pb2.DecodeEvent(first_token=first))

    async def answer(self, request, context, seen, hangs_after):
        script = self.worker.script
        token_ids = script.tokenizer.encode(script.answer)[: request.sampling.max_tokens]
        num_steps, num_forced = 0, request.num_forced_tokens
        if 0 < num_forced == len(token_ids) - 1:  # it ends at its first token
            await seen.hang.wait()
        for index in range(num_forced + 1, len(token_ids), script.step):
            error = script.decode_error
            if error is not None and index > script.decode_error_after:
                assert script.decode_ends_when is not None, "say when: gRPC drops what is not read by then"
                await script.decode_ends_when.wait()
                await wire.abort_with(context, error)
            if hangs_after is not None and index > hangs_after:
                await seen.hang.wait()
            await asyncio.sleep(script.token_delay_s)
            num_steps += 1
            tokens = decode_tokens(index, token_ids[index : index + script.step])
            if script.logprobs is not None and request.sampling.HasField("logprobs"):
                tokens.logprobs.extend(map(script.logprobs, tokens.token_ids))
            if index + script.step >= len(token_ids) and request.attempt.attempt > script.no_finish:
                tokens = finished(tokens, len(token_ids) - num_forced - 1, num_steps)
            await context.write(worker_pb2.DecodeEvent(tokens=tokens))
        if request.attempt.attempt <= script.no_finish and script.decode_ends_when is not None:
            await script.decode_ends_when.wait()


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, worker):
        self.worker = worker

    async def SetSpeculation(self, request, context):
        self.worker.speculation = request.mode
        told = admin_pb2.WorkerSpeculation(worker_id=self.worker.worker_id)
        told.speculation.auto = request.mode.auto
        told.speculation.num_draft_tokens = request.mode.num_draft_tokens
        return admin_pb2.SetSpeculationReply(workers=[told])

    async def Restart(self, request, context):
        self.worker.restarts.append(request.epoch)
        return admin_pb2.RestartReply(ending=True)

    async def Inventory(self, request, context):
        return admin_pb2.InventoryReply(workers=[admin_pb2.WorkerStatus(state=self.worker.state(), alive=True)])


def now_ns():
    return int(MonotonicClock().now_s() * 1e9)


def decode_tokens(index, token_ids):
    return worker_pb2.DecodeTokens(index=index, token_ids=token_ids)


def finished(tokens, num_emitted, num_steps=1, reason="length"):
    tokens.finish_reason = reason
    tokens.stats.CopyFrom(
        worker_pb2.DecodeStats(
            num_verify_steps=num_steps,
            num_draft_tokens=2 * num_steps,
            num_accepted_tokens=num_emitted - num_steps,
            num_emitted_tokens=num_emitted,
            kv_bytes_landed=4096,
            kv_bytes_landed_before_prefill_end=1024,
            handoff_ms=4.0,
        )
    )
    return tokens


class Cluster:
    """A router and fake workers that report to it."""

    def __init__(self, router):
        self.router = router
        self.bench = Bench()
        self.workers = []
        self.silent = set()
        self.address = f"127.0.0.1:{router.port}"
        self.tls = router.config.security.tls
        options = (("grpc.use_local_subchannel_pool", 1),)
        self.channel = SecureChannels(self.tls).open_aio(f"127.0.0.1:{router.admin_port}", options)
        self._heartbeats = asyncio.create_task(self._beat())

    @property
    def script(self):
        return self.bench.script

    async def add(self, role, worker_id, **state):
        worker = FakeWorker(self.bench, role, worker_id, self.tls, **state)
        await worker.server.start()
        self.workers.append(worker)
        self.router.members.heartbeat(worker.state())
        return worker

    def of(self, role):
        return [worker for worker in self.workers if worker.role == role]

    async def _beat(self):
        while True:
            await asyncio.sleep(0.1)
            for worker in tuple(self.workers):
                if worker.worker_id not in self.silent:
                    await self.report(worker.state(), timeout=2.0)

    async def report(self, state, by=None, **options):
        """A heartbeat, proved by the worker that it names, or by another one."""
        by = by or state
        channel = router_channel(self.channel, by.role, by.worker_id, self.router.callee)
        return await worker_pb2_grpc.MembershipStub(channel).Heartbeat(state, **options)

    def num_open(self):
        """Requests at the router."""
        (gauge,) = self.router.metrics.num_streams_open.collect()
        return gauge.samples[0].value

    async def idle(self, timeout_s=LINGER_S - 0.1):
        """Wait until no worker has a stream, and the router no request, so that it has counted how all ended.

        Returns what each worker saw, by role. Without a time of its own, legs must not have been left to linger.
        """
        async with asyncio.timeout(timeout_s):
            while self.num_open() or any(worker.running() for worker in self.workers):
                await asyncio.sleep(0.005)
        return [[seen for worker in self.of(role) for seen in worker.seen] for role in ("prefill", "decode")]

    async def close(self):
        self._heartbeats.cancel()
        await asyncio.gather(self._heartbeats, return_exceptions=True)
        await self.channel.close()
        await self.router.stop(0.0)
        for worker in self.workers:
            await worker.server.stop(None)


@asynccontextmanager
async def cluster(num_prefill=1, num_decode=1, tokenizer=TOKENIZER, **config):
    """A running cluster of fakes. A test in which a worker falls silent says with `alive_s` how soon that counts."""
    values = {"host": "127.0.0.1", "port": 0, "max_queue_len": 64, "request_timeout_s": 20.0, "alive_s": 30.0} | config
    router = RouterServer(RouterConfig(**values), ServedModel(MODEL, tokenizer, tokenizer.vocab_size))
    await router.start()
    running = Cluster(router)
    running.script.tokenizer = tokenizer
    try:
        for index in range(num_prefill):
            await running.add("prefill", f"prefill-{index}")
        for index in range(num_decode):
            await running.add("decode", f"decode-{index}")
        yield running
    finally:
        await running.close()
