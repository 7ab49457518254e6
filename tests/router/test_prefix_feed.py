"""The feed of the prefix index over real streams that skip, break, lie and end."""

import asyncio

import grpc
import pytest

from baton.core.block_hash import BlockChange
from baton.kvcache.block_log import BlockLog
from baton.proto import worker_pb2
from baton.proto.wire import change_to_proto
from baton.router.placement import prefix_index
from baton.router.placement.local_prefill import AUTO, NEVER
from baton.tests.router.fakes import EPOCHS, cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]
NAMES = [bytes([at]) * 16 for at in range(9)]


class Cache:
    """What one incarnation of a fake worker says of its prefixes."""

    def __init__(self, worker, ring_len=100):
        self.log = BlockLog(ring_len)
        self.asked = []  # versions
        self.skip = 0  # so many changes are lost on the way
        self.broken = 0  # so many streams end at once
        self.changed = asyncio.Event()
        worker.naming = worker_pb2.PrefixNaming(model="m", block_size=16)
        worker.watch = self.serve

    async def serve(self, request, context):
        self.asked.append((request.epoch, request.version))
        if self.broken:
            self.broken -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        version = request.version
        while True:
            self.changed.clear()
            for change in self.log.since(version):
                version = change.version
                if self.skip:
                    self.skip -= 1
                else:
                    await context.write(change_to_proto(change))
            await self.changed.wait()

    async def store(self, *names):
        for name in names:
            self.log.stored(name)
        self.changed.set()


async def knows(running, worker, names, timeout_s=5.0):
    """Wait until the router thinks that a worker holds just these."""
    async with asyncio.timeout(timeout_s):
        while (found := held(running, worker)) != frozenset(names):
            await asyncio.sleep(0.005)
    return found


def held(running, worker):
    incarnations = {incarnation.worker_id: incarnation for incarnation in running.router.prefixes.incarnations()}
    incarnation = incarnations.get(worker.worker_id)
    return None if incarnation is None else running.router.prefixes.names(incarnation)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(prefix_index, "PAUSE_S", 0.02)
    monkeypatch.setattr(prefix_index, "MAX_PAUSE_S", 0.05)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.long
async def test_what_is_missed_is_asked_for_from_where_the_router_is(role):
    async with cluster(routing="prefix", local_prefill=AUTO) as running:
        worker = running.of(role)[0]
        cache = Cache(worker)
        await cache.store(*NAMES[:2])
        await knows(running, worker, NAMES[:2])
        cache.skip = 1
        await cache.store(NAMES[2])
        async with asyncio.timeout(5):
            while cache.skip:
                await asyncio.sleep(0.005)
        await cache.store(NAMES[3])
        await knows(running, worker, NAMES[:4])
        assert cache.asked == [(worker.epoch, 0), (worker.epoch, 2)]
        assert running.router.prefixes.num_gaps == 1
        assert f'baton_prefix_index_blocks{{worker="{role}-0"}} 4.0' in running.router.metrics.render()
        assert "baton_prefix_index_gaps_total 1.0" in running.router.metrics.render()


@pytest.mark.long
async def test_a_stream_that_breaks_is_opened_again_and_what_is_forgotten_comes_whole():
    async with cluster(routing="prefix") as running:
        worker = running.of("prefill")[0]
        cache = Cache(worker, ring_len=2)
        cache.broken = 3
        await cache.store(*NAMES[:6])
        await knows(running, worker, NAMES[:6])
        assert cache.asked == [(worker.epoch, 0)] * 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.long
async def test_another_life_begins_with_nothing(role):
    async with cluster(routing="prefix", local_prefill=AUTO) as running:
        worker = running.of(role)[0]
        await Cache(worker).store(NAMES[0])
        await knows(running, worker, NAMES[:1])
        before = worker.epoch
        worker.epoch = next(EPOCHS)
        cache = Cache(worker)
        await knows(running, worker, [])
        await cache.store(NAMES[1])
        await knows(running, worker, NAMES[1:2])
        assert cache.asked[0] == (worker.epoch, 0)
        assert before not in [incarnation.epoch for incarnation in running.router.prefixes.incarnations()]


@pytest.mark.long
async def test_a_silent_worker_is_dropped_and_a_worker_that_comes_back_is_read_anew():
    async with cluster(routing="prefix", alive_s=0.3) as running:
        worker = running.of("prefill")[0]
        cache = Cache(worker)
        await cache.store(NAMES[0])
        await knows(running, worker, NAMES[:1])
        running.silent.add(worker.worker_id)
        async with asyncio.timeout(5):
            while held(running, worker) is not None:
                await asyncio.sleep(0.01)
        running.silent.clear()
        await knows(running, worker, NAMES[:1])
        assert [version for _, version in cache.asked] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["length", "unimplemented"])
async def test_a_worker_that_cannot_say_it_is_left_alone_and_still_served(wrong):
    async with cluster(routing="prefix") as running:
        worker = running.of("prefill")[0]
        cache = Cache(worker)

        async def malformed(request, context):
            cache.asked.append(request.version)
            message = change_to_proto(BlockChange(after=0, version=1))
            message.name_bytes = 7
            await context.write(message)

        worker.watch = malformed if wrong == "length" else None
        await knows(running, worker, [])
        await asyncio.sleep(0.3)
        assert len(cache.asked) == (wrong == "length"), "it is not asked again and again"
        assert running.router.members.live("prefill")


@pytest.mark.parametrize("mode", [NEVER, AUTO])
@pytest.mark.long
async def test_decode_workers_are_watched_where_they_may_compute_prompts(mode):
    async with cluster(routing="prefix", local_prefill=mode) as running:
        caches = [Cache(worker) for worker in running.workers]
        for cache in caches:
            await cache.store(NAMES[0])
        asked = [worker for worker in running.workers if mode == AUTO or worker.role == "prefill"]
        for worker in asked:
            await knows(running, worker, NAMES[:1])
        running.router._feed.follow()
        assert {incarnation.worker_id for incarnation in running.router.prefixes.incarnations()} == {
            worker.worker_id for worker in asked
        }


@pytest.mark.long
async def test_other_policies_ask_nobody():
    async with cluster(routing="least_cost") as running:
        cache = Cache(running.of("prefill")[0])
        await asyncio.sleep(0.3)
        assert (cache.asked, running.router.prefixes.incarnations()) == ([], ())
