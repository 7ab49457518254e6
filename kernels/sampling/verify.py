"""Which drafts of a batch stand, and the token after them: sequences of any law side by side, in at most four launches.

The laws, and what is drawn from what, are those of `engine.speculation.verify`, `engine.speculation.rejection` and
`engine.speculation.synthetic`: a draft
matches the target's own choice (its likeliest token, or its draw by Gumbel noise), or is judged by chance (Leviathan et
al., 2023; as a block: Sun et al., 2024), or stands because a benchmark wants it so. Launches: the scan; bounds of
top-k, top-p and min-p if any sequence may have them; sums of what drafts leave over if any were drawn from
probabilities; the decision. Nothing waits for the device, and how many launches there are is known on the host.

A token is the same whatever the batch, its place in it, and the number of drafts. What a GPU chooses can differ from
the reference's choice only where its logarithm of a float64, rounded to float32, does, or where a sum of float32
exponentials falls on the other side of a border (some 1e-7 of it).

Legend: B sequences, K drafts, Q = K + 1 rows, R = B Q rows, V vocabulary, N rows of draft probabilities, C columns of
the draft head, E edited rows.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.sampling.choice import ChoiceRows, EditedRows, require_logits
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.verify_reference import verify_reference


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step emits.

    Attributes:
        token_ids_BQ: int64, 0 past `accepted_len_B`.
        accepted_len_B: int64, drafts that stand; one token more is emitted.
    """

    token_ids_BQ: torch.Tensor
    accepted_len_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class NextStep:
    """Where a step leaves its sequences.

    Attributes:
        last_token_B: int64, the newest token.
        length_B: int64, tokens of the sequence.
        last_row_B: int64, of R: the row whose hidden state the last token was chosen from.
    """

    last_token_B: torch.Tensor
    length_B: torch.Tensor
    last_row_B: torch.Tensor


def verify(
    logits_BQV: torch.Tensor,
    rows: ChoiceRows,
    drafts: DraftRows,
    *,
    edited: EditedRows | None = None,
    counts_Q: torch.Tensor | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> Verdict:
    """Decide which drafts stand, and the token after them; see the module.

    Args:
        logits_BQV: bfloat16 or float32; row q follows the first q drafts. Rows past a sequence's last usable draft may
            hold anything.
        rows: how each sequence draws.
        drafts: what is judged.
        edited: rows whose logits are others.
        counts_Q: int64, to which this step's sequences are added by accepted length; idle ones are not.
        implementation: which form computes.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    require_logits(logits_BQV)
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    device = logits_BQV.device
    rows.require_fits(num_sequences, device)
    drafts.require_fits(num_sequences, num_rows, vocab_size, device)
    if edited is not None:
        edited.require_fits(num_sequences * num_rows, vocab_size, device)
    if counts_Q is not None:
        require_tensor("counts_Q", counts_Q, (num_rows,), (torch.int64,), device)
        require(counts_Q.is_contiguous(), "counts_Q", "must be contiguous")
    if not uses_triton(device, implementation):
        return Verdict(*verify_reference(logits_BQV, rows, drafts, edited, counts_Q))
    token_ids_BQ = torch.empty(num_sequences, num_rows, dtype=torch.int64, device=device)
    accepted_len_B = torch.empty(num_sequences, dtype=torch.int64, device=device)
    if num_sequences:
        from baton.kernels.sampling.verify_triton import launch

        launch(logits_BQV, rows, drafts, edited, counts_Q, token_ids_BQ, accepted_len_B)
    return Verdict(token_ids_BQ, accepted_len_B)


def post_verify(
    verdict: Verdict, length_B: torch.Tensor, *, implementation: Implementation = Implementation.AUTO
) -> NextStep:
    """The next step's inputs, in one launch.

    Args:
        verdict: of the step.
        length_B: int64, before it.
        implementation: which form computes.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    token_ids_BQ, accepted_len_B = verdict.token_ids_BQ, verdict.accepted_len_B
    device = token_ids_BQ.device
    require_tensor("token_ids_BQ", token_ids_BQ, (None, None), (torch.int64,))
    num_sequences, num_rows = token_ids_BQ.shape
    require(num_rows > 0, "token_ids_BQ", "has no row")
    require(token_ids_BQ.is_contiguous(), "token_ids_BQ", "must be contiguous")
    for name, tensor in (("accepted_len_B", accepted_len_B), ("length_B", length_B)):
        require_tensor(name, tensor, (num_sequences,), (torch.int64,), device)
        require(tensor.is_contiguous(), name, "must be contiguous")
    if not uses_triton(device, implementation):
        row_B = torch.arange(num_sequences, device=device) * num_rows + accepted_len_B
        return NextStep(token_ids_BQ.flatten()[row_B], length_B + accepted_len_B + 1, row_B)
    results = [torch.empty(num_sequences, dtype=torch.int64, device=device) for _ in range(3)]
    if num_sequences:
        from baton.kernels.sampling.verify_triton import launch_after

        launch_after(token_ids_BQ, accepted_len_B, length_B, results)
    return NextStep(*results)
