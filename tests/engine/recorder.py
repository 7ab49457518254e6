"""CUDA graphs in miniature, for a CPU: operations are recorded once and replayed without the Python that made them.

As on a GPU, a replay does what was recorded to the same memory: whatever Python decided while capturing (a size, a
branch, a number) stays decided, every temporary has its place, and what lies there between replays is garbage.
"""

import torch
from torch.utils._pytree import tree_leaves

from baton.kernels.dispatch_mode import DispatchMode

GARBAGE = {
    torch.bool: True,
    torch.int64: -(1 << 40),
    torch.int32: -(1 << 20),
    torch.uint8: 0x7F,
}  # of float8, no number

WAITING = {"aten::bincount", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_local_scalar_dense"}


def tensors_of(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def place_of(tensor):
    return tensor.untyped_storage().data_ptr()


class _Recording(DispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []  # (function, arguments, keywords, results with memory of their own)
        self.made = {}  # by place: the temporaries

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function._schema.name in WAITING:  # on a GPU the host waits for what it finds, which a capture forbids
            raise RuntimeError(f"{function._schema.name} is not permitted while a stream captures")
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        given = {place_of(tensor) for tensor in tensors_of((arguments, keywords))}
        fresh = [tensor if place_of(tensor) not in given else None for tensor in tensors_of(result)]
        self.made |= {place_of(tensor): tensor for tensor in fresh if tensor is not None and tensor.numel()}
        self.operations.append((function, arguments, keywords, fresh))
        return result


class RecorderBackend:
    """A `GraphBackend` that records and replays.

    Args:
        refuse: called with the number of a `require`, a `warm_up` or a `capture` and its name; may raise.
    """

    def __init__(self, refuse=lambda what, number: None):
        self._refuse = refuse
        self._numbers = dict.fromkeys(("require", "warm_up", "capture"), 0)
        self.num_replays = 0

    def require(self, num_bytes):
        assert num_bytes > 0
        self._count("require")

    def warm_up(self, work):
        self._count("warm_up")
        work()

    def capture(self, pieces):
        self._count("capture")
        made = {}  # by all pieces: what one leaves, the next ones may read
        replays = []
        for work in pieces:
            recording = _Recording()
            with recording:
                work()
            made |= recording.made
            replays.append(self._replay_of(recording.operations, made, is_last=len(replays) + 1 == len(pieces)))
        return replays

    def _replay_of(self, operations, made, *, is_last):
        def replay():
            self.num_replays += 1
            for function, arguments, keywords, fresh in operations:
                results = tensors_of(function(*arguments, **keywords))
                for target, result in zip(fresh, results, strict=True):
                    if target is not None:
                        target.copy_(result)
            for tensor in made.values() if is_last else ():
                tensor.fill_(GARBAGE.get(tensor.dtype, float("nan")))

        return replay

    def _count(self, what):
        self._numbers[what] += 1
        self._refuse(what, self._numbers[what])
