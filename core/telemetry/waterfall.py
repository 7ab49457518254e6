"""Breaks the time to the first and second token down into consecutive parts that sum up to it.

Pure arithmetic over several clocks. Each process measures its own parts on its own clock. If two processes share a
clock, the time between them is the difference of two readings. If they do not, the router's last part is the remainder
of the whole, so the sum is right, and that part includes the time on the network.
"""

from dataclasses import dataclass, fields

CLOSED = 0.01  # a sum that differs more from its whole, relatively, does not close


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTimes:
    """Times on the router's clock, in seconds.

    Attributes:
        received_s: the request arrived.
        asked_s: the attempt that gave the first token started.
        first_s: the first token left.
        second_s: the second token left; None if there is none.
    """

    received_s: float
    asked_s: float
    first_s: float
    second_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """Times that the prefill worker sent with a first token. `received_s` and `first_s` are on its clock."""

    received_s: float
    queue_s: float
    incoming_s: float
    prefill_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """Times that the decode worker sent with its first tokens.

    Attributes:
        first_s: when the attempt that handed over knew the first token, on its prefill worker's clock.
        draft_s: from `first_s` to the hand-off.
        transfer_s: from the hand-off to `landed_s`, by an estimated difference of the two clocks.
        landed_s: when all KV and the COMMIT had arrived, on the decode worker's clock.
        verification_s: from `landed_s` until the transfer is complete.
        admission_s: until the sequence got a slot.
        step_s: until the first step's tokens.
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
        """Time until the first token was known."""
        return self.router_s + self.queue_s + self.incoming_s + self.prefill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondToken:
    """Parts of the time from when the first token is known until the second one leaves, in order."""

    retry_s: float
    draft_s: float
    transfer_s: float
    verification_s: float
    admission_s: float
    step_s: float
    publish_s: float


def first_token(router: RouterTimes, prefill: PrefillTimes, *, shared_clock: bool) -> FirstToken:
    """Break down `router.first_s - router.received_s`."""
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
    """Parts that, with `first_token(...).before_s`, add up to `router.second_s - router.received_s`."""
    if router.second_s is None:
        return None
    here_s = decode.verification_s + decode.admission_s + decode.step_s
    if shared_clock:
        retry_s = decode.first_s - prefill.first_s
        transfer_s = decode.landed_s - decode.first_s - decode.draft_s
        publish_s = router.second_s - decode.landed_s - here_s
    else:  # a retry may have used another worker with another clock, so its time is in the last part
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
    """Relative difference between a sum of parts and the whole."""
    return abs(parts - whole) / whole if whole > 0 else float(parts != whole)
