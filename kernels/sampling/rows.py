"""Sampling parameters of each sequence, as plain tensors on the device.

Parameters that no sequence uses are None, and cost nothing. The host reads nothing here.

Legend: B sequences, Q consecutive rows of each, R = B Q rows, V vocabulary, E rows that are edited.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from baton.kernels.arguments import require, require_rows, require_tensor

FLOATS = (torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
LOGITS = (torch.bfloat16, torch.float32)
MIN_TEMPERATURE = 1e-30  # smaller ones would divide by zero in float32; a temperature this small is greedy in effect
_ALIGNED_BYTES = 16


class Law(IntEnum):
    """How the drafts of a sequence are verified; nothing is drawn at temperature 0.

    MATCH, FORCE and SYNTHETIC end in the target's own choice; the others draw from the residual distribution, and act
    as MATCH at temperature 0.
    """

    IDLE = -1  # no sequence: the output is zeros, and nothing is read or counted
    MATCH = 0  # a draft is accepted if it is the target's own choice: greedy, or coupled by its noise
    REJECT = 1  # token-wise rejection sampling
    BLOCK = 2  # block-wise rejection sampling; as REJECT where drafts are point masses
    FORCE = 3  # accept a fixed number
    SYNTHETIC = 4  # accept by prescribed rates


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRows:
    """Sampling parameters of each sequence.

    Attributes:
        temperature_B: float32 or float64; 0 is greedy.
        seed_B: int64 in [0, 2^63).
        choice_B: int64, which of a request's answers.
        position_B: int64, position of the token sampled from the first row; row q's is q later.
        top_k_B: int64, 0 keeps all.
        top_p_B: float32 or float64 in (0, 1], 1 keeps all; at 0 any token may result.
        min_p_B: float32 or float64 in [0, 1], 0 keeps all.
    """

    temperature_B: torch.Tensor
    seed_B: torch.Tensor
    choice_B: torch.Tensor
    position_B: torch.Tensor
    top_k_B: torch.Tensor | None = None
    top_p_B: torch.Tensor | None = None
    min_p_B: torch.Tensor | None = None

    @property
    def truncates(self) -> bool:
        """Whether any sequence may cut off a tail of its distribution."""
        return self.top_k_B is not None or self.top_p_B is not None or self.min_p_B is not None

    def require_fits(self, num_sequences: int, device: torch.device) -> None:
        """Refuse tensors with another shape, dtype or device.

        Raises:
            KernelArgumentInvalid: a tensor does not fit; the message names it.
        """
        floats = {"temperature_B": self.temperature_B, "top_p_B": self.top_p_B, "min_p_B": self.min_p_B}
        ints = {"seed_B": self.seed_B, "choice_B": self.choice_B, "position_B": self.position_B}
        for named, dtypes in ((floats, FLOATS), ({**ints, "top_k_B": self.top_k_B}, (torch.int64,))):
            for name, tensor in named.items():
                if tensor is not None:
                    require_tensor(name, tensor, (num_sequences,), dtypes, device)
                    require(num_sequences <= 1 or tensor.stride(0) == 1, name, "must be contiguous")


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedRows:
    """Rows whose logits replace those of the model (`kernels.sampling.logit_edits`).

    Attributes:
        logits_EV: float32, contiguous.
        place_R: int32, each row's index in `logits_EV`, -1 where the model's logits are used.
    """

    logits_EV: torch.Tensor
    place_R: torch.Tensor

    @classmethod
    def of(cls, logits_PQV: torch.Tensor, sequence_P: torch.Tensor, num_sequences: int) -> "EditedRows":
        """Replace all rows of some sequences, given by their places (int64) in the batch."""
        num_edited, num_rows, _ = logits_PQV.shape
        place_BQ = torch.full((num_sequences, num_rows), -1, dtype=torch.int32, device=sequence_P.device)
        place_PQ = torch.arange(num_edited * num_rows, dtype=torch.int32, device=sequence_P.device)
        place_BQ.index_copy_(0, sequence_P, place_PQ.view(num_edited, num_rows))
        return cls(logits_EV=logits_PQV.float().flatten(0, 1).contiguous(), place_R=place_BQ.flatten())

    def require_fits(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Refuse tensors with another shape, dtype or device.

        Raises:
            KernelArgumentInvalid: a tensor does not fit; the message names it.
        """
        require_tensor("logits_EV", self.logits_EV, (None, vocab_size), (torch.float32,), device)
        require(self.logits_EV.is_contiguous(), "logits_EV", "must be contiguous")
        require_tensor("place_R", self.place_R, (num_rows,), (torch.int32,), device)
        require(self.place_R.is_contiguous(), "place_R", "must be contiguous")


def settled(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in contiguous memory that begins at a multiple of 16 bytes.

    Kernels are specialized for such tensors, and would be compiled anew for others.
    """
    if x.is_contiguous() and x.data_ptr() % _ALIGNED_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def require_logits(logits_BQV: torch.Tensor, argument: str = "logits_BQV") -> None:
    """Refuse logits that no launch can read.

    Raises:
        KernelArgumentInvalid: the shape, dtype or layout does not fit.
    """
    require_tensor(argument, logits_BQV, (None, None, None), LOGITS)
    require_rows(argument, logits_BQV)
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    require(0 < vocab_size < 1 << 30, argument, "has no token, or 2^30 and more")
    require(num_rows > 0, argument, "has no row")
    fits = num_sequences <= 1 or num_rows == 1 or logits_BQV.stride(0) == num_rows * logits_BQV.stride(1)
    require(fits, argument, "sequences must follow one another at the distance of rows")
