"""The interpreter that kernels' tests run in leaves the language as it was, also where a kernel fails."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.fast


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def _kernel(x_ptr, found_ptr, is_wrong: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = _doubled(tl.load(x_ptr + at))
    tl.static_assert(not is_wrong)
    tl.store(found_ptr + at, tl.sum(x[None, :] * (at[:, None] <= at[None, :]), axis=1))


def language():
    """What a launch changes, as it is now."""
    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


def test_launches_of_device_functions_leave_the_language_alone():
    x, found = torch.arange(4.0), torch.empty(4)
    _kernel[(1,)](x, found, False, 4)  # which may set what was inherited
    before = language()
    for is_wrong in (False, True, False):
        if is_wrong:
            with pytest.raises(InterpreterError):
                _kernel[(1,)](x, found, True, 4)
        else:
            _kernel[(1,)](x, found.zero_(), False, 4)
            assert found.tolist() == [12.0, 12.0, 10.0, 6.0]
        assert language() == before
    assert tl.load.__name__ == "load"


def test_blocks_of_equal_sizes_and_unequal_ones_are_told_apart():
    block = tl.block_type(tl.float32, [4, 8])
    assert block == tl.block_type(tl.float32, [tl.constexpr(4), 8])
    assert block != tl.block_type(tl.float32, [8, 4]) and block != tl.block_type(tl.int32, [4, 8])
    assert int(block.numel) == 32
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])


KINDS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32)
NUMBERS = (
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    2**31 - 1,
    2**31,
    2**40,
    True,
    0.0,
    -0.0,
    0.5,
    1e-40,
    float("inf"),
    float("nan"),
)


def operands():
    """Of every kind, a scalar, a row and two blocks; numbers as a kernel has them."""
    found = list(NUMBERS)
    for kind in KINDS:
        for shape in ((), (4,), (1, 4), (2, 4), (2, 1)):
            data = (
                (np.arange(np.prod(shape, dtype=int)) % 2).astype(interpreter._get_np_dtype(kind)).reshape(shape or 1)
            )
            type_ = tl.block_type(kind, list(shape)) if shape else kind
            found.append(tl.tensor(interpreter.TensorHandle(data, kind), type_))
    return found


def outcome(function, *arguments):
    """What two operands become, or that they may not meet."""
    language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        results = function(*arguments)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        return type(error)
    finally:
        language.restore()
    results = results if isinstance(results, tuple) else (results,)
    return [
        (str(one.type), str(one.dtype), [int(size) for size in one.shape], int(one.numel), *_held(one.handle))
        for one in results
    ]


def _held(handle):
    return handle.dtype.name, handle.data.dtype, handle.data.shape, handle.data.tobytes()


def plainly(monkeypatch, semantic):
    """Triton's own checks, broadcasts and constants, without the short ways."""
    kind = type(semantic)
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value", "scalar_constant"):
        monkeypatch.setattr(kind, name, getattr(kind, name).__wrapped__)


@pytest.mark.long
@pytest.mark.parametrize("options", [(), (True, True), (False, False, False), (False, False, True, True)])
def test_short_ways_give_what_triton_itself_makes_of_two_operands(monkeypatch, options):
    semantic = interpreter.interpreter_semantic
    pairs = [
        pair for pair in itertools.product(operands(), repeat=2) if any(isinstance(one, tl.tensor) for one in pair)
    ]
    with np.errstate(all="ignore"):
        found = [outcome(semantic.binary_op_type_checking_impl, *pair, *options) for pair in pairs]
        plainly(monkeypatch, semantic)
        assert found == [outcome(semantic.binary_op_type_checking_impl, *pair, *options) for pair in pairs]
    assert sum(isinstance(one, list) for one in found) > len(pairs) / 4


def test_a_value_wider_than_its_type_is_refused():
    with pytest.raises(ValueError, match="exceeds"):
        interpreter.TensorHandle(np.zeros(4, np.int64), tl.int32)


EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16)
# On both sides of each bfloat16 and of each border between two, numbers that are none and infinite ones among them.
AROUND_BFLOAT16 = ((np.arange(1 << 17, dtype=np.uint32) << 15)[:, None] + np.array([0, 1, 0x7FFF], np.uint32)).ravel()


def test_bfloat16_widens_as_in_torch():
    want = torch.from_numpy(EVERY_BFLOAT16.view(np.int16)).view(torch.bfloat16).float().view(torch.int32).numpy()
    found = interpreter._convert_float(EVERY_BFLOAT16, tl.bfloat16, tl.float32, None)
    assert found.dtype == np.uint32
    assert np.array_equal(found.view(np.int32), want)


@pytest.mark.parametrize(("size", "stride"), [(1, 1021), (16, 63), (1536, 1)])
def test_float32_is_rounded_to_bfloat16_as_in_torch(size, stride):
    """In blocks of one size, of which some hold numbers that are none."""
    chosen = AROUND_BFLOAT16[::stride].copy()
    for bits in chosen[: len(chosen) // size * size].reshape(-1, size):
        want = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16).numpy()
        found = interpreter._convert_float(bits.view(np.float32), tl.float32, tl.bfloat16, None)
        assert found.dtype == np.uint16
        assert np.array_equal(found.view(np.int16), want)


@pytest.mark.parametrize(
    ("kind", "in_torch"), [(tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2)], ids=str
)
def test_float8_widens_as_in_torch(kind, in_torch):
    bits = np.arange(256, dtype=np.uint8).reshape(16, 16)
    values = torch.from_numpy(bits).view(in_torch).float()
    for target, want in ((tl.float32, values.view(torch.int32)), (tl.float16, values.half().view(torch.int16))):
        found = interpreter._convert_float(bits, kind, target, None)
        assert found.shape == (16, 16)
        assert np.array_equal(found.view(want.numpy().dtype), want.numpy())


@pytest.mark.parametrize("data", [np.float32(1.00390625), np.array(1.01171875, np.float32)], ids=["number", "array"])
def test_single_numbers_are_converted_too(data):
    """Halves between two bfloat16, of which the even one is taken."""
    want = torch.tensor(float(data)).bfloat16()
    rounded = interpreter._convert_float(data, tl.float32, tl.bfloat16, None)
    assert np.shape(rounded) == () and rounded.dtype == np.uint16
    dequantized = interpreter._convert_float(rounded, tl.bfloat16, tl.float32, None)
    assert np.shape(dequantized) == () and dequantized.dtype == np.uint32
    assert float(dequantized.view(np.float32)) == float(want)
