"""Samples one token per sequence without sorting: temperature, min-p, top-k, top-p, then Gumbel noise.

What remains after each cut, and the order of cuts, are those of `engine.sampling.sampler`: min-p first, then the k
likeliest, of these the smallest set that reaches p; equal tokens in order of ids. The token is a function of the row,
its parameters, seed, choice and position.

There are three launches: the scan, which splits rows among programs; the bounds, left out if nothing is cut
(`bounds_triton` says how they are found); and the decision.

Legend: B sequences, V vocabulary.
"""

import torch

from baton.kernels.arguments import require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.sampling.rows import LOGITS, DrawRows, EditedRows, require_logits
from baton.kernels.sampling.verify import verify_reference


def sample(
    logits_BV: torch.Tensor,
    rows: DrawRows,
    *,
    edited: EditedRows | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Sample the token of each row, int64 [B].

    Args:
        logits_BV: bfloat16 or float32.
        rows: sampling parameters of each row.
        edited: rows whose logits are replaced.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    require_tensor("logits_BV", logits_BV, (None, None), LOGITS)
    logits_B1V = logits_BV[:, None]
    require_logits(logits_B1V, "logits_BV")
    num_sequences, vocab_size = logits_BV.shape
    device = logits_BV.device
    rows.require_fits(num_sequences, device)
    if edited is not None:
        edited.require_fits(num_sequences, vocab_size, device)
    if not uses_triton(device, implementation):
        return verify_reference(logits_B1V, rows, None, edited, None)[0][:, 0]
    token_ids_B1 = torch.empty(num_sequences, 1, dtype=torch.int64, device=device)
    accepted_len_B = torch.empty(num_sequences, dtype=torch.int64, device=device)
    if num_sequences:
        from baton.kernels.sampling.verify_triton import launch

        launch(logits_B1V, rows, None, edited, None, token_ids_B1, accepted_len_B)
    return token_ids_B1[:, 0]
