"""The tuner on points that are made for it: what it chooses, what it drops and why, the table that it writes."""

import json

import numpy as np
import pytest
import torch

from baton.bench.kernel_bench import collection as kernel_collection
from baton.bench.kernel_bench import floor as kernel_floor
from baton.bench.kernel_bench import trial as kernel_trial
from baton.bench.kernel_bench import tuning as kernel_tuning
from baton.bench.kernel_bench.case import TuningPoint
from baton.bench.kernel_bench.processes import Lost
from baton.bench.kernel_bench.trial import Trial, sample_of
from baton.bench.kernel_bench.tuning import TuningOptions, agree, format_table, tune
from baton.core.errors import ConfigInvalid

pytestmark = pytest.mark.fast

COSTS_MS = {"slow": 3.0, "fast": 0.2, "wrong": 0.05, "raises": 0.05, "middle": 1.5, "spills": 0.05, "nan": 0.05}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kernel_floor, "_CPU_CACHE_BYTES", 64)


class Timer:
    """Times that are known, so that no busy machine chooses."""

    def __init__(self, calls, device, measured_ms):
        self.ms = COSTS_MS[calls[0].kind]

    def measure_ms(self):
        return self.ms


@pytest.fixture
def given(monkeypatch):
    def put(*points):
        monkeypatch.setattr(kernel_collection, "module_names", lambda: ["one"])
        monkeypatch.setattr(kernel_collection, "of_module", lambda name, function: list(points))

    monkeypatch.setattr(kernel_trial, "make_timer", Timer)
    return put


class Call:
    def __init__(self, kind, x):
        self.kind, self.x = kind, x

    def __call__(self):
        if self.kind == "raises":
            raise RuntimeError("too much shared memory")
        if self.kind == "nan":
            return self.x * float("nan")
        return self.x * (2 if self.kind == "wrong" else 1), None


def point(*kinds, kernel="gemm", shape="8x8", size=4, output=True):
    def prepare(device, num_sets, options):
        xs = [torch.randn(100, device=device) for _ in range(num_sets)]
        return [Call(options["kind"], x) for x in xs] if output else [lambda: None for _ in xs]

    return TuningPoint(
        kernel=kernel,
        shape=shape,
        size=size,
        candidates=[{"kind": kind} for kind in kinds],
        set_bytes=64,
        prepare=prepare,
    )


def tuned(tmp_path, base=None, **more):
    options = TuningOptions(device="cpu", out=tmp_path / "table.json", report=tmp_path / "report.json", **more)
    data = tune(options, base or {})
    assert json.loads(options.report.read_text())["points"] == data["points"]
    return json.loads(options.out.read_text()), data


def test_the_fastest_that_is_right_is_written(given, tmp_path):
    given(point("slow", "wrong", "raises", "fast", "nan", "middle"), point("middle", "slow", size=128))
    base = {"gemm": {"8x8": {"4": {"kind": "old"}, "16": {"kind": "kept"}}}, "other": {"1": {"1": {"kind": "kept"}}}}
    table, data = tuned(tmp_path, base)
    assert table == {
        "gemm": {"8x8": {"4": {"kind": "fast"}, "16": {"kind": "kept"}, "128": {"kind": "middle"}}},
        "other": {"1": {"1": {"kind": "kept"}}},
    }
    assert list(table["gemm"]["8x8"]) == ["4", "16", "128"]
    rows = data["points"][0]["candidates"]
    assert [row["options"]["kind"] for row in rows if "ms" in row] == ["fast", "middle", "slow"]
    why = {row["options"]["kind"]: row["why"] for row in rows if "why" in row}
    assert why["wrong"] == why["nan"] == "gives other numbers than most"
    assert why["raises"].startswith("RuntimeError: too much shared memory")
    assert not data["untuned"]


def test_a_candidate_that_spills_is_dropped(given, tmp_path, monkeypatch):
    run = kernel_trial._run

    def spilling(task, at, device, trial):
        run(task, at, device, trial)
        trial.num_spills = 8 * (at.candidates[task.candidate]["kind"] == "spills")

    monkeypatch.setattr(kernel_trial, "_run", spilling)
    given(point("slow", "spills"))
    table, data = tuned(tmp_path)
    assert table["gemm"]["8x8"]["4"] == {"kind": "slow"}
    assert data["points"][0]["candidates"][-1]["why"] == "spills 8 registers"


def test_a_candidate_that_hangs_or_kills_is_dropped(given, tmp_path, monkeypatch):
    lost = {"wrong": Lost("timeout", "1"), "raises": Lost("died", "2", -11)}

    class Here:
        def __init__(self, work):
            pass

        def do(self, task, limit_s):
            at = kernel_collection.point_at(task.place)
            kind = at.candidates[task.candidate]["kind"]
            return lost.get(kind) or kernel_trial.run_trial(task, lambda step: None)

        def close(self):
            pass

    monkeypatch.setattr(kernel_tuning, "Here", Here)
    given(point("slow", "wrong", "raises"))
    table, data = tuned(tmp_path)
    assert table["gemm"]["8x8"]["4"] == {"kind": "slow"}
    assert [row["why"] for row in data["points"][0]["candidates"][1:]] == ["hangs", "ends its process with -11"]


def test_a_candidate_that_found_no_memory_beside_the_others_is_timed(given, tmp_path, monkeypatch):
    run = kernel_trial._run

    def crowded(task, at, device, trial):
        if not task.is_timed:
            raise torch.OutOfMemoryError("16 processes share it")
        run(task, at, device, trial)

    monkeypatch.setattr(kernel_trial, "_run", crowded)
    given(point("slow", "fast"))
    table, _ = tuned(tmp_path)
    assert table["gemm"]["8x8"]["4"] == {"kind": "fast"}


def test_a_point_without_a_good_candidate_keeps_its_old_row(given, tmp_path):
    given(point("raises"), point("nan", size=9))
    table, data = tuned(tmp_path, {"gemm": {"8x8": {"4": {"kind": "old"}}}})
    assert table == {"gemm": {"8x8": {"4": {"kind": "old"}}}}
    assert data["untuned"] == ["gemm 8x8 4", "gemm 8x8 9"]
    assert data["points"][1]["candidates"][0]["why"] == "gives numbers that are not finite"


def test_what_gives_no_tensor_is_chosen_by_time_alone(given, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_trial, "make_timer", lambda calls, device, ms: Timer([Call("slow", None)], device, ms))
    given(point("slow", "fast", output=False))
    table, _ = tuned(tmp_path)
    assert table["gemm"]["8x8"]["4"]["kind"] in ("slow", "fast")


def test_when_the_time_is_over_the_rest_is_untuned(given, tmp_path):
    given(point("slow"), point("slow", size=8))
    _, data = tuned(tmp_path, limit_s=0.0)
    assert data["untuned"] == ["gemm 8x8 4", "gemm 8x8 8"]


def test_points_are_chosen_by_words(given, tmp_path):
    given(point("slow"), point("slow", shape="16x16"))
    table, _ = tuned(tmp_path, only=("16x16",))
    assert list(table["gemm"]) == ["16x16"]
    with pytest.raises(ConfigInvalid):
        tuned(tmp_path, only=("nothing",))


def test_a_hopeless_candidate_is_measured_once(given, tmp_path, monkeypatch):
    counts = {}
    measure = Timer.measure_ms
    monkeypatch.setattr(
        Timer, "measure_ms", lambda self: [counts.update({self.ms: counts.get(self.ms, 0) + 1}), measure(self)][1]
    )
    given(point("fast", "slow"))
    tuned(tmp_path)
    assert counts == {COSTS_MS["fast"]: 3, COSTS_MS["slow"]: 1}


def test_samples_agree_but_for_rounding():
    one = torch.randn(3, 50_000)
    assert sample_of((one, None)).shape == (kernel_trial.SAMPLE_LEN,)
    assert sample_of(None) is None
    assert sample_of(torch.empty(0)) is None
    assert np.array_equal(sample_of(one[:, :7]), one[:, :7].reshape(-1).double().numpy())
    trials = [Trial(sample=sample_of(given)) for given in (one, one.bfloat16(), one * 1.1, one[:1, :9])]
    assert [agree(trials[0], other) for other in trials] == [True, True, False, False]


def test_a_table_is_written_in_order():
    table = {"b": {"2x2": {"16": {"y": 1, "x": 2}, "2": {}}}, "a": {"s": {"1": {"k": True}}}}
    text = format_table(table)
    assert json.loads(text) == table
    assert text.index('"a"') < text.index('"b"')
    assert text.index('"2"') < text.index('"16"')
    assert '"16": {"x": 2, "y": 1}' in text
    assert json.loads(format_table({})) == {}
