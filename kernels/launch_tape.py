"""Replays the launches of one layer's attention over the K and V of another layer.

The layers of a step launch the same kernels with the same arguments, except K, V and their scales. Checking and
choosing everything again takes the host several times as long as launching. So a tape records the launches of one
layer, and the next layers substitute their own K and V. Outputs and temporaries stay where the recorded layer has them:
work of one stream runs in order, so an output is used before the next replay overwrites it.

There is no tape if anything but a `Launcher` worked on the device during the recording, or if an argument may refer to
the recorded layer's memory other than as one of its tensors. Then each layer is launched as usual.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from baton.kernels.dispatch_mode import DispatchMode

_CREATE = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_LARGEST = 1 << 40  # integers at least this large may be addresses

R = TypeVar("R")
Swap = tuple[int, int, bool]  # position of an argument, index of its tensor, and whether it is a descriptor's base


@dataclass(slots=True)
class Launched:
    """One recorded launch.

    Attributes:
        run: function that launches it, given the stream and the arguments.
        arguments: arguments of the kernel, as Triton's launcher takes them.
        swaps: arguments that belong to the layer.
    """

    run: Callable[[int, Sequence[Any]], None]
    arguments: tuple[Any, ...]
    swaps: tuple[Swap, ...] = ()


@dataclass(slots=True)
class Recording:
    """Launches of this thread, in order; `is_whole` becomes False once something else happens."""

    launches: list[Launched] = field(default_factory=list)
    is_whole: bool = True


class _Local(threading.local):
    recording: Recording | None = None


local = _Local()
"""Where launchers look whether their calls are recorded."""


@dataclass(frozen=True, slots=True)
class LaunchTape(Generic[R]):
    """The launches of one layer, and its outputs.

    Attributes:
        made: the layer's outputs, which each replay overwrites.
        launches: launches in order.
    """

    made: R
    launches: tuple[Launched, ...]

    def replay(self, stream: int, tensors: Sequence[torch.Tensor]) -> None:
        """Launch everything again over another layer's tensors, which may differ in contents only.

        Args:
            stream: CUDA stream of the tensors' device.
            tensors: in the order of the recorded ones.
        """
        for launched in self.launches:
            arguments = list(launched.arguments)
            for place, index, is_descriptor in launched.swaps:
                arguments[place] = _moved(arguments[place], tensors[index]) if is_descriptor else tensors[index]
            launched.run(stream, arguments)


def record(work: Callable[[], R], tensors: Sequence[torch.Tensor]) -> tuple[R, LaunchTape[R] | None]:
    """Run a layer's work with these tensors of its own -> its result, and its tape if there can be one."""
    assert local.recording is None, "a recording is not part of another"
    recording = Recording()
    local.recording = recording
    try:
        with _Watched(recording):
            made = work()
    finally:
        local.recording = None
    if not recording.is_whole or not recording.launches:
        return made, None
    found: set[int] = set()
    for launched in recording.launches:
        swaps = _swaps(launched.arguments, tensors)
        if swaps is None:
            return made, None
        launched.swaps = swaps
        found |= {index for _, index, _ in swaps}
    if found != set(range(len(tensors))):
        return made, None
    return made, LaunchTape(made, tuple(recording.launches))


class _Watched(DispatchMode):
    """Spoils a recording at any torch operation that does more than allocate memory or make a view."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        schema = function._schema
        aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
        is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        if not is_view and schema.name not in _CREATE:
            self._recording.is_whole = False
        return function(*arguments, **(keywords or {}))


def _swaps(arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Swap, ...] | None:
    """Find the arguments that are those tensors; None if another argument may refer to their memory."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    swaps: list[Swap] = []
    for place, argument in enumerate(arguments):
        base = getattr(argument, "base", None)
        tensor = argument if isinstance(argument, torch.Tensor) else base if isinstance(base, torch.Tensor) else None
        if tensor is None:
            if isinstance(argument, int) and abs(argument) >= _LARGEST:
                return None
            continue
        index = next((index for index, one in enumerate(tensors) if one is tensor), None)
        if index is not None:
            swaps.append((place, index, tensor is base))
        elif tensor.untyped_storage().data_ptr() in own:
            return None
    return tuple(swaps)


def _moved(descriptor: Any, tensor: torch.Tensor) -> Any:
    moved = copy.copy(descriptor)
    moved.base = tensor
    return moved
