"""Repairs of Triton's interpreter, which kernels' tests run in, made by importing this module (triton 3.6.0 to 3.7.1).

As it comes, the interpreter computes +, *, max and dot of bfloat16 on its raw bits, cuts float32 to bfloat16 instead of
rounding, loses the carry of a mantissa on the way to float8, cannot run `@triton.autotune`, and (3.6.0 with numpy 2.4)
fails on bounds of `tl.range` that are not constants. A kernel that passes with these faults says nothing. Here every
operation on bfloat16 is done in float32 and rounded by torch, and conversions to float8 are torch's, saturating as the
GPU's are. Arithmetic traps nowhere, as on a GPU: numpy would warn of what a kernel computes and then drops, which is
whatever memory held that nobody wrote. Only what a kernel returns is judged.

It is also made faster, with the same results: it looked through the whole language at each call of a device function to
patch what was patched, computed checks of overflow that only `debug` asserts, and built types anew for every value.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder


def _to_bits(values):
    """Torch -> numpy of the same bits: unsigned for bfloat16 and float8, as the interpreter keeps them."""
    values = values.contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy()
    return values.view(torch.uint8).numpy() if values.element_size() == 1 else values.numpy()


def _from_bits(bits, kind):
    bits = np.array(bits, order="C", copy=True)
    return torch.from_numpy(bits.view(_SIGNED[bits.dtype.itemsize])).view(_TORCH[kind])


def _converter(before):
    def convert(data, source, target, rounding_mode):
        if source not in _TORCH or target not in _TORCH:
            return before(data, source, target, rounding_mode)
        values = _from_bits(np.atleast_1d(data), source)
        if source != tl.float64:
            values = values.float()
        if target in _LARGEST:
            largest = _LARGEST[target]
            values = torch.where(values.isnan(), values, values.clamp(-largest, largest))
        bits = _to_bits(values.to(_TORCH[target])).reshape(np.shape(data))
        return bits.view(getattr(np, f"uint{target.primitive_bitwidth}"))

    return convert


def _is_bfloat16(handle):
    return isinstance(handle, _Handle) and handle.dtype.scalar == tl.bfloat16


def _dequantized(handle):
    if not _is_bfloat16(handle):
        return handle
    bits = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None)
    return _Handle(bits.view(np.float32), tl.float32)


def _narrowed(handle):
    if handle.data.dtype != np.float32:
        return handle
    return _Handle(interpreter._convert_float(handle.data, tl.float32, tl.bfloat16, None), tl.bfloat16)


def _in_float32(before):
    """An operation of the builder, whose last argument is the function of numpy that does it."""

    def operation(self, *arguments):
        if not any(_is_bfloat16(argument) for argument in arguments[:-1]):
            return before(self, *arguments)
        result = before(self, *[_dequantized(argument) for argument in arguments])
        # Comparisons give truth values, which stay.
        return _narrowed(result) if result.dtype.scalar == tl.float32 else _Handle(result.data, tl.bfloat16)

    return operation


def _dot_in_float32(before):
    def dot(self, left, right, *rest):
        return before(self, _dequantized(left), _dequantized(right), *rest)

    return dot


def _cast_by_float32(before):
    def cast(self, source, target):
        kinds = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 in kinds and kinds[0] != kinds[1] and tl.float32 not in kinds:
            if kinds[0] == tl.bfloat16:
                return before(self, _dequantized(source), target)
            source = before(self, source, tl.float32)
        return before(self, source, target)

    return cast


def _reduce_in_float32(before):
    def apply(self, values):
        parts = values if isinstance(values, tuple) else (values,)
        if not any(_is_bfloat16(part.handle) for part in parts):
            return before(self, values)
        wide = tuple(
            self.to_tensor(_dequantized(part.handle).data, tl.float32) if _is_bfloat16(part.handle) else part
            for part in parts
        )
        found = before(self, wide if isinstance(values, tuple) else wide[0])
        results = tuple(
            _back(self, part) if part.handle.dtype.scalar == tl.float32 else part
            for part in (found if isinstance(found, tuple) else (found,))
        )
        return results if isinstance(found, tuple) else results[0]

    return apply


def _back(owner, value):
    bits = interpreter._convert_float(np.asarray(value.handle.data), tl.float32, tl.bfloat16, None)
    return owner.to_tensor(bits if value.type.is_block() else bits.reshape(-1)[0], tl.bfloat16)


class _FirstConfig:
    """What `@triton.autotune` makes here: the kernel with the first of its configurations, nothing timed."""

    def __init__(self, kernel, config):
        self._kernel, self._config = kernel, config

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            named = {**self._config.kwargs, **named}
            known = dict(zip(self._kernel.arg_names, arguments, strict=False)) | named
            return self._kernel[grid(known) if callable(grid) else grid](*arguments, **named)

        return launch


def _index_by_value(before):
    def patch(tensor, scope):
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    return patch


def _without_traps(before):
    def run(self, *arguments, **named):
        with np.errstate(all="ignore"):
            return before(self, *arguments, **named)

    return run


class _Language:
    """What launches make of the language: looked up once, and undone when none is under way."""

    def __init__(self, patch):
        seen = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = patch(seen)
        names = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
        self._changes = [(owner, name, vars(owner)[name]) for owner, name in names.values()]
        scope.restore()
        self._scope, self._num_launches = scope, 0

    def patch(self, kernel):
        if not self._num_launches:
            for change in self._changes:
                self._scope.set_attr(*change)
        self._num_launches += 1
        return self

    def restore(self):
        self._num_launches -= 1
        if not self._num_launches:
            self._scope.restore()


def _device_call(self, *arguments, **named):
    try:
        return self.rewrite()(*arguments, **named)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _by_scalar(before):
    known = {}

    def dtype(kind):
        scalar = kind.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = before(scalar)
        return found

    return dtype


@functools.cache
def _shape(*sizes):
    """Of a block: as the language keeps it, and how many values it has."""
    return tl.core.tuple(sizes), tl.core.validate_block_shape(sizes)


@functools.cache
def _constexpr_shape(*sizes):
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _block_type(self, element_ty, shape):
    sizes = shape.values if isinstance(shape, tl.core.tuple) else shape
    if not all(type(size) is int for size in sizes):
        sizes = tl.core._unwrap_shape(sizes)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel = _shape(*sizes)
    self.name = f"<{sizes}, {element_ty.name}>"


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constexpr_shape(*(type.shape if type.is_block() else ()))


def _broadcast_if_unequal(before):
    def broadcast(self, left, right):
        if left.type.is_block() and right.type.is_block():
            return (left, right) if left.type.shape is right.type.shape else before(self, left, right)
        return before(self, left, right) if left.type.is_block() or right.type.is_block() else (left, right)

    return broadcast


def _same_or(before):
    return lambda self, other: self is other or before(self, other)


def _plain_or(before):
    plain = frozenset((int, bool, float, str, type(None), tl.core.tensor, tl.core.dtype, tl.core.block_type))
    return lambda value: value if type(value) in plain else before(value)


def _hasten():
    interpreter._patch_lang = _Language(interpreter._patch_lang).patch
    interpreter.InterpretedFunction.__call__ = _device_call
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    options = interpreter.interpreter_builder.options
    assert not options.debug, "checks of overflow would be read"
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    tl.core.block_type.__init__ = _block_type
    tl.core.tensor.__init__ = _tensor
    tl.core.dtype.__eq__ = _same_or(tl.core.dtype.__eq__)
    tl.core._unwrap_if_constexpr = _plain_or(tl.core._unwrap_if_constexpr)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _broadcast_if_unequal(semantic.broadcast_impl_value)


def _repair():
    interpreter.GridExecutor.__call__ = _without_traps(interpreter.GridExecutor.__call__)
    interpreter._convert_float = _converter(interpreter._convert_float)
    for name in ("binary_op", "ternary_op", "unary_op"):
        setattr(_Builder, name, _in_float32(getattr(_Builder, name)))
    _Builder.create_dot = _dot_in_float32(_Builder.create_dot)
    _Builder.cast_impl = _cast_by_float32(_Builder.cast_impl)
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = _reduce_in_float32(kind.apply_impl)
    interpreter._patch_lang_tensor = _index_by_value(interpreter._patch_lang_tensor)
    triton.autotune = lambda configs, key, **options: lambda kernel: _FirstConfig(kernel, configs[0])


if triton.knobs.runtime.interpret:
    _repair()
    _hasten()
