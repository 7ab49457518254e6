"""Rejection sampling of drafts in plain Python, written from the papers: laws of one sequence, over dictionaries.

A *world* says what the target and the drafter think after every prefix: `p(prefix)` and `q(prefix)` are lists over the
vocabulary. Prefixes are tuples of tokens.
"""

import itertools
import random


class World:
    """Target and draft distributions, drawn once for every prefix; some tokens have probability 0 in either."""

    def __init__(self, vocab_size, seed, head_tokens=None, sharp=1.0, zeros=0.15):
        self.vocab_size = vocab_size
        self.head_tokens = list(range(vocab_size)) if head_tokens is None else list(head_tokens)
        self._seed, self._sharp, self._zeros = seed, sharp, zeros
        self._memory = {}

    def p(self, prefix):
        return self._law("p", prefix, range(self.vocab_size))

    def q(self, prefix):
        return self._law("q", prefix, self.head_tokens)

    def _law(self, kind, prefix, support):
        if (kind, prefix) not in self._memory:
            chance = random.Random(f"{self._seed}/{kind}/{prefix}")
            weights = [0.0] * self.vocab_size
            for token in support:
                weights[token] = 0.0 if chance.random() < self._zeros else chance.expovariate(1.0) ** self._sharp
            if not any(weights):
                weights[next(iter(support))] = 1.0
            total = sum(weights)
            self._memory[kind, prefix] = [weight / total for weight in weights]
        return self._memory[kind, prefix]

    def likeliest(self, prefix):
        law = self.q(prefix)
        return max(self.head_tokens, key=lambda token: (law[token], -token))


def target_law(world, length, prefix=()):
    """Probability of every continuation of `prefix` by `length` tokens."""
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*tokens, token): chance * p
            for tokens, chance in law.items()
            for token, p in enumerate(world.p((*prefix, *tokens)))
        }
    return law


def draft_paths(world, num_drafts, is_point):
    """(drafts, probability of drawing them)."""
    if is_point:
        drafts = ()
        for _ in range(num_drafts):
            drafts = (*drafts, world.likeliest(drafts))
        return [(drafts, 1.0)]
    paths = []
    for drafts in itertools.product(world.head_tokens, repeat=num_drafts):
        chance = 1.0
        for place in range(num_drafts):
            chance *= world.q(drafts[:place])[drafts[place]]
        if chance:
            paths.append((drafts, chance))
    return paths


def claimed_q(world, drafts, place, is_point):
    """The distribution draft `place` is said to have been drawn from."""
    prefix = drafts[:place]
    if is_point:
        return [float(token == drafts[place]) for token in range(world.vocab_size)]
    return world.q(prefix)


def thresholds(world, drafts, is_point, block):
    """(what each accept uniform is compared with, residual law after 0 ... K drafts)."""
    num_drafts = len(drafts)
    reach, reaches, chances, residuals = 1.0, [1.0], [], []
    for place in range(num_drafts):
        p, q = world.p(drafts[:place])[drafts[place]], claimed_q(world, drafts, place, is_point)[drafts[place]]
        if block:
            reach = min(reach * p / q, 1.0)
            reaches.append(reach)
        else:
            chances.append(min(p / q, 1.0))
    for place in range(num_drafts + 1):
        p = world.p(drafts[:place])
        if place == num_drafts:
            weights = p
        else:
            factor = reaches[place] if block else 1.0
            q = claimed_q(world, drafts, place, is_point)
            weights = [max(factor * p[token] - q[token], 0.0) for token in range(world.vocab_size)]
        total = sum(weights)
        if block and place:
            missing = 1.0 - reaches[place]
            if place == num_drafts:
                chances.append(reaches[place])
            else:
                chances.append(total / (total + missing) if total + missing else 1.0)
        residuals.append([weight / total for weight in weights] if total > 1e-12 else p)
    return chances, residuals


def accepted_len(uniforms, chances, block):
    """How many drafts stand."""
    stands = [u < chance for u, chance in zip(uniforms, chances, strict=True)]
    if block:
        return max((place + 1 for place, stand in enumerate(stands) if stand), default=0)
    return next((place for place, stand in enumerate(stands) if not stand), len(stands))


def inverse(law, u):
    """The token whose share of [0, 1) holds u."""
    reached = 0.0
    for token, chance in enumerate(law):
        reached += chance
        if u < reached and chance > 0:
            return token
    return max(token for token, chance in enumerate(law) if chance > 0)
