"""Numbers that a request adds to the logits of some tokens.

Legend: N slots, P sequences with a bias, Q rows, W biased tokens of the widest, V vocabulary (of it
those this process has).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.sampling import MAX_LOGIT_BIASES, SamplingParams
from baton.engine.sampling.history import Lookahead, SampledSequence
from baton.kernels.copies import to_device
from baton.model.vocab import WHOLE, Vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """That of some sequences; unused places add 0 to token 0.

    Attributes:
        ids_PW: int64.
        values_PW: float64.
    """

    ids_PW: torch.Tensor
    values_PW: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """Logits with the bias added."""
        _, num_rows, vocab_size = logits_PQV.shape
        values_PQW = self.values_PW.to(logits_PQV.dtype)[:, None].expand(-1, num_rows, -1)
        columns_PQW = self.vocab.columns(self.ids_PW)[:, None].expand(-1, num_rows, -1)
        return self.vocab.add_spare(logits_PQV).scatter_add(2, columns_PQW, values_PQW)[..., :vocab_size]


class BiasTable:
    """Biases by slot."""

    def __init__(self, num_slots: int, device: torch.device, vocab: Vocab = WHOLE) -> None:
        self._vocab = vocab
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
        self._ids_NW[slot] = to_device(torch.tensor(ids), self._ids_NW.device)
        self._values_NW[slot] = to_device(torch.tensor(values, dtype=torch.float64), self._values_NW.device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> LogitBias:
        """Those of some slots."""
        width = max(len(item.logit_bias) for item in params)
        ids_PW, values_PW = self._ids_NW[:, :width][slots_P], self._values_NW[:, :width][slots_P]
        return LogitBias(ids_PW=ids_PW, values_PW=values_PW, vocab=self._vocab)

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """A bias does not depend on the output."""
