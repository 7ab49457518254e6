"""Models with state under everything at once: shared prefixes, drafts, asynchronous steps, preemption, aborts.

Of peers' prefix caches for such models it is known that with MTP they change tokens without an error (vLLM #43559,
#53912). Here every request has the tokens of a run with none of it: no cache, no drafts, no chunks, one step after the
other. Prompts come as A, B, A, and share up to nine tenths of what came before, so checkpoints of state are stored,
found and evicted all the time; there are fewer blocks than requests want. Numbers are float64.
"""

import random

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.test_async_equals_sync import sizes_of
from baton.tests.e2e.topology import Topology

AT_ONCE = 32
MAX_TOKENS = 10
NUM_CHECKPOINTS = 6


@pytest.fixture(scope="module")
def model():
    return load_model(
        TINY.with_name("tiny-hybrid"),
        dtype=torch.float64,
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        with_mtp=True,
    )


def prompts_of(num_prompts, rng, vocab_size):
    """A, B, A, ...: each new one shares 0 to 90 % with one of those before it."""
    made = [[rng.randrange(vocab_size) for _ in range(rng.randrange(20, 150))] for _ in range(8)]
    found = []
    while len(found) < num_prompts:
        base = made[rng.randrange(len(made))]
        shared = base[: int(len(base) * rng.choice([0, 0.3, 0.5, 0.7, 0.9]))]
        other = shared + [rng.randrange(vocab_size) for _ in range(rng.randrange(8, 150 - len(shared)))]
        found += [tuple(base), tuple(other), tuple(base)]
        made[rng.randrange(len(made))] = other
    return found[:num_prompts]


def request_of(prompt, name, num_drafts):
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return GenerationRequest(
        key=AttemptKey(name, 1), prompt_token_ids=prompt, sampling=params, deadline_s=1e12, num_draft_tokens=num_drafts
    )


def plain_tokens(model, tokenizer, prompts):
    """Of each distinct prompt, with everything off."""
    engine = LocalEngine(model, tokenizer, **sizes_of(0, 4096, scheduling="sync"))
    distinct = list(dict.fromkeys(prompts))
    results = engine.generate([request_of(prompt, f"plain {at}", 0) for at, prompt in enumerate(distinct)])
    return dict(zip(distinct, (list(result.token_ids) for result in results), strict=True))


def topology_of(model, tokenizer, num_drafts, **options):
    """Few blocks, slots for half of what comes at once, few checkpoints."""
    return Topology(
        model,
        tokenizer,
        num_drafts=num_drafts,
        chunk_len=64,
        num_blocks=96,
        num_prefill_blocks=160,
        max_num_seqs=AT_ONCE // 2,
        num_checkpoints=NUM_CHECKPOINTS,
        overcommit=True,
        preempt_at=(0, 4),
        **options,
    )


def require_all_given_back(topology):
    """No block, slot or image is held, and no checkpoint is being filled or read."""
    topology.wait_idle(30.0)
    for side in (*topology.prefill, *topology.decode):
        scheduler = side.worker.engine.scheduler
        assert scheduler.allocator.state_slots.num_held == 0
        checkpoints = scheduler.allocator.index.checkpoints
        assert (checkpoints.num_filling, checkpoints.num_in_use) == (0, 0)
        assert side.worker.engine.num_state_images_used == side.worker.engine.num_host_blocks_used == 0


@pytest.mark.parametrize(
    ("num_requests", "num_drafts", "host_kv_bytes"),
    [
        (96, 3, 1 << 22),
        *(pytest.param(1280, k, (k % 2) << 22, marks=pytest.mark.slow) for k in (1, 2, 3, 4)),
    ],
)
def test_tokens_are_those_of_a_run_with_everything_off(num_requests, num_drafts, host_kv_bytes, model, tokenizer):
    rng = random.Random(num_drafts)
    prompts = prompts_of(num_requests, rng, model.config.vocab_size)
    wanted = plain_tokens(model, tokenizer, prompts)
    num_cached = num_hits = 0
    with topology_of(model, tokenizer, num_drafts, host_kv_bytes=host_kv_bytes) as topology:
        for first in range(0, num_requests, AT_ONCE):
            running = []
            for at, prompt in enumerate(prompts[first : first + AT_ONCE], first):
                start = topology.start_local if rng.random() < 0.5 else topology.start
                running.append((prompt, start(request_of(prompt, f"r{at}", num_drafts))))
            for prompt, one in running:
                outcome = topology.finish(one)
                assert outcome.error is None
                assert outcome.token_ids == wanted[prompt]
                cached = outcome.num_cached_tokens if outcome.first is None else outcome.first.num_cached_tokens
                num_hits, num_cached = num_hits + (cached > 0), num_cached + cached
        preemptions = topology.decode[0].worker.engine.preemptions
        require_all_given_back(topology)
        evicted = [
            side.worker.engine.scheduler.allocator.index.checkpoints.num_evicted
            for side in (*topology.prefill, *topology.decode)
        ]
    print(f"{num_requests} requests, k {num_drafts}: {num_hits} hits of {num_cached} tokens, {preemptions}, {evicted}")
    assert num_hits > num_requests // 10
    assert preemptions.num_preemptions > num_requests // 10
    assert min(evicted) > NUM_CHECKPOINTS, "checkpoints come and go"


@pytest.mark.parametrize("num_aborts", [96, pytest.param(10_000, marks=pytest.mark.slow)])
def test_aborts_at_any_moment_leak_nothing(num_aborts, model, tokenizer):
    """And a request that has their slots and checkpoints after them has the right tokens."""
    rng = random.Random(7)
    prompts = prompts_of(24, rng, model.config.vocab_size)
    wanted = plain_tokens(model, tokenizer, prompts)
    with topology_of(model, tokenizer, 3, host_kv_bytes=1 << 22) as topology:
        number = 0
        while number < num_aborts:
            running = []
            for prompt in rng.choices(prompts, k=AT_ONCE):
                start = topology.start_local if rng.random() < 0.5 else topology.start
                running.append((prompt, start(request_of(prompt, f"a{number}", 3))))
                number += 1
            kept = running.pop(rng.randrange(len(running)))
            rng.shuffle(running)
            for at, (_, one) in enumerate(running):
                if at % 4 == 0:  # some are in their steps by now, others wait
                    next(one[4].events(120.0), None) if one[3] is None else next(one[3].events(120.0), None)
                topology.cancel(one)
            outcome = topology.finish(kept[1])
            assert outcome.error is None
            assert outcome.token_ids == wanted[kept[0]]
        require_all_given_back(topology)
