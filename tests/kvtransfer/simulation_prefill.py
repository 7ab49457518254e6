"""The prefill workers of the virtual cluster: ranks with their protocol and its driver, and the worker around them."""

import dataclasses

from baton.core.errors import BatonError
from baton.kvtransfer.protocol.frame import encode_header
from baton.kvtransfer.protocol.messages import encode_control, parse_control
from baton.kvtransfer.sender import actions as at_p
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.table import TransferState
from baton.proto import kv_pb2
from baton.tests.kvtransfer import simulation as sim

COST_BITS = 1 << 61  # set in a tag, it is damaged


@dataclasses.dataclass
class Source:
    """One transfer as one rank's loop knows it."""

    peer: at_p.DecodePeer
    prompt_len: int
    pushed: list
    is_granted: bool = False
    is_committed: bool = False
    has_failed: bool = False

    @property
    def is_computed(self):
        return all(pushed == self.prompt_len for pushed in self.pushed)


@dataclasses.dataclass
class Write:
    """Into a decode worker's pool, by the prefill rank itself."""

    attempt: object
    peer: str
    d_epoch: int
    header: object
    blocks: tuple
    place: object  # the pool that was mapped
    values: tuple
    digest: int | None
    has_begun: bool = False


@dataclasses.dataclass
class EarlyWrite:
    """A writer thread writes what was just computed, before the protocol asks for it; it holds the transfer."""

    attempt: object
    layer: int
    first: int
    count: int
    blocks: tuple
    place: object


class Rank:
    """One process of a prefill worker."""

    def __init__(self, world, node, name, epoch, rank):
        self.world, self.node, self.epoch, self.rank = world, node, epoch, rank
        self.name = f"{name}/{rank}#{epoch}" if world.options.names_change else f"{name}/{rank}"
        self.is_stopped = self.is_dead = False
        data_paths = (world.options.data_path, "inline")
        self.protocol = PushProtocol(
            identity=PushIdentity(
                epoch,
                rank,
                world.options.prefill_tp,
                data_paths,
                "host",
                f"life-{epoch}-{rank}",
                world.options.has_digest,
            ),
            layout=dataclasses.replace(sim.LAYOUT, block_size=4),
            config=sim.CONFIG,
        )
        heads = sim.LAYOUT.pushed_heads(0, rank, world.options.prefill_tp)
        self.heads = range(heads.first, heads.stop)
        self.sources = {}
        self.ended = {}
        self.maps = {}  # address -> pool
        self.writes = []
        self.held = []
        self.early = []
        self.early_done = set()  # (attempt, layer, position)
        self.turn_s = self.now()

    def now(self):
        return self.world.now_s * (1.0 + self.world.options.skew * self.rank) + self.epoch * 10.0

    def states(self):
        return [transfer.state for transfer in self.protocol.transfers()]

    def push(self, attempt, layer, count):
        source = self.sources[attempt]
        first = source.pushed[layer]
        count = min(count, source.prompt_len - first)
        is_early = any(early.attempt == attempt and early.layer == layer for early in self.early)
        if count and not is_early:
            source.pushed[layer] += count
            digest = sum(
                sim.cell_digest(sim.tag(attempt, layer, head, position), layer, head, position)
                for head in self.heads
                for position in range(first, first + count)
            )
            self.do(self.protocol.pushed(attempt, layer, first, count, digest & sim.MASK, self.now()))

    def begin_early(self, attempt, layer, count):
        """Write the next positions of a layer, if that is allowed now. Bytes may land at any later time."""
        source = self.sources[attempt]
        first = source.pushed[layer]
        count = min(count, source.prompt_len - first)
        transfer = self.protocol.transfer(attempt)
        is_first = not any(e.attempt == attempt and e.layer == layer for e in self.early)
        if not count or not is_first or transfer is None or self.now() > self.protocol.write_deadline_s(attempt):
            return
        self.protocol.hold(attempt)
        place = self.maps[source.peer.kv_address]
        self.early.append(EarlyWrite(attempt, layer, first, count, transfer.grant.blocks, place))

    def finish_early(self, early, is_whole=True):
        """All bytes, then the hold ends; the part is pushed unless the step failed."""
        self.early.remove(early)
        places = [(p, h) for p in range(early.first, early.first + early.count) for h in self.heads]
        for position, head in places:
            value = sim.tag(early.attempt, early.layer, head, position)
            early.place.write(early.attempt, early.blocks, early.layer, head, position, value)
        source = self.sources.get(early.attempt)
        assert source is not None, "invariant 5: the transfer ended while a writer was at it"
        if is_whole and not source.has_failed and source.pushed[early.layer] == early.first:
            self.early_done |= {(early.attempt, early.layer, position) for position, _ in places}
            self.push(early.attempt, early.layer, early.count)
        self.do(self.protocol.unhold(early.attempt))

    def commit(self, attempt):
        self.sources[attempt].is_committed = True
        state = kv_pb2.SequenceState(first_token=1000 + attempt.attempt) if self.rank == 0 else None
        self.do(self.protocol.commit(attempt, state, self.now(), self.now()))

    def abort(self, attempt):
        self.sources[attempt].has_failed = True
        self.do(self.protocol.abort(attempt, "test", self.now()))

    def hold(self, attempt):
        self.protocol.hold(attempt)
        self.held.append(attempt)

    def unhold(self):
        self.do(self.protocol.unhold(self.held.pop(0)))

    def work(self):
        while self.early:
            self.finish_early(self.early[0])
        self.finish_writes()
        while self.held:
            self.unhold()
        for attempt, source in tuple(self.sources.items()):
            if source.is_granted and not source.has_failed and not source.is_committed:
                for layer in range(sim.NUM_LAYERS):
                    if attempt in self.sources and not source.has_failed:
                        self.push(attempt, layer, source.prompt_len)
                if attempt in self.sources and not source.has_failed:
                    self.commit(attempt)

    def on_message(self, message):
        try:
            assert message.payload is None
            self.do(self.protocol.on_control(message.sender, parse_control(message.data), self.now()))
        except BatonError:
            pass

    def tick(self):
        now_s = self.now()
        self.protocol.forgive(now_s - self.turn_s, now_s)
        self.turn_s = now_s
        self.do(self.protocol.tick(now_s))

    def do(self, actions):
        for action in actions:
            match action:
                case at_p.SendControl():
                    self.on_send(action)
                case at_p.SendFrame():
                    self.send_frame(action)
                case at_p.StopFrames():
                    self.stop_frames(action)
                case at_p.OpenDataPath():
                    data_path = self.world.options.data_path
                    is_offered = any(offer.data_path == data_path for offer in action.offers)
                    self.maps[action.peer] = self.world.decodes[action.peer].pool
                    opened = data_path if is_offered else "inline"
                    self.do(self.protocol.data_path_opened(action.peer, opened, self.now()))
                case at_p.DropPeer():
                    pass
                case at_p.Granted(attempt, grant):
                    assert not self.sources[attempt].is_granted
                    self.sources[attempt].is_granted = True
                    self.node.granted.append((attempt, self.sources[attempt].peer, grant))
                case at_p.PushFailed(attempt):
                    assert not self.sources[attempt].has_failed
                    self.sources[attempt].has_failed = True
                    self.node.failed.append(attempt)
                case at_p.Denied(attempt) | at_p.Acked(attempt) | at_p.PushDrained(attempt):
                    self.on_end(action, attempt)

    def on_send(self, action):
        if action.control.WhichOneof("message") == "abort_ack":
            ack = action.control.abort_ack
            attempt = sim.AttemptKey(ack.attempt.request_id, ack.attempt.attempt)
            assert (ack.peer_epoch, ack.tp_rank) == (self.epoch, self.rank)
            assert not any(w.attempt == attempt and w.d_epoch == ack.epoch for w in self.writes), "invariants 5 and 6"
            assert not any(early.attempt == attempt for early in self.early), "invariants 5 and 6"
            for rank in self.node.ranks if ack.all_ranks else (self,):
                assert rank is self or attempt not in rank.sources, "invariant 6: another rank knows of it"
                self.world.drained.add((self.epoch, rank.rank, ack.epoch, attempt))
        if action.control.WhichOneof("message") == "commit":
            wire = action.control.commit.attempt
            attempt = sim.AttemptKey(wire.request_id, wire.attempt)
            assert not any(write.attempt == attempt for write in self.writes), "invariant 9: it writes after its COMMIT"
        self.post(action.peer, encode_control(action.control))

    def on_end(self, action, attempt):
        source = self.sources.pop(attempt)
        assert not isinstance(action, at_p.PushDrained) or source.has_failed
        assert not isinstance(action, at_p.Denied) or not source.is_granted
        if isinstance(action, at_p.Acked):
            assert (attempt, "complete") in self.world.log, "acknowledged and never sealed"
        assert not any(write.attempt == attempt for write in self.writes), "invariant 5: a write reads freed blocks"
        assert not any(early.attempt == attempt for early in self.early), "invariant 5: a write reads freed blocks"
        assert attempt not in self.held or not source.has_failed, "invariant 5: a writer reads freed blocks"
        self.ended[attempt] = type(action).__name__

    def send_frame(self, action):
        header, attempt = action.header, action.attempt
        assert attempt in self.sources, "invariant 5: source read after the transfer ended"
        assert (self.epoch, self.rank, header.d_epoch, attempt) not in self.world.drained, "invariant 6"
        self.check_window(action)
        cells = [(position, head) for position in range(header.first, header.end) for head in self.heads]
        values = tuple(sim.tag(attempt, header.layer, head, position) for position, head in cells)
        digest = None
        if action.has_digest:
            digest = sum(sim.cell_digest(v, header.layer, h, p) for v, (p, h) in zip(values, cells, strict=True))
            digest &= sim.MASK
        seqs = self.world.frames.setdefault((self.epoch, self.rank, attempt), {})
        assert header.seq not in seqs
        seqs[header.seq] = "posted"
        where = {(attempt, header.layer, position) for position in range(header.first, header.end)}
        if action.data_path != "inline" and where <= self.early_done:
            self.early_done -= where
            written = dataclasses.replace(header, payload_digest=digest)
            self.post_frame(action.peer, attempt, written, ())
            self.do(self.protocol.written(attempt, header, self.now()))
            return
        if action.data_path == "inline":
            header = dataclasses.replace(header, payload_digest=digest, payload_crc=None if action.has_digest else 1)
            self.post_frame(action.peer, attempt, header, values)
            return
        place = self.maps[action.peer]
        write = Write(attempt, action.peer, header.d_epoch, header, action.target_blocks, place, values, digest)
        self.writes.append(write)

    def check_window(self, action):
        """Invariant 7: at most the window, but for a frame that is larger than it."""
        transfers = [t for t in self.protocol.transfers() if t.state is not TransferState.ABORTING]
        charges = sum(t.in_flight_bytes for t in transfers if t.peer.kv_address == action.peer)
        limit = max(sim.CONFIG.window_bytes, action.header.charge_bytes)
        assert charges <= limit, "invariant 7: more in flight than the window"

    def post_frame(self, peer, attempt, header, values):
        seq = (self.epoch, self.rank, attempt, header.seq)
        self.post(peer, encode_header(header), values, seq)

    def post(self, peer, data, payload=None, seq=None):
        """Two processes never have one connection: where names do not change, it is the successor's."""
        if self in self.world.zombies and not self.world.options.names_change:
            self.world.lost(sim.Message(self.name, peer, data, payload, seq))
        elif payload is None:
            self.world.post(self.name, peer, data)
        else:
            self.world.post(self.name, peer, data, payload, seq)

    # A one-sided data path

    def begin_write(self, write, damage=False):
        """The first half."""
        write.has_begun = True
        if damage:
            write.values = (write.values[0] ^ sim_damage(self.world.rng), *write.values[1:])
        self.put(write, write.values[: (len(write.values) + 1) // 2])

    def finish_write(self, write):
        """All of it, then the word that it is there."""
        if not write.has_begun:
            self.begin_write(write)
        self.put(write, write.values)
        self.writes.remove(write)
        header = dataclasses.replace(write.header, payload_digest=write.digest)
        self.post_frame(write.peer, write.attempt, header, ())
        self.do(self.protocol.written(write.attempt, write.header, self.now()))

    def fail_write(self, write):
        self.writes.remove(write)
        self.world.lost(sim.Message("", "", b"", None, (self.epoch, self.rank, write.attempt, write.header.seq)))
        self.do(self.protocol.written(write.attempt, write.header, self.now(), "it failed"))

    def put(self, write, values):
        header = write.header
        assert (self.epoch, self.rank, header.d_epoch, write.attempt) not in self.world.drained, "invariant 6"
        cells = [(position, head) for position in range(header.first, header.end) for head in self.heads]
        for (position, head), value in zip(cells, values, strict=False):
            write.place.write(write.attempt, write.blocks, header.layer, head, position, value)

    def finish_writes(self):
        for write in tuple(self.writes):
            if write in self.writes:
                self.finish_write(write)

    def stop_frames(self, action):
        for write in tuple(self.writes):
            if write.attempt == action.attempt and not write.has_begun:
                self.writes.remove(write)
                seq = (self.epoch, self.rank, write.attempt, write.header.seq)
                self.world.lost(sim.Message("", "", b"", None, seq))
                self.do(self.protocol.written(write.attempt, write.header, self.now()))

    # Checks

    def check(self):
        transfers = list(self.protocol.transfers())
        assert {transfer.attempt for transfer in transfers} == self.sources.keys(), "invariants 4 and 5"
        num_writes = dict.fromkeys(self.sources, 0)
        for write in self.writes:
            num_writes[write.attempt] += 1
        for transfer in transfers:
            assert transfer.in_flight_bytes >= 0, "invariant 7"
            assert transfer.num_writes == num_writes[transfer.attempt], "invariant 5"

    def check_credits(self):
        for transfer in self.protocol.transfers():
            is_open = transfer.state in (TransferState.PUSHING, TransferState.COMMITTING)
            node = self.world.decodes[transfer.peer.kv_address]
            if not is_open or self.writes or transfer.is_resume_posted or node.epoch != transfer.peer.epoch:
                continue
            incoming = node.protocol._rules.table.by_id(transfer.incoming_id)
            if incoming is None or incoming.state.name != "FILLING" or incoming.attempt != transfer.attempt:
                continue
            part = incoming.parts[self.rank]
            assert transfer.credited_bytes <= part.charged_bytes <= transfer.charged_bytes, "invariant 7"
            states = self.world.frames.get((self.epoch, self.rank, transfer.attempt), {})
            open_seqs = [seq for seq, state in states.items() if seq >= part.min_seq and state == "lost"]
            is_written_off = part.nacked_round == transfer.round  # and the news of it got lost
            if not is_written_off and not open_seqs and not self.world.in_flight:
                assert transfer.charged_bytes == part.charged_bytes, "invariant 7: credit is lost"


def sim_damage(rng):
    """Bits to flip in a tag."""
    return COST_BITS | rng.randrange(1 << 20)


class PrefillNode:
    """A worker: its ranks, and what passes between them."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.epoch = world.epoch()
        self.granted = []  # by rank 0, not passed on
        self.failed = []  # on one rank, not passed on
        self.ranks = [Rank(world, self, name, self.epoch, rank) for rank in range(world.options.prefill_tp)]

    @property
    def protocol(self):
        """Rank 0's."""
        return self.ranks[0].protocol

    @property
    def sources(self):
        return self.ranks[0].sources

    @property
    def ended(self):
        return self.ranks[0].ended

    def reserve(self, attempt, peer, prompt_len):
        rank = self.ranks[0]
        rank.sources[attempt] = Source(peer, prompt_len, [0] * sim.NUM_LAYERS)
        rank.do(
            rank.protocol.reserve(
                attempt, peer, prompt_len=prompt_len, capacity_len=prompt_len + 1, wait_s=4.0, now_s=rank.now()
            )
        )

    def share(self):
        """Pass grants and failures on."""
        while self.granted:
            attempt, peer, grant = self.granted.pop(0)
            prompt_len = self.ranks[0].sources[attempt].prompt_len if attempt in self.ranks[0].sources else 1
            for rank in self.ranks[1:]:
                if not rank.is_dead:
                    rank.sources[attempt] = Source(peer, prompt_len, [0] * sim.NUM_LAYERS, is_granted=True)
                    rank.do(rank.protocol.adopt(attempt, peer, prompt_len=prompt_len, grant=grant, now_s=rank.now()))
        while self.failed:
            attempt = self.failed.pop(0)
            for rank in self.ranks:
                source = rank.sources.get(attempt)
                if source is not None and not source.has_failed:
                    rank.abort(attempt)

    def work(self):
        if not any(rank.is_stopped for rank in self.ranks):
            self.share()
        for rank in self.ranks:
            if not rank.is_stopped and not rank.is_dead:
                rank.work()

    def push(self, attempt, layer, count):
        for rank in self.ranks:
            if attempt in rank.sources:
                rank.push(attempt, layer, count)

    def commit(self, attempt):
        for rank in self.ranks:
            if attempt in rank.sources:
                rank.commit(attempt)

    def abort(self, attempt):
        for rank in self.ranks:
            source = rank.sources.get(attempt)
            if source is not None and not source.has_failed:
                rank.abort(attempt)
