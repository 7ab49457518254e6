"""Thousands of prompts that begin alike, of a model that keeps state: with everything on, the tokens of everything off.

What corrupts text elsewhere is all there at once: cached prefixes, drafts, steps ahead of the host, 32 sequences,
preemption, and checkpoints that give way. Prompts come as A, B, A, and B begins as A does, for 0 to 90 %. A prompt's
tokens are computed once without any of it. Afterwards aborts, wherever requests are by then: nothing is lost.
"""

import random
from collections import deque
from functools import cache

import pytest
import torch

from baton.core.errors import RequestCancelled
from baton.core.numerics import Numerics
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.test_state_prefixes import check_empty, hits_of
from baton.tests.e2e.topology import Topology
from baton.tests.engine.toy import ToyConfig
from baton.tests.engine.toy_engine import letters_tokenizer, request_of
from baton.tests.engine.toy_hybrid import ToyHybrid

EXACT = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
NUM_BASES, MAX_TOKENS, AT_ONCE = 5, 10, 32
PRESSURES = {
    1: {"preempt_at": (0, 4), "num_blocks": 400},
    2: {"overcommit": True, "num_blocks": 100, "preempt_at": (5,)},
    3: {"preempt_at": (0, 4), "num_blocks": 400, "host_kv_bytes": 4 << 20},
    4: {"preempt_at": (5,), "overcommit": True, "num_blocks": 100, "host_kv_bytes": 4 << 20, "num_checkpoints": 6},
}  # of k drafts a step


class Volume:
    """A model, prompts for it, and the tokens of each that it makes with everything off."""

    def __init__(self, model, tokenizer, vocab_size):
        self.model, self.tokenizer = model, tokenizer
        rng = random.Random(7)

        def some(length):
            return tuple(rng.randrange(vocab_size) for _ in range(length))

        self.bases = [some(rng.randrange(90, 140)) for _ in range(NUM_BASES)]
        self.forks = [
            [base[: len(base) * tenths // 10] + some(rng.randrange(20, 40)) for tenths in range(10)]
            for base in self.bases
        ]
        self.wanted = cache(self._wanted)

    def _wanted(self, prompt):
        engine = LocalEngine(
            self.model, self.tokenizer, num_blocks=16, block_size=16, num_draft_tokens=0, chunk_len=512,
            max_num_sequences=1, scheduling="sync",
        )  # fmt: skip
        return list(engine.generate([asked(prompt, 0)])[0].token_ids)

    def triples(self, count, seed):
        """A, B, A, and so on."""
        rng, made = random.Random(seed), []
        while len(made) < count:
            of = rng.randrange(NUM_BASES)
            first = rng.choice((self.bases[of], *self.forks[of]))
            made += [first, rng.choice(self.forks[of]), first]
        return made[:count]

    def topology(self, k):
        options = {"num_checkpoints": 24} | PRESSURES[k]
        return Topology(
            self.model, self.tokenizer, num_prefill=0, num_drafts=k, chunk_len=256, max_num_seqs=AT_ONCE,
            scheduling="async", **options,
        )  # fmt: skip


def asked(prompt, k, max_tokens=MAX_TOKENS):
    return request_of(prompt, k=k, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def volume_of(tokenizer):
    @cache
    def make(name):
        if name == "toy":
            return Volume(ToyHybrid(config=ToyConfig(max_model_len=256)), letters_tokenizer(), 22)
        return Volume(load_model(TINY.with_name(name), **EXACT), tokenizer, 4000)

    return make


def sizes(default, slow):
    """(model, requests, k): a small form, and one that is not for every day."""
    return [*default, *(pytest.param(*one, marks=pytest.mark.slow) for one in slow)]


@pytest.mark.parametrize(
    ("name", "count", "k"),
    sizes(
        [*(("toy", 96, k) for k in PRESSURES), ("tiny-hybrid", 40, 3)],
        [(*one, k) for one in (("toy", 1300), ("tiny-hybrid", 150)) for k in PRESSURES],
    ),
)
def test_everything_on_gives_the_tokens_of_everything_off(name, count, k, volume_of, capsys):
    volume, running, num_wrong, num_accepted = volume_of(name), deque(), 0, 0
    with volume.topology(k) as topology:
        prompts = volume.triples(count, k)
        for at in range(count + AT_ONCE + 8):
            if at < count:
                running.append((prompts[at], topology.start_local(asked(prompts[at], k))))
            if at >= AT_ONCE + 8 and running:
                prompt, one = running.popleft()
                outcome = topology.finish(one)
                assert outcome.error is None
                num_wrong += outcome.token_ids != volume.wanted(prompt)
                num_accepted += outcome.decode_stats.num_accepted_tokens
        assert not running
        topology.wait_idle(timeout_s=60.0)
        check_empty(*topology.decode)
        num_hits, counts = hits_of(*topology.decode), topology.decode[0].worker.engine.preemptions
        evicted = topology.decode[0].worker.inventory().num_state_checkpoints_evicted
    with capsys.disabled():
        print(
            f"\n{name} k={k}: {count} requests, {num_wrong} wrong, {num_hits} hits, {num_accepted} drafts accepted,"
            f" {counts.num_preemptions} preemptions, {evicted} checkpoints gave way"
        )
    assert num_wrong == 0
    assert num_hits >= count // 20 and counts.num_preemptions > 0 and num_accepted > 0


@pytest.mark.parametrize(("count", "k"), sizes([(70, k) for k in PRESSURES], [(2500, k) for k in PRESSURES]))
def test_aborts_wherever_requests_are_lose_nothing(count, k, volume_of, capsys):
    """So many aborts, each behind 0 to 3 things that a request said, while others go on. Then tokens are as before."""
    volume, rng, num_cut = volume_of("toy"), random.Random(k), 0
    with volume.topology(k) as topology:
        prompts = iter(volume.triples(4 * count, 50 + k))
        while num_cut < count:
            running = [topology.start_local(asked(next(prompts), k, max_tokens=60)) for _ in range(40)]
            rng.shuffle(running)
            for one in running:
                said = one[-1].events()
                for _ in range(rng.randrange(4)):
                    next(said, None)
                topology.cancel(one)
            for one in running:
                try:
                    deque(one[-1].events(), maxlen=0)
                except RequestCancelled:
                    num_cut += 1
            topology.wait_idle(timeout_s=60.0)
            check_empty(*topology.decode)
        with capsys.disabled():
            print(f"\nk={k}: {num_cut} aborts, nothing lost")
        after = [(prompt, topology.start_local(asked(prompt, k))) for prompt in volume.triples(12, 90)]
        for prompt, one in after:
            assert topology.finish(one).token_ids == volume.wanted(prompt)
        topology.wait_idle(timeout_s=60.0)
        check_empty(*topology.decode)
