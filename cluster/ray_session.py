"""Connecting to Ray, or starting a private one: versions, environment and ends are decided here."""

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from baton.core.errors import RayUnavailable, RayVersionMismatch

TESTED_RAY = "2.60.0"
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours travels through it; Ray's minimum is 75 MiB
CONNECT_TIMEOUT_S = 3.0


def prepare_environment() -> None:
    """Say explicitly what Ray would otherwise decide by what it finds.

    Plain `ray.init()` turns token authentication on and writes ~/.ray/auth_token when RAY_AUTH_MODE is unset.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What Ray will do by default soon; without it every start prints a warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def import_ray() -> ModuleType:
    """The ray module, in the version Baton is tested with.

    Raises:
        RayUnavailable: it is not installed.
        RayVersionMismatch: it is another version.
    """
    try:
        import ray
    except ImportError as error:
        raise RayUnavailable(f"ray is not installed: {error}") from error
    if ray.__version__ != TESTED_RAY:
        message = f"ray {ray.__version__} is installed; Baton is tested with {TESTED_RAY}"
        raise RayVersionMismatch(message, found=ray.__version__, tested=TESTED_RAY)
    return ray  # type: ignore[no-any-return, unused-ignore]


class RaySession:
    """This process as a Ray driver, from construction to `close`.

    Args:
        address: `local` starts a private Ray; `auto` or HOST:PORT joins a running one.
        namespace: of the actors.
        temp_dir: where a private Ray keeps its sockets and logs; short, because socket paths are.
        num_gpus: GPUs a private Ray offers; None counts them.

    Raises:
        RayUnavailable: not installed, or no cluster answers.
        RayVersionMismatch: this version, or the cluster's, is not the tested one.
    """

    def __init__(self, address: str, *, namespace: str, temp_dir: Path, num_gpus: int | None) -> None:
        prepare_environment()
        self.ray: Any = import_ray()
        self.is_private = address == "local"
        options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.is_private:
            options |= {
                "_temp_dir": str(temp_dir),
                "include_dashboard": False,
                "num_cpus": os.cpu_count() or 1,
                "num_gpus": num_gpus,
                "object_store_memory": OBJECT_STORE_BYTES,
                # Idle workers started in advance would only delay ours.
                "_system_config": {"prestart_worker_first_driver": False, "enable_worker_prestart": False},
            }
        else:
            _require_listener(address)
        self._connect(address, options)
        self.resources: dict[str, float] = self.ray.cluster_resources()

    def _connect(self, address: str, options: dict[str, Any]) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(address=address, **options)
        except (ConnectionError, TimeoutError, ValueError) as error:
            raise RayUnavailable(f"no Ray cluster at {address}: {error}", address=address) from error
        except RuntimeError as error:
            if "ersion mismatch" in str(error):
                raise RayVersionMismatch(f"the cluster at {address}: {error}", tested=TESTED_RAY) from error
            raise RayUnavailable(f"Ray did not start: {error}", address=address) from error
        except SystemExit as error:  # from the SIGTERM handler that ray.init installs
            raise KeyboardInterrupt from error
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, handler)

    @property
    def node_ip(self) -> str:
        """This host's address, as Ray sees it."""
        return str(self.ray.util.get_node_ip_address())

    @property
    def num_nodes(self) -> int:
        """Nodes that are alive."""
        return sum(1 for node in self.ray.nodes() if node["Alive"])

    def close(self) -> None:
        """Leave the cluster; a private one ends with it."""
        self.ray.shutdown()


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise RayUnavailable(f"{address!r} is neither auto, local nor HOST:PORT", address=address)
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        socket.create_connection((host, int(port)), deadline_s - time.monotonic()).close()
    except OSError as error:
        raise RayUnavailable(f"nothing answers at {address}: {error}", address=address) from error
