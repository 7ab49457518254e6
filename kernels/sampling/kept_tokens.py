"""Which tokens of a sorted row top-k and top-p keep, in torch; `bounds_triton` finds the same without sorting.

Tokens of a row are sorted, the likelier first and among equals the lower id. A token is kept while what precedes it
falls short: fewer than k tokens, and less than p of the probability that top-k kept.

Probabilities are counted in whole numbers: exp(logit - largest) in units of 2^-b, where b = 62 - ceil(log2 V), so that
V of them never overflow an int64. Sums of whole numbers do not depend on their order, so a row gives the same tokens
however it is cut, sorted or scanned. Rounding moves a sum by at most V / 2 units, which is 2^-27 of the likeliest
token's weight for V = 2^17, and typically 2^-36. The result can differ from exact arithmetic only for tokens whose
border lies that close to p.

Legend: U sequences with top-k or top-p, Q rows of each, V vocabulary.
"""

import torch


def masses(shifted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Compute exp of numbers that are at most 0, as int64, such that `vocab_size` of them add up without overflow."""
    num_bits = 62 - (vocab_size - 1).bit_length()
    return (shifted.double().exp() * 2.0**num_bits).round().to(torch.int64)


def kept(sorted_UQV: torch.Tensor, top_k_U: torch.Tensor, top_p_U: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which sorted tokens are kept, of a whole row or of its likeliest tokens.

    The latter is allowed only if each row has a top-k that is not larger.
    """
    rank_V = torch.arange(sorted_UQV.shape[-1], device=sorted_UQV.device)
    limit_U = torch.where(top_k_U > 0, top_k_U, vocab_size)
    keep_UQV = (rank_V < limit_U[:, None, None]).expand_as(sorted_UQV)
    mass_UQV = masses(sorted_UQV - sorted_UQV[..., :1], vocab_size).masked_fill(~keep_UQV, 0)
    reached_UQV = mass_UQV.cumsum(dim=-1)
    top_p_U11 = top_p_U[:, None, None]
    # A token is kept while what precedes it falls short of p. Nothing precedes the first, which is always kept, also in
    # a row without any mass, whose sums are NaN.
    is_short_UQV = (reached_UQV - mass_UQV).double() < top_p_U11 * reached_UQV[..., -1:].double()
    return keep_UQV & (is_short_UQV | (top_p_U11 >= 1.0) | (rank_V == 0))
