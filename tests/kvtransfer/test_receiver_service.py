"""What the worker's side says when an incoming transfer's life ends between two of its words."""

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.records import decode_record, encode_record
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed, ReceiverService, ReserveWanted
from baton.kvtransfer.receiver.setup import Legacy
from baton.proto import kv_pb2

pytestmark = pytest.mark.fast

KEY = AttemptKey("r", 1)
TABLE = BlockTable((1, 2), 16)


class HandHost:
    """Lives and deaths by hand."""

    address = "hand"

    def __init__(self):
        self.epoch = 5
        self.reason = None
        self.legacies = None
        self.condemned = []
        self.wakeup = lambda: None

    def start(self):
        pass

    def wake(self):
        pass

    def check(self):
        pass

    def death(self):
        return self.reason

    def revive(self, legacies):
        self.reason, self.legacies = None, legacies
        self.epoch += 1

    def condemn(self, reason):
        self.condemned.append(reason)

    def close(self):
        pass


class Setting:
    def __init__(self):
        self.link = ReceiverLink(bytearray(ReceiverLink.num_bytes(8, 64)), 8, 64)
        self.host = HandHost()
        self.service = ReceiverService(self.link, self.host)

    def say(self, event, slot=0):
        assert self.link.events.push(encode_record(event, slot))

    def complete(self, incoming_id=1):
        self.link.words.set(0, incoming_id)
        self.say(Completed(KEY, incoming_id, 9, kv_pb2.SequenceState(), 0, 0, 0.0))

    def granted(self, data_path="raw"):
        self.say(ReserveWanted(KEY, 9, 12, 1e9, 77, 2, data_path))
        (event,) = self.service.poll()
        self.service.grant(KEY, TABLE)
        return event

    def die(self):
        self.host.reason = "it was killed"
        return self.service.poll()


@pytest.fixture
def setting():
    return Setting()


def test_what_was_asked_for_and_not_granted_fails(setting):
    setting.say(ReserveWanted(KEY, 9, 12, 1e9))
    assert [type(event) for event in setting.die()] == [ReserveWanted, IncomingFailed]
    assert setting.host.legacies == []
    assert setting.service.poll() == []


def test_what_was_granted_fails_and_has_drained_where_the_dead_process_wrote_alone(setting):
    setting.granted()
    failed, drained = setting.die()
    assert (failed.attempt, failed.by_peer, drained) == (KEY, False, Drained(KEY))
    assert "it was killed" in failed.reason
    setting.service.abort(KEY, "the worker heard of it")
    assert setting.link.commands.pop() is None, "the next incarnation knows nothing of it"


def test_what_others_write_is_handed_to_the_next_life(setting):
    setting.granted("shm")
    (failed,) = setting.die()
    assert isinstance(failed, IncomingFailed)
    assert setting.host.legacies == [Legacy(KEY, 5, 77, 2, "shm", False)]
    assert setting.die() == [], "it was said once"
    assert setting.host.legacies == [Legacy(KEY, 5, 77, 2, "shm", False)]
    setting.say(Drained(KEY))
    assert setting.service.poll() == [Drained(KEY)]
    assert setting.die() == []
    assert setting.host.legacies == []


def test_what_is_sealed_goes_on_until_it_is_released(setting):
    setting.granted()
    setting.complete()
    assert [type(event) for event in setting.die()] == [Completed]
    assert setting.host.legacies == [Legacy(KEY, 5, 77, 2, "raw", True)]
    setting.service.release(KEY)
    assert setting.die() == []
    assert setting.host.legacies == []


def test_a_seal_that_crosses_with_an_abort_does_not_count(setting):
    setting.granted()
    setting.service.abort(KEY, "client went away")
    setting.complete()
    assert setting.service.poll() == []
    assert setting.die() == [Drained(KEY)]


def test_a_seal_that_was_taken_back_does_not_count(setting):
    setting.granted()
    setting.complete()
    setting.link.words.set(0, 0)
    setting.say(IncomingFailed(KEY, "superseded"))
    assert [type(event) for event in setting.service.poll()] == [IncomingFailed]
    assert setting.die() == [Drained(KEY)]


def test_commands_of_a_dead_life_are_never_read_by_the_next(setting):
    setting.granted()
    setting.die()
    assert setting.link.commands.pop() is None
    setting.service.release(AttemptKey("other", 0))
    record, _ = decode_record(setting.link.commands.pop())
    assert record.attempt == AttemptKey("other", 0)


def test_totals_outlive_a_life(setting):
    setting.link.set_counts(dict.fromkeys(setting.service.inventory(), 3))
    setting.die()
    setting.link.set_counts(dict.fromkeys(setting.service.inventory(), 1))
    counts = setting.service.inventory()
    assert (counts["bytes_landed"], counts["num_kv_receives"]) == (4, 1)


def test_garbage_ends_the_life(setting):
    setting.granted()
    setting.link.events.push(b"\xff" * 8)
    assert setting.service.poll() == []
    assert len(setting.host.condemned) == 1
    assert [type(event) for event in setting.die()] == [IncomingFailed, Drained]
