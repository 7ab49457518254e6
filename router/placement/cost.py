"""What it would cost a request, in seconds, to be served by a prefill and a decode worker. Pure arithmetic.

    cost = prefill queue + own uncached prompt, for itself and for who comes after it + what it pushes out of the cache
         + decode's blocks and batch
         + the part of the transfer that the prefill does not hide

Rates are the workers' own measurements. Someone who has not been measured yet is taken as the mean of those who have.
"""

from dataclasses import dataclass
from typing import Final

from baton.router.placement.load import Edge, Load

NO_EDGE_S: Final = 1e6  # of a pair between which no lane works


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """What is not measured.

    Attributes:
        tokens_per_s: prefill rate where no worker has measured one.
        step_s: decode step where none has.
        answer_steps: steps over which the load of a decode worker is felt.
        work: seconds charged for each second of prefill, because others wait for it: of two workers that would be
            done at the same time, the one that has less to compute.
        eviction: seconds charged for each second of prefill whose KV is pushed out of the cache; how likely it would
            have been used again.
    """

    tokens_per_s: float = 10_000.0
    step_s: float = 0.02
    answer_steps: int = 32
    work: float = 0.25
    eviction: float = 0.5


WEIGHTS: Final = CostWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request needs.

    Attributes:
        prompt_len: its tokens.
        block_size: positions of a block.
    """

    prompt_len: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks for its prompt and the first answer token."""
        return -(-(self.prompt_len + 1) // self.block_size)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds at a prefill worker.

    Attributes:
        queue_s: until the prompt's turn.
        compute_s: for what is not cached.
        charged_s: for others: those who come after it, and those whose prefixes it pushes out.
    """

    queue_s: float
    compute_s: float
    charged_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.queue_s + self.compute_s + self.charged_s


def prefill_cost(
    load: Load,
    asked: Asked,
    *,
    tokens_per_s: float,
    cached_len: int,
    now_s: float,
    num_names: int | None = None,
    weights: CostWeights = WEIGHTS,
) -> PrefillCost:
    """What a prefill worker would take.

    Args:
        load: its own.
        asked: by the request.
        tokens_per_s: its rate, measured or assumed, > 0.
        cached_len: prompt tokens that it need not compute.
        now_s: on the clock of `load.heartbeat_s`.
        num_names: blocks with names that it is known to hold; None: it keeps none, so nothing is pushed out.
        weights: of what is not measured.
    """
    own_len = asked.prompt_len - cached_len
    # Meanwhile it has computed, at its rate and no more than there was.
    done = tokens_per_s * max(0.0, now_s - load.heartbeat_s)
    queued = max(0.0, load.tokens_queued + load.tokens_sent - done)
    compute_s = own_len / tokens_per_s
    charged_s = weights.work * compute_s
    if num_names is not None:
        num_new = -(-own_len // asked.block_size)
        room = max(0, load.num_blocks - max(num_names, load.num_blocks_cached) - load.blocks_sent)
        charged_s += weights.eviction * max(0, num_new - room) * asked.block_size / tokens_per_s
    return PrefillCost(queued / tokens_per_s, compute_s, charged_s)


def decode_cost(load: Load, asked: Asked, *, step_s: float, weights: CostWeights = WEIGHTS) -> float:
    """Seconds that the others at a decode worker cost the request: slower steps, and a wait for a slot or blocks.

    Args:
        load: its own.
        asked: by the request.
        step_s: of its steps, measured or assumed.
        weights: of what is not measured.
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
    edge: Edge | None, asked: Asked, *, bytes_per_position: float, bytes_per_s: float, compute_s: float
) -> float:
    """Seconds of the transfer that the prefill does not hide.

    Args:
        edge: as measured; None: these two have not met.
        asked: by the request.
        bytes_per_position: of KV.
        bytes_per_s: assumed where nothing was measured; 0: nothing is known, and nothing charged.
        compute_s: what the prefill takes, which runs at the same time.
    """
    if edge is not None and not edge.usable:
        return NO_EDGE_S
    rate = edge.bytes_per_s if edge is not None and edge.bytes_per_s else bytes_per_s
    transfer_s = asked.prompt_len * bytes_per_position / rate if rate else 0.0
    return max(0.0, transfer_s - compute_s) + (edge.round_trip_s if edge is not None else 0.0)
