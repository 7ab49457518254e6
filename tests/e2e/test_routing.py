"""Real workers behind a real router: requests go where their prefix is cached, and the answer says what happened."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.client import AsyncBatonClient
from baton.core.clock import MonotonicClock
from baton.core.config import WorkerConfig
from baton.core.errors import WorkerLost
from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.decode_worker.node import DecodeNode
from baton.prefill_worker.node import PrefillNode
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.wire import change_from_proto, error_from_rpc
from baton.router.placement.cost import LAG_S, Pace, WorkerLoad
from baton.router.placement.local_prefill import AUTO, NEVER
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer
from baton.tests.e2e.conftest import TINY
from baton.tests.inside import node_channel
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.harness import prompt

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
GROUPS = [tuple(range(300 + 100 * group, 381 + 100 * group)) for group in range(4)]  # five blocks and a token


def worker_config(worker_id, router_address, **changes):
    values = {
        "worker_id": worker_id,
        "model_path": str(TINY),
        "model_name": "tiny",
        "num_draft_tokens": 1,
        "numerics": Numerics.DEFAULT,
        "dtype": "float32",
        "device": "cpu",
        "block_size": 16,
        "kv_memory_mib": 8,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 8,
        "max_queue_len": 64,
        "chunk_len": 64,
        "max_model_len": 512,
        "host": "127.0.0.1",
        "router_address": router_address,
        "num_threads": 1,
    }
    return WorkerConfig(**{**values, **changes})


@asynccontextmanager
async def deployment(routing, num_prefill=2, num_decode=1, *, path=TINY, state_checkpoint_interval=0, **changes):
    """A router and workers that report to it."""
    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        max_queue_len=64,
        request_timeout_s=60.0,
        routing=routing,
        **{"alive_s": 30.0} | changes,  # one process has all: where it is busy, no worker is lost
    )
    router = RouterServer(config, ServedModel.from_directory("tiny", path, weights="checkpoint"))
    await router.start()
    fatal = []
    nodes = []
    model = {"model_path": str(path), "state_checkpoint_interval": state_checkpoint_interval}
    try:
        address = f"127.0.0.1:{router.port}"
        for at in range(num_prefill):
            node = await asyncio.to_thread(PrefillNode, worker_config(f"prefill-{at}", address, **model), fatal.append)
            nodes.append(node)
        for at in range(num_decode):
            node = await asyncio.to_thread(DecodeNode, worker_config(f"decode-{at}", address, **model), fatal.append)
            nodes.append(node)
        async with asyncio.timeout(20):
            while len(router.members.live("prefill")) + len(router.members.live("decode")) < num_prefill + num_decode:
                await asyncio.sleep(0.02)
        yield router, nodes, address
    finally:
        for node in nodes:
            await asyncio.to_thread(node.close)
        await router.stop(0.0)
        assert not fatal


async def ask(address, token_ids, **options):
    """The stats of one answer."""
    async with AsyncBatonClient(address, timeout_s=60.0) as client:
        async for chunk in client.generate(token_ids=token_ids, sampling=GREEDY, **options):
            if chunk.HasField("finish"):
                return chunk.finish.stats
    raise AssertionError("no finish")


async def heard(router, nodes):
    """Wait until the router's index is what the workers that it watches hold."""
    watched = [node for node in nodes if is_prefill(node) or router.config.local_prefill != NEVER]
    async with asyncio.timeout(10):
        while True:
            held = {node.state().worker_id: node.worker.block_log.since(-1) for node in watched}
            told = {
                incarnation.worker_id: router.prefixes.names(incarnation)
                for incarnation in router.prefixes.incarnations()
            }
            if told == {name: {n for part in parts for n in part.stored} for name, parts in held.items()}:
                return told
            await asyncio.sleep(0.01)


async def told_idle(router):
    """Wait until the router has heard from every prefill worker that nothing is queued: a report may be a step old."""
    async with asyncio.timeout(10):
        while any(m.state.inventory.num_prefill_tokens_queued for m in router.members.live("prefill")):
            await asyncio.sleep(0.01)


async def told_all_idle(router):
    """Wait until every worker has reported, after all that it was sent, that it has nothing to do and uses no block.

    A step in flight has the blocks of a request that ended until it is over, and that counts against the worker.
    """
    members, asked_s = router.members, MonotonicClock().now_s() + LAG_S
    async with asyncio.timeout(10):
        while any(
            member.heartbeat_s <= asked_s
            or member.state.inventory.num_requests_held
            or member.state.inventory.num_requests_running
            or member.state.inventory.num_prefill_tokens_queued
            or member.state.inventory.num_blocks_free < member.state.inventory.num_blocks
            for member in (*members.live("prefill"), *members.live("decode"))
        ):
            await asyncio.sleep(0.01)


@pytest.fixture
def equal_workers(monkeypatch):
    """To the router all workers are equally fast, whatever this machine does meanwhile."""
    hear = WorkerLoad.hear

    def hear_equal(load, member):
        hear(load, member)
        load.pace, load.step_s = Pace(0.004, 0.0001, 0.0), 0.005

    monkeypatch.setattr(WorkerLoad, "hear", hear_equal)


def is_prefill(node):
    return isinstance(node, PrefillNode)


async def test_requests_follow_their_prefix_and_say_so():
    async with deployment("prefix") as (router, nodes, address):
        first = [await ask(address, (*prompt, 7, 8, 9)) for prompt in GROUPS]
        assert [(stats.num_cached_tokens, stats.num_expected_cached_tokens) for stats in first] == [(0, 0)] * 4
        told = await heard(router, nodes)
        assert sum(map(len, told.values())) == 4 * 5
        again = [await ask(address, (*prompt, 10, 11, 12 + at)) for at, prompt in enumerate(GROUPS * 2)]
        assert [stats.prefill_worker for stats in again] == [stats.prefill_worker for stats in first] * 2
        assert {(stats.num_cached_tokens, stats.num_expected_cached_tokens) for stats in again} == {(80, 80)}
        assert {(stats.routing, stats.path, stats.decode_worker) for stats in again} == {
            ("prefix", "split", "decode-0")
        }
        assert {stats.kv_data_path for stats in again} <= {"shm", "raw"}
        assert all(stats.kv_bytes_pushed > 0 for stats in again)
        await told_idle(router)
        inventories = [node.worker.inventory() for node in nodes if is_prefill(node)]
        busy = [inventory for inventory in inventories if inventory.num_prefix_tokens]
        assert busy
        assert all(inventory.prefill_tokens_per_s > 0 for inventory in busy)


async def test_a_worker_that_is_gone_leaves_nothing_in_the_index():
    async with deployment("prefix", alive_s=3.0) as (router, nodes, address):
        stats = [await ask(address, prompt) for prompt in GROUPS[:2]]
        await heard(router, nodes)
        gone = next(node for node in nodes if node.state().worker_id == stats[0].prefill_worker)
        nodes.remove(gone)
        await asyncio.to_thread(gone.close)
        await heard(router, nodes)
        other = await ask(address, GROUPS[0])
        assert other.prefill_worker != stats[0].prefill_worker
        assert other.num_expected_cached_tokens == other.num_cached_tokens


async def test_without_prefill_workers_requests_follow_their_prefix(equal_workers):
    async with deployment("prefix", 0, 2, local_prefill=AUTO) as (router, nodes, address):
        first = []
        for prompt in GROUPS:
            first.append(await ask(address, (*prompt, 7, 8, 9), tenant="a"))
            await told_all_idle(router)
        assert [(stats.num_cached_tokens, stats.num_expected_cached_tokens) for stats in first] == [(0, 0)] * 4
        told = await heard(router, nodes)
        assert sum(map(len, told.values())) == 4 * 5
        for at, prompt in enumerate(GROUPS * 2):
            stats = await ask(address, (*prompt, 10, 11, 12 + at), tenant="a")
            assert stats.decode_worker == first[at % 4].decode_worker
            assert (stats.num_cached_tokens, stats.num_expected_cached_tokens) == (80, 80)
            assert (stats.routing, stats.path) == ("prefix", "local")
            await told_all_idle(router)
        for tenant in ("b", ""):
            stats = await ask(address, (*GROUPS[0], 10, 11), tenant=tenant)
            assert (stats.num_cached_tokens, stats.num_expected_cached_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("num_prefill", "interval", "shared_len", "hits", "num_left"),
    [(0, 0, 83, (0, 0, 80, 80), 15), (1, 0, 83, (0, 0, 80, 80), 15), (1, 64, 150, (0, 64, 144, 144), 18)],
)
async def test_of_a_model_with_state_the_hit_that_is_predicted_is_found(
    num_prefill, interval, shared_len, hits, num_left, tmp_path, equal_workers
):
    """Groups of prompts that part at a block's end: the second leaves the checkpoint that the third begins with."""
    path = write_checkpoint(tmp_path / "hybrid", kind="qwen3_5", layers=3, tokenizer=True)
    local = AUTO if num_prefill == 0 else NEVER
    options = {"local_prefill": local, "state_checkpoint_interval": interval}
    async with deployment("prefix", num_prefill, 1, path=path, **options) as (router, nodes, address):
        found = []
        for at in range(4):
            for group in range(3):
                shared, own = prompt(shared_len, seed=group).tolist(), prompt(40, seed=10 * group + at + 3).tolist()
                stats = await ask(address, (*shared, *own))
                found.append((stats.num_cached_tokens, stats.num_expected_cached_tokens))
                await (told_idle(router) if num_prefill else told_all_idle(router))
                await heard(router, nodes)
        assert found == [(hit, hit) for hit in hits for _ in range(3)]
        assert {node.state().prefix_naming.checkpoint_interval for node in nodes} == {interval}
        held = [node.worker.inventory() for node in nodes if is_prefill(node) or not num_prefill]
        assert sum(one.num_state_checkpoints for one in held) == num_left
        assert all(one.num_state_checkpoint_slots > num_left and not one.num_state_checkpoints_evicted for one in held)


async def test_another_life_of_a_decode_worker_holds_nothing(equal_workers):
    async with deployment("prefix", 0, 2, local_prefill=AUTO) as (router, nodes, address):
        stats = await ask(address, GROUPS[0])
        assert any((await heard(router, nodes)).values())
        gone = next(node for node in nodes if node.state().worker_id == stats.decode_worker)
        nodes.remove(gone)
        await asyncio.to_thread(gone.close)
        reborn = await asyncio.to_thread(DecodeNode, worker_config(stats.decode_worker, address), pytest.fail)
        nodes.append(reborn)
        assert set((await heard(router, nodes)).values()) == {frozenset()}
        assert {incarnation.epoch for incarnation in router.prefixes.incarnations()} == {node.epoch for node in nodes}
        stats = await ask(address, GROUPS[0])
        assert (stats.num_cached_tokens, stats.num_expected_cached_tokens) == (0, 0)


async def test_what_a_decode_worker_received_is_found_when_the_prefill_worker_is_gone():
    async with deployment("prefix", 1, 1, local_prefill=AUTO, alive_s=3.0) as (router, nodes, address):
        stats = await ask(address, (*GROUPS[0], 7), tenant="a", split_only=True)
        assert (stats.path, stats.num_cached_tokens) == ("split", 0)
        told = await heard(router, nodes)
        assert told["prefill-0"] == told["decode-0"]
        assert len(told["decode-0"]) == 5
        await asyncio.to_thread(nodes.pop(0).close)
        await heard(router, nodes)
        stats = await ask(address, (*GROUPS[0], 8), tenant="a")
        assert (stats.path, stats.num_cached_tokens, stats.num_expected_cached_tokens) == ("local", 80, 80)
        stats = await ask(address, (*GROUPS[0], 8), tenant="b")
        assert (stats.path, stats.num_cached_tokens, stats.num_expected_cached_tokens) == ("local", 0, 0)


async def test_a_reader_who_thinks_of_another_life_is_refused():
    async with deployment("least_cost", num_prefill=1) as (_, nodes, address):
        await ask(address, GROUPS[0])
        state = nodes[0].state()
        async with grpc.aio.insecure_channel(state.address) as channel:
            stub = worker_pb2_grpc.PrefillStub(node_channel(channel, nodes[0]))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.WatchPrefixes(worker_pb2.WatchPrefixesRequest(epoch=state.epoch + 1)):
                    pass
            assert isinstance(error_from_rpc(refused.value), WorkerLost)
            call = stub.WatchPrefixes(worker_pb2.WatchPrefixesRequest(epoch=state.epoch, version=77))
            async for message in call:
                change = change_from_proto(message)
                assert (change.cleared, change.version, len(change.stored)) == (True, 5, 5)
                break
            call.cancel()


async def test_round_robin_and_least_cost_know_nothing_of_prefixes():
    for routing in ("round_robin", "least_cost"):
        async with deployment(routing) as (router, _, address):
            stats = [await ask(address, GROUPS[0]) for _ in range(4)]
            assert {each.routing for each in stats} == {routing}
            assert {each.num_expected_cached_tokens for each in stats} == {0}
            assert router.prefixes.incarnations() == ()
            if routing == "round_robin":
                assert {each.prefill_worker for each in stats} == {"prefill-0", "prefill-1"}
