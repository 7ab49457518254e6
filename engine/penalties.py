"""Repetition, presence and frequency penalty over a prompt, the output so far, and drafts before each row.

Repetition: Keskar et al., "CTRL" (2019), with the sign rule of its implementations. Counts live on the device, by slot:
int32 [N, V] for the output and bool [N, V] for the prompt, made when the first sequence asks for a penalty.

Legend: N slots, B sequences of a step, P sequences with a penalty, Q rows, E tokens ahead, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.sampling import SamplingParams
from baton.engine.history import Lookahead, SampledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Those of some sequences.

    Attributes:
        values_P3: float64, repetition, presence and frequency penalty.
        counts_PV: int32, how often each token was generated.
        in_prompt_PV: bool.
    """

    values_P3: torch.Tensor
    counts_PV: torch.Tensor
    in_prompt_PV: torch.Tensor

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits with the penalties of each row's own history."""
        values_P3 = self.values_P3.to(logits_PQV.dtype)
        penalized_PQV = _penalized(logits_PQV, self.counts_PV[:, None], self.in_prompt_PV[:, None], values_P3)
        if ahead is None or ahead.token_ids_BE.shape[1] == 0:
            return penalized_PQV
        # Only the tokens ahead have other counts, so only their few logits are computed again.
        num_rows = logits_PQV.shape[1]
        tokens_PE = ahead.token_ids_BE
        tokens_PQE = tokens_PE[:, None].expand(-1, num_rows, -1)
        place_E = torch.arange(tokens_PE.shape[1], device=tokens_PE.device)
        is_before_PQE = place_E < ahead.len_BQ[..., None]
        is_same_PEE = tokens_PE[:, :, None] == tokens_PE[:, None]
        ahead_PQE = (is_same_PEE[:, None] & is_before_PQE[:, :, None]).sum(dim=-1)
        counts_PQE = self.counts_PV.gather(1, tokens_PE)[:, None] + ahead_PQE
        in_prompt_PQE = self.in_prompt_PV.gather(1, tokens_PE)[:, None].expand_as(counts_PQE)
        # A token that comes only after a row gets the value it has there already; one that is there twice, the same.
        again_PQE = _penalized(logits_PQV.gather(2, tokens_PQE), counts_PQE, in_prompt_PQE, values_P3)
        return penalized_PQV.scatter(2, tokens_PQE, again_PQE)


def _penalized(
    logits_PQX: torch.Tensor, counts_PQX: torch.Tensor, in_prompt_PQX: torch.Tensor, values_P3: torch.Tensor
) -> torch.Tensor:
    repetition_P, presence_P, frequency_P = (value_P[:, None, None] for value_P in values_P3.unbind(1))
    is_output_PQX = counts_PQX > 0
    scaled_PQX = torch.where(logits_PQX > 0, logits_PQX / repetition_P, logits_PQX * repetition_P)
    logits_PQX = torch.where(is_output_PQX | in_prompt_PQX, scaled_PQX, logits_PQX)
    logits_PQX = logits_PQX - frequency_P * counts_PQX.to(logits_PQX.dtype)
    return logits_PQX - presence_P * is_output_PQX.to(logits_PQX.dtype)


class PenaltyTable:
    """Counts and penalties by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._values_N3 = torch.zeros(num_slots, 3, dtype=torch.float64, device=device)
        self._counts_NV = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt_NV = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return params.penalizes

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        params = sequence.params
        values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._values_N3[slot] = torch.tensor(values, dtype=torch.float64)
        counts_V, in_prompt_V = self._counts_NV[slot].zero_(), self._in_prompt_NV[slot].fill_(False)
        if sequence.output_token_ids:
            output_T = torch.tensor(sequence.output_token_ids).to(counts_V.device)
            counts_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))
        if params.repetition_penalty != 1.0:
            assert sequence.prompt_token_ids, "a repetition penalty needs the prompt"
            in_prompt_V[torch.tensor(sequence.prompt_token_ids).to(counts_V.device)] = True

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> Penalties:
        """Those of some slots."""
        return Penalties(
            values_P3=self._values_N3[slots_P],
            counts_PV=self._counts_NV[slots_P],
            in_prompt_PV=self._in_prompt_NV[slots_P],
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Count what a step emitted; slots without a penalty may be among them."""
        place_Q = torch.arange(token_ids_BQ.shape[1], device=token_ids_BQ.device)
        is_emitted_BQ = (place_Q < num_emitted_B[:, None]).to(torch.int32)
        slots_BQ = slots_B[:, None].expand_as(token_ids_BQ)
        self._counts_NV.index_put_((slots_BQ, token_ids_BQ), is_emitted_BQ, accumulate=True)
