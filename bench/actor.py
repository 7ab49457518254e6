"""Objects in processes of their own: Ray actors or, without Ray, plain spawned processes.

Calls on one object run one after the other; calls on two objects run concurrently.
"""

import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from baton.core import inside

CALL_LIMIT_S = 300.0
# Every process sees all GPUs, because CUDA IPC opens a peer's memory on the opener's own device.
ENVIRONMENT = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# A private Ray requires a token and listens on loopback only, which Ray treats as a mistake unless it is told that it
# is not part of a cluster.
LOOPBACK = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "AUTOSCALER_METRIC_PORT": "-1"}


class Remote(Protocol):
    """An object in another process."""

    def post(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call; the returned function waits for its result."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:
        """Call and wait."""
        ...

    def end(self) -> None:
        """End the object's process."""
        ...


class RayRemote:
    """A Ray actor."""

    def __init__(self, factory: Callable[..., Any], *arguments: Any) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()} | LOOPBACK)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray

        if not ray.is_initialized():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=True,
                num_cpus=4,
                _node_ip_address="127.0.0.1",
            )
        secret = inside.DeploymentSecret.of_process()
        environment = {
            **ENVIRONMENT,
            inside.ENVIRONMENT: secret.text,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        actor = ray.remote(factory)
        self._ray = ray
        self._actor = actor.options(num_cpus=1, runtime_env={"env_vars": environment}).remote(*arguments)

    def post(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call."""
        reference = getattr(self._actor, method).remote(*arguments)
        return lambda: self._ray.get(reference, timeout=CALL_LIMIT_S)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call and wait."""
        return self.post(method, *arguments)()

    def end(self) -> None:
        """End its process."""
        self._ray.kill(self._actor)  # pyright: ignore[reportArgumentType]


class SpawnedRemote:
    """A spawned process."""

    def __init__(self, factory: Callable[..., Any], *arguments: Any) -> None:
        secret = inside.DeploymentSecret.of_process()  # makes that process part of this one's deployment
        os.environ.setdefault(inside.ENVIRONMENT, secret.text)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def post(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call."""
        self._pipe.send((method, arguments))
        return self._take

    def call(self, method: str, *arguments: Any) -> Any:
        """Call and wait."""
        return self.post(method, *arguments)()

    def end(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.join()

    def _take(self) -> Any:
        if not self._pipe.poll(CALL_LIMIT_S):
            raise TimeoutError(f"no answer within {CALL_LIMIT_S} s")
        failed, value = self._pipe.recv()
        if failed:
            raise RuntimeError(value)
        return value


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served: Any = None
    problem = ""
    try:
        served = factory(*arguments)
    except Exception as error:  # noqa: BLE001  the first call says it
        problem = f"{type(error).__name__}: {error}"
    while True:
        try:
            method, values = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, problem) if problem else (False, getattr(served, method)(*values))
        except Exception as error:  # noqa: BLE001  the caller raises it
            answer = (True, f"{method}: {type(error).__name__}: {error}")
        pipe.send(answer)
