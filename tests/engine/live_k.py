"""k changed while sequences run: scripts for it, and what the steps then showed."""

import itertools
import random

from baton.core.clock import VirtualClock
from baton.core.draft_method import DraftMethod
from baton.engine.speculation.speculation import Speculation


class Scripted(Speculation):
    """Each step's k from a list, over and over; keeps (k, proposed, accepted) of every step that was read."""

    def __init__(self, limit, ks):
        super().__init__(limit, limit, VirtualClock())
        self._ks = itertools.cycle(ks)
        self.steps = []

    def plan(self, draft_caps, **others):
        self.set_mode(next(self._ks))
        return super().plan(draft_caps, **others)

    def read(self, step, proposed_lens, accepted_lens):
        assert all(0 <= accepted <= proposed for accepted, proposed in zip(accepted_lens, proposed_lens, strict=True))
        assert max(proposed_lens) == step.num_drafts
        self.steps.append((step.num_drafts, tuple(proposed_lens), tuple(accepted_lens)))
        super().read(step, proposed_lens, accepted_lens)


def random_ks(seed, limit, length=97):
    """Some for one step, some for several."""
    rng = random.Random(seed)
    ks = []
    while len(ks) < length:
        ks += [rng.randint(0, limit)] * rng.choice((1, 1, 1, 3))
    return ks


def script_everywhere(patch, seed, limit):
    """Every `Speculation` changes its k at random from now on; returns the ks of all steps, as they are planned."""
    plan, ks, seen = Speculation.plan, itertools.cycle(random_ks(seed, limit)), []

    def scripted(self, draft_caps, **others):
        self.set_mode(min(next(ks), self.limit))
        planned = plan(self, draft_caps, **others)
        seen.append(planned.num_drafts)
        return planned

    patch.setattr(Speculation, "plan", scripted)
    return seen


class Methods(Speculation):
    """Each step's (method, k) from a list, over and over."""

    def __init__(self, limit, script, *, keeps=False):
        methods = tuple(DraftMethod)
        super().__init__(limit, None, VirtualClock(), methods=methods, chooses_method=True, keeps=keeps)
        self._script = itertools.cycle(script)

    def _arm(self, size, largest_cap, **_):
        method, k = next(self._script)
        k = min(k, largest_cap)
        return self._control.arm_of(self._methods.index(method), k) if k else 0


def random_methods(seed, limit, length=97):
    """Some for one step, some for several."""
    rng = random.Random(seed)
    script = []
    while len(script) < length:
        way = rng.choice([(None, 0), *((method, rng.randint(1, limit)) for method in DraftMethod)])
        script += [way] * rng.choice((1, 1, 1, 3))
    return script
