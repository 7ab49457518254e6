"""Restricts a private Ray to this process's certificate and token, on loopback.

Ray reads its settings from the environment, once per process, and so does every process that it starts. They are set
while a private Ray starts and reset afterwards, so that neither another Ray of this process nor other children of it
see them. The token is never in a command line and never in a file; the certificate's key is in a file that only this
account can read, because Ray accepts it in no other way.
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from baton.cluster.private_files import PRIVATE_UMASK
from baton.cluster.ray import certificates as ray_certificates

LOOPBACK: Final = "127.0.0.1"
TOKEN_VARIABLES: Final = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
SETTINGS: Final[Mapping[str, str]] = {
    "RAY_AUTH_MODE": "token",
    # Metrics ports do not check tokens. Those of Ray's agents are switched off; the autoscaler's has no switch, but -1
    # makes the autoscaler log an error and go on without it.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "RAY_worker_niceness": "0",  # Ray's default is 15, a lower priority than anything else on the host
}


@contextmanager
def closed_doors(token: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Prepare the environment for `ray.init(address="local")`; yields further options for it.

    Files that Ray's processes write are readable by this account only. Each process has a process group of its own: a
    signal for this process's group (`timeout`, a shell's `kill %1`) reaches only this process, which lets streams
    finish first. The token stays known to Ray in this process until `read_settings` is called afterwards.

    Args:
        token: token of this Ray; random.
        folder: folder for its certificate, created here. It must exist as long as Ray runs.
    """
    certificate = ray_certificates.private_settings(folder, LOOPBACK)
    settings = {**SETTINGS, **certificate, "RAY_AUTH_TOKEN": token}
    before = {name: os.environ.get(name) for name in (*settings, *TOKEN_VARIABLES)}
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.update(settings)
    # Otherwise Ray treats a loopback address as a mistake, and listens on every interface.
    constants: Any = importlib.import_module("ray._private.ray_constants")
    is_cluster = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    services: Any = importlib.import_module("ray._private.services")
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    umask = os.umask(PRIVATE_UMASK)
    try:
        read_settings()
        yield {"_node_ip_address": LOOPBACK}
    finally:
        os.umask(umask)
        services.ConsolePopen = popen
        constants.ENABLE_RAY_CLUSTER = is_cluster
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def read_settings() -> bool:
    """Make Ray read the environment again; it caches settings and token on first use.

    Returns:
        Whether it has the token that it needs.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    loader = raylet.AuthenticationTokenLoader.instance()
    loader.reset_cache()
    return os.environ.get("RAY_AUTH_MODE", "").lower() != "token" or bool(loader.has_token(ignore_auth_mode=True))


def token_header() -> tuple[tuple[str, str], ...]:
    """Return the environment's token as Ray's calls carry it; empty if the environment says that none is required."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ()
    raylet: Any = importlib.import_module("ray._raylet")
    headers: Mapping[str, str] = raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()
    return tuple((name.lower(), value) for name, value in headers.items())
