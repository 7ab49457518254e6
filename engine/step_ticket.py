"""One launched decode step: whether it is over, and what came of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import torch

from baton.core.errors import BatonError
from baton.core.logprobs import TokenLogprobs
from baton.engine.host_future import HostFuture
from baton.engine.logprobs import unpack_step
from baton.engine.step_counters import IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """The tokens of one step, on the host, in the order of the slots that were run.

    Attributes:
        token_ids: emitted tokens of each sequence, accepted_len + 1 of them.
        accepted_lens: drafts accepted; -1 where nothing was emitted.
        proposed_lens: drafts that could have been.
        logprobs: of each sequence's emitted tokens, None where it reports none; None if no sequence does.
        errors: what ended a sequence, by its place; its tokens of this step are none.
    """

    token_ids: tuple[tuple[int, ...], ...]
    accepted_lens: tuple[int, ...]
    proposed_lens: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] | None = None
    errors: Mapping[int, BatonError] = field(default_factory=dict[int, BatonError])

    def rows(self) -> Iterator["Emitted"]:
        """What each sequence emitted, in order."""
        logprobs = self.logprobs or (None,) * len(self.token_ids)
        errors = [self.errors.get(row) for row in range(len(self.token_ids))] if self.errors else repeat(None)
        return map(Emitted, self.token_ids, self.accepted_lens, self.proposed_lens, logprobs, errors)


class Emitted(NamedTuple):
    """What one step made of one sequence; see `DecodeOutput`."""

    token_ids: tuple[int, ...]
    accepted_len: int
    proposed_len: int
    logprobs: tuple[TokenLogprobs, ...] | None
    error: BatonError | None

    @property
    def is_idle(self) -> bool:
        """Whether the step made nothing of it, because its grammar was late."""
        return self.accepted_len < 0


class StepTicket:
    """A step that `DecodeRunner.launch` has set off.

    Args:
        slots: what it runs.
        proposed_lens: drafts each sequence may accept.
        future: int64 [B * C]: of each sequence its accepted length or `IDLE`, emitted tokens, and columns that
            nobody reads; behind them the bits of `logprobs.step_logprobs`, if any sequence reports some.
        on_read: told, once, the accepted lengths (`IDLE` where nothing was emitted); the buffer of the future is
            free after it.
        num_columns: C.
        num_tops: likeliest tokens that each sequence reports, None where it reports nothing.
        errors: asked once, when the step is over, for `DecodeOutput.errors`.
    """

    def __init__(
        self,
        slots: tuple[int, ...],
        proposed_lens: tuple[int, ...],
        future: HostFuture | None,
        on_read: Callable[[tuple[int, ...]], None] | None,
        num_columns: int = 1,
        num_tops: tuple[int | None, ...] = (),
        errors: Callable[[], Mapping[int, BatonError]] = dict,
    ) -> None:
        self.slots = slots
        self._proposed_lens = proposed_lens
        self._future = future
        self._on_read = on_read
        self._num_columns = num_columns
        self._num_tops = num_tops
        self._errors = errors
        self._output: DecodeOutput | None = None

    @property
    def is_done(self) -> bool:
        """Whether the step is over, so that `result` does not wait and nothing of it reads or writes KV any more."""
        return self._future is None or self._future.is_done

    @property
    def is_read(self) -> bool:
        """Whether `result` has been called."""
        return self._output is not None

    def result(self) -> DecodeOutput:
        """What the step made; waits for it, if need be. May be called again.

        Raises:
            Exception: what the step, or one before it, raised. Nothing can be decoded from these slots any more.
        """
        if self._output is None:
            rows: list[list[int]] = []
            logprobs = None
            if self._future is not None:
                values = self._future.get()
                num_decided = len(self.slots) * self._num_columns
                rows = values[:num_decided].view(-1, self._num_columns).tolist()
                if len(values) > num_decided:
                    num_emitted = [0 if row[0] == IDLE else row[0] + 1 for row in rows]
                    reports = values[num_decided:].view(torch.float64)
                    logprobs = unpack_step(reports, self._num_columns - 2, self._num_tops, num_emitted)
            accepted_lens = tuple([row[0] for row in rows])
            if IDLE in accepted_lens:
                for row in rows:
                    row[0] = -1 if row[0] == IDLE else row[0]
            self._output = DecodeOutput(
                token_ids=tuple([tuple(row[1 : row[0] + 2]) for row in rows]),
                accepted_lens=tuple([row[0] for row in rows]),
                proposed_lens=self._proposed_lens,
                logprobs=logprobs,
                errors=self._errors(),
            )
            if self._on_read is not None:
                self._on_read(accepted_lens)
            self._future = self._on_read = None
        return self._output
