"""What the messages of prefill workers do to landings.

A message that contradicts what is known is refused and changes nothing; a repeated one gets its old answer.
"""

from collections.abc import Callable

from baton.core.errors import ProtocolError
from baton.core.kv_transports import INLINE, is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.messages import DIGEST, attempt_of, hello_problem, ranks_problem
from baton.kvtransfer.receiver.actions import ReceiverAction, ReserveWanted
from baton.kvtransfer.receiver.peers import MAX_PEERS, ReceiverPeer
from baton.kvtransfer.receiver.rules import ReceiverRules
from baton.kvtransfer.receiver.table import IncomingState, IncomingTransfer, Part, Tombstone
from baton.proto import kv_pb2

Actions = list[ReceiverAction]


class ReceiverInbox:
    """Takes control messages for one decode worker.

    Args:
        rules: its landings.
        max_capacity_len: positions of the whole pool.
        has_digest: frames are verified by digest if their sender can.
    """

    def __init__(self, rules: ReceiverRules, max_capacity_len: int, has_digest: bool) -> None:
        self._rules = rules
        self._max_capacity_len = max_capacity_len
        self._has_digest = has_digest

    def take(self, peer: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Take a message.

        Raises:
            ProtocolError: it breaks the protocol; nothing changed.
        """
        kind = control.WhichOneof("message")
        if kind == "hello":
            return self._on_hello(peer, control.hello, now_s)
        known = self._rules.peers.get(peer)
        if known is None:
            self._rules.counts.messages_refused += 1
            if kind == "reserve":
                attempt = attempt_of(control.reserve.attempt)
                return [self._rules.replies.deny(peer, attempt, kv_pb2.Deny.NO_HELLO, "no HELLO was heard")]
            return []
        known.heard_s = now_s
        handlers: dict[str, Callable[..., Actions]] = {
            "reserve": self._on_reserve,
            "commit": self._on_commit,
            "lease": self._on_lease,
            "abort": self._on_abort,
            "abort_ack": self._on_abort_ack,
            "resume": self._on_resume,
        }
        handler = handlers.get(str(kind))
        if handler is None:
            raise ProtocolError(f"a decode worker takes no {kind}", kind=str(kind))
        return handler(peer, known, getattr(control, str(kind)), now_s)

    def _on_hello(self, peer: str, hello: kv_pb2.Hello, now_s: float) -> Actions:
        """Before the proof is found to be good, nothing is known, kept, ended or said of it."""
        rules = self._rules
        known = rules.peers.get(peer)
        if not rules.proofs.has_challenge(hello, rules.epoch, peer, now_s):
            return [rules.replies.challenge(peer, hello, now_s)]
        if not rules.proofs.knows_key(hello):
            rules.counts.hellos_unproved += 1
            return [rules.replies.unproved(peer, hello)]
        if known is not None and known.epoch == hello.epoch and hello.sent_ns <= known.hello_ns:
            rules.counts.hellos_unproved += hello.sent_ns == known.hello_ns
            return []  # overtaken, or said once more by whoever heard it
        if known is not None and hello.epoch in known.retired and now_s - known.heard_s <= rules.config.lease_s:
            # overtaken by the HELLO of a later incarnation; unless it is the other way round, which silence shows
            return []
        refused = hello_problem(hello.version, hello.layout, rules.layout) or ranks_problem(hello, rules.layout)
        if not refused and rules.peers.size_of(hello.epoch) not in (0, hello.tp_size):
            refused = f"rank {hello.tp_rank} says there are {hello.tp_size} ranks, another said otherwise"
        if not refused and known is None and rules.peers.is_full:
            refused = f"{MAX_PEERS} prefill workers are connected already"
        actions: Actions = []
        if known is not None and known.epoch != hello.epoch:
            actions += self._end_incarnation(known.epoch, now_s)
        if refused:
            rules.peers.leave(peer)
        else:
            has_digest = self._has_digest and DIGEST in hello.capabilities
            ranks = (hello.tp_rank, hello.tp_size)
            said = hello.host_id, hello.incarnation_file
            rules.peers.meet(peer, ReceiverPeer(hello.epoch, *ranks, has_digest, *said, now_s, hello.sent_ns))
        return [*actions, rules.replies.hello(peer, hello, refused, now_s)]

    def _end_incarnation(self, p_epoch: int, now_s: float) -> Actions:
        """A prefill worker came back as another incarnation. That the old one is dead for good is not said by that."""
        actions: Actions = []
        for incoming in self._rules.table:
            if incoming.p_epoch == p_epoch and incoming.state is not IncomingState.COMPLETE:
                actions += self._rules.fence(incoming, "the prefill worker restarted", now_s)
        return actions

    def _on_reserve(self, peer: str, known: ReceiverPeer, reserve: kv_pb2.Reserve, now_s: float) -> Actions:
        rules = self._rules
        attempt = attempt_of(reserve.attempt)
        if reserve.epoch != known.epoch or reserve.peer_epoch != rules.epoch:
            rules.counts.messages_refused += 1
            return []
        if known.rank != 0 or max(1, reserve.tp_size) != known.size:
            raise ProtocolError(f"rank {known.rank} of {known.size} reserves for {reserve.tp_size}")
        incoming = rules.table.get(attempt)
        if incoming is not None:
            return self._repeated_reserve(peer, incoming, reserve, now_s)
        problem = self._reserve_problem(peer, attempt, reserve)
        if problem:
            return problem
        actions: Actions = []
        for other in rules.table.others_of(attempt):
            actions += rules.fence(other, f"superseded by attempt {attempt.attempt}", now_s)
        incoming = self._new_incoming(peer, known, attempt, reserve, now_s)
        rules.table.add(incoming, now_s)
        return [
            *actions,
            ReserveWanted(
                attempt=attempt,
                prompt_len=incoming.prompt_len,
                capacity_len=incoming.capacity_len,
                deadline_s=incoming.deadline_s,
                p_epoch=incoming.p_epoch,
                tp_size=len(incoming.parts),
                lane=incoming.lane,
            ),
        ]

    def _reserve_problem(self, peer: str, attempt: AttemptKey, reserve: kv_pb2.Reserve) -> Actions:
        """The DENY that a new RESERVE gets; empty if it may be granted."""
        table, replies = self._rules.table, self._rules.replies
        tombstone = table.tombstone(attempt)
        if tombstone is not None:
            return [replies.deny(peer, attempt, tombstone.deny_reason, tombstone.reason or "it has ended")]
        if attempt.attempt < table.highest_attempt(attempt.request_id):
            return [replies.deny(peer, attempt, kv_pb2.Deny.STALE, "a later attempt was seen")]
        if not replies.serves(reserve.lane or INLINE):
            return [replies.deny(peer, attempt, kv_pb2.Deny.LANE, f"no lane {reserve.lane[:32]!r} is served here")]
        if not 0 < reserve.prompt_len <= reserve.capacity_len <= self._max_capacity_len:
            return [replies.deny_sizes(peer, attempt, reserve, self._max_capacity_len)]
        if len(table) >= self._rules.config.ring_slots:
            return [replies.deny(peer, attempt, kv_pb2.Deny.BUSY, f"{len(table)} incoming transfers are here")]
        return []

    def _new_incoming(
        self, peer: str, known: ReceiverPeer, attempt: AttemptKey, reserve: kv_pb2.Reserve, now_s: float
    ) -> IncomingTransfer:
        num_layers = self._rules.layout.num_layers
        parts = [Part(rank, LastSign(now_s), [0] * num_layers) for rank in range(known.size)]
        return IncomingTransfer(
            attempt=attempt,
            epoch=self._rules.epoch,
            peer=peer,
            p_epoch=known.epoch,
            lane=reserve.lane or INLINE,
            prompt_len=reserve.prompt_len,
            capacity_len=reserve.capacity_len,
            deadline_s=now_s + reserve.wait_ms / 1e3,
            coverage=self._rules.coverage(reserve.prompt_len),
            parts=parts,
            # A layer that keeps nothing of so short a prompt is whole already.
            digests=[None if layer.span(reserve.prompt_len).count else 0 for layer in self._rules.layout.layers],
        )

    def _repeated_reserve(
        self, peer: str, incoming: IncomingTransfer, reserve: kv_pb2.Reserve, now_s: float
    ) -> Actions:
        replies = self._rules.replies
        if incoming.p_epoch != reserve.epoch:
            why = "another incarnation of the prefill worker has it"
            return [replies.deny(peer, incoming.attempt, kv_pb2.Deny.STALE, why)]
        match incoming.state:
            case IncomingState.WANTED:
                incoming.parts[0].renewed.renew(now_s)
                return []
            case IncomingState.FILLING:
                incoming.parts[0].renewed.renew(now_s)
                return [replies.grant(incoming)]
            case IncomingState.COMPLETE if incoming.epoch == self._rules.epoch:
                return [replies.grant(incoming)]
            case IncomingState.QUARANTINED if incoming.epoch == self._rules.epoch:
                # The GRANT was lost. Denied, its sender would forget that it never told the other ranks of it, and
                # they, who do not know this worker, could never be asked.
                return [*replies.abort_part(incoming, incoming.parts[0])]
            case _:
                why = incoming.reason or "another incarnation of this decode worker had it"
                return [replies.deny(peer, incoming.attempt, kv_pb2.Deny.STALE, why)]

    def _on_commit(self, peer: str, known: ReceiverPeer, commit: kv_pb2.Commit, now_s: float) -> Actions:
        rules = self._rules
        if commit.epoch != rules.epoch:
            rules.counts.messages_refused += 1
            return []
        incoming = rules.table.by_id(commit.incoming_id)
        if incoming is None or incoming.state is IncomingState.QUARANTINED:
            return self._late_commit(peer, known, incoming, commit)
        if incoming.attempt != attempt_of(commit.attempt):
            raise ProtocolError(
                f"a COMMIT of {attempt_of(commit.attempt)} for the incoming transfer of {incoming.attempt}"
            )
        part = self._part(incoming, known)
        if incoming.state is IncomingState.COMPLETE:
            return [rules.replies.ack(peer, rules.epoch, commit.incoming_id)]
        part.renewed.renew(now_s)
        num_layers = rules.layout.num_layers
        num_digests = num_layers if known.has_digest else len(commit.layer_digests) and num_layers
        manifest = (commit.prompt_len, commit.num_layers, len(commit.layer_digests), commit.tp_rank, commit.tp_size)
        if manifest != (incoming.prompt_len, num_layers, num_digests, known.rank, known.size):
            return rules.fence(incoming, f"the COMMIT does not describe this incoming transfer: {manifest}", now_s)
        if part.commit is None or commit.round > part.commit.round:
            part.commit = commit
            part.is_commit_void = False
            # Frames may be on their way behind the COMMIT; only what is still missing then is asked for again.
            part.nack_due_s = now_s + rules.config.heartbeat_s / 2
            return rules.complete_if_whole(incoming, now_s)
        if commit.round == part.commit.round == part.nacked_round:
            return rules.nack(incoming, part)
        return []

    def _late_commit(
        self, peer: str, known: ReceiverPeer, incoming: IncomingTransfer | None, commit: kv_pb2.Commit
    ) -> Actions:
        replies, epoch = self._rules.replies, self._rules.epoch
        tombstone = self._rules.table.tombstone_by_id(commit.incoming_id)
        if tombstone is not None and tombstone.was_complete:
            return [replies.ack(peer, epoch, commit.incoming_id)]
        reason = (
            tombstone.reason if tombstone else incoming.reason if incoming else "there is no such incoming transfer"
        )
        attempt = attempt_of(commit.attempt)
        return [replies.abort(peer, attempt, epoch, commit.incoming_id, known.epoch, reason)]

    def _on_lease(self, peer: str, known: ReceiverPeer, lease: kv_pb2.Lease, now_s: float) -> Actions:
        if lease.epoch != known.epoch:
            return []
        for incoming_id in lease.incoming_ids:
            incoming = self._rules.table.by_id(incoming_id)
            if incoming is not None and incoming.p_epoch == lease.epoch and known.rank < len(incoming.parts):
                incoming.parts[known.rank].renewed.renew(now_s)
        return []

    def _on_abort(self, peer: str, known: ReceiverPeer, abort: kv_pb2.Abort, now_s: float) -> Actions:
        rules = self._rules
        attempt = attempt_of(abort.attempt)
        incoming = rules.table.get(attempt)
        ack = rules.replies.abort_ack(peer, attempt, abort.epoch, abort.incoming_id)
        if incoming is None or incoming.epoch != abort.epoch:
            if abort.epoch == rules.epoch and incoming is None and rules.table.tombstone(attempt) is None:
                # The RESERVE may still be on its way; it must not be taken for a new one.
                rules.table.bury(Tombstone(attempt, 0, False, now_s, abort.reason))
            return [ack]  # also for lives gone by: what they left behind is known here, and this is not
        if incoming.p_epoch != known.epoch or known.rank >= len(incoming.parts):
            raise ProtocolError(f"an ABORT of {attempt} by another prefill worker")
        if abort.incoming_id not in (0, incoming.incoming_id) and incoming.incoming_id:
            raise ProtocolError(f"an ABORT of incoming transfer {abort.incoming_id} for {incoming.incoming_id}")
        if incoming.state is IncomingState.COMPLETE:
            return [ack]  # the sequence has all it needs
        is_held = incoming.state is not IncomingState.WANTED
        if is_held:
            incoming.ack_to.add(peer)
        reason = f"the prefill worker gave up: {abort.reason}"
        return [*rules.fence(incoming, reason, now_s, by_peer=True), *([] if is_held else [ack])]

    def _on_abort_ack(self, peer: str, known: ReceiverPeer, ack: kv_pb2.AbortAck, now_s: float) -> Actions:
        """Evidence, if a transfer waits for it. It stays true for ever, so it may come late and by any connection."""
        incoming = self._rules.table.get(attempt_of(ack.attempt))
        if incoming is None or incoming.state is not IncomingState.QUARANTINED or not is_one_sided(incoming.lane):
            return []
        is_meant = (ack.epoch, ack.incoming_id) == (incoming.epoch, incoming.incoming_id)
        if not is_meant or not ack.drained or ack.peer_epoch != incoming.p_epoch or ack.tp_rank >= len(incoming.parts):
            self._rules.counts.messages_refused += 1
            return []
        for part in incoming.parts:
            part.is_drained |= part.rank == ack.tp_rank or (ack.tp_rank == 0 and ack.all_ranks)
        return self._rules.drain_if_quiet(incoming, now_s)

    def _on_resume(self, peer: str, known: ReceiverPeer, resume: kv_pb2.Resume, now_s: float) -> Actions:
        rules = self._rules
        incoming = rules.table.by_id(resume.incoming_id) if resume.epoch == rules.epoch else None
        if incoming is None or incoming.state is IncomingState.QUARANTINED:
            tombstone = rules.table.tombstone_by_id(resume.incoming_id) if resume.epoch == rules.epoch else None
            gone = incoming or tombstone
            if gone is None or (tombstone is not None and tombstone.was_complete):
                return []
            where = (gone.attempt, rules.epoch, resume.incoming_id, known.epoch)
            return [rules.replies.abort(peer, *where, gone.reason)]
        if incoming.state is not IncomingState.FILLING:
            return []
        part = self._part(incoming, known)
        part.renewed.renew(now_s)
        part.write_off(resume.next_seq)
        return [rules.replies.have(peer, incoming, part, rules.gaps(incoming, part), resume.round)]

    def _part(self, incoming: IncomingTransfer, known: ReceiverPeer) -> Part:
        if known.epoch != incoming.p_epoch or known.rank >= len(incoming.parts):
            raise ProtocolError(
                "a message about an incoming transfer of another prefill worker", incoming_id=incoming.incoming_id
            )
        return incoming.parts[known.rank]
