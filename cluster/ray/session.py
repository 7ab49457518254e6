"""Connects to Ray or starts a private one; checks versions, prepares the environment, and ends what it started."""

import importlib
import logging
import os
import re
import secrets
import signal
import socket
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from baton.cluster.processes import is_alive
from baton.cluster.ray.private_ray import closed_doors, read_settings, token_header
from baton.core.errors import RayAccessRefused, RayLost, RayUnavailable, RayVersionMismatch

TESTED_RAY = "2.60.0"
OBJECT_STORE_BYTES = 80 << 20  # Baton sends nothing through it; Ray's minimum is 75 MiB
CONNECT_TIMEOUT_S = 5.0
MAX_STARTS = 3  # attempts to start a private Ray, whose head has been seen to hang silently at start
MAX_SAID_LEN = 500  # the rest is advice or a traceback, which Ray's logs have
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
VITAL = ("gcs_server", "raylet")
_HANGS = ("Timed out waiting for file", "timed out during startup")
_logger = logging.getLogger(__name__)
TOKEN_CODES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)  # `ray.init` reports what is missing
NO_TOKEN = "a Ray cluster asks for its token: say RAY_AUTH_TOKEN_PATH=FILE, as where it was started"
TLS_WANTED = "RAY_USE_TLS=1 with RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT, as where it was started"
ACCEPT_OPEN = "accept one that is open to all with RAY_AUTH_MODE=disabled"
RAYLET_PID = "RAY_RAYLET_PID"
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # an empty request is a valid one


def prepare_environment() -> None:
    """Set explicitly what Ray would otherwise infer: that a cluster requires its token.

    Without this setting a client would also accept a cluster without a token. A private Ray has a token of its own
    (`private_ray`).
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    _prepare_any()


def _prepare_any() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default; without it every start prints a warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def import_ray() -> ModuleType:
    """Import ray, in the version that Baton is tested with.

    Raises:
        RayUnavailable: it is not installed, or cannot be loaded.
        RayVersionMismatch: it is another version.
    """
    try:
        import ray
    except (ImportError, OSError) as error:
        raise RayUnavailable(f"ray cannot be imported: {error}") from error
    found = str(getattr(ray, "__version__", "of no version"))
    if found != TESTED_RAY:
        message = f"ray {found} is installed; Baton is tested with {TESTED_RAY}"
        raise RayVersionMismatch(message, found=found, tested=TESTED_RAY)
    return ray  # type: ignore[no-any-return, unused-ignore]


def say_as_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Log what Ray tells its driver. Ray itself would print it on stdout, in colours.

    Args:
        data: Ray's messages, in `lines`.
        ignore_prefix: argument of Ray's print function.
    """
    for message in data["lines"]:
        text = " ".join(_COLOURS.sub("", str(message)).split())
        _logger.warning("Ray says: %s", text if len(text) <= MAX_SAID_LEN else f"{text[:MAX_SAID_LEN]}...")


class RaySession:
    """This process as a Ray driver, from construction to `close`.

    Args:
        address: `local` starts a private Ray; `auto` or HOST:PORT joins a running one.
        namespace: namespace of the actors.
        temp_dir: folder for a private Ray's sockets and logs; short, because socket paths are limited. Its certificate
            goes to a new folder beside it, which the caller removes.
        num_gpus: GPUs that a private Ray offers; None: counted.

    Raises:
        RayAccessRefused: the environment lacks the cluster's token or certificate.
        RayUnavailable: Ray is not installed, no cluster answers, or the cluster is open to all.
        RayVersionMismatch: this version, or the cluster's, is not the tested one.
    """

    def __init__(self, address: str, *, namespace: str, temp_dir: Path, num_gpus: int | None) -> None:
        self.is_private = address == "local"
        _prepare_any() if self.is_private else prepare_environment()
        # The process whose end Ray equates with its raylet's, once it has lost that. Unset, it is the parent, so with a
        # parent of pid 1 (systemd, a container's init) Ray would end this process silently. Read when Ray is imported;
        # a raylet sets its own pid for its workers.
        os.environ[RAYLET_PID] = str(os.getpid())
        self.ray: Any = import_ray()
        importlib.import_module("ray._private.worker").print_to_stdstream = say_as_log  # type: ignore[attr-defined]
        options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.is_private:
            options |= {
                "_temp_dir": str(temp_dir),
                "include_dashboard": False,
                "num_cpus": os.cpu_count() or 1,
                "num_gpus": num_gpus,
                "object_store_memory": OBJECT_STORE_BYTES,
                # Idle workers that are started in advance would only delay Baton's.
                "_system_config": {"prestart_worker_first_driver": False, "enable_worker_prestart": False},
            }
            certificate = temp_dir.with_name(f"{temp_dir.name}_tls")  # Ray opens its own folder to all
            with closed_doors(secrets.token_hex(32), certificate) as more:
                self._connect(address, options | more)
        else:
            known = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
            require_ray(known)
            require_token(address)
            if known != "auto":
                require_token_taken(known)
            self._connect(address, options)
            try:
                require_token_there(self.address)
            except RayUnavailable:
                self.close()
                raise
        self.resources: dict[str, float] = self.ray.cluster_resources()

    def _connect(self, address: str, options: dict[str, Any]) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._init(address, options)
        except (ConnectionError, TimeoutError, ValueError) as error:
            raise RayUnavailable(f"no Ray cluster at {address} takes us: {error}", address=address) from error
        except RuntimeError as error:
            if "ersion mismatch" in str(error):
                raise RayVersionMismatch(f"the cluster at {address}: {error}", tested=TESTED_RAY) from error
            raise RayUnavailable(f"Ray did not start: {error}", address=address) from error
        except SystemExit as error:  # raised by the SIGTERM handler that ray.init installs
            raise KeyboardInterrupt from error
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, handler)

    def _init(self, address: str, options: dict[str, Any]) -> None:
        for left in reversed(range(MAX_STARTS if self.is_private else 1)):
            try:
                self.ray.init(address=address, **options)
                return
            except Exception as error:
                if not any(text in str(error) for text in _HANGS):
                    raise
                _end_half_begun(error)
                if not left:
                    raise RuntimeError(str(error)) from error
                _logger.warning("Ray's head hangs as it starts, and is started again: %s", error)
            self.ray.shutdown()

    @property
    def node_ip(self) -> str:
        """Address of this host, as Ray sees it."""
        return str(self.ray.util.get_node_ip_address())

    @property
    def address(self) -> str:
        """HOST:PORT of the head, resolved even if `auto` was given, which would not find a lost head again."""
        return str(self.ray.get_runtime_context().gcs_address)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are alive."""
        return sum(1 for node in self.ray.nodes() if node["Alive"])

    def pid_of(self, actor: Any) -> int | None:
        """Return the process id, on its node, of an actor that Ray considers alive."""
        from ray._private import state  # `ray.util.state` needs the dashboard, which a head may not have

        found: dict[str, Any] = state.actors(actor_id=actor._actor_id.hex())
        return int(found["Pid"]) if found.get("State") == "ALIVE" else None

    def pids(self) -> dict[int, str]:
        """Process ids and kinds of a private Ray's vital processes, without which no worker lives long."""
        node = self.ray._private.worker._global_node if self.is_private else None
        if node is None:
            return {}
        return {one.process.pid: kind for kind in VITAL for one in node.all_processes.get(kind, ())}

    def lost(self) -> dict[int, str]:
        """Vital processes that have ended."""
        return {pid: kind for pid, kind in self.pids().items() if not is_alive(pid)}

    def check(self) -> None:
        """Check that a private Ray is complete.

        Raises:
            RayLost: one of its vital processes has ended; that cannot be repaired.
        """
        for pid, kind in self.lost().items():
            message = (
                f"the {kind} (process {pid}) of this deployment's private Ray has ended: no worker can be started "
                "any more, so the deployment ends"
            )
            raise RayLost(message, process=kind, pid=pid)

    def close(self) -> None:
        """Leave the cluster; a private Ray ends with that, and its token is forgotten."""
        self.ray.shutdown()
        read_settings()


def _end_half_begun(error: BaseException) -> None:
    """End the processes of a node that failed to start, which only the frames of its error still refer to."""
    trace = error.__traceback__
    while trace is not None:
        node: Any = trace.tb_frame.f_locals.get("self")
        if hasattr(node, "kill_all_processes"):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            return
        trace = trace.tb_next


def require_ray(address: str) -> None:
    """Check that Ray answers: for any other listener `ray.init` would wait a minute, ignoring signals.

    Raises:
        RayAccessRefused: it requires a certificate, and the environment names none, or one of another authority.
        RayUnavailable: it is not an address, or no Ray answers there.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise RayUnavailable(f"{address!r} is neither auto, local nor HOST:PORT", address=address)
    try:
        code = _answer_without_token(address)
    except UnicodeError as error:
        raise RayUnavailable(f"{address!r} is no address", address=address) from error
    if code not in (grpc.StatusCode.OK, *TOKEN_CODES):
        if _speaks_tls(host, int(port)):
            which = "not the one of RAY_TLS_CA_CERT, or not for this address" if _has_tls() else "and none is given"
            message = f"the Ray cluster at {address} shows and asks for a certificate, {which}: say {TLS_WANTED}"
            raise RayAccessRefused(message, address=address)
        name = "no answer" if code is None else code.name
        why = " (with RAY_USE_TLS=1: it may speak no TLS)" if _has_tls() else ""
        raise RayUnavailable(f"no Ray cluster answers at {address}: {name}{why}", address=address)


def require_token(address: str) -> None:
    """Check that the environment has a token for a cluster, or says that the cluster requires none.

    Raises:
        RayAccessRefused: it does neither.
    """
    if not read_settings():
        raise RayAccessRefused(f"{NO_TOKEN}, or {ACCEPT_OPEN}", address=address)


def require_token_taken(address: str) -> None:
    """Check that the cluster accepts the environment's token; Ray's own clients would wait for that.

    Raises:
        RayAccessRefused: the cluster has another token.
    """
    token = token_header()
    if token and _answer_to(address, token) in TOKEN_CODES:
        raise RayAccessRefused(f"the Ray cluster at {address} refuses this token: {NO_TOKEN}", address=address)


def require_token_there(address: str) -> None:
    """Refuse a cluster that requires no token, unless the environment says that this is intended.

    Raises:
        RayUnavailable: the cluster requires no token.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "disabled" and (
        _answer_without_token(address) is grpc.StatusCode.OK
    ):
        message = (
            f"the Ray cluster at {address} asks for no token: whatever reaches its ports runs code as its user. Start "
            f"it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, or {ACCEPT_OPEN}"
        )
        raise RayUnavailable(message, address=address)


def _answer_without_token(address: str) -> grpc.StatusCode | None:
    return _answer_to(address, ())


def _answer_to(address: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode | None:
    """Status code of the head at `address` for a call with the environment's certificate and this metadata."""
    options = (("grpc.enable_http_proxy", 0),)
    credentials = _credentials()
    try:
        with (
            grpc.insecure_channel(address, options=options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=options)
        ) as channel:
            channel.unary_unary(CHECK_ALIVE, bytes, bytes)(b"", timeout=CONNECT_TIMEOUT_S, metadata=metadata)
    except grpc.RpcError as error:
        return error.code() if isinstance(error, grpc.Call) else None
    return grpc.StatusCode.OK


def _has_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # as Ray reads it


def _credentials() -> grpc.ChannelCredentials | None:
    """Channel credentials from the environment, as Ray reads it.

    Raises:
        RayAccessRefused: a file is not named or cannot be read; Ray would end the process.
    """
    if not _has_tls():
        return None
    read = []
    for name in ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT"):
        try:
            read.append(Path(os.environ[name]).read_bytes())
        except (KeyError, OSError) as error:
            why = "is not there" if isinstance(error, KeyError) else str(error)
            raise RayAccessRefused(f"RAY_USE_TLS is set, and {name}: {why}; say {TLS_WANTED}") from error
    return grpc.ssl_channel_credentials(*read)


def _speaks_tls(host: str, port: int) -> bool:
    """Return whether a listener shows a certificate, of any authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as plain, context.wrap_socket(plain):
            return True
    except (OSError, UnicodeError):
        return False
