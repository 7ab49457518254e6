"""`baton bench decode`: the cost of a decode step on one device, with random weights of a published shape.

Every (scheduling, number of drafts, batch) is a cell. In each round every cell is measured once, in random order, after
one turn of each that does not count; rows hold medians over rounds. Random weights accept no drafts of their own, so
with drafts the verification is `synthetic`: the computation is the real one, and each draft is accepted at random.
Steps are measured on `Runner` alone, and so is the time to first token: of one prompt, while nothing else runs.
"""

import dataclasses
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from baton.bench.decode_bench.cell import (
    CellRound,
    DecodeCell,
    DecodeCells,
    DeviceWork,
    StampedExecutor,
    blocks_each,
    measure_ttft_ms,
)
from baton.bench.decode_bench.floor import copy_gbps, step_bytes, weight_bytes
from baton.bench.decode_bench.options import BLOCK_SIZE, DecodeOptions
from baton.bench.model_shapes import write_drafter, write_shape
from baton.bench.result import result, spread
from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import ConfigInvalid
from baton.engine.graphs.graphed_step import graphed_step
from baton.engine.step.runner import Runner
from baton.kernels.moe.fake_balance import ACKNOWLEDGEMENT, fake_balance_experts
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.model.model import Model
from baton.model.parallel import Communicator
from baton.model.tensor_spec import tensor_spec

_TURN_KEYS = tuple(field.name for field in dataclasses.fields(CellRound) if field.name != "context_len")
_MEMORY_SHARE = 0.9  # share of free memory
_FILLED_TOGETHER = 256  # blocks
_NUM_NAMED_KERNELS = 12
_MAX_NAME_LEN = 80


def bench_decode(options: DecodeOptions, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure every cell.

    Args:
        options: options of the run.
        note: called with progress.

    Raises:
        ConfigInvalid: the model is too short for the prompt and the steps, or the KV does not fit into memory.
        StartupError: graphs could not be captured.
    """
    model = load_shape(options)
    pool = make_pool(options, model)
    gbps = copy_gbps(options.device)
    note(f"{options.shape} is loaded; copies move {gbps:.0f} GB/s")
    with torch.inference_mode():
        runners = {
            has_graphs: make_runner(options, model, pool, has_graphs=has_graphs) for has_graphs in options.graphs
        }
        cells = {
            has_graphs: DecodeCells(runner, stamp_executor(runner, options.device), model, options)
            for has_graphs, runner in runners.items()
        }
        ttft_ms = _ttft(next(iter(runners.values())), options, model)
        note("times to the first token are measured")
        turns = measured_turns(cells, options, note)
        is_cuda = options.device.type == "cuda"
        work = {cell: cells[cell.has_graphs].device_work(cell) for cell in turns} if is_cuda else {}
    for runner in runners.values():
        runner.close()
    rows = [
        {
            **identity(options, cell),
            **spread("ttft_ms", ttft_ms),
            **measured(turns[cell]),
            **floors(options, model, cell, turns[cell], gbps),
            **_device_work(work.get(cell)),
        }
        for cell in turns
    ]
    graphs = graph_counts(runners[True]) if True in runners else None
    return result(
        "decode", rows, copy_gbps=float(f"{gbps:.4g}"), steps=options.steps, rounds=options.rounds, graphs=graphs
    )


def measured_turns(
    cells: Mapping[bool, DecodeCells], options: DecodeOptions, note: Callable[[str], None] = lambda text: None
) -> dict[DecodeCell, list[CellRound]]:
    """Measure every cell once per round, in random order; `cells` are keyed by whether they use graphs."""
    turns: dict[DecodeCell, list[CellRound]] = {
        DecodeCell(mode, k, batch, has_graphs): []
        for has_graphs in cells
        for mode in options.schedulings
        for k in options.drafts
        for batch in options.batches
    }
    rng = random.Random(options.seed)
    for cell in turns:  # warm-up: compiles kernels and allocates memory
        cells[cell.has_graphs].measure(cell)
    for number in range(options.rounds):
        for cell in rng.sample(list(turns), len(turns)):
            turns[cell].append(cells[cell.has_graphs].measure(cell))
        note(f"round {number + 1} of {options.rounds}")
    return turns


def _ttft(runner: Runner, options: DecodeOptions, model: Model) -> list[float]:
    """Time to first token of each round, in milliseconds; the model's MTP head, if any, runs over every chunk."""
    has_state = model.kv_layout(BLOCK_SIZE).has_state
    times_ms = [
        measure_ttft_ms(runner, options, model.config.vocab_size, has_state=has_state)
        for _ in range(options.rounds + 1)
    ]
    return times_ms[1:]  # the first compiles kernels and allocates memory


def load_shape(
    options: DecodeOptions, *, communicator: Communicator | None = None, device: torch.device | None = None
) -> Model:
    """Make a model of the shape with random weights, or a rank's part of it; on `options.device` by default.

    Raises:
        ConfigInvalid: it is too short for the prompt and the steps, does not fit into memory, or has no experts to
            balance.
        ModelUnsupported: ranks cannot hold equal parts of it.
    """
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    device = device or options.device
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(options.shape, Path(folder) / "model", **changes)
        drafts = max(options.drafts) > 0
        draft_path = write_drafter(path, Path(folder) / "drafter") if drafts and options.drafter == "eagle3" else None
        size = 1 if communicator is None else communicator.size
        _require_fits(options, ModelConfig.from_directory(path, made_weights="random"), device, size)
        model = load_model(
            path,
            dtype=options.dtype,
            device=device,
            numerics=options.numerics,
            with_mtp=drafts and draft_path is None,
            draft_path=draft_path,
            random_seed=options.seed,
            quantization=options.quantization,
            kv_dtype=options.kv_dtype,
            implementation=options.implementation,
            communicator=communicator,
            expert_parallel=options.expert_parallel,
        )
    if options.fake_balance:
        _balance(model, size if options.expert_parallel else 1)
    return model


def _balance(model: Model, ep_size: int) -> None:
    """Give every expert, and so each rank that holds experts, the same work; the answers are meaningless.

    Every rank has all tokens of a step, so all make the same selection.
    """

    def rechoose(weight_TK: torch.Tensor, expert_TK: torch.Tensor) -> None:
        num_experts = model.config.num_experts
        fake_balance_experts(expert_TK, weight_TK, num_experts=num_experts, benchmark=ACKNOWLEDGEMENT, ep_size=ep_size)

    model.ops.rechoose = rechoose


def _require_fits(options: DecodeOptions, config: ModelConfig, device: torch.device, size: int) -> None:
    if options.capacity_len > config.max_model_len:
        message = (
            f"--prompt-len {options.prompt_len} and {options.steps} steps make {options.capacity_len} positions; "
            f"{options.shape} has {config.max_model_len}"
        )
        raise ConfigInvalid(message, keys=["prompt-len", "steps"])
    if options.fake_balance and not config.num_experts:
        raise ConfigInvalid(f"--fake-balance: {options.shape} has no experts", keys=["fake-balance", "shape"])
    shapes = tensor_spec(config, with_mtp=max(options.drafts) > 0).required
    all_bytes = sum(weight_bytes(name, its, options.dtype, options.quantization) for name, its in shapes.items())
    num_bytes = int(all_bytes) // size
    free_bytes = _free_bytes(device)
    if num_bytes > _MEMORY_SHARE * free_bytes:
        message = f"--shape {options.shape} takes {num_bytes >> 20} MiB; {free_bytes >> 20} MiB are free"
        raise ConfigInvalid(message, keys=["shape", "layers"])


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def make_pool(options: DecodeOptions, model: Model, *, rank: int = 0, size: int = 1) -> KVPool:
    """Make a pool for the largest batch, filled with random numbers.

    Raises:
        ConfigInvalid: it does not fit into free memory.
    """
    layout = model.kv_layout(BLOCK_SIZE)
    num_blocks = blocks_each(options) * max(options.batches)
    num_state_slots = max(options.batches) if layout.has_state else 0
    num_bytes = PoolGeometry(layout, num_blocks, rank, size, num_state_slots=num_state_slots).num_bytes
    free_bytes = _free_bytes(model.device)
    if num_bytes > _MEMORY_SHARE * free_bytes:
        message = f"KV of {max(options.batches)} sequences takes {num_bytes >> 20} MiB; {free_bytes >> 20} MiB are free"
        raise ConfigInvalid(message, keys=["batch", "prompt-len"])
    pool = KVPool(layout, num_blocks, model.device, rank=rank, size=size, num_state_slots=num_state_slots)
    for index, layer in enumerate(layout.layers):
        if not layer.is_state:  # an empty state is valid, and random numbers would make its tile count invalid
            _fill(pool.blocks(index))
    return pool


def _fill(blocks_NHPSD: torch.Tensor) -> None:
    """Fill with normal numbers; torch cannot draw float8, so those are drawn as bfloat16, some blocks at a time."""
    if blocks_NHPSD.dtype.itemsize > 1:
        blocks_NHPSD.normal_()
        return
    for part in blocks_NHPSD.split(_FILLED_TOGETHER):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device))


def make_runner(
    options: DecodeOptions, model: Model, pool: KVPool, group: Communicator | None = None, *, has_graphs: bool
) -> Runner:
    """Make Baton's runner for every cell; the ranks of a TP group make theirs at the same time.

    Raises:
        StartupError: graphs could not be captured.
    """
    graphs = None
    if has_graphs:
        graphs = graphed_step(
            model,
            pool,
            CudaGraphConfig(sizes=options.batches),
            max_num_sequences=max(options.batches),
            num_draft_tokens=max(options.drafts),
            max_model_len=options.capacity_len,
            communicator=group,
        )
        assert graphs is not None
    return Runner(
        model,
        pool,
        max_num_seqs=max(options.batches),
        num_draft_tokens=max(options.drafts),
        communicator=group,
        verification=options.verification_config,
        graphs=graphs,
    )


def graph_counts(runner: Runner) -> dict[str, Any] | None:
    """Counts of a runner's graphs: captured, failed, replayed."""
    if runner.graphs is None:
        return None
    counts = runner.graphs.counts
    eager = {reason.value: num for reason, num in counts.num_steps_eager.items() if num}
    return {
        "num_captured": counts.num_captured,
        "failed": dict(counts.failed),
        "num_steps_replayed": counts.num_steps_replayed,
        "num_steps_eager": eager,
    }


def stamp_executor(runner: Runner, device: torch.device) -> StampedExecutor:
    """Replace the runner's executor by one that is stamped."""
    runner._executor = executor = StampedExecutor(runner._executor, device)
    return executor


def identity(options: DecodeOptions, cell: DecodeCell) -> dict[str, Any]:
    """Identity of a row: what was measured."""
    return {
        "system": "baton",
        "model": options.shape,
        "num_layers": options.layers,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device.type,
        "numerics": options.numerics.value,
        "quantization": options.quantization.value,
        "kv_dtype": options.kv_dtype.value,
        "kernels": options.implementation.value,
        "verification": options.verification,
        "rates": options.rates,
        "drafter": options.drafter,
        "fake_balance": options.fake_balance,
        "expert_parallel": options.expert_parallel,
        "temperature": options.temperature,
        "scheduling": cell.scheduling,
        "cuda_graphs": cell.has_graphs,
        "mtp_k": cell.num_drafts,
        "batch": cell.batch,
        "prompt_len": options.prompt_len,
        "chunk_len": options.chunk_len,
    }


def measured(turns: Sequence[CellRound]) -> dict[str, float]:
    """Medians and ranges of a cell's turns."""
    numbers: dict[str, float] = {}
    for key in _TURN_KEYS:
        numbers |= spread(key, [getattr(turn, key) for turn in turns])
    return numbers


def floors(
    options: DecodeOptions, model: Model, cell: DecodeCell, turns: Sequence[CellRound], gbps: float, num_ranks: int = 1
) -> dict[str, float]:
    """Floors of a token, beside `tpot_ms`, and of a step."""
    found = []
    for turn in turns:
        num_bytes = step_bytes(
            model.config,
            options.dtype,
            num_drafts=cell.num_drafts,
            batch=cell.batch,
            context_len=turn.context_len,
            num_ranks=num_ranks,
            quantization=options.quantization,
            layout=model.kv_layout(BLOCK_SIZE),
            drafter=model.drafter_config,
            is_balanced=options.fake_balance,
        )
        found.append((num_bytes / gbps / 1e6, turn.tokens_per_step))
    a_token = spread("floor_ms", [step_ms / num_tokens for step_ms, num_tokens in found])
    return a_token | spread("step_floor_ms", [step_ms for step_ms, _ in found])


def _device_work(found: DeviceWork | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "kernels_ms": float(f"{sum(found.kernel_us.values()) / 1e3:.4g}"),
        "num_kernels": round(found.num_kernels, 1),
        "kernel_shares": {_short(name): round(share, 4) for name, share in found.shares(_NUM_NAMED_KERNELS).items()},
    }


def _short(name: str) -> str:
    """A kernel's name without its return type and template arguments, which can be pages long."""
    return name.removeprefix("void ")[:_MAX_NAME_LEN]
