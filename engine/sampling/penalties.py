"""Repetition, presence and frequency penalty over a prompt, the output so far, and drafts before each row.

Repetition: Keskar et al., "CTRL" (2019), with the sign rule of its implementations. Counts live on the device, by slot:
int32 [N, X] for the output and bool [N, X] for the prompt, made when the first sequence asks for a penalty.

Legend: N slots, B sequences of a step, P sequences with a penalty, Q rows, E tokens ahead, V vocabulary (of it those
this process has), X = V, or V + 1 with a column for all tokens of other ranks (`model.vocab`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.history import Lookahead, SampledSequence
from baton.kernels.copies import to_device
from baton.model.vocab import WHOLE, Vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Those of some sequences.

    Attributes:
        values_P3: float64, repetition, presence and frequency penalty.
        counts_NX: int32, how often each token was generated, by slot.
        in_prompt_NX: bool, by slot.
        slots_P: int64, of these sequences.
    """

    values_P3: torch.Tensor
    counts_NX: torch.Tensor
    in_prompt_NX: torch.Tensor
    slots_P: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits with the penalties of each row's own history."""
        _, num_rows, vocab_size = logits_PQV.shape
        values_P3 = self.values_P3.to(logits_PQV.dtype)
        logits_PQX = self.vocab.add_spare(logits_PQV)
        counts_PX, in_prompt_PX = self.counts_NX[self.slots_P], self.in_prompt_NX[self.slots_P]
        penalized_PQX = _penalized(logits_PQX, counts_PX[:, None], in_prompt_PX[:, None], values_P3)
        if ahead is None or ahead.token_ids_BE.shape[1] == 0:
            return penalized_PQX[..., :vocab_size]
        # Only the tokens ahead have other counts, so only their few logits are computed again.
        tokens_PE = ahead.token_ids_BE
        columns_PE = self.vocab.columns(tokens_PE)
        columns_PQE = columns_PE[:, None].expand(-1, num_rows, -1)
        place_E = torch.arange(tokens_PE.shape[1], device=tokens_PE.device)
        is_before_PQE = place_E < ahead.len_BQ[..., None]
        is_same_PEE = tokens_PE[:, :, None] == tokens_PE[:, None]
        ahead_PQE = (is_same_PEE[:, None] & is_before_PQE[:, :, None]).sum(dim=-1)
        counts_PQE = counts_PX.gather(1, columns_PE)[:, None] + ahead_PQE
        in_prompt_PQE = in_prompt_PX.gather(1, columns_PE)[:, None].expand_as(counts_PQE)
        # A token that comes only after a row gets the value it has there already; one that is there twice, the same.
        again_PQE = _penalized(logits_PQX.gather(2, columns_PQE), counts_PQE, in_prompt_PQE, values_P3)
        return penalized_PQX.scatter(2, columns_PQE, again_PQE)[..., :vocab_size]


def _penalized(
    logits_PQX: torch.Tensor, counts_PQX: torch.Tensor, in_prompt_PQX: torch.Tensor, values_P3: torch.Tensor
) -> torch.Tensor:
    repetition_P, presence_p, frequency_P = (value_P[:, None, None] for value_P in values_P3.unbind(1))
    is_output_PQX = counts_PQX > 0
    scaled_PQX = torch.where(logits_PQX > 0, logits_PQX / repetition_P, logits_PQX * repetition_P)
    logits_PQX = torch.where(is_output_PQX | in_prompt_PQX, scaled_PQX, logits_PQX)
    logits_PQX = logits_PQX - frequency_P * counts_PQX.to(logits_PQX.dtype)
    return logits_PQX - presence_p * is_output_PQX.to(logits_PQX.dtype)


class PenaltyTable:
    """Counts and penalties by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, vocab: Vocab = WHOLE) -> None:
        self._vocab = vocab
        width = vocab.table_width(vocab.width(vocab_size))
        self._values_N3 = torch.zeros(num_slots, 3, dtype=torch.float64, device=device)
        self._counts_NX = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
        self._in_prompt_NX = torch.zeros(num_slots, width, dtype=torch.bool, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return params.penalizes

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        params = sequence.params
        values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        counts_X, in_prompt_X = self._counts_NX[slot].zero_(), self._in_prompt_NX[slot].fill_(False)
        self._values_N3[slot] = to_device(torch.tensor(values, dtype=torch.float64), counts_X.device)
        if sequence.output_token_ids:
            output_T = self._vocab.columns(to_device(torch.tensor(sequence.output_token_ids), counts_X.device))
            counts_X.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))
        if params.repetition_penalty != 1.0:
            assert sequence.prompt_token_ids, "a repetition penalty needs the prompt"
            prompt_T = to_device(torch.tensor(sequence.prompt_token_ids), counts_X.device)
            in_prompt_X.index_fill_(0, self._vocab.columns(prompt_T), True)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> Penalties:
        """Those of some slots."""
        return Penalties(
            values_P3=self._values_N3[slots_P],
            counts_NX=self._counts_NX,
            in_prompt_NX=self._in_prompt_NX,
            slots_P=slots_P,
            vocab=self._vocab,
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Count what a step emitted; slots without a penalty may be among them."""
        place_Q = torch.arange(token_ids_BQ.shape[1], device=token_ids_BQ.device)
        is_emitted_BQ = (place_Q < num_emitted_B[:, None]).to(torch.int32)
        slots_BQ = slots_B[:, None].expand_as(token_ids_BQ)
        self._counts_NX.index_put_((slots_BQ, self._vocab.columns(token_ids_BQ)), is_emitted_BQ, accumulate=True)
