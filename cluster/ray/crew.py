"""The workers of a deployment as Ray actors: started, adopted, scaled, watched, restarted, ended.

A private Ray's actors belong to the driver and end with it. In a cluster they are detached and named, so that they
survive without a driver and without a head; the next driver adopts them by name. This module handles no requests and no
routing, which are the router's.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.cluster.ray.actors import (
    NODE_ADDRESS,
    SEE_ALL_GPUS,
    DecodeActor,
    PlacementGroups,
    PrefillActor,
    RankShell,
    ShellLoader,
    TPGroupPlace,
    error_from_ray,
)
from baton.cluster.ray.restarts import Restarts
from baton.cluster.ray.scaling import Scaling
from baton.cluster.ray.session import RaySession
from baton.cluster.ray.worker_watch import SilenceWatch, WorkerWatch
from baton.cluster.resolve import ModelDirectory, resolve_worker, tp_size, worker_ids
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, WorkerStartFailed
from baton.core.inside import DeploymentSecret, worker_name
from baton.core.kv_transports import sender_environment

MAX_RESTARTS = 3  # restarts of one actor by Ray itself
SHUTDOWN_CALL_S = 2.0
BUNDLE_CPUS = 0.01  # CPUs of a rank's bundle where there are no GPUs

WORKER_NAME = re.compile("(prefill|decode)-[0-9]+")  # ranks other than 0 have longer ones

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CrewRoster:
    """What the next driver must know about a crew to take over.

    Attributes:
        roles: role by worker id.
        placed_by: roles that are resources of nodes.
        per_gpu: number of workers that share a GPU.
    """

    roles: dict[str, str]
    placed_by: list[str]
    per_gpu: int

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class CrewPlan:
    """What workers are started with.

    Attributes:
        config: configuration of the deployment.
        model: resolved model directory.
        device: resolved device.
        name: name of the deployment; prefix of actor names.
        router_address: destination of heartbeats.
        secret: secret of the deployment, from which workers' keys are derived.
        shells, rank_shells: loaders of the worker code by role.
        max_restarts: restarts of one actor by Ray.
    """

    config: ServeConfig
    model: ModelDirectory
    device: str
    name: str
    router_address: str
    secret: DeploymentSecret
    shells: Mapping[str, ShellLoader]
    rank_shells: Mapping[str, Callable[[], RankShell]]
    max_restarts: int = MAX_RESTARTS


class Crew:
    """All workers of one deployment, as one driver sees them.

    Args:
        session: Ray session of the driver.
        plan: what workers are started with.
    """

    def __init__(self, session: RaySession, plan: CrewPlan) -> None:
        self._session = session
        self._ray = session.ray
        self._plan = plan
        self._is_detached = not session.is_private
        self._actors: dict[str, Any] = {}
        self._groups = PlacementGroups(session.ray, plan.name, is_detached=self._is_detached)
        self._restarts = Restarts(time.monotonic)
        self._silence = SilenceWatch(session, plan.router_address)
        self._scaling: Scaling | None = None
        self._watch: WorkerWatch | None = None
        self._placed_by: list[str] = []
        self._num_revived = 0
        self._per_gpu = 1

    @property
    def names(self) -> list[str]:
        """Ids of the existing workers."""
        return list(self._actors)

    @property
    def roster(self) -> CrewRoster:
        """Roster to hand over to the next driver."""
        assert self._scaling is not None
        return CrewRoster(roles=dict(self._scaling.roles), placed_by=self._placed_by, per_gpu=self._per_gpu)

    def start(self) -> None:
        """Begin to start every worker; see `wait_ready`.

        In a cluster, workers that a killed `baton serve` of this configuration has left are adopted: they already
        report to this router's address.
        """
        ids = worker_ids(self._plan.config) | self._left_behind()
        self._placed_by = [role for role in ("prefill", "decode") if self._session.resources.get(role, 0) >= 1]
        self._per_gpu = self._workers_per_gpu(ids) if self._plan.device == "cuda" else 1
        for worker_id, role in ids.items():
            if not (self._is_detached and self._found(worker_id, role)):
                self._start_actor(worker_id, role)
        self._follow(ids)

    def adopt(self, roster: CrewRoster) -> list[str]:
        """Adopt the workers of a previous driver, and start those that are gone. Returns the names found."""
        self._placed_by, self._per_gpu = list(roster.placed_by), roster.per_gpu
        found = []
        for worker_id, role in roster.roles.items():
            if self._found(worker_id, role):
                found.append(worker_id)
            else:
                self._start_actor(worker_id, role)
        self._follow(roster.roles)
        return found

    def _found(self, worker_id: str, role: str) -> bool:
        """Adopt a worker that another driver has started; False if there is none of that name."""
        try:
            self._actors[worker_id] = self._ray.get_actor(self._actor_name(worker_id))
        except ValueError:
            return False
        if tp_size(self._plan.config, role) > 1:
            self._groups.adopt(worker_id)
        return True

    def _left_behind(self) -> dict[str, str]:
        """Roles of workers that live in this deployment's namespace, including workers that operators scaled up to."""
        if not self._is_detached:
            return {}
        start = self._actor_name("")
        names = [str(name).removeprefix(start) for name in self._ray.util.list_named_actors() if name.startswith(start)]
        found = {name: name.partition("-")[0] for name in names if WORKER_NAME.fullmatch(name)}
        if found:
            _logger.warning(
                "%s live on from a `baton serve` that was killed, and are adopted", ", ".join(sorted(found))
            )
        return found

    def _follow(self, roles: Mapping[str, str]) -> None:
        self._scaling = Scaling(
            self._ray, self._plan.router_address, self._actors, roles, self._start_actor, self._release
        )

    def wait_ready(
        self, deadline_s: float, on_ready: Callable[[str, dict[str, Any]], None], check: Callable[[], None]
    ) -> None:
        """Wait until every worker serves.

        Args:
            deadline_s: deadline of `time.monotonic`.
            on_ready: called with each worker's id and its report.
            check: called regularly; may raise.

        Raises:
            WorkerStartFailed: a worker does not start.
        """
        pending = {actor.ready.remote(): worker_id for worker_id, actor in self._actors.items()}
        while pending:
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=0.5)
            for reference in done:
                worker_id = pending.pop(reference)
                on_ready(worker_id, self._ready_or_raise(reference, worker_id))
            check()
            if pending and time.monotonic() > deadline_s:
                names = ", ".join(sorted(pending.values()))
                message = f"{names}: not ready within {self._plan.config.start_timeout_s:.0f} s"
                raise WorkerStartFailed(message, worker_ids=sorted(pending.values()), timed_out=True)

    def _ready_or_raise(self, reference: Any, worker_id: str) -> dict[str, Any]:
        try:
            return dict(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            cause = error_from_ray(str(error))
            fields: dict[str, Any] = {"worker_id": worker_id}
            if isinstance(cause, BatonError):
                fields |= {"cause": type(cause).__name__, "cause_fields": cause.fields}
                cause = f"{type(cause).__name__}: {cause.message}"
            raise WorkerStartFailed(f"{worker_id} did not start: {cause}", **fields) from error

    def check(self) -> bool:
        """Continue scaling, and restart dead workers; return whether the actors changed. Never waits for a worker.

        Raises:
            WorkerLost: every worker of a role is dead for good.
        """
        assert self._scaling is not None
        revived = [name for name in self._restarts.due() if self._revive(name)]
        is_changed = self._scaling.step() or bool(revived)
        if is_changed or self._watch is None:
            self._watch = WorkerWatch(self._ray, self._actors, self._scaling.roles, self._died)
        self._watch.check()
        self._silence.check(self._actors)
        return is_changed

    def _died(self, worker_id: str, why: str) -> bool:
        """Handle a worker that Ray has given up; return whether it will be restarted."""
        if not self._restarts.died(worker_id):
            return False
        _logger.warning("%s is dead, and will be started again: %s", worker_id, why)
        return True

    def _revive(self, worker_id: str) -> bool:
        assert self._scaling is not None
        role = self._scaling.roles.get(worker_id)
        if role is None:
            return False
        self._num_revived += 1
        try:
            self._start_actor(worker_id, role)
        except (BatonError, ValueError, self._ray.exceptions.RayError) as error:  # ValueError: its name is still taken
            _logger.warning("%s cannot be started again now: %s", worker_id, error)
            return self._restarts.died(worker_id)
        return True

    def call_pid(self, worker_id: str, deadline_s: float) -> int:
        """Process id of a worker's current incarnation; waits for one that Ray is restarting."""
        while True:
            try:
                left_s = max(0.1, deadline_s - time.monotonic())
                return int(self._ray.get(self._actors[worker_id].pid.remote(), timeout=left_s))
            except self._ray.exceptions.ActorUnavailableError:  # between two incarnations
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def end(self) -> None:
        """End all workers."""
        if not self._ray.is_initialized():
            return
        calls = [actor.shutdown.remote() for actor in self._actors.values()]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_CALL_S)
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._groups.remove()

    def _release(self, worker_id: str) -> None:
        self._groups.release(worker_id)
        self._restarts.forget(worker_id)

    def _actor_name(self, worker_id: str) -> str:
        return f"{self._plan.name}-{worker_id}"

    def _start_actor(self, worker_id: str, role: str) -> None:
        config = self._plan.config
        worker = resolve_worker(
            config,
            self._plan.model,
            worker_id=worker_id,
            role=role,
            host="127.0.0.1" if self._session.is_private else NODE_ADDRESS,
            router_address=self._plan.router_address,
            device=self._plan.device,
            workers_per_gpu=self._per_gpu,
            tp_size=tp_size(config, role),
            key=self._plan.secret.worker_key(worker_name(role, worker_id)),
            kv_key=self._plan.secret.kv_key(),
        )
        actor = self._ray.remote(PrefillActor if role == "prefill" else DecodeActor)
        options = self._actor_options(worker_id, role)
        shell = self._plan.shells[role]
        if worker.tp_size > 1:
            tp_group = self._place_tp_group(worker_id, role, worker.tp_size, options)
            self._actors[worker_id] = actor.options(**options).remote(worker, shell, tp_group)
        else:
            self._actors[worker_id] = actor.options(**options).remote(worker, shell)

    def _workers_per_gpu(self, ids: Mapping[str, str]) -> int:
        """Number of workers per GPU: on one host workers may share a GPU, but ranks of one worker may not."""
        num_gpus = int(self._session.resources.get("GPU", 0))
        num_ranks = sum(tp_size(self._plan.config, role) for role in ids.values())
        has_tp_groups = num_ranks > len(ids)
        if num_gpus == 0 or (num_gpus < num_ranks and (has_tp_groups or not self._session.is_private)):
            what = f"{len(ids)} workers of {num_ranks} ranks" if has_tp_groups else f"{len(ids)} workers"
            raise WorkerStartFailed(f"{what} need as many GPUs; the Ray cluster has {num_gpus}", num_gpus=num_gpus)
        return -(-len(ids) // num_gpus) if not has_tp_groups else 1

    def _place_tp_group(self, worker_id: str, role: str, size: int, options: dict[str, Any]) -> TPGroupPlace:
        """Reserve room for all ranks on one node, and place rank 0's `options` there."""
        num_gpus = options["num_gpus"]
        # A bundle must hold something; on a CPU it only ties the ranks to a node.
        bundle = {"GPU": num_gpus} if num_gpus else {"CPU": BUNDLE_CPUS}
        first = bundle | options["resources"]
        timeout_s = self._plan.config.start_timeout_s
        options["scheduling_strategy"] = self._groups.place(worker_id, [first] + [bundle] * (size - 1), timeout_s)
        return TPGroupPlace(
            load_shell=self._plan.rank_shells[role],
            num_gpus=num_gpus,
            environment=options["runtime_env"]["env_vars"],
            name=options["name"],
        )

    def _actor_options(self, worker_id: str, role: str) -> dict[str, Any]:
        config = self._plan.config
        threads = str(config.worker_threads)
        environment = {
            "OMP_NUM_THREADS": threads,  # otherwise Ray sets it from num_cpus
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "NCCL_NVLS_ENABLE": "0",
            SEE_ALL_GPUS: "1",
        }
        if role == "prefill":
            environment |= sender_environment(config.transport)
        name = self._actor_name(worker_id)
        if self._num_revived and not self._is_detached:
            name += f"-{self._num_revived}"  # Ray keeps a dead actor's name as long as its driver lives
        return {
            "name": name,
            "lifetime": "detached" if self._is_detached else None,
            "num_cpus": 0,  # nothing else is scheduled beside them; threads are set explicitly
            "num_gpus": 1 / self._per_gpu if self._plan.device == "cuda" else 0,
            "resources": {role: 1} if role in self._placed_by else {},
            "max_restarts": self._plan.max_restarts,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": environment},
        }
