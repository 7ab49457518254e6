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
MAX_CONSTANTS = 4096
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


def _by_torch(data, source, target):
    values = _from_bits(np.atleast_1d(data), source)
    if source != tl.float64:
        values = values.float()
    if target in _LARGEST:
        largest = _LARGEST[target]
        values = torch.where(values.isnan(), values, values.clamp(-largest, largest))
    bits = _to_bits(values.to(_TORCH[target])).reshape(np.shape(data))
    return bits.view(getattr(np, f"uint{target.primitive_bitwidth}"))


@functools.cache
def _every_float8(kind, target):
    """Each of the 256 numbers, as bits of another type."""
    return _by_torch(np.arange(256, dtype=np.uint8), kind, target)


def _rounded_to_bfloat16(data):
    """As torch rounds, to the nearest and halves to even, in a tenth of the time that it takes for a small block."""
    bits = np.asarray(data).view(np.uint32)
    if ((bits & 0x7FFFFFFF) > 0x7F800000).any():  # NaN, which may overflow and has no one form
        return _by_torch(data, tl.float32, tl.bfloat16)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _converter(before):
    def convert(data, source, target, rounding_mode):
        if source not in _TORCH or target not in _TORCH:
            return before(data, source, target, rounding_mode)
        if source in _LARGEST:
            return _every_float8(source, target)[np.asarray(data).view(np.uint8)]
        if source == tl.bfloat16 and target == tl.float32:
            return np.asarray(data, dtype=np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            return _rounded_to_bfloat16(data)
        return _by_torch(data, source, target)

    return convert


def _is_bfloat16(handle):
    return type(handle) is _Handle and handle.dtype.name == "bf16"


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
        for argument in arguments:  # a loop, because `any` would take as long as the operation
            if type(argument) is _Handle and argument.dtype.name == "bf16":
                break
        else:
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


# What `_shape` has returned and keeps, by the identity of the shape: most blocks have the shape of another.
_KEPT: dict[int, tuple] = {}


def _block_type(self, element_ty, shape):
    self.element_ty = element_ty
    kept = _KEPT.get(id(shape))
    if kept is None:
        sizes = shape.values if isinstance(shape, tl.core.tuple) else shape
        if not all(type(size) is int for size in sizes):
            sizes = tl.core._unwrap_shape(sizes)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        kept = _shape(*sizes)
        _KEPT[id(kept[0])] = kept
    self.shape, self.numel = kept


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constexpr_shape(*(type.shape.values if type.is_block() else ()))


def _handle(self, data, dtype, attr=None):
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr
    if type(dtype) is not tl.core.dtype or data.itemsize * 8 > dtype.primitive_bitwidth:
        self.__post_init__()  # judges it


def _patch_attr(owner, name, member, builder, scope):
    """Pass what a function of the language needs here, to itself and not to its wrapper, which checks that alone."""
    code = getattr(member, "__code__", None)
    if code is not None and code.co_name == "wrapper" and code.co_filename == tl.core.__file__:
        member = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*arguments, **named):
        named["_semantic"] = semantic
        return member(*arguments, **named)

    scope.set_attr(owner, name, call)


@functools.cache
def _bounds(name):
    """Of whole numbers that a type takes as they are; None: it takes none, or other rules hold."""
    kind = tl.core.dtype(name)
    if kind.is_floating() and not kind.is_fp8():
        return -math.inf, math.inf
    return (kind.get_int_min_value(), kind.get_int_max_value()) if kind.is_int() and not kind.is_bool() else None


def _checked_if_unequal(before):
    """Types of operands, and their shapes: nothing is converted if both are alike or one is a number that fits."""

    @functools.wraps(before)
    def checked(self, left, right, left_ptr=False, right_ptr=False, arithmetic_check=True, div_or_mod=False):
        if not div_or_mod:
            if type(left) is tl.core.tensor:
                kind = left.dtype
                if type(kind) is tl.core.dtype:
                    if type(right) is tl.core.tensor:
                        if right.dtype is kind:
                            return self.broadcast_impl_value(left, right)
                    elif arithmetic_check and _fits(right, kind):
                        return self.broadcast_impl_value(left, self.scalar_constant(right, kind))
            elif arithmetic_check and type(right) is tl.core.tensor:
                kind = right.dtype
                if type(kind) is tl.core.dtype and _fits(left, kind):
                    return self.broadcast_impl_value(self.scalar_constant(left, kind), right)
        return before(self, left, right, left_ptr, right_ptr, arithmetic_check, div_or_mod)

    return checked


def _fits(value, kind):
    if type(value) is not int:
        return type(value) is float and _bounds(kind.name) == (-math.inf, math.inf)
    bounds = _bounds(kind.name)
    return bounds is not None and bounds[0] <= value <= bounds[1] and -(2**31) <= value < 2**31


def _filled(shape, data, kind):
    """What `np.full` and `np.broadcast_to` make, of which each takes longer than most operations."""
    found = np.empty(shape, kind)
    found[...] = data
    return found


def _splat(value, like):
    kind = value.type
    data = _filled(like.shape.values, value.handle.data, interpreter._get_np_dtype(kind))
    kind = like if like.element_ty is kind else tl.core.block_type(kind, like.shape)
    return tl.core.tensor(_Handle(data, value.handle.dtype), kind)


def _broadcast_if_unequal(before):
    @functools.wraps(before)
    def broadcast(self, left, right):
        if left.type.is_block():
            if not right.type.is_block():
                return left, _splat(right, left.type)
            return (left, right) if left.type.shape is right.type.shape else before(self, left, right)
        return (_splat(left, right.type), right) if right.type.is_block() else (left, right)

    return broadcast


def _broadcast(self, value, shape):
    data = value.data
    return _Handle(_filled(shape, data, data.dtype), value.dtype)


def _constant_once(before):
    """Numbers of kernels are few; nothing writes into the array of one."""
    known = {}

    @functools.wraps(before)
    def constant(self, value, dtype):
        if type(dtype) is not tl.core.dtype or type(value) not in (int, float) or value != value:
            return before(self, value, dtype)
        key = type(value), value, dtype.name
        data = known.get(key)
        if data is None:
            if len(known) > MAX_CONSTANTS:
                known.clear()
            data = known[key] = before(self, value, dtype).handle.data
            data.flags.writeable = False
        return tl.core.tensor(_Handle(data, dtype), dtype)

    return constant


def _same_or(before):
    return lambda self, other: self is other or before(self, other)


def _plain_or(before):
    plain = frozenset((int, bool, float, str, type(None), tl.core.tensor, tl.core.dtype, tl.core.block_type))
    return lambda value: value if type(value) in plain else before(value)


def _among(*names):
    names = frozenset(names)
    return lambda self: self.name in names


def _hasten():
    interpreter._patch_attr = _patch_attr
    _Handle.__init__ = _handle
    tl.core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    kinds = tl.core.dtype
    kinds.is_int = _among(*kinds.SINT_TYPES, *kinds.UINT_TYPES)
    kinds.is_floating = _among(*kinds.FP_TYPES)
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
    semantic.scalar_constant = _constant_once(semantic.scalar_constant)
    _Builder.create_broadcast = _broadcast
    semantic.binary_op_type_checking_impl = _checked_if_unequal(semantic.binary_op_type_checking_impl)


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
