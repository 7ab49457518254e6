"""The kernel bench on cases that are made for it: rows, failures, limits, children that hang or die, the table."""

import contextlib
import dataclasses
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from baton.bench.kernel_bench import baselines as kernel_baselines
from baton.bench.kernel_bench import collection as kernel_collection
from baton.bench.kernel_bench import floor as kernel_floor
from baton.bench.kernel_bench import kernels
from baton.bench.kernel_bench import row as kernel_row
from baton.bench.kernel_bench import timing as kernel_timing
from baton.bench.kernel_bench.case import KernelCase
from baton.bench.kernel_bench.collection import CasePlace, find_cases, find_points
from baton.bench.kernel_bench.kernels import KernelOptions, read_options
from baton.bench.kernel_bench.processes import Broken, Child, Lost, do_all
from baton.bench.kernel_bench.row import RowTask, measure_row
from baton.bench.plot import others_of
from baton.cluster.commands.bench import bench_kernels as command
from baton.cluster.commands.bench import format_kernels
from baton.cluster.outcome import ExitCode
from baton.core.errors import ConfigInvalid
from baton.tests.bench.kernel_work import work

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "rounds": 2}
RATES = kernel_floor.Rates(
    device="x",
    copy_gbps=1000.0,
    read_gbps=2000.0,
    bf16_tflops=100.0,
    fp8_tflops=200.0,
    launch_ms=0.001,
    touch_ms=0.002,
    cache_bytes=1,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("baton.bench.decode_bench.floor._COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(kernel_floor, "_READ_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(kernel_floor, "_MATMUL_SIZE", {"cpu": 16})
    monkeypatch.setattr(kernel_floor, "_MEASURED_MS", {"cpu": 0.01})
    monkeypatch.setattr(kernel_floor, "_CPU_CACHE_BYTES", 1 << 12)
    monkeypatch.setattr(kernels, "MEASURED_MS", {"cpu": 0.01})
    monkeypatch.setattr(kernel_baselines, "_MODULES", {"absent": "baton_has_no_such_module"})


def case(name="add", shape="N=64", systems=None, **more):
    def prepare(device, num_sets):
        sets = [torch.randn(64, device=device) for _ in range(num_sets)]
        made = systems(sets) if systems else {"ours": [lambda x=x: x + 1 for x in sets]}
        return made

    facts = {"num_bytes": 512, "set_bytes": 512, "only_gpu": False} | more
    return KernelCase(kernel=name, shape=shape, prepare=prepare, **facts)


def raises(error):
    def call():
        raise error

    return call


@pytest.fixture
def given(monkeypatch):
    """Modules with these cases instead of the real ones."""

    def put(**modules):
        def of_module(name, function):
            listed = modules[name]
            if isinstance(listed, Exception):
                raise listed
            return listed if function == "cases" else []

        monkeypatch.setattr(kernel_collection, "module_names", lambda: sorted(modules))
        monkeypatch.setattr(kernel_collection, "of_module", of_module)

    return put


def measured(**more):
    return kernels.bench_kernels(KernelOptions(**QUICK | more))


def test_a_row_has_its_floor_its_ratios_and_ranges(given):
    given(one=[case(systems=lambda sets: {name: [lambda x=x: x * 2 for x in sets] for name in ("ours", "torch")})])
    data = measured()
    json.dumps(data, allow_nan=False)
    (row,) = data["rows"]
    assert (row["kernel"], row["shape"], row["num_sets"]) == ("add", "N=64", 16)
    for key in ("ms", "torch_ms", "vs_torch", "fraction", "gbps"):
        assert 0 < row[f"{key}_min"] <= row[key] <= row[f"{key}_max"]
    assert row["differs_torch"] == 0.0
    assert (data["failures"], data["skipped"], data["rounds"]) == ([], [], 2)
    assert set(data["rates"]) >= {"copy_gbps", "read_gbps", "bf16_tflops", "fp8_tflops", "launch_ms", "touch_ms"}
    assert "baton_has_no_such_module" in data["baselines"]["absent"]
    assert others_of(row) == ["torch"]


def test_numbers_of_a_row_belong_together():
    found = kernel_row.Measured(num_sets=3, times_ms={"ours": [0.01, 0.02, 0.04], "fa3": [0.02, 0.02, 0.02]})
    row = kernels.make_row(case(num_bytes=4_000_000, num_flops=10**9), found, RATES)
    assert row["floor_ms"] == pytest.approx(0.01)  # of flops; of bytes it would be 0.004
    assert (row["ms"], row["ms_min"], row["ms_max"]) == (0.02, 0.01, 0.04)
    assert row["fraction"] == pytest.approx(0.55)
    assert (row["vs_fa3"], row["vs_fa3_min"]) == (1.0, 0.5)
    assert row["gbps"] == pytest.approx(200)
    assert row["tflops"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("facts", "floor_ms"),
    [
        ({"num_bytes": 10**9}, 1.0),
        ({"num_bytes": 10**9, "is_read": True}, 0.5),
        ({"num_bytes": 8, "num_flops": 10**12}, 10.0),
        ({"num_bytes": 8, "num_flops": 10**12, "flops_dtype": "fp8"}, 5.0),
    ],
)
def test_a_floor_is_the_larger_of_bytes_and_flops(facts, floor_ms):
    assert RATES.floor_ms(case(**facts)) == pytest.approx(floor_ms)


def test_a_system_that_fails_is_named_and_the_others_are_measured(given):
    given(
        one=[
            case(
                systems=lambda sets: {
                    "ours": [lambda: sets[0] + 1],
                    "broken": [raises(RuntimeError("no such thing"))],
                    "torch": [lambda: sets[0] + 2],
                }
            )
        ],
        other=[case("no_prepare", systems=lambda sets: raises(ValueError("never"))()), case("fine")],
        third=ImportError("gone"),
    )
    data = measured()
    assert [row["kernel"] for row in data["rows"]] == ["add", "fine"]
    assert {"ms", "torch_ms"} <= set(data["rows"][0])
    assert "broken_ms" not in data["rows"][0]
    assert data["rows"][0]["differs_torch"] > 0
    assert [(one["kernel"], one["system"], one["error"]) for one in data["failures"]] == [
        ("third", "cases", "ImportError"),
        ("add", "broken", "RuntimeError"),
        ("no_prepare", "prepare", "ValueError"),
    ]
    text = format_kernels(data)
    assert "failed: add N=64: broken: RuntimeError: no such thing" in text
    assert "no absent: " in text


def test_a_system_that_fails_later_has_no_figures(given, monkeypatch):
    calls = []

    def second_time():
        calls.append(1)
        if len(calls) > 40:
            raise RuntimeError("worn out")

    monkeypatch.setattr(kernel_timing.ClockTimer, "_run", lambda self, num: [call() for call in self._calls * 25] and 1)
    given(one=[case(systems=lambda sets: {"ours": [lambda: None], "other": [second_time]})])
    data = measured(rounds=3)
    (row,) = data["rows"]
    assert "ms" in row
    assert "other_ms" not in row
    assert [one["system"] for one in data["failures"]] == ["other"]


def test_without_ours_there_is_a_row_and_no_ratio(given):
    given(one=[case(systems=lambda sets: {"ours": [raises(TypeError("x"))], "torch": [lambda: None]})])
    (row,) = measured()["rows"]
    assert "torch_ms" in row
    assert not {"ms", "fraction", "vs_torch"} & set(row)
    assert format_kernels(measured()).count("torch") == 1


def test_a_device_that_is_gone_ends_the_process_and_the_rest_is_asked_for_again(given, monkeypatch):
    given(one=[case(systems=lambda s: {"bad": [raises(RuntimeError("illegal access"))], "ours": [lambda: s[0] + 1]})])
    monkeypatch.setattr(kernel_row, "is_alive", lambda device: False)
    task = RowTask(place=CasePlace("one", 0), device="cpu", rounds=2, measured_ms=0.01)
    with pytest.raises(Broken) as broken:
        measure_row(task, lambda step: None)
    assert broken.value.result.is_broken
    data = measured()
    assert "ms" in data["rows"][0]
    assert "bad_ms" not in data["rows"][0]
    assert [one["system"] for one in data["failures"]] == ["bad"]


def test_a_child_that_hangs_is_named_by_what_it_had_begun(given, monkeypatch):
    class Hangs:
        def __init__(self, work):
            self.asked = []

        def do(self, task, limit_s):
            if not isinstance(task, RowTask):
                return RATES if task == "cpu" else {}
            self.asked.append(task.without)
            if len(self.asked) == 1:
                return Lost("timeout", "slow")
            if len(self.asked) == 2:
                return Lost("died", "wild", -11)
            return kernel_row.Measured(1, {"ours": [0.5, 0.5]})

        def close(self):
            pass

    given(one=[case()])
    monkeypatch.setattr(kernels, "Here", Hangs)
    data = measured()
    assert [(one["system"], one["error"]) for one in data["failures"]] == [("slow", "timeout"), ("wild", "died")]
    assert data["rows"][0]["ms"] == 0.5


def test_when_the_time_is_over_rows_are_named_and_the_file_is_whole(given, tmp_path, monkeypatch):
    given(one=[case(shape=f"N={number}") for number in range(3)])
    out = tmp_path / "kernels.json"
    found = []
    wrote = kernels.replace_file
    monkeypatch.setattr(kernels, "replace_file", lambda path, text: (wrote(path, text), found.append(json.loads(text))))
    clock = iter([0.0, *[1.0, 1.0, 1.0, 1.0], *[100.0] * 20])
    monkeypatch.setattr(kernels, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    data = measured(out=out, limit_s=50.0)
    assert len(data["rows"]) + len(data["skipped"]) == 3
    assert 0 < len(data["rows"]) < 3
    assert data["skipped"][-1] == "add N=2"
    assert found[0]["rows"] == data["rows"][:1]
    assert json.loads(out.read_text())["skipped"] == data["skipped"]
    assert "left out: add N=2" in format_kernels(data)


def test_cases_are_chosen_by_words_and_by_device(given):
    given(gemm=[case("gemm_fp8", "M=1"), case("gemm_fp8", "M=16", only_gpu=True)], rows=[case("rms_norm", "T=1")])
    assert [place for place in find_cases(is_cpu=True).cases] == [CasePlace("gemm", 0), CasePlace("rows", 0)]
    assert [place for place in find_cases(["M=16"]).cases] == [CasePlace("gemm", 1)]
    assert [place for place in find_cases(["rows", "gemm_fp8 M=1"]).cases] == [
        *map(CasePlace, ("gemm",) * 2, (0, 1)),
        CasePlace("rows", 0),
    ]
    assert kernel_collection.case_at(CasePlace("rows", 0)).kernel == "rms_norm"
    with pytest.raises(ConfigInvalid, match="no row"):
        measured(only=("nothing",))


@pytest.mark.parametrize(
    "bad", [{"rounds": 0}, {"limit_s": 0.0}, {"case_limit_s": math.nan}, {"jobs": -1}, {"device": "tpu"}]
)
def test_bad_options_are_refused(bad, tmp_path):
    good = {"only": "", "device": "cpu", "rounds": 1, "limit_s": 9.0, "case_limit_s": 9.0, "jobs": 0, "seed": 0}
    assert read_options(**good, out=tmp_path / "x.json").only == ()
    with pytest.raises(ConfigInvalid):
        read_options(**good | bad, out=None)
    with pytest.raises(ConfigInvalid, match="no folder"):
        read_options(**good, out=tmp_path / "none" / "x.json")


def test_the_command_is_partial_when_something_failed(given):
    said = []
    output = SimpleNamespace(note=lambda text: None, emit=lambda data, text: said.append(text))
    asked = {"plot": None, "only": "", "device": "cpu", "rounds": 1, "limit_s": 60.0, "case_limit_s": 9.0}
    asked |= {"jobs": None, "out": None, "seed": 0}
    given(one=[case()])
    assert command(output, **asked) is ExitCode.OK
    given(one=[case(), case("bad", systems=lambda sets: {"ours": [raises(KeyError("k"))]})])
    assert command(output, **asked) is ExitCode.PARTIAL
    assert "failed: bad" in said[-1]


@pytest.mark.parametrize(
    ("set_bytes", "wanted"), [(1, 64), (1 << 12, 2), ((1 << 13) - 1, 2), (1 << 13, 1), (1 << 20, 1), (3000, 3)]
)
def test_sets_exceed_the_cache_twice(set_bytes, wanted):
    assert kernel_floor.num_sets(set_bytes, CPU, 64) == wanted


def test_memory_that_runs_out_makes_fewer_sets(given):
    asked = []

    def prepare(device, num_sets):
        asked.append(num_sets)
        if num_sets > 3:
            raise torch.OutOfMemoryError("full")
        return {"ours": [lambda: None] * num_sets}

    given(one=[dataclasses.replace(case(), prepare=prepare)])
    data = measured()
    assert asked == [16, 8, 4, 2]
    assert data["rows"][0]["num_sets"] == 2


@pytest.mark.long
def test_children_are_replaced_when_they_die_hang_or_break():
    child = Child(work)
    try:
        pid, said = child.do("a", 60)
        assert (child.do("b", 60), said) == ((pid, "b"), "a")
        lost = child.do("die", 60)
        assert (lost.reason, lost.step, lost.exit_code) == ("died", "dying", 7)
        begin_s = time.monotonic()
        lost = child.do("hang", 3.0)
        assert (lost.reason, lost.step) == ("timeout", "hanging")
        assert time.monotonic() - begin_s < 60
        assert child.do("break", 60) == "kept"
        assert child.do("c", 60)[1] == "c"
        assert child.num_started == 4
    finally:
        child.close()


@pytest.mark.long
def test_tasks_are_spread_and_what_is_late_is_not_lost():
    tasks = ["a", "die", "b", "c"]
    outcomes = do_all(work, tasks, 2, limit_s=60, end_s=time.monotonic() + 120)
    assert [outcome[1] for index, outcome in enumerate(outcomes) if index != 1] == ["a", "b", "c"]
    assert outcomes[1].reason == "died"
    assert do_all(work, ["hang", "a"], 1, limit_s=3600, end_s=time.monotonic() + 0.7) == [None, None]
    assert do_all(work, [], 4, limit_s=1, end_s=0.0) == []


@pytest.mark.long
def test_real_cases_and_points_can_be_collected():
    found = find_cases()
    assert not found.failures
    assert any(place.module == "kv_scatter" for place in found.cases)
    for case in found.cases.values():
        assert case.num_bytes > 0
        assert case.set_bytes > 0
        assert case.flops_dtype in ("bf16", "fp8")
    assert len({(case.kernel, case.shape) for case in found.cases.values()}) == len(found.cases)
    points = find_points()
    assert not points.failures
    for point in points.cases.values():
        assert point.candidates
        json.dumps([dict(options) for options in point.candidates])


@pytest.mark.long
def test_real_rows_of_a_cpu_are_measured():
    data = kernels.bench_kernels(KernelOptions(device="cpu", rounds=1))
    assert not data["failures"]
    assert data["rows"]
    for row in data["rows"]:
        assert row["ms"] > 0


class FakeDevice:
    """`torch.cuda` as far as a timer needs it: a clock that every call, live or replayed, moves on."""

    def __init__(self):
        self.now_ms, self.captured, self.is_open = 0.0, None, False

    def call(self):
        if self.captured is not None:
            self.captured += 1
        else:
            self.now_ms += 0.01

    def namespace(self):
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at_ms = device.now_ms

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

        class Graph:
            def capture_begin(self, capture_error_mode):
                device.captured = 0

            def capture_end(self):
                self.num_calls, device.captured = device.captured, None
                if device.is_open:
                    raise RuntimeError("the capture failed")

            def replay(self):
                device.now_ms += 0.01 * self.num_calls

        return SimpleNamespace(
            Event=Event,
            CUDAGraph=Graph,
            Stream=lambda device: SimpleNamespace(synchronize=lambda: None),
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda device=None: None,
        )


@pytest.mark.parametrize("num_sets", [1, 7, 64, 300])
def test_a_graph_holds_every_set_and_lasts(monkeypatch, num_sets):
    fake = FakeDevice()
    monkeypatch.setattr(torch, "cuda", fake.namespace())
    timer = kernel_timing.GraphTimer([fake.call] * num_sets, CPU, 20.0)
    assert timer._graph.num_calls % num_sets == 0
    assert 200 <= timer._graph.num_calls <= max(num_sets, 256)
    begin_ms = fake.now_ms
    assert timer.measure_ms() == pytest.approx(0.01)
    assert 20 <= fake.now_ms - begin_ms < 30


def test_what_fails_in_a_capture_is_raised_and_not_the_capture(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(torch, "cuda", fake.namespace())
    calls = []

    def call():
        fake.call()
        calls.append(1)
        if fake.captured is not None:
            fake.is_open = True
            raise ValueError("may not be captured")

    with pytest.raises(ValueError, match="may not be captured"):
        kernel_timing.GraphTimer([call], CPU, 1.0)
    assert fake.captured is None
