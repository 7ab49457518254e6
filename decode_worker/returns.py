"""How preempted sequences leave the slots of a decode worker, and how they come back.

Those whose KV was saved run again as soon as they have blocks; the others are computed again first, between steps. All
of them go before anybody who has not started. Prompts that are computed here from the beginning take the same way from
their slot on.
"""

import bisect
from collections.abc import Sequence

from baton.core.request import AttemptKey
from baton.decode_worker.recompute import Recompute, start_of
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequence import DecodeSequence
from baton.engine.decode import DecodeRunner
from baton.engine.gang import LeadDecode
from baton.engine.preemption import Preemption, table_of
from baton.engine.prefill import SequenceStart
from baton.engine.step_pipeline import StepPipeline


class Returns:
    """Of one worker; its loop calls the methods in this order, before it launches.

    Args:
        scheduler: who is where.
        preemption: who gives way.
        steps: in flight.
        runner: that has the sequences in its slots.
        recompute: where KV may be dropped.
        preempt_at: preempt every sequence once at each of these output lengths, or when steps have passed it.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        preemption: Preemption[DecodeSequence],
        steps: StepPipeline[DecodeSequence],
        runner: DecodeRunner | LeadDecode,
        recompute: Recompute | None,
        preempt_at: Sequence[int],
    ) -> None:
        self._scheduler = scheduler
        self._preemption = preemption
        self._steps = steps
        self._runner = runner
        self._recompute = recompute
        self._preempt_at = sorted(preempt_at)

    @property
    def is_working(self) -> bool:
        """Whether something is on its way that nobody wakes the loop for."""
        return self._steps.is_leaving or bool(self._scheduler.computing())

    def preempt(self) -> list[AttemptKey]:
        """Take the blocks of those that give way and that no step has any more; attempts that left their landing."""
        self._steps.settle()
        for sequence in self._scheduler.running() if self._preempt_at else ():
            num_due = bisect.bisect_right(self._preempt_at, sequence.num_output)
            if num_due > sequence.num_scripted:
                sequence.num_scripted = num_due
                self._preemption.request(sequence)
        self._preemption.preempt_due()
        return self._scheduler.dropped()

    def start(self) -> None:
        """Give slots and blocks to those that were preempted, as far as there are any."""
        while (sequence := self._scheduler.next_return()) is not None:
            if sequence.saved is None:
                self._preemption.started_again(sequence)
            else:
                self._run(sequence, start_of(sequence))
                self._preemption.load(sequence, sequence.slot)

    def compute(self) -> bool:
        """Compute a chunk, if there is anything and no step is in flight; False: launch none, so that it will."""
        computing = self._scheduler.computing()
        if not computing:
            return True
        if not self._steps.is_empty:
            return False
        assert self._recompute is not None
        self._runner.drain()  # copies of KV, too
        self._runner.meter.interrupt()
        self._steps.disturb()
        for sequence, start in self._recompute.step(computing, holds_up=bool(self._scheduler.running())):
            if not sequence.token_ids:
                sequence.token_ids.append(start.first_token)
            self._run(sequence, start)
        return True

    def _run(self, sequence: DecodeSequence, start: SequenceStart) -> None:
        self._scheduler.run(sequence)
        admit(self._runner, sequence, start)


def admit(runner: DecodeRunner | LeadDecode, sequence: DecodeSequence, start: SequenceStart) -> None:
    """Put a sequence, with the tokens that it has by now, into its slot."""
    request, output_len = sequence.request, sequence.num_output - 1
    runner.admit(
        sequence.slot,
        start,
        prompt_len=start.prompt_len,
        sampling=request.sampling,
        table=table_of(sequence),
        draft_cap=request.num_draft_tokens,
        prompt_token_ids=(*request.prompt_token_ids, *sequence.token_ids[:output_len]),
        output_len=request.num_forced + output_len,
        choice=request.choice,
    )
    sequence.start = None  # from here on it moves
