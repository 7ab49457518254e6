"""What a prefill worker knows of a request beside its sequence."""

from dataclasses import dataclass, field

from baton.core.requests.request import AttemptKey
from baton.engine.sequence import Phase, Sequence
from baton.kvtransfer.sender.service import DecodePeer
from baton.proto import worker_pb2
from baton.worker.stream import EventSink

PrefillStream = EventSink[worker_pb2.PrefillEvent]


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One request.

    Attributes:
        sequence: its own, in the engine.
        peer: the decode worker its KV goes to.
        stream: to the router.
        reserved_s: when room was asked for at the decode worker; 0 before.
        granted_s: when there was some; 0 before.
        handed_off_s: when its prompt was computed, MTP pass included; 0 before.
        error: what ended it, if it ended badly.
        seen: the phase it was last seen in by `PushLine`, and since when.
    """

    sequence: Sequence
    peer: DecodePeer
    stream: PrefillStream
    reserved_s: float = 0.0
    granted_s: float = 0.0
    handed_off_s: float = 0.0
    error: str = ""
    seen: tuple[Phase, float] | None = field(default=None, repr=False)

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.sequence.key

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        table = self.sequence.table
        return 0 if table is None else len(table.blocks)

    @property
    def waits_for_peer(self) -> bool:
        """Whether it is the decode worker that has to act next."""
        return self.sequence.phase not in (Phase.WAITING, Phase.READY, Phase.RUNNING)
