"""Transfers into a pool that their process cannot read: staged, filled and verified by a device, here a fake one."""

import secrets
import signal
import time

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile, host_id
from baton.kvtransfer.protocol.messages import wire_attempt
from baton.kvtransfer.transports.shm import geometries_of
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.fake_device import HANDLE, DeviceWorker
from baton.tests.kvtransfer.kept import blocks_of, latent, state, tail
from baton.tests.kvtransfer.receiver_worker import Completed, Drained, IncomingFailed, ReserveWanted
from baton.tests.kvtransfer.scripted_prefill import ScriptedPrefill

LATENT = latent(12)
STATE = state(2, 20)
MIXED = make_layout(num_layers=4, more=(LATENT, LATENT, STATE))
KEY = AttemptKey("r", 0)
DATA_PATHS = ("inline", "nvlink")


@pytest.fixture
def open_all():
    """Closes what a test made."""
    opened = []
    yield opened
    for one in opened:
        one.close()


@pytest.fixture
def setting(open_all):
    def make(layout=None, *, data_path="inline", **options):
        worker = DeviceWorker(layout, **options)
        open_all.append(worker)
        p_epoch = secrets.randbits(64)
        incarnation = IncarnationFile(p_epoch)
        open_all.append(incarnation)
        prefill = ScriptedPrefill(
            worker.service.address,
            worker.layout,
            p_epoch=p_epoch,
            data_paths=[data_path],
            incarnation_file=str(incarnation.path),
            host_id=host_id(),
        )
        open_all.append(prefill)
        prefill.hello(poll=worker.poll)
        return worker, prefill, incarnation

    return make


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("layout", [make_layout(), MIXED], ids=["rows", "state"])
def test_pools_are_offered_as_they_are(setting, layout, tp_size):
    worker, prefill, _ = setting(layout, data_path="nvlink", tp_size=tp_size)
    (offer,) = prefill.hello(poll=worker.poll).offers
    found = geometries_of(layout, [pool.place for pool in offer.nvlink.pools])
    assert [one.layers for one in found] == [pool.geometry.layers for pool in worker.ranks]


def push(worker, prefill, grant, prompt_len, data_path, layers=None):
    """What a prefill rank does: send payloads, or write the pool itself and send headers."""
    for layer in range(worker.layout.num_layers) if layers is None else layers:
        length = worker.layout.layers[layer].span(prompt_len).count
        heads = worker.layout.layers[layer].num_heads
        span = KVRange(layer, 0, length, 0, heads)
        if data_path == "nvlink":
            prefill.whole.copy(prefill.blocks, worker.pool, blocks_of(worker.pool, grant, span), span)
        prefill.frame(grant, layer, 0, length, data_path=data_path, is_written=data_path == "nvlink")


def same(worker, prefill, key, prompt_len):
    table = worker.tables[key]
    for layer in range(worker.layout.num_layers):
        span = KVRange(
            layer, 0, worker.layout.layers[layer].span(prompt_len).count, 0, worker.layout.layers[layer].num_heads
        )
        want = prefill.whole.read(prefill.blocks, span, worker.layout.block_size)
        if worker.pool.read(blocks_of(worker.pool, table, span), span, worker.layout.block_size) != want:
            return False
    return True


def hand_over(worker, prefill, key, prompt_len, data_path):
    prefill.reserve(key, prompt_len, data_path=data_path)
    grant = prefill.granted(key, worker.poll)
    push(worker, prefill, grant, prompt_len, data_path)
    prefill.commit(grant, prompt_len)
    return grant


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_what_lands_is_in_the_pool_and_verified_there(setting, data_path):
    worker, prefill, _ = setting(MIXED, data_path=data_path)
    for turn in range(3):
        key = AttemptKey(f"r{turn}", 0)
        grant = hand_over(worker, prefill, key, 23, data_path)
        assert bool(grant.blocks) == (data_path == "nvlink")
        complete = worker.wait_for(Completed, key)
        assert complete.prompt_len == 23
        assert same(worker, prefill, key, 23)
        worker.release(key)
    asked = worker.device.asked
    assert all(wanted.has_digest for wanted in asked)
    assert {bool(wanted.staging.blocks) for wanted in asked} == {data_path == "inline"}
    assert sum(len(wanted.layers) for wanted in asked) == 3 * MIXED.num_layers
    for wanted in asked:  # no launch crosses from one shape to another
        kinds = {MIXED.layers[layer] for layer in wanted.layers}
        assert len(kinds) == 1
        assert wanted.count == MIXED.layers[wanted.layers[0]].span(23).count


@pytest.mark.parametrize("data_path", ["inline", "nvlink"])
def test_a_layer_that_keeps_nothing_of_a_prompt_is_waited_for_by_nobody(setting, data_path):
    """The open tile of a prompt of whole tiles is empty: no frame comes, and no digest of a kernel."""
    layout = make_layout(more=(tail(2, 8, length=23, ring=32), STATE))
    worker, prefill, _ = setting(layout, data_path=data_path)
    prefill.reserve(KEY, 23, data_path=data_path)
    grant = prefill.granted(KEY, worker.poll)
    push(worker, prefill, grant, 23, data_path, layers=[0, 1, 2, 4])
    prefill.commit(grant, 23)
    worker.wait_for(Completed, KEY)
    assert not any(3 in wanted.layers for wanted in worker.device.asked)


def test_layers_gather_while_the_engine_is_at_a_step(setting):
    worker, prefill, _ = setting(make_layout(num_layers=12), data_path="nvlink")
    worker.device.is_prompt = False
    prefill.reserve(KEY, 9, data_path="nvlink")
    grant = prefill.granted(KEY, worker.poll)
    push(worker, prefill, grant, 9, "nvlink", range(1))
    worker.wait_until(lambda: worker.device.asked, "the first wish")
    push(worker, prefill, grant, 9, "nvlink", range(1, 8))
    worker.wait_until(lambda: worker.service.inventory()["frames_landed"] == 8, "frames")
    time.sleep(0.05)
    worker.poll()
    assert len(worker.device.asked) == 1
    worker.device.run()
    worker.wait_until(lambda: len(worker.device.asked) == 2, "the second wish")
    assert sum(len(wanted.layers) for wanted in worker.device.asked) == 8
    push(worker, prefill, grant, 9, "nvlink", range(8, 12))  # the last ones do not wait for the second
    prefill.commit(grant, 9)
    worker.wait_until(lambda: sum(len(wanted.layers) for wanted in worker.device.asked) == 12, "every wish")
    worker.device.run()
    worker.wait_for(Completed, KEY)
    assert same(worker, prefill, KEY, 9)


def test_layers_of_shapes_in_turns_are_launched_together_by_shape(setting):
    """Models whose layers keep state have pool layers of four shapes in turns: few launches, and no queue of rounds."""
    turns = (LATENT, STATE, tail(2, 8, length=23, ring=32)) * 10
    worker, prefill, _ = setting(make_layout(num_layers=1, more=turns), data_path="nvlink")
    layout, asked = worker.layout, worker.device.asked
    worker.device.is_prompt = False
    prefill.reserve(KEY, 21, data_path="nvlink")
    grant = prefill.granted(KEY, worker.poll)
    push(worker, prefill, grant, 21, "nvlink", range(1))
    worker.wait_until(lambda: len(asked) == 1, "the first launch")
    push(worker, prefill, grant, 21, "nvlink", range(1, 25))
    worker.wait_until(lambda: worker.service.inventory()["frames_landed"] == 25, "frames")
    worker.device.run()
    worker.wait_until(lambda: len(asked) >= 4, "a launch for each shape")
    assert sorted(layer for wanted in asked for layer in wanted.layers) == list(range(25)), "one round has all"
    push(worker, prefill, grant, 21, "nvlink", range(25, layout.num_layers))
    prefill.commit(grant, 21)
    worker.wait_until(lambda: sum(len(wanted.layers) for wanted in asked) == layout.num_layers, "the rest")
    worker.device.run()
    worker.wait_for(Completed, KEY)
    assert same(worker, prefill, KEY, 21)
    assert sum(len({layout.layers[layer] for layer in wanted.layers}) for wanted in asked) == len(asked), (
        "one shape each"
    )
    assert len(asked) <= 4 + 3 * 2, "the last layers may come in two rounds"


def test_without_digests_what_is_written_counts_and_what_is_staged_is_filled_in(setting):
    for data_path in DATA_PATHS:
        worker, prefill, _ = setting(data_path=data_path, digest=False)
        prefill.has_digest = False
        hand_over(worker, prefill, KEY, 9, data_path)
        worker.wait_for(Completed, KEY)
        assert same(worker, prefill, KEY, 9)
        assert [wanted.has_digest for wanted in worker.device.asked] == [False] * len(worker.device.asked)
        assert bool(worker.device.asked) == (data_path == "inline")


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_a_word_that_changed_in_the_pool_is_asked_for_again_and_the_second_time_is_the_last(setting, data_path):
    worker, prefill, _ = setting(data_path=data_path)

    def damage(wanted, table):
        if 1 in wanted.layers:
            (piece,) = worker.pool.pieces(table.blocks[:1], KVRange(1, 0, 4, 0, 1), 4)
            piece[3] ^= 1

    worker.device.damage = damage
    grant = hand_over(worker, prefill, KEY, 9, data_path)
    nack = prefill.wait_for("commit_nack", poll=worker.poll)
    assert list(nack.corrupt_layers) == [1]
    assert {gap.layer for gap in nack.missing} == {1}
    assert worker.find(Completed, KEY) is None
    del prefill.digests[grant.epoch, grant.incoming_id]
    push(worker, prefill, grant, 9, data_path, [1])
    prefill.digests[grant.epoch, grant.incoming_id] = [
        prefill.whole.digest(prefill.blocks, KVRange(layer, 0, 9, 0, 2)) for layer in range(3)
    ]
    prefill.commit(grant, 9, round=1)
    failed = worker.wait_for(IncomingFailed, KEY)
    assert failed.reason == "layer 1 arrived corrupt twice"


def test_a_repaired_layer_is_verified_again(setting):
    worker, prefill, _ = setting(data_path="nvlink")
    damaged = []

    def damage(wanted, table):
        if not damaged:
            damaged.append(wanted)
            (piece,) = worker.pool.pieces(table.blocks[:1], KVRange(wanted.layers[0], 0, 4, 0, 1), 4)
            piece[0] ^= 1

    worker.device.damage = damage
    grant = hand_over(worker, prefill, KEY, 9, "nvlink")
    nack = prefill.wait_for("commit_nack", poll=worker.poll)
    layers = sorted({gap.layer for gap in nack.missing})
    totals = list(prefill.digests[grant.epoch, grant.incoming_id])
    push(worker, prefill, grant, 9, "nvlink", layers)
    prefill.digests[grant.epoch, grant.incoming_id] = totals
    prefill.commit(grant, 9, round=1)
    worker.wait_for(Completed, KEY)
    assert same(worker, prefill, KEY, 9)


class TestStaging:
    def test_a_grant_waits_for_staging_memory_in_its_turn(self, setting):
        worker, prefill, _ = setting(num_staging_blocks=4)  # of 4 positions each
        keys = [AttemptKey(f"r{index}", 0) for index in range(4)]
        grants = {}
        for key, prompt_len in zip(keys, (12, 16, 4, 4), strict=True):
            prefill.reserve(key, prompt_len)
            worker.wait_for(ReserveWanted, key)
        grants[0] = prefill.granted(keys[0], worker.poll)
        with pytest.raises(AssertionError, match="no grant"):
            prefill.granted(keys[2], worker.poll, timeout_s=0.2)  # there is room, but it is not its turn
        push(worker, prefill, grants[0], 12, "inline")
        prefill.commit(grants[0], 12)
        worker.wait_for(Completed, keys[0])
        second = prefill.granted(keys[1], worker.poll)
        push(worker, prefill, second, 16, "inline")
        prefill.commit(second, 16)
        worker.wait_for(Completed, keys[1])
        for key in keys[2:]:
            prefill.granted(key, worker.poll)

    def test_a_prompt_that_never_fits_is_refused_by_name(self, setting):
        worker, prefill, _ = setting(num_staging_blocks=4)
        prefill.reserve(KEY, 17)
        deny = prefill.wait_for("deny", poll=worker.poll)
        assert deny.reason == kv_pb2.Deny.TOO_LONG
        assert "staging_mib" in deny.detail
        worker.wait_for(Drained, KEY)
        assert worker.blocks.num_free == worker.blocks.num_blocks

    @pytest.mark.parametrize("who", ["worker", "prefill"])
    def test_what_is_given_up_while_it_waits_gives_its_blocks_back(self, setting, who):
        worker, prefill, _ = setting(num_staging_blocks=4)
        first, second = AttemptKey("a", 0), AttemptKey("b", 0)
        prefill.reserve(first, 16)
        prefill.granted(first, worker.poll)
        prefill.reserve(second, 16)
        worker.wait_until(lambda: second in worker.tables, "blocks")
        time.sleep(0.05)
        if who == "worker":
            worker.service.abort(second, "not wanted")
        else:
            prefill.send(kv_pb2.Abort(epoch=prefill.d_epoch, attempt=wire_attempt(second), reason="not wanted"))
        worker.wait_for(Drained, second)
        assert second not in worker.tables

    def test_a_incoming_has_not_drained_while_a_kernel_may_write_its_blocks(self, setting):
        worker, prefill, _ = setting()
        worker.device.is_prompt = False
        hand_over(worker, prefill, KEY, 9, "inline")
        worker.wait_until(lambda: worker.device.waiting, "a wish")
        worker.service.abort(KEY, "not wanted")
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            worker.poll()
            time.sleep(0.005)
        assert worker.find(Drained, KEY) is None
        worker.device.run()
        worker.wait_for(Drained, KEY)

    def test_when_the_process_dies_what_it_asked_for_is_over_before_blocks_are_free(self, setting):
        worker, prefill, _ = setting()
        worker.device.is_prompt = False
        hand_over(worker, prefill, KEY, 9, "inline")
        worker.wait_until(lambda: worker.device.waiting, "a wish")
        worker.kill(signal.SIGKILL)
        worker.wait_for(Drained, KEY)
        assert worker.device.num_drains
        assert not worker.device.waiting
        worker.device.is_prompt = True
        prefill.address = worker.service.address
        prefill.replies.clear()
        prefill.hello(poll=worker.poll)
        hand_over(worker, prefill, AttemptKey("next", 0), 9, "inline")
        worker.wait_for(Completed, AttemptKey("next", 0))


class TestOneSided:
    def test_the_offer_names_the_pool(self, setting):
        worker, prefill, _ = setting(data_path="nvlink")
        (offer,) = prefill.wait_for("hello_reply", lambda reply: reply.proof).offers
        (pool,) = offer.nvlink.pools
        assert (pool.ipc_handle, pool.device_uuid, pool.place.offset_bytes) == (HANDLE, "GPU-0", 512)
        assert pool.place.num_bytes == worker.pool.geometry.num_bytes
        assert offer.nvlink.flags_path == str(worker.region.path)

    def test_blocks_of_a_dead_prefill_worker_wait_for_evidence(self, setting):
        worker, prefill, incarnation = setting(data_path="nvlink", lease_s=0.3, heartbeat_s=0.05)
        prefill.reserve(KEY, 9, data_path="nvlink")
        prefill.granted(KEY, worker.poll)
        worker.wait_for(IncomingFailed, KEY)  # by its lease
        end_s = time.monotonic() + 0.9
        while time.monotonic() < end_s:
            worker.poll()
            time.sleep(0.01)
        assert worker.find(Drained, KEY) is None, "no timer frees what may be written"
        incarnation.close()
        worker.wait_for(Drained, KEY)
