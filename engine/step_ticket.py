"""One launched decode step: whether it is over, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.host_future import HostFuture


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """The tokens of one step, on the host, in the order of the slots that were run.

    Attributes:
        token_ids: emitted tokens of each sequence, accepted_len + 1 of them.
        accepted_lens: drafts accepted.
        proposed_lens: drafts that could have been.
    """

    token_ids: tuple[tuple[int, ...], ...]
    accepted_lens: tuple[int, ...]
    proposed_lens: tuple[int, ...]


class StepTicket:
    """A step that `DecodeRunner.launch` has set off.

    Args:
        slots: what it runs.
        proposed_lens: drafts each sequence may accept.
        future: int64 [B, 1 + Q + ...]: accepted lengths, emitted tokens, and columns that nobody reads.
        on_read: told, once, the accepted lengths; the buffer of the future is free after it.
    """

    def __init__(
        self,
        slots: tuple[int, ...],
        proposed_lens: tuple[int, ...],
        future: HostFuture | None,
        on_read: Callable[[tuple[int, ...]], None] | None,
    ) -> None:
        self.slots = slots
        self._proposed_lens = proposed_lens
        self._future = future
        self._on_read = on_read
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
            rows = [] if self._future is None else self._future.get().tolist()
            accepted_lens = tuple([row[0] for row in rows])
            self._output = DecodeOutput(
                token_ids=tuple([tuple(row[1 : row[0] + 2]) for row in rows]),
                accepted_lens=accepted_lens,
                proposed_lens=self._proposed_lens,
            )
            if self._on_read is not None:
                self._on_read(accepted_lens)
            self._future = self._on_read = None
        return self._output
