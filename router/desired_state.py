"""What operators asked of this router, and whom it refuses: kept by its workers for the router that comes after it.

Workers hold one message, which only routers read, and only routers can write: it is authenticated by a key that no
worker has, or one of them could give the router orders. Its version counts changes over the incarnations of routers. A
router that hears of a message of another incarnation, newer than any that it has gone on with, has been started again:
it asks for the message and goes on with it, but for what an operator has asked of it since, which wins. Nothing is on a
disk, which might not outlive its host; desired state is lost only if all workers end together with the router.
"""

import hashlib
import hmac
import logging
from collections.abc import Sequence, Set
from typing import Final

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest
from baton.proto import admin_pb2, worker_pb2
from baton.router.admission.admission import Admission
from baton.router.attempt.migration import Migration
from baton.router.attempt.poison_detector import MAX_BLAMED
from baton.router.placement.members import DECODE, MAX_WORKERS, PREFILL, Incarnation

log = logging.getLogger(__name__)


class DesiredSpeculation:
    """The mode that decode workers should be in; None until an operator sets one."""

    def __init__(self) -> None:
        self.mode: worker_pb2.SpeculationMode | None = None

    def set_mode(self, mode: worker_pb2.SpeculationMode, limits: Sequence[int]) -> None:
        """Ask for `mode`.

        Args:
            mode: a number of drafts, or auto.
            limits: the most drafts that each decode worker can make.

        Raises:
            InvalidRequest: it names no mode, or more drafts than one of them can make.
        """
        kind = mode.WhichOneof("mode")
        if kind is None or (kind == "auto" and not mode.auto):
            raise InvalidRequest("neither a number of draft tokens nor auto", field="mode")
        if kind == "num_draft_tokens" and mode.num_draft_tokens > min(limits):
            message = f"{mode.num_draft_tokens} draft tokens: this deployment was started with at most {min(limits)}"
            raise InvalidRequest(message, field="num_draft_tokens", value=mode.num_draft_tokens, limit=min(limits))
        self.mode = worker_pb2.SpeculationMode()
        self.mode.CopyFrom(mode)


MAX_VERSION: Final = 1 << 63  # no router counts so far; above it a number would not fit its field
WAIT_S: Final = 60.0  # for workers that were being emptied to be heard of again
_PARTS: Final = (
    ("speculation",),
    ("max_queue_len",),
    ("scale_num_prefill", "scale_num_decode"),
    ("drains",),
    ("blamed",),
)


class DesiredScale:
    """How many workers there should be; None until an operator has said so."""

    def __init__(self) -> None:
        self.request: admin_pb2.ScaleRequest | None = None


class DesiredState:
    """One router's. `tick` is called several times a second, on the same thread as the rest.

    Args:
        migration: has the drains, and whom deaths are blamed on.
        speculation: of the decode workers.
        admission: whose limit an operator may change.
        scale: see there.
        clock: of the router.
        incarnation: a number that no other router has; not 0.
        key: that the routers of this deployment have, and nothing else has.
    """

    def __init__(
        self,
        migration: Migration,
        speculation: DesiredSpeculation,
        admission: Admission,
        scale: DesiredScale,
        clock: Clock,
        incarnation: int,
        key: bytes,
    ) -> None:
        assert incarnation, "0 is no incarnation"
        self._incarnation = incarnation
        self._adopted_version = 0  # the newest of other incarnations that was gone on with
        self._migration = migration
        self._speculation = speculation
        self._admission = admission
        self._scale = scale
        self._clock = clock
        self._default_queue_len = admission.default
        self._awaited: dict[
            Incarnation, float
        ] = {}  # drained by a router before this one; until when they are waited for
        self._own: set[str] = set()  # what was asked of this router itself
        self._refused: dict[str, tuple[int, int]] = {}  # what is no router's, by the worker that keeps it
        self._key = key
        self._tell(self._content(), 0)

    @property
    def version(self) -> int:
        """Of what workers should keep; 0: nothing yet."""
        return self._told.version

    def tick(self) -> None:
        """Notice what has changed, and go on with drains of workers that have been heard of again."""
        now_s = self._clock.now_s()
        for incarnation, until_s in list(self._awaited.items()):
            if self._migration.drains.resume(incarnation, self._migration.config.drain_grace_s) or until_s <= now_s:
                del self._awaited[incarnation]
        content = self._content()
        changed = {name for part in _PARTS for name in part if not _equal(content, self._told, name)}
        if changed:
            self._own.update(name for part in _PARTS if changed & set(part) for name in part)
            self._tell(content, self.version + 1)

    def ended(self) -> Set[Incarnation]:
        """Who was emptied for a smaller deployment, and is gone."""
        scale = self._scale.request
        if scale is None:
            return frozenset()
        return self._migration.drains.ended({PREFILL: scale.num_prefill, DECODE: scale.num_decode})

    def answer(self, state: worker_pb2.WorkerState, reply: worker_pb2.HeartbeatReply) -> None:
        """Ask a worker for what another router left, if that is news, and otherwise give it what it lacks."""
        named = state.desired_state_incarnation, state.desired_state_version
        is_refused = self._refused.get(state.worker_id) == named
        reply.wants_desired_state = not is_refused and self._is_news(*named)
        if is_refused or (not reply.wants_desired_state and state.desired_state_version < self.version):
            reply.desired_state.CopyFrom(self._told)

    def adopt(self, kept: worker_pb2.DesiredState, worker_id: str) -> None:
        """Go on with what another router has left with a worker, if that is news and a router's."""
        self.tick()  # what was asked of this router a moment ago is its own
        if not self._is_news(kept.incarnation, kept.version):
            return
        if not hmac.compare_digest(kept.mac, self._mac(kept)):
            self._refuse(kept, worker_id)
            return
        self._adopted_version = kept.version
        if "speculation" not in self._own and kept.HasField("speculation"):
            self._speculation.mode = kept.speculation
        if "max_queue_len" not in self._own and kept.max_queue_len:
            self._admission.limit = kept.max_queue_len
        if "scale_num_decode" not in self._own and kept.scale_num_decode:
            self._scale.request = admin_pb2.ScaleRequest(
                num_prefill=kept.scale_num_prefill, num_decode=kept.scale_num_decode
            )
        if "drains" not in self._own:
            until_s = self._clock.now_s() + WAIT_S
            self._awaited = {Incarnation(one.worker_id, one.epoch): until_s for one in kept.drains[:MAX_WORKERS]}
        if "blamed" not in self._own:
            for one in kept.blamed[:MAX_BLAMED]:
                self._migration.poison_detector.resume(one.fingerprint, tuple(one.workers), self._clock.now_s())
        self._tell(self._content(), max(self.version, kept.version) + 1)

    def _is_news(self, incarnation: int, version: int) -> bool:
        return incarnation not in (0, self._incarnation) and self._adopted_version < version < MAX_VERSION

    def _refuse(self, kept: worker_pb2.DesiredState, worker_id: str) -> None:
        """Take nothing of it, and have the worker keep this router's instead."""
        named = kept.incarnation, kept.version
        if self._refused.get(worker_id) != named:
            log.warning("refused (desired_state): %s keeps one that no router of this deployment wrote", worker_id)
        self._refused.pop(worker_id, None)
        while len(self._refused) >= MAX_WORKERS:
            del self._refused[next(iter(self._refused))]
        self._refused[worker_id] = named

    def _tell(self, content: worker_pb2.DesiredState, version: int) -> None:
        content.version, content.incarnation = version, self._incarnation
        content.mac = self._mac(content)
        self._told = content

    def _mac(self, content: worker_pb2.DesiredState) -> bytes:
        rest = worker_pb2.DesiredState()
        rest.CopyFrom(content)
        rest.ClearField("mac")
        return hmac.digest(self._key, rest.SerializeToString(deterministic=True), hashlib.sha256)

    def _content(self) -> worker_pb2.DesiredState:
        limit, scale = self._admission.limit, self._scale.request or admin_pb2.ScaleRequest()
        incarnations = {*self._migration.drains.incarnations(), *self._awaited}
        return worker_pb2.DesiredState(
            speculation=self._speculation.mode,
            max_queue_len=0 if limit is None or limit == self._default_queue_len else limit,
            scale_num_prefill=scale.num_prefill,
            scale_num_decode=scale.num_decode,
            drains=[
                worker_pb2.DrainedIncarnation(worker_id=incarnation.worker_id, epoch=incarnation.epoch)
                for incarnation in sorted(
                    incarnations, key=lambda incarnation: (incarnation.worker_id, incarnation.epoch)
                )
            ],
            blamed=[
                worker_pb2.BlamedRequest(fingerprint=one.fingerprint, workers=one.workers)
                for one in self._migration.poison_detector.blamed(self._clock.now_s())
            ],
        )


def _equal(left: worker_pb2.DesiredState, right: worker_pb2.DesiredState, name: str) -> bool:
    return bool(getattr(left, name) == getattr(right, name))
