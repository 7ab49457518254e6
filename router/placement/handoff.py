"""Which pairs of workers cannot hand a prompt over because it is too long for it, by what they report. Pure.

What comes by sockets lies in the decode worker's staging memory as a whole, where its pool is on a GPU; a lane on which
the prefill worker writes the pool itself needs none. Which lane a pair takes is known once it has been used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import HandoffTooLong
from baton.core.kv_transports import is_one_sided
from baton.router.placement.members import Incarnation, Member

Incarnations = tuple[Incarnation, Incarnation]


@dataclass(slots=True)
class TooLong:
    """Pairs that a request is too long for.

    Attributes:
        surely: they report so, or have refused it.
        perhaps: they do if the lane that they have not used yet is not one-sided.
    """

    surely: set[Incarnations] = field(default_factory=set)
    perhaps: set[Incarnations] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.surely or self.perhaps)


def too_long(prefill: Sequence[Member], decode: Sequence[Member], prompt_len: int) -> TooLong:
    """Pairs that cannot hand so long a prompt over."""
    found = TooLong()
    for receiver in decode:
        if not 0 < receiver.state.inventory.max_handoff_len < prompt_len:
            continue
        for sender in prefill:
            lane = _lane(sender, receiver)
            if not is_one_sided(lane):
                (found.surely if lane else found.perhaps).add((sender.incarnation, receiver.incarnation))
    return found


def refusal(prompt_len: int, decode: Sequence[Member]) -> HandoffTooLong:
    """The error of a request that no pair can hand over, where no decode worker may compute it."""
    limit_len = max((member.state.inventory.max_handoff_len for member in decode), default=0)
    message = (
        f"no hand-off can carry {prompt_len} tokens, of at most {limit_len}: a larger kv_staging_mib would, or"
        " local_prefill: auto, with which decode workers compute such prompts"
    )
    return HandoffTooLong(message, num_tokens=prompt_len, limit=limit_len, keys=["kv_staging_mib", "local_prefill"])


def _lane(sender: Member, receiver: Member) -> str:
    """The last one that these two took; empty if they have taken none."""
    address, epoch = receiver.state.kv_address, receiver.state.kv_epoch or receiver.incarnation.epoch
    paths = sender.state.inventory.transfer.paths
    return next((path.lane for path in paths if path.kv_address == address and path.epoch == epoch), "")
