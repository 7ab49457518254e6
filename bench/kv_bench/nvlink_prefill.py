"""The pushing side of the measurement between two GPUs."""

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
from baton.bench.kv_bench.nvlink_step import mark
from baton.kernels.kv.scatter import Completion, Piece, PoolAddress, Tuning, Workspace, kv_scatter
from baton.kvtransfer.cuda_ipc import IpcPlace, PeerMemory, PinnedMemory, can_reach

CYCLES_PER_US = 1800
COPY_BYTES = 1 << 30
MAX_LEN = 1 << 17
FIRE_AFTER_S = 0.5
MAX_AHEAD = 8  # launches


class PrefillSide:
    """Owns a pool of random blocks, and writes into the peer's.

    Args:
        device_index: which GPU.
        offer: what the decode side says of its pool.
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
            self._workspace = Workspace(self._device, MAX_LEN)
        self._sequence = 1 << 20
        self._stop = threading.Event()
        self._pusher: threading.Thread | None = None
        self._bytes_per_s = 0.0
        torch.cuda.synchronize()

    def about(self) -> dict[str, str]:
        """The machine."""
        properties = torch.cuda.get_device_properties(self._device)
        return {
            "gpu": properties.name,
            "num_sms": str(properties.multi_processor_count),
            "cuda": torch.version.cuda or "",
        }

    def copy_engine(self, num_bytes: int, rounds: int) -> list[float]:
        """GB/s of contiguous copies into the peer's memory."""
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
            digest: with it.
            tuning: programs, warps, words of a tile.
            rounds: how often.
        """
        times = []
        for turn in range(rounds + 2):
            count = 2304 if form == "long" else SET_BLOCKS
            source, target = self._ids(source_blocks(turn, count)), self._ids(target_blocks(turn, count))
            pieces = {
                "layers": [Piece(layer=0, first=0, count=1024, head_first=0, head_count=8, num_layers=NUM_LAYERS)],
                "long": [Piece(layer=turn % 36, first=0, count=36864, head_first=0, head_count=8)],
                "few": [Piece(layer=turn % 36, first=0, count=1024, head_first=0, head_count=8)],
                "each": [Piece(layer=n, first=0, count=1024, head_first=0, head_count=8) for n in range(NUM_LAYERS)],
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
        piece = Piece(layer=0, first=0, count=1024, head_first=0, head_count=8, num_layers=NUM_LAYERS)
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
        """For each round: a kernel that ends by writing word 1, an event, and the push behind it on another stream."""
        source, target = self._ids(source_blocks(3, SET_BLOCKS)), self._ids(target_blocks(3, SET_BLOCKS))
        main = torch.cuda.Stream(self._device)
        time.sleep(FIRE_AFTER_S)  # the other side watches by then
        for turn in range(rounds):
            piece = Piece(layer=turn % NUM_LAYERS, first=0, count=1024, head_first=0, head_count=8)
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
        """Push layer by layer, incoming transfer after incoming transfer, until `stop_pushing`.

        Args:
            gbps: at this rate; 0: as fast as it goes.
            tuning: programs, warps, words of a tile.
            credited: at most `WINDOW` incoming transfers are ahead of what the other side has verified.
        """
        self._stop.clear()
        self._pusher = threading.Thread(target=self._push, args=(gbps, Tuning(*tuning), credited))
        self._pusher.start()

    def stop_pushing(self) -> float:
        """Bytes pushed per second since `start_pushing`, in GB/s."""
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
        # At a pace, layer by layer, as prefill does. Without one, a launch for each transfer: layer by layer the host
        # would be the limit, and the lane would idle between launches.
        step = 1 if gbps else NUM_LAYERS
        while not self._stop.is_set():
            if credited and incoming - self._words.word(VERIFIED_SLOT) >= WINDOW:
                time.sleep(0.00002)
                continue
            for layer in range(0, NUM_LAYERS, step):
                if gbps:
                    due_s = start_s + pushed * layer_bytes / gbps / 1e9
                    time.sleep(max(0.0, due_s - time.monotonic()))
                piece = Piece(layer=layer, first=0, count=1024, head_first=0, head_count=8, num_layers=step)
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
        piece: Piece,
        slot: int,
        tuning: Tuning,
        digest: bool,
        sequence: int = 0,
    ) -> None:
        if not sequence:
            self._sequence += 1
        completion = Completion(self._pinned.address + Words.offset_bytes(slot), sequence or self._sequence)
        kv_scatter(
            self._source, source, self._target, target, piece, self._workspace, completion, tuning, with_digest=digest
        )

    def _ids(self, blocks: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        tensor = torch.from_numpy(blocks).to(self._device)
        torch.cuda.synchronize()
        return tensor

    def _begin(self, sleep_us: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Events around what follows; the device sleeps first, so that all of it is queued by then."""
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
    """Rates."""
    return [num_bytes / ms / 1e6 for ms in times_ms]
