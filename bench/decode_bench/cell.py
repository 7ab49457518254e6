"""One cell of `baton bench decode`: sequences at the end of their prompts are decoded for some steps.

The runner is Baton's (`engine.step.runner.Runner`), driven as the engine drives it: with `sync` each step is read
before the next is launched, with `async` the next is launched first. There is no scheduler, no stream and no end of a
sequence, so that only the step is measured. KV is random numbers in scattered blocks.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.bench.decode_bench.options import BLOCK_SIZE, WARM_STEPS, DecodeOptions
from baton.bench.kernel_bench.case import Call
from baton.core.config import SchedulingName
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.executor import Pending, StepExecutor
from baton.engine.step.host_future import HostFuture
from baton.engine.step.length_bounds import LaunchedLengths, LengthBounds
from baton.engine.step.plan import Chunk, Place, Release, Resume, Step
from baton.engine.step.result import StepTicket
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import Rank0Runner
from baton.kvcache.allocator import BlockTable
from baton.model.model import Model


def kept(function: Callable[[], object]) -> Call:
    """Wrap a function into a call that keeps its last result alive."""
    results: list[object] = [None]

    def call() -> None:
        results[0] = function()

    return call


class _Stamp(Protocol):
    """A time stamp in the order of work."""

    def record(self) -> None:
        """Record the stamp."""
        ...


class _HostStamp:
    """A stamp on a CPU, where work happens when it is called."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def record(self) -> None:
        """See `_Stamp`."""
        self.time_s = time.perf_counter()


class _DeviceStamp:
    """A stamp on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        """See `_Stamp`."""
        self.event.record(torch.cuda.current_stream(self._device))


class StampedExecutor:
    """Wraps a runner's executor and stamps its steps; `take` returns the times.

    Args:
        executor: executor that does the work.
        device: device of the executor.
    """

    def __init__(self, executor: StepExecutor, device: torch.device) -> None:
        self._executor = executor
        self._device = device
        self._steps: list[tuple[_Stamp, _Stamp]] = []
        self._end: _Stamp | None = None  # end stamp of the step whose second part comes next

    def submit(self, work: Callable[[], torch.Tensor], target: torch.Tensor) -> HostFuture:
        """See `StepExecutor`."""
        begin, end = self._stamp(), self._stamp()
        self._steps.append((begin, end))
        self._end = end

        def stamped() -> torch.Tensor:
            begin.record()
            return work()

        return self._executor.submit(stamped, target)

    def run(self, work: Callable[[], None]) -> Pending:
        """See `StepExecutor`."""
        end, self._end = self._end, None
        if end is None:
            return self._executor.run(work)

        def stamped() -> None:
            work()
            end.record()

        return self._executor.run(stamped)

    def drain(self) -> None:
        """See `StepExecutor`."""
        self._executor.drain()

    def close(self) -> None:
        """See `StepExecutor`."""
        self._executor.close()

    def take(self) -> tuple[list[float], list[float]]:
        """Milliseconds of each step since the last call, and between consecutive steps; waits until all are over."""
        self.drain()
        steps, self._steps = self._steps, []
        within = [_ms_between(begin, end) for begin, end in steps]
        between = [_ms_between(steps[at - 1][1], steps[at][0]) for at in range(1, len(steps))]
        return within, between

    def _stamp(self) -> _Stamp:
        return _DeviceStamp(self._device) if self._device.type == "cuda" else _HostStamp()


def _ms_between(first: _Stamp, second: _Stamp) -> float:
    if isinstance(first, _DeviceStamp) and isinstance(second, _DeviceStamp):
        return float(first.event.elapsed_time(second.event))
    assert isinstance(first, _HostStamp)
    assert isinstance(second, _HostStamp)
    return 1e3 * (second.time_s - first.time_s)


@dataclass(frozen=True, slots=True, order=True)
class DecodeCell:
    """What is measured: scheduling, drafts per step, number of sequences, and whether graphs are replayed."""

    scheduling: SchedulingName
    num_drafts: int
    batch: int
    has_graphs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRound:
    """One cell in one round.

    Attributes:
        tpot_ms: time per token of one sequence.
        tokens_per_s: tokens per second of all sequences.
        step_ms: time from one step to the next, by the host's clock.
        launch_ms: part of it that the host takes to launch the step.
        device_ms: time from a step's begin on the device to its end.
        idle_ms: time on the device from a step's end to the next one's begin.
        tokens_per_step: tokens per step of one sequence.
        context_len: mean positions of a sequence.
    """

    tpot_ms: float
    tokens_per_s: float
    step_ms: float
    launch_ms: float
    device_ms: float
    idle_ms: float
    tokens_per_step: float
    context_len: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """GPU work of one step.

    Attributes:
        kernel_us: microseconds per step of each kernel or copy, by name.
        num_kernels: number of kernels and copies per step.
    """

    kernel_us: Mapping[str, float]
    num_kernels: float

    def shares(self, num_named: int) -> dict[str, float]:
        """Shares of the total time: of the `num_named` longest, by name, and of all others."""
        total_us = sum(self.kernel_us.values())
        ranked = sorted(self.kernel_us.items(), key=lambda item: -item[1])
        named = {name: us / total_us for name, us in ranked[:num_named]}
        return named | {"others": sum(us for _, us in ranked[num_named:]) / total_us}


class DecodeCells:
    """All cells on one runner, whose slots are refilled for each turn.

    Args:
        runner: runner with `max(options.batches)` slots and `max(options.drafts)` drafts; in a TP group, rank 0's.
        executor: executor of the runner.
        model: model of the runner.
        options: options of the run.
    """

    def __init__(
        self, runner: Runner | Rank0Runner, executor: StampedExecutor, model: Model, options: DecodeOptions
    ) -> None:
        self._runner = runner
        self._executor = executor
        self._model = model
        self._options = options
        self._tables = block_tables(options)
        self._has_state = model.kv_layout(BLOCK_SIZE).has_state
        self._rng = np.random.default_rng(options.seed)

    def measure(self, cell: DecodeCell) -> CellRound:
        """Measure one round of a cell."""
        slots = self.fill(cell)
        run = _Run(self._runner, slots, cell, self._options)
        num_warm = run.steps(WARM_STEPS)
        self._executor.take()
        num_steps, run.launch_s = self._options.steps, 0.0
        begin_s = time.perf_counter()
        num_tokens = run.steps(num_steps)
        self._runner.drain()  # including the last step's draft extend
        took_s = time.perf_counter() - begin_s
        within, between = self._executor.take()
        self.empty(slots)
        num_each = num_tokens / cell.batch
        return CellRound(
            tpot_ms=1e3 * took_s / num_each,
            tokens_per_s=num_tokens / took_s,
            step_ms=1e3 * took_s / num_steps,
            launch_ms=1e3 * run.launch_s / num_steps,
            device_ms=sum(within) / len(within),
            idle_ms=sum(between) / max(len(between), 1),
            tokens_per_step=num_each / num_steps,
            context_len=self._options.prompt_len + 1 + num_warm / cell.batch + num_each / 2,
        )

    def device_work(self, cell: DecodeCell) -> DeviceWork:
        """Measure a step's GPU work with the profiler."""
        slots = self.fill(cell)
        run = _Run(self._runner, slots, cell, self._options)
        run.steps(WARM_STEPS)
        self._executor.take()
        num_steps = min(8, self._options.steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run.steps(num_steps)
            self._executor.take()
        self.empty(slots)
        events = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
        times_us: Counter[str] = Counter()
        for event in events:
            times_us[event.name] += event.time_range.elapsed_us()
        kernel_us = {name: us / num_steps for name, us in times_us.items()}
        return DeviceWork(kernel_us=kernel_us, num_kernels=len(events) / num_steps)

    def fill(self, cell: DecodeCell) -> list[int]:
        """Put a cell's sequences, at the end of their prompt, into the first slots."""
        options, config = self._options, self._model.config
        for slot in range(cell.batch):
            first, draft = self._rng.integers(config.vocab_size, size=2).tolist()
            hidden_D = torch.from_numpy(self._rng.standard_normal(config.hidden_size)).to(self._model.dtype)
            hidden = hidden_D.view(torch.uint8).numpy().tobytes()
            sampling = SamplingParams(
                max_tokens=options.capacity_len, temperature=options.temperature, seed=slot, ignore_eos=True
            )
            place = Place(
                slot=slot,
                token_ids=(*(0,) * options.prompt_len, first),
                num_output=1,
                blocks=self._tables[slot].blocks,
                sampling=sampling,
                draft_cap=cell.num_drafts,
                resume=Resume(draft, hidden) if cell.num_drafts else Resume(),
                state_slot=slot if self._has_state else None,
            )
            self._runner.execute(place)
        return list(range(cell.batch))

    def empty(self, slots: list[int]) -> None:
        """Release the sequences; no step is running."""
        for slot in slots:
            self._runner.execute(Release(slot))


class _Run:
    """Steps of the same sequences, with bounds of their lengths, as an engine keeps them."""

    def __init__(
        self, runner: Runner | Rank0Runner, slots: list[int], cell: DecodeCell, options: DecodeOptions
    ) -> None:
        self._runner = runner
        self._slots = tuple(slots)
        self._num_drafts = cell.num_drafts
        self._num_ahead = 1 if cell.scheduling == "async" else 0
        self._slots_B = np.array(slots, dtype=np.int64)
        self._most_B = np.full(len(slots), cell.num_drafts + 1, dtype=np.int64)
        self._bounds = LengthBounds(len(slots))
        limit = blocks_each(options) * BLOCK_SIZE
        for slot in slots:
            self._bounds.admit(slot, options.prompt_len + 1, limit=limit, end=limit)
        self.launch_s = 0.0

    def steps(self, count: int) -> int:
        """Run `count` steps and read them all; return the number of emitted tokens."""
        num_tokens = 0
        in_flight: deque[tuple[StepTicket, LaunchedLengths]] = deque()
        for _ in range(count):
            begin_s = time.perf_counter()
            context_len = self._bounds.max_context_len(self._slots_B, self._num_drafts)
            ticket = self._runner.launch(
                Step(slots=self._slots, num_drafts=self._num_drafts, max_context_len=context_len)
            )
            in_flight.append((ticket, self._bounds.launch(self._slots_B, self._most_B)))
            self.launch_s += time.perf_counter() - begin_s
            if len(in_flight) > self._num_ahead:
                num_tokens += self._read(*in_flight.popleft())
        return num_tokens + sum(self._read(*item) for item in in_flight)

    def _read(self, ticket: StepTicket, launched: LaunchedLengths) -> int:
        emitted_B = np.array([len(row.token_ids) for row in ticket.result().decode], dtype=np.int64)
        self._bounds.collect(launched, emitted_B)
        return int(emitted_B.sum())


def block_tables(options: DecodeOptions) -> list[BlockTable]:
    """Block tables of every slot, scattered over the pool as in one that has been used for a while."""
    num_each, num_sequences = blocks_each(options), max(options.batches)
    order = np.random.default_rng(options.seed).permutation(num_each * num_sequences)
    return [BlockTable(tuple(row), BLOCK_SIZE) for row in order.reshape(num_sequences, num_each).tolist()]


def blocks_each(options: DecodeOptions) -> int:
    """Number of blocks of one sequence."""
    return -(-options.capacity_len // BLOCK_SIZE)


def measure_ttft_ms(runner: Runner, options: DecodeOptions, vocab_size: int, *, has_state: bool = False) -> float:
    """Time from placing a prompt on an idle runner to its first token on the host: chunk by chunk, in slot 0."""
    rng = np.random.default_rng(options.seed)
    place = Place(
        slot=0,
        token_ids=tuple(rng.integers(vocab_size, size=options.prompt_len).tolist()),
        num_output=0,
        blocks=block_tables(options)[0].blocks,
        sampling=SamplingParams(max_tokens=2, temperature=options.temperature, ignore_eos=True),
        draft_cap=max(options.drafts),
        state_slot=0 if has_state else None,
    )
    runner.drain()
    begin_s = time.perf_counter()
    runner.execute(place)
    tickets = [
        runner.launch(
            Step(chunks=(Chunk(slot=0, start=start, length=min(options.chunk_len, options.prompt_len - start)),))
        )
        for start in range(0, options.prompt_len, options.chunk_len)
    ]
    assert tickets[-1].result().chunks[0].token is not None
    took_s = time.perf_counter() - begin_s
    for ticket in tickets:
        ticket.result()
    runner.execute(Release(0))
    runner.drain()
    return 1e3 * took_s
