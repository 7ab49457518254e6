"""What tests of moving experts share: maps drawn at random, and balancers that follow them."""

import random

from baton.engine.tp.expert_balancer import ExpertBalancer


def load_options(num_redundant):
    """Of `load_model`."""
    return {"expert_parallel": True, "num_redundant_experts": num_redundant}


class Shuffler:
    """Chooses a map at random, whatever the loads: copies anywhere, or one of each expert where there are no more."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.loads = []

    def __call__(self, loads, current, *, world_size):
        self.loads.append(loads)
        num_experts = len(loads)
        experts = [*range(num_experts), *self.draw.choices(range(num_experts), k=len(current) - num_experts)]
        self.draw.shuffle(experts)
        return tuple(experts)


def shuffling(seed=0, interval=1):
    """Makes a balancer of an exchange that always moves experts anywhere."""
    return lambda exchange: ExpertBalancer(exchange, interval, Shuffler(seed))
