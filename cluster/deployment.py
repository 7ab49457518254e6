"""A running Baton: router, prefill and decode workers, and Ray beneath them, started and ended as one thing.

It owns every process it starts and ends all of them, whatever happens in between. It never carries a request: the
router and the workers talk to each other directly, and a worker that dies is restarted by Ray, not from here.
"""

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from baton.client.access import Access
from baton.cluster import processes
from baton.cluster.actors import (
    NODE_ADDRESS,
    SEE_ALL_GPUS,
    DecodeActor,
    PrefillActor,
    ShellLoader,
    decode_shell,
    error_from_ray,
    prefill_shell,
)
from baton.cluster.admin import as_data, fetch_status
from baton.cluster.gang_actors import (
    GangPlace,
    PlacementGroups,
    RankShell,
    decode_rank_shell,
    prefill_rank_shell,
)
from baton.cluster.progress import OnProgress, no_progress
from baton.cluster.ray_session import RaySession
from baton.cluster.resolve import (
    ModelDirectory,
    find_model,
    require_port_free,
    resolve_device,
    resolve_worker,
    tp_size,
    worker_ids,
)
from baton.cluster.router_process import RouterProcess, router_command
from baton.cluster.scaling import Scaling
from baton.cluster.worker_watch import WorkerWatch
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, ConfigInvalid, WorkerStartFailed
from baton.kvtransfer.malloc import COPY_ENVIRONMENT
from baton.proto.secure_channel import SecureChannels
from baton.router.api_keys import digest_of, new_key
from baton.router.security_flags import security_of

MAX_RESTARTS = 3
SHUTDOWN_CALL_S = 2.0
END_GRACE_S = 2.0
BUNDLE_CPUS = 0.01  # of a rank's bundle where there are no GPUs
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is started; tests put stand-ins here."""

    shells: Mapping[str, ShellLoader] = field(
        default_factory=lambda: {"prefill": prefill_shell, "decode": decode_shell}
    )
    rank_shells: Mapping[str, Callable[[], RankShell]] = field(
        default_factory=lambda: {"prefill": prefill_rank_shell, "decode": decode_rank_shell}
    )
    router_command: Callable[[ServeConfig, ModelDirectory], list[str]] = router_command


class Deployment:
    """Context manager: serving inside, nothing left behind after.

    Attributes:
        address: HOST:PORT of the gRPC front door; empty until started.
        admin_address: HOST:PORT for operators and workers; the same, unless there is an admin port.
        access: what gets in there.
        http_url: of the OpenAI-compatible one; empty until started, and without it.
        workers: what each worker said when it was ready, by worker id.
    """

    def __init__(
        self, config: ServeConfig, *, on_progress: OnProgress = no_progress, parts: Parts | None = None
    ) -> None:
        self.config = config
        self.address = ""
        self.admin_address = ""
        self._operator_key = new_key()
        self.access = Access(tls=config.tls, api_key=self._operator_key if config.admin_keys_file else "")
        self.http_url = ""
        self.workers: dict[str, dict[str, Any]] = {}
        self._on_progress = on_progress
        self._parts = parts or Parts()
        self._id = secrets.token_hex(4)
        self._actors: dict[str, Any] = {}
        self._groups: PlacementGroups | None = None
        self._ray: RaySession | None = None
        self._router: RouterProcess | None = None
        self._watch: WorkerWatch | None = None
        self._scaling: Scaling | None = None
        self._dir: Path | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """The router's status as plain data."""
        return as_data(fetch_status(self.admin_address, access=self.access))

    def worker_pids(self, timeout_s: float = 30.0) -> dict[str, int]:
        """Process id of each worker's present life; waits for workers that Ray is restarting."""
        assert self._ray is not None
        deadline_s = time.monotonic() + timeout_s
        return {name: self._call_pid(name, deadline_s) for name in self._actors}

    def router_pid(self) -> int:
        """Process id of the router."""
        assert self._router is not None
        return self._router.pid

    def kill_actor(self, worker_id: str) -> int:
        """SIGKILL a worker's process, as a crash would; Ray starts it anew. Returns the dead process id."""
        assert self._ray is not None
        assert self._ray.is_private, "only processes of this host can be killed by id"
        pid = self._call_pid(worker_id, time.monotonic() + 30.0)
        os.kill(pid, signal.SIGKILL)
        return pid

    def check(self) -> None:
        """Check that the deployment can still serve, and follow what was asked of its size.

        Raises:
            WorkerStartFailed: the router ended.
            WorkerLost: every worker of a role is dead for good. Never waits for one.
        """
        assert self._router is not None
        self._router.check()
        assert self._scaling is not None
        if self._scaling.step() or self._watch is None:
            assert self._ray is not None
            self._watch = WorkerWatch(self._ray.ray, self._actors, self._scaling.roles)
        self._watch.check()

    def close(self) -> None:
        """End everything that was started, and verify it. Safe to call twice, and after a failed start."""
        with _signals_ignored():
            if self._router is not None:
                self._router.stop()
                self._router = None
            if self._dir is None:
                return
            # Taken before Ray stops: what loses its parent is no longer found by descent. A start that was
            # interrupted may have left processes that no attribute knows of.
            started = set(processes.started_with(str(self._dir)))
            if self._ray is not None:
                self._end_actors(self._ray)
                started.update(processes.started_with(str(self._dir)))
                self._ray.close()
                self._ray = None
            left = processes.end_processes(started, grace_s=END_GRACE_S)
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None
            assert not left, f"processes {left} survived SIGKILL"

    def _start(self) -> None:
        config = self.config
        model = find_model(config.model, config.weights)
        resolve_worker(config, model, worker_id="check")
        device = resolve_device(config.device)
        for port in (config.grpc_port, config.http_port):
            if port is not None:
                require_port_free(config.host, port)
        security_of(config)
        SecureChannels(config.tls)
        deadline_s = time.monotonic() + config.start_timeout_s
        num_total = config.prefill + config.decode + 2
        self._dir = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))  # short: sockets below it have long names
        command = self._parts.router_command(config, model)
        if config.admin_keys_file:  # only this process knows the key; the router knows its digest
            command = [*command, "--operator-key-digest", digest_of(self._operator_key)]
        self._router = RouterProcess(command, self._dir)
        self._on_progress(0, num_total, "starting Ray and the router")
        self._ray = RaySession(
            config.ray_address,
            namespace=f"baton-{self._id}",
            temp_dir=self._dir,
            num_gpus=None if device == "cuda" else 0,
        )
        ports = self._router.wait_ports(deadline_s - time.monotonic())
        host = self._reachable_host(self._ray)
        self.address = f"{host}:{ports['grpc_port']}"
        self.admin_address = f"{host}:{ports.get('admin_port', ports['grpc_port'])}"
        if "http_port" in ports:
            self.http_url = f"{'https' if config.tls.is_on else 'http'}://{host}:{ports['http_port']}"
        self._on_progress(2, num_total, f"router at {self.address}; starting workers")
        self._start_actors(self._ray, model, device)
        self._wait_ready(self._ray, deadline_s, num_total)
        self._wait_known(deadline_s)
        self._on_progress(num_total, num_total, "every worker has reported to the router")

    def _reachable_host(self, session: RaySession) -> str:
        host = self.config.host
        if session.num_nodes > 1 and host in LOOPBACK:
            message = f"host: workers on other nodes cannot reach {host}; use 0.0.0.0 or this node's address"
            raise ConfigInvalid(message, keys=["host"])
        if host in ("0.0.0.0", "::"):
            return "127.0.0.1" if session.is_private else session.node_ip
        return host

    def _start_actors(self, session: RaySession, model: ModelDirectory, device: str) -> None:
        ids = worker_ids(self.config)
        per_gpu = self._workers_per_gpu(session, ids) if device == "cuda" else 1
        self._groups = PlacementGroups(session.ray, f"baton-{self._id}")
        for worker_id, role in ids.items():
            self._start_actor(session, model, device, per_gpu, worker_id, role)
        start = partial(self._start_actor, session, model, device, per_gpu)
        self._scaling = Scaling(session.ray, self.admin_address, self._actors, ids, start, self._groups.release)

    def _start_actor(
        self, session: RaySession, model: ModelDirectory, device: str, per_gpu: int, worker_id: str, role: str
    ) -> None:
        worker = resolve_worker(
            self.config,
            model,
            worker_id=worker_id,
            host="127.0.0.1" if session.is_private else NODE_ADDRESS,
            router_address=self.admin_address,
            device=device,
            workers_per_gpu=per_gpu,
            tp_size=tp_size(self.config, role),
        )
        actor = session.ray.remote(PrefillActor if role == "prefill" else DecodeActor)
        options = self._actor_options(session, worker_id, role, 1 / per_gpu if device == "cuda" else 0)
        gang = self._place_gang(worker_id, role, worker.tp_size, options) if worker.tp_size > 1 else None
        arguments = (worker, self._parts.shells[role]) if gang is None else (worker, self._parts.shells[role], gang)
        self._actors[worker_id] = actor.options(**options).remote(*arguments)

    def _workers_per_gpu(self, session: RaySession, ids: Mapping[str, str]) -> int:
        """On one host workers may share a GPU, and then its memory; ranks of one worker may not."""
        num_gpus = int(session.resources.get("GPU", 0))
        num_ranks = sum(tp_size(self.config, role) for role in ids.values())
        has_gangs = num_ranks > len(ids)
        if num_gpus == 0 or (num_gpus < num_ranks and (has_gangs or not session.is_private)):
            what = f"{len(ids)} workers of {num_ranks} ranks" if has_gangs else f"{len(ids)} workers"
            raise WorkerStartFailed(f"{what} need as many GPUs; the Ray cluster has {num_gpus}", num_gpus=num_gpus)
        return -(-len(ids) // num_gpus) if not has_gangs else 1

    def _place_gang(self, worker_id: str, role: str, size: int, options: dict[str, Any]) -> GangPlace:
        """Reserve room for all ranks on one node, and put rank 0's `options` there."""
        assert self._groups is not None
        num_gpus = options["num_gpus"]
        # A bundle must hold something; on a CPU it only ties the ranks to a node.
        bundle = {"GPU": num_gpus} if num_gpus else {"CPU": BUNDLE_CPUS}
        first = bundle | options["resources"]
        timeout_s = self.config.start_timeout_s
        options["scheduling_strategy"] = self._groups.place(worker_id, [first] + [bundle] * (size - 1), timeout_s)
        return GangPlace(
            load_shell=self._parts.rank_shells[role],
            num_gpus=num_gpus,
            environment=options["runtime_env"]["env_vars"],
            name=options["name"],
        )

    def _actor_options(self, session: RaySession, worker_id: str, role: str, num_gpus: float) -> dict[str, Any]:
        threads = str(self.config.worker_threads)
        environment = {
            "OMP_NUM_THREADS": threads,  # Ray would set it from num_cpus
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "NCCL_NVLS_ENABLE": "0",
            "RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"],
            SEE_ALL_GPUS: "1",
        }
        if role == "prefill" and self.config.transport in ("auto", "shm"):  # its writers may copy into pools
            environment |= COPY_ENVIRONMENT
        return {
            "name": f"baton-{self._id}-{worker_id}",
            "num_cpus": 0,  # nothing else is scheduled beside them; threads are set explicitly
            "num_gpus": num_gpus,
            "resources": {role: 1} if session.resources.get(role, 0) >= 1 else {},
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": environment},
        }

    def _wait_ready(self, session: RaySession, deadline_s: float, num_total: int) -> None:
        assert self._router is not None
        pending = {actor.ready.remote(): worker_id for worker_id, actor in self._actors.items()}
        while pending:
            done, _ = session.ray.wait(list(pending), num_returns=1, timeout=0.5)
            for reference in done:
                worker_id = pending.pop(reference)
                self.workers[worker_id] = _ready_or_raise(session, reference, worker_id)
                num_done = num_total - len(pending)
                self._on_progress(num_done, num_total, f"{worker_id} is ready")
            self._router.check()
            if pending and time.monotonic() > deadline_s:
                names = ", ".join(sorted(pending.values()))
                message = f"{names}: not ready within {self.config.start_timeout_s:.0f} s"
                raise WorkerStartFailed(message, worker_ids=sorted(pending.values()), timed_out=True)

    def _wait_known(self, deadline_s: float) -> None:
        """Wait until the router has heard every worker's heartbeat."""
        assert self._router is not None
        missing = set(self._actors)
        while True:
            reply = fetch_status(self.admin_address, timeout_s=5.0, access=self.access)
            missing -= {worker.state.worker_id for worker in reply.workers if worker.alive}
            if not missing:
                return
            self._router.check()
            if time.monotonic() > deadline_s:
                message = f"the router has not heard from {', '.join(sorted(missing))}"
                raise WorkerStartFailed(message, worker_ids=sorted(missing), timed_out=True)
            time.sleep(0.05)

    def _call_pid(self, worker_id: str, deadline_s: float) -> int:
        assert self._ray is not None
        ray = self._ray.ray
        while True:
            try:
                left_s = max(0.1, deadline_s - time.monotonic())
                return int(ray.get(self._actors[worker_id].pid.remote(), timeout=left_s))
            except ray.exceptions.ActorUnavailableError:  # between two lives
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def _end_actors(self, session: RaySession) -> None:
        ray = session.ray
        if not ray.is_initialized():
            return
        calls = [actor.shutdown.remote() for actor in self._actors.values()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_CALL_S)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._groups is not None:
            self._groups.remove()
            self._groups = None


def _ready_or_raise(session: RaySession, reference: Any, worker_id: str) -> dict[str, Any]:
    try:
        return dict(session.ray.get(reference))
    except session.ray.exceptions.RayError as error:
        cause = error_from_ray(str(error))
        fields: dict[str, Any] = {"worker_id": worker_id}
        if isinstance(cause, BatonError):
            fields |= {"cause": type(cause).__name__, "cause_fields": cause.fields}
            cause = f"{type(cause).__name__}: {cause.message}"
        raise WorkerStartFailed(f"{worker_id} did not start: {cause}", **fields) from error


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ending takes a few bounded seconds; a second Ctrl-C must not leave half of it behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
