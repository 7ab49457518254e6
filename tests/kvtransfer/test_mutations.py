"""Mistakes made on purpose: each is what a hand-off could get wrong, and each is caught by the virtual cluster."""

import dataclasses

import pytest

from baton.kvtransfer.protocol import frame, messages
from baton.kvtransfer.protocol.coverage import Coverage
from baton.kvtransfer.receiver.protocol import ReceiverFrames, ReceiverInbox, ReceiverProtocol
from baton.kvtransfer.receiver.rules import ReceiverRules
from baton.kvtransfer.receiver.table import IncomingState, IncomingTable, RankPush
from baton.kvtransfer.sender.actions import Acked, PushDrained
from baton.kvtransfer.sender.protocol import PushInbox
from baton.kvtransfer.sender.rules import PushRules
from baton.kvtransfer.sender.table import Transfer
from baton.proto import kv_pb2
from baton.tests.kvtransfer.simulation import Options
from baton.tests.kvtransfer.simulation_decode import DecodeNode
from baton.tests.kvtransfer.simulation_driver import Driver

NUM_STEPS = 120  # of one run
MAX_RUNS = 600

INLINE, SHM = Options(), Options(data_path="shm")
BLIND = Options(has_digest=False)
RANKS = Options(prefill_tp=2, decode_tp=2)
SHM_RANKS = Options(prefill_tp=2, data_path="shm")
MUTATIONS: dict = {}


def mutation(options, **weights):
    """Register a function that plants a mistake by `monkeypatch`; the rest says what kind of trouble it fears."""

    def register(plant):
        MUTATIONS[plant.__name__] = (plant, options, weights)
        return plant

    return register


# Fences


@mutation(BLIND, reserve=12, answer=15, push=15, everyone_works=2, crash_receiver=3, replay=20)
def a_frame_of_another_epoch_is_taken(patch):
    arrived = ReceiverFrames.arrived

    def take(self, peer, header, now_s):
        incoming = self._rules.table.by_id(header.incoming_id)
        attempt = header.attempt if incoming is None else incoming.attempt.attempt
        return arrived(self, peer, dataclasses.replace(header, d_epoch=self._rules.epoch, attempt=attempt), now_s)

    patch.setattr(ReceiverFrames, "arrived", take)


@mutation(BLIND)
def a_receiver_process_restarts_with_the_same_epoch(patch):
    start = DecodeNode.start

    def restart(self):
        before = getattr(self, "epoch", None)
        epoch = self.world.epoch
        self.world.epoch = epoch if before is None else lambda: before
        start(self)
        self.world.epoch = epoch

    patch.setattr(DecodeNode, "start", restart)


@mutation(INLINE)
def a_lower_attempt_is_granted_after_a_higher(patch):
    patch.setattr(IncomingTable, "highest_attempt", lambda self, request_id: -1)


@mutation(INLINE)
def what_has_ended_is_forgotten_at_once(patch):
    patch.setattr(IncomingTable, "bury", lambda self, tombstone: None)


@mutation(INLINE)
def a_reserve_for_another_incarnation_is_taken(patch):
    on_reserve = ReceiverInbox._on_reserve

    def take(self, peer, known, reserve, now_s):
        reserve.peer_epoch = self._rules.epoch
        return on_reserve(self, peer, known, reserve, now_s)

    patch.setattr(ReceiverInbox, "_on_reserve", take)


@mutation(INLINE)
def a_complete_incoming_takes_frames(patch):
    arrived = ReceiverFrames.arrived

    def take(self, peer, header, now_s):
        incoming = self._rules.table.by_id(header.incoming_id)
        if incoming is not None and incoming.state is IncomingState.COMPLETE:
            incoming.state = IncomingState.FILLING
            incoming.coverage = self._rules.coverage(incoming.prompt_len)
        return arrived(self, peer, header, now_s)

    patch.setattr(ReceiverFrames, "arrived", take)


# What counts as whole


@mutation(BLIND)
def a_incoming_seals_with_a_piece_missing(patch):
    patch.setattr(Coverage, "is_complete", lambda self: sum(1 for _ in self.gaps()) <= 1)


@mutation(INLINE)
def a_wrong_digest_is_believed(patch):
    landed = ReceiverFrames.landed
    patch.setattr(ReceiverFrames, "landed", lambda self, header, digest, now_s: landed(self, header, None, now_s))


@mutation(BLIND)
def a_wrong_checksum_is_believed(patch):
    failed = ReceiverFrames.failed

    def believe(self, header, now_s, *, is_corrupt):
        return self.landed(header, None, now_s) if is_corrupt else failed(self, header, now_s, is_corrupt=False)

    patch.setattr(ReceiverFrames, "failed", believe)


@mutation(BLIND, damage=60)
def a_header_is_believed_without_its_checksum(patch):
    patch.setattr(frame, "crc32c", lambda data, value=0: 0)


@mutation(RANKS, everyone_works=1, push=40, share=10, deliver_in_order=30)
def a_group_seals_without_one_rank(patch):
    complete = ReceiverRules.complete_if_whole

    def without(self, incoming, now_s):
        for part in incoming.parts[1:]:
            if part.commit is None and incoming.coverage.is_complete():
                part.commit = kv_pb2.Commit(layer_digests=part.digests)
        return complete(self, incoming, now_s)

    patch.setattr(ReceiverRules, "complete_if_whole", without)


@mutation(INLINE)
def a_sequence_is_shown_twice(patch):
    on_commit = ReceiverInbox._on_commit

    def again(self, peer, known, commit, now_s):
        incoming = self._rules.table.by_id(commit.incoming_id)
        if incoming is not None and incoming.state is IncomingState.COMPLETE:
            incoming.state = IncomingState.FILLING
            for part in incoming.parts:
                part.commit.round = 0
            commit.round += 1
        return on_commit(self, peer, known, commit, now_s)

    patch.setattr(ReceiverInbox, "_on_commit", again)


@mutation(SHM)
def a_incoming_seals_while_its_sender_writes_again(patch):
    nack = ReceiverRules.nack

    def keep(self, incoming, part, corrupt=()):
        actions = nack(self, incoming, part, corrupt)
        part.is_commit_void = False
        return actions

    patch.setattr(ReceiverRules, "nack", keep)
    patch.setattr(RankPush, "write_off", lambda self, next_seq: None)


@mutation(SHM)
def a_commit_overtakes_the_writes(patch):
    hasty = property(lambda self: self.state.name == "COMMITTING" and not self.to_send and not self.is_commit_posted)
    patch.setattr(Transfer, "is_commit_due", hasty)


# When blocks are free


@mutation(SHM)
def quarantine_ends_by_a_timer(patch):
    ask = ReceiverRules.ask

    def free(self, incoming, now_s):
        age_s = now_s - min(part.renewed.at_s for part in incoming.parts)
        return self.drain(incoming, now_s) if age_s > 2 * self.config.lease_s else ask(self, incoming, now_s)

    patch.setattr(ReceiverRules, "ask", free)


@mutation(SHM_RANKS)
def one_rank_speaks_for_all(patch):
    def drain(self, incoming, now_s):
        if incoming.writes or not any(part.is_drained for part in incoming.parts):
            return []
        return self.drain(incoming, now_s)

    patch.setattr(ReceiverRules, "drain_if_quiet", drain)


@mutation(INLINE)
def blocks_are_freed_under_a_write_in_progress(patch):
    drain = ReceiverRules.drain_if_quiet

    def hasty(self, incoming, now_s):
        incoming.writes.clear()
        return drain(self, incoming, now_s)

    patch.setattr(ReceiverRules, "drain_if_quiet", hasty)


@mutation(SHM)
def a_successor_swears_for_a_incarnation_gone_by(patch):
    on_abort = PushInbox._on_abort

    def swear(self, address, peer, abort, now_s):
        abort.peer_epoch = self._me.epoch
        return on_abort(self, address, peer, abort, now_s)

    patch.setattr(PushInbox, "_on_abort", swear)
    on_ack = ReceiverInbox._on_abort_ack

    def believe(self, peer, known, ack, now_s):
        incoming = self._rules.table.get(messages.attempt_of(ack.attempt))
        if incoming is not None:
            ack.peer_epoch = incoming.p_epoch
        return on_ack(self, peer, known, ack, now_s)

    patch.setattr(ReceiverInbox, "_on_abort_ack", believe)


@mutation(SHM)
def an_abort_is_acknowledged_before_it_is_quiet(patch):
    on_abort = PushInbox._on_abort

    def hasty(self, address, peer, abort, now_s):
        actions = on_abort(self, address, peer, abort, now_s)
        ack = self._rules.messages.abort_ack(abort, is_told=True)
        return [*actions, type(self._rules.hello(address, now_s))(address, ack)] if peer else actions

    patch.setattr(PushInbox, "_on_abort", hasty)


@mutation(SHM, abort_decode=10, answer=20, reserve=10)
def an_abort_that_overtakes_its_grant_is_acknowledged_and_forgotten(patch):
    on_abort = PushInbox._on_abort

    def forget(self, address, peer, abort, now_s):
        transfer = self._rules.transfers.get(messages.attempt_of(abort.attempt))
        if transfer is None or transfer.grant is not None or peer is None:
            return on_abort(self, address, peer, abort, now_s)
        ack = self._rules.messages.abort_ack(abort, is_told=True)
        return [type(self._rules.hello(address, now_s))(address, ack)]

    patch.setattr(PushInbox, "_on_abort", forget)


@mutation(SHM)
def source_blocks_are_freed_while_they_are_read(patch):
    patch.setattr(Transfer, "is_quiet", property(lambda self: True))


@mutation(INLINE)
def source_blocks_are_freed_before_the_ack(patch):
    commit = PushRules._commit_message

    def hasty(self, transfer, now_s):
        message = commit(self, transfer, now_s)
        self.end(transfer, Acked(transfer.attempt, 0))
        return message

    patch.setattr(PushRules, "_commit_message", hasty)


@mutation(SHM_RANKS)
def a_rank_pushes_without_asking_whether_the_grant_still_holds(patch):
    may_post = PushRules._may_post

    def hasty(self, transfer, peer, now_s):
        transfer.is_confirmed, transfer.is_resume_posted = True, False
        return may_post(self, transfer, peer, now_s)

    patch.setattr(PushRules, "_may_post", hasty)


@mutation(SHM)
def a_restarted_receiver_process_knows_nothing_of_its_past(patch):
    patch.setattr(ReceiverProtocol, "inherit", lambda self, inherited, now_s: None)


@mutation(INLINE)
def a_drained_transfer_is_never_reported(patch):
    end = PushRules.end

    def silent(self, transfer, event):
        return [action for action in end(self, transfer, event) if not isinstance(action, PushDrained)]

    patch.setattr(PushRules, "end", silent)


# Credit


@mutation(INLINE)
def the_window_is_not_kept(patch):
    patch.setattr(PushRules, "_window_bytes", lambda self, peer, live, now_s: 1 << 40)


@mutation(INLINE)
def credit_leaks(patch):
    charge = ReceiverRules.charge

    def leak(self, incoming, part, header):
        if header.first == 0:
            charge(self, incoming, part, header)

    patch.setattr(ReceiverRules, "charge", leak)


@mutation(INLINE)
def a_frame_that_comes_twice_is_credited_twice(patch):
    def generous(self, incoming, part, header):
        part.charged_bytes += header.charge_bytes
        self._uncredited.add((incoming.incoming_id, part.rank))

    patch.setattr(ReceiverRules, "charge", generous)


@mutation(SHM, damage=60)
def a_control_message_is_believed_without_its_checksum(patch):
    patch.setattr(messages, "crc32c", lambda data: 0)


def first_caught(options, weights):
    """How many runs and steps it takes; None if nothing is noticed."""
    steps = 0
    for seed in range(MAX_RUNS):
        driver = Driver(seed, options, **weights)
        try:
            driver.run(NUM_STEPS)
        except Exception as error:  # noqa: BLE001  (a mistake may show anywhere)
            return seed + 1, steps + driver.world.steps, repr(error)[:150]
        steps += driver.world.steps
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_mistake_is_caught(name, monkeypatch):
    plant, options, weights = MUTATIONS[name]
    plant(monkeypatch)
    assert first_caught(options, weights) is not None, f"{MAX_RUNS} runs of {NUM_STEPS} steps did not notice: {name}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_the_mistake_nothing_is_caught(name):
    _, options, weights = MUTATIONS[name]
    for seed in range(4):
        Driver(seed, options, **weights).run(NUM_STEPS)
