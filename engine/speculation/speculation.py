"""Decides how a worker's steps draft: the method and k that an operator set, or that measurements recommend.

`set_mode` may be called from any thread while the loop runs; it takes effect in the next step. Only what is decided by
measurement is measured: learning from a step costs the host 30 to 110 us, which a fixed k does not have to pay.

A step's time is the time between its result and the previous one, while steps follow each other. That is what a step
costs, whether the device or the host is the bottleneck, and with steps in flight it is the only time that can be
observed. The first step after a pause is measured from its launch. Results arrive in launch order; each `PlannedStep`
records what its step was.

If the tokens of a seed depend on the drafts (rejection sampling), a request whose client gave the seed *keeps* the
method and k that it began with. Other sequences of its batch may have as many drafts, since their rows are computed
anyway. Nothing is learned about methods from such a step, and it is no trial, unless it drafts as the step would have
anyway.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.clock import Clock
from baton.core.draft_method import DraftMethod
from baton.core.errors import InvalidRequest
from baton.engine.speculation.spec_control import SpeculationControl

UNKNOWN_S = 0.0  # the controller ignores this time


class Kept(NamedTuple):
    """How one sequence drafts in all its steps."""

    method: DraftMethod
    num_drafts: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step whose result is not read yet.

    Attributes:
        num_drafts: its k.
        can_draft: whether any of its sequences may ever use drafts; if not, the step skips the MTP head.
        start_s: when it was launched.
        method: draft method for sequences that do not keep one; None: no drafts.
        arm: the controller's arm.
        keeps: whether some sequence keeps a method of its own.
        teaches: whether the step drafts as its arm says, so that it can be learned from.
    """

    num_drafts: int
    can_draft: bool
    start_s: float
    method: DraftMethod | None = None
    arm: int = 0
    keeps: bool = False
    teaches: bool = True


class Speculation:
    """Decides method and k of the steps of one runner.

    Args:
        limit: the most drafts its steps can make.
        num_drafts: k, at most `limit`; None: chosen by measurement. With `chooses_method`, the largest k.
        clock: clock for step times.
        methods: methods that the runner has.
        chooses_method: the method, if any, is chosen by measurement; otherwise there is only one.
        keeps: whether the tokens of a seed depend on the drafts.
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
            ),  # the lookup must prove its worth first
        )
        self._clock = clock
        self._fixed = num_drafts
        self._last = 0 if num_drafts is None or chooses_method else num_drafts
        self._last_method: DraftMethod | None = None
        self._last_size = 1
        self._draft_caps: Sequence[int] = ()
        self._num_capable: tuple[int, ...] = ()  # number of these sequences that may use draft j
        self._read_s: float | None = None  # time of the previous result, unless a pause followed it
        self._is_disturbed = False

    @property
    def is_auto(self) -> bool:
        """Whether measurements decide k."""
        return self._fixed is None

    @property
    def chooses_method(self) -> bool:
        """Whether measurements decide the method."""
        return self._chooses_method

    @property
    def num_drafts(self) -> int:
        """The k that was set or, if measurements decide, that of the last step."""
        fixed = self._fixed
        return self._last if fixed is None or self._chooses_method else fixed

    @property
    def method(self) -> DraftMethod | None:
        """The method or, if measurements decide, that of the last step; None: no drafts."""
        if self._chooses_method:
            return self._last_method
        return self._methods[0] if self.num_drafts else None

    def set_mode(self, num_drafts: int | None) -> None:
        """Use this k, or None for what measurements recommend, from the next step on.

        If measurements decide the method, k is an upper bound: a few drafts of another method show cheaply whether it
        is better, while trying it with all k drafts might not be affordable.

        Raises:
            InvalidRequest: k exceeds the limit.
        """
        if num_drafts is not None and not 0 <= num_drafts <= self.limit:
            message = f"{num_drafts} draft tokens: this deployment was started with at most {self.limit}"
            raise InvalidRequest(message, field="num_draft_tokens", value=num_drafts, limit=self.limit)
        self._fixed = num_drafts

    def keep(self, draft_cap: int) -> Kept | None:
        """The method and k that a new sequence keeps; None if it need not keep any."""
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
        """Plan how the next step drafts, just before its launch.

        Args:
            draft_caps: how many drafts each of its sequences may use; at least one sequence.
            kept: per sequence, how it drafts if it keeps that; empty if none does.
            has_chunks: whether the step may have prefill chunks, too. Then its time says nothing about drafts, so it is
                no trial, which would only lengthen the gap that all streams wait for. A rare one shows acceptance.
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
        """Learn from the result of a step, which has just arrived.

        Args:
            step: what `plan` returned for it.
            proposed_lens: drafts that each sequence could accept.
            accepted_lens: drafts that it accepted.
        """
        now_s = self._clock.now_s()
        step_s = UNKNOWN_S if self._is_disturbed else now_s - (step.start_s if self._read_s is None else self._read_s)
        self._read_s = now_s
        self._is_disturbed = False
        if not step.can_draft or self.limit == 0:
            return  # a step without the MTP head says nothing about k = 0 with it
        if not step.teaches or (self._fixed is not None and not self._chooses_method):
            return  # a fixed k has nothing to learn
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
        """Note that no step is in flight and none follows at once: the time until the next one is not a step time."""
        self._read_s = None
        self._is_disturbed = False

    def disturb(self) -> None:
        """Note that the device did other work since the last result, so the next step time says nothing."""
        self._is_disturbed = True
