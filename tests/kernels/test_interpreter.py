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
