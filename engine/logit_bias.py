"""Numbers that a request adds to the logits of some tokens.

Legend: N slots, P sequences with a bias, Q rows, W biased tokens of the widest, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.sampling import MAX_LOGIT_BIASES, SamplingParams
from baton.engine.history import Lookahead, SampledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """That of some sequences; unused places add 0 to token 0.

    Attributes:
        ids_PW: int64.
        values_PW: float64.
    """

    ids_PW: torch.Tensor
    values_PW: torch.Tensor

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits with the bias added."""
        num_rows = logits_PQV.shape[1]
        values_PQW = self.values_PW.to(logits_PQV.dtype)[:, None].expand(-1, num_rows, -1)
        return logits_PQV.scatter_add(2, self.ids_PW[:, None].expand(-1, num_rows, -1), values_PQW)


class BiasTable:
    """Biases by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._ids_NW = torch.zeros(num_slots, MAX_LOGIT_BIASES, dtype=torch.int64, device=device)
        self._values_NW = torch.zeros(num_slots, MAX_LOGIT_BIASES, dtype=torch.float64, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return bool(params.logit_bias)

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        padding = [(0, 0.0)] * (MAX_LOGIT_BIASES - len(sequence.params.logit_bias))
        ids, values = zip(*sequence.params.logit_bias, *padding, strict=True)
        self._ids_NW[slot] = torch.tensor(ids).to(self._ids_NW.device)
        self._values_NW[slot] = torch.tensor(values, dtype=torch.float64).to(self._values_NW.device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> LogitBias:
        """Those of some slots."""
        width = max(len(item.logit_bias) for item in params)
        return LogitBias(ids_PW=self._ids_NW[:, :width][slots_P], values_PW=self._values_NW[:, :width][slots_P])

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """A bias does not depend on the output."""
