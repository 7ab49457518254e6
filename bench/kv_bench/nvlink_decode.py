"""The receiving side of the measurement between two GPUs: pool, completion words, and a decode loop that goes on."""

import itertools
import secrets
import statistics
import time
from typing import Any

import torch

from baton.bench.kv_bench.nvlink_shape import (
    NUM_LAYERS,
    PUSH_BYTES,
    SET_BLOCKS,
    VERIFIED_SLOT,
    WINDOW,
    Words,
    incoming_blocks,
    pools,
    slot_of,
    target_blocks,
)
from baton.bench.kv_bench.nvlink_step import DecodeStep
from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import Completion, Piece, PoolAddress, Tuning, Workspace
from baton.kvtransfer.cuda_ipc import PinnedMemory, device_uuid, export

RESULT_SLOTS = 2048  # from here on: digests that this side computed
WAIT_S = 30.0
ALL_LAYERS = Piece(layer=0, first=0, count=SET_BLOCKS * 16, head_first=0, head_count=8, num_layers=NUM_LAYERS)


class DecodeSide:
    """Owns the pool that is written.

    Args:
        device_index: which GPU.
    """

    def __init__(self, device_index: int) -> None:
        self._device = torch.device("cuda", device_index)
        torch.cuda.set_device(self._device)
        self._geometry = pools().decode
        self._pool = torch.zeros(self._geometry.num_bytes, dtype=torch.uint8, device=self._device)
        self._words = Words(f"/dev/shm/baton-bench-{secrets.token_hex(8)}", create=True)
        self._pinned = PinnedMemory(self._words.memory)
        self._address = PoolAddress(self._pool.data_ptr(), self._geometry.layers)
        self._side = torch.cuda.Stream(self._device, priority=0)
        with torch.cuda.stream(self._side):
            self._workspace = Workspace(self._device, 1 << 14)
            self._incoming_ids = [torch.from_numpy(incoming_blocks(turn)).to(self._device) for turn in range(32)]
        self._step: DecodeStep | None = None
        torch.cuda.synchronize()

    def offer(self) -> dict[str, Any]:
        """What the other side needs to write here."""
        place = export(self._pool.data_ptr(), self._device)
        return {
            "handle": place.handle,
            "offset_bytes": place.offset_bytes,
            "uuid": device_uuid(self._device),
            "words_path": str(self._words.path),
        }

    def close(self) -> None:
        """Remove the file."""
        self._words.path.unlink(missing_ok=True)

    def digests(self, turn: int, num_programs: int) -> list[int]:
        """Of what a checked push left here."""
        ids = torch.from_numpy(target_blocks(turn, SET_BLOCKS)).to(self._device)
        torch.cuda.synchronize()
        self._launch(ids, RESULT_SLOTS, turn + 1, Tuning(num_programs))
        self._side.synchronize()
        assert self._words.word(RESULT_SLOTS) == turn + 1
        return self._words.digests(RESULT_SLOTS, NUM_LAYERS)

    def digest_gbps(self, num_programs: int, rounds: int) -> list[float]:
        """Rate of the digest of one incoming transfer."""
        rates = []
        for turn in range(rounds + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._side):
                torch.cuda._sleep(200_000)
            start.record(self._side)
            self._launch(self._incoming_ids[turn % 32], RESULT_SLOTS, turn + 1, Tuning(num_programs))
            end.record(self._side)
            end.synchronize()
            rates.append(PUSH_BYTES / start.elapsed_time(end) / 1e6)
        return rates[2:]

    def watch(self, rounds: int) -> list[float]:
        """Microseconds between word 1 and word 0 of each round, on this process's clock."""
        view, gaps = self._words.view, []
        first, second = Words.offset_bytes(1) // 8, Words.offset_bytes(0) // 8
        view[first] = view[second] = 0
        give_up_s = time.monotonic() + WAIT_S
        for turn in range(1, rounds + 1):
            while view[first] != turn:
                if view[second] == turn and view[first] != turn:
                    raise RuntimeError("the push ended before the layer")
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"round {turn} did not come")
            start_ns = time.monotonic_ns()
            while view[second] != turn:
                pass
            gaps.append((time.monotonic_ns() - start_ns) / 1e3)
        return gaps

    def prepare_step(self) -> float:
        """Capture the decode step; returns its milliseconds alone."""
        self._step = DecodeStep(self._pool, self._geometry.layer(0).num_bytes)
        self.step_times(20, 0)
        return statistics.fmean(self.step_times(50, 0)["step_ms"])

    def step_times(self, num_steps: int, verify_programs: int, credited: bool = False) -> dict[str, Any]:
        """Milliseconds of consecutive steps, verifying each incoming transfer that completes meanwhile.

        Args:
            num_steps: how many.
            verify_programs: multiprocessors of the verification; 0: none.
            credited: the push goes on as incoming transfers are verified; none is left out.
        """
        assert self._step is not None
        events: list[torch.cuda.Event] = []
        verifier = _CreditedVerifier(self, verify_programs) if credited else _Verifier(self, verify_programs)
        for index in range(num_steps + 1):
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._step.stream)
            events.append(event)
            self._step.replay()
            if index >= 2:
                while not events[index - 1].query():
                    if verify_programs:
                        verifier.turn()
                    time.sleep(0.00002 if credited else 0.0002)
        self._step.stream.synchronize()
        times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        found = {"step_ms": times, "verified": verifier.num_verified, "wrong": verifier.num_wrong}
        self._side.synchronize()
        return found

    def clear_words(self) -> None:
        """Forget all landings."""
        self._words.memory[:] = 0

    def _launch(self, ids: torch.Tensor, slot: int, sequence: int, tuning: Tuning) -> None:
        with torch.cuda.stream(self._side):
            completion = Completion(self._pinned.address + Words.offset_bytes(slot), sequence)
            kv_digest(self._address, ids, ALL_LAYERS, self._workspace, completion, tuning)


class _Verifier:
    """Digests transfers whose words are all there, one at a time, and compares with what the sender's kernels said."""

    def __init__(self, side: DecodeSide, num_programs: int) -> None:
        self.num_verified = 0
        self.num_wrong = 0
        self._side = side
        self._tuning = Tuning(max(num_programs, 1))
        self._next: int | None = None
        self._waiting: list[int] | None = None

    def turn(self) -> None:
        """Look, and do one thing."""
        words = self._side._words
        if self._next is None:
            first = words.word(slot_of(0, 0))
            if not first:
                return
            self._next = first  # an incoming transfer that has just begun in the ring
        if self._waiting is not None:
            if words.word(RESULT_SLOTS) == self._next + 1:
                self.num_verified += 1
                self.num_wrong += self._waiting != words.digests(RESULT_SLOTS, NUM_LAYERS)
                self._waiting = None
                self._next += 1
            return
        slots = [slot_of(self._next, layer) for layer in range(NUM_LAYERS)]
        if all(words.word(slot) == self._next + 1 for slot in slots):
            self._waiting = [words.digests(slot, 1)[0] for slot in slots]
            self._side._launch(self._side._incoming_ids[self._next % 32], RESULT_SLOTS, self._next + 1, self._tuning)


class _CreditedVerifier:
    """Digests every transfer in order, as soon as it is there, and tells the pushing side how many it has compared."""

    def __init__(self, side: DecodeSide, num_programs: int) -> None:
        self.num_verified = 0
        self.num_wrong = 0
        self._num_launched = 0
        self._side = side
        self._tuning = Tuning(num_programs)

    def turn(self) -> None:
        """Launch for what is there, compare what is known."""
        words = self._side._words
        while words.word(slot_of(self._num_launched, 0)) == self._num_launched + 1:
            ids = self._side._incoming_ids[self._num_launched % 32]
            slot = RESULT_SLOTS + self._num_launched % WINDOW
            self._num_launched += 1
            self._side._launch(ids, slot, self._num_launched, self._tuning)
        while self.num_verified < self._num_launched:
            slot = RESULT_SLOTS + self.num_verified % WINDOW
            if words.word(slot) != self.num_verified + 1:
                return
            sent = words.digests(slot_of(self.num_verified, 0), NUM_LAYERS)
            self.num_wrong += sent != words.digests(slot, NUM_LAYERS)
            self.num_verified += 1
            words.set_word(VERIFIED_SLOT, self.num_verified)
