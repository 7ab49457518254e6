"""The Ray actor around a worker: loads the role's shell in the worker process and carries its errors out.

The driver never imports a worker's code, so it stays free of torch. Ray is not imported here either: `deployment`
decorates these classes, and only a worker outside the driver's host asks Ray for its address.
"""

import dataclasses
import gc
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from baton.cluster.ray.tp_group_actors import RayRanks, TPGroupPlace
from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, from_wire
from baton.core.telemetry.logs import configure_logging

NODE_ADDRESS = "<node>"  # a WorkerConfig.host that becomes the address of the node Ray placed the worker on
SEE_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # "1": Ray leaves it to the worker which it sees
GPU_FILES = "nvidia[0-9]*"
_MARK = "baton-error"


class Shell(Protocol):
    """A worker in this process, as the actor modules of the roles define it."""

    def ready(self) -> dict[str, object]:
        """worker_id, address, kv_address, epoch, pid."""
        ...

    def pid(self) -> int:
        """Process id."""
        ...

    def shutdown(self) -> None:
        """Stop serving."""
        ...


# Called with the worker's config and, if it has several ranks, with the starter of the others.
ShellLoader = Callable[[], Callable[..., Shell]]


def prefill_shell() -> Callable[..., Shell]:
    """The prefill role's shell; imports the worker's code."""
    from baton.prefill_worker.actor import PrefillActorShell

    return PrefillActorShell


def decode_shell() -> Callable[..., Shell]:
    """The decode role's shell; imports the worker's code."""
    from baton.decode_worker.actor import DecodeActorShell

    return DecodeActorShell


class WorkerActor:
    """Serves when its constructor returns; a restarted one needs no call from the driver.

    Of a worker with several ranks it is rank 0, and starts the others as `tp_group` says.
    """

    def __init__(self, config: WorkerConfig, load_shell: ShellLoader, tp_group: TPGroupPlace | None = None) -> None:
        config = prepare_process(config)
        try:
            shell = load_shell()
            # Held as long as this actor lives: Ray ends actors that nobody has a handle of.
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
    """What holds for every actor, before its code is imported: addresses and devices of its node."""
    configure_logging(config.telemetry.log_format, {"worker_id": config.worker_id})
    if config.host == NODE_ADDRESS:
        config = dataclasses.replace(config, host=_node_address())
    if config.device == "cuda":
        _see_all_gpus()
    return config


def freeze_heap() -> None:
    """Take what a started worker consists of from the garbage collector: a full collection of it takes 0.1 s."""
    gc.collect()
    gc.freeze()


def marked(error: BatonError) -> RuntimeError:
    """Ray passes on the text of an error raised in a constructor, not the error; `error_from_ray` reads this one."""
    return RuntimeError(f"{_MARK} {error.to_wire()}")


def _see_all_gpus() -> None:
    """Make this worker's GPU the first, and see the others of the host, whose memory it may write. Before torch."""
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
    """What a worker said when it failed to start: its own error if it was one of ours, else Ray's last line."""
    for found in re.findall(rf"{_MARK} (\{{.*\}})\s*$", text, flags=re.MULTILINE):
        try:
            json.loads(found)
        except ValueError:
            continue
        return from_wire(found)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
