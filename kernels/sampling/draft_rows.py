"""The drafts of a batch and how they are judged, as tensors; what they are for is `kernels.sampling.verify`'s business.

Legend: B sequences, K drafts of each, N rows of probabilities, C columns of a draft head, V vocabulary.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.sampling.choice import FLOATS, INTS


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The drafts of a batch and how they are judged.

    Attributes:
        ids_BK: int64, tokens of the target; -1 is no draft, and nothing after it is considered.
        cap_B: int64, drafts that may be accepted; nothing of rows past them is read.
        law_B: int32, `choice.Law`.
        by_chance: whether any law may be REJECT or BLOCK.
        probs_NKC: float32, what drafts were drawn from; what nobody may read can be anything.
        probs_row_B: int32, each sequence's row of it, -1 where the drafts are point masses.
        t2d_V: int32 or int64, the column of each token, -1 for none; None if columns are tokens.
        rates_K: float64, SYNTHETIC's chance of each draft once all before it stand.
        forced_len: FORCE's.
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
        """Refuse tensors of another shape, dtype or device.

        Raises:
            KernelArgumentInvalid: a tensor is one; the message names it.
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
