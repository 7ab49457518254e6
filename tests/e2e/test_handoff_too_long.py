"""A prompt that no hand-off can carry is computed by the decode worker, to the same tokens."""

import pytest

from baton.core.errors import HandoffTooLong
from baton.core.kv_transports import is_one_sided
from baton.core.requests.sampling import SamplingParams
from baton.router.placement.local_prefill import AUTO, NEVER
from baton.tests.e2e.served import served

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LIMIT_LEN = 16
PROMPT = tuple(range(40, 100))


async def limited(running, worker_id="decode-0"):
    """As a GPU worker with little staging memory reports; its pairs have used a data path already."""
    running.sides[worker_id].incoming.staging_len = LIMIT_LEN
    running.router.members.heartbeat(running._state(running.sides[worker_id]))


async def test_a_long_prompt_is_computed_where_it_is_decoded(load_tiny, tokenizer):
    async with served(load_tiny(), tokenizer, 1, 1, local_prefill=AUTO) as running:
        (split,) = await running.ask(GREEDY, PROMPT)
        await limited(running)
        (local,) = await running.ask(GREEDY, PROMPT)
        (short,) = await running.ask(GREEDY, PROMPT[:LIMIT_LEN])
    assert (split.stats.path, local.stats.path, short.stats.path) == ("split", "local", "split")
    assert local.token_ids == split.token_ids


async def test_where_it_may_not_be_the_error_names_the_key(load_tiny, tokenizer):
    async with served(load_tiny(), tokenizer, 1, 1, local_prefill=NEVER) as running:
        (before,) = await running.ask(GREEDY, PROMPT)
        await limited(running)
        assert before.reason
        running.router.members.heartbeat(running._state(running.sides["prefill-0"]))
        (path,) = running.router.members.live("prefill")[0].state.inventory.transfer.paths
        assert not is_one_sided(path.data_path)
        with pytest.raises(HandoffTooLong, match="kv_staging_mib"):
            await running.ask(GREEDY, PROMPT)
