"""Costs and the policies that go by them: pure, under virtual time."""

import dataclasses
import random
from collections import Counter

import pytest

from baton.core.block_hash import TURN_LEN, BlockChange, block_hashes, checkpoint_name
from baton.core.clock import VirtualClock
from baton.core.errors import ConfigInvalid, NoWorker, WorkersIncompatible
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.proto import worker_pb2
from baton.router.placement import least_cost
from baton.router.placement.cost import (
    LAG_S,
    NO_EDGE_S,
    STALE_S,
    CostWeights,
    Edge,
    Loads,
    RequestNeeds,
    SentRequest,
    WorkerLoad,
    decode_cost,
    edge_cost,
    prefill_cost,
)
from baton.router.placement.least_cost import LeastCost
from baton.router.placement.local_prefill import LocalPrefill
from baton.router.placement.members import Members
from baton.router.placement.policy import Pair
from baton.router.placement.prefix_index import FleetPrefixIndex
from baton.router.placement.routing import data_path_of, make_policy

pytestmark = pytest.mark.fast
BLOCK = 16
PROMPT = tuple(range(1000, 1000 + 10 * BLOCK + 5))


def request(prompt=PROMPT, tenant="", **sampling):
    return GenerationRequest(
        key=AttemptKey("r", 1),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        deadline_s=1e9,
        tenant=tenant,
    )


def names_of(prompt, tenant=""):
    return block_hashes(prompt, model="m", tenant=tenant, block_size=BLOCK, with_mtp=False)


class Table:
    """A table of workers that heartbeats are written into by hand."""

    def __init__(self, num_prefill=2, num_decode=2, *, routing="prefix", seed=0):
        self.clock = VirtualClock(100.0)
        self.members = Members(self.clock, alive_s=1e9)
        self.index = FleetPrefixIndex()
        self.policy = make_policy(routing, self.clock, random.Random(seed), self.index)
        for at in range(num_prefill):
            self.beat(f"p{at}")
        for at in range(num_decode):
            self.beat(f"d{at}")

    def beat(self, worker_id, *, epoch=1, paths=(), steps=None, state=None, naming=None, **inventory):
        role = "prefill" if worker_id[0] == "p" else "decode"
        message = worker_pb2.WorkerState(
            worker_id=worker_id,
            role=role,
            epoch=epoch,
            address="h:1",
            kv_address=f"tcp://{worker_id}" if role == "decode" else "",
            max_model_len=4096,
            block_size=BLOCK,
            max_num_seqs=8,
            kv_bytes_per_position=1000.0,
            inventory=worker_pb2.Inventory(**{"num_blocks": 100, "num_blocks_free": 100, **inventory}),
        )
        message.prefix_naming.CopyFrom(worker_pb2.PrefixNaming(model="m", block_size=BLOCK, **(naming or {})))
        if role == "prefill":
            message.inventory.transfer.paths.extend(paths)
        for name, value in (state or {}).items():
            setattr(message, name, value)
        if steps is not None:
            message.inventory.steps.step_seconds.counts.append(steps[0])
            message.inventory.steps.step_seconds.total = steps[1]
        known = self.members._members.get(worker_id)
        if known is None:
            self.members.heartbeat(message)
        else:
            known.state, known.heartbeat_s = message, self.clock.now_s()
        member = self.members._members[worker_id]
        self.index.join(member.incarnation)
        return member

    def incarnation(self, worker_id):
        return self.members._members[worker_id].incarnation

    def cache(self, worker_id, names):
        version = self.index.version(self.incarnation(worker_id))
        change = BlockChange(after=version, version=version + len(names), stored=tuple(names))
        assert self.index.apply(self.incarnation(worker_id), change)

    def pick(self, asked=None, excluded=frozenset()):
        pair = self.policy.pick(self.members.live("prefill"), self.members.live("decode"), excluded, asked or request())
        return pair

    def names(self, asked=None, excluded=frozenset()):
        pair = self.pick(asked, excluded)
        return pair.prefill.state.worker_id, pair.decode.state.worker_id


def test_nobody_is_always_first_among_equals_and_a_seed_repeats():
    def picks(seed):
        found = []
        for _ in range(60):
            table = Table(3, 2, seed=seed)
            table.policy._rng = rng
            found.append(table.names())
        return found

    rng = random.Random(1)
    first = picks(1)
    assert len(set(first)) == 6
    assert min(Counter(first).values()) >= 3
    rng = random.Random(1)
    assert picks(1) == first


@pytest.mark.parametrize("routing", ["least_cost", "prefix"])
def test_a_burst_between_two_heartbeats_is_spread(routing):
    table = Table(4, 4, routing=routing)
    for at in range(40):
        picked = table.pick(request(tuple(range(5000 * at, 5000 * at + 400))))
        assert picked.expected_cached_len == 0
    sent = {name: len(table.policy._loads.of(table.members._members[name]).sent) for name in ("p0", "p1", "p2", "p3")}
    assert set(sent.values()) == {10}
    assert {len(table.policy._loads.of(member).sent) for member in table.members.live("decode")} == {10}


def test_a_queue_is_weighed_by_the_workers_own_rate():
    table = Table(2, 1)
    table.beat("p0", num_prefill_tokens_queued=4000, prefill_tokens_per_s=40_000.0)
    table.beat("p1", num_prefill_tokens_queued=1000, prefill_tokens_per_s=1_000.0)
    assert table.names()[0] == "p0"
    table.beat("p1", num_prefill_tokens_queued=0, prefill_tokens_per_s=1_000.0)
    table.beat("p0", num_prefill_tokens_queued=40_000, prefill_tokens_per_s=40_000.0)
    assert table.names()[0] == "p1"


def test_who_was_not_measured_is_taken_as_the_mean_of_the_others():
    table = Table(3, 1)
    table.beat("p0", num_prefill_tokens_queued=200, prefill_tokens_per_s=2_000.0)
    table.beat("p1", num_prefill_tokens_queued=1000, prefill_tokens_per_s=1_000.0)
    table.beat("p2", num_prefill_tokens_queued=100)
    assert table.names()[0] == "p0", "165 tokens at 2000/s behind 0.1 s, against 1500/s behind 0.067 s"
    table.beat("p2", num_prefill_tokens_queued=10)
    assert table.names()[0] == "p2"


def test_a_rate_that_is_not_measured_again_is_forgotten():
    """A worker whose only prompt came while it was cold is slow in the table, and idle: it must get another one."""
    table = Table(2, 1)
    finished = 0
    table.beat("p1", prefill_tokens_per_s=500.0, num_requests_finished=1)
    picked = Counter()
    for _ in range(80):
        finished += 1
        table.beat("p0", prefill_tokens_per_s=1_000.0, num_requests_finished=finished)
        table.beat("p1", prefill_tokens_per_s=500.0, num_requests_finished=1)
        table.policy._loads.of(table.members._members["p0"]).sent.clear()
        picked[table.names()[0], table.clock.now_s() < 100.0 + STALE_S] += 1
        table.policy._loads.of(table.members._members["p1"]).sent.clear()
        table.clock.advance(1.0)
    assert picked["p1", True] == 0, "it is believed at first"
    assert picked["p1", False] > 10, "then they are equals"
    table.beat("p1", prefill_tokens_per_s=500.0, num_requests_finished=2)
    table.beat("p0", prefill_tokens_per_s=1_000.0, num_requests_finished=finished + 1)
    assert table.names()[0] == "p0", "it was measured again, and is as slow as it was"


def test_so_are_those_of_decode_workers_where_they_alone_compute_prompts():
    """As with `--prefill 0`: what one of two was seen to take while it was cold is not held against it for ever."""
    table, finished, picked = Table(0, 2), 0, Counter()
    table.policy = make_policy("prefix", table.clock, random.Random(3), table.index, LocalPrefill("auto"))

    def beat(name, factor, count):
        pace = worker_pb2.PrefillPace(fixed_s=0.01 * factor, per_token_s=1e-4 * factor, draft_s=0.0)
        inventory = {"prefill_pace": pace, "num_requests_finished": count}
        table.beat(name, state={"can_prefill": True}, steps=(count, 0.02 * factor * count), **inventory)

    for _ in range(80):
        finished += 1
        beat("d0", 1.0, finished)
        beat("d1", 3.0, 1)
        for name in ("d0", "d1"):
            table.policy._loads.of(table.members._members[name]).sent.clear()
        picked[table.names()[1], table.clock.now_s() < 100.0 + STALE_S] += 1
        table.clock.advance(1.0)
    assert picked["d1", True] == 0, "it is believed at first"
    assert picked["d1", False] > 10, "then they are equals"


def test_canaries_see_every_worker_in_turn_whatever_they_cost():
    """Runbooks go on until each worker has answered; the dearest would never be picked."""
    table = Table(3, 2)
    table.beat("p0", prefill_tokens_per_s=10_000.0, num_requests_finished=9)
    table.beat("p1", prefill_tokens_per_s=10.0, num_requests_finished=9, num_prefill_tokens_queued=10_000)
    asked = dataclasses.replace(request(), split_only=True)
    seen = [table.names(asked) for _ in range(6)]
    assert len(set(seen)) == 6, "every pair"
    refused = {(table.incarnation("p0"), table.incarnation("d0")), (table.incarnation("p0"), table.incarnation("d1"))}
    assert {table.names(asked, refused)[0] for _ in range(4)} == {"p1", "p2"}


def test_canaries_see_every_decode_worker_in_turn_where_there_are_no_others():
    table = Table(0, 3)
    table.policy = make_policy("prefix", table.clock, random.Random(3), table.index, LocalPrefill("auto"))
    for name, factor in (("d0", 1.0), ("d1", 100.0), ("d2", 3.0)):
        pace = worker_pb2.PrefillPace(fixed_s=0.01 * factor, per_token_s=1e-4 * factor, draft_s=0.0)
        table.beat(name, state={"can_prefill": True}, prefill_pace=pace, num_requests_finished=9)
    assert table.names() == ("d0", "d0"), "it is the cheapest by far"
    asked = dataclasses.replace(request(), split_only=True)
    assert {table.names(asked) for _ in range(3)} == {(name, name) for name in ("d0", "d1", "d2")}


def test_what_was_sent_wears_off_at_the_workers_rate_and_with_its_next_heartbeat():
    load = WorkerLoad(heartbeat_s=100.0, tokens_queued=1000, tokens_per_s=1000.0)
    load.sent.append(SentRequest(100.1, 500, 32))
    asked = RequestNeeds(prompt_len=100, block_size=BLOCK)

    def queue_s(now_s):
        return prefill_cost(load, asked, tokens_per_s=1000.0, cached_len=0, now_s=now_s).queue_s

    assert [round(queue_s(100.0 + age), 3) for age in (0.1, 1.0, 1.5, 9.0)] == [1.4, 0.5, 0.0, 0.0]
    table = Table(1, 1)
    table.pick()
    load = table.policy._loads.of(table.members._members["p0"])
    assert (load.tokens_sent, load.blocks_sent) == (len(PROMPT), 11)
    table.clock.advance(LAG_S / 2)
    table.beat("p0")
    assert table.policy._loads.of(table.members._members["p0"]).tokens_sent, (
        "it may not have arrived when that was sent"
    )
    table.clock.advance(2 * LAG_S)
    table.beat("p0")
    assert not table.policy._loads.of(table.members._members["p0"]).tokens_sent


def test_a_cached_prefix_is_worth_its_tokens_and_little_more():
    table = Table(2, 1)
    table.cache("p1", names_of(PROMPT)[:5])
    table.beat("p0", prefill_tokens_per_s=1000.0)
    table.beat("p1", prefill_tokens_per_s=1000.0, num_prefill_tokens_queued=5 * BLOCK)
    picked = table.pick()
    assert (picked.prefill.state.worker_id, picked.expected_cached_len) == ("p1", 5 * BLOCK)
    table = Table(2, 1)
    table.cache("p1", names_of(PROMPT)[:5])
    table.beat("p0", prefill_tokens_per_s=1000.0)
    table.beat("p1", prefill_tokens_per_s=1000.0, num_prefill_tokens_queued=7 * BLOCK)
    assert table.names()[0] == "p0"


def test_least_cost_alone_pays_no_heed_to_prefixes():
    table = Table(2, 1, routing="least_cost")
    table.cache("p1", names_of(PROMPT))
    table.beat("p0", prefill_tokens_per_s=1000.0)
    table.beat("p1", prefill_tokens_per_s=1000.0, num_prefill_tokens_queued=1)
    picked = table.pick()
    assert (picked.prefill.state.worker_id, picked.expected_cached_len) == ("p0", 0)


def test_the_last_token_is_computed_anyway_and_tenants_and_logprobs_share_nothing():
    table = Table(2, 1)
    whole = PROMPT[: 10 * BLOCK]
    table.cache("p1", names_of(whole))
    assert len(names_of(whole)) == 10
    assert table.pick(request(whole)).expected_cached_len == 9 * BLOCK
    assert table.pick(request(whole, tenant="other")).expected_cached_len == 0
    assert table.pick(request(whole, prompt_logprobs=1)).expected_cached_len == 0
    assert table.pick(request(whole[:1])).expected_cached_len == 0


def test_prompts_that_begin_alike_follow_one_that_is_still_on_its_way():
    table = Table(2, 1)
    first = table.names(request((*PROMPT, 1)))[0]
    picked = table.pick(request((*PROMPT, 2)))
    assert picked.prefill.state.worker_id == first
    assert picked.expected_cached_len == 10 * BLOCK
    table.clock.advance(60.0)
    assert table.pick(request((*PROMPT, 3))).expected_cached_len == 0, "it never came"


def test_a_full_cache_costs_what_is_pushed_out_of_it():
    table = Table(2, 1)
    table.cache("p0", names_of(tuple(range(95 * BLOCK))))
    for _ in range(5):
        assert table.names(request(PROMPT))[0] == "p1", "there is room"
        table.beat("p1")


def test_a_batch_and_blocks_in_use_cost_a_decode_worker():
    asked = RequestNeeds(prompt_len=5 * BLOCK, block_size=BLOCK)

    def cost(**values):
        load = WorkerLoad(**{"num_blocks": 100, "num_blocks_free": 100, "max_num_seqs": 8, **values})
        return decode_cost(load, asked, step_s=0.01, weights=CostWeights(answer_steps=100))

    assert cost() == pytest.approx(0.06)
    assert cost(num_blocks_free=50) == pytest.approx(0.56)
    assert cost(num_blocks_free=3) == pytest.approx(1.03 + 0.5)
    assert cost(num_sequences=4) == pytest.approx(0.56)
    assert cost(num_sequences=12) == pytest.approx(1.5 + 0.5 + 0.06)
    table = Table(1, 2)
    table.beat("d0", num_requests_held=3)
    assert table.names()[1] == "d1"
    table.beat("d1", num_requests_held=3, steps=(100, 8.0))
    table.beat("d0", num_requests_held=4, steps=(100, 0.4))
    assert table.names()[1] == "d0", "its steps are faster"


def test_a_step_is_as_long_as_lately():
    load, table = WorkerLoad(), Table(0, 1)
    for count, total, want in ((100, 1.0, 0.01), (100, 1.0, 0.01), (200, 4.0, 0.02), (5, 0.05, 0.02)):
        table.clock.advance(1.0)
        load.hear(table.beat("d0", steps=(count, total)))
        assert load.step_s == pytest.approx(want)


def test_the_edge_costs_what_the_prefill_does_not_hide():
    asked = RequestNeeds(prompt_len=1000, block_size=BLOCK)

    def cost(edge, assumed=0.0, compute_s=0.1):
        return edge_cost(edge, asked, bytes_per_position=1000.0, bytes_per_s=assumed, compute_s=compute_s)

    assert cost(None) == 0.0
    assert cost(None, assumed=1e6) == pytest.approx(0.9)
    assert cost(Edge(True, 2e6, 0.01)) == pytest.approx(0.41)
    assert cost(Edge(True, 2e7, 0.01)) == pytest.approx(0.01)
    assert cost(Edge(True, 0.0, 0.02), assumed=1e6) == pytest.approx(0.92)
    assert cost(Edge(False, 2e7, 0.01)) == NO_EDGE_S


def path(worker_id, data_path="shm", gbps=1.0, epoch=1):
    return worker_pb2.KvPath(kv_address=f"tcp://{worker_id}", epoch=epoch, data_path=data_path, gbps=gbps)


def test_a_pair_whose_data_path_is_slow_or_gone_is_avoided_and_its_workers_are_not():
    table = Table(2, 2)
    table.beat("p0", paths=(path("d0", gbps=1e-6), path("d1")))
    table.beat("p1", paths=(path("d0"), path("d1", data_path="")), num_prefill_tokens_queued=1_000_000)
    assert table.names() == ("p0", "d1")
    table.beat("p0", paths=(path("d0", gbps=1e-6), path("d1")), num_prefill_tokens_queued=100_000_000)
    assert table.names() == ("p1", "d0")
    pair = Pair(*(table.members._members[name] for name in ("p1", "d0")))
    assert data_path_of(pair, None) == "shm"
    assert data_path_of(pair, worker_pb2.PrefillDone(kv_data_path="raw")) == "raw"
    table.beat("p1", paths=(path("d0", epoch=7),))
    assert data_path_of(pair, None) == "", "of another incarnation"


def test_excluded_pairs_are_never_chosen_and_missing_roles_are_named():
    table = Table(2, 1)
    excluded = {(table.incarnation("p0"), table.incarnation("d0"))}
    assert {table.names(excluded=excluded) for _ in range(5)} == {("p1", "d0")}
    with pytest.raises(WorkersIncompatible):
        table.pick(excluded=excluded | {(table.incarnation("p1"), table.incarnation("d0"))})
    for num_prefill, num_decode in ((0, 1), (1, 0)):
        with pytest.raises(NoWorker):
            Table(num_prefill, num_decode).pick()
    assert table.policy.pick(table.members.live("prefill"), table.members.live("decode")), (
        "nothing known of the request"
    )


def test_of_very_many_workers_only_the_cheapest_are_paired(monkeypatch):
    monkeypatch.setattr(least_cost, "MAX_PAIRS", 6)
    monkeypatch.setattr(least_cost, "SHORT_LIST", 2)
    table = Table(4, 4)
    for at in (0, 1):
        table.beat(f"p{at}", num_prefill_tokens_queued=10**7)
        table.beat(f"d{at}", num_requests_held=50)
    assert {name[1] for name in table.names()} <= {"2", "3"}
    short = {(table.incarnation(p), table.incarnation(d)) for p in ("p2", "p3") for d in ("d2", "d3")}
    assert table.names(excluded=short) not in {(p, d) for p in ("p2", "p3") for d in ("d2", "d3")}


def test_loads_of_lives_that_are_gone_are_forgotten():
    table, loads = Table(1, 1), Loads()
    loads.of(table.members.live("prefill")[0])
    loads.of(table.beat("p1"))
    loads.keep(table.members.live("prefill")[1:])
    assert set(loads._loads) == {table.incarnation("p1")}


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigInvalid, match="round_robin"):
        make_policy("fastest", VirtualClock(), random.Random(0), FleetPrefixIndex())
    names = [
        make_policy(name, VirtualClock(), random.Random(0), FleetPrefixIndex()).name
        for name in ("prefix", "least_cost")
    ]
    assert names == ["prefix", "least_cost"]
    assert isinstance(make_policy("prefix", VirtualClock(), random.Random(0), FleetPrefixIndex()), LeastCost)


def test_of_a_model_with_state_a_prefix_counts_up_to_its_deepest_checkpoint():
    table = Table(2, 1)
    for name in ("p0", "p1"):
        table.beat(name, naming={"with_checkpoints": True})
    names = names_of(PROMPT)
    table.cache("p0", names)
    assert table.policy.cached_len(table.members.live("prefill"), [], request()) == 0, "rows alone are of no use"
    table.cache("p1", [*names[:4], *map(checkpoint_name, (names[1], names[3], names[6]))])
    picked = table.pick()
    assert (picked.prefill.state.worker_id, picked.expected_cached_len) == ("p1", 4 * BLOCK)


def test_of_a_model_with_state_checkpoints_are_expected_where_a_prompt_will_leave_them():
    table = Table(1, 1)
    table.beat("p0", naming={"with_checkpoints": True})
    assert table.pick().expected_cached_len == 0
    last = (len(PROMPT) - 1 - TURN_LEN) // BLOCK
    assert table.pick().expected_cached_len == last * BLOCK
    other = request((*PROMPT[: 6 * BLOCK], *range(5 * BLOCK)))
    assert table.pick(other).expected_cached_len == 0, "the two part where there are rows alone"
    assert table.pick(request((*PROMPT[: 6 * BLOCK], 7, 8))).expected_cached_len == 6 * BLOCK, "the third finds them"
    table.clock.advance(1e6)
    assert table.pick().expected_cached_len == 0, "they never came"


def test_at_an_interval_checkpoints_are_expected_on_the_way_too():
    table = Table(1, 1)
    table.beat("p0", naming={"with_checkpoints": True, "checkpoint_interval": 8 * BLOCK})
    long = tuple(range(1000, 1000 + 40 * BLOCK))
    assert table.pick(request(long)).expected_cached_len == 0
    for shared, found in ((7, 0), (8, 8), (23, 16), (30, 24)):
        other = request((*long[: shared * BLOCK], *range(5 * BLOCK)))
        assert table.policy.cached_len(table.members.live("prefill"), [], other) == found * BLOCK
