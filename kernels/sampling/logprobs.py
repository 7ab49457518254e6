"""Log-probabilities of sampled tokens and of the likeliest tokens, from raw logits, without sorting.

There are two launches. First, chunks of rows compute their sums of exponentials, their likeliest tokens, and how many
logits are larger than the sampled token's. Then one program per row combines them. Only reported numbers leave the
device, packed as in `engine.sampling.logprobs`: all ids and ranks are exact in float64.

Legend: N rows, V vocabulary, K likeliest tokens, X = 2 (K + 1) + 1 numbers: log-probabilities, ids, rank; the sampled
token's first.
"""

from typing import Final

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.sampling.rows import INTS, LOGITS

MAX_TOP: Final = 32


def logprobs_topk(
    logits_NV: torch.Tensor,
    token_ids_N: torch.Tensor,
    num_top: int,
    *,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Return packed [N, X], float64; equals are ordered by id, lower first; rank = 1 + number of larger logits.

    Log-probabilities are always finite: at least float32's lowest number. For a row with NaN they are meaningless, but
    ids are valid tokens there, too.

    Args:
        logits_NV: bfloat16 or float32, raw.
        token_ids_N: int32 or int64, sampled tokens.
        num_top: K, at most `MAX_TOP`; more than V count as V.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    require_tensor("logits_NV", logits_NV, (None, None), LOGITS)
    require_rows("logits_NV", logits_NV)
    num_rows, vocab_size = logits_NV.shape
    require(0 < vocab_size < 1 << 30, "logits_NV", "has no token, or 2^30 and more")
    require_tensor("token_ids_N", token_ids_N, (num_rows,), INTS, logits_NV.device)
    require(num_rows <= 1 or token_ids_N.stride(0) == 1, "token_ids_N", "must be contiguous")
    require(0 <= num_top <= MAX_TOP, "num_top", f"is {num_top}, not 0 to {MAX_TOP}")
    num_top = min(num_top, vocab_size)
    if not uses_triton(logits_NV.device, implementation):
        return logprobs_reference(logits_NV, token_ids_N, num_top)
    packed_NX = torch.empty(num_rows, 2 * (num_top + 1) + 1, dtype=torch.float64, device=logits_NV.device)
    if num_rows:
        from baton.kernels.sampling.logprobs_triton import launch

        launch(logits_NV, token_ids_N, num_top, packed_NX)
    return packed_NX


def logprobs_reference(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int) -> torch.Tensor:
    """Compute it in torch, also for float64, where log-probabilities are at least float64's lowest number."""
    if logits_NV.dtype.itemsize < 4:
        logits_NV = logits_NV.float()
    lse_N1 = logits_NV.double().logsumexp(dim=1, keepdim=True)
    token_N1 = token_ids_N.long()[:, None]
    value_N1 = logits_NV.gather(1, token_N1)
    rank_N1 = 1 + (logits_NV > value_N1).sum(dim=1, keepdim=True)
    ids_NX = torch.cat([token_N1, top_ids(logits_NV, num_top)], dim=1)
    logprobs_NX = finite_logprobs(logits_NV.gather(1, ids_NX).double() - lse_N1, logits_NV.dtype)
    return torch.cat([logprobs_NX, ids_NX.double(), rank_N1.double()], dim=1)


def finite_logprobs(logprobs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Replace NaN and anything below the lowest number of `dtype` by that number."""
    lowest = torch.finfo(dtype).min
    return logprobs.nan_to_num(nan=lowest, neginf=lowest).clamp(min=lowest)


def top_ids(logits_NV: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the likeliest K ids, int64 [N, K], by logit and then by id, lower first.

    It does not sort V numbers. torch.topk does not define which of equal numbers it takes, so those at the border are
    found by id.
    """
    if num_top == 0:
        return torch.zeros(len(logits_NV), 0, dtype=torch.int64, device=logits_NV.device)
    values_NK, ids_NK = logits_NV.topk(num_top, dim=-1)
    border_N1 = values_NK[:, -1:]
    vocab_size = logits_NV.shape[1]
    token_V = torch.arange(vocab_size, device=logits_NV.device)
    at_border_NV = torch.where(logits_NV == border_N1, vocab_size - token_V, 0)
    border_ids_NK = vocab_size - at_border_NV.topk(num_top, dim=-1).values  # V if there are fewer
    # Ids above the border, which topk certainly found, then ids at the border; of these the first K in order.
    ids_N2K = torch.cat([ids_NK.masked_fill(values_NK <= border_N1, vocab_size), border_ids_NK], dim=1).sort().values
    known_N2K = logits_NV.gather(1, ids_N2K.clamp(max=vocab_size - 1)).masked_fill(ids_N2K == vocab_size, -torch.inf)
    # A token of logit -inf at the border ties with empty places, which have higher ids.
    order_N2K = known_N2K.sort(dim=-1, descending=True, stable=True).indices
    return ids_N2K.gather(1, order_N2K)[:, :num_top]
