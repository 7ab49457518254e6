"""Applies requests' edits to the model's logits before sampling: masks, then bias, then penalties.

Edits apply to greedy and sampled sequences alike. Only sequences that request an edit are touched, each row with its
own history: what the tables have counted, and the tokens ahead of that (drafts before the row). Each kind of edit has a
table by slot, allocated when the first sequence needs it. The host decides which sequences take part in a step;
everything else stays on the device.

Legend: B sequences, Q rows, R sequences with any edit, P of those with one kind of it, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.core.requests.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from baton.engine.sampling.history import HistoryLookahead, SampledSequence
from baton.kernels.copies import to_device
from baton.model.vocab import WHOLE, Vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """Logit biases of some sequences; unused places add 0 to token 0.

    Attributes:
        ids_PW: int64.
        values_PW: float64.
    """

    ids_PW: torch.Tensor
    values_PW: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
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
        """Initialize a slot for a new sequence."""
        padding = [(0, 0.0)] * (MAX_LOGIT_BIASES - len(sequence.params.logit_bias))
        ids, values = zip(*sequence.params.logit_bias, *padding, strict=True)
        self._ids_NW[slot] = to_device(torch.tensor(ids), self._ids_NW.device)
        self._values_NW[slot] = to_device(torch.tensor(values, dtype=torch.float64), self._values_NW.device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> LogitBias:
        """The biases of some slots."""
        width = max(len(item.logit_bias) for item in params)
        ids_PW, values_PW = self._ids_NW[:, :width][slots_P], self._values_NW[:, :width][slots_P]
        return LogitBias(ids_PW=ids_PW, values_PW=values_PW, vocab=self._vocab)

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Do nothing: a bias does not depend on the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of some sequences.

    Attributes:
        values_P3: float64, repetition, presence and frequency penalty.
        counts_NX: int32, how often each token was generated, by slot.
        in_prompt_NX: bool, whether each token is in the prompt, by slot.
        slots_P: int64, slots of these sequences.
    """

    values_P3: torch.Tensor
    counts_NX: torch.Tensor
    in_prompt_NX: torch.Tensor
    slots_P: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
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
        # A token that comes only after a row gets the value it already has; a duplicate gets the same value twice.
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
        """Initialize a slot for a new sequence."""
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
        """The penalties of some slots."""
        return Penalties(
            values_P3=self._values_N3[slots_P],
            counts_NX=self._counts_NX,
            in_prompt_NX=self._in_prompt_NX,
            slots_P=slots_P,
            vocab=self._vocab,
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Count the tokens that a step emitted; `slots_B` may include slots without a penalty."""
        place_Q = torch.arange(token_ids_BQ.shape[1], device=token_ids_BQ.device)
        is_emitted_BQ = (place_Q < num_emitted_B[:, None]).to(torch.int32)
        slots_BQ = slots_B[:, None].expand_as(token_ids_BQ)
        self._counts_NX.index_put_((slots_BQ, self._vocab.columns(token_ids_BQ)), is_emitted_BQ, accumulate=True)


def mask(logits_PQV: torch.Tensor, banned_PQV: torch.Tensor, vocab: Vocab = WHOLE) -> torch.Tensor:
    """Logits with banned tokens at -inf, unless that would leave no token."""
    masked_PQV = logits_PQV.masked_fill(banned_PQV, -torch.inf)
    nothing_left_PQ1 = vocab.amax(masked_PQV) == -torch.inf
    return torch.where(nothing_left_PQ1, logits_PQV, masked_PQV)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Allows only the listed tokens, int64 [P, W]; unused places repeat one."""

    ids_PW: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
        """Logits of the listed tokens alone."""
        num_sequences, _, vocab_size = logits_PQV.shape
        width = self.vocab.table_width(vocab_size)
        is_banned_PX = torch.ones(num_sequences, width, dtype=torch.bool, device=logits_PQV.device)
        is_banned_PX.scatter_(1, self.vocab.columns(self.ids_PW), False)
        return mask(logits_PQV, is_banned_PX[:, None, :vocab_size], self.vocab)


class AllowedTable:
    """Allowed tokens by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, vocab: Vocab = WHOLE) -> None:
        width = min(vocab_size, MAX_ALLOWED_TOKEN_IDS)
        self._vocab = vocab
        self._ids_NW = torch.zeros(num_slots, width, dtype=torch.int64, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return params.allowed_token_ids is not None

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Initialize a slot for a new sequence."""
        ids = _distinct(sequence.params)
        padding = [ids[0]] * (self._ids_NW.shape[1] - len(ids))
        self._ids_NW[slot] = to_device(torch.tensor([*ids, *padding]), self._ids_NW.device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> Allowed:
        """The allowed tokens of some slots."""
        width = max(len(_distinct(item)) for item in params)
        return Allowed(self._ids_NW[:, :width][slots_P], self._vocab)

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Do nothing: what is allowed does not depend on the output."""


def _distinct(params: SamplingParams) -> tuple[int, ...]:
    assert params.allowed_token_ids is not None
    return tuple(dict.fromkeys(params.allowed_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsTooEarly:
    """Bans the tokens that would end a sequence before its `min_tokens`.

    Attributes:
        ids_PW: int64, EOS and stop tokens; unused places repeat one, or W is 0.
        num_missing_P: int64, tokens still to come before the sequence may end; 0 or less if it may.
    """

    ids_PW: torch.Tensor
    num_missing_P: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
        """Logits with the ending tokens banned in rows that come too early."""
        num_sequences, num_rows, vocab_size = logits_PQV.shape
        width = self.vocab.table_width(vocab_size)
        ends_PX = torch.zeros(num_sequences, width, dtype=torch.bool, device=logits_PQV.device)
        ends_PX.scatter_(1, self.vocab.columns(self.ids_PW), True)
        missing_PQ = self.num_missing_P[:, None].expand(-1, num_rows)
        if ahead is not None:
            missing_PQ = missing_PQ - ahead.len_BQ
        return mask(logits_PQV, ends_PX[:, None, :vocab_size] & (missing_PQ > 0)[..., None], self.vocab)


class MinTokensTable:
    """Tokens that may end a sequence, and how many tokens must come before, by slot."""

    def __init__(
        self, num_slots: int, eos_token_ids: Sequence[int], device: torch.device, vocab: Vocab = WHOLE
    ) -> None:
        self._vocab = vocab
        self._eos_token_ids = tuple(eos_token_ids)
        width = len(self._eos_token_ids) + MAX_STOP_TOKEN_IDS
        self._ids_NW = torch.zeros(num_slots, width, dtype=torch.int64, device=device)
        self._num_missing_N = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def is_for(self, params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return params.min_tokens > 0 and bool(self._ids_of(params))

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Initialize a slot for a new sequence."""
        ids = self._ids_of(sequence.params)
        padding = [ids[0]] * (self._ids_NW.shape[1] - len(ids))
        self._ids_NW[slot] = to_device(torch.tensor([*ids, *padding]), self._ids_NW.device)
        self._num_missing_N[slot] = sequence.params.min_tokens - len(sequence.output_token_ids)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> EndsTooEarly:
        """The `EndsTooEarly` edits of some slots."""
        width = max(len(self._ids_of(item)) for item in params)
        return EndsTooEarly(
            ids_PW=self._ids_NW[:, :width][slots_P], num_missing_P=self._num_missing_N[slots_P], vocab=self._vocab
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Subtract the number of tokens that a step emitted."""
        self._num_missing_N[slots_B] -= num_emitted_B

    def _ids_of(self, params: SamplingParams) -> tuple[int, ...]:
        return (*self._eos_token_ids, *params.stop_token_ids)


_ANY, _NEVER, _NOTHING = -1, -2, -3  # in a prefix: any token, no token; in an output: before its first token
_PREFIX_LEN = MAX_BAD_WORD_LEN - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """Bad words of some sequences.

    Attributes:
        prefix_PWT: int64, all tokens of a word but the last, right-aligned in T.
        last_PW: int64, the last token of each word.
        tail_PT: int64, the last tokens of the output.
    """

    prefix_PWT: torch.Tensor
    last_PW: torch.Tensor
    tail_PT: torch.Tensor
    vocab: Vocab = WHOLE

    def apply(self, logits_PQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
        """Logits with the last token of each word banned, if its prefix precedes the row."""
        num_sequences, num_rows, vocab_size = logits_PQV.shape
        tail_PQT = self.tail_PT[:, None].expand(-1, num_rows, -1)
        if ahead is not None:
            tail_PQT = _ends(torch.cat([self.tail_PT, ahead.token_ids_BE], dim=1), ahead.len_BQ, tail_PQT.shape[2])
        prefix_P1WT = self.prefix_PWT[:, None]
        completes_PQW = ((tail_PQT[:, :, None] == prefix_P1WT) | (prefix_P1WT == _ANY)).all(dim=-1)
        last_PQW = self.vocab.columns(self.last_PW)[:, None].expand(-1, num_rows, -1)
        # Two words may share their last token, and with a plain scatter the incomplete one could win.
        shape = (num_sequences, num_rows, self.vocab.table_width(vocab_size))
        banned_PQX = torch.zeros(shape, dtype=torch.int32, device=logits_PQV.device)
        banned_PQX.scatter_add_(2, last_PQW, completes_PQW.to(torch.int32))
        return mask(logits_PQV, banned_PQX[..., :vocab_size] > 0, self.vocab)


def _ends(token_ids_PX: torch.Tensor, len_PQ: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[P, Q, num_tokens]: the tokens of each line from `len_PQ` on."""
    place_PQT = len_PQ[..., None] + torch.arange(num_tokens, device=token_ids_PX.device)
    num_rows = len_PQ.shape[1]
    return token_ids_PX[:, None].expand(-1, num_rows, -1).gather(2, place_PQT)


class BadWordsTable:
    """Bad words and the ends of outputs, by slot."""

    def __init__(self, num_slots: int, device: torch.device, vocab: Vocab = WHOLE) -> None:
        self._vocab = vocab
        self._prefix_NWT = torch.full((num_slots, MAX_BAD_WORDS, _PREFIX_LEN), _NEVER, dtype=torch.int64, device=device)
        self._last_NW = torch.zeros(num_slots, MAX_BAD_WORDS, dtype=torch.int64, device=device)
        self._tail_NT = torch.full((num_slots, _PREFIX_LEN), _NOTHING, dtype=torch.int64, device=device)

    @staticmethod
    def is_for(params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        return bool(params.bad_words)

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Initialize a slot for a new sequence."""
        device = self._tail_NT.device
        words = sequence.params.bad_words
        prefixes = [[_ANY] * (MAX_BAD_WORD_LEN - len(word)) + list(word[:-1]) for word in words]
        prefixes += [[_NEVER] * _PREFIX_LEN] * (MAX_BAD_WORDS - len(words))
        last = [word[-1] for word in words] + [0] * (MAX_BAD_WORDS - len(words))
        tail = [*[_NOTHING] * _PREFIX_LEN, *sequence.output_token_ids][-_PREFIX_LEN:]
        self._prefix_NWT[slot] = to_device(torch.tensor(prefixes), device)
        self._last_NW[slot] = to_device(torch.tensor(last), device)
        self._tail_NT[slot] = to_device(torch.tensor(tail), device)

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> BadWords:
        """The bad words of some slots."""
        num_words = max(len(item.bad_words) for item in params)
        longest = max(len(word) for item in params for word in item.bad_words)
        prefix_len = max(longest - 1, 1)  # at least one, so that unused words can be marked as never complete
        first = _PREFIX_LEN - prefix_len
        return BadWords(
            prefix_PWT=self._prefix_NWT[:, :num_words, first:][slots_P],
            last_PW=self._last_NW[:, :num_words][slots_P],
            tail_PT=self._tail_NT[:, first:][slots_P],
            vocab=self._vocab,
        )

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Append the emitted tokens to the ends of outputs; `slots_B` may include slots without bad words."""
        seen_BX = torch.cat([self._tail_NT[slots_B], token_ids_BQ], dim=1)
        self._tail_NT[slots_B] = _ends(seen_BX, num_emitted_B[:, None], _PREFIX_LEN)[:, 0]


class Edit(Protocol):
    """One kind of edit, for P sequences."""

    def apply(self, logits_PQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
        """The edited logits; `ahead` is None if the only row follows what the table has counted."""
        ...


class EditTable(Protocol):
    """One kind of edit, by slot."""

    def is_for(self, params: SamplingParams) -> bool:
        """Whether a request needs this table."""
        ...

    def place(self, slot: int, sequence: SampledSequence) -> None:
        """Initialize a slot for a new sequence."""
        ...

    def rows(self, slots_P: torch.Tensor, params: Sequence[SamplingParams]) -> Edit:
        """The edits of some slots; `params`, theirs on the host, only determine the tensors' widths."""
        ...

    def advance(self, slots_B: torch.Tensor, token_ids_BQ: torch.Tensor, num_emitted_B: torch.Tensor) -> None:
        """Add the tokens that a step emitted; `slots_B` may include slots that do not use this table."""
        ...


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of a batch.

    Attributes:
        index_R: int64, places in the batch of the sequences with any edit.
        parts: (int64 places in R, edit) in the order in which they apply.
    """

    index_R: torch.Tensor
    parts: tuple[tuple[torch.Tensor, Edit], ...]

    def apply(self, logits_BQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
        """The batch's logits, edited in a copy."""
        return logits_BQV.index_copy(0, self.index_R, self.edited(logits_BQV[self.index_R], ahead))

    def edited(self, rows_RQV: torch.Tensor, ahead: HistoryLookahead | None) -> torch.Tensor:
        """The edited logits of the sequences with any edit; `ahead` is the batch's."""
        ahead_R = None if ahead is None else ahead.pick(self.index_R)
        for place_P, edit in self.parts:
            ahead_P = None if ahead_R is None else ahead_R.pick(place_P)
            rows_RQV = rows_RQV.index_copy(0, place_P, edit.apply(rows_RQV[place_P], ahead_P))
        return rows_RQV


class LogitEditTables:
    """All kinds of edits, by slot. Everything but `place`, `release` and the selection of rows runs on the device.

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
        eos_token_ids: Sequence[int],
        vocab: Vocab = WHOLE,
    ) -> None:
        self._device = device
        # In the order in which they apply. A table is allocated when it is first needed.
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
        """Initialize a free slot for a new sequence."""
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
        """Release a slot, whose sequence has ended."""
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
        """Count the tokens that a step emitted: the first `num_emitted_B` of each line."""
        for table, users in zip(self._tables, self._users, strict=True):
            if users:
                assert table is not None
                table.advance(slots_B, token_ids_BQ, num_emitted_B)


def edits_logits(params: SamplingParams) -> bool:
    """Whether a request may edit logits at all."""
    return any(_kinds(params))


def _kinds(params: SamplingParams) -> tuple[bool, ...]:
    """Which tables a request may need, in order; a plain request needs none."""
    return (
        AllowedTable.is_for(params),
        params.min_tokens > 0,
        BadWordsTable.is_for(params),
        BiasTable.is_for(params),
        PenaltyTable.is_for(params),
    )
