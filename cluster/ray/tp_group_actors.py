"""The ranks of one worker as Ray actors: all on one node, living and dying together.

A worker's placement group has a bundle for each rank. The deployment starts rank 0 there, which is the worker to
everybody; rank 0 starts the others, in every one of its incarnations. They belong to its process: Ray ends them when it
ends and never restarts them by themselves, so no rank of one incarnation can meet a rank of another. The group is the
deployment's, and outlives the lives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, WorkerStartFailed
from baton.worker.rank_place import RankPlace

RankShell = Callable[[WorkerConfig, RankPlace], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TPGroupPlace:
    """How rank 0 starts the others.

    Attributes:
        load_shell: of a rank; imports the worker's code.
        num_gpus: of each rank.
        environment: of its process.
        name: of the actors, before the rank.
    """

    load_shell: Callable[[], RankShell]
    num_gpus: float
    environment: dict[str, str]
    name: str


def prefill_rank_shell() -> RankShell:
    """The shell of a prefill rank; imports the worker's code."""
    from baton.prefill_worker.actor import PrefillRankShell

    return PrefillRankShell


def decode_rank_shell() -> RankShell:
    """The shell of a decode rank; imports the worker's code."""
    from baton.decode_worker.actor import DecodeRankShell

    return DecodeRankShell


class RankActor:
    """Another rank than 0."""

    def __init__(self, config: WorkerConfig, rank_place: RankPlace, load_shell: Callable[[], RankShell]) -> None:
        from baton.cluster.ray.actors import freeze_heap, marked, prepare_process

        config = prepare_process(config)
        try:
            self._shell = load_shell()(config, rank_place)
            freeze_heap()
        except BatonError as error:
            raise marked(error) from error

    def pid(self) -> int:
        """Process id; answers when the rank is loaded."""
        return int(self._shell.pid())


class RayRanks:
    """A `RankStarter`: in rank 0's process, its ranks as actors that it owns."""

    def __init__(self, config: WorkerConfig, place: TPGroupPlace) -> None:
        self._config = config
        self._place = place
        self._actors: list[Any] = []
        self._asked: dict[Any, int] = {}

    def start(self, rank_place: RankPlace) -> None:
        """Have an actor take this seat, in the bundle of its rank."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.get_current_placement_group()
        assert group is not None, "rank 0 is placed in its worker's group"
        actor = ray.remote(RankActor).options(
            # Of this incarnation: an actor of the last one may still hold its name for a moment.
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
        """Look whether they could be started.

        Raises:
            BatonError: one of them could not.
        """
        import ray.exceptions

        from baton.cluster.ray.actors import error_from_ray

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
        ray: the module, connected.
        name: of the deployment; before those of the groups.
        is_detached: they outlive the driver, and the next one adopts them.
    """

    def __init__(self, ray: Any, name: str, *, is_detached: bool = False) -> None:
        self._ray = ray
        self._name = name
        self._lifetime = "detached" if is_detached else None
        self._groups: dict[str, Any] = {}

    def place(self, worker_id: str, bundles: Sequence[dict[str, float]], timeout_s: float) -> Any:
        """The scheduling strategy of rank 0: the first bundle of a new group on one node.

        Raises:
            WorkerStartFailed: no node has room for it.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._groups.get(worker_id)  # of an incarnation before, if Ray has given the worker up
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
        """Find the one that a driver before this one has made."""
        self._groups[worker_id] = self._ray.util.get_placement_group(f"{self._name}-{worker_id}")

    def release(self, worker_id: str) -> None:
        """Give the one of a worker back, if it has one."""
        group = self._groups.pop(worker_id, None)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def remove(self) -> None:
        """Give all of them back."""
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)
        self._groups.clear()
