"""Whole workers over real gRPC and ZMQ in this process: tokens, heartbeats, refusals, a dropped stream."""

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import torch

from baton.core.config import WorkerConfig
from baton.core.errors import (
    ConfigInvalid,
    InvalidRequest,
    MalformedMessage,
    Overloaded,
    PortInUse,
    PromptTooLong,
    RequestCancelled,
    TransferFailed,
    WorkerLost,
)
from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.decode_worker.node import DecodeNode
from baton.engine.local import LocalEngine
from baton.prefill_worker.node import PrefillNode
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.proto.wire import attend_request, change_from_proto, error_from_rpc, prefill_request
from baton.tests.e2e.conftest import TINY
from baton.tests.inside import node_channel
from baton.tests.worker.streams import attend, run
from baton.worker.host import WorkerHost
from baton.worker.loading import load_worker

PROMPT = tuple(range(300, 340))


class Membership(worker_pb2_grpc.MembershipServicer):
    """A router that only listens."""

    def __init__(self):
        self.states = {}

    def Heartbeat(self, request, context):
        self.states[request.worker_id] = request
        return worker_pb2.HeartbeatReply(known=True)


def worker_config(worker_id, router_address="", **changes):
    values = {
        "worker_id": worker_id,
        "model_path": str(TINY),
        "model_name": "tiny",
        "num_draft_tokens": 2,
        "numerics": Numerics.DEFAULT,
        "dtype": "float64",
        "device": "cpu",
        "block_size": 16,
        "kv_memory_mib": 24,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 4,
        "max_queue_len": 8,
        "chunk_len": 16,
        "max_model_len": 2048,
        "host": "127.0.0.1",
        "router_address": router_address,
        "num_threads": 1,
    }
    return WorkerConfig(**{**values, **changes})


def request(name, max_tokens=12, prompt=PROMPT, tenant=""):
    return GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        deadline_s=time.monotonic() + 60.0,
        num_draft_tokens=2,
        tenant=tenant,
    )


@pytest.fixture(scope="module")
def membership():
    servicer = Membership()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    worker_pb2_grpc.add_MembershipServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


@pytest.fixture(scope="module")
def nodes(membership):
    fatal = []
    prefill = PrefillNode(worker_config("prefill-0", membership.address), fatal.append)
    decode = DecodeNode(worker_config("decode-0", membership.address), fatal.append)
    yield prefill, decode
    prefill.close()
    decode.close()
    assert fatal == []


@pytest.fixture
def stubs(nodes):
    prefill, decode = nodes
    with (
        grpc.insecure_channel(prefill.host.address) as to_prefill,
        grpc.insecure_channel(decode.host.address) as to_decode,
    ):
        yield (
            worker_pb2_grpc.PrefillStub(node_channel(to_prefill, prefill)),
            worker_pb2_grpc.DecodeStub(node_channel(to_decode, decode)),
        )


def peer_of(decode):
    return worker_pb2.Peer(worker_id="decode-0", kv_address=decode.state().kv_address, epoch=decode.state().kv_epoch)


def inventory(node):
    with grpc.insecure_channel(node.host.address) as plain:
        channel = node_channel(plain, node)
        reply = admin_pb2_grpc.AdminStub(channel).Inventory(admin_pb2.InventoryRequest())
    return reply.workers[0].state.inventory


def wait_idle(nodes, timeout_s=4.0):
    deadline_s = time.monotonic() + timeout_s
    while any(
        (held := inventory(node)).num_blocks_free != held.num_blocks or held.num_requests_held or held.num_kv_receives
        for node in nodes
    ):
        assert time.monotonic() < deadline_s, [inventory(node) for node in nodes]
        time.sleep(0.01)


def wait_attends(node, num, timeout_s=10.0):
    """Until a worker has taken so many streams."""
    deadline_s = time.monotonic() + timeout_s
    while inventory(node).num_requests_held < num:
        assert time.monotonic() < deadline_s


def test_tokens_over_grpc_equal_the_one_process_engine(nodes, stubs):
    prefill_stub, decode_stub = stubs
    wanted = request("whole")
    attending = attend(decode_stub, attend_request(wanted, time.monotonic()))
    assert attending.epoch == nodes[1].epoch
    events = list(run(prefill_stub, prefill_request(wanted, peer_of(nodes[1]), time.monotonic())))
    assert [event.WhichOneof("event") for event in events] == ["first_token", "done"]
    assert events[1].done.handed_off
    token_ids = [events[0].first_token.token]
    for event in attending:
        assert event.tokens.index == len(token_ids)
        token_ids.extend(event.tokens.token_ids)
    stats = event.tokens.stats
    assert event.tokens.finish_reason == "length"
    assert stats.num_emitted_tokens == len(token_ids) - 1 == 11
    assert stats.kv_bytes_landed == events[1].done.kv_bytes_pushed == 6 * 2 * 4 * 32 * 8 * len(PROMPT)
    loaded = load_worker(worker_config("reference"))
    engine = LocalEngine(
        loaded.model,
        loaded.tokenizer,
        num_blocks=64,
        block_size=16,
        num_draft_tokens=0,
        chunk_len=64,
        max_num_sequences=1,
    )
    assert list(engine.generate([wanted])[0].token_ids) == token_ids
    wait_idle(nodes)


def test_heartbeats_tell_the_router_who_is_there(nodes, membership):
    deadline_s = time.monotonic() + 10.0
    while set(membership.states) != {"prefill-0", "decode-0"}:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    prefill, decode = membership.states["prefill-0"], membership.states["decode-0"]
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.layout_hash == decode.layout_hash
    assert prefill.kv_address == ""
    assert decode.kv_address.startswith("tcp://127.0.0.1:")
    assert decode.epoch == nodes[1].epoch != prefill.epoch
    assert decode.inventory.num_blocks > 0
    for node, state in zip(nodes, (prefill, decode), strict=True):
        told = (state.worker_id, state.model, state.max_model_len, state.block_size, state.dtype, state.max_num_seqs)
        config = node.config
        assert told == (
            *(config.worker_id, config.model_name, config.max_model_len),
            *(config.block_size, config.dtype, config.max_num_seqs),
        )
        assert (state.num_draft_tokens, state.numerics) == (config.num_draft_tokens, config.numerics.value)
        assert list(state.rank_pids) == [os.getpid()]
        assert state.inventory.HasField("compute")
    assert (prefill.can_prefill, decode.can_prefill) == (False, True)
    assert prefill.kv_bytes_per_position == 6 * 2 * 4 * 32 * 8, "as the hand-off of a prompt has them by position"


def test_k_is_changed_while_a_sequence_runs(nodes, stubs, membership):
    prefill_stub, decode_stub = stubs
    with grpc.insecure_channel(nodes[1].host.address) as plain:
        channel = node_channel(plain, nodes[1])
        admin = admin_pb2_grpc.AdminStub(channel)

        def set_mode(**mode):
            request = admin_pb2.SetSpeculationRequest(mode=worker_pb2.SpeculationMode(**mode))
            [worker] = admin.SetSpeculation(request).workers
            return worker.speculation

        wanted = request("live", max_tokens=100)
        attending = attend(decode_stub, attend_request(wanted, time.monotonic()))
        running = run(prefill_stub, prefill_request(wanted, peer_of(nodes[1]), time.monotonic()))
        modes = itertools.cycle([{"num_draft_tokens": 0}, {"auto": True}, {"num_draft_tokens": 1}])
        token_ids = []
        for event in attending:
            token_ids.extend(event.tokens.token_ids)
            if event.HasField("tokens"):
                now = set_mode(**next(modes))
        assert now.limit == 2
        first = next(running).first_token.token
        assert set_mode(num_draft_tokens=0) == worker_pb2.Speculation(num_draft_tokens=0, limit=2, method="none")
        for wrong in ({"num_draft_tokens": 3}, {"auto": False}, {}):
            with pytest.raises(grpc.RpcError) as refused:
                set_mode(**wrong)
            assert type(error_from_rpc(refused.value)) is InvalidRequest
        deadline_s = time.monotonic() + 10.0
        while membership.states["decode-0"].speculation.num_draft_tokens != 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert set_mode(num_draft_tokens=2).num_draft_tokens == 2
    loaded = load_worker(worker_config("reference"))
    engine = LocalEngine(
        loaded.model,
        loaded.tokenizer,
        num_blocks=64,
        block_size=16,
        num_draft_tokens=0,
        chunk_len=64,
        max_num_sequences=1,
    )
    plain = dataclasses.replace(wanted, num_draft_tokens=0)
    assert list(engine.generate([plain])[0].token_ids) == [first, *token_ids]
    wait_idle(nodes)


def compute_here(decode_stub, name, **options):
    """A decode worker computes a prompt: how much of it was cached, and the answer."""
    asked = attend_request(request(name, **options), time.monotonic(), prefill_here=True)
    events = list(attend(decode_stub, asked))
    first = next(event.first_token for event in events if event.HasField("first_token"))
    return first.num_cached_tokens, [first.token, *itertools.chain(*(event.tokens.token_ids for event in events))]


def names_told(stub, node, version=0):
    """The first change that a worker tells a reader that has `version`."""
    call = stub.WatchPrefixes(worker_pb2.WatchPrefixesRequest(epoch=node.epoch, version=version), timeout=10.0)
    change = change_from_proto(next(call))
    call.cancel()
    return change


def names_of(node, prompt, tenant):
    return node.worker.names.of(request("named", prompt=prompt, tenant=tenant))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_tells_which_prefixes_it_holds_and_refuses_readers_of_another_life(nodes, stubs, role):
    at = ["prefill", "decode"].index(role)
    node, stub, prompt = nodes[at], stubs[at], tuple(range(2000 + 100 * at, 2040 + 100 * at))
    assert node.state().prefix_naming == node.worker.names.naming
    assert node.state().prefix_naming.block_size == 16
    before = node.worker.block_log.version
    call = stub.WatchPrefixes(worker_pb2.WatchPrefixesRequest(epoch=node.epoch, version=before), timeout=20.0)
    wanted = request(f"watched by {role}", prompt=prompt, tenant="watched")
    if role == "decode":
        list(attend(stub, attend_request(wanted, time.monotonic(), prefill_here=True)))
    else:
        attending = attend(stubs[1], attend_request(wanted, time.monotonic()))
        list(run(stub, prefill_request(wanted, peer_of(nodes[1]), time.monotonic())))
        list(attending)
    told, version = set(), before
    for message in call:
        change = change_from_proto(message)
        assert (change.after, change.cleared) == (version, False)
        version = change.version
        told |= set(change.stored)
        if len(told) == 2:
            break
    call.cancel()
    assert told == set(names_of(node, prompt, "watched"))
    whole = names_told(stub, node, version=before + 10**6)
    assert (whole.cleared, whole.version) == (True, node.worker.block_log.version)
    assert told <= set(whole.stored)
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.WatchPrefixes(worker_pb2.WatchPrefixesRequest(epoch=node.epoch ^ 1), timeout=10.0))
    assert isinstance(error_from_rpc(refused.value), WorkerLost)
    wait_idle(nodes)


def test_prompts_computed_at_a_decode_worker_share_within_a_tenant_alone(nodes, stubs):
    prompt = tuple(range(2300, 2340))
    tenants = ("a", "b", "", "a", "b")
    found = [compute_here(stubs[1], f"of {at}", prompt=prompt, tenant=who) for at, who in enumerate(tenants)]
    assert [num_cached for num_cached, _ in found] == [0, 0, 0, 32, 32]
    assert len({tuple(token_ids) for _, token_ids in found}) == 1
    wait_idle(nodes)


def test_a_prompt_that_was_received_is_not_computed_again(nodes, stubs):
    prefill_stub, decode_stub = stubs
    prompt = tuple(range(2400, 2440))
    wanted = request("received", prompt=prompt, tenant="a")
    attending = attend(decode_stub, attend_request(wanted, time.monotonic()))
    first = next(iter(run(prefill_stub, prefill_request(wanted, peer_of(nodes[1]), time.monotonic()))))
    token_ids = [first.first_token.token, *itertools.chain(*(event.tokens.token_ids for event in attending))]
    assert compute_here(decode_stub, "received again", prompt=prompt, tenant="a") == (32, token_ids)
    assert compute_here(decode_stub, "of another", prompt=prompt, tenant="b") == (0, token_ids)
    wait_idle(nodes)


def test_a_decode_worker_without_a_prefix_cache_names_nothing(membership):
    decode = DecodeNode(worker_config("decode-2", prefix_cache=False), pytest.fail)
    try:
        assert not decode.state().HasField("prefix_naming")
        with grpc.insecure_channel(decode.host.address) as plain:
            stub = worker_pb2_grpc.DecodeStub(node_channel(plain, decode))
            assert [compute_here(stub, f"alone {at}")[0] for at in range(2)] == [0, 0]
        assert decode.worker.block_log.version == 0
    finally:
        decode.close()


def test_a_prefill_worker_has_no_k(nodes):
    with grpc.insecure_channel(nodes[0].host.address) as plain:
        channel = node_channel(plain, nodes[0])
        mode = worker_pb2.SpeculationMode(auto=True)
        with pytest.raises(grpc.RpcError) as refused:
            admin_pb2_grpc.AdminStub(channel).SetSpeculation(admin_pb2.SetSpeculationRequest(mode=mode))
    assert type(error_from_rpc(refused.value)) is InvalidRequest


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_dropped_stream_cancels_on_both_sides(nodes, stubs, how):
    prefill_stub, decode_stub = stubs
    wanted = request(f"dropped by {how}", max_tokens=500, prompt=tuple(range(300, 900)))
    attending = attend(decode_stub, attend_request(wanted, time.monotonic()))
    running = run(prefill_stub, prefill_request(wanted, peer_of(nodes[1]), time.monotonic()))
    wait_attends(nodes[1], 1)
    wait_attends(nodes[0], 1)
    for stream in (running, attending):
        getattr(stream, how)()
    wait_idle(nodes)


def test_the_same_attempt_twice_is_refused(nodes, stubs):
    _, decode_stub = stubs
    wanted = request("twice")
    first = attend(decode_stub, attend_request(wanted, time.monotonic()))
    wait_attends(nodes[1], 1)
    with pytest.raises(RequestCancelled):
        list(attend(decode_stub, attend_request(wanted, time.monotonic())))
    first.cancel()
    wait_idle(nodes)


def test_bad_messages_get_typed_errors(nodes, stubs):
    prefill_stub, decode_stub = stubs
    with pytest.raises(MalformedMessage):
        list(attend(decode_stub, worker_pb2.AttendRequest()))
    with pytest.raises(MalformedMessage):
        list(run(prefill_stub, worker_pb2.PrefillRequest()))
    capacity_len = inventory(nodes[0]).num_blocks * 16
    huge = request("huge", prompt=(300,) * (capacity_len + 1))
    with pytest.raises(PromptTooLong):
        list(run(prefill_stub, prefill_request(huge, peer_of(nodes[1]), time.monotonic())))
    wait_idle(nodes)


def test_a_full_queue_refuses_and_loses_nothing(nodes, stubs):
    _, decode_stub = stubs
    streams = [attend(decode_stub, attend_request(request(f"many{n}"), time.monotonic())) for n in range(8)]
    wait_attends(nodes[1], 8)
    with pytest.raises(Overloaded):
        list(attend(decode_stub, attend_request(request("one-too-many"), time.monotonic())))
    for stream in streams:
        stream.cancel()
    wait_idle(nodes)


def test_the_death_of_the_receiver_process_costs_only_what_was_incoming(nodes, stubs):
    prefill_stub, decode_stub = stubs
    _, decode = nodes

    def start(name, **options):
        wanted = request(name, **options)
        attending = attend(decode_stub, attend_request(wanted, time.monotonic()))
        assert attending.epoch == decode.epoch
        return attending, run(prefill_stub, prefill_request(wanted, peer_of(decode), time.monotonic()))

    before = decode.state()
    decoding, prefill_events = start("decoding", max_tokens=600)
    assert [event.WhichOneof("event") for event in prefill_events] == ["first_token", "done"]
    token_ids = list(next(decoding).tokens.token_ids)
    incoming, _ = start("incoming", prompt=tuple(300 + n % 600 for n in range(1200)))
    deadline_s = time.monotonic() + 10.0
    while decode._incoming.inventory()["num_kv_receives"] < 2:
        assert time.monotonic() < deadline_s
    os.kill(decode._incoming._host.pid, signal.SIGKILL)
    with pytest.raises(TransferFailed):
        list(incoming)
    deadline_s = time.monotonic() + 10.0
    while decode._incoming._host.num_incarnations < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    for event in decoding:
        token_ids.extend(event.tokens.token_ids)
    assert len(token_ids) == 599, "a sealed sequence needs no incoming transfer"
    after = decode.state()
    assert (after.epoch, after.kv_address) == (before.epoch, before.kv_address)
    assert after.kv_epoch not in (0, before.kv_epoch)
    attending, prefill_events = start("again")
    assert [event.WhichOneof("event") for event in prefill_events] == ["first_token", "done"]
    assert sum(len(event.tokens.token_ids) for event in attending) == 11
    wait_idle(nodes, 6.0)


def test_closing_ends_open_streams(membership):
    decode = DecodeNode(worker_config("decode-1"), pytest.fail)
    with grpc.insecure_channel(decode.host.address) as plain:
        channel = node_channel(plain, decode)
        stream = attend(worker_pb2_grpc.DecodeStub(channel), attend_request(request("open"), time.monotonic()))
        wait_attends(decode, 1)
        closing = threading.Thread(target=decode.close)
        closing.start()
        with pytest.raises(grpc.RpcError):
            list(stream)
        closing.join(10.0)
        assert not closing.is_alive()


def test_a_pool_too_small_for_one_block_is_refused():
    with pytest.raises(ConfigInvalid, match="kv_memory_mib"):
        load_worker(worker_config("small", kv_memory_mib=0))


def test_no_sequence_is_longer_than_the_pool():
    """A default length is lowered, and said; one that was asked for is refused."""
    config = worker_config("small", kv_memory_mib=2)
    loaded = load_worker(config)
    pool_len = loaded.pool.num_blocks * 16
    assert loaded.applied(config).max_model_len == pool_len - 2 < 2048
    assert (
        f"max_model_len {pool_len - 2}, not the model's: the KV pool holds {pool_len} positions" in loaded.sizes.why[-2]
    )
    asked = dataclasses.replace(config, is_model_len_asked=True)
    with pytest.raises(ConfigInvalid, match=f"max_model_len 2048: the KV pool holds {pool_len} positions") as refused:
        load_worker(asked)
    assert refused.value.fields["keys"] == ["max_model_len", "kv_memory_mib"]
    fitting = dataclasses.replace(asked, max_model_len=pool_len - 2)
    assert load_worker(fitting).applied(fitting).max_model_len == pool_len - 2


def left_behind():
    """Threads of workers in this process, of which one reaps the transfer, and its files in shared memory, by name."""
    names = ("kv-", "prefill-loop", "decode-loop", "worker-host")
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(names))
    files = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # other workers of this process open and close files, too
            files.add(os.readlink(path))
    return threads, {name for name in files if "/baton-" in name and Path(name).exists()}


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        (DecodeNode, {"host_kv_bytes": 100}, ConfigInvalid),  # found out when the incoming transfer serves already
        (DecodeNode, {}, PortInUse),
        (PrefillNode, {}, PortInUse),
    ],
)
def test_a_worker_that_cannot_start_leaves_nothing_behind(kind, changes, error, monkeypatch):
    start = WorkerHost.start

    def start_elsewhere(host):
        host._host = "203.0.113.9"  # nobody's address
        start(host)

    if error is PortInUse:
        monkeypatch.setattr(WorkerHost, "start", start_elsewhere)
    before = left_behind()
    with pytest.raises(error):
        kind(worker_config("cannot", **changes), lambda error: None)
    assert left_behind() == before


def test_invariant_numerics_are_checked_at_start():
    loaded = load_worker(worker_config("invariant", numerics=Numerics.INVARIANT, dtype="float32"))
    assert loaded.model.dtype == torch.float32


@pytest.mark.parametrize("kind", [PrefillNode, DecodeNode])
def test_what_nobody_chose_is_chosen_at_start_and_reported_with_its_reason(kind, membership):
    fatal = []
    config = worker_config("unsized", membership.address, max_num_seqs=0, chunk_len=0)
    node = kind(config, fatal.append)
    try:
        assert (node.config.max_num_seqs, node.config.chunk_len) == (16, 256)
        state = node.state()
        assert state.max_num_seqs == 16
        sequences, tokens, length, pool = state.inventory.compute.chosen
        assert sequences == "max_num_seqs 16: the default of a CPU"
        assert tokens == "max_num_batched_tokens 256: the default of a CPU"
        num_blocks = state.inventory.num_blocks
        assert length.startswith(f"max_model_len {16 * num_blocks - 2}, not the model's")
        assert state.max_model_len == 16 * num_blocks - 2
        assert pool == f"KV pool of {num_blocks} blocks, {16 * num_blocks} positions: kv_memory_mib 24"
    finally:
        node.close()
    assert not fatal
