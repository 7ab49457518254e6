"""Samples token ids from logits: edits, temperature, min-p, top-k, top-p, and a repeatable Gumbel draw.

A token is argmax(processed logits + noise), where the noise is a function of the request's seed and the token's
position (kernels.sampling.noise). Every operation works along one row, so a row's token never depends on other rows.
Greedy rows take the argmax of their edited logits; no noise is drawn for them. Edits are defined in
engine.sampling.logit_edits. Parameters are not checked again (core.requests.sampling checks them).

If ranks share a vocabulary (`model.vocab`), each has the logits of its own tokens and draws only their noise; the
sampled tokens are the same. Greedy sampling takes one small collective. Random sampling takes two, as scores are
relative to the row's largest logit; top-k and top-p take more.

Legend: B sequences, Q consecutive positions of each, K = Q - 1 drafts, V vocabulary (of it those this process has), S
sequences that sample, U of those truncate.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.history import HistoryLookahead
from baton.engine.sampling.logit_edits import LogitEdits
from baton.engine.sampling.logprobs import LogprobRows
from baton.kernels.copies import to_device
from baton.kernels.sampling.kept_tokens import kept, masses
from baton.kernels.sampling.noise import Purpose, gumbel
from baton.kernels.sampling.rows import MIN_TEMPERATURE
from baton.model.vocab import WHOLE, CutVocab, Vocab

MAX_CANDIDATES = 256
# Bits of a number, and how many of them are found per round: fewer mean smaller messages, more mean fewer messages.
_NUM_BITS = {torch.float32: (32, 8), torch.float64: (64, 11)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the host knows about a batch's top-k and top-p, to skip work that no row needs.

    Attributes:
        has_top_k: whether any row may have a top-k.
        has_top_p: whether any row may have a top-p.
        top_k_bound: upper bound of the rows' top-k, if all rows that truncate have one; else 0.
    """

    has_top_k: bool = True
    has_top_p: bool = True
    top_k_bound: int = 0

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> "Limits":
        """The limits of the sequences that sample."""
        cuts = [item for item in params if truncates(item)]
        top_ks = [item.top_k for item in cuts]
        bound = max(top_ks, default=0) if all(top_ks) else 0
        return cls(any(top_ks), any(item.top_p < 1.0 for item in cuts), bound)


def truncates(params: SamplingParams) -> bool:
    """Whether these parameters cut off any tail of the distribution, not counting min-p."""
    return params.top_k > 0 or params.top_p < 1.0


def truncate(
    logits_UQW: torch.Tensor,
    top_k_U: torch.Tensor,
    top_p_U: torch.Tensor,
    vocab: Vocab = WHOLE,
    limits: Limits = Limits(),
) -> torch.Tensor:
    """Set to -inf all but the k likeliest tokens, then all but the smallest set whose probability reaches p.

    Args:
        logits_UQW: float32 or float64; if ranks share a row, its maximum is 0.
        top_k_U: int64, 0 keeps all.
        top_p_U: float64, 1 keeps all.
        vocab: which tokens the W columns are.
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
    """Which of this rank's sorted tokens to keep, if each row has a top-k of at most `bound`."""
    width = sorted_UQW.shape[-1]
    num_own = min(bound, width)
    parts_RUQC = vocab.parts(sorted_UQW[..., :num_own].double())
    # Concatenated in rank order, ties are in id order, and the stable sort keeps that.
    sorted_UQX, order_UQX = parts_RUQC.movedim(0, -2).flatten(-2).sort(dim=-1, descending=True, stable=True)
    keep_UQX = kept(sorted_UQX, top_k_U, top_p_U, vocab.vocab_size)
    keep_UQX = torch.zeros_like(keep_UQX).scatter(-1, order_UQX, keep_UQX)
    first = vocab.rank * num_own
    return functional.pad(keep_UQX[..., first : first + num_own], (0, width - num_own))


class _CutRows:
    """Rows that ranks share: this rank's columns of each, sorted, likeliest first."""

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
        """Which of this rank's tokens to keep, bool [U, Q, W], in sorted order."""
        keep_NW = torch.ones_like(self._key_NW, dtype=torch.bool)
        if self._limits.has_top_k:
            keep_NW = self._before(torch.ones_like(self._key_NW), self._needed_tokens)
        if self._limits.has_top_p:
            mass_NW = masses(self._sorted_NW, self._vocab.vocab_size).masked_fill(~keep_NW, 0)
            keep_NW = keep_NW & self._before(mass_NW, self._needed_mass)
        return keep_NW.view(self._shape)

    def _needed_tokens(self, total_N1: torch.Tensor) -> torch.Tensor:
        """Number of tokens that must precede a dropped one; inf if all are kept."""
        return torch.where(self._top_k_N1 > 0, self._top_k_N1.double(), torch.inf)

    def _needed_mass(self, total_N1: torch.Tensor) -> torch.Tensor:
        """Share of the total mass that must precede a dropped token; inf if all are kept."""
        return torch.where(self._top_p_N1 < 1.0, self._top_p_N1 * total_N1.double(), torch.inf)

    def _before(self, weight_NW: torch.Tensor, needed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Whether the tokens of all ranks that precede each token weigh less than needed: bool [N, W].

        Args:
            weight_NW: int64, not negative.
            needed: maps the weight of a whole row, int64 [N, 1], to the positive weight needed, float64 [N, 1].
        """
        reached_NW = weight_NW.cumsum(dim=-1)
        reached_NX = functional.pad(reached_NW, (1, 0))  # by the first 0 ... W tokens
        # The border is the first key at which enough weight is reached; at keys below `low` it is not.
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
        # Tokens equal to the border at lower ranks have lower ids.
        rank = self._vocab.rank
        before_own_N1 = below_RN1.sum(dim=0) + (at_RN1 - below_RN1)[:rank].sum(dim=0) - below_RN1[rank]
        lies_before_NW = before_own_N1 + reached_NW - weight_NW
        assert need_N1 is not None
        return (self._key_NW < low_N1) | ((self._key_NW == low_N1) & (lies_before_NW.double() < need_N1))


def order_keys(x: torch.Tensor) -> torch.Tensor:
    """Integers that increase as `x` decreases, int64, equal for equal `x`, within the bits of its dtype."""
    x = x + 0.0  # -0.0 becomes 0.0
    if x.dtype == torch.float64:
        bits, others = x.view(torch.int64), (1 << 63) - 1
    else:
        assert x.dtype == torch.float32
        bits, others = x.view(torch.int32).to(torch.int64), (1 << 31) - 1
    return ~torch.where(bits < 0, bits ^ others, bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What a batch requests beyond greedy sampling. What no sequence requests is None, and costs nothing.

    Attributes:
        index_S: int64, place of each sampled sequence in the batch, in order; greedy ones are absent, so no draw can
            affect them.
        temperature_S: float64, positive.
        top_k_S: int64, 0 keeps all.
        top_p_S: float64.
        seed_S: int64.
        choice_S: int64.
        truncated_U: int64, places in S of those with top-k or top-p.
        limits: what the host knows about these.
        min_p_S: float64, 0 keeps all.
        edits: logit edits of sequences, greedy or not; applied first.
        logprobs: the sequences that report log-probabilities.
    """

    index_S: torch.Tensor
    temperature_S: torch.Tensor
    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    seed_S: torch.Tensor
    choice_S: torch.Tensor
    truncated_U: torch.Tensor | None
    limits: Limits = Limits()
    min_p_S: torch.Tensor | None = None
    edits: LogitEdits | None = None
    logprobs: LogprobRows | None = None

    @property
    def num_sampled(self) -> int:
        """Number of sampled sequences, S."""
        return self.index_S.shape[0]


def sampling_rows(
    params: Sequence[SamplingParams],
    device: torch.device,
    *,
    choices: Sequence[int] | None = None,
    edits: LogitEdits | None = None,
) -> SamplingRows | None:
    """Rows for a batch whose parameters are on the host; None if all of it is greedy and plain.

    Args:
        params: of each sequence; their edits are ignored.
        device: of the tensors.
        choices: which of its request's answers each sequence is; 0 if omitted.
        edits: of the batch.
    """
    sampled = [(row, item) for row, item in enumerate(params) if not item.greedy]
    reporting = [row for row, item in enumerate(params) if item.logprobs is not None]
    if not sampled and not reporting and edits is None:
        return None
    temperatures = [max(item.temperature, MIN_TEMPERATURE) for _, item in sampled]
    floats = [temperatures, [item.top_p for _, item in sampled], [item.min_p for _, item in sampled]]
    floats_3S = to_device(torch.tensor(floats, dtype=torch.float64), device)
    cut = [place for place, (_, item) in enumerate(sampled) if truncates(item)]
    numbers = [[row, item.top_k, item.seed, choices[row] if choices else 0] for row, item in sampled]
    packed = [number for column in zip(*numbers, strict=True) for number in column] + cut + reporting
    sizes = [len(sampled)] * 4 + [len(cut), len(reporting)]
    ints = to_device(torch.tensor(packed, dtype=torch.int64), device).split(sizes)
    index_S, top_k_S, seed_S, choice_S, cut_U, index_L = ints
    num_top = max((params[row].logprobs or 0 for row in reporting), default=0)
    return SamplingRows(
        index_S=index_S,
        temperature_S=floats_3S[0],
        top_k_S=top_k_S,
        top_p_S=floats_3S[1],
        seed_S=seed_S,
        choice_S=choice_S,
        truncated_U=cut_U if cut else None,
        limits=Limits.of(item for _, item in sampled),
        min_p_S=floats_3S[2] if any(item.min_p > 0.0 for _, item in sampled) else None,
        edits=edits,
        logprobs=LogprobRows(index_L, num_top) if reporting else None,
    )


def draw_noise(
    sampling: SamplingRows | None,
    position_B: torch.Tensor,
    num_positions: int,
    vocab_size: int,
    dtype: torch.dtype,
    vocab: Vocab = WHOLE,
) -> torch.Tensor | None:
    """Gumbel noise [S, num_positions, V] for the positions from each sequence's `position_B` on.

    `vocab_size` is V, the columns of logits; `vocab` says which tokens they are.
    """
    if sampling is None or sampling.num_sampled == 0:
        return None
    offsets = torch.arange(num_positions, device=position_B.device)
    position_SP = position_B[sampling.index_S][:, None] + offsets
    noise_NV = gumbel(
        sampling.seed_S.repeat_interleave(num_positions),
        sampling.choice_S.repeat_interleave(num_positions),
        position_SP.flatten(),
        Purpose.SAMPLE,
        vocab_size,
        dtype,
        vocab.first,
    )
    return noise_NV.view(-1, num_positions, vocab_size)


def wide(logits: torch.Tensor) -> torch.Tensor:
    """Logits in a dtype to compute with: narrow dtypes become float32, which holds them exactly."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def looks_ahead(sampling: SamplingRows | None) -> bool:
    """Whether `choose` needs the tokens ahead of the sampling table; if not, they need not be gathered."""
    return sampling is not None and sampling.edits is not None


def edit_logits(
    logits_BQV: torch.Tensor, sampling: SamplingRows, ahead: HistoryLookahead | torch.Tensor | None = None
) -> torch.Tensor:
    """Logits after masks, bias and penalties, for greedy and sampled sequences alike; see `choose`."""
    if sampling.edits is None:
        return logits_BQV
    if isinstance(ahead, torch.Tensor):
        ahead = HistoryLookahead.of_drafts(ahead)
    return sampling.edits.apply(logits_BQV, ahead)


def process_logits(
    logits_SQV: torch.Tensor,
    sampling: SamplingRows,
    best_SQ1: torch.Tensor | None = None,
    vocab: Vocab = WHOLE,
) -> torch.Tensor:
    """Logits after temperature, min-p, top-k and top-p; dropped tokens are -inf, and at least one token is left.

    Takes the rows of sampled sequences, after `edit_logits`, and, if known, the largest logit of each.
    """
    if best_SQ1 is None:
        best_SQ1 = vocab.amax(logits_SQV)
    # The maximum becomes 0, so that no temperature overflows it, and min-p is a bound that holds for every row.
    scaled_SQV = (logits_SQV - best_SQ1) / sampling.temperature_S.to(logits_SQV.dtype)[:, None, None]
    if sampling.min_p_S is not None:
        bound_S = sampling.min_p_S.log().to(logits_SQV.dtype)
        scaled_SQV = scaled_SQV.masked_fill(scaled_SQV < bound_S[:, None, None], -torch.inf)
    cut_U = sampling.truncated_U
    if cut_U is None:
        return scaled_SQV
    top_k_U, top_p_U = sampling.top_k_S[cut_U], sampling.top_p_S[cut_U]
    kept_UQV = truncate(scaled_SQV[cut_U], top_k_U, top_p_U, vocab, sampling.limits)
    return scaled_SQV.index_copy(0, cut_U, kept_UQV)


def choose(
    logits_BQV: torch.Tensor,
    sampling: SamplingRows | None,
    noise_SQV: torch.Tensor | None,
    ahead: HistoryLookahead | torch.Tensor | None = None,
    vocab: Vocab = WHOLE,
) -> torch.Tensor:
    """The token of every row, int64 [B, Q]; ties go to the lowest id (as torch.argmax promises).

    Args:
        logits_BQV: raw.
        sampling: None if all sequences are greedy and plain.
        noise_SQV: from `draw_noise`; None without a sampled sequence.
        ahead: tokens between those the sampling table has counted and each row: drafts int64 [B, K], where row j
            follows the first j, or any lookahead; None if the only row follows what was counted.
        vocab: which tokens V are.
    """
    if sampling is None:
        return vocab.argmax(logits_BQV)
    logits_BQV = edit_logits(logits_BQV, sampling, ahead)
    if sampling.num_sampled == 0:
        return vocab.argmax(logits_BQV)
    assert noise_SQV is not None
    best_BQ1, ids_BQ = vocab.best(logits_BQV)
    index_S = sampling.index_S
    scores_SQV = process_logits(logits_BQV[index_S], sampling, best_BQ1[index_S], vocab) + noise_SQV
    return ids_BQ.index_copy(0, index_S, vocab.argmax(scores_SQV))


def sample(
    logits_BV: torch.Tensor,
    sampling: SamplingRows | None,
    position_B: torch.Tensor,
    ahead: HistoryLookahead | None = None,
    vocab: Vocab = WHOLE,
) -> torch.Tensor:
    """The token of one position of each sequence, int64 [B]; `position_B` is that token's position."""
    noise_SQV = draw_noise(sampling, position_B, 1, logits_BV.shape[-1], logits_BV.dtype, vocab)
    return choose(logits_BV[:, None], sampling, noise_SQV, ahead, vocab)[:, 0]
