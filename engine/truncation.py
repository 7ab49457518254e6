"""Top-k and top-p: which tokens stay, decided exactly whether one process holds a row of logits or many share it.

Tokens of a row are put in order, the likelier first and among equals the lower id. One stays while what lies before it
falls short: fewer than k tokens, then less than p of the probability that top-k left over.

Probabilities are counted in whole numbers: exp(logit - largest) in units of 2^-b, where b = 62 - ceil(log2 V), so that
those of V tokens never overflow an int64. Sums of whole numbers do not depend on their order, so a row gives the same
tokens however it is cut, sorted or scanned. Rounding moves a sum by at most V / 2 units, 2^-27 of the likeliest
token's weight for V = 2^17, and typically by 2^-36; only tokens whose border lies that close to p can be told apart
from those of real numbers.

Where ranks share a row, each sorts its own columns, and the token at the border is found by its bits: all ranks tell
each other how much lies at or before 256 places of the range that is left, and go on in the one that holds the border.
That is 4 small all-gathers for float32 and 8 for float64, of 2 KiB a row and rank, whatever V. Tokens that are equal to
the border are counted in order of ids, which is order of ranks.

Legend: U sequences with top-k or top-p, Q rows of each, V vocabulary, W columns of a rank, R ranks, N = U Q rows,
T = 256 places.
"""

import torch
from torch.nn import functional

from baton.model.vocab import WHOLE, CutVocab, Vocab

_DIGIT_BITS = 8
_NUM_BITS = {torch.float32: 32, torch.float64: 64}


def truncate(
    logits_UQW: torch.Tensor,
    top_k_U: torch.Tensor,
    top_p_U: torch.Tensor,
    vocab: Vocab = WHOLE,
    *,
    has_top_k: bool = True,
    has_top_p: bool = True,
) -> torch.Tensor:
    """Set all but the k likeliest tokens, then all but the smallest set whose probability reaches p, to -inf.

    Args:
        logits_UQW: float32 or float64; where ranks share a row, its largest is 0.
        top_k_U: int64, 0 keeps all.
        top_p_U: float64, 1 keeps all.
        vocab: of which W are columns.
        has_top_k: whether any row has it; if not, `top_k_U` is not looked at.
        has_top_p: likewise.
    """
    sorted_UQW, order_UQW = logits_UQW.sort(dim=-1, descending=True, stable=True)
    if isinstance(vocab, CutVocab):
        cut = _CutRows(sorted_UQW, vocab, (top_k_U, top_p_U), has_top_k=has_top_k, has_top_p=has_top_p)
        keep_UQW = cut.kept()
    else:
        keep_UQW = _kept(sorted_UQW, top_k_U, top_p_U)
    drop_UQW = torch.zeros_like(keep_UQW).scatter(-1, order_UQW, ~keep_UQW)
    return logits_UQW.masked_fill(drop_UQW, -torch.inf)


def masses(shifted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp of numbers that are at most 0, int64, such that `vocab_size` of them add up without overflow."""
    num_bits = 62 - (vocab_size - 1).bit_length()
    return (shifted.double().exp() * 2.0**num_bits).round().to(torch.int64)


def _kept(sorted_UQV: torch.Tensor, top_k_U: torch.Tensor, top_p_U: torch.Tensor) -> torch.Tensor:
    """Which of a whole row's tokens, sorted, stay."""
    vocab_size = sorted_UQV.shape[-1]
    rank_V = torch.arange(vocab_size, device=sorted_UQV.device)
    limit_U = torch.where(top_k_U > 0, top_k_U, vocab_size)
    keep_UQV = (rank_V < limit_U[:, None, None]).expand_as(sorted_UQV)
    mass_UQV = masses(sorted_UQV - sorted_UQV[..., :1], vocab_size).masked_fill(~keep_UQV, 0)
    reached_UQV = mass_UQV.cumsum(dim=-1)
    top_p_U11 = top_p_U[:, None, None]
    # A token stays while what lies before it falls short of p; before the first lies nothing.
    is_short_UQV = (reached_UQV - mass_UQV).double() < top_p_U11 * reached_UQV[..., -1:].double()
    return keep_UQV & (is_short_UQV | (top_p_U11 >= 1.0))


class _CutRows:
    """Rows that ranks share: this rank's columns of each, sorted, the likelier first."""

    def __init__(
        self,
        sorted_UQW: torch.Tensor,
        vocab: CutVocab,
        limits: tuple[torch.Tensor, torch.Tensor],
        *,
        has_top_k: bool,
        has_top_p: bool,
    ) -> None:
        self._shape = sorted_UQW.shape
        self._sorted_NW = sorted_UQW.flatten(0, 1)
        self._vocab = vocab
        num_rows = sorted_UQW.shape[1]
        self._top_k_N1, self._top_p_N1 = (limit_U.repeat_interleave(num_rows)[:, None] for limit_U in limits)
        self._has_top_k, self._has_top_p = has_top_k, has_top_p
        self._key_NW = order_keys(self._sorted_NW)
        self._num_bits = _NUM_BITS[sorted_UQW.dtype]

    def kept(self) -> torch.Tensor:
        """Which of this rank's tokens stay, bool [U, Q, W], as sorted."""
        keep_NW = torch.ones_like(self._key_NW, dtype=torch.bool)
        if self._has_top_k:
            need_N1 = torch.where(self._top_k_N1 > 0, self._top_k_N1.double(), torch.inf)
            keep_NW = self._before(torch.ones_like(self._key_NW), need_N1)
        if self._has_top_p:
            mass_NW = masses(self._sorted_NW, self._vocab.vocab_size).masked_fill(~keep_NW, 0)
            total_N1 = self._vocab.add(mass_NW.sum(dim=-1, keepdim=True))
            need_N1 = torch.where(self._top_p_N1 < 1.0, self._top_p_N1 * total_N1.double(), torch.inf)
            keep_NW = keep_NW & self._before(mass_NW, need_N1)
        return keep_NW.view(self._shape)

    def _before(self, weight_NW: torch.Tensor, need_N1: torch.Tensor) -> torch.Tensor:
        """Whether what lies before each token, of all ranks' in order, weighs less than `need`: bool [N, W].

        Args:
            weight_NW: int64, not negative.
            need_N1: float64, positive; inf for all of a row.
        """
        reached_NW = weight_NW.cumsum(dim=-1)
        reached_NX = functional.pad(reached_NW, (1, 0))  # by the first 0 ... W tokens
        place_T = torch.arange(1, (1 << _DIGIT_BITS) + 1, device=need_N1.device)
        # The border's key is the first at which enough is reached; at keys below `low` it is not.
        low_N1 = torch.full_like(need_N1, -(1 << (self._num_bits - 1)), dtype=torch.int64)
        below_RN1 = at_RN1 = low_N1.new_zeros(self._vocab.size, *low_N1.shape)
        for shift in range(self._num_bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
            last_NT = low_N1 + (place_T << shift) - 1  # of each part of the range; the 2^63 of the last wraps rightly
            count_NT = torch.searchsorted(self._key_NW, last_NT, right=True)
            sums_RNT = self._vocab.parts(reached_NX.gather(1, count_NT))
            is_short_NT = sums_RNT.sum(dim=0).double() < need_N1
            part_N1 = is_short_NT.sum(dim=-1, keepdim=True).clamp(max=(1 << _DIGIT_BITS) - 1)
            part_RN1 = part_N1.expand(self._vocab.size, -1, -1)
            at_RN1 = sums_RNT.gather(2, part_RN1)
            below_RN1 = torch.where(part_RN1 > 0, sums_RNT.gather(2, (part_RN1 - 1).clamp(min=0)), below_RN1)
            low_N1 = low_N1 + (part_N1 << shift)
        # Equals of the border at lower ranks have lower ids.
        rank = self._vocab.rank
        before_own_N1 = below_RN1.sum(dim=0) + (at_RN1 - below_RN1)[:rank].sum(dim=0) - below_RN1[rank]
        lies_before_NW = before_own_N1 + reached_NW - weight_NW
        return (self._key_NW < low_N1) | ((self._key_NW == low_N1) & (lies_before_NW.double() < need_N1))


def order_keys(x: torch.Tensor) -> torch.Tensor:
    """Whole numbers that rise as `x` falls, int64, equal where it is equal, within the bits of its dtype."""
    x = x + 0.0  # -0.0 becomes 0.0
    if x.dtype == torch.float64:
        bits, others = x.view(torch.int64), (1 << 63) - 1
    else:
        assert x.dtype == torch.float32
        bits, others = x.view(torch.int32).to(torch.int64), (1 << 31) - 1
    return ~torch.where(bits < 0, bits ^ others, bits)
