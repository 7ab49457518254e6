"""What a decode worker knows of a request beside its sequence."""

from dataclasses import dataclass

from baton.core.requests.request import AttemptKey
from baton.decode_worker.times import DecodeTimes
from baton.engine.sequence import Sequence
from baton.kvtransfer.receiver.service import Completed
from baton.proto import worker_pb2
from baton.worker.stream import EventSink

DecodeStream = EventSink[worker_pb2.DecodeEvent]


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request.

    Attributes:
        sequence: its own, in the engine.
        stream: to the router.
        complete: the transfer that brought its KV; None before, and where its prompt is computed here.
        granted_s: when it had blocks for its KV; 0 before.
        first_s: when its first decoded tokens were ready; 0 before.
    """

    sequence: Sequence
    stream: DecodeStream
    complete: Completed | None = None
    granted_s: float = 0.0
    first_s: float = 0.0

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.sequence.key

    @property
    def is_local(self) -> bool:
        """Whether its prompt is computed here."""
        return not self.sequence.is_received

    @property
    def times(self) -> DecodeTimes:
        """When it got where."""
        sequence = self.sequence
        decoding_s = sequence.decoding_s
        if self.is_local and decoding_s:
            # A prompt's row decodes before the host knows its first token.
            decoding_s = max(decoding_s, sequence.first_token_s)
        return DecodeTimes(
            attended_s=sequence.submitted_s,
            granted_s=self.granted_s,
            computing_s=sequence.computing_s,
            first_token_s=sequence.first_token_s,
            admitted_s=decoding_s,
            first_s=self.first_s,
        )

    @property
    def handoff_ms(self) -> float:
        """From the first token to the first decode step; until the KV is there, or now, where it never decoded."""
        times = self.times
        if self.is_local:
            return 1e3 * max(0.0, times.admitted_s - times.first_token_s) if times.admitted_s else 0.0
        if self.complete is None:
            return 0.0
        return 1e3 * max(0.0, (times.admitted_s or self.complete.completed_s) - self.complete.prefill_end_s)
