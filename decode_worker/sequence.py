"""One request on a decode worker: where it is, and what it holds. Only the scheduler and the worker move it."""

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.request import AttemptKey, GenerationRequest, SpeculationCounts
from baton.decode_worker.times import DecodeTimes
from baton.engine.finish import FinishChecker
from baton.engine.preemption import MAX_PREEMPTIONS
from baton.engine.prefill import SequenceStart
from baton.kvcache.allocator import BlockTable
from baton.kvcache.host_ranges import HostRange
from baton.kvtransfer.landing import Sealed
from baton.proto import worker_pb2
from baton.worker.stream import EventSink

DecodeStream = EventSink[worker_pb2.DecodeEvent]


class DecodeState(Enum):
    """Where a request is on its way through the decode worker."""

    ATTENDING = auto()
    LANDING = auto()
    READY = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    COMPUTING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One request on a decode worker."""

    request: GenerationRequest
    stream: DecodeStream
    checker: FinishChecker
    state: DecodeState = DecodeState.ATTENDING
    table: BlockTable | None = None
    sealed: Sealed | None = None
    start: SequenceStart | None = None
    slot: int = -1
    order: int = -1  # of grants
    token_ids: list[int] = field(default_factory=list)  # of the output so far, the first one included, none forced
    handoff_ms: float = 0.0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    is_giving_way: bool = False
    saved: HostRange | None = None
    num_lost: int = 0
    num_preemptions: int = 0
    num_scripted: int = 0  # of those, some that a test asked for
    num_computed: int = 0  # positions, while its prompt is computed, or that and its output again
    times: DecodeTimes = field(default_factory=DecodeTimes)
    is_local: bool = False  # its prompt is computed here: no landing will come
    num_reported: int = 0  # prompt tokens whose logprobs were sent

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.request.key

    @property
    def num_output(self) -> int:
        """Tokens of the output so far, without those of earlier attempts."""
        return len(self.token_ids)

    @property
    def step_len(self) -> int:
        """Positions it occupies once its next decode step is done, whatever that accepts."""
        num_tokens = self.request.prompt_len + max(1, len(self.token_ids))
        return min(num_tokens + self.request.num_draft_tokens, self.request.capacity_len)

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted often enough."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def runner_slot(self) -> int | None:
        """Where the runner has it, if it decodes."""
        return self.slot if self.state is DecodeState.RUNNING else None

    @property
    def num_kv(self) -> int:
        """Positions whose KV is in its blocks, all steps read."""
        if self.state is DecodeState.COMPUTING or not self.is_whole:
            return self.num_computed
        return self.request.prompt_len + max(0, len(self.token_ids) - 1)

    @property
    def is_whole(self) -> bool:
        """Whether its prompt is computed."""
        return self.state is DecodeState.RUNNING or (self.state is DecodeState.READY and self.start is not None)

    @property
    def num_to_compute(self) -> int:
        """Positions that a prefill here still lacks: all but that of the newest token, once there is one."""
        return self.request.prompt_len + max(0, len(self.token_ids) - 1) - self.num_computed

    @property
    def num_queued(self) -> int:
        """Of a prompt that is computed here alone, positions to compute. Any thread."""
        if not self.is_local or self.token_ids or self.state is DecodeState.ENDED:
            return 0
        return self.num_to_compute
