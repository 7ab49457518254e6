"""`baton serve`: start a deployment, say where it is, and keep it until a signal ends it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from baton.cluster.deployment import Deployment
from baton.cluster.outcome import ExitCode, Output
from baton.cluster.progress import show_progress
from baton.core.config import ServeConfig

CHECK_INTERVAL_S = 0.5


def serve(config: ServeConfig, output: Output) -> ExitCode:
    """Serve until SIGINT or SIGTERM; both end it in order and with 0.

    Raises:
        StartupError: a precondition does not hold, or a worker or the router failed.
        WorkerLost: a role has no worker left.
    """
    is_serving = False
    try:
        with terminable(), show_progress() as on_progress:
            with Deployment(config, on_progress=on_progress) as deployment:
                is_serving = True
                _announce(deployment, output)
                while True:
                    time.sleep(CHECK_INTERVAL_S)
                    deployment.check()
    except KeyboardInterrupt:
        output.note("baton: stopped" if is_serving else "baton: stopped before it served")
        return ExitCode.OK if is_serving else ExitCode.FAILED


def _announce(deployment: Deployment, output: Output) -> None:
    config = deployment.config
    data = {"address": deployment.address, "pid": os.getpid(), "model": config.model, "workers": deployment.workers}
    output.emit(
        data,
        f"serving {config.model} at {deployment.address}: {config.prefill} prefill, {config.decode} decode\n"
        f"try: baton generate --address {deployment.address} --prompt 'def main():'",
    )


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends like Ctrl-C: through every `with` on the way out."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
