"""Prefill and decode workers of several ranks, each rank a process, and a minimal router between them."""

import contextlib
import itertools
import multiprocessing
import queue
import secrets
import threading
from dataclasses import dataclass, field

import torch

from baton.core.errors import BatonError
from baton.core.numerics import Numerics
from baton.kvtransfer.sender.service import DecodePeer
from baton.tests.e2e.tp_group_process import Job, main
from baton.tests.patience import patient

START_TIMEOUT_S = 60.0
TOKEN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0


class RankProcess:
    """A process that takes jobs, and the thread that reads what it says."""

    def __init__(self, context):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.answers = queue.Queue()
        self.streams = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                kind, key, value = self.pipe.recv()
            except (EOFError, OSError):
                kind, key, value = "fatal", None, "the process has ended"
                self.answers.put((kind, value))
                for stream in tuple(self.streams.values()):
                    stream.put((kind, value))
                return
            if kind in ("event", "end"):
                self.streams[key].put((kind, value))
            else:
                self.answers.put((kind, value))
            if kind == "fatal":
                for stream in tuple(self.streams.values()):
                    stream.put((kind, value))

    def expect(self, kind, timeout_s=START_TIMEOUT_S):
        found, value = self.answers.get(timeout=timeout_s)
        assert found == kind, value
        return value

    def open(self, key):
        self.streams[key] = queue.Queue()
        return self.streams[key]

    def end(self):
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self.pipe.send(None)
        self.process.join(END_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


class RankProcesses:
    """As many as the largest topology has ranks; started when they are first needed."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")  # what every process imports is imported once
        self._context.set_forkserver_preload(["baton.tests.e2e.tp_group_process"])
        self._idle = []
        self._all = []

    def take(self, count):
        self._idle = [process for process in self._idle if process.process.is_alive()]
        while len(self._idle) < count:
            self._all.append(RankProcess(self._context))
            self._idle.append(self._all[-1])
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def give_back(self, processes):
        self._idle.extend(processes)

    def close(self):
        for process in self._all:
            process.end()


@dataclass
class Outcome:
    """What one request produced."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stats: object = None
    error: object = None


class TPGroupTopology:
    """One prefill worker of `tp_prefill` ranks and one decode worker of `tp_decode`.

    `expert_parallel` says of which of the two the ranks hold whole experts, `num_redundant` that these move: with so
    many slots more. With `dp_attention` ranks of the decode worker attend for sequences of their own. Without
    `hands_over` the decode worker computes every prompt.
    """

    def __init__(
        self,
        processes,
        path,
        tp_prefill,
        tp_decode,
        *,
        data_path="raw",
        dtype=torch.float64,
        numerics=Numerics.DEFAULT,
        block_sizes=(16, 16),
        chunk_len=48,
        max_num_seqs=16,
        num_decode_blocks=None,
        expert_parallel=(False, False),
        num_redundant=None,
        rows_in=None,
        dp_attention=False,
        hands_over=True,
        **decode_options,
    ):
        self._processes = processes
        self._data_path = data_path
        self._hands_over = hands_over
        transfer = patient(transport={"shm": "shm", "raw": "tcp", "inline": "zmq"}[data_path])
        shared = {"path": path, "dtype": dtype, "numerics": numerics, "transfer": transfer, "rows_in": rows_in}
        self._taken = processes.take(tp_prefill + tp_decode)
        self.epochs = {}
        self.prefill, self.decode = self._taken[:tp_prefill], self._taken[tp_prefill:]
        for role, ranks, block_size, whole_experts in (
            ("prefill", self.prefill, block_sizes[0], expert_parallel[0]),
            ("decode", self.decode, block_sizes[1], expert_parallel[1]),
        ):
            job = {
                "role": role,
                "size": len(ranks),
                "epoch": secrets.randbits(64) or 1,
                "num_blocks": 4096 // block_size,
                "block_size": block_size,
                "chunk_len": chunk_len,
                "max_num_seqs": max_num_seqs,
                "expert_parallel": whole_experts,
                "num_redundant": num_redundant if whole_experts and len(ranks) > 1 else None,
                **shared,
                **({"dp_attention": dp_attention, **decode_options} if role == "decode" else {}),
            }
            if role == "decode" and num_decode_blocks is not None:
                job["num_blocks"] = num_decode_blocks
            self.epochs[role] = job["epoch"]
            ranks[0].pipe.send(Job(rank=0, rank_place=None, **job))
            for rank, process in enumerate(ranks[1:], start=1):
                process.pipe.send(Job(rank=rank, rank_place=ranks[0].expect("rank_place"), **job))
        self.prefill[0].expect("serving")
        self.peer = DecodePeer("decode", *self.decode[0].expect("serving"))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if exc[0] is not None:  # what state they are in is not known
            self.abandon()
            return
        self.prefill[0].pipe.send(("close",))
        used = [process.expect("done", END_TIMEOUT_S) for process in self.prefill]
        self.decode[0].pipe.send(("close",))  # only now: a data path that breaks is not the one in use any more
        for process in self.decode:
            process.expect("done", END_TIMEOUT_S)
        self._processes.give_back(self._taken)
        # The raw data path is open once the other side has answered; on busy processors the first frames are earlier.
        before = {"inline"} if self._data_path == "raw" else set()
        if not self._hands_over:
            assert not any(used)
            return
        assert all({self._data_path} <= set(data_paths) <= {self._data_path} | before for data_paths in used), used

    def start(self, request, *, local=False):
        if local:  # the decode worker says everything
            stream = self.decode[0].open(request.key)
            self.decode[0].pipe.send(("attend", request, ("prefill_here", True)))
            return request, None, stream
        decode_stream, prefill_stream = self.decode[0].open(request.key), self.prefill[0].open(request.key)
        self.decode[0].pipe.send(("attend", request))
        self.prefill[0].pipe.send(("submit", request, self.peer))
        return request, prefill_stream, decode_stream

    def cancel(self, running):
        for process in (self.prefill[0], self.decode[0]):
            with contextlib.suppress(OSError):
                process.pipe.send(("cancel", running[0].key))

    def finish(self, running):
        """Wait for a request's end, as a router would: the first token from prefill, the others from decode."""
        request, prefill_stream, decode_stream = running
        outcome = Outcome()
        try:
            for event in _events(prefill_stream) if prefill_stream is not None else ():
                if event.HasField("first_token"):
                    outcome.token_ids.append(event.first_token.token)
                    outcome.finish_reason = event.first_token.finish_reason
            if outcome.finish_reason:
                self.cancel(running)
                return outcome
            for event in _events(decode_stream):
                if event.HasField("first_token"):
                    outcome.token_ids.append(event.first_token.token)
                    outcome.finish_reason = event.first_token.finish_reason
                    continue
                assert event.tokens.index == request.num_forced + len(outcome.token_ids)
                outcome.token_ids.extend(event.tokens.token_ids)
                outcome.finish_reason = event.tokens.finish_reason
                outcome.stats = event.tokens.stats
        except BatonError as error:
            outcome.error = error
            self.cancel(running)
        return outcome

    def wait_tokens(self, running, count):
        """Until decode has sent so many; they are not kept."""
        events = _events(running[2])
        while count > 0:
            count -= len(next(events).tokens.token_ids)

    def finish_or_lose(self, running):
        """A worker is gone. Each of the request's streams ends, by itself or as its router would end it."""
        self.cancel(running)
        for stream in running[1:]:
            while (item := stream.get(timeout=END_TIMEOUT_S))[0] == "event":
                pass
            assert item[0] in ("end", "fatal")

    def abandon(self):
        """Leave it in whatever state it is."""
        for process in self._taken:
            process.process.kill()
            process.process.join()

    def generate(self, requests):
        """All requests at once."""
        return [self.finish(running) for running in [self.start(request) for request in requests]]

    def inventories(self):
        for process in (self.prefill[0], self.decode[0]):
            process.pipe.send(("inventory",))
        return [process.expect("inventory") for process in (self.prefill[0], self.decode[0])]

    def wait_idle(self):
        """Until no worker holds anything of any request."""
        for _ in itertools.count():
            held = [
                inventory.num_blocks
                - inventory.num_blocks_free
                + inventory.num_kv_receives
                + inventory.num_requests_held
                for inventory in self.inventories()
            ]
            if not any(held):
                return
            threading.Event().wait(0.02)


def _events(stream):
    while True:
        kind, value = stream.get(timeout=TOKEN_TIMEOUT_S)
        assert kind != "fatal", value
        if kind == "event":
            yield value
        elif value is not None:
            raise value
        else:
            return
