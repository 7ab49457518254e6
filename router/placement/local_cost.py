"""What it would cost a request, in seconds, if the decode worker computed its prompt; and the other way. Pure.

    local = prompts queued there + uncached part of the prompt, in chunks between the steps of those that run
          + a share of it for those who come after, and for each that runs and waits meanwhile
    split = the prefill worker's queue + uncached part of the prompt + a share of it for those who come after
          + the hand-over: what workers measured between the end of a prefill and the seal, less the MTP pass that
            every prompt has, or what its lane is expected to take, whichever is longer; and a round trip to reserve

Both are until the sequence can decode, not until its first token, which the hand-over does not hold up. Steps over
prompts take a fixed time beside their tokens', so a rate would compare short prompts with long ones. All numbers are
the workers' measurements. A decode worker that has measured nothing is given short prompts only, one at a time, and
counted as slower than those that have, until it has learned from them.
"""

from dataclasses import dataclass
from typing import Final

from baton.router.placement.cost import WEIGHTS, Asked, CostWeights, PrefillCost
from baton.router.placement.load import Load, Pace

CAUTIOUS_LEN: Final = 64  # prompt tokens for a decode worker that has measured nothing
CAUTION: Final = 2.0  # times what the others take
INTERFERENCE: Final = 0.25  # seconds charged for each second in which a sequence that runs has to wait
FIRST_CHUNK_LEN: Final = 32  # where the worker has not said yet


@dataclass(frozen=True, slots=True)
class LocalCost:
    """Seconds at a decode worker.

    Attributes:
        queue_s: until the prompt's turn.
        compute_s: for the prompt.
        steps_s: of decode steps between its chunks.
        charged_s: for others.
    """

    queue_s: float
    compute_s: float
    steps_s: float
    charged_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.queue_s + self.compute_s + self.steps_s + self.charged_s


def local_cost(
    load: Load,
    asked: Asked,
    *,
    assumed: Pace | None,
    cached_len: int = 0,
    step_s: float,
    now_s: float,
    is_must: bool = False,
    weights: CostWeights = WEIGHTS,
) -> LocalCost | None:
    """What a decode worker would take; None if it is not known and must not be tried.

    Args:
        load: its own.
        asked: by the request.
        assumed: the pace of others, where it has measured none.
        cached_len: prompt tokens that it need not compute.
        step_s: of its decode steps, measured or assumed.
        now_s: on the clock of `load.heartbeat_s`.
        is_must: a decode worker computes it in any case, so one that has measured nothing is taken for one like others.
        weights: of what is not measured.
    """
    pace = load.pace
    own_len = asked.prompt_len - cached_len
    queued = float(load.tokens_queued + load.tokens_sent)
    if pace is None and is_must:
        pace = assumed or Pace(0.0, 1.0 / weights.tokens_per_s, 0.0)
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
    load: Load, cost: PrefillCost, asked: Asked, *, cached_len: int, edge_s: float, round_trip_s: float
) -> float:
    """What the best prefill worker would take, in the same terms.

    Args:
        load: its own.
        cost: its own.
        asked: by the request.
        cached_len: prompt tokens that it need not compute.
        edge_s: what its lane to the decode worker is expected to add.
        round_trip_s: of that lane; 0 not measured.
    """
    if load.pace is None:
        return cost.total_s + edge_s
    compute_s = load.pace.fixed_s + (asked.prompt_len - cached_len) * load.pace.per_token_s
    hand_over_s = max(edge_s, max(0.0, load.exposed_s - load.pace.draft_s) + round_trip_s)
    return cost.queue_s + compute_s + cost.charged_s + hand_over_s
