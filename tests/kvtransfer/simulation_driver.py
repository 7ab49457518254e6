"""Random steps for a `World`: what workers, the network and machines may do, at any moment.

A seeded driver that costs little, for volume; the Hypothesis machine in `test_protocol_machine` takes the same steps.
"""

import random

from baton.tests.kvtransfer.simulation import NUM_LAYERS, Options, World

PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")
WAITS_S = (0.01, 0.1, 0.1, 0.3, 0.6, 2.5)


class Driver:
    """Takes one random step after the other.

    Args:
        seed: decides everything.
        options: of the cluster; drawn if not given.
        **weights: of some steps, in place of those in STEPS.
    """

    def __init__(self, seed, options=None, **weights):
        self.rng = random.Random(seed)
        self.world = World(options or Options.of(self.rng), seed)
        self.names = [name for name, _ in STEPS]
        fault_share = self.choice((1.0, 0.2))  # in half of the runs most of the work gets done
        usual = {name: weight * (fault_share if name in FAULTS else 1.0) for name, weight in STEPS}
        self.weights = [weights.get(name, weight) for name, weight in usual.items()]
        for index in range(self.rng.randint(1, 4)):
            self.world.reserve(self.choice(PREFILLS), self.choice(DECODES), f"r{index}", self.rng.randint(1, 7))
        self.world.deliver_all()
        for node in self.world.decodes.values():
            node.grant_all()
        self.world.deliver_all()

    def choice(self, items):
        return items[int(self.rng.random() * len(items))]

    def run(self, num_steps):
        """So many steps, the invariants after each; then everything must end."""
        for name in self.rng.choices(self.names, self.weights, k=num_steps):
            getattr(self, name)()
            self.world.check()
        self.world.settle()

    # What workers do

    def live(self, wanted):
        """A rank and an attempt of which `wanted(source)` holds."""
        found = [
            (rank, attempt)
            for rank in self.world.ranks()
            if not rank.is_stopped and not rank.is_dead
            for attempt, source in rank.sources.items()
            if wanted(source)
        ]
        return self.choice(found) if found else (None, None)

    def node(self):
        node = self.world.decodes[self.choice(DECODES)]
        return None if node.is_stopped else node

    def reserve(self):
        name = self.choice(PREFILLS)
        if any(rank.is_stopped or rank.is_dead for rank in self.world.prefills[name].ranks):
            return
        if sum(len(rank.sources) for rank in self.world.ranks()) > 10:
            return
        self.world.reserve(name, self.choice(DECODES), f"r{self.rng.randrange(6)}", self.rng.randint(1, 7))

    def push(self):
        rank, attempt = self.live(lambda s: s.is_granted and not s.has_failed and not s.is_computed)
        if rank:
            rank.push(attempt, self.rng.randrange(NUM_LAYERS), self.rng.randint(1, 7))

    def commit(self):
        rank, attempt = self.live(lambda s: s.is_granted and s.is_computed and not s.is_committed and not s.has_failed)
        if rank:
            rank.commit(attempt)

    def share(self):
        node = self.world.prefills[self.choice(PREFILLS)]
        if not any(rank.is_stopped for rank in node.ranks):
            node.share()

    def everyone_works(self):
        self.world.work()

    def abort_prefill(self):
        rank, attempt = self.live(lambda s: not s.has_failed)
        if rank:
            self.world.note("abort_prefill", rank.name)
            rank.abort(attempt)

    def hold(self):
        """A writer thread reads the source blocks for a while."""
        rank, attempt = self.live(lambda s: True)
        if rank:
            rank.hold(attempt)
        held = [rank for rank in self.world.ranks() if rank.held and not rank.is_stopped and not rank.is_dead]
        if held and self.rng.random() < 0.5:
            self.choice(held).unhold()

    def answer(self):
        node = self.node()
        if node and node.wanted:
            if self.rng.random() < 0.1:
                node.deny(self.choice(node.wanted))
            else:
                node.grant(node.wanted[0])

    def abort_decode(self):
        node = self.node()
        if node and node.tables:
            self.world.note("abort_decode", node.name)
            attempt = self.choice(list(node.tables))
            node.abort(attempt)

    def release(self):
        node = self.node()
        if node and node.complete:
            node.release(self.choice(list(node.complete)))

    def write_at_incoming(self):
        """A write at the receiving side begins, ends, or breaks off."""
        node = self.node()
        if node is None:
            return
        if node.digests and self.rng.random() < 0.5:
            node.digest(node.digests.pop(0))
        if node.writes:
            write = self.choice(node.writes)
            what = self.rng.random()
            if not write.has_begun and not write.is_discarded and what < 0.4:
                node.begin_write(write)
            elif what < 0.9 or write.header.is_written:
                node.finish_write(write)
            else:
                self.world.note("broken_write", node.name)
                node.finish_write(write, is_whole=False)

    def write_at_source(self):
        """The same where the sender writes; sometimes other bytes arrive than were sent, or the write fails."""
        ranks = [rank for rank in self.world.ranks() if rank.writes and not rank.is_stopped and not rank.is_dead]
        if not ranks:
            return
        rank = self.choice(ranks)
        write = self.choice(rank.writes)
        what = self.rng.random()
        if not write.has_begun and what < 0.4:
            is_damaged = self.world.options.has_digest and self.rng.random() < 0.1
            if is_damaged:
                self.world.note("damaged_write", rank.name, write.peer)
            rank.begin_write(write, is_damaged)
        elif what < 0.97:
            rank.finish_write(write)
        else:
            self.world.note("failed_write", rank.name, write.peer)
            rank.fail_write(write)

    def write_early(self):
        """A writer thread does not wait to be asked."""
        rank, attempt = self.live(lambda s: s.is_granted and not s.has_failed and not s.is_computed)
        if rank and self.world.options.data_path != "inline":
            rank.begin_early(attempt, self.rng.randrange(NUM_LAYERS), self.rng.randint(1, 7))
        busy = [rank for rank in self.world.ranks() if rank.early and not rank.is_stopped and not rank.is_dead]
        if busy and self.rng.random() < 0.6:
            rank = self.choice(busy)
            rank.finish_early(self.choice(rank.early), is_whole=self.rng.random() < 0.9)

    # What the network does

    def message(self):
        return int(self.rng.random() * len(self.world.in_flight)) if self.world.in_flight else None

    def deliver(self):
        index = self.message()
        if index is not None:
            self.world.deliver(index)

    def deliver_in_order(self):
        for _ in range(min(self.rng.randint(1, 20), len(self.world.in_flight))):
            self.world.deliver()

    def drop(self):
        index = self.message()
        if index is not None:
            message = self.world.in_flight.pop(index)
            self.world.note("drop", message.sender, message.receiver)
            self.world.lost(message)

    def repeat(self):
        index = self.message()
        if index is not None:
            message = self.world.in_flight[index]
            self.world.note("repeat", message.sender, message.receiver)
            self.world.in_flight.append(message)

    def replay(self):
        kept = self.world.old_frames if self.rng.random() < 0.3 else self.world.history
        if kept:
            message = self.choice(kept)
            self.world.note("replay", message.sender, message.receiver)
            self.world.in_flight.append(message)

    def damage(self):
        index = self.message()
        if index is None:
            return
        message = self.world.in_flight[index]
        damaged = damage(message, self.rng)
        if damaged is not message:
            self.world.note("damage", message.sender, message.receiver)
            self.world.in_flight[index] = damaged

    def partition(self):
        pair = frozenset((self.choice(PREFILLS), self.choice(DECODES)))
        if self.rng.random() < 0.3:
            self.world.note("partition", *pair)
            self.world.cut.add(pair)
        else:
            self.world.cut.discard(pair)

    # What machines do

    def wait(self):
        self.world.advance(self.choice(WAITS_S))

    def crash_prefill(self):
        name = self.choice(PREFILLS)
        self.world.note("crash", *(rank.name for rank in self.world.prefills[name].ranks))
        self.world.crash_prefill(name)

    def replace_prefill(self):
        name = self.choice(PREFILLS)
        if self.world.zombies or any(rank.is_dead for rank in self.world.prefills[name].ranks):
            self.world.end_zombies()
            return
        self.world.note("replace", *(rank.name for rank in self.world.prefills[name].ranks))
        self.world.replace_prefill(name)

    def kill_rank(self):
        """One process of a prefill worker dies; the others have not noticed."""
        rank = self.choice(self.world.ranks())
        self.world.note("kill_rank", rank.name)
        rank.is_dead = True
        rank.writes.clear()
        rank.early.clear()
        rank.sources.clear()
        rank.protocol._rules.transfers.clear()
        self.world.dead.add((rank.epoch, rank.rank))

    def crash_decode(self):
        name = self.choice(DECODES)
        self.world.note("crash", name)
        self.world.crash_decode(name)

    def crash_receiver(self):
        name = self.choice(DECODES)
        if not self.world.decodes[name].is_stopped:
            self.world.note("crash_receiver", name)
            self.world.crash_receiver(name)

    def stop(self):
        actor = self.choice(self.world.actors())
        if actor.is_stopped:
            actor.is_stopped = False
        elif self.rng.random() < 0.4:
            self.world.note("stop", actor.name)
            actor.is_stopped = True

    def look_for_dead(self):
        node = self.node()
        if node:
            node.look_for_dead()

    def calm(self):
        """Everything on its way arrives."""
        self.world.check_credits_at_rest()


def damage(message, rng):
    """The message with a bit flipped, or cut off."""
    what = rng.random()
    data, payload = message.data, message.payload
    if payload and what < 0.5:
        if what < 0.1:
            return type(message)(message.sender, message.receiver, data, payload[:-1], message.seq)
        spoiled = (payload[0] ^ (1 << 61), *payload[1:])
        return type(message)(message.sender, message.receiver, data, spoiled, message.seq)
    part = bytearray(data) or bytearray(1)
    if what > 0.9:
        del part[rng.randrange(len(part)) :]
    else:
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return type(message)(message.sender, message.receiver, bytes(part), payload, message.seq)


STEPS = (
    ("deliver", 16),
    ("deliver_in_order", 10),
    ("everyone_works", 7),
    ("push", 8),
    ("write_at_incoming", 10),
    ("write_at_source", 10),
    ("write_early", 6),
    ("commit", 5),
    ("share", 4),
    ("answer", 4),
    ("reserve", 4),
    ("wait", 5),
    ("drop", 3),
    ("repeat", 3),
    ("replay", 2),
    ("damage", 4),
    ("release", 2),
    ("partition", 1),
    ("abort_prefill", 1),
    ("abort_decode", 1),
    ("hold", 2),
    ("crash_prefill", 0.5),
    ("replace_prefill", 0.6),
    ("kill_rank", 0.3),
    ("crash_decode", 0.4),
    ("crash_receiver", 0.7),
    ("stop", 1.5),
    ("look_for_dead", 2),
    ("calm", 1),
)
FAULTS = {"drop", "damage", "partition", "abort_prefill", "abort_decode", "stop", "wait"} | {
    name for name, weight in STEPS if weight < 1
}
