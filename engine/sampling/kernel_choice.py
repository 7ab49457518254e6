"""Batches of the engine as the kernels that choose tokens read them, and one token of each sequence by these kernels.

Where a model's logits are whole rows that kernels read as they are (`Model.choosing`), kernels choose: here first
tokens and drafts, in `engine.speculation.kernel_verifier` what follows drafts. Elsewhere torch does
(`engine.sampling.sampler` and the
verifiers beside it): on CPUs, in float64 and float32, in invariant numerics, and where ranks share the vocabulary. Both
draw the same numbers by the same rules, so tokens do not depend on which of them chooses.

Kernels take one number of each sequence of the batch; a temperature of 0 says that it is greedy.

Legend: B sequences, S sampled sequences, V vocabulary.
"""

from dataclasses import replace

import torch

from baton.engine.sampling.history import Lookahead
from baton.engine.sampling.kernel_edits import edit, edited_by_torch
from baton.engine.sampling.sampler import SamplingRows, sample
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.choice import ChoiceRows, settled
from baton.kernels.sampling.sample import sample as sample_by_kernels
from baton.model.model import Model


def choice_rows(sampling: SamplingRows | None, position_B: torch.Tensor) -> ChoiceRows:
    """How each sequence of a batch draws its tokens.

    Args:
        sampling: the sampled sequences; None if all are greedy.
        position_B: int64, where the first token will stand.
    """
    num_sequences, position_B = len(position_B), settled(position_B)
    if sampling is None or sampling.num_sampled == 0:
        nothing_B = torch.zeros_like(position_B)
        greedy_B = torch.zeros(num_sequences, dtype=torch.float64, device=position_B.device)
        return ChoiceRows(temperature_B=greedy_B, seed_B=nothing_B, choice_B=nothing_B, position_B=position_B)
    index_S = sampling.index_S

    def of_all(number_S: torch.Tensor, of_greedy: float) -> torch.Tensor:
        if len(index_S) == num_sequences:  # they are in order
            return settled(number_S)
        return number_S.new_full((num_sequences,), of_greedy).index_copy_(0, index_S, number_S)

    has_cut, has_min_p = sampling.truncated_U is not None, sampling.min_p_S is not None
    return ChoiceRows(
        temperature_B=of_all(sampling.temperature_S, 0.0),
        seed_B=of_all(sampling.seed_S, 0),
        choice_B=of_all(sampling.choice_S, 0),
        position_B=position_B,
        # Top-k, which costs nothing where it is 0, comes with every cut, and top-p with min-p: so there are fewer
        # kernels to compile.
        top_k_B=of_all(sampling.top_k_S, 0) if has_cut or has_min_p else None,
        top_p_B=of_all(sampling.top_p_S, 1.0) if has_min_p or (has_cut and sampling.limits.has_top_p) else None,
        min_p_B=None if sampling.min_p_S is None else of_all(sampling.min_p_S, 0.0),
    )


def later(rows: ChoiceRows, by: int | torch.Tensor) -> ChoiceRows:
    """The same sequences, so many positions further."""
    return rows if isinstance(by, int) and by == 0 else replace(rows, position_B=rows.position_B + by)


def likeliest(rows: ChoiceRows) -> ChoiceRows:
    """The same sequences as if they were greedy."""
    return ChoiceRows(
        temperature_B=torch.zeros_like(rows.temperature_B),
        seed_B=rows.seed_B,
        choice_B=rows.choice_B,
        position_B=rows.position_B,
    )


def with_every_cut(rows: ChoiceRows) -> ChoiceRows:
    """The same draws, by the kernels that know every cut: edited rows, which are rare, have no others compiled."""
    zero_B, one_B = torch.zeros_like(rows.temperature_B), torch.ones_like(rows.temperature_B)
    return replace(
        rows,
        top_k_B=torch.zeros_like(rows.seed_B) if rows.top_k_B is None else rows.top_k_B,
        top_p_B=one_B if rows.top_p_B is None else rows.top_p_B,
        min_p_B=zero_B if rows.min_p_B is None else rows.min_p_B,
    )


def draw(
    logits_BV: torch.Tensor,
    rows: ChoiceRows,
    sampling: SamplingRows | None,
    ahead: Lookahead | None,
    implementation: Implementation,
) -> torch.Tensor:
    """One token of each sequence, int64 [B].

    Args:
        logits_BV: raw, bfloat16 or float32.
        rows: how each draws it.
        sampling: whose edits come first.
        ahead: as of `sampler.sample`.
        implementation: which form of the kernels.
    """
    edits = None if sampling is None else sampling.edits
    if edits is None:
        edited = None
    elif ahead is None:
        _, edited = edit(logits_BV[:, None], edits, None, rows.position_B.new_empty(len(logits_BV), 0), implementation)
    else:
        edited = edited_by_torch(logits_BV[:, None], edits, ahead)
    if edited is not None:
        rows = with_every_cut(rows)
    return sample_by_kernels(logits_BV, rows, edited=edited, implementation=implementation)


def next_token(
    model: Model,
    logits_BV: torch.Tensor,
    sampling: SamplingRows | None,
    position_B: torch.Tensor,
    ahead: Lookahead | None = None,
) -> torch.Tensor:
    """`sampler.sample`, by whatever chooses the tokens of this model."""
    if model.choosing is None:
        return sample(logits_BV, sampling, position_B, ahead, model.vocab)
    return draw(logits_BV, choice_rows(sampling, position_B), sampling, ahead, model.choosing)
