"""Caches compiled Triton kernels to cut launch overhead.

At each launch, Triton derives the specialization from the types, alignment and values of all arguments and from the
text of all options. For a kernel with twenty arguments that takes the host longer than a small kernel takes on the
device. `Launcher` caches the compiled kernel that Triton chose, keyed on everything that Triton's choice depends on, at
least as precisely: device, argument types, pointer dtypes and whether addresses are multiples of 16, values of
specialized integers, whether other integers fit in 32 bits, constants and options. It launches the kernel directly on a
hit. A miss is launched by Triton, and so is every launch where Triton's choice depends on more than that: in the
interpreter, on AMD, and for kernels with hooks of their own.

The cache does not notice changes of a kernel's global variables or of its own debugging options, which Triton would
notice. Both are set before the first launch, or not at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels import launch_tape
from baton.kernels.dry_run import is_met

MAX_FORMS = 512
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which properties of which arguments matter, for one sequence of argument types.

    Attributes:
        tensors: positions of pointer arguments.
        descriptors: positions of tensor descriptors.
        exact: getter of the integers that are specialized.
        wide: positions of integers that are not specialized, but whose size decides their type.
    """

    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]
    exact: Any
    wide: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Constants:
    """A kernel's constants and Triton's options by name, made once and kept; compared by identity."""

    by_name: Mapping[str, Any]


class Launcher:
    """Launches one kernel, whose constants are its last parameters.

    Args:
        kernel: kernel made by `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._forms: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._layouts: dict[tuple[type, ...], _Layout | None] = {}
        self._constants: tuple[str, ...] = ()
        self._is_fast = isinstance(kernel, JITFunction) and torch.version.hip is None
        if self._is_fast:
            are_constant = [parameter.is_constexpr for parameter in kernel.params]
            self._num_arguments = are_constant.count(False)
            self._constants = tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)
            self._is_fast = are_constant == sorted(are_constant)

    def __call__(
        self, grid: tuple[int, ...], arguments: Sequence[Any], constants: Constants | Mapping[str, Any]
    ) -> None:
        """Launch on the current stream of the first argument's device, or of the current device if it is no tensor.

        Args:
            grid: number of programs, in up to three dimensions.
            arguments: arguments that are not constants, in order.
            constants: constants and Triton's options, by name.
        """
        home = getattr(arguments[0], "device", None)  # a descriptor has none
        if home is not None and home.type == "cuda" and home.index != torch.cuda.current_device():
            with torch.cuda.device(home):
                self(grid, arguments, constants)
            return
        key = self._key(arguments, constants)
        form = None if key is None else self._forms.get(key)
        if key is not None and form is not None:
            compiled, values = form
            x, y, z = (*grid, 1, 1)[:3]
            gpu: Any = driver.active
            stream = gpu.get_current_stream(key[0])
            if _is_heard(knobs.runtime.launch_enter_hook) or _is_heard(knobs.runtime.launch_exit_hook):
                _spoil_recording()
                compiled[(x, y, z)](*arguments, *values, stream=stream)
                return
            about = compiled.function, compiled.packed_metadata, None, None, None  # no hooks, and no metadata for them
            compiled.run(x, y, z, stream, *about, *arguments, *values)
            if launch_tape.local.recording is not None:

                def run(stream: int, arguments: Sequence[Any]) -> None:
                    compiled.run(x, y, z, stream, *about, *arguments, *values)

                launch_tape.local.recording.launches.append(launch_tape.Launched(run, tuple(arguments)))
            return
        _spoil_recording()
        if key is not None and is_met((self, key)):
            return
        by_name = constants.by_name if isinstance(constants, Constants) else constants
        compiled = self.kernel[grid](*arguments, **by_name)
        if key is not None and compiled is not None and all(name in by_name for name in self._constants):
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[key] = compiled, tuple(by_name[name] for name in self._constants)

    def _key(
        self, arguments: Sequence[Any], constants: Constants | Mapping[str, Any]
    ) -> tuple[int, *tuple[Any, ...]] | None:
        """Return what Triton's choice depends on; None if it may depend on more than is known here."""
        if not self._is_fast or self.kernel.pre_run_hooks:
            return None
        kinds = tuple(map(type, arguments))
        layout = self._layouts.get(kinds)
        if layout is None:
            if kinds in self._layouts:
                return None
            layout = self._layouts[kinds] = self._layout_of(kinds)
            if layout is None:
                return None
        aligned = 1
        seen: list[Any] = []
        for place in layout.tensors:
            tensor = arguments[place]
            aligned += aligned + (tensor.data_ptr() % _ALIGNMENT == 0)
            seen.append(tensor.dtype)
        for place in layout.descriptors:
            descriptor = arguments[place]
            seen += descriptor.base.dtype, tuple(descriptor.block_shape), getattr(descriptor, "layout", None)
        for place in layout.wide:
            seen.append(arguments[place] >> 31)
        exact = layout.exact(arguments)
        chosen: Any = constants
        if not isinstance(constants, Constants):
            chosen = tuple((name, type(value), value) for name, value in constants.items())
        gpu: Any = driver.active
        return gpu.get_current_device(), kinds, aligned, tuple(seen), exact, chosen

    def _layout_of(self, kinds: tuple[type, ...]) -> _Layout | None:
        """Return the layout; None if some argument is of a type that only Triton handles."""
        tensors: list[int] = []
        descriptors: list[int] = []
        exact: list[int] = []
        wide: list[int] = []
        if len(kinds) != self._num_arguments:
            return None
        for place, kind in enumerate(kinds):
            parameter = self.kernel.params[place]
            if issubclass(kind, torch.Tensor):
                tensors.append(place)
            elif issubclass(kind, (TensorDescriptor, GluonDescriptor)):
                descriptors.append(place)
            elif kind is int and not parameter.do_not_specialize:
                exact.append(place)
            elif kind is int and not parameter.annotation_type:
                wide.append(place)
            elif kind not in (int, float, bool):
                return None
            elif kind is bool and not parameter.do_not_specialize:
                return None
        return _Layout(tuple(tensors), tuple(descriptors), _getter(exact), tuple(wide))


def _spoil_recording() -> None:
    """Mark the current recording as incomplete, because a tape cannot repeat this launch."""
    if launch_tape.local.recording is not None:
        launch_tape.local.recording.is_whole = False


def _is_heard(hook: Any) -> bool:
    """Return whether a profiler listens to launches: a chain that is not empty, or a function in its place."""
    return bool(getattr(hook, "calls", hook))


def _getter(places: Sequence[int]) -> Any:
    """Return a function that picks the values at any number of positions."""
    return itemgetter(*places) if places else lambda arguments: ()
