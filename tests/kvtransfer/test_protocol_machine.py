"""Hypothesis drives two prefill and two decode workers over a network that drops, repeats, reorders and damages."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.tests.kvtransfer.simulation import NUM_LAYERS, World

PREFILLS = st.sampled_from(["p0", "p1"])
DECODES = st.sampled_from(["d0", "d1"])
INDEX = st.integers(0, 1 << 16)
RARE = st.sampled_from([False, False, False, True])


def pick(items, index):
    return items[index % len(items)]


class HandOff(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World()

    @initialize(pairs=st.lists(st.tuples(PREFILLS, DECODES, st.integers(1, 7)), min_size=1, max_size=4))
    def begin(self, pairs):
        """Most examples start with some transfers granted, so that the interesting part is not rare."""
        for index, (prefill, decode, prompt_len) in enumerate(pairs):
            self.world.reserve(prefill, decode, f"r{index}", prompt_len)
        self.world.deliver_all()
        for node in self.world.decodes.values():
            for wanted in tuple(node.wanted):
                node.grant(wanted)
        self.world.deliver_all()

    # What workers do

    @rule(prefill=PREFILLS, decode=DECODES, request=st.integers(0, 5), prompt_len=st.integers(1, 7))
    def reserve(self, prefill, decode, request, prompt_len):
        self.world.reserve(prefill, decode, f"r{request}", prompt_len)

    def _live(self, index, wanted):
        found = [(n, a) for n in self.world.prefills.values() for a, s in n.sources.items() if wanted(s)]
        return pick(found, index) if found else (None, None)

    @rule(index=INDEX, layer=st.integers(0, NUM_LAYERS - 1), count=st.integers(1, 7))
    def push(self, index, layer, count):
        node, attempt = self._live(index, lambda s: s.is_granted and not s.has_failed and not s.is_computed)
        if node:
            node.push(attempt, layer, count)

    @rule(index=INDEX)
    def commit(self, index):
        node, attempt = self._live(
            index, lambda s: s.is_granted and s.is_computed and not s.is_committed and not s.has_failed
        )
        if node:
            node.commit(attempt)

    @rule()
    def everyone_works(self):
        self.world.work()

    @rule(index=INDEX, rare=RARE)
    def abort_prefill(self, index, rare):
        node, attempt = self._live(index, lambda s: not s.has_failed)
        if node and rare:
            node.abort(attempt)

    @rule(index=INDEX, hold=st.booleans())
    def hold(self, index, hold):
        node, attempt = self._live(index, lambda s: True)
        if node and hold:
            node.protocol.hold(attempt)
            node.do(node.protocol.unhold(attempt))

    @rule(decode=DECODES, index=INDEX, is_denied=st.booleans())
    def answer(self, decode, index, is_denied):
        node = self.world.decodes[decode]
        if node.wanted:
            (node.deny if is_denied and index % 4 == 0 else node.grant)(pick(node.wanted, index))

    @rule(decode=DECODES, index=INDEX, rare=RARE)
    def abort_decode(self, decode, index, rare):
        node = self.world.decodes[decode]
        if node.tables and rare:
            node.abort(pick(list(node.tables), index))

    @rule(decode=DECODES, index=INDEX)
    def release(self, decode, index):
        node = self.world.decodes[decode]
        if node.sealed:
            node.release(pick(list(node.sealed), index))

    @rule(decode=DECODES)
    def finish_write(self, decode):
        self.world.decodes[decode].finish_write()

    # What the network does

    @precondition(lambda self: self.world.in_flight)
    @rule(index=INDEX)
    def deliver(self, index):
        self.world.deliver(index % len(self.world.in_flight))

    @rule(random=st.randoms(use_true_random=False), num_steps=st.integers(1, 40))
    def storm(self, random, num_steps):
        """Work goes on while the network misbehaves."""
        for _ in range(num_steps):
            self.world.work()
            if not self.world.in_flight:
                break
            index = random.randrange(len(self.world.in_flight)) if random.random() < 0.3 else 0
            what = random.random()
            if what < 0.05:
                self.drop(index)
            elif what < 0.1:
                self.world.in_flight.append(self.world.in_flight[index])
            elif what < 0.15:
                self.damage(index, random.randrange(1 << 16), False)
            else:
                self.world.deliver(index)

    @rule(count=st.integers(1, 40))
    def deliver_in_order(self, count):
        for _ in range(min(count, len(self.world.in_flight))):
            self.world.deliver()

    @precondition(lambda self: self.world.in_flight)
    @rule(index=INDEX)
    def drop(self, index):
        self.world.in_flight.pop(index % len(self.world.in_flight))

    @precondition(lambda self: self.world.history)
    @rule(index=INDEX)
    def replay(self, index):
        self.world.in_flight.append(pick(self.world.history, index))

    @precondition(lambda self: self.world.in_flight)
    @rule(index=INDEX, bit=INDEX, truncate=st.booleans())
    def damage(self, index, bit, truncate):
        index %= len(self.world.in_flight)
        sender, receiver, parts = self.world.in_flight[index]
        if len(parts) == 1:
            return  # control messages travel with TCP's own checksum; frames must not rely on it
        part = bytearray(parts[bit % len(parts)])
        if not part:
            return
        if truncate:
            del part[bit % len(part) :]
        else:
            part[bit % len(part)] ^= 1 << bit % 8
        damaged = [bytes(part) if i == bit % len(parts) else old for i, old in enumerate(parts)]
        self.world.in_flight[index] = (sender, receiver, damaged)

    @rule(prefill=PREFILLS, decode=DECODES, cut=RARE)
    def partition(self, prefill, decode, cut):
        (self.world.cut.add if cut else self.world.cut.discard)(frozenset((prefill, decode)))

    # What machines do

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.1, 0.3, 0.6, 2.5]))
    def wait(self, seconds):
        self.world.advance(seconds)

    @rule(prefill=PREFILLS, rare=RARE)
    def crash_prefill(self, prefill, rare):
        if rare:
            self.world.crash_prefill(prefill)

    @rule(decode=DECODES, rare=RARE)
    def crash_decode(self, decode, rare):
        if rare:
            self.world.crash_decode(decode)

    @rule(decode=DECODES, index=INDEX, bit=st.integers(0, 62))
    def memory_fault(self, decode, index, bit):
        """A bit of a landing that is not sealed flips in memory."""
        node = self.world.decodes[decode]
        filling = [attempt for attempt in node.tables if attempt not in node.sealed]
        if filling and node.write is None:
            table = node.tables[pick(filling, index)]
            landing = next(x for x in node.protocol.landings() if x.attempt == pick(filling, index))
            key = (index % NUM_LAYERS, bit % 2, table.slot(bit % landing.prompt_len))
            # Once a layer was digested, only the engine's own memory protection can help: leave it alone.
            if key in node.pool and landing.digests[key[0]] is None:
                node.pool[key] ^= 1 << bit

    @invariant()
    def holds(self):
        self.world.check()

    def teardown(self):
        self.world.settle()


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.fast
def test_the_invariants_hold():
    run_state_machine_as_test(
        HandOff,
        settings=settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=CHECKS),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_invariants_hold_for_long():
    run_state_machine_as_test(
        HandOff,
        settings=settings(max_examples=5000, stateful_step_count=120, deadline=None, suppress_health_check=CHECKS),
    )
