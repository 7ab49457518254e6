"""A crowd over tiny-hybrid, with all at once that could spoil a state: not one token differs, nothing leaks.

Prompts come as A, B and A again, which share 0 to 90 % of A, some while others run and some later; the prefix cache,
drafts of 1 to 4, steps ahead of the host and preemption are on. In float64, against one run of each prompt with
everything off. The small forms run by default, the full ones are slow.
"""

import itertools
import random
import threading
from collections import deque
from functools import cache

import pytest
import torch

from baton.core.errors import RequestCancelled
from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.local import LocalEngine
from baton.kvcache.state_slots import StateSlots
from baton.kvtransfer.sender.service import PushService
from baton.model.loader import load_model
from baton.prefill_worker.worker import PrefillWorker
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import CORPUS
from baton.tests.e2e.test_state_prefixes import check_empty, hits_of
from baton.tests.e2e.topology import Topology

SHARES = (0, 10, 30, 50, 70, 80, 90)  # percent of A that B begins with
NUM_TOGETHER = 32
NUM_SUBMITTED = 40  # so that some wait in line
MAX_TOKENS = 8
CHUNK_LENS = (40, 150, 220, 300)  # of a step


@pytest.fixture(scope="module")
def model():
    path = TINY.with_name("tiny-hybrid")
    return load_model(path, dtype=torch.float64, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True)


class Texts:
    """Prompts cut from the corpus, and the answer to each with everything off, computed once."""

    def __init__(self, model, tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._ids = tokenizer.encode(CORPUS.read_text())
        self._answers = {}

    def cut(self, length, seed):
        start = random.Random(seed).randrange(len(self._ids) - length)
        return tuple(self._ids[start : start + length])

    @cache  # noqa: B019  one object a module
    def group(self, at):
        """A prompt, and those that share a part of it."""
        rng = random.Random(f"group {at}")
        first = self.cut(rng.randrange(74, 108), f"first {at}")
        return first, tuple(
            first[: len(first) * share // 100] + self.cut(rng.randrange(8, 40), f"{at} {share}") for share in SHARES
        )

    def stream(self, num_requests, num_groups):
        """A, B and A of one group after the other, up to sixty others between two of them."""
        rng, placed = random.Random(num_requests), []
        for turn in range(-(-num_requests // 3)):
            first, others = self.group(turn % num_groups)
            at = 3.0 * turn
            for prompt in (first, rng.choice(others), first):
                placed.append((at, prompt))
                at += rng.choice((0.0, rng.uniform(0, 60)))
        return [prompt for _, prompt in sorted(placed, key=lambda item: item[0])][:num_requests]

    def answers(self, prompts):
        """Of each prompt, in order."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._answers]
        engine = LocalEngine(
            self._model, self._tokenizer, num_blocks=128, block_size=16, num_draft_tokens=0, chunk_len=4096,
            max_num_sequences=8, scheduling="sync",
        )  # fmt: skip
        results = engine.generate([asked(prompt, f"off {at}", 0) for at, prompt in enumerate(missing)])
        self._answers |= {prompt: list(result.token_ids) for prompt, result in zip(missing, results, strict=True)}
        return [self._answers[prompt] for prompt in prompts]


@pytest.fixture(autouse=True)
def chunk_lens(monkeypatch):
    """Drawn, where those of a worker depend on how fast its steps are."""
    rng = random.Random(1)
    monkeypatch.setattr(ChunkBudget, "length", lambda *_: rng.choice(CHUNK_LENS))


@pytest.fixture(scope="module")
def texts(model, tokenizer):
    return Texts(model, tokenizer)


def asked(prompt, name, num_drafts):
    """Half of the prompts are answered greedily, the others by draws that the prompt decides."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    if sum(prompt) % 2:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_k=40, seed=sum(prompt))
    return GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=prompt,
        sampling=sampling,
        deadline_s=1e12,
        num_draft_tokens=num_drafts,
    )


def crowd(topology, prompts, num_drafts, abort_after=lambda at: None):
    """The outcome of each prompt; always some forty on their way.

    Args:
        topology: serves them; decode workers compute prompts if there is no prefill worker.
        prompts: in order.
        num_drafts: the most of a request; each asks for one at least.
        abort_after: of the request at that place, how many others start before it is cancelled; None: it is not.
    """
    start = topology.start if topology.prefill else topology.start_local
    running, outcomes, due = deque(), [], {}
    for at, prompt in enumerate(prompts):
        one = start(asked(prompt, f"on {at}", 1 + at % num_drafts))
        running.append(one)
        others = abort_after(at)
        if others is not None:
            due.setdefault(at + others, []).append(one)
        for late in due.pop(at, ()):
            topology.cancel(late)
        if len(running) == NUM_SUBMITTED:
            outcomes.append(topology.finish(running.popleft()))
    for late in itertools.chain.from_iterable(due.values()):
        topology.cancel(late)
    outcomes += [topology.finish(one) for one in running]
    topology.wait_idle()
    return outcomes


def wrong(outcomes, wanted):
    """Places of answers that are not those with everything off; one that was aborted may be a part of it."""
    return [
        at
        for at, (outcome, tokens) in enumerate(zip(outcomes, wanted, strict=True))
        if outcome.token_ids != (tokens if outcome.error is None else tokens[: len(outcome.token_ids)])
    ]


def check_checkpoints(*sides):
    """Every checkpoint that is kept belongs to a block that is there."""
    for side in sides:
        index = side.worker.engine.scheduler.allocator.index
        assert all(index.has(name) for name in index.checkpoints._kept)


PRESSURES = {  # by the most drafts of a step
    1: {"preempt_at": (2,)},
    2: {"num_blocks": 150, "overcommit": True, "preempt_at": (0, 3), "host_kv_bytes": 16 << 20},
    3: {"num_blocks": 150, "overcommit": True, "preempt_at": (5,), "num_checkpoints": 12},
    4: {"preempt_at": (5,), "host_kv_bytes": 64 << 20, "num_checkpoints": 64},
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_requests", [60, pytest.param(1260, marks=pytest.mark.slow)])
@pytest.mark.parametrize("k", PRESSURES)
def test_no_token_differs_from_everything_off(k, num_requests, model, tokenizer, texts):
    prompts = texts.stream(num_requests, num_groups=max(6, num_requests // 25))
    wanted = texts.answers(prompts)
    options = {
        "num_blocks": 600,
        "chunk_len": 480,
        "max_num_seqs": NUM_TOGETHER,
        "num_drafts": k,
    } | PRESSURES[k]
    with Topology(model, tokenizer, num_prefill=0, scheduling="async", **options) as topology:
        outcomes = crowd(topology, prompts, k)
        assert [outcome.error for outcome in outcomes] == [None] * num_requests
        assert not wrong(outcomes, wanted)
        check_empty(*topology.decode)
        check_checkpoints(*topology.decode)
        assert hits_of(*topology.decode) > num_requests / 8
        counts = topology.decode[0].worker.engine.preemptions
        assert counts.num_preemptions > num_requests / 4
        assert (counts.num_restored_blocks > 0) == ("host_kv_bytes" in PRESSURES[k])
    assert sum(outcome.decode_stats.num_accepted_tokens for outcome in outcomes if outcome.decode_stats) > num_requests


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_aborts", [100, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_aborts_at_random_points_leak_nothing(num_prefill, num_aborts, model, tokenizer, texts):
    """Each is cancelled when so many others have started; every tenth request runs to its end."""
    prompts = texts.stream(num_aborts * 10 // 9 + 1, num_groups=8)
    wanted, rng = texts.answers(prompts), random.Random(num_aborts)
    options = {"num_blocks": 220, "chunk_len": 480, "num_drafts": 3, "max_num_seqs": 24}
    pressure = {"overcommit": True, "preempt_at": (3,), "host_kv_bytes": 4 << 20}
    with Topology(model, tokenizer, num_prefill=num_prefill, **options, **pressure) as topology:
        outcomes = crowd(
            topology, prompts, 3, lambda at: rng.randrange(1 + rng.randrange(NUM_SUBMITTED)) if at % 10 else None
        )
        errors = [outcome.error for outcome in outcomes]
        assert all(error is None or isinstance(error, RequestCancelled) for error in errors)
        assert not any(errors[::10])
        assert sum(error is not None for error in errors) > num_aborts / 2
        assert not wrong(outcomes, wanted)
        check_empty(*topology.prefill, *topology.decode)
        check_checkpoints(*topology.prefill, *topology.decode)
        for side in (*topology.prefill, *topology.decode):
            allocator = side.worker.engine.scheduler.allocator
            assert allocator.num_free == allocator.num_blocks
            assert allocator.state_slots.num_free == allocator.state_slots.num_slots
            assert side.worker.engine.num_host_blocks_used == side.worker.engine.num_state_images_used == 0


class Delays:
    """Holds what a step pushes until the prefill worker has planned two steps more, or has none to plan."""

    def __init__(self, monkeypatch):
        self._changed, self._turn, self._is_idle = threading.Condition(), 0, False
        self.num_held = 0
        plan, push_part = PrefillWorker.plan, PushService._push_part

        def planned(worker):
            plan(worker)
            with self._changed:
                self._turn += 1
                self._is_idle = not worker.engine.scheduler.running()
                self._changed.notify_all()

        def held(service, part, layer):
            if layer == 0:  # the others are behind it
                with self._changed:
                    due = self._turn + 2
                    self.num_held += not self._is_idle
                    self._changed.wait_for(lambda: self._is_idle or self._turn >= due)
            return push_part(service, part, layer)

        monkeypatch.setattr(PrefillWorker, "plan", planned)
        monkeypatch.setattr(PushService, "_push_part", held)


@pytest.fixture
def num_taken(monkeypatch):
    """How often a state slot was taken, by the slots that it is one of."""
    counts, take = {}, StateSlots.take

    def counted(self):
        counts[id(self)] = counts.get(id(self), 0) + 1
        return take(self)

    monkeypatch.setattr(StateSlots, "take", counted)
    return counts


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_reuses", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_slot_that_changes_hands_spoils_nothing(num_reuses, model, tokenizer, texts, monkeypatch, num_taken):
    """Pushes are late, steps are in flight when a sequence ends or is cancelled, and slots are few."""
    delays = Delays(monkeypatch)
    prompts = texts.stream(num_reuses * 5 // 8 + 64, num_groups=8)
    prompts = [prompt[: None if at % 4 == 1 else 20] for at, prompt in enumerate(prompts)]
    wanted, rng = texts.answers(prompts), random.Random(num_reuses)
    options = {"num_blocks": 220, "chunk_len": 480, "num_drafts": 3, "max_num_seqs": 16}
    with Topology(model, tokenizer, **options) as topology:
        outcomes = crowd(topology, prompts, 3, lambda at: None if at % 4 else rng.randrange(NUM_SUBMITTED))
        assert all(outcome.error is None or at % 4 == 0 for at, outcome in enumerate(outcomes))
        assert not wrong(outcomes, wanted)
        check_empty(*topology.prefill, *topology.decode)
        slots = [side.worker.engine.scheduler.allocator.state_slots for side in (*topology.prefill, *topology.decode)]
        assert sum(num_taken[id(some)] - some.num_slots for some in slots) >= num_reuses
    assert delays.num_held > num_reuses / 10
