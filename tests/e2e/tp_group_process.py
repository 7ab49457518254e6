"""One rank of a prefill or decode worker as a process: Baton's classes, driven over a pipe by the tests.

Ranks of one worker meet over gloo; rank 0 runs the worker, the others follow its plan. A process takes one job after
the other, so that torch is imported once.
"""

import itertools
import json
import os
import pickle
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.decode_worker.worker import DecodeWorker
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.step.runner import Runner
from baton.engine.tp.plan import plan_codec
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import ReceiverService, receiver_region
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.service import PushService
from baton.kvtransfer.shared_region import SharedRegion
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.model.loader import load_model
from baton.model.parallel import Alone
from baton.prefill_worker.tp_group import PrefillRankPush, TPGroupPush, prefill_codec
from baton.prefill_worker.worker import PrefillWorker
from baton.tests.e2e.topology import NUM_CHECKPOINTS
from baton.tests.e2e.trunk_rows import record_rows
from baton.tests.engine.moving_experts import shuffling
from baton.worker.loading import num_state_slots_of, request_limits
from baton.worker.rank import RankPlace, RankThread
from baton.worker.tp_group import end_tp_group, follow, lead

CPU = torch.device("cpu")
NUM_DRAFTS = 6
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is for the next topology."""

    role: str
    rank: int
    size: int
    rank_place: RankPlace | None  # of a rank that is not 0
    epoch: int  # of the worker: shared by its ranks
    path: Path
    dtype: torch.dtype
    numerics: Numerics
    num_blocks: int
    block_size: int
    chunk_len: int
    transfer: KVTransferConfig
    host_kv_bytes: int = 0
    overcommit: bool = False
    preempt_at: tuple[int, ...] = ()
    max_num_seqs: int = 16
    expert_parallel: bool = False
    dp_attention: bool = False
    num_redundant: int | None = None  # experts move ahead of every step, to maps drawn at random; None: they stay
    fails_to_move: bool = False  # the last rank, in its third round
    rows_in: Path | None = None  # where each rank leaves what its trunk computed


class PipeSink:
    """An EventSink whose reader is at the other end of a pipe."""

    def __init__(self, send, key):
        self._send = send
        self._key = key
        self.ended = False

    def emit(self, event):
        self._send(("event", self._key, event))

    def end(self, error=None):
        if not self.ended:
            self.ended = True
            self._send(("end", self._key, error))


class WatchedPush(PushService):
    """Remembers by which data paths it pushed: an idle peer is left after a while, with its data path."""

    def __init__(self, *args, **kwargs):
        self._data_paths_seen = set()
        super().__init__(*args, **kwargs)

    @property
    def used(self):
        return sorted(self._data_paths_seen)

    def _emit(self, event):
        self._data_paths_seen |= {choice.data_path for choice in self.data_paths().values()}
        super()._emit(event)


class PipeStarter:
    """Rank 0's: the parent hands each seat to another process."""

    def __init__(self, send):
        self._send = send

    def start(self, rank_place):
        self._send(("rank_place", None, rank_place))

    def check(self):
        pass


class Rank:
    """What every job begins with: the group, the model and, once it is known where, the pool."""

    def __init__(self, job, send, pipe):
        self.job = job
        self.send = send
        self.pipe = pipe
        self.channel = self._join()
        self.group = Alone() if self.channel is None else self.channel.communicator
        self.model = load_model(
            job.path,
            dtype=job.dtype,
            device=CPU,
            numerics=job.numerics,
            with_mtp=True,
            communicator=self.group,
            expert_parallel=job.expert_parallel,
            num_redundant_experts=job.num_redundant,
            dp_attention=job.dp_attention,
        )
        self.runs = []
        if job.rows_in is not None:
            record_rows(self.model, self.runs.append)
        self.layout = self.model.kv_layout(job.block_size)
        self.limits = request_limits(self.model, max_model_len=1 << 20, num_draft_tokens=NUM_DRAFTS)
        tokenizer = Tokenizer.from_directory(job.path)
        self.grammars = GrammarCompiler(tokenizer, self.model.config.vocab_size)
        self.common = {
            "tokenizer": tokenizer,
            "limits": self.limits,
            "max_num_batched_tokens": job.chunk_len,
            "max_queue_len": 1024,
            "clock": MonotonicClock(),
            "on_fatal": self.fatal,
        }

    def runner(self, pool, *, num_draft_tokens=0, **options):
        runner = Runner(
            self.model,
            pool,
            max_num_seqs=self.job.max_num_seqs,
            num_draft_tokens=num_draft_tokens,
            communicator=self.group,
            grammars=self.grammars,
            **options,
        )
        if self.job.fails_to_move and self.job.rank == self.job.size - 1:
            fail_in_round(runner.experts, 3)
        return runner

    def lead(self, runner):
        """Rank 0's."""
        moves = self.job.num_redundant is not None
        return Rank0Runner(runner, self.channel, shuffling()(runner.experts) if moves else None)

    def fatal(self, error):
        """As a worker's actor does, but that the process says so first."""
        if self.channel is None:
            self.end(error)
        else:
            end_tp_group(self.channel, error, self.end)

    def end(self, error):
        self.send(("fatal", None, repr(error)))
        os._exit(70)

    def _join(self):
        job = self.job
        if job.size == 1:
            return None
        codec = prefill_codec() if job.role == "prefill" else plan_codec()
        if job.rank == 0:
            return lead(job.size, job.epoch, codec, CPU, PipeStarter(self.send))
        return follow(job.rank_place, codec, CPU)

    def serve(self, worker):
        """Rank 0."""
        if self.channel is not None:
            self.channel.start(READY_TIMEOUT_S)
            self.channel.link.on_fail = self.fatal
        worker.start()

    def follow(self, run, corrupt=None):
        """Another rank; `corrupt` damages what it knows, when the tests say so."""
        self.channel.follow()
        done = threading.Event()

        def run_and_say():
            run()
            done.set()

        RankThread(run_and_say, self.channel, self.end).start()
        while not done.wait(0.01):
            if self.pipe.poll():
                assert self.pipe.recv() == ("corrupt",)
                corrupt()

    def pool(self, memory=None):
        job = self.job
        return KVPool(
            self.layout, job.num_blocks, CPU, rank=job.rank, size=job.size, num_state_slots=self.num_state_slots,
            num_checkpoints=self.num_checkpoints, memory=memory,
        )  # fmt: skip

    @property
    def num_state_slots(self):
        return num_state_slots_of(self.layout, self.job.max_num_seqs) + self.num_checkpoints

    @property
    def num_checkpoints(self):
        return NUM_CHECKPOINTS if self.layout.has_state else 0


def fail_in_round(exchange, number):
    """The rank has no memory for what comes in."""
    cross, rounds = exchange._cross, itertools.count(1)

    def failing(*arguments):
        if next(rounds) == number:
            raise RuntimeError("out of memory")
        cross(*arguments)

    exchange._cross = failing


def prefill_rank(rank, receive):
    job = rank.job
    pool = rank.pool()
    push = own = WatchedPush(
        pool=pool,
        layout=rank.layout,
        epoch=job.epoch,
        transport=ZmqTransport(config=job.transfer),
        config=job.transfer,
        clock=MonotonicClock(),
    )
    runner = rank.runner(pool, open_push=push.open_step)
    if job.rank > 0:
        rank.follow(PrefillRankPush(RankRunner(runner, rank.channel), push, rank.channel).run)
        return own.used
    if job.size > 1:
        runner, push = rank.lead(runner), TPGroupPush(push, rank.channel)
    worker = PrefillWorker(runner=runner, pool=pool, push=push, **rank.common)
    rank.serve(worker)
    rank.send(("serving", None, None))
    serve(rank, worker, receive)
    worker.close()
    return own.used


def decode_rank(rank, receive):
    job = rank.job
    num_slots = rank.num_state_slots
    geometries = [
        PoolGeometry(rank.layout, job.num_blocks, at, job.size, num_state_slots=num_slots) for at in range(job.size)
    ]
    if job.rank == 0:
        region = receiver_region(geometries, job.transfer)
        rank.group.broadcast_bytes(json.dumps([str(region.path), region.nonce]).encode())
    else:
        path, nonce = json.loads(rank.group.broadcast_bytes(b""))
        region = SharedRegion.attach(Path(path), nonce)
    pool = rank.pool(region.pool(job.rank))
    runner = rank.runner(pool, num_draft_tokens=NUM_DRAFTS, host_kv_bytes=job.host_kv_bytes)
    if job.rank > 0:
        tables_NM = runner._table._tables_NM
        rank.follow(RankRunner(runner, rank.channel).run, lambda: tables_NM.bitwise_xor_(1))
        return
    setup = ReceiverSetup(
        epoch=job.epoch,
        layout=rank.layout,
        num_blocks=job.num_blocks,
        num_state_slots=num_slots,
        tp_size=job.size,
        num_pools=rank.model.num_pools,
        listen=Listen("zmq", "tcp://127.0.0.1:0", ("shm",) if job.transfer.transport == "shm" else ()),
        config=job.transfer,
    )
    incoming = ReceiverService.in_process(region, setup)
    if job.size > 1:
        runner = rank.lead(runner)
    worker = DecodeWorker(
        runner=runner,
        pool=pool,
        incoming=incoming,
        overcommit=job.overcommit,
        preempt_at=job.preempt_at,
        **rank.common,
    )
    rank.serve(worker)
    rank.send(("serving", None, (incoming.address, incoming.epoch)))
    serve(rank, worker, receive)
    worker.close()
    if job.size > 1:
        runner.close()


def serve(rank, worker, receive):
    """What the tests ask of rank 0, until they say close."""
    while (command := receive())[0] != "close":
        match command:
            case ("submit", request, peer):
                worker.submit(request, peer, PipeSink(rank.send, request.key))
            case ("attend", request, *options):
                sink = PipeSink(rank.send, request.key)
                try:
                    worker.attend(request, sink, **dict(options))
                except BatonError as error:
                    sink.end(error)
            case ("cancel", key):
                worker.cancel(key)
            case ("inventory",):
                rank.send(("inventory", None, worker.inventory()))


def main(pipe):
    """Jobs, one after the other; None ends the process."""
    torch.set_num_threads(1)
    lock = threading.Lock()

    def send(message):
        with lock:
            pipe.send(message)

    roles = {"prefill": prefill_rank, "decode": decode_rank}
    while (job := pipe.recv()) is not None:
        try:
            rank = Rank(job, send, pipe)
            said = roles[job.role](rank, pipe.recv)
            if rank.channel is not None:
                rank.channel.close()
            rank.group.close()
            if job.rows_in is not None:
                (job.rows_in / f"{job.role}-{job.rank}").write_bytes(pickle.dumps(rank.runs))
            send(("done", None, said))
        except BaseException:
            send(("fatal", None, traceback.format_exc()))
            raise
