"""`baton bench decode`: what a decode step costs on one device, with random weights of a published shape.

Every (scheduling, number of drafts, batch) is a cell. In each round all cells come once, in random order; rows hold
medians over rounds. Random weights accept no drafts of their own, so with drafts the verification is `synthetic`: what
is computed is that of the real thing, and each draft stands by chance. The decode step is measured on `DecodeRunner`
alone; the time to the first token on `PrefillRunner`, for one prompt and an idle engine.
"""

import dataclasses
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from baton.bench.decode_cell import Cell, DecodeCells, Turn, blocks_each, measure_ttft_ms
from baton.bench.decode_floor import copy_gbps, step_bytes
from baton.bench.decode_options import BLOCK_SIZE, DecodeOptions
from baton.bench.model_shapes import write_shape
from baton.bench.result import result, spread
from baton.bench.stamped_lane import StampedLane
from baton.core.errors import ConfigInvalid
from baton.engine.decode import DecodeRunner
from baton.engine.decode_step import StepFunction
from baton.engine.prefill import PrefillRunner
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.model.model import Model

_TURN_KEYS = tuple(field.name for field in dataclasses.fields(Turn) if field.name != "context_len")
_MEMORY_SHARE = 0.9  # of what is free


def bench_decode(
    options: DecodeOptions,
    note: Callable[[str], None] = lambda text: None,
    step: StepFunction | None = None,
) -> dict[str, Any]:
    """Measure every cell.

    Args:
        options: which.
        note: told how far it is.
        step: what a step computes; the product's own if None.

    Raises:
        ConfigInvalid: the model is too short for the prompt and the steps, or the KV does not fit into memory.
    """
    model = load_shape(options)
    pool = make_pool(options, model)
    gbps = copy_gbps(options.device)
    note(f"{options.shape} is loaded; copies move {gbps:.0f} GB/s")
    runners = {k: _cells_of(options, model, pool, k, step) for k in options.drafts}
    cells = [Cell(mode, k, batch) for mode in options.schedulings for k in options.drafts for batch in options.batches]
    turns: dict[Cell, list[Turn]] = {cell: [] for cell in cells}
    ttft_ms: dict[bool, list[float]] = {}
    prefill = PrefillRunner(model, pool)
    rng = random.Random(options.seed)
    with torch.inference_mode():
        for with_mtp in {k > 0 for k in options.drafts}:  # kernels are compiled and memory is taken
            measure_ttft_ms(prefill, options, model.config.vocab_size, with_mtp=with_mtp)
        for turn in range(options.rounds):
            for with_mtp in sorted({k > 0 for k in options.drafts}):
                ms = measure_ttft_ms(prefill, options, model.config.vocab_size, with_mtp=with_mtp)
                ttft_ms.setdefault(with_mtp, []).append(ms)
            for cell in rng.sample(cells, len(cells)):
                turns[cell].append(runners[cell.num_drafts][0].measure(cell))
            note(f"round {turn + 1} of {options.rounds}")
        work = {}
        if options.device.type == "cuda":
            work = {cell: runners[cell.num_drafts][0].device_work(cell) for cell in cells}
    for _, runner in runners.values():
        runner.close()
    rows = [
        {
            **_identity(options, cell),
            **spread("ttft_ms", ttft_ms[cell.num_drafts > 0]),
            **measured(turns[cell]),
            **_floors(options, model, cell, turns[cell], gbps),
            **_device_work(work.get(cell)),
        }
        for cell in cells
    ]
    return result("decode", rows, copy_gbps=float(f"{gbps:.4g}"), steps=options.steps, rounds=options.rounds)


def load_shape(options: DecodeOptions, **rank: Any) -> Model:
    """A model of the shape with random weights; `rank` is what `load_model` takes for one of several.

    Raises:
        ConfigInvalid: it is too short.
    """
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(
            write_shape(options.shape, Path(folder), **changes),
            dtype=options.dtype,
            device=options.device,
            numerics=options.numerics,
            with_mtp=max(options.drafts) > 0,
            random_seed=options.seed,
            **rank,
        )
    if options.capacity_len > model.config.max_model_len:
        message = (
            f"--prompt-len {options.prompt_len} and {options.steps} steps make {options.capacity_len} positions; "
            f"{options.shape} has {model.config.max_model_len}"
        )
        raise ConfigInvalid(message, keys=["prompt-len", "steps"])
    return model


def make_pool(options: DecodeOptions, model: Model, *, rank: int = 0, size: int = 1) -> KVPool:
    """Room for the largest batch, filled with random numbers.

    Raises:
        ConfigInvalid: it does not fit into the memory that is free.
    """
    layout = model.kv_layout(BLOCK_SIZE)
    num_blocks = blocks_each(options) * max(options.batches)
    num_bytes = PoolGeometry(layout, num_blocks, rank, size).num_bytes
    free_bytes = psutil.virtual_memory().available
    if options.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(options.device)[0]
    if num_bytes > _MEMORY_SHARE * free_bytes:
        message = f"KV of {max(options.batches)} sequences takes {num_bytes >> 20} MiB; {free_bytes >> 20} MiB are free"
        raise ConfigInvalid(message, keys=["batch", "prompt-len"])
    pool = KVPool(layout, num_blocks, options.device, rank=rank, size=size)
    for layer in range(layout.num_layers):
        pool.blocks(layer).normal_()
    return pool


def _cells_of(
    options: DecodeOptions, model: Model, pool: KVPool, num_drafts: int, step: StepFunction | None
) -> tuple[DecodeCells, DecodeRunner]:
    verification = options.verification_of(num_drafts)
    runner = DecodeRunner(model, pool, max(options.batches), num_drafts, verification=verification, step=step)
    return stamped_cells(runner, model, options, num_drafts), runner


def stamped_cells(runner: DecodeRunner, model: Model, options: DecodeOptions, num_drafts: int) -> DecodeCells:
    """The cells of a runner, whose lane is stamped from now on."""
    lane = StampedLane(runner._lane, model.device)
    runner._lane = lane
    return DecodeCells(runner, lane, model, options, num_drafts)


def _identity(options: DecodeOptions, cell: Cell) -> dict[str, Any]:
    return {
        "system": "baton",
        "model": options.shape,
        "num_layers": options.layers,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device.type,
        "numerics": options.numerics.value,
        "verification": options.verification,
        "rate": options.rate,
        "temperature": options.temperature,
        "scheduling": cell.scheduling,
        "mtp_k": cell.num_drafts,
        "batch": cell.batch,
        "prompt_len": options.prompt_len,
        "chunk_len": options.chunk_len,
    }


def measured(turns: Sequence[Turn]) -> dict[str, float]:
    """Medians and ranges of a cell's turns."""
    numbers: dict[str, float] = {}
    for key in _TURN_KEYS:
        numbers |= spread(key, [getattr(turn, key) for turn in turns])
    return numbers


def _floors(options: DecodeOptions, model: Model, cell: Cell, turns: Sequence[Turn], gbps: float) -> dict[str, float]:
    """Of a token, beside `tpot_ms`, and of a step."""
    floors = []
    for turn in turns:
        num_bytes = step_bytes(
            model.config,
            options.dtype,
            num_drafts=cell.num_drafts,
            batch=cell.batch,
            context_len=turn.context_len,
        )
        floors.append((num_bytes / gbps / 1e6, turn.tokens_per_step))
    return spread("floor_ms", [step_ms / tokens for step_ms, tokens in floors]) | spread(
        "step_floor_ms", [step_ms for step_ms, _ in floors]
    )


def _device_work(found: tuple[float, float] | None) -> dict[str, float]:
    if found is None:
        return {}
    return {"kernels_ms": float(f"{found[0]:.4g}"), "num_kernels": round(found[1], 1)}
