"""A dry run asks for forms and launches nothing that is not loaded; other threads go on meanwhile."""

import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.kernels import kernel_form
from baton.kernels.dry_run import forms_of, is_met
from baton.kernels.launcher import Launcher

pytestmark = pytest.mark.fast

TARGET = GPUTarget("cuda", 90, 32)
X = torch.zeros(64)


def add_kernel(x, n, B: tl.constexpr):
    tl.store(x, n + B)


def other_kernel(x, n, B: tl.constexpr):
    tl.store(x, n - B)


add_kernel = JITFunction(add_kernel)
other_kernel = JITFunction(other_kernel)


class Device:
    """A driver of a GPU that is not there, and what Triton compiles for it."""

    def __init__(self):
        self.compiled = []
        self.launched = []

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return device

    def get_current_target(self):
        return TARGET

    def compile(self, source, **others):
        kernel = object.__new__(CompiledKernel)
        kernel.module, kernel.function, kernel.packed_metadata = object(), 0, ()
        kernel.name, kernel.src = "nothing", None
        kernel._run = lambda *arguments: self.launched.append(source.name)
        self.compiled.append(source.name)
        return kernel


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(driver, "_active", device)
    for kernel in (add_kernel, other_kernel):
        kernel.device_caches.clear()
        _ = kernel.device_caches[0]  # makes what is replaced
        monkeypatch.setattr(kernel, "compile", device.compile)
    return device


def test_what_is_asked_for_is_told_once_and_neither_compiled_nor_launched(device):
    launch = Launcher(add_kernel)

    def work():
        for _ in range(3):
            launch((1,), (X, 3), {"B": 16, "num_warps": 2})
            other_kernel[(1,)](X, 32, B=8)
        launch((1,), (X, 3), {"B": 32})

    forms = forms_of(work)
    assert [form.name for form in forms] == ["add_kernel", "other_kernel", "add_kernel"]
    assert not device.compiled and not device.launched
    assert [form.constants for form in forms] == [{(2,): 16}, {(2,): 8}, {(2,): 32}]
    assert [form.options["num_warps"] for form in forms] == [2, 4, 4]
    assert {form.target for form in forms} == {TARGET}
    assert forms[1].signature == {"x": "*fp32", "n": "i32", "B": "constexpr"}
    aligned = {place for place, attributes in forms[1].attributes.items() if attributes}
    assert {(0,), (1,)} == aligned, "the address and 32 are divisible by 16"
    assert pickle.loads(pickle.dumps(forms)) == forms


def test_the_same_work_is_compiled_and_launched_afterwards(device):
    launch = Launcher(add_kernel)
    forms_of(lambda: launch((1,), (X, 3), {"B": 16}))
    assert knobs.runtime.jit_cache_hook is None
    assert not is_met("anything") and not is_met("anything"), "no dry run is on"
    launch((1,), (X, 3), {"B": 16})
    launch((1,), (X, 3), {"B": 16})
    assert device.compiled == ["add_kernel"]
    assert device.launched == ["add_kernel"] * 2


def test_a_launcher_asks_triton_once_for_launches_that_are_alike(device, monkeypatch):
    asked = []
    before = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **o: asked.append(a) or before(self, *a, **o))
    one, two = Launcher(add_kernel), Launcher(other_kernel)

    def work():
        for _ in range(4):
            one((1,), (X, 3), {"B": 16})
            two((1,), (X, 3), {"B": 16})

    assert len(forms_of(work)) == 2
    assert len(asked) == 2


def test_what_is_loaded_is_launched_as_ever(device):
    launch = Launcher(add_kernel)
    launch((1,), (X, 3), {"B": 16})
    assert not forms_of(lambda: launch((2,), (X, 3), {"B": 16}))
    assert device.launched == ["add_kernel"] * 2


def test_other_threads_launch_meanwhile(device):
    def work():
        thread = threading.Thread(target=lambda: Launcher(add_kernel)((1,), (X, 3), {"B": 16}))
        thread.start()
        thread.join()
        other_kernel[(1,)](X, 3, B=16)

    assert [form.name for form in forms_of(work)] == ["other_kernel"]
    assert device.launched == ["add_kernel"]


def test_a_kernel_that_its_module_does_not_have_is_left_to_its_launch(device, monkeypatch):
    kernel = JITFunction(add_kernel.fn)
    _ = kernel.device_caches[0]
    monkeypatch.setattr(kernel, "compile", device.compile, raising=False)
    assert not forms_of(lambda: kernel[(1,)](X, 3, B=16))
    assert not device.launched


def test_an_error_of_the_work_ends_the_dry_run(device):
    def work():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        forms_of(work)
    assert knobs.runtime.jit_cache_hook is None
    assert not is_met(1) and not is_met(1)
    assert forms_of(lambda: other_kernel[(1,)](X, 3, B=16))


@pytest.mark.parametrize(("backend", "has_any", "made"), [("cuda", True, 1), ("cuda", False, 0), ("hip", True, 0)])
def test_what_launches_a_form_is_compiled_where_triton_makes_one(backend, has_any, made, device, monkeypatch):
    (form,) = forms_of(lambda: add_kernel[(1,)](X, 3, B=16))
    found = []
    monkeypatch.setattr(kernel_form, "compile_source", lambda source, **others: SimpleNamespace(metadata=source.name))
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda source, metadata: found.append((source.name, metadata)))
    monkeypatch.delattr(nvidia, "make_launcher", raising=False)
    if has_any:
        monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    replace(form, target=GPUTarget(backend, 90, 32)).compile()
    assert found == [("add_kernel", "add_kernel")] * made


@pytest.fixture
def unfilled():
    """Memory that was never written is not zeros, to be sure."""
    torch._C._set_deterministic_algorithms(True, warn_only=False)  # torch's own function imports its compiler first
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=False)


def test_memory_that_kernels_would_have_written_is_zeros(unfilled):
    aten = torch.ops.aten  # other tests' `torch.empty` has its own filling
    makers = [
        lambda: aten.empty([5]),
        lambda: aten.empty([5], dtype=torch.int64),
        lambda: aten.empty_like(X, dtype=torch.int32),
        lambda: aten.new_empty(X, [2, 3]),
        lambda: aten.empty_strided([2, 3], [3, 1]),
        lambda: aten.new_empty_strided(X, [2, 3], [3, 1]),
    ]
    assert all(bool((make() != 0).all()) for make in makers)
    made = []
    forms_of(lambda: made.extend(make() for make in makers))
    assert [one.count_nonzero().item() for one in made] == [0] * len(makers)
    with torch.inference_mode():
        forms_of(lambda: made.append(aten.empty([5])))
    assert not made[-1].any()
