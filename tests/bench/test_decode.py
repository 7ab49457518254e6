"""The decode benchmark: its options, its rows, what its numbers mean, and a TP group's."""

import dataclasses
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from baton.bench.decode_bench import cell, decode
from baton.bench.decode_bench import cell as decode_cell
from baton.bench.decode_bench import floor as decode_floor
from baton.bench.decode_bench import tp_group as decode_tp_group
from baton.bench.decode_bench.cell import DecodeCell, DecodeCells, StampedExecutor
from baton.bench.decode_bench.options import read_options
from baton.bench.model_shapes import BUNDLED, SHAPES, full_name, write_shape
from baton.cluster.commands.bench import format_decode
from baton.core.errors import ConfigInvalid
from baton.engine.step.executor import ThreadExecutor
from baton.engine.step.runner import Runner
from baton.kvcache.layout import Keep, KVLayout, LayerLayout
from baton.model.config import ModelConfig
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.engine.graphs import graphed

CPU = torch.device("cpu")
QUICK = {"shape": "tiny", "layers": 1, "dtype": "float32", "device": "cpu", "prompt_len": 20, "steps": 3, "rounds": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(decode_floor._COPY_BYTES, "cpu", 1 << 20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_name_what_was_measured():
    data = decode.bench_decode(read_options(**QUICK, batch="1,3", mtp="0,2"))
    assert data["bench"] == "decode"
    assert [(row["scheduling"], row["mtp_k"], row["batch"]) for row in data["rows"]] == [
        (scheduling, k, batch) for scheduling in ("sync", "async") for k in (0, 2) for batch in (1, 3)
    ]
    for row in data["rows"]:
        named = [row[key] for key in ("system", "model", "dtype", "prompt_len")]
        assert named == ["baton", "tiny", "float32", 20]
        for key in ("ttft_ms", "tpot_ms", "tokens_per_s", "floor_ms", "step_ms", "launch_ms", "device_ms"):
            assert 0 < row[f"{key}_min"] <= row[key] <= row[f"{key}_max"]
        assert row["device_ms"] <= row["step_ms_max"]
        tokens = row["tokens_per_step"]
        assert tokens == 1 if row["mtp_k"] == 0 else 1 <= tokens <= 3
    json.dumps(data)
    text = format_decode(data)
    assert "TPOT ms" in text
    assert text.count("async") == 4


def test_steps_are_measured_with_graphs_and_without(monkeypatch):
    def recorded(model, pool, config, *, max_num_sequences, num_draft_tokens, max_model_len, communicator):
        assert (config.sizes, max_num_sequences, num_draft_tokens, communicator) == ((1, 3), 3, 1, None)
        return graphed(model, pool, k=num_draft_tokens, sizes=config.sizes, widths=(16,))

    monkeypatch.setattr(decode, "graphed_step", recorded)
    data = decode.bench_decode(dataclasses.replace(read_options(**QUICK, batch="1,3"), graphs=(False, True)))
    assert [row["cuda_graphs"] for row in data["rows"]] == [False] * 8 + [True] * 8
    graphs = data["graphs"]
    assert graphs["num_steps_replayed"] == 8 * 3 * (3 + decode_cell.WARM_STEPS)
    assert not graphs["num_steps_eager"]
    assert not graphs["failed"]
    assert format_decode(data).count("graphs") == 8


@pytest.mark.long
def test_a_drafter_beside_the_model_is_measured_and_counted():
    """Drafts stand as its chances say: 1 of the first, none of the second."""
    asked = QUICK | {"layers": 3}
    data = decode.bench_decode(read_options(**asked, batch="2", mtp="0,2", drafter="eagle3", rate="1,0"))
    found = {row["mtp_k"]: row for row in data["rows"] if row["scheduling"] == "async"}
    assert (found[0]["tokens_per_step"], found[2]["tokens_per_step"]) == (1.0, 2.0)
    assert found[2]["drafter"] == "eagle3"
    assert found[2]["step_floor_ms"] > found[0]["step_floor_ms"]


@pytest.mark.parametrize("rate", ["1.5", "0.5,,0.2", "nan", "-0.1", "much"])
def test_chances_that_are_none_are_refused(rate):
    with pytest.raises(ConfigInvalid, match="--rate"):
        read_options(**QUICK, rate=rate)


def test_numbers_of_a_turn_belong_together(monkeypatch):
    """By a step whose time and tokens are known."""
    options = read_options(**QUICK | {"steps": 5}, batch="2", mtp="3", rate="1.0")
    model = decode.load_shape(options)
    calls = []

    class SlowRunner(Runner):
        def _sampled(self, work):
            calls.append(time.sleep(0.02))
            return super()._sampled(work)

    pool = decode.make_pool(options, model)
    runner = SlowRunner(model, pool, max_num_seqs=2, num_draft_tokens=3, verification=options.verification_config)
    cells = DecodeCells(runner, decode.stamp_executor(runner, CPU), model, options)
    with torch.inference_mode():
        turn = cells.measure(DecodeCell("async", 3, 2))
        again = cells.measure(DecodeCell("sync", 3, 1))
    runner.close()
    assert len(calls) == 2 * (5 + decode_cell.WARM_STEPS)
    assert turn.tokens_per_step == again.tokens_per_step == 4.0  # every draft stands
    assert turn.step_ms >= turn.device_ms >= 20.0
    assert turn.tpot_ms == pytest.approx(turn.step_ms / 4)
    assert turn.tokens_per_s == pytest.approx(2 * 4e3 / turn.step_ms)
    assert turn.context_len == 20 + 1 + 4 * decode_cell.WARM_STEPS + 4 * 5 / 2


@pytest.mark.fast
def test_stamps_tell_steps_from_what_lies_between(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(cell, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    executor = StampedExecutor(ThreadExecutor(), CPU)
    target = torch.zeros(1)

    def advance(seconds):
        now_s[0] += seconds
        return torch.ones(1)

    for turn in range(3):
        executor.submit(lambda: advance(0.004), target).get()
        executor.run(lambda: advance(0.006))  # the step's second part
        executor.run(lambda: advance(0.01))  # a sequence is placed
        executor.drain()
        now_s[0] += 0.03 * (turn + 1) - 0.01
    assert executor.take() == (pytest.approx([10.0, 10.0, 10.0]), pytest.approx([30.0, 60.0]))
    assert executor.take() == ([], [])
    executor.close()
    assert target.item() == 1.0


@pytest.mark.fast
@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_is_a_shape_by_its_name(name, tmp_path):
    assert full_name(name) == name
    written = json.loads((write_shape(name, tmp_path, vocab_size=999) / "config.json").read_text())
    assert written == json.loads((TINY.with_name(name) / "config.json").read_text()) | {"vocab_size": 999}


@pytest.mark.fast
@pytest.mark.parametrize("name", [*SHAPES, *BUNDLED])
def test_fewer_layers_of_any_shape_are_a_model(name, tmp_path):
    config = ModelConfig.from_directory(write_shape(name, tmp_path, num_hidden_layers=4), made_weights="x")
    assert config.num_layers == 4
    whole = ModelConfig.from_directory(write_shape(name, tmp_path / "whole"), made_weights="x")
    assert config.delta_layers == {layer for layer in whole.delta_layers if layer < 4}


@pytest.mark.fast
def test_the_floor_counts_what_a_step_reads(tmp_path):
    path = write_shape("qwen3-8b", tmp_path, num_hidden_layers=2, vocab_size=1000)
    config = ModelConfig.from_directory(path, made_weights="x")
    layer = 4096 * (32 + 8 + 8) * 128 + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    head, kv = 1000 * 4096, 2 * 8 * 128

    def step_bytes(num_drafts, dtype="bfloat16", **more):
        layers = (config.kv_layer(dtype),) * (2 + (num_drafts > 0))
        layout = KVLayout(model_hash="x", layers=layers, block_size=16, has_mtp=num_drafts > 0)
        sizes = {"num_drafts": num_drafts, "batch": 3, "context_len": 100, "layout": layout}
        return decode_floor.step_bytes(config, torch.bfloat16, **sizes | more)

    plain = step_bytes(0)
    assert plain == 2 * (2 * layer + 4096 + head + 3 * 100 * 2 * kv)
    mtp = layer + 2 * 4096 * 4096 + 3 * 4096
    drafting = step_bytes(2)
    assert drafting == 2 * (2 * layer + 4096 + 3 * head + 2 * mtp + 3 * 100 * 4 * kv)
    halved = step_bytes(0, num_ranks=2)
    assert halved == plain / 2
    narrow = step_bytes(0, "float8_e4m3fn")
    assert plain - narrow == 3 * 100 * 2 * kv
    state = LayerLayout(num_heads=4, num_parts=1, row_len=64, dtype="float32", keep=Keep.SNAPSHOT, length=16, ring=1)
    layout = KVLayout(model_hash="x", layers=(config.kv_layer("bfloat16"),) * 2 + (state,), block_size=16)
    assert step_bytes(0, layout=layout) - plain == 3 * state.slot_bytes


@pytest.mark.fast
def test_a_pool_of_float8_is_filled_with_numbers_that_are_read():
    options = read_options(**QUICK | {"steps": 1}, batch="2", mtp="1", kv_dtype="fp8")
    pool = decode.make_pool(options, decode.load_shape(options))
    values = pool.blocks(1).float()
    assert pool.dtype == torch.float8_e4m3fn
    assert values.isfinite().all()
    assert 0.9 < values.std() < 1.1
    with pytest.raises(ConfigInvalid, match="--kv-cache-dtype fp4"):
        read_options(**QUICK, kv_dtype="fp4")


@pytest.mark.fast
def test_the_floor_is_what_a_model_holds(tmp_path):
    path = write_shape("tiny", tmp_path)
    model = load_model(
        path, dtype=torch.float32, device=CPU, numerics=read_options(**QUICK).numerics, with_mtp=True, random_seed=0
    )
    held = sum(tensor.numel() for tensor in tensors_of(model, set())) * 4
    # So many rows touch every expert; the rotary frequencies are no weights.
    layout = model.kv_layout(16)
    read = decode_floor.step_bytes(
        model.config, torch.float32, num_drafts=1, batch=10_000, context_len=0, layout=layout
    )
    head = model.config.vocab_size * model.config.hidden_size * 4
    assert math.isclose(read - head, held, rel_tol=1e-4)


def tensors_of(value, seen):
    """Every tensor that an object holds, once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, seen)
    elif type(value).__module__.startswith("baton.model") or type(value).__name__ == "ExpertWeights":
        names = getattr(value, "__slots__", ()) or vars(value)
        for name in names:
            yield from tensors_of(getattr(value, name), seen)


@pytest.mark.fast
def test_options_are_checked():
    options = read_options(**QUICK, batch="16,1,16", mtp="2,0", scheduling="async,sync")
    assert (options.batches, options.drafts, options.schedulings) == ((1, 16), (0, 2), ("sync", "async"))
    assert options.verification_config.acceptance_rates == pytest.approx((0.8, 0.64))
    assert read_options(**QUICK | {"shape": "8b"}).shape == "qwen3-8b"
    with pytest.raises(ConfigInvalid, match="are free"):
        decode.load_shape(read_options(**QUICK | {"shape": "32b", "layers": 64, "dtype": "float64"}))
    with pytest.raises(ConfigInvalid, match="2048"):
        decode.load_shape(read_options(**QUICK | {"prompt_len": 2040}))


class ThreadRemote:
    """A rank on a thread of this process, in place of a process of its own."""

    def __init__(self, factory, *arguments):
        self._served = factory(*arguments)
        self._pool = ThreadPoolExecutor(1)

    def post(self, method, *arguments):
        return self._pool.submit(getattr(self._served, method), *arguments).result

    def call(self, method, *arguments):
        return self.post(method, *arguments)()

    def end(self):
        self._pool.shutdown()


def check_tp_group():
    options = read_options(**QUICK | {"steps": 2, "rounds": 1}, batch="1,2", mtp="0,1")
    data = decode_tp_group.bench_decode_tp_group(options, 2, num_decisions=10)
    assert [(row["tp"], row["scheduling"], row["mtp_k"], row["batch"]) for row in data["rows"]] == [
        (2, scheduling, k, batch) for scheduling in ("sync", "async") for k in (0, 1) for batch in (1, 2)
    ]
    assert all(row["tpot_ms"] > row["floor_ms"] > 0 for row in data["rows"])
    assert all(row["decision_eager_us"] > 0 and row["broadcast_eager_us"] > 0 for row in data["decisions"])


def test_a_tp_group_is_measured(monkeypatch):
    monkeypatch.setattr(decode_tp_group, "SpawnedRemote", ThreadRemote)
    check_tp_group()


@pytest.mark.slow
def test_a_tp_group_of_processes_is_measured():
    check_tp_group()
