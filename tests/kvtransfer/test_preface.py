"""The preface of a raw connection: a reader of all other connections, who replays what it likes, is let in nowhere."""

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import ProtocolError, Unauthenticated
from baton.kvtransfer.protocol.preface import (
    ACCEPTANCE_BYTES,
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    LISTENER_ID_BYTES,
    MAGIC,
    MAX_NAME_BYTES,
    READY,
    AcceptingPreface,
    ConnectingPreface,
)
from baton.kvtransfer.protocol.proof import NUMBER_BYTES, PROOF_BYTES, connection_pass
from baton.tests.kvtransfer.proving import OTHER_PROOFS, PROOFS

pytestmark = pytest.mark.fast

LISTENERS = [bytes([index]) * LISTENER_ID_BYTES for index in (1, 2)]
REFUSALS = (ProtocolError, Unauthenticated)
_numbers = itertools.count()


def number():
    """One that was never used before."""
    return next(_numbers).to_bytes(NUMBER_BYTES, "little")


def accepting(listener=LISTENERS[0], proofs=PROOFS):
    return AcceptingPreface(proofs, listener, number())


def connecting(listener=LISTENERS[0], name=b"p", proofs=PROOFS):
    return ConnectingPreface(proofs, listener, name, number())


def say(side, data):
    """What a side replies to bytes that come one by one; it takes no more of them than it wants."""
    replies = [side.take(data[at : at + 1]) for at in range(len(data)) if side.num_wanted]
    return b"".join(replies)


def is_refused(side, data):
    """Whether a side refuses it, and nothing comes out of that."""
    try:
        reply = say(side, data)
    except REFUSALS:
        assert side.num_wanted == 0, "it hears no second answer to one challenge"
        return not is_let_in(side)
    assert not reply and not is_let_in(side) and side.num_wanted
    return False


def is_let_in(side):
    return bool(side.name) if isinstance(side, AcceptingPreface) else side.is_accepted


def met(**changes):
    """Two sides that have met, with what each has said."""
    at_d, at_p = accepting(), connecting(**changes)
    answer = say(at_p, at_d.challenge)
    return at_d, at_p, answer, say(at_d, answer)


@given(st.binary(min_size=1, max_size=MAX_NAME_BYTES), st.sampled_from([1, 3, 64, 1000]))
def test_two_of_a_deployment_meet_however_their_bytes_are_cut(name, size):
    at_d, at_p = accepting(), connecting(name=name)
    on_wire = {at_d: at_d.challenge, at_p: b""}
    num_bytes = {at_d: 0, at_p: 0}
    while at_d.num_wanted or at_p.num_wanted:
        for side, other in ((at_p, at_d), (at_d, at_p)):
            taken = on_wire[other][: min(size, side.num_wanted)]
            on_wire[other] = on_wire[other][len(taken) :]
            num_bytes[side] += len(taken)
            on_wire[side] += side.take(taken) if taken else b""
    assert at_d.name == name and at_p.is_accepted
    assert num_bytes == {at_d: ANSWER_BYTES, at_p: CHALLENGE_BYTES + ACCEPTANCE_BYTES}
    assert on_wire == {at_d: b"", at_p: b""}


def test_no_secret_is_sent():
    at_d, _, answer, acceptance = met()
    said = at_d.challenge + answer + acceptance
    for secret in (PROOFS._key, connection_pass(PROOFS._key).encode(), bytes.fromhex(connection_pass(PROOFS._key))):
        assert secret not in said
    assert LISTENERS[0] not in said, "nor what the proof is for"


@given(st.integers(0, 3), st.integers(0, 3))
def test_an_answer_is_good_on_its_own_connection_alone(mine, other):
    doors = [accepting() for _ in range(4)]
    answers = [say(connecting(), door.challenge) for door in doors]
    if mine == other:
        assert say(doors[mine], answers[mine]) and is_let_in(doors[mine])
    else:
        assert is_refused(doors[mine], answers[other])


@given(st.integers(0, ANSWER_BYTES - 1), st.binary(max_size=2 * ANSWER_BYTES))
def test_a_cut_answer_is_refused_with_all_that_may_follow(num_bytes, more):
    at_d = accepting()
    answer = say(connecting(), at_d.challenge)
    cut = answer[:num_bytes]
    assert not is_refused(at_d, cut), "the rest may still come"
    assert is_refused(at_d, more) or len(cut + more) < ANSWER_BYTES or answer == (cut + more)[:ANSWER_BYTES]


@given(st.data())
def test_a_reordered_answer_is_refused(data):
    at_d = accepting()
    answer = say(connecting(), at_d.challenge)
    cuts = sorted(data.draw(st.sets(st.integers(1, ANSWER_BYTES - 1), min_size=1, max_size=6)))
    pieces = [answer[start:end] for start, end in itertools.pairwise([0, *cuts, ANSWER_BYTES])]
    shuffled = b"".join(data.draw(st.permutations(pieces)))
    if shuffled != answer:
        assert is_refused(at_d, shuffled)


@given(st.integers(0, 8 * ANSWER_BYTES - 1))
def test_no_bit_of_an_answer_may_be_touched(bit):
    at_d = accepting()
    answer = bytearray(say(connecting(), at_d.challenge))
    answer[bit // 8] ^= 1 << bit % 8
    assert is_refused(at_d, bytes(answer))


@pytest.mark.parametrize(
    "changes",
    [{"proofs": OTHER_PROOFS}, {"listener": LISTENERS[1]}],
    ids=["another deployment", "another incarnation"],
)
def test_a_foreign_answer_is_refused(changes):
    at_d = accepting()
    assert is_refused(at_d, say(connecting(**changes), at_d.challenge))
    at_d = accepting(**changes)
    assert is_refused(at_d, say(connecting(), at_d.challenge))


def test_a_name_is_proved_too():
    at_d = accepting()
    answer = say(connecting(name=b"p"), at_d.challenge)
    assert answer.count(b"p" + bytes(50)) == 1
    assert is_refused(at_d, answer.replace(b"p" + bytes(50), b"q" + bytes(50)))


@given(st.integers(0, 8 * ACCEPTANCE_BYTES - 1))
def test_no_bit_of_an_acceptance_may_be_touched(bit):
    at_d, at_p = accepting(), connecting()
    acceptance = bytearray(say(at_d, say(at_p, at_d.challenge)))
    acceptance[bit // 8] ^= 1 << bit % 8
    assert is_refused(at_p, bytes(acceptance))


def test_who_listens_in_a_listeners_place_gets_no_frame():
    """After a receiver's death another account may take its port, with all that it has read."""
    at_d, _, before, acceptance = met()
    for make in (
        lambda _: acceptance,
        lambda _: READY + bytes(PROOF_BYTES),
        lambda _: READY + before[-PROOF_BYTES:],
        lambda answer: READY + answer[-PROOF_BYTES:],
        lambda answer: answer[:ACCEPTANCE_BYTES],
    ):
        at_p = connecting()
        assert is_refused(at_p, make(say(at_p, at_d.challenge)))


@given(st.binary(max_size=2 * ANSWER_BYTES), st.booleans())
def test_nothing_else_is_taken_far(data, is_begun):
    """The first byte that differs from the magic ends it; and never are more bytes taken than an answer has."""
    said = MAGIC + data if is_begun else data
    side = accepting()
    try:
        say(side, said)
    except ProtocolError:
        assert not said.startswith(MAGIC)
    except Unauthenticated:
        assert len(said) >= ANSWER_BYTES
    else:
        assert MAGIC.startswith(said[: len(MAGIC)]) and side.num_wanted == ANSWER_BYTES - len(said)
    side = connecting()
    with contextlib.suppress(ProtocolError, Unauthenticated):
        say(side, said)
    assert not is_let_in(side) and side.num_wanted <= ACCEPTANCE_BYTES


@pytest.mark.parametrize("said", [b"KVR1" + bytes(400), b"\0", b"GET / HTTP/1.1\r\n", b"KVR2 ok\n" + bytes(400)])
def test_another_version_is_refused(said):
    """An attacker who changes packets cannot bring two peers back to the version that showed a token."""
    assert is_refused(accepting(), said)
    if not said.startswith(MAGIC):
        assert is_refused(connecting(), said)


class Side:
    """One side of a connection, with all that it has taken and said."""

    def __init__(self, preface, listener, proofs, name=b""):
        self.preface = preface
        self.listener = listener
        self.proofs = proofs
        self.name = name
        self.taken = b""
        self.said = []

    def take(self, data):
        data = data[: self.preface.num_wanted]
        if not data:
            return b""
        self.taken += data
        try:
            reply = self.preface.take(data)
        except REFUSALS:
            return b""
        self.said += [reply] if reply else []
        return reply


class Eavesdropper(RuleBasedStateMachine):
    """It reads every connection, has any number of its own, and delivers any part of any message to any side.

    A side is let in only if each byte of its preface was carried between it and its partner, on this one connection.
    """

    def __init__(self):
        super().__init__()
        self.doors, self.callers, self.heard = [], [], [MAGIC, READY, bytes(32)]

    @rule(listener=st.sampled_from(LISTENERS), proofs=st.sampled_from([PROOFS, PROOFS, OTHER_PROOFS]))
    def accept(self, listener, proofs):
        side = Side(accepting(listener, proofs), listener, proofs)
        side.said.append(side.preface.challenge)
        self.heard.append(side.preface.challenge)
        self.doors.append(side)

    @rule(
        listener=st.sampled_from(LISTENERS),
        proofs=st.sampled_from([PROOFS, PROOFS, OTHER_PROOFS]),
        name=st.sampled_from([b"p", b"q"]),
    )
    def connect(self, listener, proofs, name):
        self.callers.append(Side(connecting(listener, name, proofs), listener, proofs, name))

    @precondition(lambda self: self.doors or self.callers)
    @rule(data=st.data())
    def say(self, data):
        side = data.draw(st.sampled_from(self.doors + self.callers))
        message = data.draw(st.sampled_from(self.heard))
        start = data.draw(st.sampled_from([0, CHALLENGE_BYTES, len(READY), max(0, len(message) - PROOF_BYTES)]))
        stop = data.draw(st.sampled_from([len(message), len(message) - PROOF_BYTES, len(message) // 2]))
        self._hear(side.take(message[start : max(start, stop)]))

    @precondition(lambda self: self.doors or self.callers)
    @rule(data=st.data())
    def replay(self, data):
        """Say something of another connection where that is expected."""
        side = data.draw(st.sampled_from(self.doors + self.callers))
        fitting = [message for message in self.heard if len(message) == side.preface.num_wanted]
        if fitting:
            self._hear(side.take(data.draw(st.sampled_from(fitting))))

    @precondition(lambda self: self.doors and self.callers)
    @rule(data=st.data(), is_caller=st.booleans())
    def carry(self, data, is_caller):
        """Carry what a side has said last to another side."""
        caller, door = data.draw(st.sampled_from(self.callers)), data.draw(st.sampled_from(self.doors))
        taker, sayer = (caller, door) if is_caller else (door, caller)
        if sayer.said:
            self._hear(taker.take(sayer.said[-1]))

    @rule(listener=st.sampled_from(LISTENERS))
    def meet(self, listener):
        """Two new sides of the deployment meet undisturbed."""
        self.accept(listener, PROOFS)
        self.connect(listener, PROOFS, b"p")
        for taker, sayer in (pair := (self.callers[-1], self.doors[-1])), pair[::-1], pair:
            self._hear(taker.take(sayer.said[-1]))
        assert self.doors[-1].preface.name and self.callers[-1].preface.is_accepted

    def _hear(self, reply):
        if reply:
            self.heard.append(reply)

    @invariant()
    def who_is_let_in_has_spoken(self):
        for door in self.doors:
            if not door.preface.name:
                continue
            partners = [
                caller
                for caller in self.callers
                if caller.said == [door.taken] and caller.taken.startswith(door.said[0])
            ]
            assert len(partners) == 1
            (caller,) = partners
            assert (caller.listener, caller.proofs, caller.name) == (door.listener, door.proofs, door.preface.name)
        for caller in self.callers:
            if caller.preface.is_accepted:
                said = [caller.taken[:CHALLENGE_BYTES], caller.taken[CHALLENGE_BYTES:]]
                assert [door for door in self.doors if door.said == said and [door.taken] == caller.said]

    @invariant()
    def a_caller_is_let_in_once(self):
        let_in = [door.taken for door in self.doors if door.preface.name]
        assert len(set(let_in)) == len(let_in)


TestEavesdropper = Eavesdropper.TestCase
TestEavesdropper.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
