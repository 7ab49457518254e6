"""Which prompts a decode worker computes itself: the arithmetic under virtual time, and the router over real gRPC."""

import asyncio
import random
from dataclasses import replace

import grpc
import pytest

from baton.client import AsyncBatonClient
from baton.core.block_hash import block_hashes
from baton.core.clock import VirtualClock
from baton.core.errors import NoWorker, Overloaded, RequestDeadlineExceeded
from baton.core.requests.sampling import SamplingParams
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.router.admission.admission_queue import AdmissionQueue
from baton.router.placement.cost import CAUTIOUS_LEN, Loads, Pace, RequestNeeds, SentRequest, WorkerLoad, local_cost
from baton.router.placement.local_prefill import ALWAYS, AUTO, MODES, NEVER, ONLY_WAY, LocalPrefill
from baton.router.placement.members import Members
from baton.router.placement.policy import RoundRobin
from baton.router.placement.prefix_index import FleetPrefixIndex
from baton.router.placement.routing import make_policy
from baton.tests.router.fakes import TOKENIZER, cluster
from baton.tests.router.test_least_cost import BLOCK, Table, names_of, request
from baton.tests.router.test_prefix_feed import Cache, knows

pytestmark = pytest.mark.fast

PACE = {"fixed_s": 0.004, "per_token_s": 0.0001, "draft_s": 0.001}
SHORT, LONG = tuple(range(1000, 1012)), tuple(range(1000, 1400))


class Deployment(Table):
    """Workers whose measurements are alike: a step over prompts takes 4 ms and 0.1 ms a token."""

    def __init__(self, mode=AUTO, *, num_prefill=1, num_decode=1, routing="prefix"):
        super().__init__(num_prefill, num_decode, routing=routing)
        self.local = LocalPrefill(mode)
        self.policy = make_policy(routing, self.clock, random.Random(0), self.index, self.local)
        for at in range(num_prefill):
            self.say(f"p{at}", exposed=(10, 0.1))
        for at in range(num_decode):
            self.say(f"d{at}")

    def say(self, worker_id, *, pace=PACE, exposed=None, can_prefill=True, after_s=1.0, **inventory):
        member = self.beat(worker_id, state={"can_prefill": can_prefill and worker_id[0] == "d"}, **inventory)
        if pace is not None:
            member.state.inventory.prefill_pace.CopyFrom(worker_pb2.PrefillPace(**pace))
        if exposed is not None:
            member.state.inventory.transfer.transfers, member.state.inventory.transfer.exposed_seconds = exposed
        self.clock.advance(after_s)  # what was sent before is over
        return member

    def pick(self, prompt=SHORT, excluded=frozenset(), **asked):
        asking = request(prompt, **asked)
        return self.policy.pick(self.members.live("prefill"), self.members.live("decode"), excluded, asking)

    def picked(self, *args, **asked):
        """Who decodes, and how much of the prompt is expected to be cached."""
        pair = self.pick(*args, **asked)
        return pair.decode.state.worker_id, pair.expected_cached_len


def test_an_idle_decode_worker_computes_what_it_would_take_longer_to_hand_over():
    table = Deployment()
    for prompt in (SHORT, LONG):
        pair = table.pick(prompt)
        assert pair.is_local
        assert pair.decode.state.worker_id == "d0"
        table.say("d0")
    assert table.local.choices == {("local", "cheaper"): 2}


def test_a_decode_worker_with_streams_leaves_long_prompts_to_others():
    table = Deployment()
    busy = {"num_requests_running": 4, "local_chunk_len": 32, "num_requests_held": 4}
    table.say("d0", steps=(100, 0.5), **busy)
    assert not table.pick(LONG).is_local
    table.say("d0", steps=(200, 1.0), **busy)
    table.say("p0", exposed=(20, 0.6))  # 50 ms a hand-over lately
    assert table.pick(SHORT).is_local
    assert table.local.choices == {("split", "cheaper"): 1, ("local", "cheaper"): 1}


def test_a_prompt_that_is_mostly_cached_goes_to_where_it_is():
    table = Deployment()
    prompt = tuple(range(1000, 1000 + 24 * BLOCK + 4))
    table.say("p0", exposed=(20, 0.2))
    assert table.pick(prompt).is_local
    table.say("d0")
    incarnation = table.incarnation("p0")
    table.index.expect(incarnation, names_of(prompt), table.clock.now_s() + 100.0)
    pair = table.pick(prompt)
    assert not pair.is_local
    assert pair.expected_cached_len == 24 * BLOCK


CHAT = tuple(range(1000, 1000 + 24 * BLOCK + 4))  # 24 blocks, and a little more


@pytest.mark.parametrize("measured", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("mode", [AUTO, ALWAYS])
def test_of_decode_workers_the_one_that_has_most_of_a_prompt_computes_it(mode, measured):
    table = Deployment(mode, num_prefill=int(mode == ALWAYS), num_decode=2)
    for at, has_pace in enumerate(measured):
        table.say(f"d{at}", pace=PACE if has_pace else None)
    table.cache("d1", names_of(CHAT)[:20])
    table.cache("d0", names_of(CHAT)[:3])
    for _ in range(4):
        assert table.picked(CHAT) == ("d1", 20 * BLOCK)
        for at, has_pace in enumerate(measured):
            table.say(f"d{at}", pace=PACE if has_pace else None)
        table.clock.advance(60.0)  # what was expected is forgotten


def test_a_prefix_is_worth_its_time_and_no_more():
    table = Deployment(num_prefill=0, num_decode=2)
    table.cache("d1", names_of(CHAT)[:24])
    table.say("d1", num_prefill_tokens_queued=24 * BLOCK - 100)
    assert table.picked(CHAT) == ("d1", 24 * BLOCK)
    table.say("d1", num_prefill_tokens_queued=24 * BLOCK + 20_000)
    assert table.picked(CHAT) == ("d0", 0)


def test_decode_workers_that_cost_the_same_take_turns_at_random():
    table, found = Deployment(num_prefill=0, num_decode=2), set()
    for at in range(20):
        found.add(table.pick(tuple(range(5000 * at, 5000 * at + 40))).decode.state.worker_id)
        for worker_id in ("d0", "d1"):
            table.say(worker_id)
    assert found == {"d0", "d1"}


def test_a_prompt_at_a_decode_worker_is_its_tenants_and_the_last_token_is_computed():
    table = Deployment(num_prefill=0, num_decode=2)
    whole = CHAT[: 24 * BLOCK]
    table.cache("d1", names_of(whole, "a"))
    assert table.picked(whole, tenant="a") == ("d1", 23 * BLOCK)
    table.clock.advance(60.0)
    assert table.pick(whole, tenant="b").expected_cached_len == 0
    assert table.pick(whole).expected_cached_len == 0
    assert table.pick(whole, tenant="a", prompt_logprobs=1).expected_cached_len == 0


def test_prompts_follow_one_that_is_on_its_way_to_a_decode_worker():
    table = Deployment(num_prefill=0, num_decode=2)
    first = table.pick((*CHAT, 1)).decode.state.worker_id
    table.clock.advance(0.1)
    for worker_id in ("d0", "d1"):  # it is counted there, and its blocks are not heard of yet
        table.say(worker_id, num_prefill_tokens_queued=200 * (worker_id == first), after_s=0.0)
    assert table.picked((*CHAT, 2)) == (first, 24 * BLOCK)
    load = table.policy._loads.of(table.members._members[first])
    assert [item.num_tokens for item in load.sent] == [len(CHAT) + 1 - 24 * BLOCK]
    table.clock.advance(60.0)
    assert table.pick((*CHAT, 3)).expected_cached_len == 0, "it never came"


def test_a_decode_worker_that_has_most_of_a_prompt_keeps_it():
    table = Deployment()
    busy = {"num_requests_running": 4, "local_chunk_len": 32, "num_requests_held": 4}
    table.say("d0", steps=(100, 0.5), **busy)
    assert not table.pick(CHAT).is_local
    table.cache("d0", names_of(CHAT)[:24])
    table.say("d0", steps=(200, 1.0), **busy)
    table.clock.advance(60.0)  # the prefill worker is not expected to have it any more
    pair = table.pick(CHAT)
    assert (pair.is_local, pair.expected_cached_len) == (True, 24 * BLOCK)
    assert table.local.choices == {("split", "cheaper"): 1, ("local", "cheaper"): 1}


def test_a_decode_worker_that_has_measured_nothing_gets_the_short_rest_of_a_prompt():
    table = Deployment()
    table.say("d0", pace=None)
    table.say("p0", exposed=(20, 2.0))
    assert not table.pick(CHAT).is_local
    table.say("d0", pace=None)
    table.say("p0", exposed=(30, 4.0))
    table.clock.advance(60.0)
    table.cache("d0", names_of(CHAT))
    assert table.pick(CHAT).is_local


def test_before_the_workers_only_what_no_worker_has_counts():
    for mode, num_prefill, has_it, expected_len in (
        (AUTO, 0, "d1", 24 * BLOCK),
        (AUTO, 1, "d1", 24 * BLOCK),
        (ALWAYS, 1, "d1", 24 * BLOCK),
        (ALWAYS, 1, "p0", 0),
        (NEVER, 1, "d1", 0),
        (NEVER, 1, "p0", 24 * BLOCK),
    ):
        table = Deployment(mode, num_prefill=num_prefill, num_decode=2)
        table.cache(has_it, names_of(CHAT))
        live = table.members.live("prefill"), table.members.live("decode")
        assert table.policy.cached_len(*live, request(CHAT)) == expected_len, (mode, has_it)
        assert table.policy.cached_len(*live, request(CHAT, tenant="b")) == 0


def test_a_long_queue_at_the_prefill_worker_moves_prompts_and_a_long_one_here_does_not():
    table = Deployment()
    busy = {"num_requests_running": 4, "local_chunk_len": 32, "num_requests_held": 4}
    table.say("d0", steps=(100, 0.5), **busy)
    table.say("p0", exposed=(20, 0.2), num_prefill_tokens_queued=20_000, prefill_tokens_per_s=5000.0)
    table.say("p0", exposed=(20, 0.2), num_prefill_tokens_queued=200_000, prefill_tokens_per_s=5000.0)
    assert table.pick(LONG).is_local
    table.say("d0", num_prefill_tokens_queued=10_000_000)
    table.say("p0", exposed=(20, 0.2), num_prefill_tokens_queued=200_000, prefill_tokens_per_s=5000.0)
    assert not table.pick(LONG).is_local


def test_what_was_just_sent_counts():
    table = Deployment(num_decode=2)
    first, second = (table.pick(LONG).decode.state.worker_id for _ in range(2))
    assert {first, second} == {"d0", "d1"}


def test_a_decode_worker_that_has_measured_nothing_gets_short_prompts_one_at_a_time():
    table = Deployment()
    table.say("d0", pace=None)
    assert not table.pick(LONG).is_local
    table.say("p0", exposed=(20, 1.0))
    assert table.pick(SHORT).is_local
    assert not table.pick(SHORT).is_local, "one is on its way"
    assert table.local.choices["split", "not_known"] == 2


def test_a_decode_worker_that_has_measured_nothing_is_counted_as_slower():
    asked = RequestNeeds(prompt_len=CAUTIOUS_LEN, block_size=BLOCK)
    pace = Pace(0.004, 0.0001, 0.001)
    common = {"step_s": 0.005, "now_s": 0.0}
    known = local_cost(WorkerLoad(pace=pace), asked, assumed=None, **common)
    assumed = local_cost(WorkerLoad(), asked, assumed=pace, **common)
    assert assumed.compute_s == pytest.approx(2 * known.compute_s)
    assert local_cost(WorkerLoad(), asked, assumed=None, **common) is None
    assert (
        local_cost(WorkerLoad(), RequestNeeds(prompt_len=CAUTIOUS_LEN + 1, block_size=16), assumed=pace, **common)
        is None
    )
    must = local_cost(WorkerLoad(), asked, assumed=pace, is_must=True, **common)
    assert must == known, "one of them has to: it is taken for one like the others"
    nothing_known = local_cost(WorkerLoad(), asked, assumed=None, is_must=True, **common)
    assert nothing_known.compute_s == pytest.approx(CAUTIOUS_LEN / 10_000.0)


def test_the_parts_of_a_local_cost():
    load = WorkerLoad(pace=Pace(0.004, 0.0001, 0.0), num_running=2, local_chunk_len=32, tokens_queued=100)
    cost = local_cost(load, RequestNeeds(prompt_len=100, block_size=16), assumed=None, step_s=0.01, now_s=float("-inf"))
    assert cost.queue_s == pytest.approx(0.004 + 0.01)
    assert cost.compute_s == pytest.approx(4 * 0.004 + 0.01)
    assert cost.steps_s == pytest.approx(4 * 0.01)
    assert cost.charged_s == pytest.approx((0.25 + 2 * 0.25) * cost.compute_s)
    assert cost.total_s == pytest.approx(cost.queue_s + cost.compute_s + cost.steps_s + cost.charged_s)
    rest = local_cost(
        load, RequestNeeds(prompt_len=100, block_size=16), assumed=None, cached_len=64, step_s=0.01, now_s=float("-inf")
    )
    assert rest.compute_s == pytest.approx(2 * 0.004 + 36 * 0.0001)
    assert (rest.queue_s, rest.steps_s) == (cost.queue_s, pytest.approx(2 * 0.01))
    alone = WorkerLoad(pace=load.pace, tokens_queued=0)
    cost = local_cost(alone, RequestNeeds(prompt_len=100, block_size=16), assumed=None, step_s=0.01, now_s=0.0)
    assert (cost.queue_s, cost.steps_s) == (0.0, 0.0)
    assert cost.compute_s == pytest.approx(0.014)
    alone.sent.append(SentRequest(0.0, 0, 3))  # one that will decode
    cost = local_cost(alone, RequestNeeds(prompt_len=100, block_size=16), assumed=None, step_s=0.01, now_s=0.0)
    assert cost.steps_s > 0


def test_means_of_late_are_heard_from_sums():
    table = Deployment()
    loads = Loads()
    table.say("p0", exposed=(10, 0.1))
    assert loads.of(table.members._members["p0"]).exposed_s == pytest.approx(0.01)
    table.say("p0", exposed=(20, 0.5))
    assert loads.of(table.members._members["p0"]).exposed_s == pytest.approx(0.025)
    table.say("p0", exposed=(20, 0.5))
    load = loads.of(table.members._members["p0"])
    assert load.exposed_s == pytest.approx(0.025)
    assert load.pace == Pace(**PACE)
    table.say("p0", pace=None)
    assert loads.of(table.members._members["p0"]).pace is None


def test_that_no_prefill_worker_is_left_is_said_once_where_there_was_one(caplog):
    table = Deployment(AUTO, num_prefill=1, num_decode=1)
    local = table.local
    for _ in range(2):
        local.required([table.members._members["p0"]], [], frozenset())
        caplog.clear()
        for _ in range(2):
            local.required([], [], frozenset())
            local.chosen("local", ONLY_WAY)
        assert len(caplog.records) == 1
        local.chosen("split", "cheaper")


@pytest.mark.parametrize("routing", ["prefix", "least_cost", "round_robin"])
@pytest.mark.parametrize("mode", MODES)
def test_without_prefill_workers_it_is_the_only_way(routing, mode, caplog):
    table = Deployment(mode, num_prefill=0, num_decode=2, routing=routing)
    if mode == NEVER:
        with pytest.raises(NoWorker, match="no prefill worker"):
            table.pick()
        return
    table.say("d0", pace=None)
    table.say("d1", can_prefill=False)
    assert {table.pick(LONG).decode.state.worker_id for _ in range(3)} == {"d0"}
    assert table.local.choices == {("local", ONLY_WAY): 3}
    assert table.local.is_only_way
    assert not caplog.records, "it is meant"
    with pytest.raises(NoWorker):
        table.pick(excluded={(table.incarnation("d0"), table.incarnation("d0"))})
    table.say("p0")
    table.say("d0")
    table.pick()
    assert not table.local.is_only_way


@pytest.mark.parametrize("routing", ["prefix", "least_cost", "round_robin"])
def test_never_and_always(routing):
    table = Deployment(NEVER, routing=routing)
    assert not table.pick().is_local
    table = Deployment(ALWAYS, num_decode=2, routing=routing)
    table.say("d0", num_requests_running=8, steps=(10, 1.0))
    assert all(table.pick(LONG).is_local for _ in range(4))
    table.say("d0", can_prefill=False)
    table.say("d1", can_prefill=False)
    assert not table.pick().is_local, "nobody can"


def test_round_robin_compares_nothing_and_takes_turns():
    table = Deployment(AUTO, num_decode=2, routing="round_robin")
    assert not table.pick().is_local
    table = Deployment(ALWAYS, num_decode=2, routing="round_robin")
    assert [table.pick().decode.state.worker_id for _ in range(4)] == ["d0", "d1", "d0", "d1"]


def test_a_refused_pair_is_no_reason_to_refuse_a_request():
    table = Deployment()
    table.say("p0", exposed=(20, 0.1))
    table.say("d0", num_requests_running=8, steps=(10, 0.1), local_chunk_len=16)
    assert table.pick(LONG, {(table.incarnation("p0"), table.incarnation("d0"))}).is_local
    assert table.local.choices == {("local", "incompatible"): 1}


def test_a_policy_that_was_told_nothing_of_it_never_chooses_it():
    table = Deployment()
    for name in ("prefix", "least_cost", "round_robin"):
        policy = make_policy(name, table.clock, random.Random(0), FleetPrefixIndex())
        pair = policy.pick(table.members.live("prefill"), table.members.live("decode"), frozenset(), request(SHORT))
        assert not pair.is_local
    with pytest.raises(NoWorker):
        RoundRobin().pick([], table.members.live("decode"))


# The router, over real gRPC.


async def ask(running, text="ab", tenant="", **sampling):
    tokens, finish, seen = [], None, []
    async with AsyncBatonClient(running.address, timeout_s=20.0) as client:
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        async for chunk in client.generate(text, sampling=params, tenant=tenant):
            assert chunk.index == len(tokens) or not chunk.token_ids
            tokens += chunk.token_ids
            seen.append(chunk)
            if chunk.HasField("finish"):
                finish = chunk.finish
    return tokens, finish, seen


@pytest.mark.asyncio
async def test_an_answer_says_that_its_prompt_was_computed_where_it_was_decoded():
    async with cluster(0, 0, local_prefill=ALWAYS) as running:
        await running.add("prefill", "prefill-0")
        await running.add("decode", "decode-0", can_prefill=True)
        tokens, finish, _ = await ask(running, max_tokens=5)
        assert bytes(tokens) or tokens
        stats = finish.stats
        assert (stats.path, stats.prefill_worker, stats.decode_worker, stats.kv_data_path) == (
            "local",
            "",
            "decode-0",
            "",
        )
        assert stats.num_cached_tokens == stats.num_expected_cached_tokens == 0
        assert stats.output_len == len(tokens) == 5
        parts = stats.router_ms + stats.queue_ms + stats.grant_wait_ms + stats.prefill_ms + stats.publish_ms
        assert parts == pytest.approx(stats.ttft_ms, rel=0.01)
        prefill, decode = await running.idle()
        assert not prefill
        assert [seen.request.prefill_here for seen in decode] == [True]
        metrics = running.router.metrics.render()
        assert 'baton_answers_total{path="local"} 1.0' in metrics
        assert 'baton_prefill_choices_total{path="local",reason="always"} 1.0' in metrics
        status = await admin_pb2_grpc.AdminStub(running.channel).Status(admin_pb2.StatusRequest())
        assert status.local_prefill.mode == ALWAYS
        assert dict(status.local_prefill.num_choices) == {"local: always": 1}
        assert not status.local_prefill.only_way


@pytest.mark.asyncio
async def test_an_answer_says_what_its_decode_worker_had_of_the_prompt():
    text = "a prompt of three blocks and a little mor"
    token_ids = TOKENIZER.encode(text)
    names = {who: block_hashes(token_ids, model="m", tenant=who, block_size=BLOCK, with_mtp=False) for who in "ab"}
    async with cluster(0, 0, local_prefill=AUTO, routing="prefix") as running:
        workers = [await running.add("decode", f"decode-{at}", can_prefill=True) for at in range(2)]
        caches = [Cache(worker) for worker in workers]
        await caches[1].store(*names["a"])
        workers[1].num_cached_tokens = 32
        await knows(running, workers[0], [])
        await knows(running, workers[1], names["a"])
        for tenant, expected in (("a", 32), ("b", 0)):
            _, finish, _ = await ask(running, text, tenant=tenant, max_tokens=3)
            assert finish.stats.num_expected_cached_tokens == expected
            if tenant == "a":
                assert (finish.stats.decode_worker, finish.stats.num_cached_tokens) == ("decode-1", 32)
        _, seen = await running.idle()
        assert {one.request.tenant for one in seen} == {"a", "b"}


@pytest.mark.asyncio
async def test_both_workers_of_a_split_request_hear_whose_it_is():
    async with cluster() as running:
        await ask(running, tenant="a")
        prefill, decode = await running.idle()
        assert [one.request.tenant for one in (*prefill, *decode)] == ["a", "a"]


@pytest.mark.asyncio
async def test_a_request_that_ends_at_its_first_token():
    async with cluster(0, 0, local_prefill=AUTO) as running:
        await running.add("decode", "decode-0", can_prefill=True)
        running.script.finish_at_first = "stop"
        tokens, finish, _ = await ask(running)
        assert len(tokens) == 1
        assert (finish.reason, finish.stats.path, finish.stats.decode_worker) == ("stop", "local", "decode-0")
        await running.idle()


@pytest.mark.asyncio
async def test_a_router_without_prefill_workers_serves_and_says_so():
    async with cluster(0, 0, local_prefill=AUTO) as running:
        with pytest.raises(NoWorker):
            await ask(running)
        await running.add("decode", "decode-0", can_prefill=True)
        assert running.router.migration.serving
        _, finish, _ = await ask(running)
        assert finish.stats.path == "local"
        status = await admin_pb2_grpc.AdminStub(running.channel).Status(admin_pb2.StatusRequest())
        assert status.local_prefill.only_way
        assert dict(status.local_prefill.num_choices) == {f"local: {ONLY_WAY}": 1}


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", [AUTO, NEVER])
async def test_as_few_workers_as_may_be_asked_for(mode):
    async with cluster(0, 0, local_prefill=mode) as running:
        admin = admin_pb2_grpc.AdminStub(running.channel)
        sizes = [(1, 0), (0, 0)] + ([(0, 1)] if mode == NEVER else [])
        for num_prefill, num_decode in sizes:
            with pytest.raises(grpc.aio.AioRpcError, match=r"at least one decode|a prefill worker is needed"):
                await admin.Scale(admin_pb2.ScaleRequest(num_prefill=num_prefill, num_decode=num_decode))
        assert running.router.desired_state._scale.request is None
        await admin.Scale(admin_pb2.ScaleRequest(num_prefill=int(mode == NEVER), num_decode=1))
        assert running.router.desired_state._scale.request.num_decode == 1


@pytest.mark.asyncio
async def test_who_is_gone_is_in_the_status_until_the_deployment_is_scaled():
    async with cluster(0, 1, local_prefill=AUTO) as running:
        admin, members = admin_pb2_grpc.AdminStub(running.channel), running.router.members
        (gone,) = members.all()
        gone = replace(gone, state=type(gone.state)(), alive=False)
        gone.state.MergeFrom(members.all()[0].state)
        gone.state.worker_id = "decode-9"
        members._gone["decode-9"] = gone  # ten minutes later

        async def shown():
            status = await admin.Status(admin_pb2.StatusRequest())
            return {worker.state.worker_id: worker.alive for worker in status.workers}

        assert await shown() == {"decode-0": True, "decode-9": False}
        await admin.Scale(admin_pb2.ScaleRequest(num_prefill=0, num_decode=1))
        assert await shown() == {"decode-0": True}


@pytest.mark.asyncio
async def test_decode_workers_that_cannot_are_not_asked():
    async with cluster(0, 1, local_prefill=AUTO) as running:
        assert not running.router.migration.serving
        with pytest.raises(NoWorker, match="prefill"):
            await ask(running)


@pytest.mark.asyncio
@pytest.mark.parametrize("hangs", [True, False])
async def test_a_stream_goes_on_when_the_worker_that_does_it_all_dies(hangs):
    """Before its first token, or in the middle of its answer."""
    async with cluster(0, 0, local_prefill=AUTO) as running:
        for at in range(2):
            await running.add("decode", f"decode-{at}", can_prefill=True)
        running.script.prefill_hangs, running.script.decode_hangs_after = hangs, None if hangs else 3
        asking = asyncio.create_task(ask(running, max_tokens=9))
        async with asyncio.timeout(10.0):
            while not any(worker.running() for worker in running.workers):
                await asyncio.sleep(0.005)
            if not hangs:
                await asyncio.sleep(0.2)  # it may have said some; any number is right
        gone = next(worker for worker in running.workers if worker.running())
        running.script.prefill_hangs, running.script.decode_hangs_after = False, None
        running.workers.remove(gone)
        await gone.server.stop(None)
        tokens, finish, _ = await asyncio.wait_for(asking, 15.0)
        assert len(tokens) == 9
        assert finish.stats.num_migrations == 1
        assert finish.stats.decode_worker != gone.worker_id
        assert finish.stats.path == "local"


@pytest.mark.asyncio
async def test_when_the_last_prefill_worker_dies_its_streams_go_on_at_decode_workers():
    async with cluster(1, 0, local_prefill=AUTO) as running:
        await running.add("decode", "decode-0", can_prefill=True)
        running.script.prefill_hangs = True
        asking = asyncio.create_task(ask(running, max_tokens=9))
        prefill = running.of("prefill")[0]
        async with asyncio.timeout(10.0):
            while not prefill.running():
                await asyncio.sleep(0.005)
        running.script.prefill_hangs = False
        running.workers.remove(prefill)
        await prefill.server.stop(None)
        _, finish, _ = await asyncio.wait_for(asking, 15.0)
        assert (finish.stats.path, finish.stats.num_migrations) == ("local", 1)


@pytest.mark.asyncio
async def test_a_drained_prefill_worker_leaves_decode_workers_to_it():
    async with cluster(1, 0, local_prefill=AUTO) as running:
        await running.add("decode", "decode-0", can_prefill=True)
        drain = admin_pb2.DrainRequest(worker_id="prefill-0", grace_ms=0)
        await admin_pb2_grpc.AdminStub(running.channel).Drain(drain)
        assert running.router.migration.serving
        _, finish, _ = await ask(running)
        assert finish.stats.path == "local"


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_cancel_a_deadline_and_a_refusal_reach_the_one_worker():
    async with cluster(0, 0, local_prefill=AUTO) as running:
        await running.add("decode", "decode-0", can_prefill=True)
        running.script.prefill_hangs = True
        asking = asyncio.create_task(ask(running))
        async with asyncio.timeout(10.0):
            while not running.workers[0].running():
                await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await running.idle(5.0)
        assert running.workers[0].seen[0].cancelled
        with pytest.raises(RequestDeadlineExceeded):
            async with AsyncBatonClient(running.address, timeout_s=0.3) as client:
                async for _ in client.generate("ab", sampling=SamplingParams()):
                    pass
        await running.idle(5.0)
        running.script.prefill_hangs, running.script.prefill_error = False, Overloaded("full")
        with pytest.raises(Overloaded):
            await ask(running)


def test_a_member_of_another_life_is_another_pair():
    members = Members(VirtualClock(1.0))
    assert not LocalPrefill(AUTO).suffices(members.live("decode"))


@pytest.mark.asyncio
async def test_a_worker_that_computes_prompts_itself_is_told_how_much_waits(monkeypatch):
    monkeypatch.setattr(AdmissionQueue, "num_queued_tokens", lambda _: 1234)
    for mode, told in ((ALWAYS, 1234), (NEVER, 0)):
        async with cluster(1, 0, local_prefill=mode, max_wait_s=None) as running:
            await running.add("decode", "decode-0", can_prefill=True)
            await ask(running, max_tokens=2)
            _, decode = await running.idle()
            assert [seen.request.num_queued_tokens for seen in decode] == [told]
