"""A virtual cluster for the hand-off protocol: real machines and real frame bytes, a model pool, a hostile network.

Every check of an invariant is an assert here, so whoever drives a `World` gets them all after every step.
"""

import struct
from dataclasses import replace

from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError, ProtocolError
from baton.core.request import AttemptKey
from baton.kernels.digest import MASK, high_weight, layer_weight, low_weight, word_weight
from baton.kvcache.allocator import BlockAllocator, OutOfBlocks
from baton.kvcache.layout import KVLayout
from baton.kvtransfer import landing_actions as at_d
from baton.kvtransfer import push_actions as at_p
from baton.kvtransfer.frame import FRAME_OVERHEAD_BYTES, crc_of, decode_header, encode_header, is_frame
from baton.kvtransfer.landing_protocol import LandingProtocol
from baton.kvtransfer.landing_table import LandingState
from baton.kvtransfer.messages import parse_control
from baton.kvtransfer.push_protocol import PushProtocol
from baton.kvtransfer.push_table import TransferState
from baton.proto import kv_pb2

NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS = 2, 2, 8
LAYOUT = KVLayout(
    model_hash="model", num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float64"
)
CONFIG = KVTransferConfig(
    max_frame_bytes=2 * LAYOUT.bytes_per_position, window_bytes=2 * FRAME_OVERHEAD_BYTES + 128, ring_slots=8
)


def content(attempt, layer, kv, position):
    """The 64 bits that the source of an attempt holds: different for everything."""
    return hash((attempt.request_id, attempt.attempt, layer, kv, position)) & (MASK >> 1)


def digest(values):
    """Digest of {(layer, kv, position): bits}."""
    total = 0
    for (layer, kv, position), bits in values.items():
        total += (bits + 1) * layer_weight(layer) * high_weight(position) * low_weight(position) * word_weight(0, kv, 0)
    return total & MASK


class Source:
    """One transfer as the prefill worker's loop knows it."""

    def __init__(self, prompt_len):
        self.prompt_len = prompt_len
        self.pushed = [0] * NUM_LAYERS
        self.is_granted = False
        self.is_committed = False
        self.has_failed = False

    @property
    def is_computed(self):
        return all(pushed == self.prompt_len for pushed in self.pushed)


class PrefillNode:
    def __init__(self, world, name, epoch):
        self.world, self.name, self.epoch = world, name, epoch
        self.protocol = PushProtocol(epoch=epoch, layout=LAYOUT, config=CONFIG)
        self.sources = {}
        self.ended = {}

    def reserve(self, attempt, peer, prompt_len):
        assert attempt not in self.sources
        self.sources[attempt] = Source(prompt_len)
        self.do(
            self.protocol.reserve(
                attempt, peer, prompt_len=prompt_len, capacity_len=prompt_len + 1, wait_s=4.0, now_s=self.world.now_s
            )
        )

    def push(self, attempt, layer, count):
        source = self.sources[attempt]
        first = source.pushed[layer]
        count = min(count, source.prompt_len - first)
        if count:
            source.pushed[layer] += count
            values = {
                (layer, kv, position): content(attempt, layer, kv, position)
                for kv in range(2)
                for position in range(first, first + count)
            }
            self.do(self.protocol.pushed(attempt, layer, first, count, digest(values), self.world.now_s))

    def commit(self, attempt):
        self.sources[attempt].is_committed = True
        state = kv_pb2.SequenceState(first_token=attempt.attempt)
        self.do(self.protocol.commit(attempt, state, self.world.now_s, self.world.now_s))

    def abort(self, attempt):
        self.sources[attempt].has_failed = True
        self.do(self.protocol.abort(attempt, "test", self.world.now_s))

    def on_message(self, sender, parts):
        try:
            self.do(self.protocol.on_control(sender, parse_control(parts[0]), self.world.now_s))
        except BatonError:
            pass

    def tick(self):
        self.do(self.protocol.tick(self.world.now_s))

    def do(self, actions):
        for action in actions:
            match action:
                case at_p.SendControl():
                    self.world.post(self.name, action.peer, [action.control.SerializeToString()])
                case at_p.SendFrame(peer, attempt, header):
                    assert attempt in self.sources, "invariant 5: source read after the transfer ended"
                    payload = b"".join(
                        struct.pack("<Q", content(attempt, header.layer, kv, position))
                        for kv in range(2)
                        for position in range(header.first, header.end)
                    )
                    self.world.post(
                        self.name, peer, [encode_header(replace(header, payload_crc=crc_of([payload]))), payload]
                    )
                case at_p.DropPeer():
                    pass
                case at_p.Granted(attempt):
                    assert not self.sources[attempt].is_granted
                    self.sources[attempt].is_granted = True
                case at_p.PushFailed(attempt):
                    assert not self.sources[attempt].has_failed
                    self.sources[attempt].has_failed = True
                case at_p.Denied(attempt) | at_p.Acked(attempt) | at_p.PushDrained(attempt):
                    source = self.sources.pop(attempt)
                    assert not isinstance(action, at_p.PushDrained) or source.has_failed
                    assert not isinstance(action, at_p.Denied) or not source.is_granted
                    if isinstance(action, at_p.Acked):
                        assert (attempt, "sealed") in self.world.log, "acknowledged and never sealed"
                    self.ended[attempt] = type(action).__name__

    def check(self):
        live = {transfer.attempt for transfer in self.protocol.transfers()}
        assert live == set(self.sources), "invariant 5"
        by_peer = {}
        for transfer in self.protocol.transfers():
            if transfer.state in (TransferState.PUSHING, TransferState.COMMITTING):
                by_peer.setdefault(transfer.peer.kv_address, []).append(transfer)
        for transfers in by_peer.values():
            assert sum(transfer.in_flight_bytes for transfer in transfers) <= CONFIG.window_bytes, "invariant 7"


class DecodeNode:
    def __init__(self, world, name, epoch):
        self.world, self.name, self.epoch = world, name, epoch
        self.protocol = LandingProtocol(
            epoch=epoch, layout=LAYOUT, config=CONFIG, max_capacity_len=NUM_BLOCKS * BLOCK_SIZE
        )
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.pool = {}  # (layer, kv, slot) -> bits
        self.tables = {}  # held by a landing or a sequence
        self.wanted = []
        self.sealed = {}  # attempt -> what the pool held then
        self.highest_sealed = {}
        self.write = None  # (header, payload) begun and not finished

    def grant(self, wanted):
        try:
            table = self.allocator.reserve(wanted.capacity_len)
        except OutOfBlocks:
            return
        self.wanted.remove(wanted)
        self.tables[wanted.attempt] = table
        self.do(self.protocol.grant(wanted.attempt, self.world.now_s))

    def deny(self, wanted):
        self.wanted.remove(wanted)
        self.do(self.protocol.deny(wanted.attempt, kv_pb2.Deny.BUSY, "test", self.world.now_s))

    def abort(self, attempt):
        self.sealed.pop(attempt, None)
        self.do(self.protocol.abort(attempt, "test", self.world.now_s))

    def release(self, attempt):
        del self.sealed[attempt]
        self.allocator.release(self.tables.pop(attempt))
        self.do(self.protocol.release(attempt, self.world.now_s))

    def on_message(self, sender, parts):
        try:
            if is_frame(parts[0]):
                self.finish_write()  # one loop: the frame before is done
                header = decode_header(parts[0])
                if header.payload_bytes != len(parts[1]) or header.payload_crc != crc_of([parts[1]]):
                    raise ProtocolError("the payload differs")
                self.do(self.protocol.on_frame(sender, header, self.world.now_s), parts[1])
            else:
                self.do(self.protocol.on_control(sender, parse_control(parts[0]), self.world.now_s))
        except BatonError:
            self.protocol.on_corrupt_frame()

    def finish_write(self):
        if self.write is None:
            return
        header, payload = self.write
        self.write = None
        landing = self.protocol.landing(header.landing_id)
        self.put(landing, header, payload)
        self.do(self.protocol.landed(header, self.world.now_s))

    def put(self, landing, header, payload):
        attempt = landing.attempt
        assert attempt in self.tables, "invariants 1 and 6: a write without a grant, or after it drained"
        assert attempt not in self.sealed, "invariant 9: a write after the seal"
        landed = list(landing.coverage.present(header.layer, header.first, header.count))
        assert not landed, "the first good write wins: a good position is written again"
        values = struct.unpack(f"<{2 * header.count}Q", payload)
        for kv in range(2):
            for offset in range(header.count):
                slot = self.tables[attempt].slot(header.first + offset)
                self.pool[header.layer, kv, slot] = values[kv * header.count + offset]

    def tick(self):
        self.do(self.protocol.flush())
        self.do(self.protocol.tick(self.world.now_s))

    def held(self, attempt, prompt_len, layers=range(NUM_LAYERS)):
        return {
            (layer, kv, position): self.pool.get((layer, kv, self.tables[attempt].slot(position)))
            for layer in layers
            for kv in range(2)
            for position in range(prompt_len)
        }

    def do(self, actions, payload=b""):
        for action in actions:
            match action:
                case at_d.SendControl():
                    self.world.post(self.name, action.peer, [action.control.SerializeToString()])
                case at_d.WriteFrame(_, header):
                    self.write = (header, payload)
                case at_d.DigestLayer(landing_id, layer):
                    landing = self.protocol.landing(landing_id)
                    held = self.held(landing.attempt, landing.prompt_len, range(layer, layer + 1))
                    self.do(self.protocol.digested(landing_id, layer, digest(held), self.world.now_s))
                case at_d.ReserveWanted():
                    self.wanted.append(action)
                case at_d.Sealed():
                    self.on_sealed(action)
                case at_d.LandingFailed(attempt):
                    self.wanted = [wanted for wanted in self.wanted if wanted.attempt != attempt]
                    if attempt in self.sealed:
                        highest = self.protocol._rules.table.highest_attempt(attempt.request_id)
                        assert highest > attempt.attempt, "only a higher attempt ends what is sealed"
                        self.release(attempt)
                case at_d.Drained(attempt):
                    self.allocator.release(self.tables.pop(attempt))

    def on_sealed(self, sealed):
        attempt = sealed.attempt
        expected = {
            (layer, kv, position): content(attempt, layer, kv, position)
            for layer in range(NUM_LAYERS)
            for kv in range(2)
            for position in range(sealed.prompt_len)
        }
        assert self.held(attempt, sealed.prompt_len) == expected, "invariant 2"
        assert sealed.state.first_token == attempt.attempt
        assert sealed.bytes_landed >= sealed.prompt_len * NUM_LAYERS * LAYOUT.bytes_per_position
        assert attempt.attempt > self.highest_sealed.get(attempt.request_id, -1), "invariant 3"
        self.highest_sealed[attempt.request_id] = attempt.attempt
        self.sealed[attempt] = expected
        self.world.log.add((attempt, "sealed"))

    def check(self):
        held = sum(len(table.blocks) for table in self.tables.values())
        assert self.allocator.num_free + held == NUM_BLOCKS, "invariant 4"
        states = {landing.attempt: landing.state for landing in self.protocol.landings()}
        granted = {attempt for attempt, state in states.items() if state is not LandingState.WANTED}
        assert granted == set(self.tables), "invariant 4: blocks without a landing, or a landing without blocks"
        assert {a for a, state in states.items() if state is LandingState.SEALED} == set(self.sealed)
        for attempt, expected in self.sealed.items():
            assert self.held(attempt, max(key[2] for key in expected) + 1) == expected, "invariant 9"


class World:
    """Two prefill and two decode workers, messages in flight, and a clock."""

    def __init__(self):
        self.now_s = 100.0
        self.log = set()
        self.in_flight = []  # (sender, receiver, parts)
        self.history = []
        self.cut = set()  # pairs of names that cannot reach each other
        self.num_epochs = 0
        self.next_attempt = {}
        self.prefills = {name: PrefillNode(self, name, self.epoch()) for name in ("p0", "p1")}
        self.decodes = {name: DecodeNode(self, name, self.epoch()) for name in ("d0", "d1")}

    def epoch(self):
        self.num_epochs += 1
        return 1000 + self.num_epochs

    def nodes(self):
        return [*self.prefills.values(), *self.decodes.values()]

    def node(self, name):
        return self.prefills.get(name) or self.decodes[name]

    def post(self, sender, receiver, parts):
        self.in_flight.append((sender, receiver, parts))
        self.history = [*self.history[-63:], (sender, receiver, parts)]

    def deliver(self, index=0):
        sender, receiver, parts = self.in_flight.pop(index)
        if frozenset((sender, receiver)) not in self.cut:
            self.node(receiver).on_message(sender, parts)

    def deliver_all(self, limit=2000):
        while self.in_flight:
            limit -= 1
            assert limit, "messages without end"
            self.deliver()
            for decode_node in self.decodes.values():
                decode_node.finish_write()
                decode_node.do(decode_node.protocol.flush())

    def reserve(self, prefill, decode_name, request_id, prompt_len, epoch=None):
        attempt = AttemptKey(request_id, self.next_attempt.get(request_id, 0))
        self.next_attempt[request_id] = attempt.attempt + 1
        node = self.decodes[decode_name]
        peer = at_p.DecodePeer(decode_name, decode_name, node.epoch if epoch is None else epoch)
        self.prefills[prefill].reserve(attempt, peer, prompt_len)
        return attempt

    def crash_prefill(self, name):
        self.prefills[name] = PrefillNode(self, name, self.epoch())

    def crash_decode(self, name):
        self.decodes[name] = DecodeNode(self, name, self.epoch())

    def advance(self, seconds):
        while seconds > 0:
            step = min(seconds, 0.1)
            self.now_s += step
            seconds -= step
            for node in self.nodes():
                node.tick()

    def work(self):
        """What every worker would do next."""
        for node in self.decodes.values():
            node.finish_write()
            for wanted in tuple(node.wanted):
                node.grant(wanted)
        for node in self.prefills.values():
            for attempt, source in tuple(node.sources.items()):
                if source.is_granted and not source.has_failed and not source.is_committed:
                    for layer in range(NUM_LAYERS):
                        if attempt in node.sources:
                            node.push(attempt, layer, source.prompt_len)
                    if attempt in node.sources and not source.has_failed:
                        node.commit(attempt)

    def settle(self, limit_s=40.0):
        """Faults are over: everything must end."""
        self.cut.clear()
        end_s = self.now_s + limit_s
        while self.now_s < end_s:
            self.deliver_all()
            self.work()
            self.deliver_all()
            for node in self.decodes.values():
                for attempt in tuple(node.sealed):
                    node.release(attempt)
            if not any(node.sources for node in self.prefills.values()) and not any(
                node.tables or node.wanted for node in self.decodes.values()
            ):
                break
            self.advance(0.1)
            self.check()
        self.check()
        for node in self.prefills.values():
            assert not node.sources, f"invariant 11: {node.sources} never ended"
        for node in self.decodes.values():
            assert not node.tables, f"invariant 11: {node.tables} never ended"
            assert node.allocator.num_free == NUM_BLOCKS, "invariant 4: blocks leaked"

    def check(self):
        for node in self.nodes():
            node.check()
