"""The Ray actor around a worker: loads the role's shell in the worker process and transports its errors.

The driver never imports a worker's code, so it does not import torch. Ray is not imported here either: `deployment`
decorates these classes, and only a worker outside the driver's host asks Ray for its address.
"""

import dataclasses
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, WorkerStartFailed, from_wire
from baton.core.telemetry.logs import configure_logging
from baton.worker.rank import RankPlace

RankShell = Callable[[WorkerConfig, RankPlace], Any]
# Each kernel launch releases the GIL, and the thread that computes steps has to wait to get it back: Python's default
# of 5 ms is a third of a step. One H200, 64 streams beside prompts: ITL p90 18 ms instead of 22.
SWITCH_INTERVAL_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class TPGroupPlace:
    """How rank 0 starts the other ranks.

    Attributes:
        load_shell: loader of a rank's shell; imports the worker's code.
        num_gpus: GPUs of each rank.
        environment: environment of its process.
        name: name of the actors, before the rank.
    """

    load_shell: Callable[[], RankShell]
    num_gpus: float
    environment: dict[str, str]
    name: str


def prefill_rank_shell() -> RankShell:
    """Return the shell of a prefill rank; imports the worker's code."""
    from baton.prefill_worker.actor import PrefillRankShell

    return PrefillRankShell


def decode_rank_shell() -> RankShell:
    """Return the shell of a decode rank; imports the worker's code."""
    from baton.decode_worker.actor import DecodeRankShell

    return DecodeRankShell


class RankActor:
    """A rank other than 0."""

    def __init__(self, config: WorkerConfig, rank_place: RankPlace, load_shell: Callable[[], RankShell]) -> None:

        config = prepare_process(config)
        try:
            self._shell = load_shell()(config, rank_place)
            freeze_heap()
        except BatonError as error:
            raise marked(error) from error

    def pid(self) -> int:
        """Return the process id; answers once the rank is loaded."""
        return int(self._shell.pid())


class RayRanks:
    """A `RankStarter` in rank 0's process: starts the other ranks as actors that it owns."""

    def __init__(self, config: WorkerConfig, place: TPGroupPlace) -> None:
        self._config = config
        self._place = place
        self._actors: list[Any] = []
        self._asked: dict[Any, int] = {}

    def start(self, rank_place: RankPlace) -> None:
        """Start the actor of this rank, in the rank's bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.get_current_placement_group()
        assert group is not None, "rank 0 is placed in its worker's group"
        actor = ray.remote(RankActor).options(
            # The epoch makes the name unique: an actor of the last incarnation may still hold its name for a moment.
            name=f"{self._place.name}-{rank_place.rank}-{rank_place.epoch:016x}",
            num_cpus=0,
            num_gpus=self._place.num_gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank_place.rank
            ),
            runtime_env={"env_vars": self._place.environment},
        )
        handle: Any = actor.remote(self._config, rank_place, self._place.load_shell)
        self._actors.append(handle)
        self._asked[handle.pid.remote()] = rank_place.rank

    def check(self) -> None:
        """Check whether the ranks could be started.

        Raises:
            BatonError: one of them could not.
        """
        import ray.exceptions

        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for reference in done:
            rank = self._asked.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                cause = error_from_ray(str(error))
                if isinstance(cause, BatonError):
                    raise cause from error
                raise WorkerStartFailed(f"rank {rank} did not start: {cause}", rank=rank) from error


class PlacementGroups:
    """The placement groups of a deployment's TP groups.

    Args:
        ray: connected ray module.
        name: name of the deployment; prefix of the groups' names.
        is_detached: whether they outlive the driver, so that the next one adopts them.
    """

    def __init__(self, ray: Any, name: str, *, is_detached: bool = False) -> None:
        self._ray = ray
        self._name = name
        self._lifetime = "detached" if is_detached else None
        self._groups: dict[str, Any] = {}

    def place(self, worker_id: str, bundles: Sequence[dict[str, float]], timeout_s: float) -> Any:
        """Make a group on one node, and return the scheduling strategy of rank 0: its first bundle.

        Raises:
            WorkerStartFailed: no node has room for it.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._groups.get(worker_id)  # from an earlier incarnation, if Ray has given the worker up
        if group is None:
            group = self._ray.util.placement_group(
                list(bundles), strategy="STRICT_PACK", name=f"{self._name}-{worker_id}", lifetime=self._lifetime
            )
        self._groups[worker_id] = group
        if not group.wait(timeout_s):
            message = f"{worker_id}: no node has room for its {len(bundles)} ranks ({dict(bundles[-1])} each)"
            raise WorkerStartFailed(message, worker_id=worker_id, num_ranks=len(bundles))
        return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)

    def adopt(self, worker_id: str) -> None:
        """Find the group of a worker that a previous driver made."""
        self._groups[worker_id] = self._ray.util.get_placement_group(f"{self._name}-{worker_id}")

    def release(self, worker_id: str) -> None:
        """Release a worker's group, if it has one."""
        group = self._groups.pop(worker_id, None)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def remove(self) -> None:
        """Release all groups."""
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)
        self._groups.clear()


NODE_ADDRESS = "<node>"  # WorkerConfig.host value that is replaced by the address of the worker's node
SEE_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # "1": Ray does not restrict which GPUs the worker sees
GPU_FILES = "nvidia[0-9]*"
_MARK = "baton-error"


class Shell(Protocol):
    """A worker in this process, as the roles' actor modules define it."""

    def ready(self) -> dict[str, object]:
        """Identity: worker_id, address, kv_address, epoch, pid."""
        ...

    def pid(self) -> int:
        """Process id."""
        ...

    def shutdown(self) -> None:
        """Stop serving."""
        ...


# Called with the worker's config and, if it has several ranks, with the starter of the other ranks.
ShellLoader = Callable[[], Callable[..., Shell]]


def prefill_shell() -> Callable[..., Shell]:
    """Return the prefill role's shell; imports the worker's code."""
    from baton.prefill_worker.actor import PrefillActorShell

    return PrefillActorShell


def decode_shell() -> Callable[..., Shell]:
    """Return the decode role's shell; imports the worker's code."""
    from baton.decode_worker.actor import DecodeActorShell

    return DecodeActorShell


class WorkerActor:
    """The actor of a worker. It serves once its constructor returns; after a restart it needs no call from the driver.

    For a worker with several ranks it is rank 0, and starts the others as `tp_group` says.
    """

    def __init__(self, config: WorkerConfig, load_shell: ShellLoader, tp_group: TPGroupPlace | None = None) -> None:
        config = prepare_process(config)
        try:
            shell = load_shell()
            # Held as long as this actor lives, because Ray ends actors that no process has a handle of.
            self._ranks = None if tp_group is None else RayRanks(config, tp_group)
            self._shell = shell(config) if self._ranks is None else shell(config, self._ranks)
            freeze_heap()
        except BatonError as error:
            raise marked(error) from error

    def ready(self) -> dict[str, object]:
        """Identity of this incarnation: worker_id, address, kv_address, epoch, pid."""
        return self._shell.ready()

    def pid(self) -> int:
        """Process id."""
        return self._shell.pid()

    def shutdown(self) -> None:
        """Stop serving."""
        self._shell.shutdown()


class PrefillActor(WorkerActor):
    """Named so that `ps` and Ray's own tools show the role."""


class DecodeActor(WorkerActor):
    """Named so that `ps` and Ray's own tools show the role."""


def prepare_process(config: WorkerConfig) -> WorkerConfig:
    """Prepare an actor's process before its code is imported: logging, and addresses and devices of its node."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logging(config.telemetry.log_format, {"worker_id": config.worker_id})
    if config.host == NODE_ADDRESS:
        config = dataclasses.replace(config, host=_node_address())
    if config.device == "cuda":
        _see_all_gpus()
    return config


def freeze_heap() -> None:
    """Exempt a started worker's objects from garbage collection, because a full collection of them takes 0.1 s."""
    gc.collect()
    gc.freeze()


def marked(error: BatonError) -> RuntimeError:
    """Encode an error as text for `error_from_ray`, because Ray passes on only the text of a constructor's error."""
    return RuntimeError(f"{_MARK} {error.to_wire()}")


def _see_all_gpus() -> None:
    """Make this worker's GPU the first and keep the host's others visible, for KV writes; call before torch loads."""
    import ray

    own = [str(gpu) for gpu in ray.get_gpu_ids()]
    if own and os.environ.get(SEE_ALL_GPUS) == "1":
        told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        every = told.split(",") if told else [str(index) for index in range(len(list(Path("/dev").glob(GPU_FILES))))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *(gpu for gpu in every if gpu not in own)])


def _node_address() -> str:
    import ray

    util: Any = ray.util  # untyped
    return str(util.get_node_ip_address())


def error_from_ray(text: str) -> BatonError | str:
    """Return the error of a worker that failed to start, if it is one of ours, else the last line of Ray's message."""
    for found in re.findall(rf"{_MARK} (\{{.*\}})\s*$", text, flags=re.MULTILINE):
        try:
            json.loads(found)
        except ValueError:
            continue
        return from_wire(found)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
