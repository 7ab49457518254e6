"""Payloads that arrive late, in parts or not at all, and incoming transfers that end while they do."""

import time

import pytest
import torch

from baton.core.clock import VirtualClock
from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.kvtransfer.protocol.frame import FrameHeader, encode_header
from baton.kvtransfer.protocol.messages import control_of, encode_control, parse_control
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, TransportCounts
from baton.kvtransfer.receiver.driver import COUNT_NAMES, ReceiverDriver
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.records import AbortCommand, GrantCommand, decode_record, encode_record
from baton.kvtransfer.receiver.service import Completed, Drained, ReserveWanted
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.service import Acked, Granted
from baton.kvtransfer.transports.loopback import Faults
from baton.tests.kvtransfer.conftest import make_layout, rows
from baton.tests.kvtransfer.proving import prove
from baton.tests.kvtransfer.scripted_prefill import ScriptedPrefill

SHORT = {"heartbeat_s": 0.05, "lease_s": 1.0}


def landed(pair, key):
    return pair.rows(pair.target, pair.landed_tables[key], pair.sizes[key])


def sent(pair, key):
    return rows(pair.source, pair.all_tables[key].blocks, pair.sizes[key])


@pytest.mark.fast
def test_payloads_that_arrive_later_land_as_well(make_pair):
    pair = make_pair()
    pair.hub.on_payload = lambda sender, receiver, num_bytes: num_bytes
    keys = [pair.hand_over(22, chunk_len=5, request_id=f"r{index}") for index in range(3)]
    for key in keys:
        pair.wait_for(Completed, key)
        assert torch.equal(landed(pair, key), sent(pair, key))
        pair.release(key)
    pair.assert_clean()


@pytest.mark.fast
def test_a_payload_that_is_cut_is_sent_again(make_pair):
    pair = make_pair(**SHORT)
    cuts = []

    def cut_some(sender, receiver, num_bytes):
        cuts.append(len(cuts) % 3 == 1)
        return num_bytes // 3 if cuts[-1] else num_bytes

    pair.hub.on_payload = cut_some
    key = pair.hand_over(22, chunk_len=5)
    pair.wait_for(Completed, key)
    pair.wait_for(Acked, key)
    assert torch.equal(landed(pair, key), sent(pair, key))
    assert sum(cuts) >= 2
    end_s = time.monotonic() + 5.0
    while pair.incoming.inventory()["transport_payloads_cut"] != sum(cuts):
        assert time.monotonic() < end_s, (pair.incoming.inventory(), cuts)


class StuckPayload:
    """Is being read until the test says otherwise."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        self.pieces = None
        self.is_discarded = False

    def read_into(self, pieces):
        assert sum(len(piece) for piece in pieces) == self.num_bytes
        self.pieces = pieces
        return False

    def discard(self):
        self.is_discarded = True


class HandTransport:
    """Arrivals by hand."""

    address = "hand"

    def __init__(self):
        self.counts = TransportCounts()
        self.arrivals, self.sent = [], []

    def offers(self):
        return []

    def send(self, peer, message):
        self.sent.append(parse_control(message))

    def receive(self, timeout_s):
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def wake(self):
        pass

    def welcome(self, peer):
        pass

    def close(self):
        pass


class Bench:
    """A driver turned by hand, with one granted incoming transfer of nine positions in blocks 0, 1, 2."""

    def __init__(self):
        self.layout = make_layout(num_layers=2)
        self.config = KVTransferConfig()
        self.pool = KVPool(self.layout, 8, torch.device("cpu"))
        self.transport, self.clock = HandTransport(), VirtualClock(100.0)
        self.link = ReceiverLink(
            bytearray(ReceiverLink.num_bytes(self.config.ring_slots, 8)), self.config.ring_slots, 8
        )
        self.num_notified = 0
        self.driver = ReceiverDriver(
            setup=ReceiverSetup(
                epoch=5, layout=self.layout, num_blocks=8, tp_size=1, listen=Listen("", ""), config=self.config
            ),
            io=RankedPoolIO([PoolIO(self.pool.bytes_view, self.pool.geometry)]),
            transport=self.transport,
            clock=self.clock,
            link=self.link,
            notify=self.notify,
        )
        self.key = AttemptKey("r", 0)
        prefill = ScriptedPrefill.__new__(ScriptedPrefill)  # for its messages
        prefill.layout, prefill.p_epoch, prefill.rank, prefill.size, prefill.data_paths = self.layout, 77, 0, 1, []
        prefill.host_id = prefill.incarnation_file = ""
        prefill.send, prefill.d_epoch = self.control, 5
        self.control(prove(prefill.hello_message(), 5, "p", self.clock.now_s()))
        prefill.reserve(self.key, 9)
        self.driver.turn()
        assert isinstance(self.event(), ReserveWanted)
        self.command(GrantCommand(self.key, BlockTable((0, 1, 2), 4)))
        (self.grant,) = [control.grant for control in self.transport.sent if control.HasField("grant")]

    def notify(self):
        self.num_notified += 1

    def control(self, message):
        self.transport.arrivals.append(Delivery("p", control=encode_control(control_of(message))))

    def command(self, command):
        self.link.commands.push(encode_record(command))
        self.driver.turn()

    def event(self):
        data = self.link.events.pop()
        return None if data is None else decode_record(data)[0]

    def frame(self, layer=0, seq=0):
        payload = StuckPayload(9 * self.layout.num_kv_heads * self.layout.layers[layer].head_bytes)
        header = FrameHeader(
            d_epoch=5,
            incoming_id=self.grant.incoming_id,
            attempt=0,
            seq=seq,
            layer=layer,
            head_first=0,
            head_count=self.layout.num_kv_heads,
            order_block_size=4,
            first=0,
            count=9,
            payload_bytes=payload.num_bytes,
            payload_digest=0,
        )
        self.transport.arrivals.append(Delivery("p", header=encode_header(header), payload=payload))
        self.driver.turn()
        return payload


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.fast
def test_a_incoming_that_ends_while_it_is_written_has_drained_when_every_payload_is_discarded(bench):
    one, other = bench.frame(0), bench.frame(1, seq=1)
    assert one.pieces
    assert other.pieces
    assert not one.is_discarded
    bench.command(AbortCommand(bench.key, "client went away"))
    assert one.is_discarded
    assert other.is_discarded
    assert bench.event() == Drained(bench.key)
    bench.transport.arrivals = [PayloadDone(one, True)]  # crossed on its way
    bench.driver.turn()
    assert bench.driver._protocol.counts.frames_landed == 0


@pytest.mark.fast
def test_one_peer_that_stalls_in_a_payload_does_not_stop_the_others(bench):
    stuck = bench.frame(0)
    other = bench.frame(1, seq=1)
    for piece in other.pieces:
        piece[:] = bytes(len(piece))
    bench.transport.arrivals = [PayloadDone(other, True)]
    bench.driver.turn()
    assert bench.driver._protocol.counts.frames_corrupt == 1, "it was looked at: its digest is not 0"
    assert not stuck.is_discarded


@pytest.mark.fast
def test_frames_nobody_wants_are_discarded_and_counted(bench):
    stuck = bench.frame(0)
    again = bench.frame(0, seq=1)
    assert again.pieces is None
    assert again.is_discarded
    assert not stuck.is_discarded
    damaged = StuckPayload(8)
    bench.transport.arrivals = [Delivery("p", header=bytes(80), payload=damaged)]
    bench.driver.turn()
    assert damaged.is_discarded
    bench.clock.advance(1.0)
    bench.driver.turn()
    counts = bench.link.counts(COUNT_NAMES)
    assert (counts["frames_duplicate"], counts["frames_corrupt"], counts["num_kv_receives"]) == (1, 1, 1)


@pytest.mark.fast
def test_events_that_find_the_ring_full_come_later_and_in_order(bench):
    for size in (1000, 1):
        while bench.link.events.push(bytes(size)):
            pass
    before = bench.num_notified
    bench.command(AbortCommand(bench.key, "client went away"))
    while (data := bench.link.events.pop()) is not None:
        assert not any(data)
    bench.driver.turn()
    assert bench.event() == Drained(bench.key)
    assert bench.num_notified > before


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_every_kind_lose_nothing_silently(make_pair, seed):
    faults = Faults(seed, drop=0.03, repeat=0.03, flip=0.03, truncate=0.02, hold=0.03, cut=0.03)
    pair = make_pair(layout=make_layout(num_layers=4), num_blocks=128, max_resends=6, **SHORT)
    pair.hub.on_message, pair.hub.on_payload = faults.on_message, faults.on_payload
    keys = [pair.reserve(5 + 3 * index, f"r{index}", wait_s=4.0) for index in range(8)]
    end_s = time.monotonic() + 30.0
    computed = set()
    while any(key in pair.tables or is_open(pair, key) for key in keys):
        pair.turn()
        for key in keys:
            if key not in computed and pair.find(Granted, key):
                computed.add(key)
                pair.compute(key, chunk_len=7)
                pair.commit(key)
        assert time.monotonic() < end_s, [key for key in keys if key in pair.tables or is_open(pair, key)]
        time.sleep(0.001)
    num_complete = 0
    for key in keys:
        if pair.find(Completed, key):
            num_complete += 1
            assert torch.equal(landed(pair, key), sent(pair, key))
            pair.release(key)
    assert faults.num_faults > 10
    print(f"{faults.num_faults} faults, {num_complete} of {len(keys)} sealed")
    pair.assert_clean(20.0)


def is_open(pair, key):
    """Granted blocks of which it is not said yet what became of them."""
    return key in pair.landed_tables and not pair.find(Completed, key)
