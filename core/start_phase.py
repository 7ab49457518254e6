"""What a worker does before it serves, in words for operators. Nothing is sent or shown here.

Parts of a start report their phases by a callable that they get as an argument (`OnPhase`), never from a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STARTING: Final = "starting"
RANKS: Final = "joining its ranks"
WEIGHTS: Final = "weights"
KV_POOL: Final = "KV pool"
FINDING_KERNELS: Final = "finding kernels"
KERNELS: Final = "compiling kernels"
GRAPHS: Final = "CUDA graphs"
WARM_UP: Final = "warming up"

OnPhase = Callable[[str, int, int], None]  # the phase, how much of it is done, and of how much; 0, 0: not counted


def no_phase(text: str, num_done: int, num_total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class StartPhase:
    """A phase, and how far it is.

    Attributes:
        text: what is done; one phase keeps its text.
        num_done: how much of it is done; 0 also if only the total is known.
        num_total: of how much; 0: not counted.
    """

    text: str
    num_done: int = 0
    num_total: int = 0

    def __str__(self) -> str:
        """For operators: `weights 45 %`, `compiling kernels (136)`, `CUDA graphs 300 of 901`, `warming up`."""
        if not self.num_total:
            return self.text
        if self.text == WEIGHTS:  # of tensors, whose number says little
            return f"{self.text} {100 * self.num_done // self.num_total} %"
        return (
            f"{self.text} {self.num_done} of {self.num_total}" if self.num_done else f"{self.text} ({self.num_total})"
        )
