"""Prompts that are too long for a hand-off: routed by what decode workers report, computed there, never a 400."""

import grpc
import pytest

from baton.core.errors import HandoffTooLong, InvalidRequest
from baton.kvtransfer.receiver.driver import STAGING_KEY
from baton.kvtransfer.sender.service import Denied
from baton.prefill_worker.worker import error_of
from baton.proto import kv_pb2, worker_pb2
from baton.router.placement.local_prefill import AUTO, NEVER
from baton.router.placement.routing import LEAST_COST, PREFIX, ROUND_ROBIN
from baton.tests.router.fakes import cluster
from baton.tests.router.test_gate import text_of, until
from baton.tests.router.test_local_prefill import ask

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]
LIMIT_LEN = 8
LONG, SHORT = "x" * 20, "hi"


class Pair:
    """A prefill and a decode worker, the latter with little staging memory."""

    def __init__(self, routing=ROUND_ROBIN, mode=AUTO, limit_len=LIMIT_LEN, data_path="", **decode):
        self._config = {"routing": routing, "local_prefill": mode}
        self._limit_len, self._data_path = limit_len, data_path
        self._decode = {"can_prefill": True} | decode

    async def __aenter__(self):
        self._context = cluster(0, 0, **self._config)
        running = self.running = await self._context.__aenter__()
        prefill = await running.add("prefill", "prefill-0", max_model_len=128)
        decode = await running.add("decode", "decode-0", max_model_len=128, **self._decode)
        prefill.inventory = {"num_blocks": 1000, "num_blocks_free": 1000}
        decode.inventory = prefill.inventory | {"max_handoff_len": self._limit_len}
        members = running.router.members

        def is_heard():
            inventories = [members.live(role)[0].state.inventory for role in ("prefill", "decode")]
            return all(one.num_blocks == 1000 for one in inventories)

        await until(is_heard)
        if self._data_path:
            state = members.live("decode")[0].state
            path = worker_pb2.KvPath(
                kv_address=state.kv_address, epoch=state.kv_epoch or state.epoch, data_path=self._data_path
            )
            members.live("prefill")[0].state.inventory.transfer.paths.append(path)
        return running

    async def __aexit__(self, *error):
        await self._context.__aexit__(*error)


async def path_of(running, text):
    before = [len(worker.seen) for worker in running.workers]
    await ask(running, text=text, max_tokens=4)
    asked = [len(worker.seen) - num for worker, num in zip(running.workers, before, strict=True)]
    return {(1, 1): "split", (0, 1): "local"}[tuple(asked)]


@pytest.mark.parametrize("routing", [ROUND_ROBIN, LEAST_COST, PREFIX])
@pytest.mark.long
async def test_what_no_hand_off_can_carry_is_computed_by_the_decode_worker(routing):
    async with Pair(routing) as running:
        assert await path_of(running, LONG) == "local"
        if routing == ROUND_ROBIN:  # the others compare costs
            assert await path_of(running, SHORT) == "split"


@pytest.mark.parametrize(("data_path", "path"), [("raw", "local"), ("inline", "local"), ("nvlink", "split")])
@pytest.mark.long
async def test_a_data_path_that_needs_no_staging_carries_anything(data_path, path):
    async with Pair(data_path=data_path) as running:
        running.silent.update(("prefill-0", "decode-0"))
        assert await path_of(running, LONG) == path


async def test_a_decode_worker_without_a_limit_is_preferred():
    async with Pair() as running:
        other = await running.add("decode", "decode-1", max_model_len=128, can_prefill=True)
        other.inventory = {"num_blocks": 1000, "num_blocks_free": 1000}
        await until(lambda: len(running.router.members.live("decode")) == 2)
        for _ in range(3):
            await ask(running, text=LONG, max_tokens=4)
        assert len(other.seen) == 3
        assert not any(seen.request.prefill_here for seen in other.seen)


async def test_where_decode_workers_compute_nothing_the_error_names_the_key():
    async with Pair(mode=NEVER, data_path="raw") as running:
        running.silent.update(("prefill-0", "decode-0"))
        with pytest.raises(HandoffTooLong, match="kv_staging_mib") as refused:
            await ask(running, text=LONG, max_tokens=4)
        assert not isinstance(refused.value, InvalidRequest)
        assert refused.value.fields["limit"] == LIMIT_LEN
        assert await text_of(running) == "hello world"


async def test_a_data_path_that_is_not_known_yet_is_tried_where_nothing_else_is_left():
    async with Pair(mode=NEVER) as running:
        assert await path_of(running, LONG) == "split"


@pytest.mark.parametrize("mode", [AUTO, NEVER])
async def test_a_refusal_that_no_report_told_of_moves_the_request(mode):
    """The decode worker's incoming transfer says it when blocks are granted."""
    denied = Denied(None, kv_pb2.Deny.TOO_LONG, f"{STAGING_KEY}: a prompt of 20 tokens does not fit")
    async with Pair(mode=mode, limit_len=0) as running:
        running.script.attempt_errors = {1: error_of(denied)}
        if mode == AUTO:
            await ask(running, text=LONG, max_tokens=4)
            assert [seen.request.prefill_here for seen in running.of("decode")[0].seen] == [False, True]
        else:
            with pytest.raises(HandoffTooLong, match="kv_staging_mib"):
                await ask(running, text=LONG, max_tokens=4)


async def test_over_http_it_is_no_400():
    assert HandoffTooLong.http_status == 503
    assert HandoffTooLong.grpc_code == grpc.StatusCode.UNAVAILABLE.name
