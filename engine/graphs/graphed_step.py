"""Replays steps from CUDA graphs: decode-only steps as whole passes, the trunk of other steps in pieces.

A decode-only step is padded to the next captured size and width, and computed by three kinds of graphs (`passes`,
`graphs.key`). Work between them (drafts from logits, verification, sampling, grammars, log-probabilities) is launched
eagerly, over the real sequences alone, whatever the plan asks. A step that no graph fits runs eagerly; the reason is
counted, and logged once. The set of graphs is fixed before the first step and is the same on every rank. Steps with
prefill chunks replay the pieces between attention layers (`piecewise`), or run eagerly if they have too many rows.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

import torch

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import BatonError, WorkerLost, WorkerStartFailed
from baton.core.numerics import Numerics
from baton.core.start_phase import GRAPHS, OnPhase, no_phase
from baton.engine.graphs.backend import CaptureRefused, CudaBackend, GraphBackend, Replay
from baton.engine.graphs.key import (
    EagerReason,
    GraphKey,
    GraphKind,
    GraphSizes,
    default_sizes,
    default_widths,
    max_invariant_entries,
)
from baton.engine.graphs.piecewise import PiecewiseTrunk, RowBuffers, activation_bytes, row_sizes
from baton.engine.graphs.static_deal import StaticDeal
from baton.engine.step.batch import DecodeRows, PrefillInputs, decode_batch
from baton.engine.step.dealt_passes import rank_blocks
from baton.engine.step.passes import EagerPasses, Hidden, Passes, ignore_layer
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.model.dealt_rows import DealtBatch, PassBatch
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator

VERSION = 1
_MAX_PROBLEM_LEN = 300


class Candidate(Protocol):
    """One graph that may be captured."""

    @property
    def name(self) -> str:
        """Unique among graphs, and the same on every rank."""
        ...

    def require(self) -> None:
        """Check that it may be captured on this rank.

        Raises:
            CaptureRefused: it may not.
        """
        ...

    def warm_up(self) -> None:
        """Compute it once; the only call that uses collectives.

        Raises:
            RuntimeError: whatever torch raises.
        """
        ...

    def capture(self) -> None:
        """Capture it.

        Raises:
            RuntimeError: whatever torch raises.
        """
        ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Captured(Generic[C]):
    """The outcome of capturing, the same on every rank.

    Attributes:
        graphs: those that every rank has captured.
        failed: reason for each of the others, by name.
    """

    graphs: list[C] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def capture_together(group: Communicator, candidates: Iterable[C]) -> Captured[C]:
    """Capture, in this order, which is the same on all ranks, every graph that all of them can capture.

    Raises:
        WorkerStartFailed: this rank could not warm one up, and others wait for it.
        WorkerLost: another rank is gone, or captures other graphs.
    """
    captured: Captured[C] = Captured()
    for candidate in candidates:
        problem = agree(group, f"may {candidate.name}", _problem_of(candidate.require))
        if problem is None:
            problem = _warm_up(group, candidate)
        if problem is None:
            problem = agree(group, f"has {candidate.name}", _problem_of(candidate.capture))
        if problem is None:
            captured.graphs.append(candidate)
        else:
            captured.failed[candidate.name] = problem
    return captured


def agree(group: Communicator, subject: str, problem: str | None) -> str | None:
    """The problem of the lowest rank that has one with the subject; None if no rank has any.

    Raises:
        WorkerLost: a rank is gone, or voted on another subject.
    """
    problem = None if problem is None else problem[:_MAX_PROBLEM_LEN]
    votes = group.gather_bytes(json.dumps([VERSION, subject, problem]).encode())
    found = None
    for rank, vote in enumerate(votes):
        version, other_subject, other_problem = _read(vote, rank, group.size)
        if (version, other_subject) != (VERSION, subject):
            message = f"rank {rank} of {group.size} is at {other_subject!r} where rank {group.rank} is at {subject!r}"
            raise WorkerLost(message, rank=rank, size=group.size, how="diverged")
        if found is None and other_problem is not None:
            found = other_problem if group.size == 1 else f"rank {rank}: {other_problem}"
    return found


def _read(vote: bytes, rank: int, size: int) -> tuple[int, str, str | None]:
    try:
        version, subject, problem = json.loads(vote)
    except (ValueError, TypeError) as error:
        raise WorkerLost(f"rank {rank} of {size} votes in no known form", rank=rank, size=size) from error
    return version, subject, problem


def _warm_up(group: Communicator, candidate: Candidate) -> str | None:
    problem = _problem_of(candidate.warm_up)
    if problem is None or group.size == 1:
        return problem
    message = f"rank {group.rank} of {group.size} could not compute {candidate.name}: {problem}"
    raise WorkerStartFailed(message, rank=group.rank, size=group.size)


def _problem_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except (CaptureRefused, RuntimeError) as error:  # everything torch raises; a programming error is no vote
        assert not isinstance(error, BatonError)
        return f"{type(error).__name__}: {error}"
    return None


_FIRST, _LIMIT, _STATE = 0, 1, 2  # columns; the state slot only if the layout has state


class StaticPass:
    """Buffers of one pass, and its graph once `capture` has been called.

    Args:
        key: kind and shapes.
        model: the model.
        pool: its KV pool.
        deal: which sequences this rank attends for; None: all.
    """

    def __init__(self, key: GraphKey, model: Model, pool: KVPool, deal: StaticDeal | None = None) -> None:
        assert key.num_each == (0 if deal is None else deal.num_each)
        self.key = key
        self._deal = deal
        self._model = model
        self._pool = pool
        self._tokens = _STATE + pool.layout.has_state
        self._tables = self._tokens + key.num_rows
        num_numbers, num_tokens = self._tables + key.width, key.num_sequences * key.num_rows
        padding_C = torch.zeros(num_numbers, dtype=torch.int64, device=pool.device)
        padding_C[_LIMIT] = 1
        padding_C[_STATE : self._tokens] = pool.num_state_slots
        padding_C[self._tables :] = pool.num_blocks if deal is None else deal.blocks.null_block
        self._padding_BC = padding_C.expand(key.num_sequences, -1)
        self._all_numbers_BC = padding_C.repeat(key.num_sequences + (deal is not None), 1)  # see `StaticDeal.own`
        self._numbers_BC = self._all_numbers_BC[: key.num_sequences]
        trunk, head = model.trunk_width, model.config.hidden_size
        self._hidden_TD: torch.Tensor | None = None  # hidden states that a draft head joins with its tokens
        if key.kind is not GraphKind.VERIFY:
            width = head if key.kind is GraphKind.DRAFT else trunk
            self._hidden_TD = torch.zeros(num_tokens, width, dtype=model.dtype, device=pool.device)
        width = trunk if key.kind is GraphKind.VERIFY else head
        self._output_TD = torch.zeros(num_tokens, width, dtype=model.dtype, device=pool.device)
        self._replay: Replay | None = None
        self._num_written = 0  # rows that hold sequences of earlier replays and no padding

    @property
    def num_bytes(self) -> int:
        """Approximate peak memory of the pass, besides its buffers.

        Kernels read K and V in place; torch's attention gathers K and V of all tables, and copies them.
        """
        activations = activation_bytes(self._model, self.key.num_sequences * self.key.num_rows)
        if self._deal is not None:  # what each rank gives and what all get
            num_rows = (self._deal.num_each + self._deal.num_rows) * self.key.num_rows
            activations += num_rows * self._model.config.hidden_size * self._model.dtype.itemsize
        if self._model.implementation is Implementation.TRITON:
            return activations
        layout = self._pool.layout
        positions = self.key.num_attended * self.key.width * layout.block_size
        widest = max(
            self._pool.geometry.layer(at).num_heads * layer.row_len
            for at, layer in enumerate(layout.layers)
            if not layer.is_state
        )
        return activations + 4 * 2 * positions * widest * self._model.dtype.itemsize

    @torch.inference_mode()
    def warm_up(self, backend: GraphBackend, *, is_first: bool) -> None:
        """Compute the pass once, on padding: all layers for the first graph of a kind, later one layer of each kind.

        Whatever a layer allocates at its first use must not be allocated during a capture, whose memory graphs share.

        Raises:
            Exception: what it raised.
        """
        with nullcontext() if is_first else self._model.one_of_each_layer():
            backend.warm_up(self._compute)

    @torch.inference_mode()
    def capture(self, backend: GraphBackend) -> None:
        """Capture the pass.

        Raises:
            Exception: what the capture raised.
        """
        (self._replay,) = backend.capture([self._compute])

    def replay(
        self, token_ids_BQ: torch.Tensor, first_B: torch.Tensor, rows: DecodeRows, hidden_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the pass over a batch that fits -> [T, D] of that batch; valid until the next replay."""
        key = self.key
        num_sequences, num_blocks = rows.block_tables_BM.shape
        num_tokens = num_sequences * key.num_rows
        assert self._replay is not None
        assert num_sequences <= key.num_sequences
        assert num_blocks <= key.width
        assert token_ids_BQ.shape == (num_sequences, key.num_rows)
        parts = [first_B[:, None], rows.limit_B[:, None]]
        if self._pool.layout.has_state:
            assert rows.state_slots_B is not None
            parts.append(rows.state_slots_B[:, None])
        parts += token_ids_BQ, rows.block_tables_BM
        if num_blocks < key.width:
            parts.append(self._padding_BC[:num_sequences, self._tables + num_blocks :])
        num_before, self._num_written = self._num_written, max(self._num_written, num_sequences)
        torch.cat(parts, dim=1, out=self._numbers_BC[:num_sequences])
        if num_sequences < num_before:
            self._numbers_BC[num_sequences:num_before].copy_(self._padding_BC[num_sequences:num_before])
            self._num_written = num_sequences
        if self._hidden_TD is not None:
            assert hidden_TD is not None
            self._hidden_TD[:num_tokens].copy_(hidden_TD)
        self._replay()
        return self._output_TD[:num_tokens]

    def _compute(self) -> None:
        """Compute the output from the buffers; this is what is captured."""
        numbers_BC, key, pool, deal = self._numbers_BC, self.key, self._pool, self._deal
        token_ids_T = numbers_BC[:, self._tokens : self._tables].flatten()
        if deal is not None:
            numbers_BC = deal.own(self._all_numbers_BC)
        limit_B, tables_BW = numbers_BC[:, _LIMIT], numbers_BC[:, self._tables :]
        if deal is not None:
            tables_BW = deal.blocks.own_tables(tables_BW)
        slots_B = numbers_BC[:, _STATE] if pool.layout.has_state else None
        rows = DecodeRows(block_tables_BM=tables_BW, limit_B=limit_B, draft_cap_B=limit_B, state_slots_B=slots_B)
        max_context_len = key.width * pool.layout.block_size
        own = decode_batch(numbers_BC[:, _FIRST], key.num_rows, rows, max_context_len, pool, self._model.around)
        batch = own if deal is None else DealtBatch(own=own, rows=deal.rows(key.num_rows))
        if self._hidden_TD is None:
            self._output_TD.copy_(self._model.trunk(token_ids_T, batch, pool, ignore_layer))
        else:
            self._output_TD.copy_(self._model.mtp(token_ids_T, self._hidden_TD, batch, pool, ignore_layer))


_MAX_TOLD = 8  # log lines, one per failed graph; `GraphCounts` has them all
_ENTRIES_PER_BLOCK = 16  # table entries of a graph per block of the pool: a batch may have one long context

log = logging.getLogger(__name__)


@dataclass(slots=True)
class GraphCounts:
    """Counts of what was replayed and what was not; written by the executor, read by any thread.

    Attributes:
        num_captured: captured graphs.
        failed: reason for each graph that could not be captured, by name.
        num_steps_replayed: replayed steps.
        num_steps_eager: eager steps, by reason.
        num_sequences_padded: padding sequences in replayed steps.
        num_steps_piecewise: steps with prefill chunks whose trunk was replayed in pieces.
    """

    num_captured: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    num_steps_replayed: int = 0
    num_steps_eager: dict[EagerReason, int] = field(default_factory=lambda: dict.fromkeys(EagerReason, 0))
    num_sequences_padded: int = 0
    num_steps_piecewise: int = 0


class GraphedStep:
    """The captured graphs of a runner; `capture` must be called first.

    Args:
        model: the runner's model.
        pool: the runner's pool.
        sizes: which graphs to capture.
        backend: captures them.
        communicator: of the runner's ranks, which all capture at the same time; None: a single rank.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        sizes: GraphSizes,
        backend: GraphBackend,
        communicator: Communicator | None = None,
    ) -> None:
        self.counts = GraphCounts()
        self._model = model
        self._pool = pool
        self._sizes = sizes
        self._backend = backend
        self._communicator = communicator or Alone()
        self._graphs: dict[GraphKey, StaticPass] = {}
        self._deals: dict[tuple[int, int], StaticDeal] = {}  # by B and C
        self._trunks: list[PiecewiseTrunk] = []  # by rows, ascending
        self._told: set[EagerReason] = set()

    def capture(self, on_phase: OnPhase = no_phase) -> None:
        """Capture every graph that all ranks can capture; logs and counts the others. Calls `on_phase` before each.

        Raises:
            WorkerStartFailed: this rank failed where others wait for it.
            WorkerLost: another rank is gone, or captures other graphs.
        """
        start_s = time.monotonic()
        candidates = chain(self._whole_passes(), self._trunk_candidates())
        captured = capture_together(self._communicator, self._reported(candidates, on_phase))
        made = [item.made() for item in captured.graphs]
        self._graphs = {item.key: item for item in made if isinstance(item, StaticPass)}
        trunks = [item for item in made if isinstance(item, PiecewiseTrunk)]
        self._trunks = sorted(trunks, key=lambda trunk: trunk.num_rows)
        self.counts.num_captured, self.counts.failed = len(captured.graphs), captured.failed
        for name, why in islice(captured.failed.items(), _MAX_TOLD):
            log.warning("no CUDA graph for %s, which is computed as it comes: %s", name, why)
        if len(captured.failed) > _MAX_TOLD:
            log.warning("and none for %d others", len(captured.failed) - _MAX_TOLD)
        log.info("captured %d graphs in %.1f s", len(captured.graphs), time.monotonic() - start_s)

    def passes(
        self, rows: DecodeRows, num_drafts: int, max_context_len: int, owners: Sequence[int] = ()
    ) -> Passes | None:
        """The replayed passes of a decode-only step; None if no graph fits.

        If sequences are distributed over ranks, `owners` names the rank of each.
        """
        num_sequences, num_blocks = rows.block_tables_BM.shape
        most_owned = max(Counter(owners).values()) if self._sizes.num_owners > 1 else 0
        graphs = self._find(num_sequences, num_blocks, num_drafts, most_owned)
        if isinstance(graphs, EagerReason):
            self._tell(graphs, num_sequences, num_drafts, max_context_len)
            return None
        key = graphs[GraphKind.VERIFY].key
        self.counts.num_steps_replayed += 1
        self.counts.num_sequences_padded += key.num_sequences - num_sequences
        if key.num_each:
            self._deals[key.num_sequences, key.num_each].write(owners)
        return _ReplayedPasses(graphs, rows)

    def passes_with_chunks(
        self,
        rows: DecodeRows | None,
        max_context_len: int,
        prompt: PrefillInputs,
        on_layer: Callable[[int], None] | None,
    ) -> Passes:
        """The passes of a step with chunks, and with decode rows if there are any; see `EagerPasses`."""
        return _PiecewisePasses(self, self._model, self._pool, rows, max_context_len, prompt, on_layer)

    def trunk_of(self, num_rows: int) -> PiecewiseTrunk | None:
        """Replays the trunk of a step with chunks; None if it must run eagerly."""
        found = next((trunk for trunk in self._trunks if trunk.num_rows >= num_rows), None)
        if found is not None:
            self.counts.num_steps_piecewise += 1
        elif self._trunks:  # not logged: with so many rows the device takes longer than the host's launches
            self.counts.num_steps_eager[EagerReason.ROWS] += 1
        return found

    def _reported(self, candidates: "Iterable[_Candidate[Any]]", on_phase: OnPhase) -> "Iterator[_Candidate[Any]]":
        num_total = sum(1 for _ in self._sizes.keys()) + len(self._sizes.rows)
        for num_done, candidate in enumerate(candidates):
            on_phase(GRAPHS, num_done, num_total)
            yield candidate

    def _whole_passes(self) -> "Iterator[_Candidate[Any]]":
        warmed: set[GraphKind] = set()  # kinds whose layers have all been launched: a refused graph launches none

        def warm_up(static: StaticPass) -> None:
            static.warm_up(self._backend, is_first=static.key.kind not in warmed)
            warmed.add(static.key.kind)

        for key in self._sizes.keys():
            yield _Candidate(str(key), partial(self._whole_pass, key), warm_up, self._backend)

    def _whole_pass(self, key: GraphKey) -> StaticPass:
        return StaticPass(key, self._model, self._pool, self._deal_of(key))

    def _deal_of(self, key: GraphKey) -> StaticDeal | None:
        """Distribution buffers that all graphs with the same B and C share."""
        if not key.num_each:
            return None
        sizes = key.num_sequences, key.num_each
        if sizes not in self._deals:
            deal, device = self._model.deal, self._pool.device
            assert deal is not None
            self._deals[sizes] = StaticDeal(deal, rank_blocks(self._model, self._pool), *sizes, device)
        return self._deals[sizes]

    def _trunk_candidates(self) -> "Iterator[_Candidate[Any]]":
        """Trunk graphs, largest first, like the others."""
        if not self._sizes.rows:
            return
        buffers = RowBuffers.of(self._sizes.rows[-1], self._model, self._pool, self._communicator.size)
        for num_rows in reversed(self._sizes.rows):
            yield _Candidate(
                f"trunk of {num_rows} rows",
                partial(PiecewiseTrunk, num_rows, buffers, self._model, self._pool),
                partial(PiecewiseTrunk.warm_up, backend=self._backend),
                self._backend,
            )

    def _find(
        self, num_sequences: int, num_blocks: int, num_drafts: int, most_owned: int
    ) -> dict[GraphKind, StaticPass] | EagerReason:
        """The graphs of a step, or why there are none."""
        shape = self._sizes.shape_for(num_sequences, num_blocks, most_owned)
        if isinstance(shape, EagerReason):
            return shape
        keys = self._sizes.step_keys(shape, num_drafts)
        if isinstance(keys, EagerReason):
            return keys
        graphs = [self._graphs.get(key) for key in keys]
        found = {graph.key.kind: graph for graph in graphs if graph is not None}
        return found if len(found) == len(keys) else EagerReason.FAILED

    def _tell(self, reason: EagerReason, num_sequences: int, num_drafts: int, max_context_len: int) -> None:
        self.counts.num_steps_eager[reason] += 1
        if reason not in self._told:
            self._told.add(reason)
            log.warning(
                "a decode step of %d sequences with %d drafts and contexts up to %d has no CUDA graph: %s",
                num_sequences,
                num_drafts,
                max_context_len,
                reason.value,
            )


class _ReplayedPasses:
    """The passes of one step as graphs; see `passes.Passes`."""

    def __init__(self, graphs: dict[GraphKind, StaticPass], rows: DecodeRows) -> None:
        self._graphs = graphs
        self._rows = rows

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        return self._graphs[GraphKind.DRAFT].replay(token_B[:, None], position_B, self._rows, hidden_BD)

    def trunk(self, ids_BQ: torch.Tensor | None, first_B: torch.Tensor | None) -> Hidden:
        assert ids_BQ is not None and first_B is not None
        return None, self._graphs[GraphKind.VERIFY].replay(ids_BQ, first_B, self._rows, None)

    def extend(
        self,
        prompt: tuple[torch.Tensor, torch.Tensor] | None,
        decode: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> Hidden:
        assert prompt is None and decode is not None
        ids_BQ, trunk_TD, first_B = decode
        return None, self._graphs[GraphKind.DRAFT_PREFILL].replay(ids_BQ, first_B, self._rows, trunk_TD)


class _PiecewisePasses(EagerPasses):
    """Passes whose trunk is replayed in pieces, if it has few enough rows."""

    def __init__(self, graphs: GraphedStep, *of_step: Any) -> None:
        super().__init__(*of_step)
        self._graphs = graphs

    def _trunk(self, token_ids_T: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        trunk = self._graphs.trunk_of(len(token_ids_T))
        if trunk is None or isinstance(batch, DealtBatch):
            return super()._trunk(token_ids_T, batch)
        return trunk.replay(token_ids_T, batch, self._on_layer)


P = TypeVar("P", bound=StaticPass | PiecewiseTrunk)


class _Candidate(Generic[P]):
    """A graph that is being captured; see `Candidate`."""

    def __init__(self, name: str, make: Callable[[], P], warm_up: Callable[[P], None], backend: GraphBackend) -> None:
        self.name = name
        self._make = make
        self._warm_up = warm_up
        self._backend = backend
        self._pass: P | None = None

    def require(self) -> None:
        """Allocate the buffers here, too: a rank without enough memory then refuses the graph instead of crashing."""
        made = self._make()
        self._backend.require(made.num_bytes)
        self._pass = made

    def warm_up(self) -> None:
        self._warm_up(self.made())

    def capture(self) -> None:
        self.made().capture(self._backend)

    def made(self) -> P:
        assert self._pass is not None
        return self._pass


def graph_sizes(
    model: Model,
    pool: KVPool,
    *,
    max_num_sequences: int,
    num_draft_tokens: int,
    max_model_len: int,
    max_num_tokens: int = 0,
    sizes: Sequence[int] = (),
    decodes: bool = True,
) -> GraphSizes:
    """The graphs that a runner may need; `sizes` are an operator's. Without `decodes`, no graphs of decode steps."""
    layout, config = pool.layout, model.config
    max_context_len = min(config.max_model_len, max_model_len + num_draft_tokens)
    max_entries = _ENTRIES_PER_BLOCK * pool.num_blocks
    rows = row_sizes(max_num_tokens, config) if model.deal is None else ()
    if model.numerics is Numerics.INVARIANT and model.implementation is Implementation.REFERENCE:
        rows = ()  # a GEMM needs a launch for every few rows
        max_entries = min(max_entries, max_invariant_entries(layout.num_layers, layout.block_size))
    return GraphSizes(
        sizes=(tuple(sizes) or default_sizes(max_num_sequences)) if decodes else (),
        widths=default_widths(-(-max_context_len // layout.block_size)),
        num_draft_tokens=num_draft_tokens,
        has_mtp=layout.has_mtp,
        num_owners=1 if model.deal is None else model.deal.size,
        max_entries=max_entries,
        rows=rows,
    )


def graphed_step(
    model: Model,
    pool: KVPool,
    config: CudaGraphConfig,
    *,
    max_num_sequences: int,
    num_draft_tokens: int,
    max_model_len: int,
    max_num_tokens: int = 0,
    communicator: Communicator | None = None,
    decodes: bool = True,
    on_phase: OnPhase = no_phase,
) -> GraphedStep | None:
    """The graphs of a runner with these limits, captured; None if there are to be none.

    Steps with chunks have at most `max_num_tokens` rows, including decode rows; 0: they run eagerly, as do those whose
    sequences are distributed over ranks. Without `decodes` there are no decode steps.

    Raises:
        ConfigInvalid: sizes that do not fit the device or the runner.
        StartupError: see `GraphedStep.capture`.
        WorkerLost: see `GraphedStep.capture`.
    """
    config.require_fits(device=pool.device.type, max_num_seqs=max_num_sequences)
    if config.mode == "off" or pool.device.type != "cuda":
        return None
    if pool.layout.has_state and model.implementation is not Implementation.TRITON:
        log.warning("no CUDA graphs: torch computes layers that keep state by too many launches")
        return None
    sizes = graph_sizes(
        model,
        pool,
        max_num_sequences=max_num_sequences,
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len,
        max_num_tokens=max_num_tokens,
        sizes=config.sizes,
        decodes=decodes,
    )
    step = GraphedStep(model, pool, sizes, CudaBackend(pool.device, communicator or Alone()), communicator)
    step.capture(on_phase)
    return step
