"""Where the time to the first and to the second token went: parts that follow one another, and their sums.

Pure arithmetic over readings of several clocks. Each process measures its own parts on its own clock. What lies between
two processes is the difference of two readings where they share a clock; where they do not, the router's last part is
what is left of the whole, so the sum is right and the ways over the network are in that part.
"""

from dataclasses import dataclass, fields

CLOSED = 0.01  # a sum that is further from its whole, relatively, does not close


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTimes:
    """Readings of the router's clock, in seconds.

    Attributes:
        received_s: the request arrived.
        asked_s: the attempt that gave the first token was begun.
        first_s: the first token left.
        second_s: the second one left; None if there is none.
    """

    received_s: float
    asked_s: float
    first_s: float
    second_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """What the prefill worker said with a first token. The two readings are of its clock."""

    received_s: float
    queue_s: float
    incoming_s: float
    prefill_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """What the decode worker said with its first tokens.

    Attributes:
        first_s: the first token was known to the attempt that handed over, on its prefill worker's clock.
        draft_s: from there to the hand-over.
        transfer_s: from there to `landed_s`, by an estimate of the difference of two clocks.
        landed_s: all of the KV and the COMMIT were there, on the decode worker's clock.
        verification_s: from there until it is complete.
        admission_s: to a slot.
        step_s: to the first step's tokens.
    """

    first_s: float
    draft_s: float
    transfer_s: float
    landed_s: float
    verification_s: float
    admission_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Parts of the time to the first token, in seconds, in order."""

    router_s: float
    queue_s: float
    incoming_s: float
    prefill_s: float
    publish_s: float

    @property
    def before_s(self) -> float:
        """Until the first token was known."""
        return self.router_s + self.queue_s + self.incoming_s + self.prefill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondToken:
    """Parts of the time from the first token, where it was made, to the second one where it leaves, in order."""

    retry_s: float
    draft_s: float
    transfer_s: float
    verification_s: float
    admission_s: float
    step_s: float
    publish_s: float


def first_token(router: RouterTimes, prefill: PrefillTimes, *, shared_clock: bool) -> FirstToken:
    """The parts of `router.first_s - router.received_s`."""
    inner_s = prefill.queue_s + prefill.incoming_s + prefill.prefill_s
    if shared_clock:
        router_s, publish_s = prefill.received_s - router.received_s, router.first_s - prefill.first_s
    else:
        router_s = router.asked_s - router.received_s
        publish_s = router.first_s - router.asked_s - inner_s
    return FirstToken(
        router_s=router_s,
        queue_s=prefill.queue_s,
        incoming_s=prefill.incoming_s,
        prefill_s=prefill.prefill_s,
        publish_s=publish_s,
    )


def second_token(
    router: RouterTimes, prefill: PrefillTimes, decode: DecodeTimes, *, shared_clock: bool
) -> SecondToken | None:
    """The parts that `first_token(...).before_s` and these make `router.second_s - router.received_s` of."""
    if router.second_s is None:
        return None
    here_s = decode.verification_s + decode.admission_s + decode.step_s
    if shared_clock:
        retry_s = decode.first_s - prefill.first_s
        transfer_s = decode.landed_s - decode.first_s - decode.draft_s
        publish_s = router.second_s - decode.landed_s - here_s
    else:  # a retry may have been at another worker, with another clock: what it took is in the last part
        retry_s, transfer_s = 0.0, decode.transfer_s
        before_s = first_token(router, prefill, shared_clock=False).before_s
        publish_s = router.second_s - router.received_s - before_s - decode.draft_s - transfer_s - here_s
    return SecondToken(
        retry_s=retry_s,
        draft_s=decode.draft_s,
        transfer_s=transfer_s,
        verification_s=decode.verification_s,
        admission_s=decode.admission_s,
        step_s=decode.step_s,
        publish_s=publish_s,
    )


def parts_of(timing: FirstToken | SecondToken) -> dict[str, float]:
    """The parts by name, in order, in seconds."""
    return {field.name: getattr(timing, field.name) for field in fields(timing)}


def gap(parts: float, whole: float) -> float:
    """How far a sum of parts is from the whole, relative to it."""
    return abs(parts - whole) / whole if whole > 0 else float(parts != whole)
