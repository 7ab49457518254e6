"""How work on fixed buffers is captured once and replayed: as a CUDA graph, or by calling it again.

The second is what a CPU can do. It keeps everything else about graphs (padding, fixed buffers, choice of sizes, what a
rank may do when) as it is on a GPU, so that it can be tested there.

Work reads and writes tensors that live as long as its graph; whatever else it allocates is gone when it ends, and on a
GPU lies in memory that all graphs share. So only one graph runs at a time, and nothing may be left there to be read.
Work may have several pieces, of which the later ones read what the earlier ones left; other work may run in between,
but no other graph.
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
    """A graph cannot be captured here, and nothing was begun."""


class GraphBackend(Protocol):
    """Captures work; one thread at a time."""

    def require(self, num_bytes: int) -> None:
        """Check that work which holds about so many bytes at once can be captured; computes nothing.

        Raises:
            CaptureRefused: it cannot.
        """
        ...

    def warm_up(self, work: Work) -> None:
        """Do the work once, as capturing it will: libraries choose kernels, and groups connect, before it counts.

        Raises:
            Exception: what it raised.
        """
        ...

    def capture(self, pieces: Sequence[Work]) -> list[Replay]:
        """What does each piece of the work again; the work itself is not done, and no other rank is waited for.

        Raises:
            Exception: what capturing it raised.
        """
        ...


class CallBackend:
    """Replays by calling."""

    def require(self, num_bytes: int) -> None:
        """Anything goes."""

    def warm_up(self, work: Work) -> None:
        """See `GraphBackend`."""
        work()

    def capture(self, pieces: Sequence[Work]) -> list[Replay]:
        """The pieces."""
        return list(pieces)


def wait_for(done: Event, group: Communicator) -> None:
    """Wait for work that adds over a group, as long as the others may take: NCCL itself would wait for ever.

    Raises:
        WorkerLost: the rank at fault, if that is known, or that this one has lost the others.
    """
    end_s = time.monotonic() + group.limit_s
    while not done.query():
        blamed = group.blame()
        if blamed is not None:
            raise blamed
        if group.size > 1 and time.monotonic() > end_s:
            raise lost_touch(group, TimeoutError(f"a warm-up did not end within {group.limit_s:.0f} s"))
        time.sleep(_POLL_S)
    done.synchronize()  # raises what kept it from being done


class CudaBackend:
    """CUDA graphs of one device, in one pool of memory.

    Args:
        device: of everything the work touches.
        communicator: whose operations the work may contain; replays count as its operations.
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
        """See `GraphBackend`; graphs get half of what was free: steps that are not replayed need memory, too."""
        if num_bytes > self._max_bytes:
            message = f"it needs about {num_bytes >> 20} MiB of GPU memory; graphs may have {self._max_bytes >> 20} MiB"
            raise CaptureRefused(message)

    def warm_up(self, work: Work) -> None:
        """See `GraphBackend`; on the stream that captures, as libraries keep workspaces by stream.

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
        """See `GraphBackend`; what a piece leaves stays its own while Python holds it, also from the graphs' memory."""
        return [self._capture(work) for work in pieces]

    def _capture(self, work: Work) -> Replay:
        graph, group = torch.cuda.CUDAGraph(), self._communicator
        num_before = group.num_operations
        with torch.cuda.stream(self._stream):
            try:
                # Other threads (an incoming transfer's copies) may go on with what would break a capture of their own.
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
        """While something is captured, memory that the warm-up left in the cache could not be given back."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _enter_pool(self) -> None:
        """Begin a pool, and keep a graph of one fill in it.

        A pool that its last graph has left cannot be entered again, and what all ranks have to drop may be its last.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        number = torch.ones(1, device=self._device)
        with torch.cuda.stream(self._stream):
            self._anchor.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            number.fill_(1)
            self._anchor.capture_end()

    def _leave_pool(self) -> None:
        """After a capture that failed: the graphs that are there keep the pool, those to come get another one.

        torch before 2.12 forgets to tell its allocators that such a capture is over. The device's can be told here;
        else it would believe in a capture for ever, and keep what it was given back across streams. The one of pinned
        memory cannot, and refuses a second capture into the same pool.
        Source: pytorch/pytorch#180395.
        """
        with contextlib.suppress(RuntimeError):  # it knows
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._enter_pool()
