"""How a worker's steps draft: by the method and with the k that an operator said, or that measurements advise.

`set_mode` may be called from any thread while the loop runs; the next step follows it. Only what is left to
measurements measures: learning from a step costs 30 to 110 us of the host, which a k that was set need not pay.

A step's time is the time between its result and the one before it, while steps follow each other: that is what a step
costs, whether the device or the host sets the pace, and with steps in flight it is the only time that can be seen. The
first step after a pause is measured from its launch. Results come in the order of the launches; each `PlannedStep`
remembers what its step was.

Where the tokens of a seed depend on the drafts (rejection), a request whose client gave the seed *keeps* the method and
k that it began with. Others of its batch may have as many drafts as it has, since their rows are computed anyway; what
such a step says of methods is not learnt, and none is tried in it, unless it drafts as all others would.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.clock import Clock
from baton.core.draft_method import DraftMethod
from baton.core.errors import InvalidRequest
from baton.engine.speculation.spec_control import SpeculationControl

UNKNOWN_S = 0.0  # a time that the controller takes for none


class Kept(NamedTuple):
    """How one sequence drafts in all its steps."""

    method: DraftMethod
    num_drafts: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step whose result is not read yet.

    Attributes:
        num_drafts: its k.
        can_draft: whether any of its sequences may ever use drafts; else it leaves the MTP head alone.
        start_s: when it was launched.
        method: what drafts for those that keep none; None: nothing.
        arm: of the controller.
        keeps: whether some sequence keeps a method of its own.
        teaches: whether it is what that arm says.
    """

    num_drafts: int
    can_draft: bool
    start_s: float
    method: DraftMethod | None = None
    arm: int = 0
    keeps: bool = False
    teaches: bool = True


class Speculation:
    """Method and k of the steps of one runner.

    Args:
        limit: the most drafts its steps can make.
        num_drafts: k, at most `limit`; None chooses by measurement. With `chooses_method`, the largest k.
        clock: what steps are timed with.
        methods: that the runner has.
        chooses_method: which of them drafts, if any, is chosen by measurement; else there is one.
        keeps: tokens of a seed depend on the drafts.
    """

    def __init__(
        self,
        limit: int,
        num_drafts: int | None,
        clock: Clock,
        *,
        methods: Sequence[DraftMethod] = (DraftMethod.HEAD,),
        chooses_method: bool = False,
        keeps: bool = False,
    ) -> None:
        assert num_drafts is None or 0 <= num_drafts <= limit
        assert methods and (chooses_method or len(methods) == 1)
        self.limit = limit
        self._methods = tuple(methods)
        self._chooses_method = chooses_method
        self._keeps = keeps
        self._control = SpeculationControl(
            limit,
            num_methods=len(methods),
            chooses_method=chooses_method,
            first_arm=int(
                not chooses_method or methods[0] is DraftMethod.HEAD
            ),  # what is looked up must show its worth
        )
        self._clock = clock
        self._fixed = num_drafts
        self._last = 0 if num_drafts is None or chooses_method else num_drafts
        self._last_method: DraftMethod | None = None
        self._last_size = 1
        self._draft_caps: Sequence[int] = ()
        self._num_capable: tuple[int, ...] = ()  # of the sequences with these caps, those that may use draft j
        self._read_s: float | None = None  # the result before, if no pause followed it
        self._is_disturbed = False

    @property
    def is_auto(self) -> bool:
        """Whether measurements decide k."""
        return self._fixed is None

    @property
    def chooses_method(self) -> bool:
        """Whether measurements decide what drafts."""
        return self._chooses_method

    @property
    def num_drafts(self) -> int:
        """The k that was set; where measurements decide, of the last step."""
        fixed = self._fixed
        return self._last if fixed is None or self._chooses_method else fixed

    @property
    def method(self) -> DraftMethod | None:
        """What drafts; where measurements decide, in the last step. None: nothing does."""
        if self._chooses_method:
            return self._last_method
        return self._methods[0] if self.num_drafts else None

    def set_mode(self, num_drafts: int | None) -> None:
        """Use this k, or with None what measurements advise, from the next step on.

        Where measurements decide what drafts, a k that is set is the largest: a few drafts of another method show at
        little cost whether it is better, where as many as are set would not be affordable.

        Raises:
            InvalidRequest: it is more than the limit.
        """
        if num_drafts is not None and not 0 <= num_drafts <= self.limit:
            message = f"{num_drafts} draft tokens: this deployment was started with at most {self.limit}"
            raise InvalidRequest(message, field="num_draft_tokens", value=num_drafts, limit=self.limit)
        self._fixed = num_drafts

    def keep(self, draft_cap: int) -> Kept | None:
        """How a sequence drafts that keeps what it begins with; None where none need."""
        if not self._keeps or not self.limit:
            return None
        fixed = self._fixed
        if fixed is not None and not self._chooses_method:
            return Kept(self._methods[0], min(fixed, draft_cap))
        control = self._control
        arm = control.in_use(self._last_size)
        num_drafts = min(control.drafts_of(arm), self.limit if fixed is None else fixed)
        return Kept(self._methods[control.method_of(arm)], min(num_drafts, draft_cap))

    def plan(
        self, draft_caps: Sequence[int], kept: Sequence[Kept | None] = (), *, has_chunks: bool = False
    ) -> PlannedStep:
        """The next step, about to be launched.

        Args:
            draft_caps: how many drafts each of its sequences may use, of which there is at least one.
            kept: of each how it drafts, if it keeps that; nothing where none does.
            has_chunks: whether prompts may be computed in it, too. Its time says nothing of drafts then, so it is no
                trial, which would only make the gap that all streams wait for longer.
        """
        if draft_caps is not self._draft_caps:
            self._draft_caps = draft_caps
            counts = Counter(draft_caps)
            self._num_capable = tuple(
                sum(count for cap, count in counts.items() if cap > place) for place in range(max(draft_caps))
            )
        largest_cap, fixed, size = len(self._num_capable), self._fixed, len(draft_caps)
        self._last_size = size
        own = [item for item in kept if item is not None]
        arm, control = 0, self._control
        if fixed is None or self._chooses_method:
            arm = self._arm(size, largest_cap, keeps=bool(own), tries=not has_chunks)
            num_drafts = control.drafts_of(arm)
            method = self._methods[control.method_of(arm)] if num_drafts else None
        else:
            arm = num_drafts = min(fixed, largest_cap)
            method = self._methods[0] if num_drafts else None
        longest = max((item.num_drafts for item in own), default=0)
        teaches = all(item == Kept(method, num_drafts) for item in own) if method else not longest
        if longest > num_drafts:
            num_drafts = longest
            method = method or next(item.method for item in own if item.num_drafts)
        self._last, self._last_method = num_drafts, method
        return PlannedStep(num_drafts, largest_cap > 0, self._clock.now_s(), method, arm, bool(own), teaches)

    def _arm(self, size: int, largest_cap: int, *, keeps: bool, tries: bool) -> int:
        control, fixed = self._control, self._fixed
        if not largest_cap or fixed == 0:
            return 0
        if keeps:
            arm = control.in_use(size)
            return control.arm_of(control.method_of(arm), min(control.drafts_of(arm), largest_cap, fixed or self.limit))
        allowed = None
        if fixed is not None:
            drafts = range(1, min(fixed, largest_cap) + 1)
            allowed = {control.arm_of(method, k) for method in range(len(self._methods)) for k in drafts}
        return control.choose(size, self._num_capable, allowed, tries=tries)

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
        if not step.teaches or (self._fixed is not None and not self._chooses_method):
            return  # a k that was set costs nothing to keep
        tested, accepted = [0] * step.num_drafts, [0] * step.num_drafts
        for (proposed_len, accepted_len), count in Counter(zip(proposed_lens, accepted_lens, strict=True)).items():
            for place in range(min(proposed_len, accepted_len + 1)):
                tested[place] += count
                accepted[place] += count if place < accepted_len else 0
        self._control.observe(
            batch_size=len(accepted_lens),
            num_drafts=step.arm,
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
