"""Keeps the sampling state of running sequences on the device, in tensors indexed by slot.

The host decides which sequences of a step sample, truncate, edit logits or report log-probabilities, because it knows
their parameters. Counts and histories stay on the device, so steps can be launched before earlier ones are read.

Legend: N slots, B sequences of a step, S sampled ones, U of those with top-k or top-p, Q rows, E the next even number
after S.
"""

from collections.abc import Sequence

import torch

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.history import SampledSequence
from baton.engine.sampling.logit_edits import LogitEditTables, edits_logits
from baton.engine.sampling.logprobs import LogprobRows
from baton.engine.sampling.sampler import Limits, SamplingRows, sampling_rows, truncates
from baton.engine.speculation.verify import Verified
from baton.kernels.copies import to_device
from baton.kernels.sampling.rows import MIN_TEMPERATURE
from baton.model.vocab import WHOLE, Vocab


class SamplingTable:
    """Sampling state by slot.

    Args:
        num_slots: slots are 0 ... num_slots - 1.
        vocab_size: V.
        device: of all tensors.
        eos_token_ids: tokens that end a sequence besides a request's own stop tokens.
        vocab: which tokens' logits this process has.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        vocab: Vocab = WHOLE,
    ) -> None:
        self._device = device
        self._edits = LogitEditTables(
            num_slots=num_slots, vocab_size=vocab_size, device=device, eos_token_ids=eos_token_ids, vocab=vocab
        )
        # temperature, top-p, min-p; top-k, seed, choice: one write and one gather per kind of number
        self._floats_3N = torch.zeros(3, num_slots, dtype=torch.float64, device=device)
        self._ints_3N = torch.zeros(3, num_slots, dtype=torch.int64, device=device)

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Initialize a free slot for a new sequence."""
        params = sequence.params
        floats = (max(params.temperature, MIN_TEMPERATURE), params.top_p, params.min_p)
        self._floats_3N[:, slot] = to_device(torch.tensor(floats, dtype=torch.float64), self._device)
        self._ints_3N[:, slot] = to_device(torch.tensor((params.top_k, params.seed, sequence.choice)), self._device)
        self._edits.place(slot, sequence)

    def release(self, slot: int) -> None:
        """Release a slot, whose sequence has ended; nothing more is counted for it."""
        self._edits.release(slot)

    def rows(self, slots: Sequence[int], params: Sequence[SamplingParams]) -> SamplingRows | None:
        """The `SamplingRows` of a batch; None if all of it is greedy and plain.

        `params` are the slots' own, on the host, and only determine which rows are read.
        """
        edits = self._edits.rows(slots, params)
        sampled = [row for row, item in enumerate(params) if not item.greedy]
        reporting = [row for row, item in enumerate(params) if item.logprobs is not None]
        if not sampled and not reporting and edits is None:
            return None
        cut = [place for place, row in enumerate(sampled) if truncates(params[row])]
        slots_E = [slots[row] for row in sampled]
        slots_E += slots_E[: len(sampled) % 2]  # so that each row is aligned as kernels expect
        numbers = [*slots_E, *sampled, *cut, *reporting]
        sizes = [len(slots_E), len(sampled), len(cut), len(reporting)]
        slot_E, index_S, cut_U, index_L = to_device(torch.tensor(numbers, dtype=torch.int64), self._device).split(sizes)
        temperature_S, top_p_S, min_p_S = self._floats_3N.index_select(1, slot_E)[:, : len(sampled)].unbind()
        top_k_S, seed_S, choice_S = self._ints_3N.index_select(1, slot_E)[:, : len(sampled)].unbind()
        num_top = max((params[row].logprobs or 0 for row in reporting), default=0)
        return SamplingRows(
            index_S=index_S,
            temperature_S=temperature_S,
            top_k_S=top_k_S,
            top_p_S=top_p_S,
            seed_S=seed_S,
            choice_S=choice_S,
            truncated_U=cut_U if cut else None,
            limits=Limits.of(params[row] for row in sampled),
            min_p_S=min_p_S if any(params[row].min_p > 0.0 for row in sampled) else None,
            edits=edits,
            logprobs=LogprobRows(index_L, num_top) if reporting else None,
        )

    def advance(self, slots_B: torch.Tensor, verified: Verified) -> None:
        """Add the tokens that a step emitted, on the device."""
        self._edits.advance(slots_B, verified.token_ids_BQ, verified.accepted_len_B + 1)


def rows_of(
    sequences: Sequence[SampledSequence],
    vocab_size: int,
    device: torch.device,
    eos_token_ids: Sequence[int] = (),
    vocab: Vocab = WHOLE,
) -> SamplingRows | None:
    """Rows of sequences that are in no table (in prefill); None if all are greedy and plain."""
    params = [sequence.params for sequence in sequences]
    edits = None
    if any(edits_logits(item) for item in params):
        tables = LogitEditTables(
            num_slots=len(sequences), vocab_size=vocab_size, device=device, eos_token_ids=eos_token_ids, vocab=vocab
        )
        for slot, sequence in enumerate(sequences):
            tables.place(slot, sequence)
        edits = tables.rows(range(len(sequences)), params)
    return sampling_rows(params, device, choices=[sequence.choice for sequence in sequences], edits=edits)
