"""The interpreter that kernels' tests run in leaves the language as it was, also where a kernel fails."""

import pytest
import torch
import triton
import triton.language as tl
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
    assert not getattr(tl.load, "__name__", "").startswith("<lambda>")


def test_blocks_of_equal_sizes_and_unequal_ones_are_told_apart():
    block = tl.block_type(tl.float32, [4, 8])
    assert block == tl.block_type(tl.float32, [tl.constexpr(4), 8])
    assert block != tl.block_type(tl.float32, [8, 4]) and block != tl.block_type(tl.int32, [4, 8])
    assert int(block.numel) == 32
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])
