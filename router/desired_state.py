"""The desired state: operators' requests and refused request fingerprints, kept by workers for the next router.

Workers hold it as one message that only routers read and write. It carries an HMAC under a key that no worker has;
otherwise a worker could give the router orders. Its version counts changes across incarnations of routers.

A router that hears of another incarnation's message, newer than any it has adopted, knows that it was restarted. It
asks for that message and adopts it, except for what an operator has since requested of this router. Nothing is stored
on disk, because a disk might not outlive its host. The desired state is lost only if all workers end together with the
router.
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
    """The speculation mode that decode workers should use; None until an operator sets one."""

    def __init__(self) -> None:
        self.mode: worker_pb2.SpeculationMode | None = None

    def set_mode(self, mode: worker_pb2.SpeculationMode, limits: Sequence[int]) -> None:
        """Set the desired mode.

        Args:
            mode: a number of draft tokens, or auto.
            limits: each decode worker's maximum number of draft tokens.

        Raises:
            InvalidRequest: the message has no mode, or requests more draft tokens than a worker can make.
        """
        kind = mode.WhichOneof("mode")
        if kind is None or (kind == "auto" and not mode.auto):
            raise InvalidRequest("neither a number of draft tokens nor auto", field="mode")
        if kind == "num_draft_tokens" and mode.num_draft_tokens > min(limits):
            message = f"{mode.num_draft_tokens} draft tokens: this deployment was started with at most {min(limits)}"
            raise InvalidRequest(message, field="num_draft_tokens", value=mode.num_draft_tokens, limit=min(limits))
        self.mode = worker_pb2.SpeculationMode()
        self.mode.CopyFrom(mode)


MAX_VERSION: Final = 1 << 63  # no router counts this far; a larger number would overflow its field
WAIT_S: Final = 60.0  # how long to wait for a heartbeat of workers that an earlier router was draining
_PARTS: Final = (
    ("speculation",),
    ("max_queue_len",),
    ("scale_num_prefill", "scale_num_decode"),
    ("drains",),
    ("blamed",),
)


class DesiredScale:
    """The number of workers there should be; None until an operator sets it."""

    def __init__(self) -> None:
        self.request: admin_pb2.ScaleRequest | None = None


class DesiredState:
    """A router's desired state. `tick` runs several times a second, on the same thread as the other methods.

    Args:
        migration: holds the drains and the requests blamed for deaths.
        speculation: desired mode of the decode workers.
        admission: holds the request limit, which an operator may change.
        scale: desired number of workers.
        clock: the router's clock.
        incarnation: a number that no other router has; not 0.
        key: secret shared by the routers of this deployment and unknown to anything else.
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
        self._adopted_version = 0  # newest version adopted from another incarnation
        self._migration = migration
        self._speculation = speculation
        self._admission = admission
        self._scale = scale
        self._clock = clock
        self._default_queue_len = admission.default
        self._awaited: dict[Incarnation, float] = {}  # drained by an earlier router; until when to wait for each
        self._own: set[str] = set()  # fields that operators set at this router itself
        self._refused: dict[str, tuple[int, int]] = {}  # (incarnation, version) of forged states, by worker
        self._key = key
        self._tell(self._content(), 0)

    @property
    def version(self) -> int:
        """Version of the state that workers should keep; 0 if there is nothing to keep yet."""
        return self._told.version

    def tick(self) -> None:
        """Publish changes as a new version, and resume drains of workers that have been heard of again."""
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
        """Incarnations that were drained for a smaller deployment and are gone."""
        scale = self._scale.request
        if scale is None:
            return frozenset()
        return self._migration.drains.ended({PREFILL: scale.num_prefill, DECODE: scale.num_decode})

    def answer(self, state: worker_pb2.WorkerState, reply: worker_pb2.HeartbeatReply) -> None:
        """Ask a worker for another router's state if it is newer; otherwise send the worker the state it lacks."""
        named = state.desired_state_incarnation, state.desired_state_version
        is_refused = self._refused.get(state.worker_id) == named
        reply.wants_desired_state = not is_refused and self._is_news(*named)
        if is_refused or (not reply.wants_desired_state and state.desired_state_version < self.version):
            reply.desired_state.CopyFrom(self._told)

    def adopt(self, kept: worker_pb2.DesiredState, worker_id: str) -> None:
        """Adopt the state that another router left with a worker, if it is newer and authentic."""
        self.tick()  # a request made of this router a moment ago takes precedence
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
        """Adopt nothing from a forged state, and have the worker keep this router's instead."""
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
