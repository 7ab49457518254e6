"""The workers of a soak: Baton's own, with faults at their prefill side and a watch at their transfer."""

import threading
import time

from baton.core.clock import MonotonicClock
from baton.core.kv_transports import control_channel
from baton.decode_worker.worker import DecodeWorker
from baton.engine.sequence import Phase
from baton.engine.step.runner import Runner
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import ReceiverService, receiver_region
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.service import DecodePeer, PushService
from baton.kvtransfer.transports.registry import bind_address, connecting_transport, listening_transport
from baton.prefill_worker.worker import PrefillWorker
from baton.tests.e2e.faults import FaultyTransport
from baton.worker.loading import request_limits

NUM_BLOCKS, BLOCK_SIZE, CHUNK_LEN, NUM_DRAFTS = 96, 4, 12, 2
NUM_SLOTS = 5  # fewer than incoming transfers, so that what is complete waits
MAX_MODEL_LEN = 96
IN_WRITE = "in a write"


def worker_arguments(soak, pool, clock):
    return {
        "pool": pool,
        "tokenizer": soak.tokenizer,
        "limits": request_limits(soak.model, max_model_len=MAX_MODEL_LEN, num_draft_tokens=NUM_DRAFTS),
        "max_num_batched_tokens": CHUNK_LEN,
        "max_queue_len": 1024,
        "clock": clock,
        "on_fatal": soak.fatal.append,
    }


class Prefill:
    """One prefill worker of one incarnation."""

    def __init__(self, soak, epoch):
        self.epoch = epoch
        self.standing_until_s = self._pause_in_write_s = 0.0
        self._injector = soak.injector
        self.pool = KVPool(soak.model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, soak.model.device)
        self.last_layer = self.pool.layout.num_layers - 1
        if soak.hub is not None:
            inner = soak.hub.join(f"p{epoch}")
        else:
            inner = connecting_transport(soak.transfer)
        sends_at_once = soak.hub is not None or (soak.transfer.transport != "grpc" and not soak.is_raw)
        transport = FaultyTransport(inner, soak.injector, soak.book, soak.damage, sends_at_once, self)
        clock = MonotonicClock()
        layout = self.pool.layout
        push = {"pool": self.pool, "layout": layout, "epoch": epoch, "config": soak.transfer, "clock": clock}
        self.push = PushService(transport=transport, **push)
        openers = self.push._chooser._openers
        if "shm" in openers:
            openers["shm"] = StandingOpener(openers["shm"], self, soak)
        self.worker = PrefillWorker(
            runner=Runner(soak.model, self.pool, max_num_seqs=16, num_draft_tokens=0, open_push=self.push.open_step),
            push=self.push,
            prefix_cache=soak.prefix_cache,
            **worker_arguments(soak, self.pool, clock),
        )
        self.worker.start()

    def stop(self, pause_s, *, in_write):
        """Its threads that push stand still wherever they are, and then go on as if nothing had been.

        `in_write`: from the moment when one of them is about to write a decode worker's pool, and may.
        """
        if in_write:
            self._pause_in_write_s = pause_s
        else:
            self.standing_until_s = time.monotonic() + pause_s

    def stand_still(self, where):
        """Called by those threads."""
        if where == IN_WRITE and self._pause_in_write_s:
            self.standing_until_s, self._pause_in_write_s = time.monotonic() + self._pause_in_write_s, 0.0
        if self.standing_until_s > time.monotonic():
            self._injector.stood(where)
        while (left_s := self.standing_until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))

    def die(self):
        """No abort, no lease, no word."""
        self.worker._loop.close()
        self.push.close()

    def holds(self, key):
        return key in self.worker._requests

    def phase(self, key):
        request = self.worker._requests.get(key)
        return None if request is None else request.sequence.phase

    def keys(self):
        return tuple(self.worker._requests)


class StandingOpener:
    """Opens data paths whose writes stand still in the middle, with the fence passed, and look where they go then."""

    def __init__(self, inner, side, soak):
        self._inner = inner
        self._side = side
        self._soak = soak

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def open(self, *arguments):
        return StandingDataPath(self._inner.open(*arguments), self._side, self._soak)


class StandingDataPath:
    def __init__(self, inner, side, soak):
        self._inner = inner
        self._side = side
        self._soak = soak

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def write(self, blocks, target_blocks, span, **more):
        self._side.stand_still(IN_WRITE)
        for decode in tuple(self._soak.decode):
            if not decode.may_be_written(self._inner._epoch, target_blocks):
                self._soak.fatal.append(AssertionError(f"{span} is written into blocks of another: {target_blocks}"))
        return self._inner.write(blocks, target_blocks, span, **more)


class Decode:
    """One decode worker of one incarnation, its incoming transfer in a process of its own or on a thread."""

    def __init__(self, soak, epoch):
        self.first_epoch = epoch
        self.num_receiver_deaths = 0
        self.stopped_until_s = 0.0
        layout = soak.model.kv_layout(BLOCK_SIZE)
        clock = MonotonicClock()
        kind = control_channel(soak.transfer.transport).name
        bind = bind_address(kind, "127.0.0.1")
        if soak.has_process:
            data_paths = ("shm",) if soak.transfer.transport == "shm" else ()
            setup = ReceiverSetup(
                epoch=epoch,
                layout=layout,
                num_blocks=NUM_BLOCKS,
                tp_size=1,
                listen=Listen(kind, bind, data_paths),
                config=soak.transfer,
            )
            region = receiver_region([PoolGeometry(layout, NUM_BLOCKS)], soak.transfer)
            self.pool = KVPool(layout, NUM_BLOCKS, soak.model.device, memory=region.pool(0))
            self.incoming = ReceiverService.in_process(region, setup)
        else:
            self.pool = KVPool(layout, NUM_BLOCKS, soak.model.device)
            if soak.hub is not None:
                transport = soak.hub.join(f"d{epoch}")
            else:
                transport = listening_transport(kind, bind, soak.transfer)
            self.incoming = ReceiverService.on_thread(
                pool=self.pool, layout=layout, epoch=epoch, transport=transport, config=soak.transfer, clock=clock
            )
        self.worker = DecodeWorker(
            runner=Runner(soak.model, self.pool, max_num_seqs=NUM_SLOTS, num_draft_tokens=NUM_DRAFTS),
            incoming=self.incoming,
            **worker_arguments(soak, self.pool, clock),
        )
        self.worker.start()

    @property
    def peer(self):
        return DecodePeer("decode", self.incoming.address, self.incoming.epoch)

    def die(self):
        """The process is gone, and its incoming transfer with it."""
        self.worker._loop.close()
        self.incoming.close()

    def holds(self, key):
        return key in self.worker._requests or key in self.worker._draining

    def may_be_written(self, epoch, blocks):
        """Whether granted blocks are still a transfer's, or held back; also if they are not this incarnation's."""
        scheduler = self.worker.engine.scheduler
        receiving = [item.table for item in scheduler.sequences() if item.phase is Phase.RECEIVING]
        tables = [*receiving, *tuple(scheduler._quarantined.values())]
        return any(table.blocks == blocks for table in tables if table) or self.incoming.epoch != epoch

    def keys(self):
        return (*self.worker._requests, *self.worker._draining)

    def phase(self, key):
        request = self.worker._requests.get(key)
        return None if request is None else request.sequence.phase

    def waits(self, key):
        return any(reserve.attempt == key for reserve in tuple(self.worker._reserves))


STATES = (
    "queued",  # at the prefill worker; nothing is asked for yet
    "reserving",  # RESERVE is on its way, or its answer
    "reserve waits",  # for blocks
    "filling",  # granted; chunks are computed and pushed
    "committed",  # COMMIT is on its way, and the incoming transfer not sealed
    "complete",  # verified; waits for a slot
    "running",
    "draining",  # given up; blocks wait until nobody reads or writes them
)


def state_of(prefill, decode, key):
    """Where an attempt is, as both sides know it; None if it is nowhere. Any thread."""
    try:
        here, there = prefill.phase(key), decode.phase(key)
        if here is Phase.ABORTING or key in decode.worker._draining:
            return "draining"
        match there:
            case Phase.RUNNING:
                return "running"
            case Phase.READY:
                return "complete"
            case Phase.RECEIVING:
                return "committed" if here is Phase.SENDING else "filling"
        if here is Phase.WAITING:
            return "queued"
        if here is not None:
            return "reserve waits" if decode.waits(key) else "reserving"
    except RuntimeError:
        pass  # a table changed while it was looked at
    return None


def num_threads():
    """Threads of this process that pushes, incoming transfers and loops have."""
    names = ("kv-", "decode-loop", "prefill-loop")
    return sum(thread.name.startswith(names) for thread in threading.enumerate())
