"""What requests do to the model's logits before anything is chosen: masks, then bias, then penalties.

Greedy and sampled sequences alike. Only sequences that ask for something are touched, each row with its own history:
what the tables have counted, and the tokens ahead of that (drafts before the row). Each kind of edit has a table by
slot, made when the first sequence asks for it; which sequences take part in a step is decided on the host, everything
else stays on the device.

Legend: B sequences, Q rows, R sequences with any edit, P of those with one kind of it, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.bad_words import BadWordsTable
from baton.engine.sampling.history import Lookahead, SampledSequence
from baton.engine.sampling.logit_bias import BiasTable
from baton.engine.sampling.penalties import PenaltyTable
from baton.engine.sampling.token_masks import AllowedTable, MinTokensTable
from baton.kernels.copies import to_device
from baton.model.vocab import WHOLE, Vocab


class Edit(Protocol):
    """One kind of edit, of P sequences."""

    def apply(self, logits_PQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """The edited logits; `ahead` is None where one row follows what the table knows."""
        ...


class EditTable(Protocol):
    """One kind of edit, by slot."""

    def is_for(self, params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        ...

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Begin a slot anew."""
        ...

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> Edit:
        """The edits of some slots; `params` are theirs, on the host, and decide only how wide they are."""
        ...

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Add what a step emitted; slots that the table is not for may be among them."""
        ...


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of a batch.

    Attributes:
        index_R: int64, places in the batch of the sequences with any.
        parts: (int64 places in R, edit) in the order in which they apply.
    """

    index_R: torch.Tensor
    parts: tuple[tuple[torch.Tensor, Edit], ...]

    def apply(self, logits_BQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """The batch's logits, edited in a copy."""
        return logits_BQV.index_copy(0, self.index_R, self.edited(logits_BQV[self.index_R], ahead))

    def edited(self, rows_RQV: torch.Tensor, ahead: Lookahead | None) -> torch.Tensor:
        """The logits of the sequences with any edit, edited; `ahead` is the batch's."""
        ahead_R = None if ahead is None else ahead.pick(self.index_R)
        for place_P, edit in self.parts:
            ahead_P = None if ahead_R is None else ahead_R.pick(place_P)
            rows_RQV = rows_RQV.index_copy(0, place_P, edit.apply(rows_RQV[place_P], ahead_P))
        return rows_RQV


class LogitEditTables:
    """Every kind of edit, by slot. All but `place`, `release` and the choice of rows happens on the device.

    Args:
        num_slots: slots are 0 ... num_slots - 1.
        vocab_size: V.
        device: of all tensors.
        eos_token_ids: what ends a sequence beside a request's own stop tokens.
        vocab: which of the tokens this process has logits of.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Sequence[int],
        vocab: Vocab = WHOLE,
    ) -> None:
        self._device = device
        # In the order in which they apply. A table is made when it is first needed.
        self._makers: tuple[Callable[[], EditTable], ...] = (
            lambda: AllowedTable(num_slots, vocab_size, device, vocab),
            lambda: MinTokensTable(num_slots, eos_token_ids, device, vocab),
            lambda: BadWordsTable(num_slots, device, vocab),
            lambda: BiasTable(num_slots, device, vocab),
            lambda: PenaltyTable(num_slots, vocab_size, device, vocab),
        )
        self._tables: list[EditTable | None] = [None] * len(self._makers)
        self._users: list[set[int]] = [set() for _ in self._makers]

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """A sequence begins in a slot, which nobody uses."""
        self.release(slot)
        needs = _kinds(sequence.params)
        for kind, make in enumerate(self._makers):
            if not needs[kind]:
                continue
            table = self._tables[kind] = self._tables[kind] or make()
            if table.is_for(sequence.params):
                table.place(slot, sequence)
                self._users[kind].add(slot)

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        for users in self._users:
            users.discard(slot)

    def rows(self, slots: Sequence[int], params: Sequence[SamplingParams]) -> LogitEdits | None:
        """The edits of a batch; None if no sequence of it has any."""
        if not any(self._users):
            return None
        chosen = [row for row, slot in enumerate(slots) if any(slot in users for users in self._users)]
        if not chosen:
            return None
        places = [[at for at, row in enumerate(chosen) if slots[row] in users] for users in self._users]
        numbers = list(chosen)
        for kind_places in places:
            numbers += [*kind_places, *(slots[chosen[at]] for at in kind_places)]
        sizes = [len(chosen), *(len(kind_places) for kind_places in places for _ in range(2))]
        index_R, *packed = to_device(torch.tensor(numbers, dtype=torch.int64), self._device).split(sizes)
        parts = []
        for kind, (table, kind_places) in enumerate(zip(self._tables, places, strict=True)):
            if kind_places:
                assert table is not None
                edit = table.rows(packed[2 * kind + 1], [params[chosen[at]] for at in kind_places])
                parts.append((packed[2 * kind], edit))
        return LogitEdits(index_R, tuple(parts))

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Count what a step emitted: the first `num_emitted_B` tokens of each line."""
        for table, users in zip(self._tables, self._users, strict=True):
            if users:
                assert table is not None
                table.advance(slots_B, token_ids_BQ, num_emitted_B)


def edits_logits(params: SamplingParams) -> bool:
    """Whether a request may edit logits at all."""
    return any(_kinds(params))


def _kinds(params: SamplingParams) -> tuple[bool, ...]:
    """Which tables a request may need, in their order; a plain request makes none of them."""
    return (
        AllowedTable.is_for(params),
        params.min_tokens > 0,
        BadWordsTable.is_for(params),
        BiasTable.is_for(params),
        PenaltyTable.is_for(params),
    )
