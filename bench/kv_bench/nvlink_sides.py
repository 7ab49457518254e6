"""The two sides of the benchmark between two GPUs: one pushes, one receives while its decode loop continues."""

import itertools
import secrets
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime  # pyright: ignore[reportMissingImports]

from baton.bench.kv_bench.nvlink_shape import (
    BLOCK_BYTES,
    NUM_LAYERS,
    PUSH_BYTES,
    SET_BLOCKS,
    VERIFIED_SLOT,
    WINDOW,
    Words,
    incoming_blocks,
    pools,
    slot_of,
    source_blocks,
    target_blocks,
)
from baton.bench.kv_bench.nvlink_step import DecodeStep, mark
from baton.kernels.cuda_ipc import IpcPlace, PeerMemory, PinnedMemory, can_reach, device_uuid, export
from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import PoolAddress, ScatterRange, ScatterWorkspace, Tuning, WriteCompletion, kv_scatter

RESULT_SLOTS = 2048  # from here on: digests that this side computed
WAIT_S = 30.0
ALL_LAYERS = ScatterRange(layers=tuple(range(NUM_LAYERS)), first=0, count=SET_BLOCKS * 16, head_first=0, head_count=8)


class DecodeSide:
    """Owner of the pool that is written.

    Args:
        device_index: index of the GPU.
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
            self._workspace = ScatterWorkspace(self._device, 1 << 14)
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
        """Digests of what a checked push left here."""
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
            num_steps: number of steps.
            verify_programs: multiprocessors of the verification; 0: none.
            credited: whether the push continues as incoming transfers are verified, so that none is left out.
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
        """Clear the words of all writes."""
        self._words.memory[:] = 0

    def _launch(self, ids: torch.Tensor, slot: int, sequence: int, tuning: Tuning) -> None:
        with torch.cuda.stream(self._side):
            completion = WriteCompletion(self._pinned.address + Words.offset_bytes(slot), sequence)
            kv_digest(self._address, ids, ALL_LAYERS, self._workspace, completion, tuning)


class _Verifier:
    """Digests complete transfers, one at a time, and compares with the digests of the sender's kernels."""

    def __init__(self, side: DecodeSide, num_programs: int) -> None:
        self.num_verified = 0
        self.num_wrong = 0
        self._side = side
        self._tuning = Tuning(max(num_programs, 1))
        self._next: int | None = None
        self._waiting: list[int] | None = None

    def turn(self) -> None:
        """Check for a transfer or a result, and handle one."""
        words = self._side._words
        if self._next is None:
            first = words.word(slot_of(0, 0))
            if not first:
                return
            self._next = first  # a transfer that has just begun in the ring
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
    """Digests every transfer in order once it is complete, and tells the pushing side how many it has compared."""

    def __init__(self, side: DecodeSide, num_programs: int) -> None:
        self.num_verified = 0
        self.num_wrong = 0
        self._num_launched = 0
        self._side = side
        self._tuning = Tuning(num_programs)

    def turn(self) -> None:
        """Launch digests for complete transfers, and compare finished ones."""
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


CYCLES_PER_US = 1800
COPY_BYTES = 1 << 30
MAX_LEN = 1 << 17
FIRE_AFTER_S = 0.5
MAX_AHEAD = 8  # launches


class PrefillSide:
    """Owner of a pool of random blocks, which it writes into the peer's pool.

    Args:
        device_index: index of the GPU.
        offer: the decode side's description of its pool.
    """

    def __init__(self, device_index: int, offer: dict[str, Any]) -> None:
        self._device = torch.device("cuda", device_index)
        torch.cuda.set_device(self._device)
        assert can_reach(self._device, offer["uuid"]), "no peer access between the two GPUs"
        self._geometry, target = pools().prefill, pools().decode
        words = torch.empty(self._geometry.num_bytes // 8, dtype=torch.int64, device=self._device)
        self._pool = words.random_(generator=torch.Generator(self._device).manual_seed(1)).view(torch.uint8)
        self._peer = PeerMemory(IpcPlace(offer["handle"], offer["offset_bytes"]), self._device)
        assert self._peer.check(target.num_bytes)
        self._words = Words(offer["words_path"])
        self._pinned = PinnedMemory(self._words.memory)
        self._source = PoolAddress(self._pool.data_ptr(), self._geometry.layers)
        self._target = PoolAddress(self._peer.address, target.layers)
        self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            self._workspace = ScatterWorkspace(self._device, MAX_LEN)
        self._sequence = 1 << 20
        self._stop = threading.Event()
        self._pusher: threading.Thread | None = None
        self._bytes_per_s = 0.0
        torch.cuda.synchronize()

    def about(self) -> dict[str, str]:
        """Describe the machine."""
        properties = torch.cuda.get_device_properties(self._device)
        return {
            "gpu": properties.name,
            "num_sms": str(properties.multi_processor_count),
            "cuda": torch.version.cuda or "",
        }

    def copy_engine(self, num_bytes: int, rounds: int) -> list[float]:
        """Measure GB/s of contiguous copies into the peer's memory."""
        with torch.cuda.stream(self._stream):
            big = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        times = []
        for _ in range(rounds + 2):
            start, end = self._begin(200)
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            status = runtime.cudaMemcpyAsync(
                self._peer.address, big.data_ptr(), num_bytes, kind, self._stream.cuda_stream
            )
            assert int(status[0]) == 0, status
            times.append(self._end(start, end))
        return [num_bytes / ms / 1e6 for ms in times[2:]]

    def scatter(self, form: str, digest: bool, tuning: tuple[int, int, int], rounds: int) -> list[float]:
        """Milliseconds of pushes of 2304 x 64 KiB (`few`: 64 x 64 KiB), by the events around them.

        Args:
            form: "layers": one launch for 64 blocks of 36 layers; "long": one for 2304 blocks of a layer; "each": 36
                launches of 64 blocks; "few": one launch of 64 blocks of one layer.
            digest: whether to compute digests.
            tuning: programs, warps, words of a tile.
            rounds: number of rounds.
        """
        times = []
        for turn in range(rounds + 2):
            count = 2304 if form == "long" else SET_BLOCKS
            source, target = self._ids(source_blocks(turn, count)), self._ids(target_blocks(turn, count))
            pieces = {
                "layers": [
                    ScatterRange(layers=tuple(range(NUM_LAYERS)), first=0, count=1024, head_first=0, head_count=8)
                ],
                "long": [ScatterRange(layers=(turn % 36,), first=0, count=36864, head_first=0, head_count=8)],
                "few": [ScatterRange(layers=(turn % 36,), first=0, count=1024, head_first=0, head_count=8)],
                "each": [
                    ScatterRange(layers=(n,), first=0, count=1024, head_first=0, head_count=8)
                    for n in range(NUM_LAYERS)
                ],
            }[form]
            start, end = self._begin(3000 if form == "each" else 200)
            with torch.cuda.stream(self._stream):
                for piece in pieces:
                    self._launch(source, target, piece, 0, Tuning(*tuning), digest)
            times.append(self._end(start, end))
        return times[2:]

    def push_checked(self, turn: int, tuning: tuple[int, int, int]) -> list[int]:
        """Push 64 blocks of every layer, compare what arrived bit by bit, and return the digests."""
        source, target = source_blocks(turn, SET_BLOCKS), target_blocks(turn, SET_BLOCKS)
        piece = ScatterRange(layers=tuple(range(NUM_LAYERS)), first=0, count=1024, head_first=0, head_count=8)
        with torch.cuda.stream(self._stream):
            self._launch(self._ids(source), self._ids(target), piece, 0, Tuning(*tuning), True)
        self._stream.synchronize()
        assert self._words.word(0) == self._sequence
        back = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=self._device)
        for layer in (0, 17, NUM_LAYERS - 1):
            theirs, ours = self._target.layers[layer], self._source.layers[layer]
            for mine, peers in zip(source.tolist(), target.tolist(), strict=True):
                address = self._peer.address + theirs.offset_bytes + peers * BLOCK_BYTES
                kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
                runtime.cudaMemcpy(back.data_ptr(), address, BLOCK_BYTES, kind)
                begin = ours.offset_bytes + mine * BLOCK_BYTES
                assert torch.equal(back, self._pool[begin : begin + BLOCK_BYTES]), (layer, mine, peers)
        return self._words.digests(0, NUM_LAYERS)

    def fire(self, rounds: int, digest: bool, tuning: tuple[int, int, int]) -> None:
        """In each round, launch a kernel that ends by writing word 1, an event, and the push on another stream."""
        source, target = self._ids(source_blocks(3, SET_BLOCKS)), self._ids(target_blocks(3, SET_BLOCKS))
        main = torch.cuda.Stream(self._device)
        time.sleep(FIRE_AFTER_S)  # until the other side watches
        for turn in range(rounds):
            piece = ScatterRange(layers=(turn % NUM_LAYERS,), first=0, count=1024, head_first=0, head_count=8)
            with torch.cuda.stream(main):
                torch.cuda._sleep(1000 * CYCLES_PER_US)
                mark[(1,)](self._pinned.address + Words.offset_bytes(1), turn + 1)
                event = torch.cuda.Event()
                event.record(main)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(event)
                self._launch(source, target, piece, 0, Tuning(*tuning), digest, turn + 1)
            self._stream.synchronize()
            time.sleep(0.002)

    def start_pushing(self, gbps: float, tuning: tuple[int, int, int], credited: bool = False) -> None:
        """Push layer by layer, transfer after transfer, until `stop_pushing`.

        Args:
            gbps: rate; 0: as fast as possible.
            tuning: programs, warps, words of a tile.
            credited: whether to be at most `WINDOW` incoming transfers ahead of what the other side has verified.
        """
        self._stop.clear()
        self._pusher = threading.Thread(target=self._push, args=(gbps, Tuning(*tuning), credited))
        self._pusher.start()

    def stop_pushing(self) -> float:
        """Stop, and return the rate since `start_pushing` in GB/s."""
        assert self._pusher is not None
        self._stop.set()
        self._pusher.join()
        return self._bytes_per_s / 1e9

    def _push(self, gbps: float, tuning: Tuning, credited: bool) -> None:
        torch.cuda.set_device(self._device)
        layer_bytes = SET_BLOCKS * BLOCK_BYTES
        sources = [self._ids(source_blocks(turn, SET_BLOCKS)) for turn in range(32)]
        targets = [self._ids(incoming_blocks(turn)) for turn in range(32)]
        events: list[torch.cuda.Event] = []
        pushed, start_s = 0, time.monotonic()
        incoming = 0
        # With a rate, push layer by layer, as prefill does. Without one, launch once per transfer, because layer by
        # layer the host would be the bottleneck, and the data path would idle between launches.
        step = 1 if gbps else NUM_LAYERS
        while not self._stop.is_set():
            if credited and incoming - self._words.word(VERIFIED_SLOT) >= WINDOW:
                time.sleep(0.00002)
                continue
            for layer in range(0, NUM_LAYERS, step):
                if gbps:
                    due_s = start_s + pushed * layer_bytes / gbps / 1e9
                    time.sleep(max(0.0, due_s - time.monotonic()))
                piece = ScatterRange(
                    layers=tuple(range(layer, layer + step)), first=0, count=1024, head_first=0, head_count=8
                )
                with torch.cuda.stream(self._stream):
                    where = slot_of(incoming, layer)
                    self._launch(
                        sources[incoming % 32], targets[incoming % 32], piece, where, tuning, True, incoming + 1
                    )
                    event = torch.cuda.Event()
                    event.record(self._stream)
                events.append(event)
                if len(events) > MAX_AHEAD:
                    events.pop(0).synchronize()
                pushed += step
            incoming += 1
        self._stream.synchronize()
        self._bytes_per_s = pushed * layer_bytes / (time.monotonic() - start_s)

    def _launch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        piece: ScatterRange,
        slot: int,
        tuning: Tuning,
        digest: bool,
        sequence: int = 0,
    ) -> None:
        if not sequence:
            self._sequence += 1
        completion = WriteCompletion(self._pinned.address + Words.offset_bytes(slot), sequence or self._sequence)
        kv_scatter(
            self._source, source, self._target, target, piece, self._workspace, completion, tuning, with_digest=digest
        )

    def _ids(self, blocks: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        tensor = torch.from_numpy(blocks).to(self._device)
        torch.cuda.synchronize()
        return tensor

    def _begin(self, sleep_us: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Record events around the following work; the device sleeps first, so that all of it is queued by then."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(sleep_us * CYCLES_PER_US)
        start.record(self._stream)
        return start, end

    def _end(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end))


def gbps_of(times_ms: list[float], num_bytes: int = PUSH_BYTES) -> list[float]:
    """Convert times to rates."""
    return [num_bytes / ms / 1e6 for ms in times_ms]
