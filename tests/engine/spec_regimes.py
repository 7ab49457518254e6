"""Loads for the controller of k: step costs and acceptance that drift and jump, and what each fixed k makes of them.

A regime is a fixed amount of *work*, tokens per sequence; everything about it (batch size, step times, acceptance) is
a function of the work done, so that every policy meets the same load. A policy's time for the work is the sum of mean
step times over the steps it takes, each doing its expected tokens of work: what is compared is decisions, not luck.
What the controller is shown is noisy: times by 5 to 10 % and, in half of the regimes, one in a hundred longer by up to
nine times (somebody else used the machine); acceptance by drawing it for each sequence.
"""

import math
import random
from collections import deque
from dataclasses import dataclass

NUM_CELLS = 256
MAX_DRAFTS = 4
COSTS = ("linear", "saturating", "jumpy")
CHANGES = ("none", "drift", "switch", "two switches", "wave")
BATCHES = ("one", "constant", "phases", "walk")


@dataclass
class Regime:
    """One load. Lists are by cell of work, then by k or position."""

    name: str
    work: float
    batch: list
    times: list
    accept: list
    noise: float
    strays: float
    seed: int

    def tokens(self, cell):
        """Expected tokens of a step, by k."""
        found, stands = [1.0], 1.0
        for rate in self.accept[cell]:
            stands *= rate
            found.append(found[-1] + stands)
        return found

    def fixed_times(self):
        """Time for all the work, by fixed k; and with the best k of each cell."""
        totals, oracle = [0.0] * (MAX_DRAFTS + 1), 0.0
        per_cell = self.work / NUM_CELLS
        for cell in range(NUM_CELLS):
            costs = [per_cell * time / count for time, count in zip(self.times[cell], self.tokens(cell), strict=True)]
            totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
            oracle += min(costs)
        return totals, oracle


def make_regime(seed, num_steps=2000):
    """Regime number `seed`; with the best k it takes about `num_steps` steps."""
    rng = random.Random(seed)
    kind, change, batch = COSTS[seed % 3], CHANGES[(seed // 3) % 5], BATCHES[(seed // 15) % 4]
    batches = _batches(rng, batch)
    ends = [(_cost(rng, kind), _acceptance(rng)) for _ in range(3)]
    times, accept = [], []
    for cell in range(NUM_CELLS):
        before, after, share = _mix(change, cell / NUM_CELLS)
        old, new = ends[before], ends[after]
        size = batches[cell]
        times.append([(1 - share) * old[0](size, k) + share * new[0](size, k) for k in range(MAX_DRAFTS + 1)])
        accept.append([(1 - share) * a + share * b for a, b in zip(old[1], new[1], strict=True)])
    regime = Regime(
        name=f"{seed}: {kind}, {change}, batch {batch}",
        work=1.0,
        batch=batches,
        times=times,
        accept=accept,
        noise=rng.uniform(0.05, 0.10),
        strays=rng.choice((0.0, 0.01)),
        seed=seed,
    )
    num_tokens = 0.0
    for cell in range(NUM_CELLS):
        tokens = regime.tokens(cell)
        num_tokens += max(tokens, key=lambda count, tokens=tokens, cell=cell: count / times[cell][tokens.index(count)])
    regime.work = num_steps * num_tokens / NUM_CELLS
    return regime


def run(regime, control, num_late=1):
    """Time for all the work under `control`, and its k of each step.

    Results come `num_late` steps late: 1 where a step is launched before the result of the one before is read.
    """
    rng = random.Random(regime.seed + 1)
    draw, gauss = rng.random, rng.gauss
    tokens = [regime.tokens(cell) for cell in range(NUM_CELLS)]
    done, total, per_work, chosen = 0.0, 0.0, NUM_CELLS / regime.work, []
    outstanding = deque()
    while done < regime.work:
        cell = int(done * per_work)
        size = regime.batch[cell]
        k = control.choose(size)
        chosen.append(k)
        time = regime.times[cell][k]
        total += time
        done += tokens[cell][k]
        tested, accepted, left = [], [], size
        for rate in regime.accept[cell][:k]:
            tested.append(left)
            if left <= 8:
                left = sum([draw() < rate for _ in range(left)])
            else:
                wanted = gauss(left * rate, math.sqrt(left * rate * (1.0 - rate)))
                left = min(max(round(wanted), 0), left)
            accepted.append(left)
            if left == 0:
                break
        shown = time * max(1.0 + regime.noise * gauss(0.0, 1.0), 0.2)
        if draw() < regime.strays:
            shown *= draw() * 8.0 + 1.0
        seen = {"batch_size": size, "num_drafts": k, "step_s": shown, "tested": tested, "accepted": accepted}
        outstanding.append(seen)
        if len(outstanding) > num_late:
            control.observe(**outstanding.popleft())
    return total, chosen


def _cost(rng, kind):
    base, by_batch = 1e-2, rng.choice((0.0, 0.005, 0.02))
    weight = rng.choice((0.0, 0.0, 0.02))  # rows beside the first cost more in large batches
    match kind:
        case "linear":
            slope = rng.choice((0.02, 0.05, 0.1, 0.2, 0.4, 0.8)) * rng.uniform(0.7, 1.3)
            extra = [slope * k for k in range(MAX_DRAFTS + 1)]
        case "saturating":
            most, rise = rng.uniform(0.05, 1.5), rng.uniform(0.5, 3.0)
            extra = [most * (1.0 - math.exp(-k / rise)) for k in range(MAX_DRAFTS + 1)]
        case _:
            jumps = [rng.choice((0.0, 0.02, 0.05, 0.3, 0.8)) for _ in range(MAX_DRAFTS)]
            extra = [sum(jumps[:k]) for k in range(MAX_DRAFTS + 1)]

    def seconds(size, k):
        rows = extra[k] * (1.0 + weight * size)
        if kind == "jumpy" and size * (k + 1) > 64:  # another shape of tile
            rows += 0.25
        return base * (1.0 + by_batch * size) * (1.0 + rows)

    return seconds


def _acceptance(rng):
    first, fade = rng.uniform(0.05, 0.95), rng.uniform(0.75, 1.0)
    return [first * fade**at for at in range(MAX_DRAFTS)]


def _mix(change, at):
    """Two ends and the share of the second one."""
    match change:
        case "none":
            return 0, 0, 0.0
        case "drift":
            return 0, 1, at
        case "switch":
            return 0, 1, float(at >= 0.5)
        case "two switches":
            return (0, 1, float(at >= 0.3)) if at < 0.65 else (1, 2, 1.0)
        case _:
            return 0, 1, 0.5 - 0.5 * math.cos(4.0 * math.pi * at)


def _batches(rng, kind):
    sizes = (1, 1, 2, 4, 8, 16, 32, 64)
    match kind:
        case "one":
            return [1] * NUM_CELLS
        case "constant":
            return [rng.choice(sizes)] * NUM_CELLS
        case "phases":
            phases = [rng.choice(sizes) for _ in range(4)]
            return [phases[4 * cell // NUM_CELLS] for cell in range(NUM_CELLS)]
        case _:
            found, size = [], rng.choice(sizes)
            for _ in range(NUM_CELLS):
                size = min(max(size + rng.choice((-2, -1, -1, 0, 1, 1, 2)), 1), 64)
                found.append(size)
            return found
