"""The decode workers of the virtual cluster: a pool of tagged places, the transfer's driver, and the worker."""

import dataclasses

from baton.core.errors import BatonError, ProtocolError
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import decode_header, is_frame
from baton.kvtransfer.protocol.messages import encode_control, parse_control
from baton.kvtransfer.receiver import actions as at_d
from baton.kvtransfer.receiver.protocol import ReceiverProtocol
from baton.kvtransfer.receiver.table import IncomingState, Inherited
from baton.proto import kv_pb2
from baton.tests.kvtransfer import simulation as sim


class ModelPool:
    """The pools of all ranks of one decode worker. A block knows whose it is; that is its generation."""

    def __init__(self, node, num_ranks):
        self.node = node
        self.free = list(range(sim.NUM_BLOCKS))
        self.owner = [None] * sim.NUM_BLOCKS
        self.ranks = [{} for _ in range(num_ranks)]  # (layer, head, block, row) -> tag
        self.version = 0

    def reserve(self, attempt, capacity_len):
        count = -(-capacity_len // sim.BLOCK_SIZE)
        if count > len(self.free):
            return None
        blocks = tuple(self.free[:count])
        del self.free[:count]
        for block in blocks:
            assert self.owner[block] is None
            self.owner[block] = attempt
        return blocks

    def release(self, attempt, blocks):
        for block in blocks:
            assert self.owner[block] == attempt, "a block is freed twice"
            self.owner[block] = None
            self.free.append(block)

    def write(self, attempt, blocks, layer, head, position, value):
        """Every write of anybody comes through here."""
        if self.node.is_gone:
            return  # memory of a worker that is dead
        block = blocks[position // sim.BLOCK_SIZE]
        assert self.owner[block] == attempt, "invariants 1 and 10: a write into a block that is not its own any more"
        assert attempt not in self.node.complete, "invariant 9: a write after the seal"
        self.version += 1
        self.ranks[head % len(self.ranks)][layer, head, block, position % sim.BLOCK_SIZE] = value

    def read(self, blocks, layer, head, position):
        block = blocks[position // sim.BLOCK_SIZE]
        return self.ranks[head % len(self.ranks)].get((layer, head, block, position % sim.BLOCK_SIZE))

    def digest(self, blocks, layer, first, stop, heads):
        return (
            sum(
                sim.cell_digest(self.read(blocks, layer, head, position) or 0, layer, head, position)
                for position in range(first, stop)
                for head in heads
            )
            & sim.MASK
        )


@dataclasses.dataclass
class Landed:
    """A write in progress, by this side or, if the sender wrote, a digest."""

    header: object
    values: tuple
    attempt: AttemptKey
    has_begun: bool = False
    is_discarded: bool = False


class DecodeNode:
    def __init__(self, world, name):
        self.world, self.name = world, name
        self.is_stopped = self.is_dead = self.is_gone = False
        self.pool = ModelPool(self, world.options.decode_tp)
        self.tables = {}  # attempt -> blocks, held by an incoming transfer or a sequence
        self.owners = {}  # attempt -> (p_epoch, tp_size, data path, d_epoch)
        self.wanted = []
        self.complete = {}  # attempt -> what the pool held then
        self.seen_version = -1
        self.highest_complete = {}
        self.granted = set()
        self.writes = []
        self.digests = []
        self.start()

    def start(self):
        """A KV receiver process begins."""
        options = self.world.options
        self.epoch = self.world.epoch()
        offers = [] if options.data_path == "inline" else [kv_pb2.DataPathOffer(data_path=options.data_path)]
        self.protocol = ReceiverProtocol(
            epoch=self.epoch,
            layout=sim.LAYOUT,
            config=sim.CONFIG,
            max_capacity_len=sim.NUM_BLOCKS * sim.BLOCK_SIZE,
            offers=offers,
            host_id="host",
            has_digest=options.has_digest,
            digests_layers=options.digests_layers,
        )
        self.turn_s = self.now()

    def restart_incoming(self):
        """The KV receiver process dies; the worker, its pool and its sequences live on."""
        self.writes.clear()
        self.digests.clear()
        self.wanted.clear()
        old = dict(self.tables)
        self.start()
        for attempt, blocks in old.items():
            p_epoch, tp_size, data_path, d_epoch = self.owners[attempt]
            is_complete = attempt in self.complete
            if data_path == "inline" and not is_complete:  # its only writer is dead
                self.pool.release(attempt, blocks)
                del self.tables[attempt]
            else:
                self.protocol.inherit(Inherited(attempt, d_epoch, p_epoch, tp_size, data_path, is_complete), self.now())

    def now(self):
        return self.world.now_s * (1.0 - self.world.options.skew) + self.epoch

    def states(self):
        return [incoming.state for incoming in self.protocol.incoming_transfers()]

    # The worker

    def grant(self, wanted):
        """Blocks for whoever is first in line; False if there are not enough."""
        attempt = wanted.attempt
        blocks = self.pool.reserve(attempt, wanted.capacity_len)
        if blocks is None:
            return False
        self.wanted.remove(wanted)
        assert attempt not in self.granted, "invariant 3: an attempt is granted twice"
        self.granted.add(attempt)
        self.tables[attempt] = blocks
        self.owners[attempt] = (wanted.p_epoch, wanted.tp_size, wanted.data_path, self.epoch)
        self.do(self.protocol.grant(attempt, self.now(), blocks))
        return True

    def grant_all(self):
        """In the order of their coming; nobody overtakes, and who waits holds nothing."""
        while self.wanted and self.grant(self.wanted[0]):
            pass

    def deny(self, wanted):
        self.wanted.remove(wanted)
        self.do(self.protocol.deny(wanted.attempt, kv_pb2.Deny.BUSY, "test", self.now()))

    def abort(self, attempt):
        self.complete.pop(attempt, None)
        self.do(self.protocol.abort(attempt, "test", self.now()))

    def release(self, attempt):
        del self.complete[attempt]
        self.pool.release(attempt, self.tables.pop(attempt))
        self.do(self.protocol.release(attempt, self.now()))

    def look_for_dead(self):
        for incarnation in self.protocol.suspects():
            if (incarnation.p_epoch, incarnation.rank) in self.world.dead:
                self.do(self.protocol.peer_is_dead(incarnation.p_epoch, self.now(), incarnation.rank))

    # The driver

    def on_message(self, message):
        try:
            if message.payload is None:
                self.do(self.protocol.on_control(message.sender, parse_control(message.data), self.now()))
            elif is_frame(message.data):
                self.on_frame(message)
            else:
                self.world.lost(message)
        except BatonError:
            if message.payload is not None:
                self.protocol.on_corrupt_frame()
                self.world.lost(message)

    def on_frame(self, message):
        header = decode_header(message.data)
        num_values = 0 if header.is_written else header.count * header.head_count
        if len(message.payload) != num_values:
            raise ProtocolError("the payload is cut off")
        if message.seq is not None:
            *key, seq = message.seq
            self.world.frames[tuple(key)][seq] = "arrived"
        self.do(self.protocol.on_frame(message.sender, header, self.now()), message.payload)

    def begin_write(self, write):
        """Half of it."""
        write.has_begun = True
        self.put(write, write.values[: (len(write.values) + 1) // 2])

    def finish_write(self, write, is_whole=True):
        """All of it, or the connection ends in the middle; of what was discarded nothing more is written."""
        self.writes.remove(write)
        header = write.header
        if write.is_discarded or not is_whole:
            self.do(self.protocol.write_failed(header, self.now()))
            if not write.is_discarded:
                self.mark(write, "lost")
            return
        self.put(write, write.values)
        if header.payload_crc is not None and any(value >> 60 for value in write.values):
            self.do(self.protocol.write_failed(header, self.now(), is_corrupt=True))
            return
        digest = None
        if header.payload_digest is not None and not self.world.options.digests_layers:
            heads = range(header.head_first, header.head_first + header.head_count)
            blocks = self.tables[write.attempt]
            digest = self.pool.digest(blocks, header.layer, header.first, header.end, heads)
        self.do(self.protocol.landed(header, digest, self.now()))

    def mark(self, write, state):
        for (_, _, attempt), seqs in self.world.frames.items():
            if attempt == write.attempt and write.header.seq in seqs:
                seqs[write.header.seq] = state

    def put(self, write, values):
        header = write.header
        heads = range(header.head_first, header.head_first + header.head_count)
        cells = [(position, head) for position in range(header.first, header.end) for head in heads]
        blocks = self.tables.get(write.attempt)
        if not values:
            return
        assert blocks is not None, "invariants 1 and 6: a write without a grant, or after it drained"
        for (position, head), value in zip(cells, values, strict=False):
            self.pool.write(write.attempt, blocks, header.layer, head, position, value)

    def finish_all(self):
        while self.writes:
            self.finish_write(self.writes[0])
        while self.digests:
            self.digest(self.digests.pop(0))

    def digest(self, wanted):
        incoming = self.protocol._rules.table.by_id(wanted.incoming_id)
        if incoming is None:
            return
        blocks = self.tables[incoming.attempt]
        digest = self.pool.digest(blocks, wanted.layer, 0, incoming.prompt_len, range(sim.NUM_HEADS))
        self.do(self.protocol.digested(wanted.incoming_id, wanted.layer, digest, self.now()))

    def flush(self):
        self.do(self.protocol.flush())

    def tick(self):
        now_s = self.now()
        self.protocol.forgive(now_s - self.turn_s, now_s)
        self.turn_s = now_s
        self.flush()
        self.do(self.protocol.tick(now_s))

    def do(self, actions, payload=()):
        for action in actions:
            match action:
                case at_d.AnswerControl():
                    self.on_send(action)
                case at_d.WriteFrame(incoming_id, header):
                    attempt = self.protocol.incoming(incoming_id).attempt
                    self.writes.append(Landed(header, payload, attempt))
                case at_d.DiscardWrites(incoming_id):
                    for write in self.writes:
                        write.is_discarded |= write.header.incoming_id == incoming_id
                case at_d.DigestLayer():
                    self.digests.append(action)
                case at_d.ReserveWanted():
                    self.wanted.append(action)
                case at_d.Completed():
                    self.on_complete(action)
                case at_d.IncomingFailed(attempt):
                    self.wanted = [wanted for wanted in self.wanted if wanted.attempt != attempt]
                    if attempt in self.complete:
                        highest = self.protocol._rules.table.highest_attempt(attempt.request_id)
                        assert highest > attempt.attempt, "only a higher attempt ends what is complete"
                        self.release(attempt)
                case at_d.Drained(attempt):
                    self.on_drained(attempt)

    def on_send(self, action):
        if action.control.WhichOneof("message") == "abort_ack":
            wire = action.control.abort_ack.attempt
            attempt = AttemptKey(wire.request_id, wire.attempt)
            if attempt in self.tables and attempt not in self.complete:
                assert self.owners[attempt][3] != action.control.abort_ack.epoch, "invariant 6: not drained"
        self.world.post(self.name, action.peer, encode_control(action.control))

    def on_drained(self, attempt):
        blocks = self.tables.pop(attempt)
        p_epoch, tp_size, data_path, d_epoch = self.owners[attempt]
        if data_path != "inline" and (attempt, "complete") not in self.world.log:
            for rank in range(tp_size):
                said = (p_epoch, rank, d_epoch, attempt) in self.world.drained
                assert said or (p_epoch, rank) in self.world.dead, "invariant 10: freed without evidence"
        for write in self.writes:
            assert write.attempt != attempt, "invariant 1: drained while a write is in progress"
        self.pool.release(attempt, blocks)

    def on_complete(self, complete):
        attempt = complete.attempt
        expected = {
            (layer, head, position): sim.tag(attempt, layer, head, position)
            for layer in range(sim.NUM_LAYERS)
            for head in range(sim.NUM_HEADS)
            for position in range(complete.prompt_len)
        }
        assert self.held(attempt, expected) == expected, "invariant 2"
        assert complete.state.first_token == 1000 + attempt.attempt
        assert complete.bytes_landed >= complete.prompt_len * sim.LAYOUT.bytes_per_position
        assert attempt.attempt > self.highest_complete.get(attempt.request_id, -1), "invariant 3"
        assert (attempt, "complete") not in self.world.log, "invariant 3"
        p_epoch = self.owners[attempt][0]
        for rank in self.world.ranks():
            if rank.epoch == p_epoch and attempt in rank.sources:
                assert rank.sources[attempt].is_committed, "invariant 12: a rank did not commit"
                assert not any(write.attempt == attempt for write in rank.writes), "invariant 9: sealed and written"
        self.highest_complete[attempt.request_id] = attempt.attempt
        self.complete[attempt] = expected
        self.world.log.add((attempt, "complete"))

    def held(self, attempt, places):
        blocks = self.tables[attempt]
        return {place: self.pool.read(blocks, place[0], place[1], place[2]) for place in places}

    def check(self):
        held = sum(len(blocks) for blocks in self.tables.values())
        assert len(self.pool.free) + held == sim.NUM_BLOCKS, "invariant 4"
        states = {incoming.attempt: incoming.state for incoming in self.protocol.incoming_transfers()}
        granted = {attempt for attempt, state in states.items() if state is not IncomingState.WANTED}
        assert granted == self.tables.keys(), (
            "invariant 4: blocks without an incoming transfer, or an incoming transfer without blocks"
        )
        assert {a for a, state in states.items() if state is IncomingState.COMPLETE} == self.complete.keys()
        if self.seen_version != self.pool.version:
            self.seen_version = self.pool.version
            for attempt, expected in self.complete.items():
                assert self.held(attempt, expected) == expected, "invariant 9"
