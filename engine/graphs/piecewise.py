"""The trunk of a step with chunks of prompts, replayed in pieces: the host launches its attentions alone.

What lies between two attentions depends on how many rows there are, not on whose they are. So it is captured for some
numbers of rows, and a step is padded to the next of them; attention, which depends on lengths that differ from step to
step, is launched between the pieces, by a tape of one layer's launches (`kernels.launch_tape`). The idea of pieces is
vLLM's (V1, piecewise CUDA graphs).

Legend: N rows of a graph, T those of a step, D hidden size, A query heads, E columns of a query, V of what a head makes
of values (E but of heads over latents).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from baton.engine.graphs.backend import GraphBackend, Replay
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.launch_tape import LaunchTape, record
from baton.kernels.memo import signature
from baton.kvcache.pool import KVPool
from baton.model.attention import Attention
from baton.model.decoder import Pieces
from baton.model.inputs import AttentionBatch, positions_of, slots_of
from baton.model.model import Model

MAX_ROWS: Final = 2048  # with more of them an H200 computes an 8B for far longer than its host launches
_RECORDED: Final = 2  # attention of a step, from which the later ones are launched


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending: multiples of 32, and from 256 on an eighth of padding at most."""
    sizes, size = [], 32
    while size < min(max_rows, MAX_ROWS):
        sizes.append(size)
        size += max(32, 1 << (size.bit_length() - 4))
    return (*sizes, min(max_rows, MAX_ROWS)) if max_rows > 0 else ()


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """What all graphs of a runner share, for the most rows of any.

    Attributes:
        numbers_3N: int64 token ids, positions and slots.
        query_NAE: what the next attention reads.
        mixed_NQ: what it made, [N, A * V].
        output_ND: hidden states after the final norm.
    """

    numbers_3N: torch.Tensor
    query_NAE: torch.Tensor
    mixed_NQ: torch.Tensor
    output_ND: torch.Tensor

    @classmethod
    def of(cls, max_rows: int, model: Model, pool: KVPool, tp_size: int) -> "RowBuffers":
        """Full of padding, for one of `tp_size` ranks."""
        config, device, dtype = model.config, pool.device, model.dtype
        num_heads = config.num_heads // tp_size
        numbers_3N = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        numbers_3N[2] = pool.scratch_slot
        query_NAE = torch.zeros(max_rows, num_heads, config.query_dim, dtype=dtype, device=device)
        mixed_NQ = torch.zeros(max_rows, num_heads * config.value_dim, dtype=dtype, device=device)
        output_ND = torch.zeros(max_rows, model.trunk_width, dtype=dtype, device=device)
        return cls(numbers_3N, query_NAE, mixed_NQ, output_ND)


class PiecewiseTrunk:
    """The trunk of N rows; `warm_up` and `capture` come first.

    Args:
        num_rows: N.
        buffers: of the runner.
        model: that computes.
        pool: its KV.
    """

    def __init__(self, num_rows: int, buffers: RowBuffers, model: Model, pool: KVPool) -> None:
        self.num_rows = num_rows
        self._numbers_3N = buffers.numbers_3N[:, :num_rows]
        self._query_NAE = buffers.query_NAE[:num_rows]
        self._mixed_NQ = buffers.mixed_NQ[:num_rows]
        self._output_ND = buffers.output_ND[:num_rows]
        self._model = model
        self._pool = pool
        self._pieces: Pieces[torch.Tensor] | None = None
        self._attentions: list[Attention] = []  # before which a piece ends
        self._replays: list[Replay] = []
        self.num_taped = 0  # layers whose attention a tape has launched

    @property
    def num_bytes(self) -> int:
        """About what a pass holds at its peak, beside the buffers."""
        config = self._model.config
        widest = max(2 * config.intermediate_size, config.hidden_size) * 2
        return self.num_rows * widest * self._model.dtype.itemsize

    @torch.inference_mode()
    def warm_up(self, backend: GraphBackend) -> None:
        """Compute it once, of padding that sees nothing.

        Raises:
            Exception: what it raised.
        """

        def compute() -> None:
            self._begin()
            while self._pieces is not None:
                self._go_on()

        backend.warm_up(compute)

    @torch.inference_mode()
    def capture(self, backend: GraphBackend) -> None:
        """Make it replayable.

        Raises:
            Exception: what capturing it raised.
        """
        num_attentions = len(self._attentions)
        self._replays = backend.capture([self._begin, *[self._go_on] * num_attentions])
        self._pieces = None

    def replay(self, token_ids_T: torch.Tensor, batch: AttentionBatch, on_layer: Callable[[int], None]) -> torch.Tensor:
        """The trunk over not more rows -> [T, D]; valid until the next replay of any."""
        num_rows = len(token_ids_T)
        assert num_rows <= self.num_rows
        for row, values_T in enumerate((token_ids_T, positions_of(batch), slots_of(batch))):
            self._numbers_3N[row, :num_rows].copy_(values_T)
        self._numbers_3N[2, num_rows:].fill_(self._pool.scratch_slot)  # other numbers of padding do not matter
        attend = _Attend(self._query_NAE[:num_rows], self._mixed_NQ[:num_rows], batch, self._pool)
        for replay, attention in zip(self._replays, self._attentions, strict=False):
            replay()
            on_layer(attention.layer)
            attend(attention)
        self._replays[-1]()
        self.num_taped += attend.num_taped
        return self._output_ND[:num_rows]

    def _begin(self) -> None:
        """The first piece."""
        self._attentions = []
        token_ids_N, positions_N, slots_N = self._numbers_3N
        self._pieces = self._model.trunk_pieces(token_ids_N, positions_N, slots_N, self._pool)
        self._take(*next(self._pieces))

    def _go_on(self) -> None:
        """The next one."""
        assert self._pieces is not None
        try:
            self._take(*self._pieces.send(self._mixed_NQ))
        except StopIteration as end:
            self._output_ND.copy_(end.value)
            self._pieces = None

    def _take(self, attention: Attention, query_NAE: torch.Tensor) -> None:
        self._attentions.append(attention)
        self._query_NAE.copy_(query_NAE)


class _Attend:
    """The attentions of one step: the first makes what all share, the second is recorded, the others replay that.

    Args:
        query_TAE: what each reads.
        mixed_TQ: what each writes, [T, A * V].
        batch: of the step.
        pool: of the runner.
    """

    def __init__(self, query_TAE: torch.Tensor, mixed_TQ: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> None:
        self.num_taped = 0
        self._query_TAE, self._batch, self._pool = query_TAE, batch, pool
        self._mixed_TAV = mixed_TQ.view(*query_TAE.shape[:2], -1)
        self._plans = SplitKVPlans()
        self._num_done = 0
        self._tape: LaunchTape[tuple[torch.Tensor, ...]] | None = None
        self._shape: tuple[object, ...] = ()
        self._stream = torch.cuda.current_stream(pool.device).cuda_stream if pool.device.type == "cuda" else 0

    def __call__(self, attention: Attention) -> None:
        """Of one layer."""
        stored = attention.stored(self._pool)
        tape, self._num_done = self._tape, self._num_done + 1
        if tape is not None and self._shape == tuple(map(signature, stored)):
            tape.replay(self._stream, stored)
            self.num_taped += 1
            self._hand_on(tape.made)
            return

        def attend() -> tuple[torch.Tensor, ...]:
            return attention.attend(self._query_TAE, self._batch, stored, self._plans)

        if self._num_done == _RECORDED:
            made, self._tape = record(attend, stored)
            self._shape = tuple(map(signature, stored))
        else:
            made = attend()
        self._hand_on(made)

    def _hand_on(self, parts: tuple[torch.Tensor, ...]) -> None:
        first = 0
        for part_XAV in parts:
            self._mixed_TAV[first : first + len(part_XAV)].copy_(part_XAV)
            first += len(part_XAV)
