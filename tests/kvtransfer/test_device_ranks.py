"""Transfers into the GPUs of several ranks, with fake devices: one flag for each rank, one answer of all of them."""

import secrets
import signal
import time

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile, host_id
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.fake_device import HANDLE, DeviceWorker
from baton.tests.kvtransfer.kept import blocks_of, latent, state
from baton.tests.kvtransfer.receiver_worker import Completed, Drained, IncomingFailed
from baton.tests.kvtransfer.scripted_prefill import ScriptedPrefill

LATENT = latent(12)
STATE = state(2, 20)
KEY = AttemptKey("r", 0)
LEN = 23


def mixed(num_kv_heads=2):
    return make_layout(num_layers=4, num_kv_heads=num_kv_heads, more=(LATENT, LATENT, STATE))


@pytest.fixture
def open_all():
    opened = []
    yield opened
    for one in opened:
        one.close()


@pytest.fixture
def setting(open_all):
    def make(layout, tp_size, *, data_path="inline", **options):
        worker = DeviceWorker(layout, tp_size=tp_size, **options)
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
        return worker, prefill

    return make


def whole(layout, layer, prompt_len=LEN):
    return KVRange(layer, 0, layout.layers[layer].span(prompt_len).count, 0, layout.layers[layer].num_heads)


def push(worker, prefill, grant, data_path, layers=None):
    """What a prefill rank does: send payloads, or write every rank's pool itself and send headers."""
    for layer in range(worker.layout.num_layers) if layers is None else layers:
        span = whole(worker.layout, layer)
        for pool in worker.ranks if data_path == "nvlink" else ():
            heads = pool.geometry.layer(layer).heads
            part = KVRange(layer, 0, span.count, heads.first, heads.count)
            prefill.whole.copy(prefill.blocks, pool, blocks_of(pool, grant, part), part)
        prefill.frame(grant, layer, 0, span.count, data_path=data_path, is_written=data_path == "nvlink")


def hand_over(worker, prefill, key, data_path):
    prefill.reserve(key, LEN, data_path=data_path)
    grant = prefill.granted(key, worker.poll)
    push(worker, prefill, grant, data_path)
    prefill.commit(grant, LEN)
    return grant


def same_everywhere(worker, prefill, key):
    """Every rank holds its heads as the prefill worker has them."""
    table = worker.tables[key]
    for pool in worker.ranks:
        for layer, geometry in enumerate(pool.geometry.layers):
            part = KVRange(
                layer, 0, worker.layout.layers[layer].span(LEN).count, geometry.head_first, geometry.num_heads
            )
            if pool.read(blocks_of(pool, table, part), part, 4) != prefill.whole.read(prefill.blocks, part, 4):
                return False
    return True


def damage_at(worker, rank, layer):
    """Have a word of a rank's part of a layer change before each digest."""

    def damage(wanted, table):
        if wanted.rank == rank and layer in wanted.layers:
            head = worker.ranks[rank].geometry.layer(layer).head_first
            (piece,) = worker.ranks[rank].pieces(table.blocks[:1], KVRange(layer, 0, 4, head, 1), 4)
            piece[3] ^= 1

    worker.device.damage = damage


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "data_path"),
    [pytest.param(2, 2, "inline", marks=pytest.mark.fast), (8, 4, "nvlink"), (2, 4, "nvlink"), (2, 8, "inline")],
)
def test_every_rank_gets_its_heads_and_all_are_verified(setting, num_kv_heads, tp_size, data_path):
    layout = mixed(num_kv_heads) if tp_size <= 2 else make_layout(num_layers=4, num_kv_heads=num_kv_heads)
    worker, prefill = setting(layout, tp_size, data_path=data_path)
    hand_over(worker, prefill, KEY, data_path)
    worker.wait_for(Completed, KEY)
    assert same_everywhere(worker, prefill, KEY)
    asked = worker.device.asked
    for rank in range(tp_size):
        mine = [wanted for wanted in asked if wanted.rank == rank]
        assert sum(len(wanted.layers) for wanted in mine) == layout.num_layers
    assert len({(wanted.flag, wanted.sequence) for wanted in asked}) == len(asked), "a flag for each"
    for wanted in asked:  # no launch crosses from one shape to another
        assert len({layout.layers[layer] for layer in wanted.layers}) == 1


def test_layers_of_one_shape_that_ranks_hold_otherwise_are_no_launch(setting):
    """Rows of a latent layer may look like those of an attention layer; but every rank has all of them."""
    look_alike = latent(8, heads=2, parts=2)
    layout = make_layout(num_layers=2, num_kv_heads=2, more=(look_alike,))
    worker, prefill = setting(layout, 2)
    hand_over(worker, prefill, KEY, "inline")
    worker.wait_for(Completed, KEY)
    assert same_everywhere(worker, prefill, KEY)
    assert all(max(wanted.layers) < 2 or wanted.layers == (2,) for wanted in worker.device.asked)


@pytest.mark.parametrize(
    ("num_kv_heads", "rank", "data_path"), [(2, 0, "inline"), (2, 1, "inline"), (2, 0, "nvlink"), (4, 3, "nvlink")]
)
def test_a_word_that_changed_at_any_rank_is_noticed(setting, num_kv_heads, rank, data_path):
    """With two heads, ranks 0 and 1 hold the same one: a copy that differs is as wrong as the first."""
    worker, prefill = setting(make_layout(num_kv_heads=num_kv_heads), 4, data_path=data_path)
    damage_at(worker, rank, 1)
    grant = hand_over(worker, prefill, KEY, data_path)
    nack = prefill.wait_for("commit_nack", poll=worker.poll)
    assert list(nack.corrupt_layers) == [1]
    assert worker.find(Completed, KEY) is None
    worker.device.damage = lambda wanted, table: None
    totals = list(prefill.digests[grant.epoch, grant.incoming_id])
    push(worker, prefill, grant, data_path, [1])
    prefill.digests[grant.epoch, grant.incoming_id] = totals
    prefill.commit(grant, LEN, round=1)
    worker.wait_for(Completed, KEY)
    assert same_everywhere(worker, prefill, KEY)


def test_without_digests_every_rank_is_filled_before_it_counts(setting):
    worker, prefill = setting(mixed(), 2, digest=False)
    prefill.has_digest = False
    worker.device.lost = {1}
    hand_over(worker, prefill, KEY, "inline")
    worker.wait_until(lambda: worker.device.waiting, "desired_state")
    settle(worker)
    assert worker.find(Completed, KEY) is None
    worker.device.lost.clear()
    worker.wait_until(lambda: (worker.device.run(), worker.find(Completed, KEY))[1], "end")
    assert same_everywhere(worker, prefill, KEY)


class TestLateRanks:
    @pytest.mark.parametrize("late", [{0}, {1}])
    def test_nothing_is_sealed_before_the_last_rank_has_answered(self, setting, late):
        worker, prefill = setting(make_layout(), 2)
        worker.device.lost = late
        hand_over(worker, prefill, KEY, "inline")
        worker.wait_until(lambda: worker.device.waiting, "desired_state")
        settle(worker)
        assert worker.find(Completed, KEY) is None
        worker.device.lost = set()
        worker.wait_until(lambda: (worker.device.run(), worker.find(Completed, KEY))[1], "end")
        assert same_everywhere(worker, prefill, KEY)

    def test_blocks_are_not_free_while_a_kernel_of_one_rank_may_write_them(self, setting):
        worker, prefill = setting(make_layout(), 2)
        worker.device.lost = {1}
        hand_over(worker, prefill, KEY, "inline")
        worker.wait_until(lambda: worker.device.waiting, "a wish")
        worker.service.abort(KEY, "not wanted")
        settle(worker)
        assert worker.find(Drained, KEY) is None
        worker.device.lost = set()
        worker.device.run()
        worker.wait_for(Drained, KEY)

    def test_flags_of_a_rank_that_is_late_are_not_given_to_other_incoming_transfers(self, setting):
        worker, prefill = setting(make_layout(), 2)
        worker.device.lost = {1}
        hand_over(worker, prefill, KEY, "inline")
        worker.wait_until(lambda: worker.device.waiting, "a wish")
        settle(worker)
        held = {wanted.flag for wanted in worker.device.asked}
        other = AttemptKey("other", 0)
        hand_over(worker, prefill, other, "inline")
        worker.wait_until(lambda: any(wanted.attempt == other for wanted in worker.device.asked), "its wish")
        mine = [wanted for wanted in worker.device.asked if wanted.attempt == other]
        assert not held & {wanted.flag for wanted in mine}
        worker.device.lost = set()
        for key in (KEY, other):
            worker.wait_until(lambda key=key: (worker.device.run(), worker.find(Completed, key))[1], "end")
            assert same_everywhere(worker, prefill, key)

    def test_the_next_life_of_the_process_begins_when_every_rank_is_done(self, setting):
        worker, prefill = setting(make_layout(), 2)
        worker.device.lost = {1}
        hand_over(worker, prefill, KEY, "inline")
        worker.wait_until(lambda: worker.device.waiting, "a wish")
        worker.kill(signal.SIGKILL)
        worker.wait_for(IncomingFailed, KEY)
        worker.wait_for(Drained, KEY)
        assert worker.device.num_drains
        assert not worker.device.waiting
        prefill.address = worker.service.address
        prefill.replies.clear()
        prefill.hello(poll=worker.poll)
        after = AttemptKey("after", 0)
        hand_over(worker, prefill, after, "inline")
        worker.wait_for(Completed, after)
        assert same_everywhere(worker, prefill, after)


def test_the_offer_names_the_pool_of_every_rank(setting):
    worker, prefill = setting(make_layout(num_kv_heads=4), 4, data_path="nvlink")
    (offer,) = prefill.wait_for("hello_reply", lambda reply: reply.proof).offers
    found = [(pool.device_uuid, pool.place.offset_bytes, pool.place.num_bytes) for pool in offer.nvlink.pools]
    sizes = [geometry.num_bytes for geometry in worker.setup.geometries]
    assert found == [(f"GPU-{rank}", 512 * (rank + 1), size) for rank, size in enumerate(sizes)]
    assert {pool.ipc_handle for pool in offer.nvlink.pools} == {HANDLE}
    assert [(pool.place.tp_rank, pool.place.tp_size) for pool in offer.nvlink.pools] == [(r, 4) for r in range(4)]


def settle(worker, pause_s=0.15):
    end_s = time.monotonic() + pause_s
    while time.monotonic() < end_s:
        worker.poll()
        time.sleep(0.005)
