"""The drafts of a batch and how they are verified, as tensors; `kernels.sampling.verify` uses them.

Legend: B sequences, S sequences under rejection sampling, K drafts of each, Q = K + 1, N rows of probabilities, C
columns of a draft head, V vocabulary.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.sampling.rows import FLOATS, INTS


def accept_chances(p_SK: torch.Tensor, q_SK: torch.Tensor) -> torch.Tensor:
    """Probability that each draft is accepted, given all before it: min(1, p / q); 0 without a draft (q = 0)."""
    return torch.where(q_SK > 0, p_SK / q_SK, 0.0).clamp(max=1.0)


def block_reach(p_SK: torch.Tensor, q_SK: torch.Tensor) -> torch.Tensor:
    """How far the target covers each prefix, float64 [S, Q]: 1 for the empty one, then min(previous * p / q, 1).

    Sun et al., algorithm 2 (there p_i).
    """
    reach_S = p_SK.new_ones(p_SK.shape[0])
    reaches = [reach_S]
    for place in range(p_SK.shape[1]):
        p_S, q_S = p_SK[:, place], q_SK[:, place]
        reach_S = torch.where(q_S > 0, reach_S * p_S / q_S, 0.0).clamp(max=1.0)
        reaches.append(reach_S)
    return torch.stack(reaches, dim=1)


def block_chances(reach_SQ: torch.Tensor, leftover_SK: torch.Tensor) -> torch.Tensor:
    """Probability with which each prefix of 1 ... K drafts qualifies; the longest that does is accepted.

    Sun et al., equation 4: leftover / (leftover + 1 - reach), where the leftover of prefix i is the sum of its residual
    weights. The last prefix has no draft after it, so its leftover is its reach, and its reach is its probability.
    """
    reach_SK = reach_SQ[:, 1:]
    total_SK = leftover_SK + (1.0 - reach_SK)
    # 0 / 0: a prefix with nothing missing and nothing left over; some longer one always qualifies.
    return torch.where(total_SK > 0, leftover_SK / total_SK, 1.0)


def longest_prefix(stands_SK: torch.Tensor) -> torch.Tensor:
    """Length of the longest prefix that is accepted, int64 [S]; 0 if none is."""
    length_K = torch.arange(1, stands_SK.shape[1] + 1, device=stands_SK.device)
    lengths_SK = torch.where(stands_SK, length_K, 0)
    return torch.nn.functional.pad(lengths_SK, (1, 0)).amax(dim=1)


def residual_weights(p_SV: torch.Tensor, q_SV: torch.Tensor, reach_S: torch.Tensor) -> torch.Tensor:
    """Residual of the target after the drafts: max(reach p - q, 0), not normalised."""
    return (p_SV * reach_S[:, None].to(p_SV.dtype) - q_SV).clamp(min=0.0)


def pick(weights_SV: torch.Tensor, uniform_S: torch.Tensor) -> torch.Tensor:
    """Invert the distribution function, int64 [S]: the first id whose cumulative weight exceeds u times the sum.

    An id of weight 0 is never picked, nor one past the last of positive weight, regardless of rounding.
    """
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    threshold_S1 = uniform_S[:, None].double() * cumulative_SV[:, -1:]
    return ((cumulative_SV > threshold_S1) & (weights_SV > 0)).to(torch.int8).argmax(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The drafts of a batch and how they are verified.

    Attributes:
        ids_BK: int64, token ids of the target's vocabulary; -1 means no draft, and drafts after it are ignored.
        cap_B: int64, maximum number of accepted drafts; rows past them are not read.
        law_B: int32, `kernels.sampling.rows.Law`.
        by_chance: whether any law may be REJECT or BLOCK.
        probs_NKC: float32, distributions that drafts were drawn from; entries that must not be read may be anything.
        probs_row_B: int32, row of `probs_NKC` for each sequence, -1 if its drafts are point masses.
        t2d_V: int32 or int64, draft head column of each token, -1 for none; None if columns are tokens.
        rates_K: float64, SYNTHETIC's acceptance probability of each draft if all before it were accepted.
        forced_len: number of drafts that FORCE accepts.
    """

    ids_BK: torch.Tensor
    cap_B: torch.Tensor
    law_B: torch.Tensor
    by_chance: bool = False
    probs_NKC: torch.Tensor | None = None
    probs_row_B: torch.Tensor | None = None
    t2d_V: torch.Tensor | None = None
    rates_K: torch.Tensor | None = None
    forced_len: int = 0

    def require_fits(self, num_sequences: int, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Refuse tensors with another shape, dtype or device.

        Raises:
            KernelArgumentInvalid: a tensor does not fit; the message names it.
        """
        num_drafts = num_rows - 1
        wanted = (
            ("ids_BK", self.ids_BK, (num_sequences, num_drafts), (torch.int64,)),
            ("cap_B", self.cap_B, (num_sequences,), (torch.int64,)),
            ("law_B", self.law_B, (num_sequences,), (torch.int32,)),
            ("probs_NKC", self.probs_NKC, (None, num_drafts, None), (torch.float32,)),
            ("probs_row_B", self.probs_row_B, (num_sequences,), (torch.int32,)),
            ("t2d_V", self.t2d_V, (vocab_size,), INTS),
            ("rates_K", self.rates_K, (num_drafts,), FLOATS),
        )
        for name, tensor, shape, dtypes in wanted:
            if tensor is not None:
                require_tensor(name, tensor, shape, dtypes, device)
                require(tensor.is_contiguous(), name, "must be contiguous")
        require((self.probs_NKC is None) == (self.probs_row_B is None), "probs_row_B", "goes with probs_NKC")
        require(self.t2d_V is None or self.probs_NKC is not None, "t2d_V", "goes with probs_NKC")
        if self.probs_NKC is not None:
            require(self.by_chance, "probs_NKC", "are of drafts that are judged by chance")
            num_columns = self.probs_NKC.shape[2]
            require(self.t2d_V is not None or num_columns == vocab_size, "probs_NKC", f"has {num_columns} columns")
        require(self.forced_len >= 0, "forced_len", "is negative")
