"""A virtual cluster for the hand-off protocol: real machines and headers, model pools, a hostile network, a clock.

Two prefill workers of one or two ranks, two decode workers whose pools are split over one or two ranks, and a data path
that is one-sided or not. Pools hold tags, so content says whose it is. Every check of an invariant
(research/kv-transfer.md, section 3) is an assert here or in the two workers, so whoever drives a `World` gets them all
after every step.
"""

import random
import zlib
from collections import Counter
from dataclasses import dataclass

from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import FRAME_OVERHEAD_BYTES
from baton.kvtransfer.protocol.messages import parse_control
from baton.kvtransfer.sender.actions import DecodePeer
from baton.tests.kvtransfer.simulation_decode import DecodeNode
from baton.tests.kvtransfer.simulation_prefill import PrefillNode

NUM_LAYERS, NUM_HEADS, BLOCK_SIZE, NUM_BLOCKS = 2, 2, 2, 8
LAYOUT = KVLayout.of_attention(
    model_hash="model",
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_HEADS,
    head_dim=1,
    block_size=BLOCK_SIZE,
    dtype="float64",
)
POSITION_BYTES = LAYOUT.bytes_per_position // NUM_LAYERS  # of one layer
CONFIG = KVTransferConfig(max_frame_bytes=2 * POSITION_BYTES, window_bytes=3 * FRAME_OVERHEAD_BYTES + 256, ring_slots=8)
HISTORY = 64
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Options:
    """What kind of cluster."""

    prefill_tp: int = 1
    decode_tp: int = 1
    data_path: str = "inline"
    has_digest: bool = True
    digests_layers: bool = False
    skew: float = 0.0  # of clocks, relative
    names_change: bool = False  # a process that restarts gets another connection name

    @staticmethod
    def of(rng):
        data_path = rng.choice(["inline", "shm"])
        return Options(
            prefill_tp=rng.choice([1, 2]),
            decode_tp=rng.choice([1, 2]),
            data_path=data_path,
            has_digest=rng.random() < 0.85,
            digests_layers=data_path == "inline" and rng.random() < 0.2,
            skew=rng.choice([0.0, 0.0, 0.02]),
            names_change=rng.random() < 0.3,
        )


def tag(attempt, layer, head, position):
    """What the source of an attempt holds at one place: different for everything."""
    request = zlib.crc32(attempt.request_id.encode())
    return ((((request << 8 | attempt.attempt) << 3 | layer) << 3 | head) << 8) | position


def cell_digest(value, layer, head, position):
    """A digest of one place that adds up."""
    return hash((value, layer, head, position)) & MASK


@dataclass
class Message:
    """On its way; `payload` is a tuple of tags, None for control messages."""

    sender: str
    receiver: str
    data: bytes
    payload: tuple | None = None
    seq: tuple | None = None  # of a frame: (p_epoch, rank, attempt, seq), for the ledger

    @property
    def parts(self):
        return (self.data, self.payload)


class World:
    """Everything."""

    def __init__(self, options=None, seed=0):
        self.options = options or Options()
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.log = set()  # (attempt, "sealed")
        self.in_flight = []
        self.history = []
        self.old_frames = []
        self.cut = set()  # pairs of worker names that cannot reach each other
        self.hits = Counter()  # (fault, side, state)
        self.steps = 0
        self.num_epochs = 0
        self.next_attempt = {}
        self.drained = set()  # (p_epoch, rank, d_epoch, attempt) that a prefill rank swore to leave alone
        self.dead = set()  # (p_epoch, rank)
        self.frames = {}  # (p_epoch, rank, attempt) -> {seq: state of the frame}
        self.zombies = []  # ranks whose place was taken by another incarnation, and who do not know it
        self.prefills = {name: PrefillNode(self, name) for name in ("p0", "p1")}
        self.decodes = {name: DecodeNode(self, name) for name in ("d0", "d1")}

    def epoch(self):
        self.num_epochs += 1
        return 1000 + self.num_epochs

    def ranks(self):
        """Of all prefill workers, those that were replaced and live on included."""
        return [rank for node in self.prefills.values() for rank in node.ranks] + self.zombies

    def actors(self):
        return [*self.ranks(), *self.decodes.values()]

    def find(self, name):
        """The rank or decode worker that a message is for; None if there is none by that name now."""
        if name in self.decodes:
            return self.decodes[name]
        return next((rank for rank in self.ranks() if rank.name == name), None)

    # The network

    def post(self, sender, receiver, data, payload=None, seq=None):
        message = Message(sender, receiver, data, payload, seq)
        self.in_flight.append(message)
        for kept in (self.history, self.old_frames)[: 2 if payload is not None else 1]:
            kept.append(message)
            if len(kept) > 2 * HISTORY:
                del kept[:HISTORY]

    def is_cut(self, message):
        return frozenset((worker_of(message.sender), worker_of(message.receiver))) in self.cut

    def deliver(self, index=0):
        """Bring one message; what cannot be delivered is lost, what waits for a stopped process waits."""
        message = self.in_flight[index]
        actor = self.find(message.receiver)
        if actor is not None and actor.is_stopped and not self.is_cut(message):
            self.in_flight.append(self.in_flight.pop(index))
            return
        self.in_flight.pop(index)
        if actor is None or actor.is_dead or self.is_cut(message):
            self.lost(message)
            return
        actor.on_message(message)

    def lost(self, message):
        """Will not come."""
        if message.seq is not None:
            *key, seq = message.seq
            states = self.frames.get(tuple(key), {})
            if states.get(seq) == "posted":
                states[seq] = "lost"

    def deliver_all(self, limit=5000):
        while self.in_flight and not all(self._waits(message) for message in self.in_flight):
            limit -= 1
            assert limit, "messages without end"
            self.deliver()
            for node in self.decodes.values():
                if not node.is_stopped:
                    node.finish_all()
                    node.flush()

    def _waits(self, message):
        actor = self.find(message.receiver)
        return actor is not None and actor.is_stopped and not self.is_cut(message)

    # What workers do

    def reserve(self, prefill, decode_name, request_id, prompt_len, epoch=None):
        attempt = AttemptKey(request_id, self.next_attempt.get(request_id, 0))
        self.next_attempt[request_id] = attempt.attempt + 1
        node = self.decodes[decode_name]
        peer = DecodePeer(decode_name, decode_name, node.epoch if epoch is None else epoch)
        self.prefills[prefill].reserve(attempt, peer, prompt_len)
        return attempt

    def work(self):
        """What every worker would do next."""
        for node in self.decodes.values():
            if not node.is_stopped:
                node.finish_all()
                node.grant_all()
        for node in self.prefills.values():
            node.work()

    def advance(self, seconds):
        while seconds > 1e-9:
            step = min(seconds, 0.1)
            self.now_s += step
            seconds -= step
            for actor in self.actors():
                if not actor.is_stopped and not actor.is_dead:
                    actor.tick()

    def crash_prefill(self, name):
        for rank in self.prefills[name].ranks:
            self.dead.add((rank.epoch, rank.rank))
        self.prefills[name] = PrefillNode(self, name)

    def replace_prefill(self, name):
        """Somebody believes that it is dead, and starts another. It was only stopped, or cut off."""
        self.zombies += self.prefills[name].ranks
        self.prefills[name] = PrefillNode(self, name)

    def end_zombies(self):
        """Now they are dead."""
        for rank in self.zombies:
            self.dead.add((rank.epoch, rank.rank))
        self.zombies.clear()

    def crash_decode(self, name):
        self.decodes[name].is_gone = True
        self.decodes[name] = DecodeNode(self, name)

    def crash_receiver(self, name):
        self.decodes[name].restart_incoming()

    def look_for_dead(self):
        for node in self.decodes.values():
            node.look_for_dead()

    # Faults are over

    def settle(self, limit_s=60.0):
        """Everything must end."""
        self.cut.clear()
        self.end_zombies()
        for actor in self.actors():
            actor.is_stopped = False
        for name, node in tuple(self.prefills.items()):
            if any(rank.is_dead for rank in node.ranks):
                self.crash_prefill(name)
        self.check()
        end_s = self.now_s + limit_s
        while self.now_s < end_s and not self.is_idle():
            for _ in range(2):
                self.deliver_all()
                self.work()
            self.deliver_all()
            self.look_for_dead()
            for node in self.decodes.values():
                for attempt in tuple(node.complete):
                    node.release(attempt)
            if self.is_idle():
                break
            self.advance(0.1)
            self.check()
        self.check()
        for rank in self.ranks():
            assert not rank.sources, f"invariant 11: {rank.sources} never ended"
            assert not rank.writes, "invariant 11: writes never ended"
        for node in self.decodes.values():
            assert not node.tables, f"invariant 11: {node.tables} never ended"
            assert len(node.pool.free) == NUM_BLOCKS, "invariant 4: blocks leaked"

    def is_idle(self):
        return not any(rank.sources or rank.writes for rank in self.ranks()) and not any(
            node.tables or node.wanted for node in self.decodes.values()
        )

    def check(self):
        """The invariants that are not checked where things happen."""
        self.steps += 1
        for actor in self.actors():
            actor.check()

    def check_credits_at_rest(self):
        """Invariant 7, exactly: with nothing on its way, only what was lost is still in flight."""
        if any(actor.is_stopped or actor.is_dead for actor in self.actors()):
            return
        for _ in range(2):
            for node in self.decodes.values():
                node.finish_all()
                node.flush()
            self.deliver_all()
        for rank in self.ranks():
            rank.check_credits()

    # What faults meet

    def note(self, fault, *names):
        """Count in which states a fault found those it concerns."""
        for name in names:
            actor = self.find(name)
            if actor is None:
                continue
            side = "incoming" if name in self.decodes else "push"
            for state in actor.states():
                self.hits[fault, side, state.name] += 1


def worker_of(name):
    """The worker of an actor's name."""
    return name.split("/")[0]


def control_kind(message):
    """The kind of a control message; empty for a frame."""
    return "" if message.payload is not None else str(parse_control(message.data).WhichOneof("message"))
