"""How loaded each worker is: its last heartbeat, and what this router has sent it since. Pure.

A heartbeat is read once and kept as plain numbers. What was sent shortly before it came counts too, because the worker
may not have seen it when it wrote.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from baton.proto import worker_pb2
from baton.router.placement.members import Incarnation, Member

LAG_S: Final = 0.02  # between a request's leaving here and its being counted there
STEP_WEIGHT: Final = 0.5  # of what came since the last heartbeat in a mean time


@dataclass(frozen=True, slots=True)
class Edge:
    """How one prefill worker reaches one decode worker, as measured; 0 where nothing was."""

    usable: bool
    bytes_per_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step over prompts takes: a fixed time, and one for each token; the MTP head's part of it."""

    fixed_s: float
    per_token_s: float
    draft_s: float


@dataclass(frozen=True, slots=True)
class Sent:
    """One request on its way."""

    sent_s: float
    num_tokens: int  # to prefill
    num_blocks: int  # that it takes


@dataclass(slots=True)
class Load:
    """Of one incarnation, from its heartbeat and the requests since.

    Attributes:
        heartbeat_s: when it was heard.
        tokens_queued: prompt tokens to compute, then.
        tokens_per_s: that it computes; 0 not measured.
        num_blocks: of its pool.
        num_blocks_free: then.
        num_blocks_cached: that have names, then.
        num_sequences: there, waiting or running, then.
        max_num_seqs: that it runs at once; 0 not said.
        step_s: of a decode step, lately; 0 not measured.
        num_running: sequences that decode, or compute, then.
        pace: of prompts that it computes; None not measured.
        local_chunk_len: of a prompt between two decode steps; 0 not said.
        exposed_s: from the end of a prefill to the seal, lately; 0 not measured.
        bytes_per_position: of KV.
        edges: by address and incarnation of the decode worker's incoming transfer.
        sent: since then.
    """

    heartbeat_s: float = float("-inf")
    tokens_queued: int = 0
    tokens_per_s: float = 0.0
    num_blocks: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_sequences: int = 0
    max_num_seqs: int = 0
    step_s: float = 0.0
    num_running: int = 0
    pace: Pace | None = None
    local_chunk_len: int = 0
    exposed_s: float = 0.0
    bytes_per_position: float = 0.0
    edges: dict[tuple[str, int], Edge] = field(default_factory=dict)
    sent: deque[Sent] = field(default_factory=deque)
    _steps: tuple[int, float] = (0, 0.0)  # count and seconds, at the last heartbeat
    _exposed: tuple[int, float] = (0, 0.0)  # likewise
    _state: worker_pb2.WorkerState | None = None  # the last heartbeat itself

    @property
    def tokens_sent(self) -> int:
        """Prompt tokens of the requests since."""
        return sum(item.num_tokens for item in self.sent)

    @property
    def blocks_sent(self) -> int:
        """Blocks of the requests since."""
        return sum(item.num_blocks for item in self.sent)

    def hear(self, member: Member) -> None:
        """Take the member's last heartbeat, if it is a new one."""
        if member.state is self._state:
            return
        self._state = member.state
        held = member.state.inventory
        self.heartbeat_s = member.heartbeat_s
        self.tokens_queued = held.num_prefill_tokens_queued
        self.tokens_per_s = held.prefill_tokens_per_s
        self.num_blocks, self.num_blocks_free = held.num_blocks, held.num_blocks_free
        self.num_blocks_cached = held.num_blocks_cached
        self.num_sequences = held.num_requests_held
        self.max_num_seqs = member.state.max_num_seqs
        self.bytes_per_position = member.state.kv_bytes_per_position
        self.num_running = held.num_requests_running
        pace = held.prefill_pace
        self.pace = Pace(pace.fixed_s, pace.per_token_s, pace.draft_s) if held.HasField("prefill_pace") else None
        self.local_chunk_len = held.local_chunk_len
        self.edges = {
            (path.kv_address, path.epoch): Edge(path.lane != "", path.gbps * 1e9, path.round_trip_ms / 1e3)
            for path in held.transfer.paths
        }
        seconds = held.steps.step_seconds
        self.step_s, self._steps = _newer(self.step_s, self._steps, (sum(seconds.counts), seconds.total))
        exposed = (held.transfer.transfers, held.transfer.exposed_seconds)
        self.exposed_s, self._exposed = _newer(self.exposed_s, self._exposed, exposed)
        while self.sent and self.sent[0].sent_s < self.heartbeat_s - LAG_S:
            self.sent.popleft()


def _newer(mean_s: float, seen: tuple[int, float], now: tuple[int, float]) -> tuple[float, tuple[int, float]]:
    """The mean of durations lately, from their count and sum then and now; and what is seen now."""
    num, seconds = now[0] - seen[0], now[1] - seen[1]
    if num <= 0 or seconds <= 0:
        return mean_s, now
    new_s = seconds / num
    return (mean_s + STEP_WEIGHT * (new_s - mean_s) if mean_s else new_s), now


class Loads:
    """Loads by incarnation, of those that were asked for lately."""

    def __init__(self) -> None:
        self._loads: dict[Incarnation, Load] = {}

    def of(self, member: Member) -> Load:
        """The member's load, its last heartbeat taken."""
        load = self._loads.setdefault(member.incarnation, Load())
        load.hear(member)
        return load

    def keep(self, members: list[Member]) -> None:
        """Forget everybody else."""
        if len(self._loads) > len(members):
            incarnations = {member.incarnation for member in members}
            self._loads = {
                incarnation: load for incarnation, load in self._loads.items() if incarnation in incarnations
            }
