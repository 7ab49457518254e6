"""A rank's end of a group whose rounds `recorder` records and replays, as a CUDA graph has those of NCCL.

gloo's rounds are no operations of torch, so a recording would lose them. Here each is one, that names its group.
"""

import itertools

import torch

_LIBRARY = torch.library.Library("baton_tests", "DEF")
_LIBRARY.define("all_sum(Tensor x, int group) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, int group) -> Tensor")
_GROUPS: dict = {}
_numbers = itertools.count()


@torch.library.impl(_LIBRARY, "all_sum", "CPU")
def _all_sum(x, group):
    return _GROUPS[group].all_sum(x).clone()


@torch.library.impl(_LIBRARY, "all_gather", "CPU")
def _all_gather(x, group):
    return _GROUPS[group].all_gather(x).clone()


class RecordedGroup:
    """A `Communicator`; what is not recorded is the group's own."""

    def __init__(self, group):
        self._number = next(_numbers)
        self._group = _GROUPS[self._number] = group

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_sum(self, x):
        return torch.ops.baton_tests.all_sum(x, self._number)

    def all_gather(self, x):
        return torch.ops.baton_tests.all_gather(x, self._number)
