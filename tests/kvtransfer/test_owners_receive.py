"""Transfers into the pool of one rank, the owner of the sequence: it alone is written, verified, fenced and freed."""

import secrets
import signal

import pytest

from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile, host_id
from baton.kvtransfer.protocol.messages import wire_attempt
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.proto import kv_pb2
from baton.tests.kvtransfer.fake_device import DeviceWorker
from baton.tests.kvtransfer.kept import latent, state
from baton.tests.kvtransfer.receiver_worker import ReceiverWorker
from baton.tests.kvtransfer.scripted_prefill import ScriptedPrefill

LAYOUT = KVLayout(model_hash="m", layers=(latent(12), latent(12), latent(20)), block_size=4, has_mtp=True)
KEY = AttemptKey("r", 0)
LEN = 23
NUM_BLOCKS = 64
SIZE = 4


@pytest.fixture
def setting():
    opened = []

    def make(kind=ReceiverWorker, *, owner=2, data_path="inline", layout=LAYOUT, **options):
        worker = kind(layout, num_blocks=NUM_BLOCKS, tp_size=SIZE, owner=owner, **options)
        opened.append(worker)
        p_epoch = secrets.randbits(64)
        incarnation = IncarnationFile(p_epoch)
        opened.append(incarnation)
        named = {"incarnation_file": str(incarnation.path), "host_id": host_id(), "data_paths": ["nvlink", "shm"]}
        prefill = ScriptedPrefill(worker.service.address, worker.layout, p_epoch=p_epoch, **named)
        opened.append(prefill)
        prefill.hello(poll=worker.poll)
        prefill.reserve(KEY, LEN, data_path=data_path)
        return worker, prefill, prefill.granted(KEY, worker.poll)

    yield make
    for one in opened:
        one.close()


def pools(worker):
    """What each rank's holds."""
    return worker.ranks if isinstance(worker, DeviceWorker) else worker.io.ranks


def landed(worker, prefill, rank, key=KEY):
    """Whether a rank's pool holds what was pushed, in the blocks of that number that were granted."""
    own = [block - rank * NUM_BLOCKS for block in worker.tables[key].blocks]
    pool = pools(worker)[rank]
    spans = [KVRange(layer, 0, LEN, 0, 1) for layer in range(LAYOUT.num_layers)]
    return all(pool.read(own, span, 4) == prefill.whole.read(prefill.blocks, span, 4) for span in spans)


def touched(worker):
    """Ranks of whose pool any byte changed; memory begins as zeros."""
    return [rank for rank, pool in enumerate(pools(worker)) if any(pool._memory)]


@pytest.mark.parametrize("kind", [ReceiverWorker, DeviceWorker])
@pytest.mark.parametrize("owner", [0, 3])
def test_only_the_owner_gets_the_rows(setting, kind, owner):
    worker, prefill, grant = setting(kind, owner=owner)
    prefill.push(grant, LEN, chunk_len=10)
    prefill.commit(grant, LEN)
    worker.wait_for(Completed, KEY)
    assert landed(worker, prefill, owner)
    assert touched(worker) == [owner]
    assert not grant.blocks, "where this side writes, no other is told"


def test_a_damaged_frame_is_noticed_in_the_pool_of_the_owner(setting):
    worker, prefill, grant = setting()
    for layer in range(LAYOUT.num_layers):
        prefill.frame(grant, layer, 0, LEN, damage=layer == 1)
    prefill.commit(grant, LEN)
    nack = prefill.wait_for("commit_nack", poll=worker.poll)
    assert [(gap.layer, gap.first, gap.count) for gap in nack.missing] == [(1, 0, LEN)]
    assert not nack.corrupt_layers, "it was noticed as a frame, where it lies"
    assert worker.find(Completed, KEY) is None
    totals = list(prefill.digests[grant.epoch, grant.incoming_id])
    prefill.frame(grant, 1, 0, LEN)
    prefill.digests[grant.epoch, grant.incoming_id] = totals
    prefill.commit(grant, LEN, round=1)
    worker.wait_for(Completed, KEY)
    assert landed(worker, prefill, 2)


def test_a_gpu_is_asked_for_the_owner_alone_and_its_answer_counts(setting):
    worker, prefill, grant = setting(DeviceWorker, owner=1)

    def damage(wanted, table):
        if 1 in wanted.layers:
            (piece,) = worker.ranks[wanted.rank].pieces(table.blocks[:1], KVRange(1, 0, 4, 0, 1), 4)
            piece[3] ^= 1

    worker.device.damage = damage
    prefill.push(grant, LEN)
    prefill.commit(grant, LEN)
    nack = prefill.wait_for("commit_nack", poll=worker.poll)
    assert list(nack.corrupt_layers) == [1]
    worker.device.damage = lambda wanted, table: None
    totals = list(prefill.digests[grant.epoch, grant.incoming_id])
    prefill.frame(grant, 1, 0, LEN)
    prefill.digests[grant.epoch, grant.incoming_id] = totals
    prefill.commit(grant, LEN, round=1)
    worker.wait_for(Completed, KEY)
    assert landed(worker, prefill, 1)
    assert {wanted.rank for wanted in worker.device.asked} == {1}
    assert sum(len(wanted.layers) for wanted in worker.device.asked) == LAYOUT.num_layers + 1


@pytest.mark.parametrize("data_path", ["inline", "shm"])
def test_what_is_given_up_in_mid_push_drains_and_takes_nothing_more(setting, data_path):
    worker, prefill, grant = setting(data_path=data_path, data_paths=("shm",))
    blocks = worker.tables[KEY].blocks
    assert {block // NUM_BLOCKS for block in blocks} == {2}
    if data_path == "shm":
        assert tuple(grant.blocks) == blocks, "numbers of the worker, which say whose they are"
    else:
        prefill.frame(grant, 0, 0, 10)
        worker.wait_until(lambda: worker.service.inventory()["frames_landed"], "frame")
    worker.service.abort(KEY, "a test")
    abort = prefill.wait_for("abort", poll=worker.poll)
    if data_path == "shm":
        assert worker.find(Drained, KEY) is None, "its sender may still write them"
        acked = {"epoch": abort.epoch, "incoming_id": abort.incoming_id, "attempt": wire_attempt(KEY)}
        prefill.send(kv_pb2.AbortAck(**acked, drained=True, peer_epoch=prefill.p_epoch))
    worker.wait_for(Drained, KEY)
    assert worker.blocks.num_reserved == worker.blocks.num_quarantined == 0
    before = [bytes(pool._memory) for pool in pools(worker)]
    prefill.frame(grant, 1, 0, 10)
    worker.wait_until(lambda: worker.service.inventory()["frames_late_dropped"], "late frame")
    assert [bytes(pool._memory) for pool in pools(worker)] == before
    assert touched(worker) == ([2] if data_path == "inline" else [])


def test_the_silence_of_the_sender_frees_what_this_side_writes(setting):
    worker, prefill, grant = setting(heartbeat_s=0.05, lease_s=0.4)
    prefill.frame(grant, 0, 0, 10)
    worker.wait_for(IncomingFailed, KEY)
    worker.wait_for(Drained, KEY)
    assert worker.blocks.num_free == NUM_BLOCKS


def test_the_next_life_of_the_receiver_knows_owners(setting):
    worker, prefill, grant = setting()
    prefill.frame(grant, 0, 0, 10)
    worker.kill(signal.SIGKILL)
    worker.wait_for(Drained, KEY)
    assert worker.blocks.num_free == NUM_BLOCKS
    prefill.replies.clear()
    prefill.hello(poll=worker.poll)
    key = AttemptKey("r", 1)
    prefill.reserve(key, LEN)
    grant = prefill.granted(key, worker.poll)
    prefill.push(grant, LEN)
    prefill.commit(grant, LEN)
    worker.wait_for(Completed, key)
    assert landed(worker, prefill, 2, key)
    assert touched(worker) == [2]


def test_nothing_is_offered_that_would_write_the_pools_of_all(setting):
    """NVLink's kernels write every rank's pool; as if there were no such path, sockets carry the rows."""
    _, prefill, _ = setting(DeviceWorker, data_paths=("nvlink",))
    assert not prefill.wait_for("hello_reply", lambda reply: reply.proof).offers


def test_pools_of_owners_are_offered_as_a_workers_each(setting):
    """A sender that knows no owners takes several pools of one rank for none of a worker's, and uses sockets."""
    _, prefill, _ = setting(data_path="shm", data_paths=("shm",))
    (offer,) = prefill.wait_for("hello_reply", lambda reply: reply.proof).offers
    assert [(place.tp_rank, place.tp_size) for place in offer.shm.pools] == [(0, 1)] * SIZE
    assert len({place.offset_bytes for place in offer.shm.pools}) == SIZE


def setup_of(layout):
    return ReceiverSetup(
        epoch=1,
        layout=layout,
        num_blocks=NUM_BLOCKS,
        num_state_slots=int(layout.has_state),
        tp_size=SIZE,
        num_pools=SIZE,
        listen=Listen("zmq", "tcp://127.0.0.1:0"),
        config=KVTransferConfig(),
    )


@pytest.mark.fast
def test_the_setup_of_a_process_says_whose_blocks_are():
    setup = setup_of(LAYOUT)
    found, _ = ReceiverSetup.from_json(setup.to_json(parent=1))
    assert (found, found.num_pools) == (setup, SIZE)
    assert found.next_incarnation(3, "", ()).blocks.owner((NUM_BLOCKS * 3,)) == 3
    with pytest.raises(AssertionError, match="state slots"):
        setup_of(KVLayout(model_hash="m", layers=(latent(12), state(1, 8, whole=True)), block_size=4))
