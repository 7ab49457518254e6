"""What a launch must know of each sequence to choose its tokens, as plain tensors on the device.

Numbers that no sequence asks for are None, and cost nothing. Nothing here is read by the host.

Legend: B sequences, Q consecutive rows of each, R = B Q rows, V vocabulary, E rows that are edited.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from baton.kernels.arguments import require, require_rows, require_tensor

FLOATS = (torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
LOGITS = (torch.bfloat16, torch.float32)
MIN_TEMPERATURE = 1e-30  # below it float32 would divide by zero; any temperature this small is greedy in effect
_ALIGNED_BYTES = 16


class Law(IntEnum):
    """How the drafts of a sequence are judged; a sequence of temperature 0 is never drawn for.

    MATCH, FORCE and SYNTHETIC end in the target's own choice; the others draw from what the drafts left over, and are
    as MATCH where the temperature is 0.
    """

    IDLE = -1  # no sequence: zeros come out, and nothing is read or counted
    MATCH = 0  # a draft stands if it is the target's own choice: greedy, or coupled by its noise
    REJECT = 1  # by chance, one by one
    BLOCK = 2  # by chance, as a block; as REJECT where drafts are point masses
    FORCE = 3  # so many
    SYNTHETIC = 4  # by rates that are made up


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRows:
    """How each sequence draws.

    Attributes:
        temperature_B: float32 or float64; 0 is greedy.
        seed_B: int64 in [0, 2^63).
        choice_B: int64, which of a request's answers.
        position_B: int64, where the token of the first row will stand; row q's is q further.
        top_k_B: int64, 0 keeps all.
        top_p_B: float32 or float64 in (0, 1], 1 keeps all; of 0 any token may come.
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
        """Whether any sequence may cut off a tail."""
        return self.top_k_B is not None or self.top_p_B is not None or self.min_p_B is not None

    def require_fits(self, num_sequences: int, device: torch.device) -> None:
        """Refuse tensors of another shape, dtype or device.

        Raises:
            KernelArgumentInvalid: a tensor is one; the message names it.
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
    """Rows whose logits are not those of the model (`kernels.sampling.logit_edits`).

    Attributes:
        logits_EV: float32, contiguous.
        place_R: int32, each row's place in it, -1 where the model's stand.
    """

    logits_EV: torch.Tensor
    place_R: torch.Tensor

    @classmethod
    def of(cls, logits_PQV: torch.Tensor, sequence_P: torch.Tensor, num_sequences: int) -> "EditedRows":
        """All rows of some sequences, at these places (int64) of a batch."""
        num_edited, num_rows, _ = logits_PQV.shape
        place_BQ = torch.full((num_sequences, num_rows), -1, dtype=torch.int32, device=sequence_P.device)
        place_PQ = torch.arange(num_edited * num_rows, dtype=torch.int32, device=sequence_P.device)
        place_BQ.index_copy_(0, sequence_P, place_PQ.view(num_edited, num_rows))
        return cls(logits_EV=logits_PQV.float().flatten(0, 1).contiguous(), place_R=place_BQ.flatten())

    def require_fits(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Refuse tensors of another shape, dtype or device.

        Raises:
            KernelArgumentInvalid: a tensor is one; the message names it.
        """
        require_tensor("logits_EV", self.logits_EV, (None, vocab_size), (torch.float32,), device)
        require(self.logits_EV.is_contiguous(), "logits_EV", "must be contiguous")
        require_tensor("place_R", self.place_R, (num_rows,), (torch.int32,), device)
        require(self.place_R.is_contiguous(), "place_R", "must be contiguous")


def settled(x: torch.Tensor) -> torch.Tensor:
    """The same numbers one after the other, from a multiple of 16 bytes on.

    Kernels are specialized for tensors that begin there, and would be compiled anew for others.
    """
    if x.is_contiguous() and x.data_ptr() % _ALIGNED_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def require_logits(logits_BQV: torch.Tensor, argument: str = "logits_BQV") -> None:
    """Refuse logits that no launch could read.

    Raises:
        KernelArgumentInvalid: another shape, dtype or layout.
    """
    require_tensor(argument, logits_BQV, (None, None, None), LOGITS)
    require_rows(argument, logits_BQV)
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    require(0 < vocab_size < 1 << 30, argument, "has no token, or 2^30 and more")
    require(num_rows > 0, argument, "has no row")
    fits = num_sequences <= 1 or num_rows == 1 or logits_BQV.stride(0) == num_rows * logits_BQV.stride(1)
    require(fits, argument, "sequences must follow one another at the distance of rows")
