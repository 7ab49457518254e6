"""What a worker says of how its model is computed."""

from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from baton.core.numerics import Numerics, Quantization
from baton.kernels import tuning
from baton.kernels.compiles import Compiles
from baton.kernels.gemm import scaled_mm
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.kernels.implementation import Implementation
from baton.worker import inventory
from baton.worker.inventory import compute_report, form_of

pytestmark = pytest.mark.fast


class Model:
    def __init__(self, implementation, numerics=Numerics.DEFAULT, why="", scheme=None, dtype=torch.bfloat16):
        self.implementation = implementation
        self.numerics = numerics
        self.why_no_triton = why
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.config = SimpleNamespace(fp8=scheme)


def test_the_form_is_one_of_four():
    assert form_of(Model(Implementation.TRITON)) == "triton"
    assert form_of(Model(Implementation.REFERENCE)) == "reference"
    assert form_of(Model(Implementation.REFERENCE, Numerics.INVARIANT)) == "invariant"
    assert form_of(Model(Implementation.TRITON, Numerics.INVARIANT)) == "ordered"


def test_kernels_that_come_late_are_counted_and_logged_once_each(monkeypatch, caplog):
    compiles = Compiles()
    monkeypatch.setattr(inventory, "COMPILES", compiles)
    for name in ("a", "b", "a"):
        compiles.loaded(None, 0, name, {}, "hash")
    model = Model(Implementation.REFERENCE)
    report = compute_report(model, Quantization.NONE)
    assert (report.num_kernels_starting, report.num_kernels_serving, list(report.late_kernels)) == (3, 0, [])
    assert not caplog.records
    compiles.serve()
    for name in ("c", "a", "c"):
        compiles.loaded(None, 0, name, {}, "hash")
    report = compute_report(model, Quantization.NONE)
    assert (report.num_kernels_starting, report.num_kernels_serving) == (3, 3)
    assert list(report.late_kernels) == ["a", "c"]
    assert [record.args for record in caplog.records] == [("c",), ("a",)]


def test_triton_tells_of_each_binary_once():
    compiles = Compiles()
    compiles.listen()
    compiles.listen()
    try:
        knobs.runtime.kernel_load_end_hook(None, 0, "a", {}, "hash")
    finally:
        knobs.runtime.kernel_load_end_hook.remove(compiles.loaded)
    assert compiles.num_starting == 1


def test_float8_weights_of_a_checkpoint_are_told_from_those_made_at_load():
    blocks = SimpleNamespace(may_stay_float8=True)
    ways = [(None, "none"), (SimpleNamespace(may_stay_float8=False), "none"), (blocks, "fp8, as stored")]
    for scheme, wanted in ways:
        model = Model(Implementation.REFERENCE, scheme=scheme)
        assert compute_report(model, Quantization.NONE).quantization == wanted
    model = Model(Implementation.REFERENCE, scheme=blocks, dtype=torch.float16)
    assert compute_report(model, Quantization.NONE).quantization == "none", "made float16 as it was read"


def test_what_fell_back_is_counted(monkeypatch):
    library = scaled_mm.Library()
    monkeypatch.setattr(inventory, "LIBRARY", library)
    monkeypatch.setattr(tuning, "_UNTUNED", set())
    tuning.find.cache_clear()
    model = Model(Implementation.REFERENCE, why="device cpu")
    report = compute_report(model, Quantization.FP8)
    assert (report.form, report.why, report.quantization, report.device) == ("reference", "device cpu", "fp8", "cpu")
    assert (report.num_library_refused, list(report.library_refused), list(report.untuned)) == (0, [], [])

    weight = quantize_weight(torch.ones(256, 128))
    a_MK, scales_GM = quantize_fp8(torch.ones(4, 128))
    for _ in range(3):
        assert library.gemm(a_MK, scales_GM, weight) is None, "a CPU has no such library"
    for size in (1, 2, 1):
        assert tuning.find("gemm_fp8", "7x9", size) is None
    assert tuning.find("quantize_fp8", "any", 16) is not None
    report = compute_report(model, Quantization.FP8)
    assert (report.num_library_refused, list(report.library_refused)) == (3, ["256x128"])
    assert list(report.untuned) == ["gemm_fp8 7x9"]
