"""Top-k and top-p: exactly the rule of `kernels.sampling.kept_tokens`, whether one process holds a row or many.

Where ranks share a row, each sorts its own columns. If all rows of a batch have a top-k, and none beyond
`MAX_CANDIDATES`, each rank tells its so many likeliest, and all put them in order: one small all-gather. Else the token
at the border is found by its bits: all ranks tell each other how much lies at or before so many places of the range
that is left, and go on in the one that holds the border. That is 4 small all-gathers for float32, of 2 KiB a row and
rank, and 6 for float64, of 16 KiB, whatever V, for each of top-k and top-p. Tokens that are equal to the border are
counted in order of ids, which is order of ranks.

Legend: U sequences with top-k or top-p, Q rows of each, V vocabulary, W columns of a rank, R ranks, N = U Q rows,
T places, C candidates of a rank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.core.requests.sampling import SamplingParams
from baton.kernels.sampling.kept_tokens import kept, masses
from baton.model.vocab import WHOLE, CutVocab, Vocab

MAX_CANDIDATES = 256
# Bits of a number, and how many of them are found at once: fewer bits are smaller messages, more are fewer messages.
_NUM_BITS = {torch.float32: (32, 8), torch.float64: (64, 11)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the host knows of a batch's top-k and top-p, so that nothing is done for what no row asks.

    Attributes:
        has_top_k: whether any row may have it.
        has_top_p: likewise.
        top_k_bound: no row's top-k is larger, and all that cut anything off have one; 0 if that is not known.
    """

    has_top_k: bool = True
    has_top_p: bool = True
    top_k_bound: int = 0

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> "Limits":
        """Those of the sequences that sample."""
        cuts = [item for item in params if truncates(item)]
        top_ks = [item.top_k for item in cuts]
        bound = max(top_ks, default=0) if all(top_ks) else 0
        return cls(any(top_ks), any(item.top_p < 1.0 for item in cuts), bound)


def truncates(params: SamplingParams) -> bool:
    """Whether these parameters cut off any tail of the distribution, beside min-p."""
    return params.top_k > 0 or params.top_p < 1.0


def truncate(
    logits_UQW: torch.Tensor,
    top_k_U: torch.Tensor,
    top_p_U: torch.Tensor,
    vocab: Vocab = WHOLE,
    limits: Limits = Limits(),
) -> torch.Tensor:
    """Set all but the k likeliest tokens, then all but the smallest set whose probability reaches p, to -inf.

    Args:
        logits_UQW: float32 or float64; where ranks share a row, its largest is 0.
        top_k_U: int64, 0 keeps all.
        top_p_U: float64, 1 keeps all.
        vocab: of which W are columns.
        limits: of `top_k_U` and `top_p_U`.
    """
    sorted_UQW, order_UQW = logits_UQW.sort(dim=-1, descending=True, stable=True)
    if not isinstance(vocab, CutVocab):
        keep_UQW = kept(sorted_UQW, top_k_U, top_p_U, logits_UQW.shape[-1])
    elif 0 < limits.top_k_bound <= MAX_CANDIDATES:
        keep_UQW = _kept_of_candidates(sorted_UQW, top_k_U, top_p_U, vocab, limits.top_k_bound)
    else:
        keep_UQW = _CutRows(sorted_UQW, top_k_U, top_p_U, vocab, limits).kept()
    drop_UQW = torch.zeros_like(keep_UQW).scatter(-1, order_UQW, ~keep_UQW)
    return logits_UQW.masked_fill(drop_UQW, -torch.inf)


def _kept_of_candidates(
    sorted_UQW: torch.Tensor, top_k_U: torch.Tensor, top_p_U: torch.Tensor, vocab: CutVocab, bound: int
) -> torch.Tensor:
    """Which of this rank's tokens, sorted, stay, where each row has a top-k of at most `bound`."""
    width = sorted_UQW.shape[-1]
    num_own = min(bound, width)
    parts_RUQC = vocab.parts(sorted_UQW[..., :num_own].double())
    # Side by side in order of ranks, equals are in order of ids, and stay so.
    sorted_UQX, order_UQX = parts_RUQC.movedim(0, -2).flatten(-2).sort(dim=-1, descending=True, stable=True)
    keep_UQX = kept(sorted_UQX, top_k_U, top_p_U, vocab.vocab_size)
    keep_UQX = torch.zeros_like(keep_UQX).scatter(-1, order_UQX, keep_UQX)
    first = vocab.rank * num_own
    return functional.pad(keep_UQX[..., first : first + num_own], (0, width - num_own))


class _CutRows:
    """Rows that ranks share: this rank's columns of each, sorted, the likelier first."""

    def __init__(
        self,
        sorted_UQW: torch.Tensor,
        top_k_U: torch.Tensor,
        top_p_U: torch.Tensor,
        vocab: CutVocab,
        limits: Limits,
    ) -> None:
        self._shape = sorted_UQW.shape
        self._sorted_NW = sorted_UQW.flatten(0, 1)
        self._vocab = vocab
        self._limits = limits
        num_rows = sorted_UQW.shape[1]
        self._top_k_N1 = top_k_U.repeat_interleave(num_rows)[:, None]
        self._top_p_N1 = top_p_U.repeat_interleave(num_rows)[:, None]
        self._key_NW = order_keys(self._sorted_NW)
        self._num_bits, self._digit_bits = _NUM_BITS[sorted_UQW.dtype]

    def kept(self) -> torch.Tensor:
        """Which of this rank's tokens stay, bool [U, Q, W], as sorted."""
        keep_NW = torch.ones_like(self._key_NW, dtype=torch.bool)
        if self._limits.has_top_k:
            keep_NW = self._before(torch.ones_like(self._key_NW), self._needed_tokens)
        if self._limits.has_top_p:
            mass_NW = masses(self._sorted_NW, self._vocab.vocab_size).masked_fill(~keep_NW, 0)
            keep_NW = keep_NW & self._before(mass_NW, self._needed_mass)
        return keep_NW.view(self._shape)

    def _needed_tokens(self, total_N1: torch.Tensor) -> torch.Tensor:
        """How many must lie before a token that goes; inf where all stay."""
        return torch.where(self._top_k_N1 > 0, self._top_k_N1.double(), torch.inf)

    def _needed_mass(self, total_N1: torch.Tensor) -> torch.Tensor:
        """How much of the total must."""
        return torch.where(self._top_p_N1 < 1.0, self._top_p_N1 * total_N1.double(), torch.inf)

    def _before(self, weight_NW: torch.Tensor, needed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Whether what lies before each token, of all ranks' in order, weighs less than is needed: bool [N, W].

        Args:
            weight_NW: int64, not negative.
            needed: float64 [N, 1], positive, of the weight of a whole row, int64 [N, 1].
        """
        reached_NW = weight_NW.cumsum(dim=-1)
        reached_NX = functional.pad(reached_NW, (1, 0))  # by the first 0 ... W tokens
        # The border's key is the first at which enough is reached; at keys below `low` it is not.
        low_N1 = torch.full_like(reached_NW[:, :1], -(1 << (self._num_bits - 1)))
        below_RN1 = at_RN1 = low_N1.new_zeros(self._vocab.size, *low_N1.shape)
        need_N1: torch.Tensor | None = None
        shift = self._num_bits
        while shift > 0:
            num_places = 1 << min(shift, self._digit_bits)
            shift -= min(shift, self._digit_bits)
            place_T = torch.arange(1, num_places + 1, device=low_N1.device)
            last_NT = low_N1 + (place_T << shift) - 1  # of each part of the range; the 2^63 of the last wraps rightly
            count_NT = torch.searchsorted(self._key_NW, last_NT, right=True)
            sums_RNT = self._vocab.parts(reached_NX.gather(1, count_NT))
            reached_NT = sums_RNT.sum(dim=0)
            if need_N1 is None:  # all keys lie in the first range
                need_N1 = needed(reached_NT[:, -1:])
            part_N1 = (reached_NT.double() < need_N1).sum(dim=-1, keepdim=True).clamp(max=num_places - 1)
            part_RN1 = part_N1.expand(self._vocab.size, -1, -1)
            at_RN1 = sums_RNT.gather(2, part_RN1)
            below_RN1 = torch.where(part_RN1 > 0, sums_RNT.gather(2, (part_RN1 - 1).clamp(min=0)), below_RN1)
            low_N1 = low_N1 + (part_N1 << shift)
        # Equals of the border at lower ranks have lower ids.
        rank = self._vocab.rank
        before_own_N1 = below_RN1.sum(dim=0) + (at_RN1 - below_RN1)[:rank].sum(dim=0) - below_RN1[rank]
        lies_before_NW = before_own_N1 + reached_NW - weight_NW
        assert need_N1 is not None
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
