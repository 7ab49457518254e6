"""How far decode steps run ahead of the host: which are launched, which are read, and who may go.

With synchronous scheduling a step is read before the next is planned. With asynchronous scheduling the next is planned
and launched first, by what is certain without the result, and results are read one step late. So a step may run a
sequence that turns out to have ended: its rows are for the owner to drop, and what it holds is given back only when
the last step that runs it is over. How many drafts a step makes is decided when it is launched, by what was read
before. One thread uses a pipeline. It knows no queue, no request and no tensor.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from baton.core.config import SchedulingName
from baton.engine.speculation import PlannedStep, Speculation
from baton.engine.step_ticket import Emitted, StepTicket

S = TypeVar("S")
Row = tuple[S, Emitted]


class Runner(Protocol):
    """What a pipeline needs of `DecodeRunner`."""

    def unfinished(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Those that may need another step."""
        ...

    def launch(self, slots: Sequence[int]) -> StepTicket:
        """Set off a step."""
        ...

    def draft_caps(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Drafts that each may use."""
        ...

    def set_num_drafts(self, num_drafts: int) -> None:
        """From the next step on make at most so many."""
        ...

    def release(self, slot: int) -> StepTicket | None:
        """Forget a sequence; the step that still has it."""
        ...

    def drain(self) -> None:
        """Wait until no step is running."""
        ...


class StepPipeline(Generic[S]):
    """The steps of one runner.

    Args:
        runner: that computes them.
        scheduling: `async` keeps one step in flight, `sync` none.
        speculation: how many drafts each step makes.
    """

    def __init__(self, runner: Runner, scheduling: SchedulingName, speculation: Speculation) -> None:
        self._runner = runner
        self._speculation = speculation
        self._num_ahead = 1 if scheduling == "async" else 0
        self._in_flight: deque[tuple[StepTicket, Sequence[S], PlannedStep]] = deque()
        self._leaving: list[tuple[StepTicket, Callable[[], None]]] = []

    @property
    def is_empty(self) -> bool:
        """Whether every step was read."""
        return not self._in_flight

    def launch(self, slots: Sequence[int], sequences: Sequence[S]) -> bool:
        """Set off a step of `sequences`, each in its slot, but for those that can only be finished. False if of none.

        Raises:
            Exception: what setting it off raised.
        """
        going = self._runner.unfinished(slots)
        if len(going) < len(slots):
            kept = set(going)
            sequences = [item for slot, item in zip(slots, sequences, strict=True) if slot in kept]
        if not going:
            return False
        planned = self._speculation.plan(self._runner.draft_caps(going))
        self._runner.set_num_drafts(planned.num_drafts)
        self._in_flight.append((self._runner.launch(going), sequences, planned))
        return True

    def collect(self, *, has_launched: bool) -> Iterator[Row[S]]:
        """The rows of the step that is due, waiting for it: the oldest, once another runs behind it or none follows.

        Raises:
            Exception: what the step raised.
        """
        if len(self._in_flight) > (self._num_ahead if has_launched else 0):
            yield from self._read()
        if not has_launched and not self._in_flight:
            self._speculation.pause()

    def retire(self, slot: int, give_back: Callable[[], None]) -> None:
        """Run this slot's sequence no more; `give_back` is called when no step runs it: now, or by `collect`."""
        ticket = self._runner.release(slot)
        if ticket is None:
            give_back()
        else:
            self._leaving.append((ticket, give_back))

    def drain(self) -> Iterator[Row[S]]:
        """The rows of every step that was launched; then nothing is held any more.

        Raises:
            Exception: what a step raised.
        """
        while self._in_flight:
            yield from self._read()
        self._speculation.pause()

    def _read(self) -> Iterator[Row[S]]:
        ticket, sequences, planned = self._in_flight.popleft()
        output = ticket.result()
        self._speculation.read(planned, output.proposed_lens, output.accepted_lens)
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for last, give_back in leaving:
                if last.is_done:
                    give_back()
                else:
                    self._leaving.append((last, give_back))
        yield from zip(sequences, output.rows(), strict=True)
