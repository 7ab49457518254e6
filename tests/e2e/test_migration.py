"""Deaths of workers under real streams, in float64: every answer is the one without the fault, to the last report.

Requests of every kind run at once on two prefill and two decode workers; one worker dies at a chosen moment. Who it
had goes on at the others; the others' streams notice nothing; what the survivors hold comes back.
"""

import asyncio
import random

import pytest

from baton.core.requests.sampling import SamplingParams
from baton.router.attempt.migration import MigrationConfig
from baton.tests.e2e.features import SCHEMA
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.served import served

pytestmark = pytest.mark.asyncio
NUM_TOKENS = 14
KINDS = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "seed": 7},
    "penalties, logprobs": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.7,
        "logprobs": 3,
        "prompt_logprobs": 1,
    },
    "schema": {"temperature": 0.0, "grammar": SCHEMA, "ignore_eos": False, "max_tokens": 30, "logprobs": 1},
    "stop string": {"temperature": 0.0},
    "bad words, min tokens": {"temperature": 0.0, "min_tokens": 9},
    "several": {"temperature": 1.0, "seed": 11, "n": 2},
    "sampled schema": {"temperature": 1.0, "seed": 5, "grammar": SCHEMA, "ignore_eos": False, "max_tokens": 30},
}


@pytest.fixture
def model(load_tiny):
    return load_tiny()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    found = token_prompts(tokenizer, 8 + len(KINDS), seed=4, max_len=120)[-len(KINDS) :]
    return [(*prompt, 5, 6, 7) for prompt in found]


@pytest.fixture(scope="module")
def expected(load_tiny, tokenizer, prompts):
    """(sampling, prompt, the answers without a fault) by kind."""

    async def ask():
        async with served(load_tiny(), tokenizer, 1, 1) as running:
            (plain,) = await running.ask(sampling_of({"temperature": 0.0}), prompts[4])
            (other,) = await running.ask(sampling_of({"temperature": 0.0}), prompts[5])
            # The stop string begins well before the cut in the middle, and ends well after it.
            kinds = KINDS | {
                "stop string": {"temperature": 0.0, "stop": (tokenizer.decode(plain.token_ids[4:11]),)},
                "bad words, min tokens": {
                    **KINDS["bad words, min tokens"],
                    "bad_words": (tuple(other.token_ids[5:8]), (other.token_ids[10],)),
                    "stop_token_ids": tuple(other.token_ids[2:4]),
                },
            }
            samplings = [sampling_of(values) for values in kinds.values()]
            asked = zip(samplings, prompts, strict=True)
            answers = await asyncio.gather(*(running.ask(*one) for one in asked))
            await running.wait_idle()
        return dict(zip(kinds, zip(samplings, prompts, answers, strict=True), strict=True))

    return asyncio.run(ask())


def sampling_of(values):
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | values))


class Streams:
    """One stream of every kind."""

    def __init__(self, running, expected):
        self.expected = expected
        self.running = running
        self.answers = {kind: {} for kind in expected}
        self.tasks = {
            kind: asyncio.create_task(running.ask(sampling, prompt, self.answers[kind]))
            for kind, (sampling, prompt, _) in expected.items()
        }

    async def held(self):
        """Until nobody has more than what the hold lets pass: each answer is held, or at its end."""
        num_answers = sum(len(whole) for _, _, whole in self.expected.values())
        async with asyncio.timeout(30.0):
            while self._num_ended() + len(self.running.hold.held) < num_answers:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # what was let pass arrives

    def _num_ended(self):
        return sum(answer.reason != "" for answers in self.answers.values() for answer in answers.values())

    async def check(self):
        """All end as without the fault; returns how many of their answers moved, by kind."""
        moved = {}
        for kind, task in self.tasks.items():
            got = await task
            for answer, want in zip(got, self.expected[kind][2], strict=True):
                assert answer.token_ids == want.token_ids, kind
                assert (answer.text, answer.reason) == (want.text, want.reason), kind
                check_reports(answer.logprobs, want.logprobs)
                check_reports(answer.prompt_logprobs, want.prompt_logprobs)
                stats = answer.stats
                assert (stats.prompt_len, stats.output_len) == (want.stats.prompt_len, len(want.token_ids))
                assert stats.num_decode_tokens + 1 + stats.num_forced_tokens == stats.output_len
                assert (stats.num_forced_tokens > 0) <= (stats.num_migrations > 0)
            moved[kind] = sum(answer.stats.num_migrations for answer in got)
        return moved


def check_reports(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)


@pytest.mark.parametrize("dead", ["decode-0", "decode-1"])
@pytest.mark.parametrize("num_tokens", [1, 7, 13])
async def test_a_decode_worker_dies(model, tokenizer, expected, num_tokens, dead):
    async with served(model, tokenizer) as running:
        running.hold.num_tokens = num_tokens
        streams = Streams(running, expected)
        await streams.held()
        incarnation = next(one.incarnation for one in members(running) if one.state.worker_id == dead)
        num_held = running.router.migration.in_flight_requests.num_at(incarnation)
        assert num_held >= 2
        await running.kill(dead)
        running.hold.open()
        moved = await streams.check()
        assert sum(moved.values()) == num_held, moved
        await running.wait_idle()


@pytest.mark.parametrize("moment", ["before the first token", "before its hand-off is known", "after its hand-off"])
async def test_a_prefill_worker_dies(model, tokenizer, expected, moment):
    async with served(model, tokenizer) as running:
        running.hold.first_token = moment != "before the first token"
        running.hold.done = moment == "after its hand-off"
        running.hold.num_tokens = 5 if moment == "after its hand-off" else 1
        streams = Streams(running, expected)
        if running.hold.first_token:
            await streams.held()
            if running.hold.done:
                await nobody_is_at(running, "prefill-0")
        else:
            async with asyncio.timeout(30.0):
                while (
                    sum(running.router.migration.in_flight_requests.num_at(one.incarnation) for one in members(running))
                    < 18
                ):
                    await asyncio.sleep(0.01)
        await running.kill("prefill-0")
        await nobody_is_at(running, "prefill-0")  # it is noticed before anything else is heard
        running.hold.open()
        moved = await streams.check()
        assert (sum(moved.values()) == 0) == (moment == "after its hand-off"), moved
        await running.wait_idle()


def members(running):
    return running.router.members.all()


async def nobody_is_at(running, worker_id):
    """Wait until no attempt depends on a worker."""
    incarnation = next(one.incarnation for one in members(running) if one.state.worker_id == worker_id)
    async with asyncio.timeout(10.0):
        while running.router.migration.in_flight_requests.num_at(incarnation):
            await asyncio.sleep(0.01)


async def test_a_prefill_worker_dies_while_it_pushes(model, tokenizer, expected):
    async with served(model, tokenizer) as running:
        streams = Streams(running, expected)
        async with asyncio.timeout(30.0):
            while not running.sides["prefill-0"].worker.inventory().num_kv_receives:
                await asyncio.sleep(0.001)
        await running.kill("prefill-0")
        await streams.check()
        await running.wait_idle()


async def test_a_decode_worker_is_silent(model, tokenizer, expected):
    """It lives on behind its fence: what it says late reaches nobody, and it gives everything back."""
    async with served(model, tokenizer, alive_s=0.8) as running:
        running.hold.num_tokens = 6
        streams = Streams(running, expected)
        await streams.held()
        running.silence("decode-0")
        async with asyncio.timeout(10.0):
            while len(running.router.members.live("decode")) == 2:
                await asyncio.sleep(0.02)
        running.hold.open()
        moved = await streams.check()
        assert sum(moved.values()) >= 3
        await running.wait_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_is_drained(model, tokenizer, expected, role):
    async with served(model, tokenizer) as running:
        running.hold.num_tokens = 6
        streams = Streams(running, expected)
        await streams.held()
        running.router.migration.drains.begin(f"{role}-0", 0.0)
        await nobody_is_at(running, f"{role}-0")
        running.hold.open()
        moved = await streams.check()
        assert (sum(moved.values()) > 0) == (role == "decode")
        (answer,) = await running.ask(*expected["greedy"][:2])
        assert answer.token_ids == expected["greedy"][2][0].token_ids
        await running.wait_idle()
        incarnation = next(one.incarnation for one in members(running) if one.state.worker_id == f"{role}-0")
        assert running.router.migration.in_flight_requests.num_at(incarnation) == 0


async def test_two_deaths_in_a_row(model, tokenizer, expected):
    """Who was at both decode workers goes on a second time."""
    config = MigrationConfig(quarantine_deaths=0)
    async with served(model, tokenizer, migration=config) as running:
        running.hold.num_tokens = 4
        streams = Streams(running, expected)
        await streams.held()
        await running.kill("decode-0")
        await running.add("decode", "decode-2")
        await asyncio.sleep(0.1)
        await running.kill("decode-1")
        running.hold.open()
        moved = await streams.check()
        assert sum(moved.values()) >= 8, moved
        await running.wait_idle()


async def test_without_another_worker_a_stream_waits_for_one(model, tokenizer, expected):
    async with served(model, tokenizer, 1, 1) as running:
        running.hold.num_tokens = 5
        streams = Streams(running, {kind: expected[kind] for kind in ("greedy", "several")})
        await streams.held()
        await running.kill("decode-0")
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in streams.tasks.values())
        await running.add("decode", "decode-1")
        running.hold.open()
        assert await streams.check() == {"greedy": 1, "several": 2}
        await running.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_faults_at_random_moments(model, tokenizer, expected, seed):
    """Rounds of streams under one fault each, anywhere in their lives; a worker that is gone is replaced."""
    rng = random.Random(seed)
    config = MigrationConfig(quarantine_deaths=0)
    async with served(model, tokenizer, migration=config, alive_s=0.8) as running:
        for number in range(12):
            streams = Streams(running, expected)
            await asyncio.sleep(rng.random() * 0.6)
            worker_id = rng.choice(sorted(running.sides))
            fault = rng.choice(["kill", "silence", "drain"])
            if fault == "kill":
                await running.kill(worker_id)
            elif fault == "silence":
                running.silence(worker_id)
            else:
                running.router.migration.drains.begin(worker_id, 0.0)
            await streams.check()
            await running.wait_idle()
            if fault != "kill":
                await running.kill(worker_id)
            await running.add(worker_id.partition("-")[0], f"{worker_id.partition('-')[0]}-{number + 10}")
