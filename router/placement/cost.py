"""Estimates, in seconds, what serving a request by a prefill and a decode worker would cost. Pure arithmetic.

    cost = prefill queue + own uncached prompt, charged also for later requests + KV that it evicts from the cache
         + decode's blocks and batch
         + the part of the transfer that the prefill does not hide

Rates are the workers' own measurements. A worker without a recent measurement counts as the mean of those that have
one.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from baton.proto import worker_pb2
from baton.router.placement.members import Incarnation, Member

STALE_S: Final = 30.0  # age at which an unrefreshed rate is no longer trusted
LAG_S: Final = 0.02  # from a request's departure here until the worker counts it
STEP_WEIGHT: Final = 0.5  # weight of what came since the last heartbeat in a mean time


@dataclass(frozen=True, slots=True)
class Edge:
    """How one prefill worker reaches one decode worker, as measured; 0 where nothing was measured."""

    usable: bool
    bytes_per_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration of a prefill step: a fixed part, a part per token, and the MTP head's part of it."""

    fixed_s: float
    per_token_s: float
    draft_s: float


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request sent since the last heartbeat."""

    sent_s: float
    num_tokens: int  # to prefill
    num_blocks: int  # KV blocks it takes


@dataclass(slots=True)
class WorkerLoad:
    """Load of one incarnation, from its heartbeat and the requests sent since.

    Attributes:
        heartbeat_s: when the last heartbeat arrived.
        tokens_queued: prompt tokens left to compute, at the heartbeat.
        tokens_per_s: reported prefill rate; 0 if not measured.
        measured_s: when the worker last reported a new measurement.
        num_blocks: blocks in its pool.
        num_blocks_free: free blocks, at the heartbeat.
        num_blocks_cached: blocks with a block hash, at the heartbeat.
        num_sequences: sequences waiting or running, at the heartbeat.
        max_num_seqs: maximum number of running sequences; 0 if not reported.
        step_s: recent duration of a decode step; 0 if not measured.
        num_running: sequences that decode or compute a prompt, at the heartbeat.
        pace: pace of the prompts that it computes; None if not measured.
        local_chunk_len: prompt tokens between two decode steps; 0 if not reported.
        exposed_s: recent time from the end of a prefill until the transfer is complete; 0 if not measured.
        bytes_per_position: bytes of KV per position.
        edges: by (KV address, epoch) of the decode worker's KV receiver.
        sent: requests sent since the heartbeat.
    """

    heartbeat_s: float = float("-inf")
    tokens_queued: int = 0
    tokens_per_s: float = 0.0
    measured_s: float = float("-inf")
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
    sent: deque[SentRequest] = field(default_factory=deque)
    _steps: tuple[int, float] = (0, 0.0)  # count and seconds, at the last heartbeat
    _exposed: tuple[int, float] = (0, 0.0)  # likewise
    _measured: tuple[float, int] = (0.0, 0)  # rate and number of prompts, at the last heartbeat
    _state: worker_pb2.WorkerState | None = None  # the last heartbeat itself

    @property
    def tokens_sent(self) -> int:
        """Prompt tokens of the requests sent since the heartbeat."""
        return sum(item.num_tokens for item in self.sent)

    @property
    def blocks_sent(self) -> int:
        """Blocks of the requests sent since the heartbeat."""
        return sum(item.num_blocks for item in self.sent)

    def believed_tokens_per_s(self, now_s: float) -> float:
        """The prefill rate if it was measured recently, else 0.

        A worker that got its only prompt while it was cold, or its host busy, would otherwise never get another:
        nothing else measures the rate.
        """
        return self.tokens_per_s if self._is_fresh(now_s) else 0.0

    def believed_pace(self, now_s: float) -> Pace | None:
        """The pace if it was measured recently, else None."""
        return self.pace if self._is_fresh(now_s) else None

    def believed_step_s(self, now_s: float) -> float:
        """The duration of a decode step if it was measured recently, else 0."""
        return self.step_s if self._is_fresh(now_s) else 0.0

    def _is_fresh(self, now_s: float) -> bool:
        return now_s - self.measured_s < STALE_S

    def hear(self, member: Member) -> None:
        """Take in the member's last heartbeat, if it is new."""
        if member.state is self._state:
            return
        self._state = member.state
        held = member.state.inventory
        self.heartbeat_s = member.heartbeat_s
        self.tokens_queued = held.num_prefill_tokens_queued
        self.tokens_per_s = held.prefill_tokens_per_s
        measured = (held.prefill_tokens_per_s, held.num_requests_finished)
        if measured != self._measured:
            self._measured, self.measured_s = measured, member.heartbeat_s
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
            (path.kv_address, path.epoch): Edge(path.data_path != "", path.gbps * 1e9, path.round_trip_ms / 1e3)
            for path in held.transfer.paths
        }
        seconds = held.steps.step_seconds
        self.step_s, self._steps = _newer(self.step_s, self._steps, (sum(seconds.counts), seconds.total))
        exposed = (held.transfer.transfers, held.transfer.exposed_seconds)
        self.exposed_s, self._exposed = _newer(self.exposed_s, self._exposed, exposed)
        while self.sent and self.sent[0].sent_s < self.heartbeat_s - LAG_S:
            self.sent.popleft()


def _newer(mean_s: float, seen: tuple[int, float], now: tuple[int, float]) -> tuple[float, tuple[int, float]]:
    """Update a mean duration from count and sum, then and now; return it with the new (count, sum)."""
    num, seconds = now[0] - seen[0], now[1] - seen[1]
    if num <= 0 or seconds <= 0:
        return mean_s, now
    new_s = seconds / num
    return (mean_s + STEP_WEIGHT * (new_s - mean_s) if mean_s else new_s), now


class Loads:
    """Loads by incarnation, for recently used workers."""

    def __init__(self) -> None:
        self._loads: dict[Incarnation, WorkerLoad] = {}

    def of(self, member: Member) -> WorkerLoad:
        """Return the member's load, updated from its last heartbeat."""
        load = self._loads.setdefault(member.incarnation, WorkerLoad())
        load.hear(member)
        return load

    def keep(self, members: list[Member]) -> None:
        """Forget all other workers."""
        if len(self._loads) > len(members):
            incarnations = {member.incarnation for member in members}
            self._loads = {
                incarnation: load for incarnation, load in self._loads.items() if incarnation in incarnations
            }


NO_EDGE_S: Final = 1e6  # cost of a pair without a working data path


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Constants for what is not measured.

    Attributes:
        tokens_per_s: prefill rate if no worker has measured one.
        step_s: duration of a decode step if no worker has measured one.
        answer_steps: steps over which a decode worker's load is felt.
        work: seconds charged per second of prefill, because other requests wait for it. Of two workers that would
            finish at the same time, the one with less to compute wins.
        eviction: seconds charged per second of prefill whose KV is evicted from the cache: how likely it would have
            been reused.
    """

    tokens_per_s: float = 10_000.0
    step_s: float = 0.02
    answer_steps: int = 32
    work: float = 0.25
    eviction: float = 0.5


WEIGHTS: Final = CostWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNeeds:
    """What a request needs.

    Attributes:
        prompt_len: its prompt's tokens.
        block_size: positions in a block.
    """

    prompt_len: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks for the prompt and the first answer token."""
        return -(-(self.prompt_len + 1) // self.block_size)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds at a prefill worker.

    Attributes:
        queue_s: until the prompt's turn.
        compute_s: to compute the uncached part.
        charged_s: charged for later requests, and for prefixes that it evicts.
    """

    queue_s: float
    compute_s: float
    charged_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.queue_s + self.compute_s + self.charged_s


def prefill_cost(
    load: WorkerLoad,
    asked: RequestNeeds,
    *,
    tokens_per_s: float,
    cached_len: int,
    now_s: float,
    num_names: int | None = None,
    weights: CostWeights = WEIGHTS,
) -> PrefillCost:
    """Estimate the cost at a prefill worker.

    Args:
        load: the worker's load.
        asked: the request's needs.
        tokens_per_s: the worker's rate, measured or assumed, > 0.
        cached_len: prompt tokens that need not be computed.
        now_s: time on the clock of `load.heartbeat_s`.
        num_names: number of block hashes that the worker is known to hold; None: it keeps none, so nothing is evicted.
        weights: constants for what is not measured.
    """
    own_len = asked.prompt_len - cached_len
    # since the heartbeat it has computed at its rate, at most what was queued
    done = tokens_per_s * max(0.0, now_s - load.heartbeat_s)
    queued = max(0.0, load.tokens_queued + load.tokens_sent - done)
    compute_s = own_len / tokens_per_s
    charged_s = weights.work * compute_s
    if num_names is not None:
        num_new = -(-own_len // asked.block_size)
        room = max(0, load.num_blocks - max(num_names, load.num_blocks_cached) - load.blocks_sent)
        charged_s += weights.eviction * max(0, num_new - room) * asked.block_size / tokens_per_s
    return PrefillCost(queued / tokens_per_s, compute_s, charged_s)


def decode_cost(load: WorkerLoad, asked: RequestNeeds, *, step_s: float, weights: CostWeights = WEIGHTS) -> float:
    """Seconds that a decode worker's load costs the request: slower steps, and a wait for a slot or blocks.

    Args:
        load: the worker's load.
        asked: the request's needs.
        step_s: duration of the worker's decode steps, measured or assumed.
        weights: constants for what is not measured.
    """
    answer_s = weights.answer_steps * step_s
    num_sequences = load.num_sequences + len(load.sent)
    batch = num_sequences / load.max_num_seqs if load.max_num_seqs else float(num_sequences)
    waiting = max(0.0, batch - 1.0)
    num_free = load.num_blocks_free - load.blocks_sent
    used = 1.0 - (num_free - asked.num_blocks) / load.num_blocks if load.num_blocks else 0.0
    short = max(0, asked.num_blocks - num_free) / asked.num_blocks
    return answer_s * (batch + waiting + used + short)


def edge_cost(
    edge: Edge | None, asked: RequestNeeds, *, bytes_per_position: float, bytes_per_s: float, compute_s: float
) -> float:
    """Seconds of the transfer that the prefill does not hide.

    Args:
        edge: the measured connection; None if this pair has made no transfer.
        asked: the request's needs.
        bytes_per_position: bytes of KV per position.
        bytes_per_s: rate assumed without a measurement; 0: unknown, and nothing is charged.
        compute_s: duration of the prefill, which overlaps with the transfer.
    """
    if edge is not None and not edge.usable:
        return NO_EDGE_S
    rate = edge.bytes_per_s if edge is not None and edge.bytes_per_s else bytes_per_s
    transfer_s = asked.prompt_len * bytes_per_position / rate if rate else 0.0
    return max(0.0, transfer_s - compute_s) + (edge.round_trip_s if edge is not None else 0.0)


CAUTIOUS_LEN: Final = 64  # longest prompt for a decode worker that has measured nothing
CAUTION: Final = 2.0  # factor on the other workers' pace
INTERFERENCE: Final = 0.25  # seconds charged per second in which a running sequence has to wait
FIRST_CHUNK_LEN: Final = 32  # assumed until the worker reports one


@dataclass(frozen=True, slots=True)
class LocalCost:
    """Seconds at a decode worker that computes the prompt itself.

    Attributes:
        queue_s: until the prompt's turn.
        compute_s: to compute the prompt.
        steps_s: decode steps between its chunks.
        charged_s: charged for other requests.
    """

    queue_s: float
    compute_s: float
    steps_s: float
    charged_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.queue_s + self.compute_s + self.steps_s + self.charged_s


def local_cost(
    load: WorkerLoad,
    asked: RequestNeeds,
    *,
    assumed: Pace | None,
    cached_len: int = 0,
    step_s: float,
    now_s: float,
    is_must: bool = False,
    weights: CostWeights = WEIGHTS,
) -> LocalCost | None:
    """Estimate the cost of a local prefill; None if it is unknown and the worker must not be tried.

    Args:
        load: the decode worker's load.
        asked: the request's needs.
        assumed: the other workers' pace, used if this worker has measured none.
        cached_len: prompt tokens that need not be computed.
        step_s: duration of the worker's decode steps, measured or assumed.
        now_s: time on the clock of `load.heartbeat_s`.
        is_must: whether a decode worker computes the prompt in any case; then a worker without a recent measurement
            counts like the others.
        weights: constants for what is not measured.
    """
    pace = load.believed_pace(now_s) or assumed or load.pace if is_must else load.pace
    own_len = asked.prompt_len - cached_len
    queued = float(load.tokens_queued + load.tokens_sent)
    if pace is None and is_must:
        pace = Pace(0.0, 1.0 / weights.tokens_per_s, 0.0)
    elif pace is None:
        if assumed is None or own_len > CAUTIOUS_LEN or queued:
            return None
        pace = Pace(CAUTION * assumed.fixed_s, CAUTION * assumed.per_token_s, CAUTION * assumed.draft_s)
    if pace.per_token_s:
        queued = max(0.0, queued - max(0.0, now_s - load.heartbeat_s) / pace.per_token_s)
    num_running = load.num_running + sum(item.num_tokens == 0 for item in load.sent)
    num_chunks = -(-own_len // (load.local_chunk_len or FIRST_CHUNK_LEN)) if num_running else 1
    compute_s = num_chunks * pace.fixed_s + own_len * pace.per_token_s
    return LocalCost(
        queue_s=pace.fixed_s + queued * pace.per_token_s if queued else 0.0,
        compute_s=compute_s,
        steps_s=num_chunks * step_s if num_running else 0.0,
        charged_s=(weights.work + INTERFERENCE * num_running) * compute_s,
    )


def split_cost(
    load: WorkerLoad, cost: PrefillCost, asked: RequestNeeds, *, cached_len: int, edge_s: float, round_trip_s: float
) -> float:
    """Estimate the cost at the best prefill worker, in the same terms as `local_cost`.

    Args:
        load: the prefill worker's load.
        cost: the prefill worker's cost.
        asked: the request's needs.
        cached_len: prompt tokens that need not be computed.
        edge_s: expected extra time of the data path to the decode worker.
        round_trip_s: round-trip time of that data path; 0 if not measured.
    """
    if load.pace is None:
        return cost.total_s + edge_s
    compute_s = load.pace.fixed_s + (asked.prompt_len - cached_len) * load.pace.per_token_s
    hand_over_s = max(edge_s, max(0.0, load.exposed_s - load.pace.draft_s) + round_trip_s)
    return cost.queue_s + compute_s + cost.charged_s + hand_over_s
