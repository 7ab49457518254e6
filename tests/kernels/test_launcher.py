"""Which compiled form a `Launcher` takes: always the one that Triton would have taken, and without asking it again."""

import itertools

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels import launcher as module
from baton.kernels.launcher import Constants, Launcher

pytestmark = pytest.mark.fast


def _kernel(x, y, n: tl.int32, wide, stride, scale: tl.float32, B: tl.constexpr, FLAG: tl.constexpr):
    tl.store(y, tl.load(x) + n + wide + stride + scale + B + FLAG)


def _described_kernel(w, out, B: tl.constexpr):
    tl.store(out, B)


def _mixed_kernel(x, B: tl.constexpr, n):
    tl.store(x, B + n)


class Device:
    """A driver of GPUs that are not there; what Triton compiles for them does nothing but note its launches."""

    def __init__(self):
        self.current = 0
        self.launched = []  # (form, grid, stream, arguments)
        self.hooks = []
        self.num_asked = 0

    def get_current_device(self):
        return self.current

    def get_current_stream(self, device):
        return 100 + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def compile(self, function, key, signature, device, constexprs, options, attributes):
        kernel = object.__new__(CompiledKernel)
        kernel.module, kernel.function, kernel.packed_metadata = object(), len(self.launched), ()
        kernel.name, kernel.src = "nothing", None
        form = key, device

        def run(x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
            self.launched.append((form, (x, y, z), stream, arguments))
            self.hooks.append(enter)

        kernel._run = run
        function.device_caches[device][0][key] = kernel
        return kernel


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(
        JITFunction,
        "_do_compile",
        lambda self, key, signature, index, constexprs, options, attrs, warmup: device.compile(
            self, key, signature, index, constexprs, options, attrs
        ),
    )
    before = JITFunction.run

    def run(self, *arguments, **constants):
        device.num_asked += 1
        return before(self, *arguments, **constants)

    monkeypatch.setattr(JITFunction, "run", run)
    return device


def jit(function, **options):
    kernel = JITFunction(function, **options)
    kernel.used_global_vals = {}
    return kernel


def make():
    return jit(_kernel, do_not_specialize=["n", "wide", "scale"])


X = torch.zeros(64)
Y = torch.zeros(64)
DRAWN = {
    "x": [X, X.bfloat16(), X[1:], torch.nn.Parameter(X)],
    "y": [Y, Y[2:], Y.int()],
    "n": [1, 16, -3],
    "wide": [1, 5, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1],
    "stride": [1, 2, 16, 32, 48, 2**31, 2**35],
    "scale": [1.0, 0.5],
    "B": [16, 32],
    "FLAG": [True, False],
    "num_warps": [4, 8],
}


def drawn():
    """Every value beside the first values of all others, and some hundred at random."""
    names = list(DRAWN)
    first = {name: values[0] for name, values in DRAWN.items()}
    for name in names:
        for value in DRAWN[name]:
            yield first | {name: value}
    for pair in itertools.combinations(names, 2):
        for values in itertools.product(*(DRAWN[name] for name in pair)):
            yield first | dict(zip(pair, values, strict=True))


def test_the_form_is_the_one_that_triton_would_choose(device):
    kernel = make()
    launch = Launcher(kernel)
    for _ in range(2):
        for values in drawn():
            arguments = [values[name] for name in ("x", "y", "n", "wide", "stride", "scale")]
            constants = {name: values[name] for name in ("B", "FLAG", "num_warps")}
            launch((3, 2), arguments, constants)
            found = device.launched[-1]
            kernel[(3, 2)](*arguments, **constants)
            wanted = device.launched[-1]
            assert found[0] == wanted[0], values
            assert found[1:3] == wanted[1:3] == ((3, 2, 1), 100)
            assert [id(item) for item in found[3][:2]] == [id(item) for item in wanted[3][:2]]
            assert found[3][2:] == wanted[3][2:], "constants come along, in their places"


def test_triton_is_asked_once(device):
    launch = Launcher(make())
    constants = Constants({"B": 16, "FLAG": True, "num_warps": 4})
    for n in range(20):
        launch((1 + n,), (X, Y, n, n, 16, float(n)), constants)
    assert device.num_asked == 1
    assert [entry[1] for entry in device.launched] == [(1 + n, 1, 1) for n in range(20)]
    launch((1,), (X, Y, 1, 1, 16, 1.0), Constants({"B": 32, "FLAG": True, "num_warps": 4}))
    assert device.num_asked == 2, "other constants"
    assert device.launched[-1][3][-2:] == (32, True)
    launch((1,), (X[1:], Y, 1, 1, 16, 1.0), constants)
    assert device.num_asked == 3, "another alignment"


def test_devices_have_forms_of_their_own(device):
    launch = Launcher(make())
    for index in (0, 1, 0, 1):
        device.current = index
        launch((1,), (X, Y, 1, 1, 16, 1.0), {"B": 16, "FLAG": False})
        form, _, stream, _ = device.launched[-1]
        assert (form[1], stream) == (index, 100 + index)
    assert device.num_asked == 2


def test_descriptors_are_told_apart_by_their_blocks(device):
    launch = Launcher(jit(_described_kernel))
    values = torch.zeros(64, 128, dtype=torch.float16)
    for rows in (16, 32, 16, 32):
        launch((1,), (TensorDescriptor.from_tensor(values, [rows, 64]), Y), {"B": 1})
        assert f"[{rows}, 64]" in str(device.launched[-1][0][0]) or f"[{rows},64]" in str(device.launched[-1][0][0])
    assert device.num_asked == 2


def test_what_only_triton_knows_is_left_to_it(device):
    hooked = make()
    hooked.add_pre_run_hook(lambda *arguments, **constants: None)
    for kernel, arguments, constants in (
        (hooked, (X, Y, 1, 1, 16, 1.0), {"B": 16, "FLAG": False}),
        (make(), (X, Y, 1, 1, None, 1.0), {"B": 16, "FLAG": False}),  # None is a constant
        (make(), (X, Y, 1, 1, 16, 1.0, 16), {"FLAG": False}),  # a constant among the arguments
        (jit(_mixed_kernel), (X,), {"B": 16, "n": 3}),  # constants in the middle
    ):
        device.num_asked = 0
        launch = Launcher(kernel)
        launch((1,), arguments, constants)
        launch((1,), arguments, constants)
        assert device.num_asked == 2


def test_hooks_of_profilers_hear_of_every_launch(device, monkeypatch):
    launch = Launcher(make())
    told = []
    launch((1,), (X, Y, 1, 1, 16, 1.0), {"B": 16, "FLAG": False})
    device.hooks.clear()
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [told.append])
    for _ in range(3):
        launch((1,), (X, Y, 1, 1, 16, 1.0), {"B": 16, "FLAG": False})
    assert device.num_asked == 1
    assert [enter is not None for enter in device.hooks] == [True] * 3


def test_forms_are_bounded(device, monkeypatch):
    monkeypatch.setattr(module, "MAX_FORMS", 4)
    launch = Launcher(make())
    for stride in range(2, 40):
        launch((1,), (X, Y, 1, 1, stride, 1.0), {"B": 16, "FLAG": False})
        assert len(launch._forms) <= 4
