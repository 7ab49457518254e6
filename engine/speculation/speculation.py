"""How many drafts a worker's steps make: as an operator said, or as `auto` measures.

`set_mode` may be called from any thread while the loop runs; the next step follows it. Only `auto` measures: learning
from a step costs 30 to 110 us of the host, which a k that was set need not pay.

A step's time is the time between its result and the one before it, while steps follow each other: that is what a step
costs, whether the device or the host sets the pace, and with steps in flight it is the only time that can be seen. The
first step after a pause is measured from its launch. Results come in the order of the launches; each `PlannedStep`
remembers what its step was.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest
from baton.engine.speculation.spec_control import SpeculationControl

UNKNOWN_S = 0.0  # a time that the controller takes for none


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step whose result is not read yet.

    Attributes:
        num_drafts: its k.
        can_draft: whether any of its sequences may ever use drafts; else it leaves the MTP head alone.
        start_s: when it was launched.
    """

    num_drafts: int
    can_draft: bool
    start_s: float


class Speculation:
    """k of the steps of one runner.

    Args:
        limit: the most drafts its steps can make.
        num_drafts: k, at most `limit`; None chooses by measurement.
        clock: what steps are timed with.
    """

    def __init__(self, limit: int, num_drafts: int | None, clock: Clock) -> None:
        assert num_drafts is None or 0 <= num_drafts <= limit
        self.limit = limit
        self._control = SpeculationControl(limit)
        self._clock = clock
        self._fixed = num_drafts
        self._last = 0 if num_drafts is None else num_drafts
        self._draft_caps: Sequence[int] = ()
        self._num_capable: tuple[int, ...] = ()  # of the sequences with these caps, those that may use draft j
        self._read_s: float | None = None  # the result before, if no pause followed it
        self._is_disturbed = False

    @property
    def is_auto(self) -> bool:
        """Whether measurements decide."""
        return self._fixed is None

    @property
    def num_drafts(self) -> int:
        """The k that was set; with `auto`, of the last step."""
        fixed = self._fixed
        return self._last if fixed is None else fixed

    def set_mode(self, num_drafts: int | None) -> None:
        """Use this k, or with None what measurements advise, from the next step on.

        Raises:
            InvalidRequest: it is more than the limit.
        """
        if num_drafts is not None and not 0 <= num_drafts <= self.limit:
            message = f"{num_drafts} draft tokens: this deployment was started with at most {self.limit}"
            raise InvalidRequest(message, field="num_draft_tokens", value=num_drafts, limit=self.limit)
        self._fixed = num_drafts

    def plan(self, draft_caps: Sequence[int]) -> PlannedStep:
        """The next step, about to be launched, of sequences that may use so many drafts each; at least one of them."""
        if draft_caps is not self._draft_caps:
            self._draft_caps = draft_caps
            counts = Counter(draft_caps)
            self._num_capable = tuple(
                sum(count for cap, count in counts.items() if cap > place) for place in range(max(draft_caps))
            )
        largest_cap, fixed = len(self._num_capable), self._fixed
        if fixed is None:
            fixed = self._last = self._control.choose(len(draft_caps), self._num_capable) if largest_cap else 0
        return PlannedStep(min(fixed, largest_cap), largest_cap > 0, self._clock.now_s())

    def read(self, step: PlannedStep, proposed_lens: Sequence[int], accepted_lens: Sequence[int]) -> None:
        """Learn from the result of a step, which has just come in.

        Args:
            step: what `plan` said of it.
            proposed_lens: drafts that each sequence could accept.
            accepted_lens: those that it did.
        """
        now_s = self._clock.now_s()
        step_s = UNKNOWN_S if self._is_disturbed else now_s - (step.start_s if self._read_s is None else self._read_s)
        self._read_s = now_s
        self._is_disturbed = False
        if not step.can_draft or self.limit == 0:
            return  # a step that leaves the MTP head alone says nothing of one with k = 0 that does not
        if self._fixed is not None:
            return  # a k that was set costs nothing to keep
        tested, accepted = [0] * step.num_drafts, [0] * step.num_drafts
        for (proposed_len, accepted_len), count in Counter(zip(proposed_lens, accepted_lens, strict=True)).items():
            for place in range(min(proposed_len, accepted_len + 1)):
                tested[place] += count
                accepted[place] += count if place < accepted_len else 0
        self._control.observe(
            batch_size=len(accepted_lens),
            num_drafts=step.num_drafts,
            step_s=step_s,
            tested=tested,
            accepted=accepted,
        )

    def pause(self) -> None:
        """No step is under way, and none follows at once: the time until the next one is no step's."""
        self._read_s = None
        self._is_disturbed = False

    def disturb(self) -> None:
        """The device has done something else beside steps since the last result; the next one's time says nothing."""
        self._is_disturbed = True
