"""A running deployment: router, prefill and decode workers, and Ray beneath them, started and ended together.

It owns every process that it starts and ends all of them, whatever happens in between. It carries no requests: the
router and the workers talk to each other directly. With a private Ray, this process is the driver, and the workers are
its own. In a cluster a supervisor drives Ray, as a child process beside the router, so that the router survives the
loss of Ray's head.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from baton.client.access import Access
from baton.cluster import leftovers, private_files, processes
from baton.cluster.access import using
from baton.cluster.admin import as_data, fetch_status
from baton.cluster.log_tail import LogTail
from baton.cluster.ray.actors import (
    RankShell,
    ShellLoader,
    decode_rank_shell,
    decode_shell,
    prefill_rank_shell,
    prefill_shell,
)
from baton.cluster.ray.crew import MAX_RESTARTS, Crew, CrewPlan
from baton.cluster.ray.session import RaySession
from baton.cluster.resolve import (
    ModelDirectory,
    find_model,
    num_prefill,
    require_startable,
    resolve_device,
    resolve_worker,
    visible_gpus,
    worker_ids,
)
from baton.cluster.router_process import RouterProcess, router_command
from baton.cluster.start_progress import FETCH_S, StartProgress, StartWatch
from baton.cluster.supervisor_process import Order, SupervisorProcess
from baton.cluster.undertaker import Undertaker
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, ConfigInvalid, WorkerStartFailed
from baton.core.inside import DeploymentSecret
from baton.proto import worker_pb2
from baton.proto.secure_channel import SecureChannels
from baton.router.access.api_keys import digest_of, new_key, read_keys
from baton.router.access.flags import security_of

END_GRACE_S = 2.0
CHECK_INTERVAL_S = 0.5
# Secrets of deployments in clusters, by name. Not in a folder that the cluster file copies to other hosts: Ray restarts
# itself on all of them if such a folder changes on the head.
SECRETS = Path.home() / ".baton_secrets"
OLD_SECRETS = Path.home() / ".baton"  # where versions before kept them; workers that they started still run
RESTART_POLL_S = 0.05
DRAIN_MARGIN_S = 3.0  # time for the router to end after its grace period
RAY_FOLDER = "ray"  # Ray opens its folder to all accounts; the one around it is private

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Factories:
    """What is started; tests substitute their own."""

    shells: Mapping[str, ShellLoader] = field(
        default_factory=lambda: {"prefill": prefill_shell, "decode": decode_shell}
    )
    rank_shells: Mapping[str, Callable[[], RankShell]] = field(
        default_factory=lambda: {"prefill": prefill_rank_shell, "decode": decode_rank_shell}
    )
    router_command: Callable[[ServeConfig, ModelDirectory], list[str]] = router_command


class Deployment:
    """Context manager: serves inside, leaves nothing behind.

    Attributes:
        address: HOST:PORT of the gRPC endpoint for clients; empty until started.
        admin_address: HOST:PORT for operators and workers; the same as `address`, unless there is an admin port.
        access: access to `admin_address`.
        http_url: URL of the OpenAI-compatible endpoint; empty until started, and if there is none.
        metrics_url: URL of `metrics_port`; likewise.
        workers: what each worker reported when it was ready, by worker id.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        on_progress: StartProgress | None = None,
        on_log: Callable[[str], None] | None = None,
        parts: Factories | None = None,
    ) -> None:
        self.config = config
        self.address = ""
        self.admin_address = ""
        self._operator_key = new_key()
        self.access = Access(tls=config.tls, api_key=self._operator_key if config.admin_keys_file else "")
        self.http_url = self.metrics_url = ""
        self.workers: dict[str, dict[str, Any]] = {}
        self._on_progress = on_progress or StartProgress()
        self._start_watch: StartWatch | None = None
        self._on_log = on_log
        self._log_tail: LogTail | None = None
        self._parts = parts or Factories()
        self._name = _name_of(config)
        self._secret: DeploymentSecret | None = None
        self._new_secret_file: Path | None = None  # made by this start, and not needed before it has met Ray
        self._ray: RaySession | None = None
        self._crew: Crew | None = None
        self._supervisor: SupervisorProcess | None = None
        self._router: RouterProcess | None = None
        self._dir: Path | None = None
        self._undertaker: Undertaker | None = None
        self._keeps_logs = self._drops_logs = False

    def __enter__(self) -> Self:
        try:
            with self._logs_named():
                self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def secret(self) -> DeploymentSecret:
        """Secret that every process of this deployment can prove to know."""
        assert self._secret is not None, "it is started"
        return self._secret

    def status(self) -> dict[str, Any]:
        """Return the router's status as plain data."""
        return as_data(fetch_status(self.admin_address, access=self.access))

    def worker_pids(self, timeout_s: float = 30.0) -> dict[str, int]:
        """Process id of each worker's current incarnation; waits for workers that Ray is restarting."""
        assert self._crew is not None, "only of a private Ray"
        deadline_s = time.monotonic() + timeout_s
        return {name: self._crew.call_pid(name, deadline_s) for name in self._crew.names}

    def router_pid(self) -> int:
        """Process id of the router."""
        assert self._router is not None
        pid = self._router.pid
        assert pid is not None, "it is being started again"
        return pid

    def kill_actor(self, worker_id: str) -> int:
        """Send SIGKILL to a worker's process, like a crash; Ray restarts it. Returns the dead process id."""
        assert self._crew is not None, "only processes of this host can be killed by id"
        pid = self._crew.call_pid(worker_id, time.monotonic() + 30.0)
        os.kill(pid, signal.SIGKILL)
        return pid

    def check(self) -> None:
        """Check that the deployment can still serve, and follow changes of its desired size. Never waits for a worker.

        Raises:
            RouterLost: the router ends more often than it may be restarted.
            RayLost: a process of the private Ray has ended.
            WorkerLost: every worker of a role is dead for good.
        """
        assert self._router is not None
        with self._logs_named():
            assert self._undertaker is not None
            self._undertaker.check()
            self._router.check()
            self._check_workers()

    def wait(self, timeout_s: float, wake: int | None = None) -> None:
        """Wait until there may be something to `check`: a process ended, `wake` is readable, or the time is over."""
        pids = [process.pid for process in (self._router, self._supervisor) if process is not None]
        found = [pid for pid in pids if pid is not None]
        if len(found) < len(pids):  # one is about to be restarted
            timeout_s = min(timeout_s, RESTART_POLL_S)
        processes.wait_for_end([*found, *(self._ray.pids() if self._ray is not None else ())], timeout_s, wake)

    def drain(self) -> None:
        """Let open streams finish, or end after `shutdown_grace_s`; nothing new is accepted. Call `close` afterwards.

        Raises:
            RayLost: see `check`.
            WorkerLost: see `check`.
        """
        assert self._router is not None
        self._router.drain()
        deadline_s = time.monotonic() + self.config.shutdown_grace_s + DRAIN_MARGIN_S
        while not self._router.has_ended and time.monotonic() < deadline_s:
            with self._logs_named():
                self._check_workers()
            self.wait(CHECK_INTERVAL_S)

    def _check_workers(self) -> None:
        if self._supervisor is not None:
            self._supervisor.check()
        if self._ray is not None:
            self._ray.check()
        if self._crew is not None:
            with using(self.access):
                self._crew.check()

    @contextmanager
    def _logs_named(self) -> Iterator[None]:
        """Make any error raised here state where its logs will be, and keep these logs."""
        try:
            yield
        except Exception as error:
            if self._dir is not None:
                self._keeps_logs = private_files.is_worth_logs(error)
                self._drops_logs = not self._keeps_logs
                if self._drops_logs:
                    raise
                if isinstance(error, BatonError):
                    private_files.say_where(error, self._dir)
            raise

    def _end_files(self, folder: Path, has_died: bool) -> None:
        if self._keeps_logs:
            private_files.keep_logs(folder)
        elif has_died and not self._drops_logs:
            _logger.warning("a worker died in this run; the logs are in %s", private_files.keep_logs(folder))
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End everything that was started, and verify that. Safe to call twice, and after a failed start.

        Logs are kept where something failed or died (`private_files`).
        """
        with _signals_ignored():
            if self._router is not None:
                self._router.stop()
                self._router = None
            if self._supervisor is not None:
                self._supervisor.stop()
                self._supervisor = None
            if self._new_secret_file is not None and not self.address:  # no worker knows it
                self._new_secret_file.unlink(missing_ok=True)
            self._new_secret_file = None
            if self._dir is None:
                return
            # Collected before Ray stops: processes that lose their parent are not found by descent any more. An
            # interrupted start may have left processes that no attribute refers to.
            has_died = private_files.worker_died(self._dir)
            started = set(processes.started_with(str(self._dir)))
            lost = set(self._ray.lost().values()) if self._ray is not None else set()
            if self._crew is not None:
                if not lost:  # otherwise the call reaches no actor
                    self._crew.end()
                self._crew = None
                started.update(processes.started_with(str(self._dir)))
            if "gcs_server" in lost:  # processes that call it would wait
                processes.end_processes(started, grace_s=0.0)
            if self._ray is not None:
                self._ray.close()
                self._ray = None
            left = processes.end_processes(started, grace_s=END_GRACE_S)
            if self._log_tail is not None:
                self._log_tail.close()
                self._log_tail = None
            if self._undertaker is not None:
                self._undertaker.dismiss()
                self._undertaker = None
            self._end_files(self._dir, has_died)
            leftovers.sweep_memory()
            self._dir = None
            assert not left, f"processes {left} survived SIGKILL"

    def _start(self) -> None:
        config = self.config
        model = find_model(config.model, is_dummy=config.is_dummy)
        resolve_worker(config, model, worker_id="check")
        device = resolve_device(config.device)
        num_gpus = visible_gpus() if config.ray_address == "local" and device == "cuda" else None
        config = self.config = config.model_copy(update={"prefill": num_prefill(config, num_gpus)})
        require_startable(config)
        security_of(config)
        SecureChannels(config.tls)
        _require_curve_key(config)
        _require_keys(config)
        deadline_s = time.monotonic() + config.start_timeout_s
        ids = worker_ids(config)
        num_total = len(ids) + 2
        self._start_watch = StartWatch(list(ids), self._fetch_starting, self._on_progress.worker, time.monotonic)
        leftovers.sweep()
        self._dir = private_files.make_folder()
        self._undertaker = Undertaker(self._dir)
        if self._on_log is not None:
            self._log_tail = LogTail(self._dir, self._on_log)
        kept = _secret_file_of(config, self._name)
        self._new_secret_file = kept if kept is not None and not kept.exists() else None
        secret = self._secret = _secret_of(config, kept)
        self._router = RouterProcess(lambda ports: self._router_command(model, ports), self._dir, secret)
        self._on_progress(0, num_total, "starting Ray and the router")
        if config.ray_address == "local":
            self._start_private(model, device, deadline_s, num_total)
        else:
            self._start_in_cluster(deadline_s, num_total)
        self._wait_known(deadline_s)
        self._on_progress(num_total, num_total, "every worker has reported to the router")

    def _router_command(self, model: ModelDirectory, ports: Mapping[str, int]) -> list[str]:
        """Build the router's command; `ports` are those of the previous router, which clients and workers know."""
        command = self._parts.router_command(self.config.model_copy(update=dict(ports)), model)
        if self.config.admin_keys_file:  # only this process knows the key; the router gets its digest
            command = [*command, "--operator-key-digest", digest_of(self._operator_key)]
        if ports and self.workers and self._parts.router_command is router_command:
            command = [*command, "--follows-workers", str(len(self.workers))]
        return command

    def _start_private(self, model: ModelDirectory, device: str, deadline_s: float, num_total: int) -> None:
        assert self._router is not None
        assert self._dir is not None
        self._ray = RaySession(
            "local", namespace=self._name, temp_dir=self._dir / RAY_FOLDER, num_gpus=None if device == "cuda" else 0
        )
        ports = self._router.wait_ports(deadline_s - time.monotonic())
        self._is_at("127.0.0.1" if self.config.host in ("0.0.0.0", "::") else self.config.host, ports)
        self._on_progress(2, num_total, self._starting(device))
        plan = CrewPlan(
            config=self.config,
            model=model,
            device=device,
            name=self._name,
            router_address=self.admin_address,
            secret=self.secret,
            shells=self._parts.shells,
            rank_shells=self._parts.rank_shells,
            max_restarts=MAX_RESTARTS,
        )
        self._crew = Crew(self._ray, plan)
        self._crew.start()

        def on_ready(worker_id: str, ready: dict[str, Any]) -> None:
            self._is_ready(ready, num_total)

        self._crew.wait_ready(deadline_s, on_ready, self._check_start)

    def _check_start(self) -> None:
        assert self._router is not None
        assert self._start_watch is not None
        self._router.check()
        if self._ray is not None:
            self._ray.check()
        if self.address:
            self._start_watch.poll()

    def _fetch_starting(self) -> Iterable[worker_pb2.StartingWorker]:
        return fetch_status(self.admin_address, timeout_s=FETCH_S, access=self.access).starting

    def _start_in_cluster(self, deadline_s: float, num_total: int) -> None:
        assert self._router is not None
        assert self._dir is not None
        ports = self._router.wait_ports(deadline_s - time.monotonic())

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "session" and not self.address:
                self._is_at(event["host"], ports)
                self._on_progress(2, num_total, self._starting(self.config.device))
            if event["event"] == "ready":
                self._is_ready(event["worker"], num_total)

        order = Order(
            config=self.config,
            name=self._name,
            access=self.access,
            admin_port=ports.get("admin_port", ports["grpc_port"]),
            directory=self._dir,
            secret=self.secret,
        )
        self._supervisor = SupervisorProcess(order, on_event)
        self._supervisor.start(max(1.0, deadline_s - time.monotonic()))
        self._supervisor.wait_serving(deadline_s + END_GRACE_S, self._check_start)

    def _is_at(self, host: str, ports: Mapping[str, int]) -> None:
        self.address = f"{host}:{ports['grpc_port']}"
        self.admin_address = f"{host}:{ports.get('admin_port', ports['grpc_port'])}"
        scheme = "https" if self.config.tls.is_on else "http"
        if "http_port" in ports:
            self.http_url = f"{scheme}://{host}:{ports['http_port']}"
        if "metrics_port" in ports:
            self.metrics_url = f"{scheme}://{host}:{ports['metrics_port']}/metrics"

    def _starting(self, device: str) -> str:
        first = ", which compile their kernels at a machine's first start" if device == "cuda" else ""
        return f"router at {self.address}; starting workers{first}"

    def _is_ready(self, ready: dict[str, Any], num_total: int) -> None:
        worker_id = str(ready["worker_id"])
        self.workers[worker_id] = ready
        self._on_progress(2 + len(self.workers), num_total, f"{worker_id} is ready")

    def _wait_known(self, deadline_s: float) -> None:
        """Wait until the router has received a heartbeat of every worker."""
        assert self._router is not None
        missing = set(self.workers)
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


def _name_of(config: ServeConfig) -> str:
    """Name of the deployment, and of its namespace in Ray.

    In a cluster, the next `baton serve` with the same configuration on this host has the same name: it finds the
    workers that a killed `baton serve` has left, and they find its router. If the router's port is arbitrary, they
    could not, so the name is random.
    """
    if not _is_found_again(config):
        return f"baton-{secrets.token_hex(4)}"
    said = json.dumps([socket.gethostname(), config.model_dump(mode="json")], sort_keys=True)
    return f"baton-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def _is_found_again(config: ServeConfig) -> bool:
    """Whether the next `baton serve` may adopt the workers of a killed one."""
    port = config.grpc_port if config.admin_port is None else config.admin_port
    return config.ray_address != "local" and port != 0


def _require_keys(config: ServeConfig) -> None:
    """Check that the files of keys admit anyone now. A router that runs goes on without keys: its last was revoked.

    Raises:
        ConfigInvalid: a file cannot be used, or has no key that is in force.
    """
    for name in ("api_keys_file", "admin_keys_file"):
        path = getattr(config, name)
        if path and not any(entry.expires_s > time.time() for entry in read_keys(Path(path))):
            make = f"make one with `baton keys create NAME --tenant TENANT --file {path}`"
            raise ConfigInvalid(
                f"{name} {path} has no key that is in force, so every call would be refused; {make}", keys=[name]
            )


def _require_curve_key(config: ServeConfig) -> None:
    """Check that the workers of this host will have the key pair that is to encrypt KV, before any is started.

    Raises:
        ConfigInvalid: they will not have it.
    """
    if not config.kv_curve_key_file or config.ray_address != "local":
        return
    from baton.kvtransfer.transports.zmq_sockets import CurveKeys

    try:
        CurveKeys(Path(config.kv_curve_key_file))
    except ConfigInvalid as error:
        raise ConfigInvalid(f"kv_{error.message}", keys=["kv_curve_key_file"]) from error


def _secret_file_of(config: ServeConfig, name: str) -> Path | None:
    """File of this account that keeps a new secret, if the next `baton serve` that adopts the workers needs it."""
    is_given = config.secret_file or DeploymentSecret.given() is not None
    if is_given or not _is_found_again(config):
        return None
    kept, old = (folder / f"{name}.secret" for folder in (SECRETS, OLD_SECRETS))
    return old if old.exists() and not kept.exists() else kept


def _secret_of(config: ServeConfig, kept: Path | None) -> DeploymentSecret:
    """Return the secret of the file that is named, else the one this process was started with, else a new one.

    Args:
        config: configuration of the deployment.
        kept: file that keeps a new one.
    """
    if config.secret_file:
        return DeploymentSecret.of_file(Path(config.secret_file))
    if kept is None:
        return DeploymentSecret.given() or DeploymentSecret.new()
    SECRETS.mkdir(mode=0o700, parents=True, exist_ok=True)
    return DeploymentSecret.of_file(kept)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals while ending, which takes a few bounded seconds; a second Ctrl-C must not interrupt it halfway."""
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
