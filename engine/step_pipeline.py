"""How far decode steps run ahead of the host: which are launched, which are read, and who may go.

With synchronous scheduling a step is read before the next is planned. With asynchronous scheduling the next is planned
and launched first, by what is certain without the result, and results are read one step late. So a step may run a
sequence that turns out to have ended: its rows are for the owner to drop, and what it holds is given back only when
the last step that runs it is over. A sequence that must leave without losing a token is no longer launched, and let go
once no step in flight `has` it. How many drafts a step makes is decided when it is launched, by what was read before.
One thread uses a pipeline. It knows no queue, no request and no tensor.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from baton.core.config import SchedulingName
from baton.engine.speculation import PlannedStep, Speculation
from baton.engine.step_ticket import Emitted, StepTicket

S = TypeVar("S")
Row = tuple[S, Emitted]
MakeRoom = Callable[[list[tuple[S, int]]], Collection[S]]


class Ending(Protocol):
    """Something that is under way; `StepTicket` and `HostFuture` are such."""

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        ...


class Runner(Protocol):
    """What a pipeline needs of `DecodeRunner`."""

    def unfinished(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Those that may need another step."""
        ...

    def short_of_room(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Those whose block tables are too short for another step, and positions that they need."""
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
        self._leaving: list[tuple[Ending, Callable[[], None]]] = []
        self._filling: dict[int, Ending] = {}  # by slot

    @property
    def is_empty(self) -> bool:
        """Whether every step was read."""
        return not self._in_flight

    @property
    def is_leaving(self) -> bool:
        """Whether something waits to be given back."""
        return bool(self._leaving)

    def has(self, sequence: S) -> bool:
        """Whether a step that was not read runs this sequence."""
        return any(item is sequence for _, sequences, _ in self._in_flight for item in sequences)

    def launch(self, slots: Sequence[int], sequences: Sequence[S], make_room: MakeRoom[S]) -> bool:
        """Set off a step of `sequences`, each in its slot, but for those that can only be finished. False if of none.

        Args:
            slots: where they are.
            sequences: that may take part.
            make_room: asked if some have too few blocks, by (sequence, positions that it needs): it lets them grow, and
                says which of all sequences do not take part.

        Raises:
            Exception: what setting it off raised.
        """
        going = self._runner.unfinished(slots)
        if len(going) < len(slots):
            sequences = _those(going, slots, sequences)
        short = self._runner.short_of_room(going) if going else []
        if short:
            by_slot = dict(zip(going, sequences, strict=True))
            out = make_room([(by_slot[slot], wanted_len) for slot, wanted_len in short])
            if out:
                kept = tuple(slot for slot in going if by_slot[slot] not in out)
                going, sequences = kept, _those(kept, going, sequences)
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
        filled = self.filled(slot)
        last = self._runner.release(slot) or filled  # a step that has it comes after what filled its blocks
        if last is None:
            give_back()
        else:
            self._leaving.append((last, give_back))

    def fill(self, slot: int, ending: Ending) -> None:
        """Something other than a step writes the blocks of this slot's sequence: before its next step."""
        self._filling[slot] = ending

    def filled(self, slot: int) -> Ending | None:
        """What still writes the blocks of a sequence that leaves its slot; asked once."""
        ending = self._filling.pop(slot, None)
        return None if ending is None or ending.is_done else ending

    def disturb(self) -> None:
        """The device does something else beside steps: the time of the step in flight says nothing of its k."""
        self._speculation.disturb()

    def give_back_after(self, ending: Ending, give_back: Callable[[], None]) -> None:
        """`give_back` is called by `settle`, or by `collect`, when something other than a step is over."""
        self._leaving.append((ending, give_back))

    def settle(self) -> None:
        """Give back what is over by now, without waiting."""
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for last, give_back in leaving:
                if last.is_done:
                    give_back()
                else:
                    self._leaving.append((last, give_back))

    def drain(self) -> Iterator[Row[S]]:
        """The rows of every step that was launched; then nothing is held any more.

        Raises:
            Exception: what a step raised.
        """
        while self._in_flight:
            yield from self._read()
        if self._leaving:
            self._runner.drain()
            self.settle()
        self._speculation.pause()

    def _read(self) -> Iterator[Row[S]]:
        ticket, sequences, planned = self._in_flight.popleft()
        output = ticket.result()
        self.settle()
        self._speculation.read(planned, output.proposed_lens, output.accepted_lens)
        yield from zip(sequences, output.rows(), strict=True)


def _those(kept: Sequence[int], slots: Sequence[int], sequences: Sequence[S]) -> Sequence[S]:
    """The sequences in the slots `kept`, in the same order."""
    wanted = set(kept)
    return [item for slot, item in zip(slots, sequences, strict=True) if slot in wanted]
