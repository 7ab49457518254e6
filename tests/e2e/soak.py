"""Many requests through workers whose hand-off is hit by every kind of fault; every delivered token is checked.

The model is the engine tests' toy: exact integers, and every token depends on every KV entry, so one wrong, stale or
missing entry shows. This file plays the router: it retries a failed attempt on another pair and never repeats a token.
"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError, RequestCancelled, WorkerLost
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.decode_worker.worker import DecodeWorker
from baton.engine.decode import DecodeRunner
from baton.engine.prefill import PrefillRunner
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.kvtransfer.landing import LandingService, landing_region
from baton.kvtransfer.landing_setup import LandingSetup, Listen
from baton.kvtransfer.over_zmq import ZmqTransport
from baton.kvtransfer.push import DecodePeer, PushService
from baton.prefill_worker.worker import PrefillWorker
from baton.tests.e2e.faults import Fault, FaultyTransport
from baton.tests.e2e.topology import QueueSink
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyConfig, ToyModel
from baton.tests.engine.toy_engine import EOS
from baton.worker.loading import request_limits

NUM_BLOCKS, BLOCK_SIZE, CHUNK_LEN, NUM_DRAFTS = 96, 4, 12, 2
MAX_ATTEMPTS = 6
END_S = 60.0
CONFIG = ToyConfig(vocab_size=24, max_model_len=96)


@dataclass
class Ended:
    """What became of one request."""

    request: GenerationRequest
    token_ids: list[int]
    is_whole: bool
    num_attempts: int
    error: BatonError | None


class Prefill:
    """One prefill worker of one life."""

    def __init__(self, soak, epoch):
        self.pool = KVPool(soak.model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, soak.model.device)
        self.transport = FaultyTransport(soak.connect(), soak.injector, soak.damage)
        self.transport.side = self
        clock = MonotonicClock()
        common = {"config": soak.transfer, "clock": clock, "pool": self.pool}
        self.push = PushService(layout=self.pool.layout, epoch=epoch, transport=self.transport, **common)
        self.worker = PrefillWorker(
            runner=PrefillRunner(soak.model, self.pool),
            pool=self.pool,
            tokenizer=soak.tokenizer,
            limits=request_limits(soak.model, max_model_len=96, num_draft_tokens=NUM_DRAFTS),
            push=self.push,
            chunk_len=CHUNK_LEN,
            max_num_seqs=16,
            max_queue_len=1024,
            clock=clock,
            on_fatal=soak.fatal.append,
        )
        self.worker.start()

    def die(self):
        """No abort, no lease, no word."""
        self.worker._loop.close()
        self.push.close()
        for run in tuple(self.worker._runs.values()):
            run.stream.end(WorkerLost("the prefill worker died"))

    def holds(self, key):
        return key in self.worker._runs


class Decode:
    """One decode worker of one life, its landing in a process of its own or on a thread."""

    def __init__(self, soak, epoch):
        layout = soak.model.kv_layout(BLOCK_SIZE)
        clock = MonotonicClock()
        setup = LandingSetup(
            epoch=epoch,
            layout=layout,
            num_blocks=NUM_BLOCKS,
            tp_size=1,
            listen=Listen(soak.control, "tcp://127.0.0.1:0", ("shm",) if soak.transfer.transport == "shm" else ()),
            config=soak.transfer,
        )
        if soak.has_process:
            region = landing_region([PoolGeometry(layout, NUM_BLOCKS)], soak.transfer)
            self.pool = KVPool(layout, NUM_BLOCKS, soak.model.device, memory=region.pool(0))
            self.landing = LandingService.in_process(region, setup)
        else:
            self.pool = KVPool(layout, NUM_BLOCKS, soak.model.device)
            transport = ZmqTransport(bind="tcp://127.0.0.1:0", config=soak.transfer)
            self.landing = LandingService.on_thread(
                pool=self.pool, layout=layout, epoch=epoch, transport=transport, config=soak.transfer, clock=clock
            )
        self.worker = DecodeWorker(
            runner=DecodeRunner(soak.model, self.pool, 16, NUM_DRAFTS),
            pool=self.pool,
            tokenizer=soak.tokenizer,
            limits=request_limits(soak.model, max_model_len=96, num_draft_tokens=NUM_DRAFTS),
            landing=self.landing,
            max_num_seqs=16,
            max_queue_len=1024,
            clock=clock,
            on_fatal=soak.fatal.append,
        )
        self.worker.start()

    @property
    def peer(self):
        return DecodePeer("decode", self.landing.address, self.landing.epoch)

    def die(self):
        """The process is gone, and its landing with it."""
        self.worker._loop.close()
        self.landing.close()
        for sequence in self.worker._scheduler.sequences():
            sequence.stream.end(WorkerLost("the decode worker died"))

    def holds(self, key):
        return self.worker._scheduler.get(key) is not None


class Soak:
    """2 x 2 workers under fire.

    Args:
        tokenizer: of the toy model.
        injector: of faults.
        transport: policy for lanes.
        has_process: the landing has one of its own.
        config: of the hand-off, beside that.
    """

    def __init__(
        self, tokenizer, injector, *, transport="zmq", has_process=False, num_prefill=2, num_decode=2, **config
    ):
        self.tokenizer, self.injector = tokenizer, injector
        self.model = ToyModel(config=CONFIG)
        self.control = "grpc" if transport == "grpc" else "zmq"
        self.has_process = has_process
        self.transfer = KVTransferConfig(
            transport=transport, lease_s=0.8, heartbeat_s=0.1, commit_timeout_s=3.0, ring_slots=128, **config
        )
        self.fatal = []
        self.rng = random.Random(1)
        self.lock = threading.Lock()
        self.next_epoch = 1000
        self.cancels_ms = []
        self.running = {}  # attempt to (prefill, decode, sinks)
        self.prefill = [Prefill(self, self._epoch()) for _ in range(2)]
        self.decode = [Decode(self, self._epoch()) for _ in range(2)]
        self.is_over = False
        self.orders = threading.Thread(target=self._obey, daemon=True)
        self.orders.start()

    def connect(self):
        return ZmqTransport(config=self.transfer)

    def close(self):
        self.is_over = True
        self.orders.join(30)
        for side in (*self.prefill, *self.decode):
            side.worker.close()
        assert not self.fatal, self.fatal

    # The router's part

    def run(self, requests, num_at_once):
        """All of them; what became of each, in order."""
        with ThreadPoolExecutor(num_at_once) as threads:
            return list(threads.map(self._serve, requests))

    def _serve(self, request):
        delivered = []
        error = None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            key = AttemptKey(request.key.request_id, attempt)
            try:
                is_whole = self._attempt(replace(request, key=key), delivered)
                return Ended(request, delivered, is_whole, attempt, None)
            except RequestCancelled:
                return Ended(request, delivered, False, attempt, None)
            except BatonError as failed:
                error = failed
                time.sleep(0.02 * attempt)
        return Ended(request, delivered, False, MAX_ATTEMPTS, error)

    def _attempt(self, request, delivered):
        with self.lock:
            prefill, decode = self.rng.choice(self.prefill), self.rng.choice(self.decode)
        sinks = QueueSink(), QueueSink()
        with self.lock:
            self.running[request.key] = prefill, decode, sinks
        try:
            decode.worker.attend(request, sinks[1])
            prefill.worker.submit(request, decode.peer, sinks[0])
            if prefill not in self.prefill or decode not in self.decode:
                raise WorkerLost("it died meanwhile")
            return self._read(sinks, delivered)
        finally:
            with self.lock:
                del self.running[request.key]
            prefill.worker.cancel(request.key)
            decode.worker.cancel(request.key)

    def _read(self, sinks, delivered):
        for event in sinks[0].events(END_S):
            if event.HasField("first_token"):
                self._deliver(delivered, 0, [event.first_token.token])
                if event.first_token.finish_reason:
                    return True
        for event in sinks[1].events(END_S):
            self._deliver(delivered, event.tokens.index, list(event.tokens.token_ids))
            if event.tokens.finish_reason:
                return True
        raise AssertionError("a stream ended without a reason")

    @staticmethod
    def _deliver(delivered, index, token_ids):
        """What was delivered is not delivered again, and has not changed."""
        assert index <= len(delivered)
        known = delivered[index : index + len(token_ids)]
        assert known == token_ids[: len(known)], "an attempt contradicts the one before"
        delivered.extend(token_ids[len(known) :])

    # Faults that concern more than a message

    def damage(self, header, attempt):
        """Flip a bit of a payload that was written into a decode worker's pool; False if it is gone again."""
        for decode in self.decode:
            sequence = decode.worker._scheduler.get(attempt) if decode.landing.epoch == header.d_epoch else None
            table = None if sequence is None else sequence.table
            if table is not None:
                block = table.blocks[header.first // BLOCK_SIZE]
                decode.pool.blocks(header.layer)[block].view(torch.int64)[0, 0, header.first % BLOCK_SIZE, 0] ^= 1
                return True
        return False

    def _obey(self):
        while not self.is_over:
            if not self.injector.orders:
                time.sleep(0.001)
                continue
            fault, attempt, side = self.injector.orders.popleft()
            match fault:
                case Fault.CANCEL:
                    self._cancel(attempt)
                case Fault.KILL_PREFILL:
                    self._replace(self.prefill, side, Prefill)
                case Fault.KILL_DECODE:
                    self._replace(self.decode, self.rng.choice(self.decode), Decode)
                case Fault.KILL_LANDING | Fault.STOP_LANDING:
                    self._hit_landing(self.rng.choice(self.decode), fault)

    def _cancel(self, attempt):
        with self.lock:
            found = self.running.get(attempt)
        if found is None:
            return
        prefill, decode, sinks = found
        start_s = time.monotonic()
        for sink in sinks:
            sink.end(RequestCancelled("the client went away"))
        prefill.worker.cancel(attempt)
        decode.worker.cancel(attempt)
        while prefill.holds(attempt) or decode.holds(attempt):
            if time.monotonic() - start_s > 5 or prefill not in self.prefill or decode not in self.decode:
                return
            time.sleep(0.0005)
        self.cancels_ms.append(1e3 * (time.monotonic() - start_s))

    def _replace(self, sides, side, make):
        if side not in sides:
            return
        new = make(self, self._epoch())
        with self.lock:
            sides[sides.index(side)] = new
        side.die()

    def _hit_landing(self, decode, fault):
        pid = getattr(decode.landing._host, "pid", None)
        if not self.has_process or not pid:
            return
        try:
            os.kill(pid, signal.SIGKILL if fault is Fault.KILL_LANDING else signal.SIGSTOP)
        except ProcessLookupError:
            return
        if fault is Fault.STOP_LANDING:
            threading.Timer(self.rng.uniform(0.05, 1.5), self._go_on, [pid]).start()

    @staticmethod
    def _go_on(pid):
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def _epoch(self):
        self.next_epoch += 1
        return self.next_epoch

    # What must hold

    def held(self):
        """What live workers hold of any request."""
        left = []
        for side in (*self.prefill, *self.decode):
            i = side.worker.inventory()
            if (
                i.num_blocks_free != i.num_blocks
                or i.num_attends
                or i.num_landings
                or i.num_slots_in_use
                or i.num_blocks_quarantined
            ):
                left.append(i)
        return left

    def wait_idle(self, timeout_s):
        """Seconds until nobody holds anything."""
        start_s = time.monotonic()
        while left := self.held():
            assert time.monotonic() - start_s < timeout_s, left
            time.sleep(0.01)
        return time.monotonic() - start_s


def make_requests(num_requests, seed, num_prompts=60):
    """Requests whose prompts come again and again, with samplings of both kinds."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(24) for _ in range(rng.randint(1, 60))) for _ in range(num_prompts)]
    kinds = []
    for prompt in prompts:
        sampled = rng.random() < 0.5
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=0.9 if sampled else 0.0,
            seed=rng.randrange(1000),
        )
        kinds.append((prompt, sampling))
    requests = []
    for index in range(num_requests):
        prompt, sampling = kinds[rng.randrange(num_prompts)]
        requests.append(
            GenerationRequest(
                key=AttemptKey(f"s{seed}-{index}", 1),
                prompt_token_ids=prompt,
                sampling=sampling,
                deadline_s=1e12,
                num_draft_tokens=NUM_DRAFTS,
                tenant="" if rng.random() < 0.5 else f"t{rng.randrange(200)}",
            )
        )
    return requests


def expected_tokens(requests):
    """What each (prompt, sampling) must give, one token at a time and with nothing stored."""
    model = ToyModel(config=CONFIG)
    kinds = {(request.prompt_token_ids, request.sampling) for request in requests}
    return {(prompt, params): list(reference.generate(model, prompt, params, (EOS,))) for prompt, params in kinds}
