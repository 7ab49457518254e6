"""Captures work on fixed buffers once and replays it: as a CUDA graph, or by calling it again.

The latter is what a CPU can do. It keeps everything else about graphs (padding, fixed buffers, choice of sizes, what a
rank may do when) as it is on a GPU, so that it can be tested there.

Work reads and writes tensors that live as long as its graph. Anything else it allocates is freed when it ends, and on a
GPU lies in memory that all graphs share. So only one graph runs at a time, and no result may be left in that memory.
Work may consist of several pieces, of which later ones read what earlier ones left; other work may run in between, but
no other graph.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from baton.engine.step.host_future import Event
from baton.engine.tp.collectives import lost_touch
from baton.model.parallel import Communicator

_POLL_S: Final = 2e-4

Work = Callable[[], None]
Replay = Callable[[], None]


class CaptureRefused(Exception):
    """A graph cannot be captured here; the capture was not started."""


class GraphBackend(Protocol):
    """Captures work; one thread at a time."""

    def require(self, num_bytes: int) -> None:
        """Check that work that needs about `num_bytes` at its peak can be captured; computes nothing.

        Raises:
            CaptureRefused: it cannot.
        """
        ...

    def warm_up(self, work: Work) -> None:
        """Run the work once under capture conditions, so that libraries choose kernels and groups connect beforehand.

        Raises:
            Exception: what the work raised.
        """
        ...

    def capture(self, pieces: Sequence[Work]) -> list[Replay]:
        """Capture each piece of the work without running it or waiting for another rank; returns the replays.

        Raises:
            Exception: what the capture raised.
        """
        ...


class CallBackend:
    """Replays work by calling it again."""

    def require(self, num_bytes: int) -> None:
        """Accept any work."""

    def warm_up(self, work: Work) -> None:
        """See `GraphBackend`."""
        work()

    def capture(self, pieces: Sequence[Work]) -> list[Replay]:
        """Return the pieces as their own replays."""
        return list(pieces)


def wait_for(done: Event, group: Communicator) -> None:
    """Wait for work with collectives for as long as the other ranks may take; NCCL itself would wait for ever.

    Raises:
        WorkerLost: the rank at fault, if known, or that this rank has lost the others.
    """
    end_s = time.monotonic() + group.limit_s
    while not done.query():
        blamed = group.blame()
        if blamed is not None:
            raise blamed
        if group.size > 1 and time.monotonic() > end_s:
            raise lost_touch(group, TimeoutError(f"a warm-up did not end within {group.limit_s:.0f} s"))
        time.sleep(_POLL_S)
    done.synchronize()  # raises the error, if it failed


class CudaBackend:
    """CUDA graphs of one device, in one memory pool.

    Args:
        device: device of everything the work touches.
        communicator: its collectives may be part of the work; replays count as its operations.
    """

    def __init__(self, device: torch.device, communicator: Communicator) -> None:
        assert device.type == "cuda"
        assert device.index is not None
        self._device = device
        self._communicator = communicator
        self._stream = torch.cuda.Stream(device)
        self._free_cache()
        self._enter_pool()
        self._max_bytes = torch.cuda.mem_get_info(device)[0] // 2

    def require(self, num_bytes: int) -> None:
        """See `GraphBackend`; graphs get half of the memory that was free, as eager steps need memory, too."""
        if num_bytes > self._max_bytes:
            message = f"it needs about {num_bytes >> 20} MiB of GPU memory; graphs may have {self._max_bytes >> 20} MiB"
            raise CaptureRefused(message)

    def warm_up(self, work: Work) -> None:
        """See `GraphBackend`; runs on the capture stream, because libraries keep workspaces per stream.

        Raises:
            WorkerLost: another rank did not take part.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            work()
            done.record()
        wait_for(done, self._communicator)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._free_cache()

    def capture(self, pieces: Sequence[Work]) -> list[Replay]:
        """See `GraphBackend`; what a piece returns stays allocated while Python holds it, even in the graphs' pool."""
        return [self._capture(work) for work in pieces]

    def _capture(self, work: Work) -> Replay:
        graph, group = torch.cuda.CUDAGraph(), self._communicator
        num_before = group.num_operations
        with torch.cuda.stream(self._stream):
            try:
                # Other threads (an incoming transfer's copies) may go on doing what would break a capture on their
                # thread.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            except RuntimeError:
                self._leave_pool()
                raise
        num_operations = group.num_operations - num_before

        def replay() -> None:
            graph.replay()
            group.num_operations += num_operations

        return replay

    def _free_cache(self) -> None:
        """Empty the allocator's cache: during a capture, memory that the warm-up left there could not be released."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _enter_pool(self) -> None:
        """Create a pool, and keep a graph of one fill operation in it.

        A pool cannot be entered again once its last graph is gone, and ranks may have to drop the only real graph.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        number = torch.ones(1, device=self._device)
        with torch.cuda.stream(self._stream):
            self._anchor.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            number.fill_(1)
            self._anchor.capture_end()

    def _leave_pool(self) -> None:
        """Create a new pool after a failed capture: existing graphs keep the old pool, later ones use the new one.

        torch before 2.12 does not tell its allocators that a failed capture is over. The device's allocator can be told
        here; otherwise it would believe in a capture for ever, and keep memory that is freed across streams. The
        pinned-memory allocator cannot be told, and refuses a second capture into the same pool. Source:
        pytorch/pytorch#180395.
        """
        with contextlib.suppress(RuntimeError):  # it was told already
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._enter_pool()
