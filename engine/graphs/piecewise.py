"""Replays the trunk of a step with prefill chunks in pieces: the host launches only the mixers.

Mixers are attentions and layers with a recurrent state (`StateMixer`). The work between two mixers depends only on the
number of rows, not on their sequences. So it is captured for some numbers of rows, and a step is padded to the next of
them. Mixers depend on lengths that differ between steps, and are launched between the pieces, by replaying the recorded
launches of one layer (`kernels.launch_tape`). The idea of pieces is vLLM's (V1, piecewise CUDA graphs).

Legend: N rows of a graph, T those of a step, A query heads, E columns of a query, V columns of a head's output (E
except for attention over latents), M columns of what a mixer makes.
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
from baton.model.config import ModelConfig
from baton.model.decoder import Mixer, Pieces
from baton.model.inputs import AttentionBatch, positions_of, slots_of
from baton.model.model import Model
from baton.model.state_mixer import StateMixer, state_rows

# With more rows, an H200 computes an 8B far longer than the host launches; in an MoE, few experts compute each row.
MAX_ROWS: Final = 2048
MAX_EXPERT_ROWS: Final = 4096
_RECORDED: Final = 2  # which mixer of a kind is recorded in a step, for the later ones


def row_sizes(max_rows: int, config: ModelConfig) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending: multiples of 32, and from 256 on with at most an eighth of padding."""
    last = min(max_rows, MAX_EXPERT_ROWS if config.num_experts else MAX_ROWS)
    sizes, size = [], 32
    while size < last:
        sizes.append(size)
        size += max(32, 1 << (size.bit_length() - 4))
    return (*sizes, last) if last > 0 else ()


def activation_bytes(model: Model, num_rows: int) -> int:
    """Approximate peak memory of a pass over `num_rows` rows, besides its buffers and what attention copies."""
    config = model.config
    return num_rows * 2 * max(2 * config.intermediate_size, config.hidden_size) * model.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MixerRows:
    """Buffers between the pieces and the mixers of one kind.

    Attributes:
        read: what the next mixer reads of each row: queries [N, A, E], or what a `StateMixer` projects.
        made_NM: what the mixer made.
    """

    read: tuple[torch.Tensor, ...]
    made_NM: torch.Tensor

    def first(self, num_rows: int) -> "MixerRows":
        """The first `num_rows` rows."""
        return MixerRows(tuple(read[:num_rows] for read in self.read), self.made_NM[:num_rows])


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """Buffers that all graphs of a runner share, for the largest number of rows.

    Attributes:
        numbers_3N: int64 token ids, positions and slots.
        attention: of every attention.
        state: of every layer with a recurrent state; None if the model has none.
        output_ND: hidden states after the final norm.
    """

    numbers_3N: torch.Tensor
    attention: MixerRows
    state: MixerRows | None
    output_ND: torch.Tensor

    @classmethod
    def of(cls, max_rows: int, model: Model, pool: KVPool, tp_size: int) -> "RowBuffers":
        """Buffers filled with padding, for one of `tp_size` ranks."""
        config, device = model.config, pool.device

        def zeros(*lens: int) -> torch.Tensor:
            return torch.zeros(max_rows, *lens, dtype=model.dtype, device=device)

        numbers_3N = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        numbers_3N[2] = pool.scratch_slot
        num_heads, mixer = config.num_heads // tp_size, model.state_mixer
        attention = MixerRows((zeros(num_heads, config.query_dim),), zeros(num_heads * config.value_dim))
        state = None if mixer is None else MixerRows(tuple(map(zeros, mixer.read_lens)), zeros(mixer.made_len))
        return cls(numbers_3N, attention, state, zeros(model.trunk_width))

    def first(self, num_rows: int) -> "RowBuffers":
        """The first `num_rows` rows."""
        state = None if self.state is None else self.state.first(num_rows)
        attention, output_ND = self.attention.first(num_rows), self.output_ND[:num_rows]
        return RowBuffers(self.numbers_3N[:, :num_rows], attention, state, output_ND)

    def of_mixer(self, mixer: Mixer) -> MixerRows:
        """The buffers for a mixer's kind."""
        rows = self.state if isinstance(mixer, StateMixer) else self.attention
        assert rows is not None
        return rows


class PiecewiseTrunk:
    """The trunk of N rows; `warm_up` and `capture` must be called first.

    Args:
        num_rows: N.
        buffers: the runner's buffers.
        model: the model.
        pool: its KV pool.
    """

    def __init__(self, num_rows: int, buffers: RowBuffers, model: Model, pool: KVPool) -> None:
        self.num_rows = num_rows
        self._buffers = buffers.first(num_rows)
        self._model = model
        self._pool = pool
        self._pieces: Pieces[torch.Tensor] | None = None
        self._mixers: list[Mixer] = []  # a piece ends before each
        self._replays: list[Replay] = []
        self.num_taped = 0  # layers whose mixer was replayed from a tape

    @property
    def num_bytes(self) -> int:
        """Approximate peak memory of a pass, besides the buffers."""
        return activation_bytes(self._model, self.num_rows)

    @torch.inference_mode()
    def warm_up(self, backend: GraphBackend) -> None:
        """Compute the trunk once, on padding that attends to nothing.

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
        """Capture the pieces.

        Raises:
            Exception: what the capture raised.
        """
        num_mixers = len(self._mixers)
        self._replays = backend.capture([self._begin, *[self._go_on] * num_mixers])
        self._pieces = None

    def replay(self, token_ids_T: torch.Tensor, batch: AttentionBatch, on_layer: Callable[[int], None]) -> torch.Tensor:
        """Run the trunk over at most N rows -> [T, D]; valid until the next replay of any trunk."""
        num_rows = len(token_ids_T)
        assert num_rows <= self.num_rows
        numbers_3N = self._buffers.numbers_3N
        for row, values_T in enumerate((token_ids_T, positions_of(batch), slots_of(batch))):
            numbers_3N[row, :num_rows].copy_(values_T)
        numbers_3N[2, num_rows:].fill_(self._pool.scratch_slot)  # the other values of padding rows do not matter
        mixing = _Mixing(self._buffers.first(num_rows), batch, self._pool)
        for replay, mixer in zip(self._replays, self._mixers, strict=False):
            replay()
            if isinstance(mixer, StateMixer):
                mixing.carry(mixer)
                for layer in mixer.pool_layers:
                    on_layer(layer)
            else:
                on_layer(mixer.layer)
                mixing.attend(mixer)
        self._replays[-1]()
        self.num_taped += mixing.num_taped
        return self._buffers.output_ND[:num_rows]

    def _begin(self) -> None:
        """Run the first piece."""
        self._mixers = []
        token_ids_N, positions_N, slots_N = self._buffers.numbers_3N
        self._pieces = self._model.trunk_pieces(token_ids_N, positions_N, slots_N, self._pool)
        self._take(*next(self._pieces))

    def _go_on(self) -> None:
        """Run the next piece."""
        assert self._pieces is not None
        try:
            self._take(*self._pieces.send(self._buffers.of_mixer(self._mixers[-1]).made_NM))
        except StopIteration as end:
            self._buffers.output_ND.copy_(end.value)
            self._pieces = None

    def _take(self, mixer: Mixer, read: tuple[torch.Tensor, ...]) -> None:
        self._mixers.append(mixer)
        for target, source in zip(self._buffers.of_mixer(mixer).read, read, strict=True):
            target.copy_(source)


class _Mixing:
    """Runs the mixers of one step.

    Args:
        rows: what they read and write, for the step's rows.
        batch: the step's batch.
        pool: the runner's pool.
    """

    def __init__(self, rows: RowBuffers, batch: AttentionBatch, pool: KVPool) -> None:
        self._rows, self._batch, self._pool = rows, batch, pool
        self._plans = SplitKVPlans()
        self._state_rows = () if rows.state is None else state_rows(batch, pool)
        stream = torch.cuda.current_stream(pool.device).cuda_stream if pool.device.type == "cuda" else 0
        self._attentions, self._state_mixers = _Layers(stream), _Layers(stream)

    @property
    def num_taped(self) -> int:
        """Number of layers launched by replaying a tape."""
        return self._attentions.num_taped + self._state_mixers.num_taped

    def attend(self, attention: Attention) -> None:
        """Compute attention for the queries."""
        (query_TAE,), made_TM = self._rows.attention.read, self._rows.attention.made_NM
        stored = attention.stored(self._pool)
        parts = self._attentions.run(lambda: attention.attend(query_TAE, self._batch, stored, self._plans), stored)
        made_TAV, first = made_TM.view(*query_TAE.shape[:2], -1), 0
        for part_XAV in parts:
            made_TAV[first : first + len(part_XAV)].copy_(part_XAV)
            first += len(part_XAV)

    def carry(self, mixer: StateMixer) -> None:
        """Carry the rows into their sequences' states."""
        rows, stored = self._rows.of_mixer(mixer), mixer.stored(self._pool)
        (out_TM,) = self._state_mixers.run(lambda: (mixer.carry(rows.read, stored, self._state_rows),), stored)
        rows.made_NM.copy_(out_TM)


class _Layers:
    """Mixers of one kind in a step: the first computes what all share, the second is recorded, the others replay it.

    Args:
        stream: the CUDA stream.
    """

    def __init__(self, stream: int) -> None:
        self.num_taped = 0
        self._stream = stream
        self._num_done = 0
        self._tape: LaunchTape[tuple[torch.Tensor, ...]] | None = None
        self._shape: tuple[object, ...] = ()

    def run(
        self, work: Callable[[], tuple[torch.Tensor, ...]], own: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The output of a layer, by its `work`; `own` are the tensors that belong to this layer alone."""
        tape, self._num_done = self._tape, self._num_done + 1
        if tape is not None and self._shape == tuple(map(signature, own)):
            tape.replay(self._stream, own)
            self.num_taped += 1
            return tape.made
        if self._num_done != _RECORDED:
            return work()
        made, self._tape = record(work, own)
        self._shape = tuple(map(signature, own))
        return made
