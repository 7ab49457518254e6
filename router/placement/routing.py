"""Makes the placement policies by name, and describes the path that a finished answer took."""

import random
from typing import Final

from baton.core.clock import Clock
from baton.core.errors import ConfigInvalid
from baton.proto import worker_pb2
from baton.router.attempt.request_run import RequestRun
from baton.router.placement.least_cost import LeastCost
from baton.router.placement.local_prefill import LOCAL, SPLIT, LocalPrefill
from baton.router.placement.policy import Pair, Policy, RoundRobin
from baton.router.placement.prefix_index import FleetPrefixIndex

ROUND_ROBIN: Final = "round_robin"
LEAST_COST: Final = "least_cost"
PREFIX: Final = "prefix"
ROUTINGS: Final = (PREFIX, LEAST_COST, ROUND_ROBIN)
PREFILL_ALONE: Final = "prefill"


def make_policy(
    name: str, clock: Clock, rng: random.Random, prefixes: FleetPrefixIndex, local: LocalPrefill | None = None
) -> Policy:
    """Make the policy with this name.

    Args:
        name: one of ROUTINGS.
        clock: clock of the heartbeats' timestamps.
        rng: decides between pairs of equal cost.
        prefixes: which worker caches which prefixes; only "prefix" uses it.
        local: whether decode workers may compute prompts; None: never.

    Raises:
        ConfigInvalid: there is no such policy.
    """
    match name:
        case "round_robin":
            return RoundRobin(local)
        case "least_cost":
            return LeastCost(clock, rng, local=local)
        case "prefix":
            return LeastCost(clock, rng, prefixes, local=local)
    raise ConfigInvalid(f"routing: {name[:40]!r} is none of {', '.join(ROUTINGS)}", keys=["routing"])


def data_path_of(pair: Pair, done: worker_pb2.PrefillDone | None) -> str:
    """The data path of a hand-off, from the prefill worker's final report or, before that, from its heartbeat."""
    if done is not None and done.kv_data_path:
        return done.kv_data_path
    decode = pair.decode.state
    incoming = (decode.kv_address, decode.kv_epoch or decode.epoch)
    paths = pair.prefill.state.inventory.transfer.paths
    return next((path.data_path for path in paths if (path.kv_address, path.epoch) == incoming), "")


def path_of(run: RequestRun) -> str:
    """The path of a finished answer's last attempt."""
    if run.is_local:
        return LOCAL
    return SPLIT if run.decode_worker else PREFILL_ALONE
