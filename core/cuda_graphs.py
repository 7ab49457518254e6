"""Which CUDA graphs a decode worker captures: the operator's choice, checked once (see `engine.graphs`)."""

import re
from dataclasses import dataclass
from typing import Literal

from baton.core.errors import ConfigInvalid

CudaGraphsName = Literal["auto", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphConfig:
    """Whether and for which sizes graphs are captured.

    Attributes:
        mode: `auto` captures graphs if the KV pool is on a CUDA device; `off` never does.
        sizes: numbers of sequences that steps are padded to, ascending; empty: the engine chooses.

    Raises:
        ConfigInvalid: sizes are given without graphs, or do not ascend from 1 or more.
    """

    mode: CudaGraphsName = "auto"
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            return
        if self.mode == "off":
            raise _refusal("sizes are given and cuda_graphs is off; leave one of them out")
        if self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise _refusal(f"{self._listed} do not rise from 1 or more")

    @classmethod
    def parse(cls, mode: CudaGraphsName, sizes: str) -> "CudaGraphConfig":
        """Parse the text of a key.

        Raises:
            ConfigInvalid: the sizes are not written like 1,2,4; see also the class.
        """
        if not re.fullmatch(r"( *[0-9]{1,9} *(,(?=.)|$))*", sizes):
            raise _refusal(f"{sizes[:80]!r} is not written like 1,2,4")
        return cls(mode=mode, sizes=tuple(int(size) for size in sizes.split(",")) if sizes else ())

    def require_fits(self, *, device: str, max_num_seqs: int | None) -> None:
        """Check the sizes against a worker's device and, if known, its maximum number of running sequences.

        Raises:
            ConfigInvalid: the device has no graphs, or a size exceeds what a step ever has.
        """
        if not self.sizes:
            return
        if device != "cuda":
            raise _refusal(f"sizes are given and the device is {device}; only CUDA devices have graphs")
        if max_num_seqs is not None and self.sizes[-1] > max_num_seqs:
            raise _refusal(f"{self.sizes[-1]} exceeds max_num_seqs, {max_num_seqs}; no step has so many sequences")

    @property
    def _listed(self) -> str:
        return ", ".join(map(str, self.sizes))


def _refusal(why: str) -> ConfigInvalid:
    return ConfigInvalid(f"cuda_graph_sizes: {why}", keys=["cuda_graph_sizes"])
