"""Each request, answer and token is counted once: neither twice nor not at all, however the request ends."""

import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import BatonError, InvalidRequest, TransferFailed
from baton.core.requests.sampling import SamplingParams
from baton.router import inference
from baton.router.attempt.migration import MigrationConfig
from baton.tests.router.fakes import TOKENIZER, cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
PROMPT, ANSWER = "hi", "hello world"
NAMES = ("requests_finished", "requests_failed", "answers", "prompt_tokens", "generation_tokens", "cached_tokens")
MOVES = ("migrations", "handoff_retries")


async def ask(running, n=1, **options):
    """What ended it, if that was an error."""
    sampling = SamplingParams(max_tokens=64, temperature=0.0, n=n)
    async with AsyncBatonClient(running.address, timeout_s=60.0) as client:
        try:
            async for _ in client.generate(PROMPT, sampling=sampling, **options):
                pass
        except BatonError as error:
            return error
    return None


def counted(running):
    return {name: running.router.metrics.total(name) for name in (*NAMES, *MOVES) if running.router.metrics.total(name)}


def of(num_requests, num_answers, **more):
    return {
        "requests_finished": num_requests,
        "answers": num_answers,
        "prompt_tokens": num_requests * len(TOKENIZER.encode(PROMPT)),
        "generation_tokens": num_answers * len(TOKENIZER.encode(ANSWER)),
    } | more


async def test_what_ends_well_is_counted_once():
    async with cluster() as running:
        assert counted(running) == {}
        assert await ask(running) is None
        assert counted(running) == of(1, 1)
        assert await ask(running, n=3) is None
        assert counted(running) == of(2, 4)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.long
async def test_what_fails_is_counted_once(n, monkeypatch):
    async with cluster() as running:
        assert await ask(running, n, model="another") is not None
        assert counted(running) == {"requests_failed": 1}

        def broken(*_):
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(inference.InferenceService, "check_model", broken)
            assert type(await ask(running, n)).__name__ == "InternalError"
        assert counted(running) == {"requests_failed": 2}
        running.script.prefill_error = InvalidRequest("odd")
        assert await ask(running, n) is not None
        assert counted(running).get("requests_finished", 0) == 0
        assert counted(running)["requests_failed"] == 3


async def test_an_attempt_after_the_first_is_counted_once_and_its_tokens_too():
    async with cluster(2, 2, migration=MigrationConfig()) as running:
        running.script.attempt_errors = {1: TransferFailed("lost on the way")}
        assert await ask(running) is None
        assert counted(running) == of(1, 1, handoff_retries=1)
