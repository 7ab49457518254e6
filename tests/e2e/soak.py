"""Many requests through workers whose hand-off is hit by every kind of fault; every delivered token is checked.

The model is the engine tests' toy: exact integers, and every token depends on every KV entry, so one wrong, stale or
missing entry shows. This file plays the router: it retries a failed attempt on another pair and never repeats a token.
Faults strike by message (`faults.Injector`) and by state: `Soak._hunt` waits for an attempt in the state that was hit
least.
"""

import os
import queue
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError, RequestCancelled, WorkerLost
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.kvtransfer.receiver import service as incoming
from baton.kvtransfer.receiver import supervisor as receiver_child
from baton.kvtransfer.receiver.driver import ReceiverDriver
from baton.kvtransfer.transports.loopback import LoopbackHub
from baton.tests.e2e import fates
from baton.tests.e2e.faults import ORDERS, Fault
from baton.tests.e2e.flips import FlipBook
from baton.tests.e2e.soak_workers import BLOCK_SIZE, MAX_MODEL_LEN, NUM_DRAFTS, STATES, Decode, Prefill, state_of
from baton.tests.e2e.topology import QueueSink
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyConfig, ToyModel
from baton.tests.engine.toy_engine import EOS

MAX_ATTEMPTS = 6
END_S = 20.0
HUNT_S = 1.0
HUNT_LOOK_S = 0.0005
LOOK_S = 0.002  # where times are measured: more often, and those who look would be the load
LEASE_S = 0.8
MAX_RECEIVER_DEATHS = 3  # of one decode worker; then it is replaced, for the pauses between its incarnations grow
CONFIG = ToyConfig(vocab_size=24, max_model_len=MAX_MODEL_LEN)
NEVER = {(Fault.CANCEL, "draining")}  # it has gone away already
WORKER_FAULTS = (Fault.KILL_PREFILL, Fault.KILL_DECODE, Fault.KILL_BOTH, Fault.STOP_PREFILL)
INCOMING_FAULTS = (Fault.KILL_INCOMING, Fault.STOP_INCOMING)


@dataclass
class Ended:
    """What became of one request."""

    request: GenerationRequest
    token_ids: list[int]
    is_whole: bool
    num_attempts: int
    errors: list[BatonError]

    @property
    def has_failed(self):
        return not self.is_whole and len(self.errors) == MAX_ATTEMPTS


class Soak:
    """2 x 2 workers under fire.

    Args:
        tokenizer: of the toy model.
        injector: of faults by message.
        transport: policy for data paths, or "loopback".
        has_process: the incoming transfer has one of its own.
        prefix_cache: of prefill workers.
        strikes: what hunts may do; none: faults strike by message alone.
        hunt_every: requests that end between two hunts.
        config: of the hand-off, beside that.
    """

    def __init__(
        self,
        tokenizer,
        injector,
        *,
        transport="tcp",
        has_process=False,
        prefix_cache=True,
        strikes=ORDERS,
        hunt_every=15,
        **config,
    ):
        self.tokenizer, self.injector = tokenizer, injector
        self.model = ToyModel(config=CONFIG)
        self.has_process, self.is_raw, self.prefix_cache = has_process, transport == "tcp", prefix_cache
        self.hub = LoopbackHub() if transport == "loopback" else None
        times = {"lease_s": LEASE_S, "heartbeat_s": 0.1, "commit_timeout_s": 3.0, "ring_slots": 128}
        policy = "zmq" if self.hub else transport
        self.transfer = KVTransferConfig(transport=policy, max_receiver_deaths=1000, **{**times, **config})
        self.fatal = []
        self.book = FlipBook()
        self.strikes = Counter()  # (state, fault): attempts that were there when it struck
        self.hunted = Counter()  # (state, fault) of hunts that found their attempt
        self.cancels_ms = []
        self.running = {}  # attempt to (prefill, decode, sinks)
        self.d_epochs_dead = set()
        self.rng = random.Random(injector.seed)
        self.lock = threading.Lock()
        self._faults = [fault for fault in strikes if has_process or fault not in INCOMING_FAULTS]
        self._hunt_every = hunt_every
        self._num_ended = self._num_hunted = 0
        self._watch(flip_rate=injector.header_flip_rate)
        self._next_epoch = random.SystemRandom().getrandbits(48) << 8  # names files of this host
        self.prefill = [Prefill(self, self._epoch()) for _ in range(2)]
        self.decode = [Decode(self, self._epoch()) for _ in range(2)]
        self._timers = []
        self._is_over = False
        self._thread = threading.Thread(target=self._strike_on, daemon=True)
        self._broken = None
        self._thread.start()

    def close(self):
        self._is_over = True
        self._thread.join(30)
        for timer in self._timers:
            timer.join()
        for side in (*self.prefill, *self.decode):
            side.worker.close()
        self._end_watch()
        assert self._broken is None, self._broken
        assert not self.fatal, self.fatal

    def _watch(self, flip_rate):
        """Have every incoming transfer write down what became of frames."""
        file, self.fates_path = tempfile.mkstemp(prefix="baton-fates-")
        os.close(file)
        end = fates.watch(self.fates_path, flip_rate)
        module = receiver_child.MODULE
        incoming.ReceiverDriver = fates.WatchedDriver
        receiver_child.MODULE = "baton.tests.e2e.fates"
        variables = {fates.PATH_VARIABLE: self.fates_path, fates.FLIP_VARIABLE: str(flip_rate)}
        os.environ |= variables

        def end_watch():
            end()
            incoming.ReceiverDriver = ReceiverDriver
            receiver_child.MODULE = module
            for name in variables:
                del os.environ[name]

        self._end_watch = end_watch

    # The router's part

    def run(self, requests, num_at_once):
        """All of them; what became of each, in order."""
        with ThreadPoolExecutor(num_at_once) as threads:
            return list(threads.map(self._serve, requests))

    def _serve(self, request):
        delivered, errors = [], []
        for attempt in range(1, MAX_ATTEMPTS + 1):
            key = AttemptKey(request.key.request_id, attempt)
            try:
                self._attempt(replace(request, key=key), delivered)
                break
            except RequestCancelled:
                break
            except BatonError as failed:
                errors.append(failed)
                time.sleep(0.2 * attempt)
        else:
            attempt = MAX_ATTEMPTS + 1
        with self.lock:
            self._num_ended += 1
        is_whole = self._is_whole(request, delivered)
        return Ended(request, delivered, is_whole, attempt, errors)

    @staticmethod
    def _is_whole(request, delivered):
        return len(delivered) == request.sampling.max_tokens or (bool(delivered) and delivered[-1] == EOS)

    def _attempt(self, request, delivered):
        with self.lock:
            prefill, decode = self.rng.choice(self.prefill), self.rng.choice(self.decode)
            sinks = QueueSink(), QueueSink()
            self.running[request.key] = prefill, decode, sinks
        try:
            decode.worker.attend(request, sinks[1])
            prefill.worker.submit(request, decode.peer, sinks[0])
            self._read(sinks, delivered)
        except queue.Empty:
            state = state_of(prefill, decode, request.key)
            raise AssertionError(f"{request.key} hangs, {state}: {delivered} of {request}") from None
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
                    return
        for event in sinks[1].events(END_S):
            self._deliver(delivered, event.tokens.index, list(event.tokens.token_ids))
            if event.tokens.finish_reason:
                return
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
            request = decode.worker._requests.get(attempt) if decode.incoming.epoch == header.d_epoch else None
            table = None if request is None else request.sequence.table
            if table is not None:
                block = table.blocks[header.first // BLOCK_SIZE]
                decode.pool.blocks(header.layer)[block].view(torch.int64)[0, 0, header.first % BLOCK_SIZE, 0] ^= 1
                return True
        return False

    def _strike_on(self):
        try:
            while not self._is_over:
                if self.injector.orders:
                    self._obey(*self.injector.orders.popleft())
                elif self._is_hunting and self._num_ended >= self._num_hunted * self._hunt_every:
                    self._num_hunted += 1
                    self._hunt()
                else:
                    time.sleep(0.001)
        except BaseException as error:
            self._broken = error
            raise

    def _obey(self, fault, attempt, side):
        """A fault that a message drew."""
        with self.lock:
            found = self.running.get(attempt)
        if found is not None:
            self._strike(fault, attempt, found[0], found[1])
        elif fault is Fault.KILL_PREFILL and side in self.prefill:
            self._strike(fault, None, side, self.decode[0])
        elif fault is not Fault.CANCEL:
            self._strike(fault, None, *self._any_pair())

    @property
    def _is_hunting(self):
        return self.injector.is_on and bool(self._faults)

    def _hunt(self):
        """Wait for an attempt in the state where the fault drawn has struck least, and strike."""
        faults = [Fault.CANCEL] if Fault.CANCEL in self._faults and self.rng.random() < 0.5 else self._faults
        wanted = [(state, fault) for fault in faults for state in STATES if (fault, state) not in NEVER]
        least = min(self.strikes[where] for where in wanted)
        state, fault = self.rng.choice([where for where in wanted if self.strikes[where] == least])
        look_s = LOOK_S if set(self._faults) == {Fault.CANCEL} else HUNT_LOOK_S
        end_s = time.monotonic() + HUNT_S
        while time.monotonic() < end_s and self.injector.is_on:
            for key, prefill, decode in self._candidates(state):
                if state_of(prefill, decode, key) == state:
                    self.hunted[state, fault] += 1
                    self._strike(fault, key, prefill, decode)
                    return
            time.sleep(look_s)

    def _candidates(self, state):
        if state != "draining":
            with self.lock:
                found = [(key, prefill, decode) for key, (prefill, decode, _) in self.running.items()]
            self.rng.shuffle(found)
            return found
        with suppress(RuntimeError):  # a table changed while it was looked at
            return [(key, p, d) for p in self.prefill for d in self.decode for key in (*p.keys(), *d.keys())]
        return []

    def _strike(self, fault, key, prefill, decode):
        match fault:
            case Fault.CANCEL:
                self._cancel(key)
                return
            case Fault.KILL_INCOMING | Fault.STOP_INCOMING:
                if not self.has_process:
                    return
                if decode.num_receiver_deaths >= MAX_RECEIVER_DEATHS:
                    self._strike(Fault.KILL_DECODE, key, prefill, decode)
                    return
        self._count(fault, prefill, decode)
        if fault in (Fault.KILL_PREFILL, Fault.KILL_BOTH):
            self._replace(self.prefill, prefill, Prefill)
        if fault in (Fault.KILL_DECODE, Fault.KILL_BOTH):
            self._replace(self.decode, decode, Decode)
        if fault is Fault.STOP_PREFILL:
            in_write = self.transfer.transport == "shm" and self.rng.random() < 0.7
            prefill.stop(self.rng.uniform(0.1, 2.5) * self.transfer.lease_s, in_write=in_write)
        if fault in INCOMING_FAULTS:
            self._hit_incoming(decode, fault)

    def _count(self, fault, prefill, decode):
        """Every attempt that the fault strikes, by its state."""
        of_prefill = fault in (Fault.KILL_PREFILL, Fault.KILL_BOTH, Fault.STOP_PREFILL)
        for state in STATES:
            for key, p, d in self._candidates(state):
                is_struck = (of_prefill and p is prefill) or (fault is not Fault.STOP_PREFILL and d is decode)
                if fault is Fault.KILL_PREFILL:
                    is_struck = p is prefill
                if is_struck and state_of(p, d, key) == state:
                    self.strikes[state, fault] += 1

    def _cancel(self, attempt):
        with self.lock:
            found = self.running.get(attempt)
        if found is None:
            return
        prefill, decode, sinks = found
        state = state_of(prefill, decode, attempt)
        start_s = time.monotonic()
        for sink in sinks:
            sink.end(RequestCancelled("the client went away"))
        prefill.worker.cancel(attempt)
        decode.worker.cancel(attempt)
        if state is not None:
            self.strikes[state, Fault.CANCEL] += 1
        while prefill.holds(attempt) or decode.holds(attempt):
            is_disturbed = prefill not in self.prefill or decode not in self.decode
            is_disturbed |= max(prefill.standing_until_s, decode.stopped_until_s) > start_s
            if is_disturbed:
                return
            assert time.monotonic() - start_s < 10, f"{attempt} is held for 10 s after its cancel in {state}"
            time.sleep(LOOK_S)
        if state is not None:
            self.cancels_ms.append((1e3 * (time.monotonic() - start_s), state))

    def _replace(self, sides, side, make):
        if side not in sides:
            return
        new = make(self, self._epoch())
        with self.lock:
            sides[sides.index(side)] = new
        if make is Decode:
            self.d_epochs_dead.add(side.incoming.epoch)
        side.die()
        with self.lock:
            orphans = [(at, sinks) for *pair, sinks in self.running.values() for at in (0, 1) if pair[at] is side]
        for at, sinks in orphans:
            sinks[at].end(WorkerLost("the worker died"))

    def _hit_incoming(self, decode, fault):
        host = decode.incoming._host
        if not host.pid or decode not in self.decode:
            return
        self.d_epochs_dead.add(host.epoch)
        with suppress(ProcessLookupError):
            os.kill(host.pid, signal.SIGKILL if fault is Fault.KILL_INCOMING else signal.SIGSTOP)
        decode.num_receiver_deaths += 1
        if fault is Fault.KILL_INCOMING:
            decode.stopped_until_s = time.monotonic() + 1.0
            return
        pause_s = self.rng.uniform(0.1, 2.0) * self.transfer.lease_s
        decode.stopped_until_s = time.monotonic() + pause_s + 1.0
        timer = threading.Timer(pause_s, self._go_on, [host.pid])
        self._timers.append(timer)
        timer.start()

    @staticmethod
    def _go_on(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _any_pair(self):
        return self.rng.choice(self.prefill), self.rng.choice(self.decode)

    def _epoch(self):
        self._next_epoch += 1
        return self._next_epoch

    # What must hold

    def held(self):
        """What live workers hold of any request."""
        left = []
        for side in (*self.prefill, *self.decode):
            i = side.worker.inventory()
            if (
                i.num_blocks_free != i.num_blocks
                or i.num_requests_held
                or i.num_kv_receives
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

    def account(self):
        """(what became of damaged frames, what is wrong with that); when nothing is under way any more."""
        found, totals = fates.read(self.fates_path)
        counts, wrong = self.book.account(found, self.d_epochs_dead)
        wrong += [("a damaged message was believed", message) for message in self.book.controls_believed]
        by_fate = Counter()
        for (_, fate), count in totals.items():
            by_fate[fate] += count
        if by_fate[fates.Fate.DAMAGED] > by_fate[fates.Fate.HEADER]:
            wrong.append("a data path believed a damaged header")
        for decode in self.decode:  # the incoming transfer's own counts say the same, unless it died with some unsaid
            epoch = decode.first_epoch
            if epoch in self.d_epochs_dead:
                continue
            said = decode.incoming.inventory()
            wrong += [
                f"the incoming transfer counts {said[name]} as {name}, the log {totals[epoch, fate]}"
                for name, fate in fates.OF_COUNT.items()
                if said[name] != totals[epoch, fate]
            ]
        return {**counts, "headers on arrival": by_fate[fates.Fate.HEADER]}, by_fate, wrong


def make_requests(num_requests, seed, num_prompts=60, num_stems=12):
    """Requests whose prompts come again and again, many with a common beginning, with samplings of both kinds."""
    rng = random.Random(seed)

    def tokens(max_len):
        return tuple(rng.randrange(24) for _ in range(rng.randint(1, max_len)))

    stems = [tokens(40) for _ in range(num_stems)]
    kinds = []
    for index in range(num_prompts):
        prompt = (stems[index % num_stems] if index % 3 else ()) + tokens(20)
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
                tenant=rng.choice(("", "t1", "t2", "t3")),
            )
        )
    return requests


def expected_tokens(requests):
    """What each (prompt, sampling) must give, one token at a time and with nothing stored."""
    model = ToyModel(config=CONFIG)
    kinds = {(request.prompt_token_ids, request.sampling) for request in requests}
    return {(prompt, params): list(reference.generate(model, prompt, params, (EOS,))) for prompt, params in kinds}
