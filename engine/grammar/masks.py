"""Holds what grammars allow in one step, and applies it to logits as a bitmask.

Legend: B sequences of the step, G of those with a grammar, K drafts, Q = K + 1 rows, R any rows, V vocabulary, W =
ceil(V / 32).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.model.parallel import Communicator
from baton.model.vocab import WHOLE, Vocab

WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """What the grammars allow in one step.

    Attributes:
        index_G: int64, place of each sequence in the batch.
        bitmask_GQW: int32, bit t % 32 of word t // 32 for token t.
        num_valid_G: int64, drafts that the grammar allows; later rows of the bitmask allow everything.
        num_rows_G: int64, tokens that the step may emit; 0 if it is not known in time what the grammar allows.
    """

    index_G: torch.Tensor
    bitmask_GQW: torch.Tensor
    num_valid_G: torch.Tensor
    num_rows_G: torch.Tensor

    def apply(self, logits_BQV: torch.Tensor, vocab: Vocab = WHOLE) -> torch.Tensor:
        """The logits with forbidden tokens at -inf; a copy, in which other sequences' rows have the same bits."""
        masked_GQV = apply_bitmask(logits_BQV[self.index_G], self.bitmask_GQW, vocab.first)
        return logits_BQV.index_copy(0, self.index_G, masked_GQV)

    def cap(self, draft_cap_B: torch.Tensor) -> torch.Tensor:
        """The draft caps, lowered so that no draft that a grammar forbids can be accepted."""
        capped_G = torch.minimum(draft_cap_B[self.index_G], self.num_valid_G)
        return draft_cap_B.index_copy(0, self.index_G, capped_G)

    def cut(self, accepted_len_B: torch.Tensor) -> torch.Tensor:
        """Accepted lengths, lowered so that no token is emitted whose mask is unknown; -1: none at all.

        The remaining tokens keep their distribution, because each token depends only on those before it.
        """
        cut_G = torch.minimum(accepted_len_B[self.index_G], self.num_rows_G - 1)
        return accepted_len_B.index_copy(0, self.index_G, cut_G)

    def agreed(self, communicator: Communicator) -> "GrammarMasks":
        """The masks that every rank knows: ranks may have waited for different rows."""
        if communicator.size == 1:
            return self
        row_Q = torch.arange(self.bitmask_GQW.shape[1], device=self.bitmask_GQW.device)
        is_known_GQ = row_Q < self.num_rows_G[:, None]
        is_known_GQ = communicator.all_sum(is_known_GQ.to(torch.float32)) > communicator.size - 0.5
        num_rows_G = is_known_GQ.to(torch.int64).sum(dim=1)
        least_G = torch.minimum(self.num_valid_G, (num_rows_G - 1).clamp(min=0))
        return GrammarMasks(
            index_G=self.index_G,
            bitmask_GQW=self.bitmask_GQW.masked_fill(~is_known_GQ[..., None], -1),
            num_valid_G=torch.where(num_rows_G == len(row_Q), self.num_valid_G, least_G),
            num_rows_G=num_rows_G,
        )


def apply_bitmask(logits_RQV: torch.Tensor, bitmask_RQW: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Logits with every token whose bit is 0 at -inf; the reference for kernels that do the same.

    Args:
        logits_RQV: any float type; of the tokens from `first` on. A column without a bit is no token, and is -inf
            already.
        bitmask_RQW: int32, at least ceil(V / 32) words a row, lowest bit first.
        first: id of the first column.
    """
    stop = first + logits_RQV.shape[-1]
    words_RQX = bitmask_RQW[..., first // WORD_BITS : -(-stop // WORD_BITS)]
    bit_32 = torch.arange(WORD_BITS, dtype=torch.int32, device=bitmask_RQW.device)
    allowed_RQY = ((words_RQX[..., None] >> bit_32) & 1).flatten(-2)[..., first % WORD_BITS :]
    allowed_RQV = allowed_RQY[..., : logits_RQV.shape[-1]]
    if allowed_RQV.shape[-1] < logits_RQV.shape[-1]:
        allowed_RQV = functional.pad(allowed_RQV, (0, logits_RQV.shape[-1] - allowed_RQV.shape[-1]))
    return logits_RQV.masked_fill(allowed_RQV == 0, -torch.inf)
